"""foci.torch.attention and its gradients against float64 formulas under torch.autograd."""

import math
import random

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import torch_formulas as formulas  # noqa: E402
from hypothesis import HealthCheck, Phase, given, note, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch_formulas import near  # noqa: E402

import foci  # noqa: E402
import foci.torch  # noqa: E402
from foci.torch import attention  # noqa: E402

torch.set_num_threads(1)


def heads(B, H, N, D, strided=False, dtype=torch.float32):
    if strided:
        return torch.randn(B, N, H, D, dtype=dtype).transpose(1, 2)
    return torch.randn(B, H, N, D, dtype=dtype)


def arrays(B=2, H=4, Hk=2, N=7, M=9, D=8, Dv=5, strided=False, dtype=torch.float32):
    return (heads(B, H, N, D, strided, dtype), heads(B, Hk, M, D, strided, dtype),
            heads(B, Hk, M, Dv, strided, dtype))


NAMES = ("q", "k", "v")
STATISTICS = ("entropy", "max_weight", "coverage", "row_stat")


def form(results, upstream, learned):
    """The gradients that a fixed random linear form of `upstream` results gives to tensors."""
    torch.manual_seed(0)
    loss = 0.0
    for name in upstream:
        weight = torch.randn(results[name].shape)
        finite = results["row_stat"].detach().isfinite() if name == "row_stat" else ...
        loss = loss + (weight.to(results[name].dtype) * results[name])[finite].sum()
    got = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g
            for (name, t), g in zip(learned.items(), got)}


def compare(qkv, options, upstream=("y",), learned=NAMES, top=1):
    """Results, and gradients of the `learned` tensors, against the formula in float64: within 2e-5
    of the largest value, or twice what the formula itself errs in float32."""
    every = {**dict(zip(NAMES, qkv)), **options}

    def leaves(dtype):
        return {name: t.detach().to(dtype).requires_grad_(name in learned)
                if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                for name, t in every.items()}

    def formula(dtype):
        own = leaves(dtype)
        results = formulas.attention(**own, top=top)
        return results, form(results, upstream, {n: own[n] for n in learned})

    mine = leaves(torch.float32)
    statistics = [name for name in upstream if name != "y"]
    more = {"top_k": top} if options.get("normalizer") == "topk" else {}
    got = attention(*[mine[name] for name in NAMES], statistics=statistics, **more,
                    **{name: t for name, t in mine.items() if name not in NAMES})
    results = {name: getattr(got, name) for name in ("y", *statistics)} if statistics else {
        "y": got}
    gradients = form(results, upstream, {name: mine[name] for name in learned})
    (want, want_gradients), (naive, naive_gradients) = formula(torch.float64), formula(
        torch.float32)
    for name, result in results.items():
        near(result, want[name], name=name, least=1e-3, naive=naive[name])
    for name in learned:
        assert gradients[name].dtype == mine[name].dtype
        # Sums of many terms of unit size may cancel to little.
        near(gradients[name], want_gradients[name], name="d" + name,
             least=0.1 if name in NAMES else 4.0, naive=naive_gradients[name])


@pytest.mark.parametrize("upstream", [("y",), *[("y", s) for s in STATISTICS], STATISTICS])
@pytest.mark.parametrize("normalizer", ["softmax", "sparsemax", "entmax", "topk"])
def test_gradients_through_statistics(normalizer, upstream):
    torch.manual_seed(3)
    compare(arrays(), {"normalizer": normalizer}, upstream, top=4)


@pytest.mark.parametrize("option", ["bias", "slopes", "table1d", "table2d", "score_w", "scale",
                                    "scale_one", "alpha", "alpha_one"])
