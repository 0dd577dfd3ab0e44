"""attention for PyTorch: any option, with gradients, in eager mode and under torch.compile."""

from __future__ import annotations

import functools
from typing import (TYPE_CHECKING, Any, Callable, Dict, Iterable, Optional, Sequence, Tuple, Union,
                    overload)

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from .. import _core
from .._attention import TENSORS, described, indices, resolve, statistics_bits
from .._types import Options
from ..spec import Spec
from . import _inputs, _nested, _op, _watch
from ._mask import BlockMask, mask_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Outputs", "attention"]


class Outputs:
    """What :func:`attention` gives where statistics are asked for. All but ``max_key`` and
    ``support`` have gradients; those that were not asked for are None.

    Attributes:
        y: [B, H, N, Dv], of q's dtype.
        row_stat: [B, H, N] float32: the log-sum-exp of the scores (softmax, topk), or the
            threshold tau (sparsemax, entmax).
        entropy: [B, H, N] float32, in nats, of the weights before dropout.
        max_weight: [B, H, N] float32; max_key, int64, is the first key that has it.
        support: [B, H, N] float32: the number of keys that take part.
        coverage: [B, H, M] float32: how much weight each key got in all.
    """

    def __init__(self, results: Dict[str, Tensor], call: Tuple[Any, ...]) -> None:
        self.y = results["y"]
        self.row_stat = results["row_stat"]
        self.entropy = results.get("entropy")
        self.max_weight = results.get("max_weight")
        self.max_key = results.get("max_key")
        self.support = results.get("support")
        self.coverage = results.get("coverage")
        self._call = call

    def __repr__(self) -> str:
        return described(self)

    def weights(self, rows: Optional[Sequence[int]] = None,
                heads: Optional[Sequence[int]] = None) -> Tensor:
        """Exact weights of some query rows and heads, before dropout.

        Args:
            rows: queries, all where None.
            heads: query heads, all where None.

        Returns:
            [B, len(heads), len(rows), M] float32. They have gradients, whose backward takes memory
            for the N x M matrix.
        """
        q, k, tensors, text = self._call
        B, H, N = self.row_stat.shape
        return _op.call(  # type: ignore[no-any-return]
            "weights", q, k, *tensors, self.row_stat.detach(), text, indices("rows", rows, N),
            indices("heads", heads, H))


# ---- eager mode ----------------------------------------------------------------------------------


class _Call:
    """What a call's backward needs beside tensors."""

    __slots__ = ("held", "statistics", "names")

    def __init__(self, held: _core.Spec, statistics: int, names: Tuple[str, ...]) -> None:
        self.held = held
        self.statistics = statistics
        self.names = names  # of the tensors after q, k and v


