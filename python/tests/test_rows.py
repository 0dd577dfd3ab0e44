"""softmax, sparsemax, entmax and topk on their own, against float64 formulas."""

import entmax_table
import numpy as np
import pytest
from formulas import near, normalised

import foci

MAPS = [("softmax", {}, {}), ("sparsemax", {}, {}), ("entmax", {"alpha": 1.5}, {"alpha": 1.5}),
        ("entmax", {"alpha": 1.25}, {"alpha": 1.25}), ("topk", {"k": 4}, {"k": 4})]


@pytest.mark.parametrize("name, options, same", MAPS)
@pytest.mark.parametrize("shape", [(1,), (17,), (3, 33), (2, 3, 5, 40), (4, 1)])
def test_weights(name, options, same, shape):
    s = (np.random.default_rng(0).standard_normal(shape) * 2).astype(np.float32)
    got = getattr(foci, name)(s, **options)
    near(got, normalised(s, name, **same), 1e-5)
    near(got.sum(-1), np.ones(shape[:-1]), 1e-5)


@pytest.mark.parametrize("name, options, same", MAPS)
def test_any_axis_and_missing_keys(name, options, same):
    s = np.random.default_rng(1).standard_normal((6, 20, 3)).astype(np.float32)
    s[2] = -np.inf
    s[:, :, 1] = -np.inf
    got = getattr(foci, name)(s, axis=0, **options)
    near(got, np.moveaxis(normalised(np.moveaxis(s, 0, -1), name, **same), -1, 0), 1e-5)
    assert (got[2] == 0).all() and (got[:, :, 1] == 0).all()


@pytest.mark.parametrize("name, options, same", MAPS)
def test_gradients_against_finite_differences(name, options, same):
    rng = np.random.default_rng(2)
    s, up = rng.standard_normal((2, 3, 12)), rng.standard_normal((2, 3, 12))
    weights = getattr(foci, name)(s.astype(np.float32), **options)
    got = foci.normalize_backward(weights, up.astype(np.float32), name,
                                  **({"alpha": same["alpha"]} if "alpha" in same else {}))
    want, step = np.zeros_like(s), 1e-6
    for i in np.ndindex(s.shape):
        e = np.zeros_like(s)
        e[i] = step
        want[i] = ((normalised(s + e, name, **same) - normalised(s - e, name, **same)) * up).sum(
        ) / (2 * step)
    near(got, want, 1e-4)


def test_entmax_against_mpmath():
    for name, alpha, s, j, p, ds in entmax_table.cases():
        got = foci.entmax(s, alpha=alpha)
        assert abs(got.sum(dtype=np.float64) - 1) < 1e-6, name
        assert np.abs(got[j] - p).max() < 1e-7, name
        one = np.ones((1, 1, 1, 1), np.float32)
        k = s.reshape(1, 1, -1, 1)
        up = entmax_table.upstream(s.size)
        out = foci.attention(one, k, up.reshape(k.shape), scale=1.0, normalizer="entmax",
                             alpha=alpha)
        assert abs(out.item() - got.astype(np.float64) @ up) < 4e-6, name
        back = foci.normalize_backward(got, up, "entmax", alpha, scores=s)
        assert entmax_table.same_gradient(back[j], ds), name


@pytest.mark.parametrize("alpha", [3.0, 8.0, 50.0])
def test_entmax_with_a_large_alpha(alpha):
    s = np.random.default_rng(4).standard_normal((50, 40)).astype(np.float32)
    near(foci.entmax(s, alpha=alpha), normalised(s, "entmax", alpha=alpha), 1e-6)


def test_half_precision_and_refusals():
    s = np.random.default_rng(3).standard_normal((2, 9)).astype(np.float16)
    p = foci.sparsemax(s)
    assert p.dtype == np.float16
    near(p, normalised(s, "sparsemax"), 2e-3)
    with pytest.raises(ValueError, match="scores: "):
        foci.softmax(s.astype(np.float64))
    with pytest.raises(ValueError, match="alpha"):
        foci.entmax(s, alpha=0.5)
    with pytest.raises(TypeError, match="top_k: float"):
        foci.topk(s, 1.5)
    with pytest.raises(ValueError, match="dweights"):
        foci.normalize_backward(p, p[:1])
    with pytest.raises(ValueError, match="scores"):
        foci.normalize_backward(p, p, "entmax", 3.0, scores=s[:1])


@pytest.mark.parametrize("alpha", [1.0625, 1.5, 2.0, 2.5])
def test_the_gradient_of_alpha(alpha):
    s, up = np.random.default_rng(4).standard_normal((2, 5, 6, 11)).astype(np.float32)
    got = foci.alpha_gradient(foci.entmax(s, alpha=alpha), up, alpha=alpha)
    step = 1e-6
    above, below = (normalised(s, "entmax", alpha=alpha + e) for e in (step, -step))
    assert isinstance(got, float)
    near(got, ((above - below) * up).sum() / (2 * step), 1e-4)


def test_rows_alone_have_one_alpha():
    with pytest.raises(ValueError, match="alpha: 2 numbers arrived, one is right"):
        foci.entmax(np.zeros((2, 3), np.float32), alpha=[1.5, 2.0])