def test_gradient_of_each_option(option):
    torch.manual_seed(4)
    q, k, v = arrays(N=12, M=12)
    options, learned = {}, option
    if option == "bias":
        options["bias"] = torch.randn(4, 1, 12)
    elif option == "slopes":
        options["slopes"] = torch.rand(4)
    elif option == "table1d":
        options["table1d"] = torch.randn(4, 7)
    elif option == "table2d":
        options["table2d"] = torch.randn(4, 5, 7)
    elif option == "score_w":
        options["score_w"] = torch.randn(8)
        options["score"] = "additive"
    elif option in ("alpha", "alpha_one"):
        options["normalizer"] = "entmax"
        options["alpha"] = torch.tensor([1.25, 1.5, 1.0625, 2.0] if option == "alpha" else 1.5)
        learned = "alpha"
    else:
        options["scale"] = torch.randn(4) if option == "scale" else torch.tensor(0.7)
        learned = "scale"
    compare((q, k, v), options, ("y", "entropy"), (*NAMES, learned))
    # Alone, without gradients of q, k and v.
    compare((q, k, v), options, ("y",), (learned,))


@settings(max_examples=200, deadline=None, derandomize=True, database=None,
          phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_options(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    B, Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    H = Hk * group
    N, M = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    D, Dv = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    options, top, learned = {}, 1, []
    grid = draw(st.booleans())
    if grid:  # a two-dimensional bias knows positions of a grid only
        height, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        N = M = height * width
        options["table2d"] = torch.randn(H, 2 * height - 1, 2 * width - 1)
        learned.append("table2d")
    q, k, v = arrays(B, H, Hk, N, M, D, Dv, strided=draw(st.booleans()))
    options["score"] = draw(st.sampled_from(["dot", "cosine", "l2", "additive"]))
    if options["score"] == "cosine" and D == 1:
        options["score"] = "dot"  # of two signs: the gradient is rounding
    if options["score"] == "l2":
        options["gamma"] = 0.25
    if options["score"] == "additive":
        options["score_w"] = torch.randn(D)
        learned.append("score_w")
    scale = draw(st.sampled_from([None, 0.5, "one", "heads"]))
    if scale is not None:
        options["scale"] = {"one": torch.randn(1), "heads": torch.randn(H)}.get(scale, scale)
        if scale != 0.5:
            learned.append("scale")
    if draw(st.booleans()):
        options["softcap"] = 3.0
    options["normalizer"] = draw(st.sampled_from(["softmax", "sparsemax", "entmax", "topk"]))
    if options["normalizer"] == "entmax":
        alpha = draw(st.sampled_from([1.25, 1.5, 1.75, "one", "heads"]))
        options["alpha"] = {"one": torch.rand(1) * 0.9 + 1.05,
                            "heads": torch.rand(H) * 0.9 + 1.05}.get(alpha, alpha)
        if isinstance(alpha, str):
            learned.append("alpha")
    if options["normalizer"] == "topk":
        top = draw(st.integers(1, M))
    if draw(st.booleans()):
        options["causal"] = draw(st.sampled_from(["bottom-right", "top-left"]))
    if draw(st.booleans()):
        options["window"] = (draw(st.integers(0, M)), draw(st.sampled_from([None, 0, 3])))
    if draw(st.booleans()):
        options["key_lengths"] = torch.randint(0, M + 1, (B,))
    if draw(st.booleans()):
        options["keep"] = torch.rand(*draw(st.sampled_from(
            [(M,), (N, M), (H, N, M), (B, 1, 1, M), (B, H, N, M)]))) < 0.8
    if draw(st.booleans()):
        options["bias"] = torch.randn(*draw(st.sampled_from(
            [(M,), (N, 1), (N, M), (H, 1, M), (B, 1, N, M), (B, H, N, M)])))
        if draw(st.booleans()):
            options["bias"][torch.rand_like(options["bias"]) < 0.1] = -math.inf
        learned.append("bias")
    if draw(st.booleans()):
        options["slopes"] = torch.rand(H)
        learned.append("slopes")
    if draw(st.booleans()):
        options["table1d"] = torch.randn(H, 2 * draw(st.integers(0, 4)) + 1)
        learned.append("table1d")
    upstream = ("y", *[name for name in STATISTICS if draw(st.booleans())])
    note(f"{options}, top={top}, {upstream}, q {q.shape}, k {k.shape}")
    compare((q, k, v), options, upstream,
            (*[n for n in NAMES if draw(st.booleans()) or n == "q"], *learned), top)


def test_strided_views_are_read_and_gradients_written_in_place():
    torch.manual_seed(5)
    x = torch.randn(2, 6, 3, 4, 8, requires_grad=True)  # a joint projection [B, N, 3, H, D]
    q, k, v = (t.transpose(1, 2) for t in x.unbind(2))
    y = attention(q, k, v)
    assert y.transpose(1, 2).is_contiguous()  # heads join without a copy
    assert torch.equal(y, attention(q.contiguous(), k.contiguous(), v.contiguous()))
    y.square().sum().backward()
    x64 = x.detach().double().requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in x64.unbind(2))
    formulas.attention(q, k, v)["y"].square().sum().backward()
    near(x.grad, x64.grad)


def test_a_strided_last_dimension_is_copied():
    torch.manual_seed(6)
    q, k, v = (torch.randn(1, 2, 8, 5).transpose(-1, -2).requires_grad_() for _ in range(3))
    bias = torch.randn(5, 5).t().requires_grad_()
    y = attention(q, k, v, bias=bias)
    assert torch.equal(y, attention(q.contiguous(), k.contiguous(), v.contiguous(),
                                    bias=bias.contiguous()))
    y.sum().backward()
    assert q.grad.shape == q.shape and bias.grad.shape == bias.shape


def test_gradients_only_where_needed():
    q, k, v = arrays()
    q.requires_grad_()
    bias = torch.randn(7, 9)
    attention(q, k, v, bias=bias).sum().backward()
    assert k.grad is None and v.grad is None and bias.grad is None
    assert not attention(q.detach(), k, v, bias=bias).requires_grad
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    out = attention(q, k, v, statistics=["support", "max_weight"])
    assert out.max_weight.requires_grad and not out.support.requires_grad
    assert not out.max_key.requires_grad and out.entropy is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions(dtype):
    torch.manual_seed(7)
    qkv = [t.to(dtype).requires_grad_() for t in arrays()]
    qkv64 = [t.detach().double().requires_grad_() for t in qkv]
    y = attention(*qkv, causal=True)
    assert y.dtype == dtype
    want = formulas.attention(*qkv64, causal=True)["y"]
    tolerance = 2 * torch.finfo(dtype).eps
    near(y, want, tolerance)
    y.sum().backward()
    want.sum().backward()
    for t, t64 in zip(qkv, qkv64):
        assert t.grad.dtype == dtype
        near(t.grad, t64.grad, 2 * tolerance)


def test_learned_scale_beside_a_spec():
    torch.manual_seed(8)
    q, k, v = arrays()
    spec = foci.Spec(causal=True, scale=3.0)
    scale = torch.tensor([0.5], requires_grad=True)
    y = attention(q, k, v, spec, scale=scale)
    near(y, attention(q, k, v, causal=True, scale=0.5))
    y.sum().backward()
    assert scale.grad.shape == (1,)


def test_learned_alpha_beside_a_spec():
    torch.manual_seed(8)
    q, k, v = arrays()
    spec = foci.Spec(causal=True, normalizer="entmax", alpha=3.0)
    alpha = torch.tensor([1.25, 1.5, 2.0, 1.75], dtype=torch.float64, requires_grad=True)
    out = attention(q, k, v, spec, alpha=alpha, statistics=["entropy"])
    near(out.y, attention(q, k, v, causal=True, normalizer="entmax", alpha=alpha.tolist()))
    near(out.weights(heads=[2]),
         attention(q, k, v, causal=True, normalizer="sparsemax", statistics=["row_stat"]).weights(
             heads=[2]))
    (out.y.sum() + out.entropy.sum()).backward()
    assert alpha.grad.shape == (4,) and alpha.grad.dtype == torch.float64
    assert alpha.grad.abs().min() > 0


def test_alpha_learns_what_made_the_rows():
    """Descent on alpha alone finds the alphas, one a head, by which weights were made."""
    torch.manual_seed(12)
    q, k, v = arrays(N=24, M=24)
    made = torch.tensor([1.2, 1.4, 1.6, 1.9])
    want = attention(q, k, v, normalizer="entmax", alpha=made)
    free = torch.zeros(4, requires_grad=True)
    optimiser = torch.optim.Adam([free], lr=0.05)
    for _ in range(300):
        optimiser.zero_grad()
        y = attention(q, k, v, normalizer="entmax", alpha=1 + free.sigmoid())
        loss = (y - want).square().mean()
        loss.backward()
        optimiser.step()
    assert (1 + free.sigmoid() - made).abs().max() < 0.02


def test_compiled_graphs_learn_alpha():
    torch.manual_seed(13)
    q, k, v = arrays()
    alpha = torch.tensor([1.25, 1.5, 1.125, 1.75], requires_grad=True)

    def f(q, k, v, alpha):
        return attention(q, k, v, normalizer="entmax", alpha=alpha)

    y = f(q, k, v, alpha)
    z = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v, alpha)
    want, = torch.autograd.grad(y.square().sum(), alpha)
    got, = torch.autograd.grad(z.square().sum(), alpha)
    assert torch.equal(y, z) and torch.equal(want, got)


