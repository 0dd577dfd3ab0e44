"""attention, attention_backward and weights on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, Optional, Sequence, Tuple, Union, overload

import numpy as np

from . import _arrays, _core
from ._types import Options
from .spec import Spec, spec_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Outputs", "attention", "attention_backward", "explain", "weights"]

Array = Any  # NumPy's, or whatever speaks DLPack or the buffer protocol
STATISTICS = ("entropy", "max_weight", "support", "coverage")
_BITS = {name: 1 << n for n, name in enumerate(STATISTICS)}
_BITS["max_key"] = _BITS["max_weight"]
_BITS["row_stat"] = 0
# Arrays that name the option which reads them.
_READ_BY = {"keep": "keep", "bias": "bias", "key_lengths": "key_lengths", "q_segments": "segments",
            "k_segments": "segments", "slopes": "alibi"}
TENSORS = ("key_lengths", "past_lengths", "q_segments", "k_segments", "keep", "bias", "slopes",
           "table1d", "table2d", "score_w")
# What has to be asked for, or not be refused, for an array to be read.
_READERS = {**{name: f"{reader}=True" for name, reader in _READ_BY.items()},
            "past_lengths": "causal='past' or window_align='past'", "table1d": "relative1d",
            "table2d": "relative2d", "score_w": "score='additive'"}
GRADIENTS = ("dq", "dk", "dv", "dbias", "dslopes", "dtable1d", "dtable2d", "dscore_w", "dscale",
             "dalpha")


def statistics_bits(statistics: Union[str, Iterable[str]]) -> int:
    """The statistics as the engine wants them; -1 where none are asked for."""
    names = (statistics,) if isinstance(statistics, str) else statistics
    bits = 0
    if isinstance(names, (tuple, list, set, frozenset)):
        if not names:
            return -1
        for name in names:
            if not isinstance(name, str) or name not in _BITS:
                break
            bits |= _BITS[name]
        else:
            return bits
        arrived = repr(statistics).splitlines()[0]
    else:
        arrived = type(statistics).__name__
    raise ValueError(f"statistics: {arrived} arrived, a list of names among {', '.join(_BITS)} is "
                     "right")


def _columns(name: str, table: Array, rank: int) -> Sequence[int]:
    shape = tuple(getattr(table, "shape", ()))
    if len(shape) != rank:
        raise ValueError(f"{name}: shape {list(shape)} arrived, {rank} dimensions are right")
    return [int(n) for n in shape[1:]]


def split_options(options: Dict[str, Any]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Parts a call's keyword options into those of the spec and arrays; an array asks for what
    reads it."""
    arrays: Dict[str, Any] = {}
    for name in TENSORS:
        array = options.get(name)
        if array is None or isinstance(array, bool):
            continue
        arrays[name] = options.pop(name)
        if name in _READ_BY:
            options.setdefault(_READ_BY[name], True)
        elif name == "table1d":
            (columns,) = _columns(name, array, 2)
            options.setdefault("relative1d", (columns - 1) // 2)
        elif name == "table2d":
            rows, columns = _columns(name, array, 3)
            options.setdefault("relative2d", ((rows + 1) // 2, (columns + 1) // 2))
    return options, arrays


def resolve(spec: Optional[Spec], options: Dict[str, Any]) -> Tuple[Spec, Dict[str, Any]]:
    """The spec and the arrays of a call."""
    if spec is None:
        if not options:
            return _DEFAULT, options
        own, arrays = split_options(options)
        spec = spec_of(own)
        for name in arrays:
            if name not in spec._reads:
                raise ValueError(f"{name}: an array arrived, but nothing reads it without "
                                 f"{_READERS[name]}")
        return spec, arrays
    if not isinstance(spec, Spec):
        raise TypeError(f"spec: {type(spec).__name__} arrived, foci.Spec is right")
    if options:
        reads = spec.tensors
        for name, value in options.items():
            if name not in TENSORS:
                raise TypeError(
                    f"{name}: given beside a spec, which says everything but arrays "
                    f"(spec.replace({name}=...) makes another)")
            if value is not None and name not in reads:
                raise ValueError(f"{name}: an array arrived, but the spec does not read it")
    return spec, options


_DEFAULT = Spec()


class Outputs:
    """What :func:`attention` gave where statistics were asked for.

    Attributes:
        y: [B, H, N, Dv], of q's dtype.
        row_stat: [B, H, N] float32: the log-sum-exp of the scores (softmax, topk), or the
            threshold tau (sparsemax, entmax).
        entropy: [B, H, N] float32, in nats, of the weights before dropout.
        max_weight: [B, H, N] float32; max_key, int64, is the first key that has it.
        support: [B, H, N] float32: the number of keys that take part.
        coverage: [B, H, M] float32: how much weight each key got in all.
    """

    __slots__ = ("_core", "spec")

    def __init__(self, core: _core.Outputs, spec: Spec) -> None:
        self._core = core
        self.spec = spec

    def __repr__(self) -> str:
        return described(self)

    @property
    def y(self) -> np.ndarray: return self._core.y  # type: ignore[return-value]

    @property
    def row_stat(self) -> np.ndarray: return self._core.row_stat  # type: ignore[return-value]

    @property
    def entropy(self) -> Optional[np.ndarray]: return self._core.entropy  # type: ignore

    @property
    def max_weight(self) -> Optional[np.ndarray]: return self._core.max_weight  # type: ignore

    @property
    def max_key(self) -> Optional[np.ndarray]: return self._core.max_key  # type: ignore

    @property
    def support(self) -> Optional[np.ndarray]: return self._core.support  # type: ignore

    @property
    def coverage(self) -> Optional[np.ndarray]: return self._core.coverage  # type: ignore

    @property
    def skipped_pairs(self) -> int:
        """Scores that a bound spared (topk on clustered keys)."""
        return self._core.skipped_pairs

    @property
    def visible_pairs(self) -> int:
        """Pairs of query and key that the masks let through, over batch and heads."""
        return self._core.visible_pairs

    def weights(self, rows: Optional[Sequence[int]] = None,
                heads: Optional[Sequence[int]] = None) -> np.ndarray:
        """Exact weights of some query rows and heads, before dropout.

        Args:
            rows: queries, all where None.
            heads: query heads, all where None.

        Returns:
            [B, len(heads), len(rows), M] float32; memory for these rows alone is needed.
        """
        _, H, N = self.row_stat.shape
        return self._core.weights(indices("rows", rows, N),
                                  indices("heads", heads, H))  # type: ignore[return-value]

    def backward(self, dy: Optional[Array] = None, *, wanted: Sequence[str] = ("dq", "dk", "dv"),
                 drow_stat: Optional[Array] = None, dentropy: Optional[Array] = None,
                 dmax_weight: Optional[Array] = None,
                 dcoverage: Optional[Array] = None) -> Dict[str, Any]:
        """Gradients of the inputs from those of the results.

        Args:
            dy: [B, H, N, Dv]; the others as the statistics they belong to.
            wanted: names among dq, dk, dv, dbias, dslopes, dtable1d, dtable2d, dscore_w, dscale,
                dalpha.

        Returns:
            Arrays by name, of the inputs' shapes.
        """
        upstream = {"dy": dy, "drow_stat": drow_stat, "dentropy": dentropy,
                    "dmax_weight": dmax_weight, "dcoverage": dcoverage}
        return self._core.backward({k: v for k, v in upstream.items() if v is not None},
                                   _names("wanted", wanted))


def described(outputs: Any) -> str:
    """The name of what a call gave, and the shapes of what is there."""
    names = ("y", "row_stat", "entropy", "max_weight", "max_key", "support", "coverage")
    there = ((name, getattr(outputs, name)) for name in names)
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in there if t is not None)
    return f"<{type(outputs).__name__}: {shapes}>"


def _names(name: str, values: Sequence[str]) -> list[str]:
    if isinstance(values, str):
        values = (values,)
    for value in values:
        if value not in GRADIENTS:
            raise ValueError(f"{name}: {value!r} arrived, names among {', '.join(GRADIENTS)} "
                             "are right")
    return list(values)


def indices(name: str, given: Optional[Sequence[int]], count: int) -> list[int]:
    """Numbers below count, negative ones counted from the end; all where None."""
    if given is None:
        return list(range(count))
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise TypeError(f"{name}: {type(given).__name__} arrived, a list of numbers is right")
    result = []
    for i in given:
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise TypeError(f"{name}: {type(i).__name__} arrived, integers are right")
        n = i.__index__()
        if not -count <= n < count:
            raise ValueError(f"{name}: {n} arrived, a number below {count} is right")
        result.append(n + count if n < 0 else n)
    return result


@overload
def attention(q: Array, k: Array, v: Array, spec: Optional[Spec] = None, *,
              statistics: Tuple[()] = (), **options: Unpack[Options]) -> np.ndarray: ...
@overload
def attention(q: Array, k: Array, v: Array, spec: Optional[Spec] = None, *,
              statistics: Union[str, Iterable[str]], **options: Unpack[Options]) -> Outputs: ...


def attention(q: Array, k: Array, v: Array, spec: Optional[Spec] = None, *,
              statistics: Union[str, Iterable[str]] = (), **options: Any) -> Any:
    """Attention of q to k, summed over v. Memory is linear in N + M, whatever the options.

    Args:
        q: [B, H, N, D] float32, or float16; any strides but the last.
        k: [B, Hk, M, D]; Hk divides H.
        v: [B, Hk, M, Dv].
        spec: what to compute; or, instead, the options of :class:`foci.Spec` by keyword, and the
            arrays that they read: ``bias``, ``keep``, ``key_lengths``, ``past_lengths``,
            ``q_segments``, ``k_segments``, ``slopes``, ``table1d``, ``table2d``, ``score_w``.
        statistics: names among entropy, max_weight, support, coverage, row_stat.

    Returns:
        y [B, H, N, Dv]; with statistics an :class:`Outputs`, which can be asked for exact weights
        and for gradients too.

    Raises:
        ValueError, TypeError: naming the argument, what arrived and what would be right.

    Example:
        >>> y = foci.attention(q, k, v, causal=True)
        >>> out = foci.attention(q, k, v, normalizer="entmax", alpha=1.5, statistics=["entropy"])
    """
    spec, arrays = resolve(spec, options)
    bits = statistics_bits(statistics)
    out = _core.attention(spec._held, q, k, v, arrays, max(bits, 0))
    return out.y if bits < 0 else Outputs(out, spec)


def attention_backward(dy: Array, q: Array, k: Array, v: Array, spec: Optional[Spec] = None, *,
                       wanted: Sequence[str] = ("dq", "dk", "dv"),
                       **options: Any) -> Dict[str, Any]:
    """Gradients of :func:`attention` from that of y; forward is computed once more.

    To spare that, keep the :class:`Outputs` of a call with statistics and use its ``backward``.

    Args:
        dy: [B, H, N, Dv]. The others as in :func:`attention`.
        wanted: names among dq, dk, dv, dbias, dslopes, dtable1d, dtable2d, dscore_w, dscale,
            dalpha.

    Returns:
        Arrays by name, of the inputs' shapes.
    """
    spec, arrays = resolve(spec, options)
    names = _names("wanted", wanted)
    return _core.attention(spec._held, q, k, v, arrays).backward({"dy": dy}, names)


def weights(q: Array, k: Array, rows: Optional[Sequence[int]] = None,
            heads: Optional[Sequence[int]] = None, spec: Optional[Spec] = None,
            **options: Any) -> np.ndarray:
    """Exact weights of some query rows, before dropout, without the N x M matrix.

    Args:
        q: [B, H, N, D]; k: [B, Hk, M, D].
        rows: queries; all where None.
        heads: query heads; all where None.
        spec, options: as in :func:`attention`.

    Returns:
        [B, len(heads), len(rows), M] float32.
    """
    spec, arrays = resolve(spec, options)
    _arrays.refuse_gradient("k", k)
    k = _arrays.ordinary("k", k)
    shape = getattr(k, "shape", None)
    if shape is None or len(shape) != 4:
        arrived = type(k).__name__ if shape is None else f"shape {list(shape)}"
        raise ValueError(f"k: {arrived} arrived, an array [B, Hk, M, D] is right")
    # Any values do, of k's type.
    v = k[..., :1] if shape[3] else np.zeros((*shape[:3], 1), np.float32)
    return Outputs(_core.attention(spec._held, q, k, v, arrays), spec).weights(rows, heads)


def explain(q: Array, k: Array, v: Array, spec: Optional[Spec] = None, **options: Any) -> str:
    """Which implementation and SIMD target such a call takes, and why not another."""
    spec, _ = resolve(spec, options)
    return _core.explain(spec._held, q, k, v)
