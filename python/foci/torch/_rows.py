"""Row maps on their own, with gradients: weights of scores that somebody else made. In eager mode
an autograd function; compilers see the operators foci::normalize and foci::normalize_backward."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any, Iterator, Optional, Tuple, Union

import torch
from torch import Tensor

from .. import _core
from ..spec import Spec
from . import _inputs, _op

__all__ = ["entmax", "softmax", "sparsemax", "topk"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# ---- the engine's calls --------------------------------------------------------------------------


def _forward(text: str, scores: Tensor) -> Tensor:
    weights = torch.empty(scores.shape, dtype=scores.dtype)
    _core.normalize(_op.held_of(text), _op.bare(scores.detach()), weights)
    return weights


def _backward(text: str, weights: Tensor, up: Tensor, scores: Optional[Tensor] = None) -> Tensor:
    gradient = torch.empty(weights.shape, dtype=weights.dtype)
    _core.normalize_backward(_op.held_of(text), _op.bare(weights.detach()),
                             _op.bare(up.detach()), gradient,
                             None if scores is None else _op.bare(scores.detach()))
    return gradient


@functools.lru_cache(maxsize=64)
def _steep(text: str) -> bool:
    """Whether the gradient needs the scores: p ** (2 - alpha) magnifies the weights' rounding."""
    normalizer = json.loads(text).get("normalizer", {})
    return bool(normalizer.get("kind") == "entmax" and normalizer["alpha"] > 2)


def _kept(text: str, scores: Tensor, weights: Tensor) -> Tuple[Tensor, ...]:
    return (weights, scores) if _steep(text) else (weights,)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: str, scores: Tensor) -> Tensor:
        weights = _forward(text, scores)
        ctx.text = text
        ctx.save_for_backward(*_kept(text, scores, weights))
        return weights

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> Tuple[None, Tensor]:
        weights, *scores = ctx.saved_tensors
        if _op.batched(up):
            return None, torch.ops.foci.normalize_backward(weights, up, ctx.text, *scores)
        with torch.no_grad():
            gradient = _backward(ctx.text, weights, up, *scores)
        (gradient,) = _op.once([gradient], weights, up)
        return None, gradient


def _forward_learned(scores: Tensor, alpha: Tensor) -> Tensor:
    """entmax under a learned alpha: of shape [], or of the scores' rank, broadcast to them; each of
    its numbers is that of its own rows."""
    weights = torch.empty(scores.shape, dtype=scores.dtype)
    for text, of in _parts(scores, alpha):
        part = _op.bare(scores.detach()[of])
        made = torch.empty(part.shape, dtype=part.dtype)
        _core.normalize(_op.held_of(text), part, made)
        weights[of] = made
    return weights


def _backward_learned(weights: Tensor, up: Tensor, alpha: Tensor) -> Tuple[Tensor, Tensor]:
    scores = torch.empty(weights.shape, dtype=weights.dtype)
    alphas = []
    for text, of in _parts(weights, alpha):
        part, from_above = _op.bare(weights.detach()[of]), _op.bare(up.detach()[of])
        made = torch.empty(part.shape, dtype=part.dtype)
        _, dalpha = _core.entmax_backward(_op.held_of(text), part, from_above, made)
        scores[of] = made
        alphas.append(dalpha)
    return scores, torch.tensor(alphas, dtype=torch.float64).reshape(alpha.shape).to(alpha.dtype)


def _parts(like: Tensor, alpha: Tensor) -> Iterator[Tuple[str, Tuple[slice, ...]]]:
    """Each number of alpha as a spec's text, in order, and the part of the scores that is its."""
    numbers = alpha.detach().double().flatten().tolist()
    for index, number in zip(itertools.product(*map(range, alpha.shape)), numbers):
        yield _text("entmax", (("alpha", number),)), tuple(
            slice(None) if n == 1 else slice(i, i + 1) for i, n in zip(index, alpha.shape))


class _LearnedEntmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: Tensor) -> Tensor:
        weights = _forward_learned(scores, alpha)
        ctx.save_for_backward(weights, alpha)
        return weights

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> Any:
        weights, alpha = ctx.saved_tensors
        if _op.batched(up):
            return torch.ops.foci.entmax_backward(weights, up, alpha)
        with torch.no_grad():
            gradients = _backward_learned(weights, up, alpha)
        return _op.once(gradients, weights, alpha, up)


# ---- operators -----------------------------------------------------------------------------------