def test_exact_weights_have_gradients():
    torch.manual_seed(9)
    qkv = [t.requires_grad_() for t in arrays()]
    out = attention(*qkv, causal=True, statistics="row_stat")
    w = out.weights(rows=[1, -1, 3], heads=[2, 0])
    qkv64 = [t.detach().double().requires_grad_() for t in qkv]
    want = formulas.attention(*qkv64, causal=True)["weights"][:, [2, 0]][:, :, [1, -1, 3]]
    near(w, want)
    c = torch.randn(w.shape)
    (c * w).sum().backward()
    (c.double() * want).sum().backward()
    for t, t64 in zip(qkv[:2], qkv64[:2]):
        near(t.grad, t64.grad)
    near(out.weights(), formulas.attention(*qkv64, causal=True)["weights"])


def test_dropout_follows_the_generator():
    torch.manual_seed(10)
    q, k, v = arrays(N=40, M=40)
    torch.manual_seed(1)
    first, second = (attention(q, k, v, dropout=0.3) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, attention(q, k, v, dropout=0.3))
    assert not torch.equal(first, second)
    assert torch.equal(attention(q, k, v, dropout=0.3, dropout_seed=5),
                       attention(q, k, v, dropout=0.3, dropout_seed=torch.tensor(5)))
    assert torch.equal(attention(q, k, v, dropout=0.0), attention(q, k, v))
    # Backward drops what forward dropped: with v the identity, y is the dropped weights.
    eye = torch.eye(40).expand(2, 2, 40, 40).clone().requires_grad_()
    y = attention(q, k, eye, dropout=0.3, dropout_seed=7)
    y.sum().backward()
    dropped = y.detach().unflatten(1, (2, 2)).sum(2).sum(-2)  # by key, over a group's heads
    near(eye.grad[..., 0], dropped)
    # Exact weights, and their gradients, are those before it.
    out = attention(q, k, v, dropout=0.3, statistics="row_stat")
    near(out.weights(), attention(q, k, v, statistics="row_stat").weights())


