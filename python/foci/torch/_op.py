"""The operators foci::attention, foci::attention_backward and foci::weights, which torch.compile
and torch.export see, and the engine's calls on tensors that both they and eager mode make.

The operators are functional: every result is a tensor of its own. A spec travels as its JSON text;
what a spec asks of a call's tensors (``scale``, ``alpha``, ``seed``) travels as tensors, so that a
compiled graph reads them anew in each call. A result or gradient that is not asked for is a tensor
of shape [0].
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _core
from .._attention import TENSORS
from ..spec import Spec, in_options
from ._inputs import check_kind

# The tensors of a call beside q, k and v, in the operators' order.
NAMES = TENSORS + ("scale", "alpha", "seed")
# Numbers of the spec that a call may bring as tensors, and learn.
NUMBERS = ("scale", "alpha")
# Those that may get gradients.
LEARNED = ("bias", "slopes", "table1d", "table2d", "score_w") + NUMBERS
RESULTS = ("y", "row_stat", "entropy", "max_weight", "max_key", "support", "coverage")
UPSTREAM = ("dy", "drow_stat", "dentropy", "dmax_weight", "dcoverage")
SAVED = ("y", "row_stat", "entropy", "max_weight", "max_key")
GRADIENTS = ("q", "k", "v") + LEARNED

# Before PyTorch 2.10 tensors come through __dlpack__, which refuses those that want gradients.
_OLD = not hasattr(Tensor, "__dlpack_c_exchange_api__")
_ENTROPY, _MAX_WEIGHT, _SUPPORT, _COVERAGE = 1, 2, 4, 8  # bits of `statistics`


@functools.lru_cache(maxsize=256)
def held_of(text: str) -> _core.Spec:
    """The engine's form of a spec's JSON text."""
    return _core.Spec(text)


def with_numbers(held: _core.Spec, numbers: Dict[str, Tensor],
                 seed: Optional[Tensor]) -> _core.Spec:
    """The spec with the numbers of a learned scale or alpha, and a drawn seed."""
    if not numbers and seed is None:
        return held
    for name, t in (*numbers.items(), ("dropout_seed", seed)):
        if t is not None and t.is_meta:
            raise ValueError(f"{name}: a tensor on meta arrived, foci computes on the CPU")
    values: Dict[str, Any] = {}
    for name, t in numbers.items():
        if t.dim() > 1:
            raise ValueError(f"{name}: shape {list(t.shape)} arrived, [1] or [H] is right")
        values[name] = t.detach().reshape(-1).double().tolist()
    try:
        return held.with_numbers(values.get("scale"), None if seed is None else int(seed.item()),
                                 values.get("alpha"))
    except ValueError as error:
        raise ValueError(in_options(str(error))) from None


@functools.lru_cache(maxsize=256)
def before_dropout(text: str) -> str:
    """A spec's text without dropout of weights, which exact weights do not have."""
    options = Spec.from_json(text).to_dict()
    if options.get("dropout") and options["dropout"]["place"] == "weights":
        options["dropout"] = None
    return Spec.from_json(options).to_json()


def prepared(name: str, t: Tensor) -> Tensor:
    """A tensor as the engine reads it: rows dense, as PyTorch's own operators make them."""
    if not t.is_cpu:
        raise ValueError(f"{name}: a tensor on {t.device} arrived, foci computes on the CPU")
    if t.layout is not torch.strided or t.is_nested or t.is_quantized:
        check_kind(name, t)
    t = bare(t)
    if t.dim() > 0 and (last := t.stride(-1)) != 1 and t.shape[-1] > 1 and not (
            last == 0 and name in ("keep", "bias")):
        t = t.contiguous()
    return t


def bare(t: Tensor) -> Tensor:
    """A tensor of a class derived from Tensor, whose rules have had their say, as a plain one."""
    return t if type(t) in _PLAIN else t.detach().as_subclass(Tensor)


_peek_functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_PLAIN = (Tensor, torch.nn.Parameter)


def plain(*tensors: Any) -> bool:
    """Whether nothing but the CPU looks at these tensors: no compiler, tracer, mode or subclass."""
    if (_dispatch_modes() or _peek_functorch() is not None or _tracing() is not None
            or forward_ad._current_level >= 0):
        return False
    for t in tensors:
        if type(t) not in _PLAIN:
            return False
    return True


