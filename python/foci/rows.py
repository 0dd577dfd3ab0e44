"""Row maps on their own: weights of scores that somebody else made."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import _arrays, _core
from .spec import Spec, one_number

__all__ = ["alpha_gradient", "entmax", "normalize_backward", "softmax", "sparsemax", "topk"]

Array = Any


@functools.lru_cache(maxsize=64, typed=True)
def _spec(normalizer: str, **options: Any) -> _core.Spec:
    return Spec(normalizer=normalizer, **options)._held


def normalizer_spec(normalizer: str, alpha: float = 1.5, top_k: int = 1) -> _core.Spec:
    """The engine's spec of a row map."""
    if normalizer == "entmax":
        return _spec("entmax", alpha=one_number("alpha", alpha))
    return _spec("topk", top_k=top_k) if normalizer == "topk" else _spec(normalizer)


def _along(spec: _core.Spec, scores: Array, axis: int) -> np.ndarray:
    if axis == -1:
        return _core.normalize(spec, scores)  # type: ignore[return-value]
    if scores is None:
        raise ValueError("scores: None arrived, an array is right")
    _arrays.refuse_gradient("scores", scores)
    given = np.asarray(_arrays.ordinary("scores", scores))
    if not -given.ndim <= axis < given.ndim:
        raise ValueError(f"axis: {axis} arrived beside scores of {given.ndim} dimensions")
    moved = np.moveaxis(given, axis, -1)
    weights: Any = _core.normalize(spec, np.ascontiguousarray(moved))
    return np.moveaxis(weights, -1, axis)


def softmax(scores: Array, axis: int = -1) -> np.ndarray:
    """softmax of scores [..., M], float32 or float16; -inf is a key that is not there."""
    return _along(normalizer_spec("softmax"), scores, axis)


def sparsemax(scores: Array, axis: int = -1) -> np.ndarray:
    """The Euclidean projection of scores onto the simplex (Martins and Astudillo 2016)."""
    return _along(normalizer_spec("sparsemax"), scores, axis)


def entmax(scores: Array, alpha: float = 1.5, axis: int = -1) -> np.ndarray:
    """``[(alpha - 1) s - tau]_+ ** (1 / (alpha - 1))``, alpha > 1 (Peters et al. 2019)."""
    return _along(normalizer_spec("entmax", alpha=alpha), scores, axis)


def topk(scores: Array, k: int, axis: int = -1) -> np.ndarray:
    """softmax over the k best scores; ties go to the lowest index."""
    return _along(normalizer_spec("topk", top_k=k), scores, axis)


def normalize_backward(weights: Array, dweights: Array, normalizer: str = "softmax",
                       alpha: float = 1.5, *, scores: Array = None) -> np.ndarray:
    """The gradient of the scores [..., M] from the weights and their gradient.

    Args:
        weights: what one of the row maps gave.
        dweights: of its shape and dtype.
        normalizer: which one; alpha: of ``"entmax"``.
        scores: what the weights were made from, of their shape and dtype. Entmax with alpha > 2
            goes by them where they are given: weights of float32 alone leave an error of up to
            alpha * 1.2e-7, for they are raised to the power 2 - alpha. Other maps do not read them.
    """
    spec = normalizer_spec(normalizer, alpha=alpha)
    return _core.normalize_backward(  # type: ignore[return-value]
        spec, weights, dweights, scores=scores)


def alpha_gradient(weights: Array, dweights: Array, alpha: float = 1.5) -> float:
    """The gradient of entmax's alpha from the weights [..., M] that it gave and their gradient.

    Args:
        weights: what :func:`entmax` gave. dweights: of its shape and dtype.
        alpha: as it was there.
    """
    return _core.entmax_backward(normalizer_spec("entmax", alpha=alpha), weights, dweights)[1]
