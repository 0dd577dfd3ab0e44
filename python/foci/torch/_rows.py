"""Row maps on their own, with gradients: weights of scores that somebody else made."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import Tensor

from .. import _core
from ..rows import normalizer_spec

__all__ = ["entmax", "softmax", "sparsemax", "topk"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: _core.Spec, scores: Tensor) -> Tensor:  # type: ignore[override]
        scores = scores.detach()
        weights = torch.empty(scores.shape, dtype=scores.dtype)
        _core.normalize(spec, scores, weights)
        ctx.spec = spec
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> Tuple[None, Tensor]:  # type: ignore[override]
        (weights,) = ctx.saved_tensors
        scores = torch.empty(weights.shape, dtype=weights.dtype)
        _core.normalize_backward(ctx.spec, weights.detach(), up.detach(), scores)
        return None, scores


def _along(spec: _core.Spec, scores: Tensor, dim: int) -> Tensor:
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores: {type(scores).__name__} arrived, a torch.Tensor is right")
    if scores.device.type != "cpu":
        raise ValueError(f"scores: device {scores.device} arrived, cpu is right")
    if scores.dtype not in _DTYPES:
        raise ValueError(f"scores: {scores.dtype} arrived, float32, float16 or bfloat16 is right")
    if scores.dim() == 0:
        raise ValueError("scores: shape [] arrived, one dimension at least is right")
    moved = scores.movedim(dim, -1)
    return _Normalize.apply(spec, moved).movedim(-1, dim)  # type: ignore[no-any-return]


def softmax(scores: Tensor, dim: int = -1) -> Tensor:
    """softmax of scores; -inf is a key that is not there, and a row of nothing else gives 0."""
    return _along(normalizer_spec("softmax"), scores, dim)


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    """The Euclidean projection of scores onto the simplex (Martins and Astudillo 2016)."""
    return _along(normalizer_spec("sparsemax"), scores, dim)


def entmax(scores: Tensor, alpha: float = 1.5, dim: int = -1) -> Tensor:
    """``[(alpha - 1) s - tau]_+ ** (1 / (alpha - 1))``, alpha > 1 (Peters et al. 2019)."""
    return _along(normalizer_spec("entmax", alpha=alpha), scores, dim)


def topk(scores: Tensor, k: int, dim: int = -1) -> Tensor:
    """softmax over the k best scores; ties go to the lowest index."""
    return _along(normalizer_spec("topk", top_k=k), scores, dim)
