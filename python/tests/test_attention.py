"""foci.attention and what belongs to it, against float64 formulas."""

import numpy as np
import pytest
from formulas import attention, causal, near, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foci


def arrays(seed, b=2, h=4, hk=2, n=7, m=9, d=8, dv=5, dtype=np.float32):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    return draw(b, h, n, d), draw(b, hk, m, d), draw(b, hk, m, dv)


def test_softmax_of_grouped_heads():
    q, k, v = arrays(0)
    near(foci.attention(q, k, v), attention(q, k, v))


@settings(max_examples=150, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_options(data):
    draw = data.draw
    b, hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n, m = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    d, dv = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    q, k, v = arrays(draw(st.integers(0, 10**6)), b, hk * group, hk, n, m, d, dv)
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    options, same, allowed = {}, {}, np.ones((b, hk * group, n, m), bool)
    options["score"] = same["score"] = draw(st.sampled_from(["dot", "cosine", "l2", "additive"]))
    if same["score"] == "l2":
        options["gamma"] = same["gamma"] = 0.25
    if same["score"] == "additive":
        options["score_w"] = rng.standard_normal(d).astype(np.float32)
        same["score_w"] = options["score_w"].astype(np.float64)
    scale = draw(st.sampled_from([None, 0.5, -0.7, "heads"]))
    if scale == "heads":
        scale = rng.standard_normal(hk * group).tolist()
    if scale is not None:
        options["scale"] = same["scale"] = scale
    if draw(st.booleans()):
        options["softcap"] = same["softcap"] = 3.0
    options["normalizer"] = same["normalizer"] = draw(
        st.sampled_from(["softmax", "sparsemax", "entmax", "topk"]))
    if same["normalizer"] == "topk":
        options["top_k"] = same["top"] = draw(st.integers(1, m))
    if same["normalizer"] == "entmax":
        options["alpha"] = same["alpha"] = draw(st.sampled_from([1.25, 1.5, 1.75]))
    if draw(st.booleans()):
        align = draw(st.sampled_from(["bottom-right", "top-left"]))
        options["causal"] = align
        allowed &= causal(n, m, align)
    if draw(st.booleans()):
        left, right = draw(st.integers(0, m)), draw(st.integers(0, m))
        options["window"] = (left, right)
        p = np.arange(n)[:, None] + (m - n)
        j = np.arange(m)[None]
        allowed &= (j >= p - left) & (j <= p + right)
    if draw(st.booleans()):
        lengths = rng.integers(0, m + 1, b)
        options["key_lengths"] = lengths
        allowed &= (np.arange(m)[None] < lengths[:, None])[:, None, None]
    if draw(st.booleans()):
        keep = rng.random((b, 1, n, m)) < 0.7
        options["keep"] = keep
        allowed &= keep
    bias = 0.0
    if draw(st.booleans()):
        options["bias"] = rng.standard_normal((hk * group, n, m)).astype(np.float32)
        bias = bias + options["bias"].astype(np.float64)
    if draw(st.booleans()):
        options["slopes"] = rng.random(hk * group).astype(np.float32)
        distance = np.abs(np.arange(n)[:, None] + (m - n) - np.arange(m)[None])
        bias = bias - options["slopes"].astype(np.float64)[:, None, None] * distance
    if draw(st.booleans()):
        reach = draw(st.integers(1, 9))
        options["table1d"] = rng.standard_normal((hk * group, 2 * reach + 1)).astype(np.float32)
        offset = np.arange(m)[None] - (np.arange(n)[:, None] + (m - n))
        bias = bias + options["table1d"].astype(np.float64)[:, np.clip(offset, -reach, reach) +
                                                            reach]
    want = weights(q, k, bias=bias, allowed=allowed, **same)
    out = foci.attention(q, k, v, statistics=["entropy", "coverage", "max_weight", "support"],
                         **options)
    # Near a threshold float32 scores decide otherwise than float64 ones; weights there are small,
    # but for top-k, where a choice may differ: scores that tie to rounding are left out.
    if same["normalizer"] == "topk":
        s = np.where(allowed, foci_scores(q, k, bias, same), -np.inf)
        ranked = -np.sort(-s, -1)
        top = same["top"]
        if top < m:
            with np.errstate(invalid="ignore"):
                gap = ranked[..., top - 1] - ranked[..., top]
            if (gap[np.isfinite(gap)] < 1e-4).any():
                return
    sharp = 2e-5 if same["normalizer"] in ("softmax", "topk") else 2e-4
    values = np.repeat(v.astype(np.float64), group, 1)
    near(out.y, want @ values, sharp)
    near(out.weights(), want, sharp)
    near(out.coverage, want.sum(2), sharp)
    near(out.max_weight, want.max(-1), sharp)


def foci_scores(q, k, bias, same):
    from formulas import scores

    options = {x: y for x, y in same.items() if x not in ("normalizer", "top", "alpha")}
    return scores(q, k, **options) + bias


def test_entropy_is_that_of_the_weights():
    q, k, v = arrays(3, n=20, m=30)
    for normalizer in ("softmax", "sparsemax", "entmax", "topk"):
        more = {"top_k": 5} if normalizer == "topk" else {}
        out = foci.attention(q, k, v, normalizer=normalizer, statistics="entropy", **more)
        p = out.weights().astype(np.float64)
        want = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
        assert np.abs(out.entropy - want).max() < 2e-5


def test_strided_views_are_read_where_they_lie():
    rng = np.random.default_rng(4)
    joint = rng.standard_normal((2, 7, 3, 4, 8)).astype(np.float32)  # [B, N, qkv, H, D]
    q, k, v = (joint[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    near(foci.attention(q, k, v), attention(q, k, v))
    reversed_keys = foci.attention(q, k[:, :, ::-1], v[:, :, ::-1])
    near(reversed_keys, attention(q, k, v))
    frozen = q.copy()
    frozen.flags.writeable = False
    near(foci.attention(frozen, k, v), attention(q, k, v))


def test_half_precision_in_half_precision_out():
    q, k, v = arrays(5, dtype=np.float16)
    y = foci.attention(q, k, v)
    assert y.dtype == np.float16
    near(y, attention(q, k, v), 2e-3)


def test_packed_sequences_equal_their_members():
    q, k, v = arrays(6, b=1, n=12, m=12, h=2)
    ids = np.array([[3] * 5 + [8] * 7], np.int64)
    packed = foci.attention(q, k, v, q_segments=ids, k_segments=ids, causal=True)
    for part in (slice(0, 5), slice(5, 12)):
        alone = foci.attention(q[:, :, part], k[:, :, part], v[:, :, part], causal=True)
        assert (packed[:, :, part] == alone).all()


def test_results_live_longer_than_the_call():
    q, k, v = arrays(7)
    out = foci.attention(q, k, v, statistics="coverage")
    y, coverage = out.y, out.coverage
    before = y.copy(), coverage.copy()
    del out, q, k, v
    for seed in range(20):
        foci.attention(*arrays(seed))
    assert (y == before[0]).all() and (coverage == before[1]).all()


def test_exact_weights_of_chosen_rows():
    q, k, v = arrays(8)
    want = weights(q, k, allowed=causal(7, 9))
    near(foci.weights(q, k, rows=[1, -1], heads=[3], causal=True), want[:, [3]][:, :, [1, -1]])
    with pytest.raises(ValueError, match="rows: 7 arrived"):
        foci.weights(q, k, rows=[7])


def numeric_gradient(f, x, step=1e-6):
    x = x.astype(np.float64)
    g = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        keep = x[i]
        x[i] = keep + step
        above = f(x)
        x[i] = keep - step
        g[i] = (above - f(x)) / (2 * step)
        x[i] = keep
    return g


def test_gradients_against_finite_differences_of_the_formula():
    q, k, v = arrays(9, b=1, h=2, hk=1, n=3, m=4, d=3, dv=2)
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((2, 3, 4)).astype(np.float32)
    dy = rng.standard_normal((1, 2, 3, 2)).astype(np.float32)
    got = foci.attention_backward(dy, q, k, v, bias=bias, scale=0.6,
                                  wanted=["dq", "dk", "dv", "dbias", "dscale"])

    def loss(q=q, k=k, v=v, bias=bias, scale=0.6):
        return (attention(q, k, v, bias=bias, scale=scale) * dy).sum()

    near(got["dq"], numeric_gradient(lambda x: loss(q=x), q))
    near(got["dk"], numeric_gradient(lambda x: loss(k=x), k))
    near(got["dv"], numeric_gradient(lambda x: loss(v=x), v))
    near(got["dbias"], numeric_gradient(lambda x: loss(bias=x), bias))
    near(got["dscale"], numeric_gradient(lambda x: loss(scale=x[0]), np.array([0.6])), 1e-4)


def test_the_gradient_of_entmaxs_alpha():
    q, k, v = arrays(9, b=1, h=2, hk=1, n=3, m=4, d=3, dv=2)
    dy = np.random.default_rng(1).standard_normal((1, 2, 3, 2)).astype(np.float32)

    def loss(alpha):
        return (attention(q, k, v, normalizer="entmax", alpha=np.reshape(alpha, (-1, 1, 1))) *
                dy).sum()

    for alpha in ([1.25, 1.75], [1.5]):
        given = alpha if len(alpha) > 1 else alpha[0]
        out = foci.attention(q, k, v, normalizer="entmax", alpha=given, statistics=["row_stat"])
        near(out.y, attention(q, k, v, normalizer="entmax", alpha=np.reshape(alpha, (-1, 1, 1))))
        want = numeric_gradient(loss, np.array(alpha))
        near(out.backward(dy, wanted=["dalpha"])["dalpha"], want, 1e-4)
        near(foci.attention_backward(dy, q, k, v, normalizer="entmax", alpha=given,
                                     wanted=["dalpha"])["dalpha"], want, 1e-4)
    assert foci.Spec(normalizer="entmax", alpha=[1.25, 1.75]).to_dict()["normalizer"] == {
        "kind": "entmax", "alpha": [1.25, 1.75]}
    with pytest.raises(ValueError, match="alpha: 3 numbers arrived for 2 query heads"):
        foci.attention(q, k, v, normalizer="entmax", alpha=[1.5, 1.5, 1.5])
    with pytest.raises(ValueError, match=r"alpha\[1\]: 0.5 given"):
        foci.Spec(normalizer="entmax", alpha=[1.5, 0.5])


def test_outputs_give_gradients_without_a_second_forward():
    q, k, v = arrays(10)
    out = foci.attention(q, k, v, causal=True, statistics="entropy")
    dy = np.ones_like(out.y)
    want = foci.attention_backward(dy, q, k, v, causal=True)
    got = out.backward(dy)
    assert all((got[name] == want[name]).all() for name in ("dq", "dk", "dv"))
    through = out.backward(dy, dentropy=np.ones_like(out.entropy))
    assert (through["dq"] != want["dq"]).any() and (through["dv"] == want["dv"]).all()


def test_empty_arrays():
    q, k, v = arrays(11, n=0)
    assert foci.attention(q, k, v).shape == (2, 4, 0, 5)
    q, k, v = arrays(11, m=0)
    assert (foci.attention(q, k, v) == 0).all()


def test_the_spec_is_a_value():
    spec = foci.Spec(causal=True, window=(3, 0), normalizer="entmax", alpha=1.25, scale=[1, 2],
                     dropout=0.1, dropout_seed=5, relative2d=(2, 3))
    import pickle

    assert foci.Spec.from_json(spec.to_json()) == spec == pickle.loads(pickle.dumps(spec))
    assert eval(repr(spec), {"Spec": foci.Spec}) == spec
    assert hash(spec) == hash(foci.Spec.from_json(spec.to_dict()))
    assert spec.replace(normalizer="softmax") == foci.Spec(
        causal=True, window=(3, 0), scale=[1, 2], dropout=0.1, dropout_seed=5, relative2d=(2, 3))
    assert spec.replace(dropout=None, window=None) == foci.Spec(
        causal=True, normalizer="entmax", alpha=1.25, scale=[1, 2], relative2d=(2, 3))
    assert spec.replace(alpha=1.5).to_dict()["normalizer"]["alpha"] == 1.5
    assert spec.tensors == ("table2d",)
    assert repr(foci.Spec()) == "Spec()"
    with pytest.raises(AttributeError):
        spec.scale = 2


def test_a_spec_serves_many_calls():
    q, k, v = arrays(12)
    spec = foci.Spec(causal=True)
    assert (foci.attention(q, k, v, spec) == foci.attention(q, k, v, causal=True)).all()
    with pytest.raises(TypeError, match="causal: given beside a spec"):
        foci.attention(q, k, v, spec, causal=True)
    with pytest.raises(ValueError, match="bias: an array arrived, but the spec does not read it"):
        foci.attention(q, k, v, spec, bias=np.zeros((7, 9), np.float32))
    assert "fused" in foci.explain(q, k, v, spec)


def test_threads_and_targets_change_no_bit_that_they_must_not():
    q, k, v = arrays(13, n=50, m=60)
    before, threads = foci.target(), foci.num_threads()
    try:
        foci.set_num_threads(1)
        one = foci.attention(q, k, v)
        foci.set_num_threads(3)
        assert (foci.attention(q, k, v) == one).all()
        for target in foci.supported_targets():
            foci.set_target(target)
            near(foci.attention(q, k, v), attention(q, k, v))
    finally:
        foci.set_target(before)
        foci.set_num_threads(threads)


def test_scores_spared_by_bounds_are_counted():
    rng = np.random.default_rng(14)
    centres = rng.standard_normal((16, 16)) * 20
    k = (np.repeat(centres, 64, 0) + rng.standard_normal((1024, 16)) * 0.1)[None, None]
    q = (centres[rng.integers(0, 16, 256)])[None, None]
    q, k = q.astype(np.float32), k.astype(np.float32)
    out = foci.attention(q, k, k, normalizer="topk", top_k=8, statistics="support")
    assert out.visible_pairs == 256 * 1024
    assert 0 < out.skipped_pairs < out.visible_pairs


@pytest.mark.parametrize("shape", [(1, 1, 40, 70), (1, 1, 1, 70), (1, 1, 40, 1), (2, 3, 40, 70)])
@pytest.mark.parametrize("normalizer", ["softmax", "sparsemax"])
def test_any_byte_but_0_is_true(shape, normalizer):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, 8)).astype(np.float32) for n in (40, 70, 70))
    raw = (rng.integers(0, 2, shape) * rng.integers(1, 256, shape)).astype(np.uint8)
    got, want = (foci.attention(q, k, v, keep=keep, normalizer=normalizer, statistics="support")
                 for keep in (raw.view(bool), raw != 0))
    assert (got.y == want.y).all() and (got.support == want.support).all()
    assert (got.weights() == want.weights()).all()
    ones = np.ones_like(got.y)
    for name, gradient in got.backward(ones).items():
        assert (gradient == want.backward(ones)[name]).all()


def test_backward_relies_on_the_lengths_and_segments_that_forward_saw():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 64, 16)).astype(np.float32) for _ in range(3))
    segments = np.sort(rng.integers(0, 4, (1, 64)), -1).astype(np.int32)
    arrays = {"q_segments": segments, "k_segments": segments.copy()}
    lengths = np.array([9])
    results = []
    for change in (False, True):
        outs = [foci.attention(q, k, v, statistics="row_stat", normalizer="sparsemax", **arrays),
                foci.attention(q, k, v, statistics="row_stat", key_lengths=lengths)]
        if change:
            arrays["k_segments"][:] = 3
            segments[:] = 0
            lengths[:] = 2**40
        results.append([o.backward(np.ones_like(o.y))["dk"] for o in outs] +
                       [o.weights() for o in outs])
    assert all((a == b).all() for a, b in zip(*results))