def test_empty_rows_and_sizes():
    q, k, v = (t.requires_grad_() for t in arrays())
    y = attention(q, k, v, key_lengths=torch.tensor([0, 9]))
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    y.sum().backward()
    assert not q.grad[0].any() and not v.grad[0].any()
    for sizes in ({"N": 0}, {"M": 0}, {"B": 0}):
        qkv = [t.requires_grad_() for t in arrays(**sizes)]
        y = attention(*qkv)
        y.sum().backward()
        assert all(t.grad.shape == t.shape for t in qkv)


def test_saved_tensors_may_not_change():
    q, k, v = arrays()
    q.requires_grad_()
    y = attention(q, k, v)
    v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpoint_and_autocast():
    from torch.utils.checkpoint import checkpoint
    q, k, v = arrays()
    q.requires_grad_()
    call = lambda x: attention(x, k, v, dropout=0.2)
    torch.manual_seed(2)
    call(q).sum().backward()
    plain, q.grad = q.grad, None
    torch.manual_seed(2)
    checkpoint(call, q, use_reentrant=False).sum().backward()
    assert torch.equal(plain, q.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v).dtype == torch.bfloat16


def test_no_gradients_of_gradients():
    q, k, v = arrays()
    q.requires_grad_()
    (g,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        g.sum().backward()


WRONG = [
    (lambda q, k, v: attention(q.numpy(), k, v), TypeError, "q: ndarray arrived"),
    (lambda q, k, v: attention(q[0], k, v), ValueError, "q: shape"),
    (lambda q, k, v: attention(q, k[..., :3], v), ValueError, "k: "),
    (lambda q, k, v: attention(q.double(), k.double(), v.double()), ValueError, "float64|f64"),
    (lambda q, k, v: attention(q, k.bfloat16(), v), ValueError, "k: "),
    (lambda q, k, v: attention(q.int(), k, v), ValueError, "int32|i32"),
    (lambda q, k, v: attention(q.to("meta"), k, v), ValueError, "q: a tensor on meta"),
    (lambda q, k, v: attention(q.to_sparse(), k, v), ValueError, "q: a tensor of layout"),
    (lambda q, k, v: attention(q, k, v, bias=torch.zeros(3, 3)), ValueError, "bias: "),
    (lambda q, k, v: attention(q, k, v, keep=torch.zeros(7, 9)), ValueError, "keep: "),
    (lambda q, k, v: attention(q, k, v, keep=[True]), TypeError, "keep: list"),
    (lambda q, k, v: attention(q, k, v, scale=torch.ones(3)), ValueError, "scale: "),
    (lambda q, k, v: attention(q, k, v, scale=torch.ones(2, 2)), ValueError, "scale: shape"),
    (lambda q, k, v: attention(q, k, v, scale=torch.tensor([1])), TypeError, "scale: "),
    (lambda q, k, v: attention(q, k, v, alpha=torch.tensor(1.5)), ValueError,
     "alpha: a tensor arrived, but nothing reads it without normalizer='entmax'"),
    (lambda q, k, v: attention(q, k, v, normalizer="entmax", alpha=torch.tensor([2])), TypeError,
     "alpha: torch.int64 arrived"),
    (lambda q, k, v: attention(q, k, v, normalizer="entmax", alpha=torch.full((3,), 1.5)),
     ValueError, "alpha: 3 numbers"),
    (lambda q, k, v: attention(q, k, v, normalizer="entmax", alpha=torch.full((2, 2), 1.5)),
     ValueError, "alpha: shape"),
    (lambda q, k, v: attention(q, k, v, normalizer="entmax", alpha=torch.tensor(1.0)),
     ValueError, "alpha: 1 given, entmax needs alpha > 1"),
    (lambda q, k, v: attention(q, k, v, mystery=1), TypeError, "mystery"),
    (lambda q, k, v: attention(q, k, v, foci.Spec(), causal=True), TypeError, "causal"),
    (lambda q, k, v: attention(q, k, v, statistics="entrop"), ValueError, "statistics"),
    (lambda q, k, v: attention(q, k, v, dropout=1.5), ValueError, "dropout"),
    (lambda q, k, v: attention(q, k, v, statistics="entropy").weights(rows=[7]), ValueError,
     "rows: 7"),
    (lambda q, k, v: attention(q, k, v, statistics="entropy").weights(heads=[0.5]), TypeError,
     "heads: float"),
]


@pytest.mark.parametrize("call, error, message", WRONG, ids=[m for _, _, m in WRONG])
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call(*arrays())


def test_packed_sequences():
    torch.manual_seed(11)
    packed = [torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3)]
    segments = torch.tensor([[0] * 4 + [1] * 5])
    y = attention(*packed, causal=True, q_segments=segments, k_segments=segments)
    y.square().sum().backward()
    alone = [t.detach().clone().requires_grad_() for t in packed]
    parts = [attention(*[t[:, :, rows] for t in alone], causal=True)
             for rows in (slice(0, 4), slice(4, 9))]
    assert torch.equal(y, torch.cat(parts, 2))
    sum(part.square().sum() for part in parts).backward()
    for t, own in zip(packed, alone):
        near(t.grad, own.grad, 1e-6)


