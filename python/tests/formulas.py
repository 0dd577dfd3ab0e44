"""Attention as its definition reads, in float64: what the tests compare with."""

import numpy as np


def steep_weights(s, alpha):
    """One row for alpha > 2, where tau lies too near to a score to be told from it: v is the
    smallest score that has weight, w that weight, and tau = (alpha - 1) v - w ** (alpha - 1)."""
    c = alpha - 1

    def weights(v, w):
        over = np.where(s > v, c * (s - v) + w**c, 1)
        return np.where(s > v, over ** (1 / c), np.where(s == v, w, 0))

    v = min(x for x in np.unique(s[np.isfinite(s)]) if weights(x, 0.0).sum() < 1)
    lo, hi = 0.0, 1.0
    for _ in range(200):
        w = (lo + hi) / 2
        lo, hi = (lo, w) if weights(v, w).sum() >= 1 else (w, hi)
    return weights(v, hi)


def sparse_weights(s, alpha):
    """[(alpha - 1) s - tau]_+ ** (1 / (alpha - 1)) by bisection; -inf rows give zeros."""
    if np.ndim(alpha) > 0:  # an array that broadcasts to the scores: each number's rows alone
        s, alpha = np.broadcast_arrays(s, alpha)
        p = np.empty(s.shape)
        for row in np.ndindex(*s.shape[:-1]):
            p[row] = sparse_weights(s[row], float(alpha[row][0]))
        return p
    if alpha > 2:
        return np.apply_along_axis(steep_weights, -1, s, alpha)
    z = (alpha - 1) * s
    top = z.max(-1, keepdims=True)
    lo, hi = top - 1, top
    for _ in range(200):
        tau = (lo + hi) / 2
        with np.errstate(invalid="ignore"):
            p = np.maximum(z - tau, 0) ** (1 / (alpha - 1))
        more = p.sum(-1, keepdims=True) >= 1
        lo, hi = np.where(more, tau, lo), np.where(more, hi, tau)
    return p / p.sum(-1, keepdims=True)


def normalised(s, normalizer="softmax", alpha=1.5, k=1):
    s = np.asarray(s, np.float64)
    if s.shape[-1] == 0:
        return s
    empty = np.isneginf(s).all(-1, keepdims=True)
    s = np.where(empty, 0, s)
    if normalizer == "sparsemax":
        p = sparse_weights(s, 2.0)
    elif normalizer == "entmax":
        p = sparse_weights(s, alpha)
    else:
        if normalizer == "topk":
            order = np.argsort(-s, -1, kind="stable")
            rank = np.argsort(order, -1, kind="stable")
            s = np.where(rank < k, s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
    return np.where(empty, 0, p)


def scores(q, k, score="dot", scale=None, gamma=1.0, softcap=None, score_w=None):
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    if score == "dot":
        s = np.einsum("bhnd,bhmd->bhnm", q, k)
    elif score == "cosine":
        unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
        s = np.einsum("bhnd,bhmd->bhnm", unit(q), unit(k))
    elif score == "l2":
        s = -gamma * ((q[:, :, :, None] - k[:, :, None]) ** 2).sum(-1)
    else:
        s = (np.tanh(q[:, :, :, None] + k[:, :, None]) * score_w).sum(-1)
    factor = 1 / np.sqrt(q.shape[-1]) if scale is None and score == "dot" else 1.0
    s = s * (factor if scale is None else np.reshape(scale, (-1, 1, 1)))
    return s if softcap is None else softcap * np.tanh(s / softcap)


def weights(q, k, *, bias=None, allowed=None, normalizer="softmax", alpha=1.5, top=1, **options):
    s = scores(q, k, **options)
    if bias is not None:
        s = s + bias
    if allowed is not None:
        s = np.where(allowed, s, -np.inf)
    return normalised(s, normalizer, alpha, top)


def attention(q, k, v, **options):
    p = weights(q, k, **options)
    v = np.repeat(np.asarray(v, np.float64), q.shape[1] // v.shape[1], 1)
    return p @ v


def causal(n, m, align="bottom-right"):
    i, j = np.arange(n)[:, None], np.arange(m)[None]
    return j <= (i + (m - n if align == "bottom-right" else 0))


def near(got, want, tolerance=2e-5):
    """Within tolerance of the largest value; infinities in place."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all()
    if finite.any():
        error = np.abs(got - want)[finite].max()
        largest = np.abs(want[finite]).max()
        assert error <= tolerance * max(largest, 1e-30), (error, largest)