def batched(*tensors: Optional[Tensor]) -> bool:
    """Whether gradients come many at once (is_grads_batched, vectorize=True)."""
    return any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)


def under_func() -> bool:
    """Whether a transform of torch.func is at work."""
    return _peek_functorch() is not None


def refuse_tangents(*tensors: Any) -> None:
    """Raises where forward-mode differentiation would lose its tangents."""
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if (isinstance(t, Tensor) and
                forward_ad.unpack_dual(t).tangent is not None):  # type: ignore[no-untyped-call]
            raise NotImplementedError("foci has no forward-mode derivatives (jvp, jacfwd); reverse "
                                      "mode it has (backward, vjp, jacrev)")


class _Once(torch.autograd.Function):
    """Gradients as they are, whose own gradients are refused."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(NO_SECOND)


NO_SECOND = "foci has no gradients of gradients"


def once(gradients: Sequence[Optional[Tensor]], *sources: Optional[Tensor]) -> Tuple[Any, ...]:
    """Gradients that refuse to be differentiated, where a graph of them is made at all."""
    if not torch.is_grad_enabled() or not any(
            t is not None and t.requires_grad for t in sources):
        return tuple(gradients)
    given = [g for g in gradients if g is not None]
    made = iter(_Once.apply(  # type: ignore[no-untyped-call]
        len(given), *given, *[t for t in sources if t is not None]))
    return tuple(None if g is None else next(made) for g in gradients)


def _detached(named: Dict[str, Any]) -> Dict[str, Any]:
    return {name: t.detach() if isinstance(t, Tensor) else t for name, t in named.items()}


# ---- the engine's calls --------------------------------------------------------------------------


def empty_result(q: Tensor, v: Tensor) -> Tensor:
    """y's memory, [B, H, N, Dv], in q's order of dimensions: heads of one projection stay so."""
    B, H, N, D = q.shape
    if v.shape[3] == D:
        return torch.empty_like(q)
    if q.stride(1) < q.stride(2):
        return q.new_empty((B, N, H, v.shape[3])).transpose(1, 2)
    return q.new_empty((B, H, N, v.shape[3]))


def dense(t: Tensor) -> Tensor:
    """What `prepared` makes of q, k or v, for compilers' fake tensors."""
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def empty_statistics(q: Tensor, k: Tensor, statistics: int) -> Dict[str, Tensor]:
    """Memory of the row statistic and of the statistics asked for."""
    rows = q.shape[:3]
    made = {"row_stat": q.new_empty(rows, dtype=torch.float32)}
    if statistics & _ENTROPY:
        made["entropy"] = q.new_empty(rows, dtype=torch.float32)
    if statistics & _MAX_WEIGHT:
        made["max_weight"] = q.new_empty(rows, dtype=torch.float32)
        made["max_key"] = q.new_empty(rows, dtype=torch.int64)
    if statistics & _SUPPORT:
        made["support"] = q.new_empty(rows, dtype=torch.float32)
    if statistics & _COVERAGE:
        made["coverage"] = q.new_empty((rows[0], rows[1], k.shape[2]), dtype=torch.float32)
    return made


def empty_gradient(t: Tensor) -> Tensor:
    """Memory of dq, dk or dv: in the order of its dimensions, rows dense."""
    made = torch.empty_like(t)
    if made.stride(-1) != 1 and made.shape[-1] > 1:
        made = torch.empty_like(t, memory_format=torch.contiguous_format)
    return made