_library = torch.library.Library("foci", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("normalize(Tensor scores, str spec) -> Tensor",  # type: ignore[no-untyped-call]
                tags=_op.TAGS)
_library.define(  # type: ignore[no-untyped-call]
    "normalize_backward(Tensor weights, Tensor dweights, str spec, Tensor? scores=None) -> Tensor",
    tags=_op.TAGS)
_library.define("entmax(Tensor scores, Tensor alpha) -> Tensor",  # type: ignore[no-untyped-call]
                tags=_op.TAGS)
_library.define(  # type: ignore[no-untyped-call]
    "entmax_backward(Tensor weights, Tensor dweights, Tensor alpha) -> (Tensor, Tensor)",
    tags=_op.TAGS)
_library.impl("entmax", _forward_learned, "CPU")  # type: ignore[no-untyped-call]
_library.impl("entmax_backward", _backward_learned, "CPU")  # type: ignore[no-untyped-call]
_library.impl("normalize", lambda scores, text: _forward(text, scores),  # type: ignore[no-untyped-call]
              "CPU")
_library.impl("normalize_backward",  # type: ignore[no-untyped-call]
              lambda weights, up, text, scores=None: _backward(text, weights, up, scores), "CPU")


def _fake(like: Tensor, *_: Any) -> Tensor:
    return like.new_empty(like.shape)


def _context(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.text = inputs[1]
    ctx.save_for_backward(*_kept(ctx.text, inputs[0], output))


def _autograd(ctx: Any, up: Tensor) -> Tuple[Tensor, None]:
    weights, *scores = ctx.saved_tensors
    return _op.inner("normalize_backward", weights, up, ctx.text, *scores), None


def _fake_pair(weights: Tensor, _: Tensor, alpha: Tensor) -> Tuple[Tensor, Tensor]:
    return weights.new_empty(weights.shape), alpha.new_empty(alpha.shape)


def _learned_context(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


def _learned_autograd(ctx: Any, up: Tensor) -> Tuple[Tensor, Tensor]:
    weights, alpha = ctx.saved_tensors
    gradients: Tuple[Tensor, Tensor] = _op.inner("entmax_backward", weights, up, alpha)
    return gradients


for _name in ("normalize", "normalize_backward", "entmax"):
    torch.library.register_fake("foci::" + _name, _fake, lib=_library)
torch.library.register_fake("foci::entmax_backward", _fake_pair, lib=_library)
torch.library.register_autograd("foci::entmax", _learned_autograd,
                                setup_context=_learned_context, lib=_library)
torch.library.register_autograd("foci::entmax_backward", _op.no_second, lib=_library)
torch.library.register_autograd("foci::normalize", _autograd, setup_context=_context, lib=_library)
torch.library.register_autograd("foci::normalize_backward", _op.no_second, lib=_library)
for _name in ("normalize", "normalize_backward", "entmax", "entmax_backward"):
    torch.library.register_vmap("foci::" + _name,
                                _op.by_slices(getattr(torch.ops.foci, _name)), lib=_library)
_Transformed = _op.transformed("Normalize", lambda *a: torch.ops.foci.normalize(*a), _context,
                               _autograd)
_TransformedEntmax = _op.transformed("LearnedEntmax", lambda *a: torch.ops.foci.entmax(*a),
                                     _learned_context, _learned_autograd)

_op.add_inner("normalize_backward", lambda *a: torch.ops.foci.normalize_backward(*a))
_op.add_inner("entmax_backward", lambda *a: torch.ops.foci.entmax_backward(*a))

# ---- calls ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64, typed=True)
def _text(normalizer: str, options: Tuple[Tuple[str, Any], ...]) -> str:
    return Spec(normalizer=normalizer, **dict(options)).to_json()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_text(normalizer: str, options: Tuple[Tuple[str, Any], ...]) -> str:
    return _text(normalizer, options)


def _check(scores: Tensor, dim: int) -> None:
    _inputs.check_kind("scores", scores)
    if scores.device.type not in ("cpu", "meta"):
        raise ValueError(f"scores: device {scores.device} arrived, cpu is right")
    if scores.dtype not in _DTYPES:
        raise ValueError(f"scores: {scores.dtype} arrived, float32, float16 or bfloat16 is right")
    if scores.dim() == 0:
        raise ValueError("scores: shape [] arrived, one dimension at least is right")
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim: {type(dim).__name__} arrived, an integer is right")
    if not -scores.dim() <= dim < scores.dim():
        raise ValueError(f"dim: {dim} arrived beside scores of {scores.dim()} dimensions")


def _along(scores: Tensor, dim: int, normalizer: str, **options: Any) -> Tensor:
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores: {type(scores).__name__} arrived, a torch.Tensor is right")
    given = tuple(options.items())
    if torch.compiler.is_compiling():
        _check(scores, dim)
        weights: Tensor = torch.ops.foci.normalize(scores.movedim(dim, -1),
                                                   _constant_text(normalizer, given))
        return weights.movedim(-1, dim)
    text = _text(normalizer, given)
    try:
        _check(scores, dim)
        moved = scores.movedim(dim, -1)
        if _op.plain(scores) and not scores.is_meta:
            weights = _Normalize.apply(text, moved)  # type: ignore[no-untyped-call]
        else:
            _op.refuse_tangents(scores)
            weights = (_Transformed.apply if _op.under_func() else torch.ops.foci.normalize)(
                moved, text)
        return weights.movedim(-1, dim)
    except (TypeError, NotImplementedError, RuntimeError) as error:
        own = _inputs.explained(error, {"scores": scores})
        if own is error:
            raise
        raise own from error


def _learned(scores: Tensor, alpha: Tensor, dim: int) -> Tensor:
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores: {type(scores).__name__} arrived, a torch.Tensor is right")
    if torch.compiler.is_compiling():
        _check(scores, dim)
        weights: Tensor = torch.ops.foci.entmax(scores.movedim(dim, -1),
                                                _own_alpha(scores, alpha, dim))
        return weights.movedim(-1, dim)
    try:
        _check(scores, dim)
        _inputs.check_kind("alpha", alpha)
        moved, own = scores.movedim(dim, -1), _own_alpha(scores, alpha, dim)
        if alpha.is_meta != scores.is_meta:
            raise ValueError(f"alpha: a tensor on {alpha.device} arrived beside scores on "
                             f"{scores.device}, cpu is right for both")
        if _op.plain(scores, alpha) and not scores.is_meta:
            weights = _LearnedEntmax.apply(moved, own)  # type: ignore[no-untyped-call]
        else:
            _op.refuse_tangents(scores, alpha)
            weights = (_TransformedEntmax.apply if _op.under_func() else torch.ops.foci.entmax)(
                moved, own)
        return weights.movedim(-1, dim)
    except (TypeError, NotImplementedError, RuntimeError) as error:
        explained = _inputs.explained(error, {"scores": scores, "alpha": alpha})
        if explained is error:
            raise
        raise explained from error


def _own_alpha(scores: Tensor, alpha: Tensor, dim: int) -> Tensor:
    """A learned alpha as the operator takes it: of shape [], or of the scores' rank with 1 last."""
    if not alpha.is_floating_point():
        raise TypeError(f"alpha: {alpha.dtype} arrived, a floating type is right")
    if alpha.numel() == 1:
        return alpha.reshape(())
    rank = scores.dim()
    at = dim + rank if dim < 0 else dim
    shape = (1,) * (rank - alpha.dim()) + tuple(alpha.shape)
    if len(shape) != rank or shape[at] != 1 or any(
            a not in (1, s) for a, s in zip(shape, scores.shape)):
        raise ValueError(f"alpha: shape {list(alpha.shape)} arrived, one number is right, or what "
                         f"broadcasts to scores {list(scores.shape)} with 1 along dim {dim}")
    return alpha.reshape(shape).movedim(dim, -1)


def softmax(scores: Tensor, dim: int = -1) -> Tensor:
    """softmax of scores; -inf is a key that is not there, and a row of nothing else gives 0."""
    return _along(scores, dim, "softmax")


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    """The Euclidean projection of scores onto the simplex (Martins and Astudillo 2016)."""
    return _along(scores, dim, "sparsemax")


def entmax(scores: Tensor, alpha: Union[float, Tensor] = 1.5, dim: int = -1) -> Tensor:
    """``[(alpha - 1) s - tau]_+ ** (1 / (alpha - 1))``, alpha > 1 (Peters et al. 2019).

    alpha may be a tensor, which gets a gradient (Correia et al. 2019): one number, or one for each
    of several parts, of a shape that broadcasts to the scores' with 1 along dim ([H, 1, 1] for
    scores [B, H, N, M]).
    """
    if isinstance(alpha, Tensor):
        return _learned(scores, alpha, dim)
    return _along(scores, dim, "entmax", alpha=alpha)


def topk(scores: Tensor, k: int, dim: int = -1) -> Tensor:
    """softmax over the k best scores; ties go to the lowest index."""
    return _along(scores, dim, "topk", top_k=k)
