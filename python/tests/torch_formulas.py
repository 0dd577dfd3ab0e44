"""Attention as its definition reads, in float64 PyTorch with autograd: what the tests of foci.torch
compare with."""

import math

import torch


def _sparse(s, alpha):
    """[(alpha - 1) s - tau]_+ ** (1 / (alpha - 1)) and tau. Bisection finds tau; one Newton step at
    the solution gives it the gradient of the implicit function."""
    z = (alpha - 1) * s
    with torch.no_grad():
        hi = z.amax(-1, keepdim=True)
        lo = hi - 1
        for _ in range(100):
            tau = (lo + hi) / 2
            more = _power(z - tau, alpha).sum(-1, keepdim=True) >= 1
            lo, hi = torch.where(more, tau, lo), torch.where(more, hi, tau)
        on = z > tau
        slope = torch.where(on, (z - tau).clamp_min(1e-300) ** (1 / (alpha - 1) - 1), 0)
        slope = slope.sum(-1, keepdim=True) / (alpha - 1)
    total = torch.where(on, _power(torch.where(on, z - tau, 1.0), alpha), 0.0).sum(-1, keepdim=True)
    tau = tau + (total - 1) / slope
    p = torch.where(on, _power(torch.where(on, z - tau, 1.0), alpha), 0.0)
    return p, tau[..., 0]


def _power(x, alpha):
    return x.clamp_min(0) ** (1 / (alpha - 1))


def _normalised(s, normalizer, alpha, k):
    """Weights and row statistic; s may hold -inf, also in whole rows."""
    empty = torch.isneginf(s).all(-1, keepdim=True)
    if normalizer in ("sparsemax", "entmax"):
        alpha = 2.0 if normalizer == "sparsemax" else alpha
        if isinstance(alpha, torch.Tensor):  # one number, or one a head
            alpha = alpha.reshape(-1, 1, 1)
        low = torch.where(torch.isneginf(s), -1e4, s)
        p, tau = _sparse(torch.where(empty, 0.0, low), alpha)
        return torch.where(empty, 0.0, p), torch.where(empty[..., 0], math.inf, tau)
    if normalizer == "topk":
        order = torch.sort(s.detach(), dim=-1, descending=True, stable=True).indices
        rank = torch.argsort(order, dim=-1, stable=True)
        s = torch.where(rank < k, s, -math.inf)
    lse = torch.logsumexp(torch.where(empty, 0.0, s), -1)
    p = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, s) - lse[..., None]))
    return p, torch.where(empty[..., 0], -math.inf, lse)


def _scores(q, k, score, gamma, score_w):
    if score == "dot":
        return q @ k.transpose(-1, -2)
    if score == "cosine":
        return (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).transpose(
            -1, -2)
    if score == "l2":
        return -gamma * ((q[:, :, :, None] - k[:, :, None]) ** 2).sum(-1)
    return (torch.tanh(q[:, :, :, None] + k[:, :, None]) * score_w).sum(-1)


def allowed(N, M, causal=False, window=None, window_align="bottom-right"):
    i, j = torch.arange(N)[:, None], torch.arange(M)[None]
    seen = torch.ones(N, M, dtype=torch.bool)
    if causal:
        seen &= j <= i + (0 if causal == "top-left" else M - N)
    if window is not None:
        p = i + (0 if window_align == "top-left" else M - N)
        left, right = window
        if left is not None:
            seen &= j >= p - left
        if right is not None:
            seen &= j <= p + right
    return seen


def attention(q, k, v, *, score="dot", gamma=1.0, scale=None, softcap=None, normalizer="softmax",
              alpha=1.5, top=1, causal=False, window=None, window_align="bottom-right", keep=None,
              key_lengths=None, q_segments=None, k_segments=None, bias=None, slopes=None,
              table1d=None, table2d=None, score_w=None):
    """y, weights, row_stat, entropy, max_weight, coverage of float64 tensors."""
    B, H, N, D = q.shape
    M = k.shape[2]
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    s = _scores(q, k, score, gamma, score_w)
    if scale is None:
        scale = 1 / math.sqrt(D) if score == "dot" else 1.0
    if isinstance(scale, torch.Tensor):
        scale = scale.reshape(-1, 1, 1)
    s = s * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(N)[:, None], torch.arange(M)[None]
    p = i + M - N
    if slopes is not None:
        s = s - slopes[:, None, None] * (p - j).abs()
    if table1d is not None:
        most = (table1d.shape[1] - 1) // 2
        s = s + table1d[:, (j - p).clamp(-most, most) + most]
    if table2d is not None:
        height, width = (table2d.shape[1] + 1) // 2, (table2d.shape[2] + 1) // 2
        s = s + table2d[:, j // width - p // width + height - 1, j % width - p % width + width - 1]
    if bias is not None:
        s = s + bias
    seen = allowed(N, M, causal, window, window_align)[None, None].expand(B, H, N, M)
    if keep is not None:
        seen = seen & keep
    if key_lengths is not None:
        seen = seen & (j < key_lengths[:, None, None, None])
    if q_segments is not None:
        seen = seen & (q_segments[:, None, :, None] == k_segments[:, None, None])
    s = torch.where(seen, s, -math.inf)
    w, row_stat = _normalised(s, normalizer, alpha, top)
    logs = torch.where(w > 0, w, 1.0).log()
    max_key = w.detach().argmax(-1, keepdim=True)
    return {"y": w @ v, "weights": w, "row_stat": row_stat, "entropy": -(w * logs).sum(-1),
            "max_weight": w.gather(-1, max_key)[..., 0], "coverage": w.sum(-2)}


def near(got, want, tolerance=2e-5, name="", least=1e-30, naive=None):
    """Within tolerance of the largest value, or of `least`, or within twice the error of `naive`;
    infinities in place."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, (name, got.shape, want.shape)
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), name
    assert torch.equal(got[~finite], want[~finite]), name
    if finite.any():
        error = (got - want)[finite].abs().max().item()
        largest = want[finite].abs().max().item()
        bound = tolerance * max(largest, least)
        if naive is not None:
            bound = max(bound, 2 * (naive.detach().double() - want)[finite].abs().max().item())
        assert error <= bound, (name, error, bound, largest)