class _Attention(torch.autograd.Function):
    """Eager mode's operator, which spares the dispatcher's time. Gives y and, where there are
    statistics, the row statistic and them."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor,
                *others: Tensor) -> Any:
        tensors = {name: t for name, t in zip(call.names, others) if name not in _op.NUMBERS}
        results, ordinary = _op.run_forward(call.held, call.statistics, q, k, v, tensors)
        ctx.save_for_backward(q, k, v, *others, *(results.get(name) for name in _op.SAVED))
        ctx.call, ctx.ordinary = call, ordinary
        ctx.set_materialize_grads(False)
        if not call.statistics:
            return results["y"]
        fixed = [results[name] for name in ("max_key", "support") if name in results]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results[name] for name in _op.RESULTS if name in results)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Any:
        call: _Call = ctx.call
        every = ctx.saved_tensors  # asked for once: whoever saved them may make them anew
        if _op.batched(*grads):
            return (None, *_of_operator(call, every, grads, ctx.needs_input_grad[1:]))
        with torch.no_grad():
            got = _Attention._gradients(ctx, call, every, grads)
        return (None, *_op.once(got, *every, *grads))

    @staticmethod
    def _gradients(ctx: Any, call: _Call, every: Tuple[Any, ...],
                   grads: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
        q, k, v, *others = every[:-len(_op.SAVED)]
        given = dict(zip(call.names, others))
        numbers = {name: given.pop(name) for name in _op.NUMBERS if name in given}
        saved: Dict[str, Any] = {name: t for name, t in zip(
            _op.SAVED, every[-len(_op.SAVED):]) if t is not None}
        saved["ordinary"] = ctx.ordinary
        upstream = {"d" + name: g for name, g in zip(_given(call.statistics), grads)
                    if g is not None}
        inputs = ("q", "k", "v") + call.names
        wanted = [name for name, needs in zip(inputs, ctx.needs_input_grad[1:]) if needs]
        got = _op.run_backward(call.held, call.statistics, q, k, v, given, saved, upstream,
                               wanted, numbers)
        return tuple(got.get(name) for name in inputs)


def _of_operator(call: _Call, every: Tuple[Any, ...], grads: Tuple[Optional[Tensor], ...],
                 needs: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    """The gradients by the operator, which is asked wherever somebody else looks on."""
    inputs = ("q", "k", "v") + call.names
    given = dict(zip(inputs, every))
    saved = [every[len(inputs) + n] for n in range(len(_op.SAVED))]
    saved = [_op.none(name, every[0]) if t is None else t for name, t in zip(_op.SAVED, saved)]
    by_name = {"d" + name: g for name, g in zip(_given(call.statistics), grads)}
    wanted = [name for name, needed in zip(inputs, needs) if needed]
    bits = sum(1 << n for n, name in enumerate(_op.GRADIENTS) if name in wanted)
    got = torch.ops.foci.attention_backward(
        *[by_name.get(name) for name in _op.UPSTREAM], *[given.get(n) for n in ("q", "k", "v")],
        *[given.get(name) for name in _op.NAMES], *saved, call.held.to_json(),
        call.statistics & ~_ROW_STAT, bits)
    results = dict(zip(_op.GRADIENTS, got))
    return tuple(results[name] if name in wanted else None for name in inputs)


def _named(statistics: int) -> Tuple[str, ...]:
    """Names of what a call gives."""
    if not statistics:
        return ("y",)
    return ("y", "row_stat", *[name for name in _op.RESULTS[2:]
                               if statistics & statistics_bits(name)])


_given = functools.lru_cache(maxsize=64)(_named)


def _require_tensor(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {type(t).__name__} arrived, a torch.Tensor is right")


_ROW_STAT = 16  # a bit that asks for Outputs without a statistic of its own


def _bits(statistics: Union[str, Iterable[str]]) -> int:
    if statistics is None or (isinstance(statistics, str) and not statistics):
        return 0
    bits = statistics_bits(statistics)
    return 0 if bits < 0 else bits | _ROW_STAT


@overload
def attention(q: Tensor, k: Tensor, v: Tensor,  # type: ignore[overload-overlap]
              spec: Optional[Spec] = None, *, statistics: Tuple[()] = (),
              mask_mod: Union[None, Callable[..., Tensor], BlockMask] = None,
              **options: Unpack[Options]) -> Tensor: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, spec: Optional[Spec] = None, *,
              statistics: Union[str, Iterable[str]],
              mask_mod: Union[None, Callable[..., Tensor], BlockMask] = None,
              **options: Unpack[Options]) -> Outputs: ...


def attention(q: Tensor, k: Tensor, v: Tensor, spec: Optional[Spec] = None, *,
              statistics: Union[str, Iterable[str]] = (),
              mask_mod: Union[None, Callable[..., Tensor], BlockMask] = None,
              **options: Any) -> Any:
    """Attention of q to k, summed over v, with gradients for every tensor that it reads.

    Memory is linear in N + M, forward and backward, whatever the options (but what a ``keep``, a
    ``bias`` or a ``mask_mod`` takes that is N x M itself). Works in eager mode and
    under ``torch.compile`` and ``torch.export``, as the operator ``torch.ops.foci.attention``.
    torch.func's reverse mode works; gradients of gradients and forward mode are refused.

    Args:
        q: [B, H, N, D] float32, bfloat16 or float16, on the CPU. Strided views (heads of one
            projection, say) are read in place; only one whose last dimension is strided is copied
            first. So for k and v.
        k: [B, Hk, M, D]; Hk divides H.
        v: [B, Hk, M, Dv].
        spec: what to compute; or, instead, the options of :class:`foci.Spec` by keyword, and the
            tensors that they read: ``bias``, ``keep``, ``key_lengths``, ``past_lengths``,
            ``q_segments``, ``k_segments``, ``slopes``, ``table1d``, ``table2d``, ``score_w``.
            ``scale`` may be a tensor, one number or [H], which gets a gradient, and so may entmax's
            ``alpha``; beside a spec too. ``bias`` and ``keep`` take ``causal_upper_left`` and
            ``causal_lower_right`` of torch.nn.attention.bias too.
            ``dropout`` without ``dropout_seed`` draws the seed from PyTorch's generator.
        statistics: names among entropy, max_weight, support, coverage, row_stat.
        mask_mod: a function ``(b, h, q_idx, kv_idx) -> bool`` as FlexAttention's, or what
            :func:`create_block_mask` made of it; True attends. A function is evaluated anew in
            every call, and cannot be under ``torch.compile``: make the mask once.

    Returns:
        y [B, H, N, Dv], in q's order of dimensions; with statistics :class:`Outputs`. Of nested
        q, k and v [B, H, lengths, D] (either layout) a nested y: their sequences run packed, as
        segments do.

    Raises:
        ValueError, TypeError: naming the argument, what arrived and what would be right.

    Example:
        >>> y = foci.torch.attention(q, k, v, causal=True)
        >>> out = foci.torch.attention(q, k, v, normalizer="entmax", statistics=["entropy"])
        >>> (loss + 0.1 * out.entropy.mean()).backward()
    """
    if torch.compiler.is_compiling():
        return _traced(q, k, v, spec, statistics, mask_mod, options)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        for name, t in (("q", q), ("k", k), ("v", v)):
            _require_tensor(name, t)
    if _watch.listening and _watch.tell is not None and not q.is_nested:
        told = _watch.tell(q, k, v, spec, statistics, mask_mod, options)
        if told is not None:
            return told
    try:
        return _eager(q, k, v, spec, statistics, mask_mod, {**options} if options else options)
    except (TypeError, NotImplementedError, RuntimeError) as error:
        own = _inputs.explained(error, {"q": q, "k": k, "v": v, **options})
        if own is error:
            raise
        raise own from error


def _eager(q: Tensor, k: Tensor, v: Tensor, spec: Optional[Spec],
           statistics: Union[str, Iterable[str]],
           mask_mod: Union[None, Callable[..., Tensor], BlockMask],
           options: Dict[str, Any]) -> Any:
    if q.is_nested:
        return _on_nested(q, k, v, spec, statistics, mask_mod, options)
    if options:
        options = _resolved(q, k, spec, options)
    if mask_mod is not None:
        options = _masked(q, k, mask_mod, options)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast(q, k, v)
    numbers: Dict[str, Tensor] = {}
    seed = None
    if options:
        options, numbers, seed = _own_tensors(spec, options)
    spec, tensors = resolve(spec, options)
    bits = _bits(statistics)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        _op.check_ranks(q, k, v)
    if not _op.plain(q, k, v, *tensors.values(), *numbers.values()):
        return _looked_at(q, k, v, spec.to_json(), tensors, numbers, seed, bits)
    wanted = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or
        any(t.requires_grad for t in (*tensors.values(), *numbers.values())))
    if not wanted and not bits and not numbers and seed is None:
        try:
            y = _op.empty_result(q, v)
            _core.attention(spec._held, q, k, v, tensors, 0, {"y": y})
            return y
        except (TypeError, ValueError, RuntimeError):  # what is wrong shows below
            pass
    if q.is_meta:
        return _looked_at(q, k, v, spec.to_json(), tensors, numbers, seed, bits)
    q, k, v = _op.prepared("q", q), _op.prepared("k", k), _op.prepared("v", v)
    if tensors:
        tensors = {name: _op.prepared(name, t) for name, t in tensors.items()}
    held = _op.with_numbers(spec._held, numbers, seed)
    if wanted:
        names, others = (*tensors, *numbers), (*tensors.values(), *numbers.values())
        got = _Attention.apply(  # type: ignore[no-untyped-call]
            _Call(held, bits, names), q, k, v, *others)
        if not bits:
            return got
        results = dict(zip(_given(bits), got))
    else:
        results, _ = _op.run_forward(held, bits & ~_ROW_STAT, q, k, v, tensors)
        if not bits:
            return results["y"]
    return _outputs(results, q, k, spec.to_json(), tensors, numbers, seed)


def _own_tensors(spec: Optional[Spec], options: Dict[str, Any]) -> Tuple[
        Dict[str, Any], Dict[str, Tensor], Optional[Tensor]]:
    """Takes a learned scale or alpha and a dropout seed out of a call's options; draws the seed."""
    numbers = {name: options[name] for name in _op.NUMBERS
               if isinstance(options.get(name), Tensor)}
    if numbers:
        options = {name: value for name, value in options.items() if name not in numbers}
    for name, t in numbers.items():
        if not t.is_floating_point():
            raise TypeError(f"{name}: {t.dtype} arrived, a floating type is right")
    p, seed = options.get("dropout"), options.get("dropout_seed")
    if isinstance(seed, Tensor):
        options = {name: value for name, value in options.items() if name != "dropout_seed"}
        if spec is None and p is None:
            raise ValueError("dropout_seed: given, but nothing reads it without dropout")
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise TypeError(f"dropout_seed: {seed.dtype} of shape {list(seed.shape)} arrived, one "
                            "int64 is right")
    else:
        draws = spec is None and seed is None and isinstance(p, float) and p > 0
        seed = torch.randint(1 << 62, (), dtype=torch.int64) if draws else None
    if isinstance(p, (int, float)) and not isinstance(p, bool) and p == 0:
        options = {name: value for name, value in options.items() if not name.startswith("dropout")}
    for name, t in options.items():
        if t is not None and name in TENSORS and not isinstance(t, (Tensor, bool)):
            _require_tensor(name, t)
    return options, numbers, seed


