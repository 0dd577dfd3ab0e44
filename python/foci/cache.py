"""Cache: keys and values of sequences that grow, as decoding needs them."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Optional, Sequence, Union

import numpy as np

from . import _core
from ._attention import Array, described, resolve, statistics_bits
from .spec import Spec

__all__ = ["Cache", "CacheOutputs"]

_TABLES = ("slopes", "table1d", "score_w")


@dataclasses.dataclass(frozen=True, repr=False)
class CacheOutputs:
    """What :meth:`Cache.attend` gave where statistics were asked for; as in foci.Outputs."""

    y: np.ndarray
    row_stat: np.ndarray
    entropy: Optional[np.ndarray] = None
    max_weight: Optional[np.ndarray] = None
    max_key: Optional[np.ndarray] = None
    support: Optional[np.ndarray] = None
    coverage: Optional[np.ndarray] = None

    def __repr__(self) -> str:
        return described(self)


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: {type(value).__name__} arrived, an integer is right")
    size: int = value.__index__()
    if abs(size) >= 1 << 62:
        raise ValueError(f"{name}: {size} arrived, which is more than a cache can have")
    return size


def _sizes(name: str, values: Sequence[int]) -> list[int]:
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise TypeError(f"{name}: {type(values).__name__} arrived, a list of integers is right")
    return [_size(name, value) for value in values]


class Cache:
    """Keys and values of sequences of different lengths, and attention of queries at their ends.

    A cache that keeps everything gives the same bits whether tokens come one by one, in chunks or
    all at once. With ``window`` it rolls: what no later query can see is dropped.

    Args:
        kv_heads: Hk. head_size: D. value_size: Dv, D where None.
        sequences: how many there are.
        dtype: "float32" or "float16"; of k, v and q.
        window: tokens that a token sees, itself among them; None keeps all.

    Example:
        >>> cache = foci.Cache(kv_heads=8, head_size=64)
        >>> cache.append(k, v)                       # [1, 8, n, 64]
        >>> y = cache.attend(q, causal=True)         # q [1, H, n, 64] of the same tokens
    """

    def __init__(self, *, kv_heads: int, head_size: int, value_size: Optional[int] = None,
                 sequences: int = 1, dtype: str = "float32",
                 window: Optional[int] = None) -> None:
        try:
            name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        except TypeError:
            name = type(dtype).__name__
        if name not in ("float32", "float16"):
            raise ValueError(f"dtype: {name} arrived, float32 or float16 is right: what a cache "
                             "gives are NumPy's arrays")
        head_size = _size("head_size", head_size)
        self._core = _core.Cache(
            _size("sequences", sequences), _size("kv_heads", kv_heads), head_size,
            head_size if value_size is None else _size("value_size", value_size), name,
            None if window is None else _size("window", window))

    def append(self, k: Array, v: Array, *, sequences: Sequence[int] = (),
               counts: Sequence[int] = ()) -> None:
        """Adds tokens at the ends of sequences.

        Args:
            k: [E, Hk, n, D]; v: [E, Hk, n, Dv].
            sequences: which ones the E entries are; all in order where empty.
            counts: how many of the n tokens count, for each entry; all where empty.
        """
        self._core.append(k, v, _sizes("sequences", sequences), _sizes("counts", counts))

    def attend(self, q: Array, spec: Optional[Spec] = None, *,
               statistics: Union[str, Iterable[str]] = (), sequences: Sequence[int] = (),
               counts: Sequence[int] = (), **options: Any) -> Any:
        """Attention of queries whose last one stands at its sequence's last token.

        Args:
            q: [E, H, n, D].
            spec, options: as of :func:`foci.attention`, without what is laid out by key (keep,
                key_lengths, segments, bias, table2d) and without dropout.
            statistics: as there; coverage [E, H, longest length].

        Returns:
            y [E, H, n, Dv], or :class:`CacheOutputs` where statistics are asked for.
        """
        spec, arrays = resolve(spec, options)
        for name in arrays:
            if name not in _TABLES:
                raise ValueError(f"{name}: a cache reads no array that is laid out by key")
        bits = statistics_bits(statistics)
        got = self._core.attend(
            spec._held, q, max(bits, 0),
            _sizes("sequences", sequences), _sizes("counts", counts), arrays.get("slopes"),
            arrays.get("table1d"), arrays.get("score_w"))
        return got["y"] if bits < 0 else CacheOutputs(**got)  # type: ignore[arg-type]

    def position(self, sequence: int = 0) -> int:
        """Tokens of a sequence so far."""
        return self._core.position(_size("sequence", sequence))

    def first(self, sequence: int = 0) -> int:
        """The first token still held; 0 unless the cache rolls."""
        return self._core.first(_size("sequence", sequence))

    def length(self, sequence: int = 0) -> int:
        """Tokens held."""
        return self._core.length(_size("sequence", sequence))

    def truncate(self, sequence: int, position: int) -> None:
        """Forgets a sequence's tokens from ``position`` on (speculative decoding)."""
        self._core.truncate(_size("sequence", sequence), _size("position", position))

    def reset(self, sequence: int) -> None:
        """Forgets all of a sequence."""
        self._core.reset(_size("sequence", sequence))

    def keys(self, sequence: int = 0) -> np.ndarray:
        """A copy of the keys held, [Hk, length, D]."""
        return self._core.keys(_size("sequence", sequence))  # type: ignore[return-value]

    def values(self, sequence: int = 0) -> np.ndarray:
        """A copy of the values held, [Hk, length, Dv]."""
        return self._core.values(_size("sequence", sequence))  # type: ignore[return-value]

    @property
    def bytes(self) -> int:
        """Memory of all buffers."""
        return self._core.bytes

    def __repr__(self) -> str:
        return f"<foci.Cache of {self.bytes} bytes>"