def test_before_pytorch_could_share_tensors_that_want_gradients(monkeypatch):
    torch.manual_seed(12)
    tensors = [t.requires_grad_() for t in arrays()] + [torch.rand(4, requires_grad=True)]
    call = lambda: attention(*tensors[:3], slopes=tensors[3], statistics="entropy")
    want = torch.autograd.grad(call().y.sum(), tensors)
    monkeypatch.setattr(foci.torch._op, "_OLD", True)
    for got, same in zip(torch.autograd.grad(call().y.sum(), tensors), want):
        assert torch.equal(got, same)


def test_random_calls_do_not_crash():
    rng = random.Random(0)

    def tensor():
        shape = [rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.choice([0, 1, 2, 3, 4, 4, 4, 5]))]
        t = torch.randn(shape)
        if rng.random() < 0.3:
            t = t.transpose(-1, rng.randrange(t.dim())) if t.dim() else t
        if rng.random() < 0.3:
            t = t[..., ::2] if t.dim() else t
        if rng.random() < 0.2:
            t = t.expand(2, *t.shape)
        t = t.to(rng.choice([torch.float32] * 6 + [torch.float64, torch.bfloat16, torch.int64,
                                                   torch.bool, torch.complex64]))
        if rng.random() < 0.05:
            t = t.to("meta")
        return t.requires_grad_(t.is_floating_point() and rng.random() < 0.3)

    def anything():
        return rng.choice([tensor, tensor, lambda: None, lambda: rng.randrange(-3, 9),
                           lambda: rng.choice([True, False, "entropy", "topk", "past", 0.5, -1.0,
                                               math.nan, [1, 2], {}, object()])])()

    names = ["scale", "dropout", "dropout_seed", "keep", "bias", "slopes", "table1d", "table2d",
             "score_w", "key_lengths", "past_lengths", "q_segments", "k_segments", "normalizer",
             "causal", "window", "top_k", "statistics", "mask_mod", "score", "spec", "nonsense"]
    passed = 0
    for _ in range(2000):
        qkv = arrays(1, 2, 1, 3, 3, 2, 2)
        qkv = [anything() if rng.random() < 0.2 else t for t in qkv]
        options = {name: anything() for name in rng.sample(names, rng.randrange(3))}
        try:
            out = attention(*qkv, **options)
            out = out if isinstance(out, torch.Tensor) else out.y
            if out.requires_grad:
                out.sum().backward()
            passed += 1
        except (ValueError, TypeError) as error:
            assert ": " in str(error), error
    assert passed > 200


@pytest.mark.parametrize("nothing", [(), [], set(), "", None])
def test_no_statistics_asked_for_gives_y_alone(nothing):
    q = torch.randn(1, 2, 3, 4)
    assert torch.equal(foci.torch.attention(q, q, q, statistics=nothing),
                       foci.torch.attention(q, q, q))