def _masked(q: Tensor, k: Tensor, mask_mod: Union[Callable[..., Tensor], BlockMask],
            options: Dict[str, Any]) -> Dict[str, Any]:
    if q.dim() != 4 or k.dim() != 4:
        _op.check_ranks(q, k, k)
    mask = mask_of(mask_mod, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return mask.options(options, q.shape[0])


def _resolved(q: Tensor, k: Tensor, spec: Optional[Spec],
              options: Dict[str, Any]) -> Dict[str, Any]:
    """The options without tensors that say something else than their memory."""
    if isinstance(options.get("bias"), _inputs.CausalBias) or isinstance(
            options.get("keep"), _inputs.CausalBias):
        if q.dim() != 4 or k.dim() != 4:
            _op.check_ranks(q, k, k)
        return _inputs.without_causal_biases(spec, options, q.shape[2], k.shape[2])
    return options


def _on_nested(q: Tensor, k: Tensor, v: Tensor, spec: Optional[Spec], statistics: Any,
               mask_mod: Any, options: Dict[str, Any]) -> Tensor:
    """A call on nested tensors: one on their sequences packed."""
    if mask_mod is not None:
        raise TypeError("mask_mod: given beside nested tensors; padded ones are right with it")
    if statistics not in ((), [], "", None):
        raise TypeError("statistics: given beside nested tensors; padded ones, or packed ones with "
                        "q_segments and k_segments, are right with them")
    if spec is not None:
        if not isinstance(spec, Spec):
            raise TypeError(f"spec: {type(spec).__name__} arrived, foci.Spec is right")
        _nested.refuse_laid_out({name: True for name in spec.tensors})
        spec = spec.replace(segments=True)
    pq, pk, pv, options = _nested.packed_options(options, ("q", "k", "v"), q, k, v)
    y: Tensor = attention(pq, pk, pv, spec, **options)
    return _nested.unpack(y, q)


def _looked_at(q: Tensor, k: Tensor, v: Tensor, text: str, tensors: Dict[str, Tensor],
               numbers: Dict[str, Tensor], seed: Optional[Tensor], bits: int) -> Any:
    """The operator's call where somebody else looks at the tensors: a mode, a transform, a class
    derived from Tensor, or a device that holds no numbers."""
    named = {"q": q, "k": k, "v": v, **tensors}
    for name, t in named.items():
        _inputs.check_kind(name, t)
        if t.is_meta and not all(other.is_meta for other in named.values()):
            raise ValueError(f"{name}: a tensor on meta arrived beside others that hold numbers, "
                             "foci computes on the CPU")
    return _operator(q, k, v, text, tensors, numbers, seed, bits)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    dtype = torch.get_autocast_dtype("cpu")
    return q.to(dtype), k.to(dtype), v.to(dtype)


# ---- the operator --------------------------------------------------------------------------------


def _operator(q: Tensor, k: Tensor, v: Tensor, text: str, tensors: Dict[str, Tensor],
              numbers: Dict[str, Tensor], seed: Optional[Tensor], bits: int) -> Any:
    others = _in_order(tensors, numbers, seed)
    arguments = (q, k, v, *others, text, bits & ~_ROW_STAT)
    got = (torch.ops.foci.attention(*arguments) if torch.compiler.is_compiling() else
           _op.call("attention", *arguments))
    if not bits:
        return got[0]
    results = {name: t for name, t in zip(_op.RESULTS, got) if name in _named(bits)}
    return _outputs(results, q, k, text, tensors, numbers, seed)


def _in_order(tensors: Dict[str, Tensor], numbers: Dict[str, Tensor],
              seed: Optional[Tensor]) -> list[Optional[Tensor]]:
    """Of _op.NAMES, those that a call has."""
    given = {**tensors, **numbers}
    return [given.get(name) for name in TENSORS + _op.NUMBERS] + [seed]


def _outputs(results: Dict[str, Tensor], q: Tensor, k: Tensor, text: str,
             tensors: Dict[str, Tensor], numbers: Dict[str, Tensor],
             seed: Optional[Tensor]) -> Outputs:
    return Outputs(results, (q, k, _in_order(tensors, numbers, seed), text))


class _Shaped:
    """Stands for a tensor where only its name and shape matter."""

    def __init__(self, shape: Tuple[int, ...]) -> None:
        self.shape = shape


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_text(spec: Optional[Spec], names: Tuple[str, ...],
                   shapes: Tuple[Tuple[int, ...], ...], options: Tuple[Any, ...]) -> str:
    arrays = {name: _Shaped(shape) for name, shape in zip(names, shapes)}
    resolved, _ = resolve(spec, {**dict(options), **arrays})
    return resolved.to_json()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_bits(statistics: Any) -> int:
    return _bits(statistics)


def _specialised(value: Any) -> Any:
    """A number that a compiler holds for one of many becomes a constant, which a guard watches."""
    if isinstance(value, (tuple, list)):
        return tuple(_specialised(x) for x in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return guard_scalar(value)
    return value


def _traced(q: Tensor, k: Tensor, v: Tensor, spec: Optional[Spec],
            statistics: Union[str, Iterable[str]], mask_mod: Any, options: Dict[str, Any]) -> Any:
    """The operator's call as compilers see it: what is no tensor becomes a constant."""
    if q.is_nested:
        return _on_nested(q, k, v, spec, statistics, mask_mod, options)
    options = _resolved(q, k, spec, options)
    if mask_mod is not None:
        if not isinstance(mask_mod, BlockMask):
            raise TypeError(f"mask_mod: {type(mask_mod).__name__} arrived under torch.compile; "
                            "make it a mask with foci.torch.create_block_mask outside")
        options = mask_mod.options(options, q.shape[0])
    if torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast(q, k, v)
    options, numbers, seed = _own_tensors(spec, options)
    tensors = {name: t for name, t in options.items() if isinstance(t, Tensor)}
    rest = tuple((name, _specialised(value)) for name, value in options.items()
                 if name not in tensors)
    # Only tables' shapes say something about the spec.
    shapes = tuple(tuple(t.shape) if name in ("table1d", "table2d") else ()
                   for name, t in tensors.items())
    text = _constant_text(spec, tuple(tensors), shapes, rest)
    bits = _constant_bits(tuple(statistics) if not isinstance(statistics, str) else statistics)
    return _operator(q, k, v, text, tensors, numbers, seed, bits)