def check_ranks(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t, letters in (("q", q, "B, H, N, D"), ("k", k, "B, Hk, M, D"),
                             ("v", v, "B, Hk, M, Dv")):
        if t.dim() != 4:
            check_kind(name, t)
            raise ValueError(f"{name}: shape {list(t.shape)} arrived, four dimensions "
                             f"[{letters}] are right")


def run_forward(held: _core.Spec, statistics: int, q: Tensor, k: Tensor, v: Tensor,
                tensors: Dict[str, Tensor]) -> Tuple[Dict[str, Tensor], bool]:
    """What a call gives by name, and whether all that it read is ordinary."""
    results = {"y": empty_result(q, v), **empty_statistics(q, k, statistics)}
    if _OLD:
        q, k, v, tensors = q.detach(), k.detach(), v.detach(), _detached(tensors)
    out = _core.attention(held, q, k, v, tensors, statistics, results)
    return results, out.ordinary


def run_backward(held: _core.Spec, statistics: int, q: Tensor, k: Tensor, v: Tensor,
                 tensors: Dict[str, Tensor], saved: Dict[str, Any],
                 upstream: Dict[str, Tensor], wanted: Sequence[str],
                 numbers: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Gradients by the names of their tensors, of the tensors' own shapes and types."""
    given = {"q": q, "k": k, "v": v, **tensors}
    into: Dict[str, Tensor] = {}
    for name in wanted:
        if name in ("q", "k", "v"):
            into["d" + name] = empty_gradient(given[name])
        elif name in NUMBERS:
            into["d" + name] = q.new_empty((numbers[name].numel(),), dtype=torch.float32)
        else:
            into["d" + name] = q.new_empty(given[name].shape, dtype=torch.float32)
    if _OLD:
        q, k, v, tensors = q.detach(), k.detach(), v.detach(), _detached(tensors)
        saved, upstream = _detached(saved), _detached(upstream)
    upstream = {name: bare(t) for name, t in upstream.items()}
    _core.attention_backward(held, q, k, v, tensors, statistics, saved, upstream,
                             list(into), into)
    gradients = {name: into["d" + name] for name in wanted}
    for name in wanted:
        if name in NUMBERS:
            t = numbers[name]
            gradients[name] = gradients[name].reshape(t.shape).to(t.dtype)
        elif name not in ("q", "k", "v"):
            gradients[name] = gradients[name].to(given[name].dtype)
    return gradients


def run_weights(held: _core.Spec, q: Tensor, k: Tensor, tensors: Dict[str, Tensor],
                row_stat: Tensor, rows: List[int], heads: List[int]) -> Tensor:
    """Exact weights [B, heads, rows, M] from a call's row statistic."""
    v = k.new_zeros((1,)).expand(k.shape[0], k.shape[1], k.shape[2], 1)
    if _OLD:
        q, k, v, tensors = q.detach(), k.detach(), v.detach(), _detached(tensors)
        row_stat = row_stat.detach()
    return torch.from_numpy(_core.weights(held, q, k, v, tensors, row_stat, rows, heads))


# ---- operators -----------------------------------------------------------------------------------

_TENSORS_SCHEMA = ", ".join(f"Tensor? {name}" for name in NAMES)
_library = torch.library.Library("foci", "DEF")  # type: ignore[no-untyped-call]
TAGS = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag", "needs_exact_strides")
              if hasattr(torch.Tag, tag))
_library.define(  # type: ignore[no-untyped-call]
    f"attention(Tensor q, Tensor k, Tensor v, {_TENSORS_SCHEMA}, str spec, int statistics) -> "
    f"({', '.join(['Tensor'] * len(RESULTS))})", tags=TAGS)
_library.define(  # type: ignore[no-untyped-call]
    f"attention_backward({', '.join('Tensor? ' + name for name in UPSTREAM)}, "
    f"Tensor q, Tensor k, Tensor v, {_TENSORS_SCHEMA}, "
    f"{', '.join('Tensor ' + name for name in SAVED)}, str spec, int statistics, int wanted) -> "
    f"({', '.join(['Tensor'] * len(GRADIENTS))})", tags=TAGS)
_library.define(  # type: ignore[no-untyped-call]
    f"weights(Tensor q, Tensor k, {_TENSORS_SCHEMA}, Tensor row_stat, str spec, int[] rows, "
    "int[] heads) -> Tensor", tags=TAGS)


def _given(values: Sequence[Optional[Tensor]]) -> Tuple[
        Dict[str, Tensor], Dict[str, Tensor], Optional[Tensor]]:
    """The tensors of an operator's call by name, its numbers and its seed."""
    tensors = {name: prepared(name, t) for name, t in zip(TENSORS, values) if t is not None}
    given = zip(NUMBERS, values[len(TENSORS):])
    return tensors, {name: t for name, t in given if t is not None}, values[-1]


def _attention_cpu(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tuple[Tensor, ...]:
    *others, spec, statistics = rest
    tensors, numbers, seed = _given(others)
    check_ranks(q, k, v)
    held = with_numbers(held_of(spec), numbers, seed)
    results, _ = run_forward(held, statistics, prepared("q", q), prepared("k", k),
                             prepared("v", v), tensors)
    return tuple(results[name] if name in results else none(name, q) for name in RESULTS)


def none(name: str, like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.int64 if name == "max_key" else torch.float32)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tuple[Tensor, ...]:
    statistics = rest[-1]
    check_ranks(q, k, v)
    results = {"y": empty_result(dense(q), v), **empty_statistics(q, k, statistics)}
    return tuple(results[name] if name in results else none(name, q) for name in RESULTS)


def _attention_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
    *tensors, spec, statistics = inputs
    ctx.save_for_backward(*tensors, *output[:len(SAVED)])
    ctx.spec, ctx.statistics = spec, statistics
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[RESULTS.index("max_key")],
                                output[RESULTS.index("support")])


def _attention_autograd(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    upstream = [grads[RESULTS.index(name[1:])] for name in UPSTREAM]
    every = ctx.saved_tensors
    inputs, saved = every[:-len(SAVED)], every[-len(SAVED):]
    by_name = dict(zip(("q", "k", "v") + NAMES, ctx.needs_input_grad))
    wanted = sum(1 << n for n, name in enumerate(GRADIENTS) if by_name[name])
    # No gradient of a result that was not asked for.
    upstream = [None if g is None or g.dim() == 1 else g for g in upstream]
    got = inner("attention_backward", *upstream, *inputs, *saved, ctx.spec, ctx.statistics, wanted)
    gradients = {name: got[n] if wanted >> n & 1 else None for n, name in enumerate(GRADIENTS)}
    return tuple(gradients.get(name) for name in ("q", "k", "v") + NAMES) + (None, None)


def _split_backward(args: Sequence[Any]) -> Tuple[Any, ...]:
    up, rest = args[:len(UPSTREAM)], args[len(UPSTREAM):]
    q, k, v = rest[:3]
    others = rest[3:3 + len(NAMES)]
    saved = rest[3 + len(NAMES):-3]
    return up, q, k, v, others, saved, rest[-3], rest[-2], rest[-1]


def _wanted(bits: int) -> List[str]:
    return [name for n, name in enumerate(GRADIENTS) if bits >> n & 1]


def _backward_cpu(*args: Any) -> Tuple[Tensor, ...]:
    up, q, k, v, others, saved, spec, statistics, wanted = _split_backward(args)
    tensors, numbers, seed = _given(others)
    got = run_backward(
        with_numbers(held_of(spec), numbers, seed), statistics, prepared("q", q), prepared("k", k),
        prepared("v", v), tensors, {n: bare(t) for n, t in zip(SAVED, saved) if t.dim() > 1},
        {n: t for n, t in zip(UPSTREAM, up) if t is not None}, _wanted(wanted), numbers)
    return tuple(got[name] if name in got else q.new_empty((0,)) for name in GRADIENTS)


def _backward_fake(*args: Any) -> Tuple[Tensor, ...]:
    _, q, k, v, others, _, _, _, wanted = _split_backward(args)
    given = {"q": q, "k": k, "v": v, **dict(zip(NAMES, others))}
    names = _wanted(wanted)

    def gradient(name: str) -> Tensor:
        if name not in names:
            return q.new_empty((0,))  # type: ignore[no-any-return]
        t = given[name]
        if name in ("q", "k", "v"):
            return empty_gradient(dense(t))
        return t.new_empty(t.shape)  # type: ignore[no-any-return]

    return tuple(gradient(name) for name in GRADIENTS)


def _weights_cpu(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    *others, row_stat, spec, rows, heads = rest
    tensors, numbers, seed = _given(others)
    held = with_numbers(held_of(spec), numbers, seed)
    return run_weights(held, prepared("q", q), prepared("k", k), tensors,
                       bare(row_stat).contiguous(), list(rows), list(heads))


def _weights_fake(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    *_, rows, heads = rest
    return q.new_empty((q.shape[0], len(heads), len(rows), k.shape[2]), dtype=torch.float32)


def _weights_context(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, spec, rows, heads = inputs
    ctx.save_for_backward(*tensors)
    ctx.spec, ctx.rows, ctx.heads = spec, rows, heads


def _weights_autograd(ctx: Any, dweights: Tensor) -> Tuple[Optional[Tensor], ...]:
    """Weights are what attention gives for values that are the identity."""
    q, k, *others = ctx.saved_tensors
    B, Hk, M, _ = k.shape
    v = torch.eye(M, dtype=q.dtype).expand(B, Hk, M, M)
    dy = q.new_zeros((B, q.shape[1], q.shape[2], M), dtype=torch.float32)
    rows = torch.tensor(ctx.rows, dtype=torch.int64)
    heads = torch.tensor(ctx.heads, dtype=torch.int64)
    dy.index_put_((torch.arange(B)[:, None, None], heads[None, :, None], rows[None, None]),
                  dweights, accumulate=True)
    spec = before_dropout(ctx.spec)
    results = inner("attention", q, k, v, *others, spec, 0)
    by_name = dict(zip(("q", "k") + NAMES, ctx.needs_input_grad))
    wanted = sum(1 << n for n, name in enumerate(GRADIENTS) if by_name.get(name))
    got = inner(
        "attention_backward", dy.to(q.dtype), None, None, None, None, q, k, v, *others,
        *results[:len(SAVED)], spec, 0, wanted)
    gradients = {name: got[n] if wanted >> n & 1 else None for n, name in enumerate(GRADIENTS)}
    return tuple(gradients.get(name) for name in ("q", "k") + NAMES) + (None,) * 4


for _name, _cpu, _fake in (("attention", _attention_cpu, _attention_fake),
                           ("attention_backward", _backward_cpu, _backward_fake),
                           ("weights", _weights_cpu, _weights_fake)):
    _library.impl(_name, _cpu, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("foci::" + _name, _fake, lib=_library)


def no_second(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(NO_SECOND)


def by_slices(op: Any) -> Any:
    """A rule of torch.func.vmap: one call a slice."""
    def rule(info: Any, in_dims: Tuple[Any, ...], *args: Any) -> Tuple[Any, Any]:
        calls = [op(*[a if d is None else a.select(d, n) for a, d in zip(args, in_dims)])
                 for n in range(info.batch_size)]
        if isinstance(calls[0], Tensor):
            return torch.stack(calls), 0
        return tuple(torch.stack(results) for results in zip(*calls)), (0,) * len(calls[0])
    return rule


torch.library.register_autograd("foci::attention", _attention_autograd,
                                setup_context=_attention_context, lib=_library)
torch.library.register_autograd("foci::attention_backward", no_second, lib=_library)
torch.library.register_autograd("foci::weights", _weights_autograd,
                                setup_context=_weights_context, lib=_library)
for _name in ("attention", "attention_backward", "weights"):
    torch.library.register_vmap("foci::" + _name, by_slices(getattr(torch.ops.foci, _name)),
                                lib=_library)


class Transformed(torch.autograd.Function):
    """An operator under torch.func's transforms, which register_autograd does not serve."""

    generate_vmap_rule = True


def transformed(name: str, forward: Any, context: Any, backward: Any) -> Any:
    """An autograd function of an operator whose context and gradient are those of
    register_autograd."""
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        context(ctx, inputs, output)

    return type(name, (Transformed,), {
        "forward": staticmethod(forward), "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward)})


def _no_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    pass


_functions = {
    "attention_backward": transformed("AttentionBackward",
                                      lambda *a: torch.ops.foci.attention_backward(*a),
                                      _no_context, no_second),
    "attention": transformed("Attention", lambda *a: torch.ops.foci.attention(*a),
                             _attention_context, _attention_autograd),
    "weights": transformed("Weights", lambda *a: torch.ops.foci.weights(*a), _weights_context,
                           _weights_autograd)}


def add_inner(name: str, forward: Any) -> None:
    """Another operator for `inner`, without gradients of its own."""
    _functions[name] = transformed(name, forward, _no_context, no_second)


def inner(name: str, *args: Any) -> Any:
    """One of the operators from within another one's gradient."""
    if not torch.compiler.is_compiling() and under_func():
        return _functions[name].apply(*args)
    return getattr(torch.ops.foci, name)(*args)


def call(name: str, *args: Any) -> Any:
    """One of the operators, wherever it is called."""
    refuse_tangents(*args)
    return inner(name, *args)
