"""Masks written as functions, ``mask_mod(b, h, q_idx, kv_idx) -> bool`` as FlexAttention has them.

A function is evaluated by blocks of query rows into keep bits, whose tiles the engine sorts into
empty, full and partial ones. Where the bits turn out to be a window (causal ones are), or lengths
of the keys, the window or the lengths take their place: then nothing is N x M any more.
"""

from __future__ import annotations

import math
import types
from collections import OrderedDict
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor

__all__ = ["BlockMask", "create_block_mask"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Pairs that are evaluated at once: a function's own intermediate tensors are some times as large.
_BLOCK = 1 << 21


class BlockMask:
    """What a ``mask_mod`` allows, for any number of calls. Made by :func:`create_block_mask`.

    Attributes:
        shape: (B, H, N, M); B or H is 1 where the mask does not depend on it.
        keep: bool, of that shape, True attends; None where a window or lengths say the same.
        window: (left, right), None being without bound, and ``window_align``; None where there is
            none.
        key_lengths: [B] int64, or None.
        mask_mod: the function.
    """

    def __init__(self, shape: Tuple[int, int, int, int], mask_mod: MaskMod, *,
                 keep: Optional[Tensor] = None,
                 window: Optional[Tuple[Optional[int], Optional[int]]] = None,
                 window_align: str = "bottom-right", key_lengths: Optional[Tensor] = None) -> None:
        self.shape = shape
        self.mask_mod = mask_mod
        self.keep = keep
        self.window = window
        self.window_align = window_align
        self.key_lengths = key_lengths

    def options(self, given: Dict[str, Any], batch: int) -> Dict[str, Any]:
        """The options of a call of so many batch entries with this mask among them."""
        own: Dict[str, Any] = {}
        if self.window is not None:
            own = {"window": self.window, "window_align": self.window_align}
        elif self.key_lengths is not None:
            own = {"key_lengths": self.key_lengths.expand(batch)}
        elif self.keep is not None:
            own = {"keep": self.keep}
        if not own:
            return given
        # Inside of segments a window counts from their start, and the function does not.
        segments = self.window is not None and (
            bool(given.get("segments")) if given.get("q_segments") is None else True)
        if not segments and all(given.get(name) is None for name in own):
            return {**given, **own}
        # The call has a window (lengths, bits) of its own: both hold.
        keep = self.to_dense()
        other = given.get("keep")
        return {**given, "keep": keep if other is None else keep & other}

    def to_dense(self) -> Tensor:
        """The mask as bool [B, H, N, M]."""
        _, _, N, M = self.shape
        if self.keep is not None:
            return self.keep
        i, j = torch.arange(N)[:, None], torch.arange(M)[None]
        keep = torch.ones(N, M, dtype=torch.bool)
        if self.window is not None:
            p = i + (M - N if self.window_align == "bottom-right" else 0)
            left, right = self.window
            if left is not None:
                keep &= j >= p - left
            if right is not None:
                keep &= j <= p + right
        if self.key_lengths is not None:
            return (j < self.key_lengths[:, None, None, None]) & keep
        return keep[None, None]

    def sparsity(self) -> float:
        """The share of pairs that are masked, in percent."""
        keep = self.to_dense()
        return 100.0 * (1.0 - keep.float().mean().item()) if keep.numel() else 0.0

    def __repr__(self) -> str:
        if self.window is not None:
            what = f"window={self.window}, window_align={self.window_align!r}"
        elif self.key_lengths is not None:
            what = "key_lengths"
        else:
            what = "keep" if self.keep is not None else "all"
        return f"BlockMask(shape={self.shape}, {what})"


def create_block_mask(mask_mod: MaskMod, B: Optional[int], H: Optional[int], Q_LEN: int,
                      KV_LEN: int, device: Any = "cpu", BLOCK_SIZE: int = 128) -> BlockMask:
    """Evaluates a mask function, as ``torch.nn.attention.flex_attention.create_block_mask`` does.

    The function is called under ``torch.vmap`` with four int64 scalars, so what FlexAttention
    takes is right here too. Memory beside the result is bounded.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool`` tensor, True attends; or a BlockMask of
            FlexAttention's, whose lists of blocks hold beside its function.
        B, H: the sizes that the mask depends on; None, or 1, where it does not.
        Q_LEN: N. KV_LEN: M.
        device: "cpu".
        BLOCK_SIZE: taken for FlexAttention's sake; the engine has its own tiles.

    Returns:
        A :class:`BlockMask` for ``foci.torch.attention(..., mask_mod=...)``.

    Raises:
        TypeError: what the function gave is no boolean scalar.
        ValueError: a BlockMask is of other sizes, or its lists name blocks that are not there.
    """
    blocks = blocks_of(mask_mod)
    if blocks is not None:
        mask_mod = blocks.mask_mod
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: {type(mask_mod).__name__} arrived, a function "
                        "(b, h, q_idx, kv_idx) is right")
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind != "cpu":
        raise ValueError(f"device: {device} arrived, foci computes on the CPU")
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    for name, size in zip(("B", "H", "Q_LEN", "KV_LEN"), sizes):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: {type(size).__name__} arrived, an integer is right")
        if size < 0:
            raise ValueError(f"{name}: {size} arrived, 0 or more is right")
    keep = _evaluated(mask_mod, *sizes)
    if blocks is not None:
        keep = _without_repeats(blocks.apply(keep, sizes))
    return _simplified(keep, mask_mod)


# ---- FlexAttention's own masks -------------------------------------------------------------------


class _Blocks:
    """A BlockMask of ``torch.nn.attention.flex_attention``: in its partial blocks the function
    decides, its full blocks are seen whole, all other pairs are masked."""

    def __init__(self, mask: Any) -> None:
        self.mask = mask
        self.mask_mod: MaskMod = mask.mask_mod
        if getattr(self.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
            raise ValueError("mask_mod: a slice of a BlockMask arrived, whose mask_mod is gone; "
                             "one that has it is right (part = mask[...]; part.mask_mod = ...)")
        self.tensors = [t for t in (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks,
                                    mask.full_kv_indices) if t is not None]

    def apply(self, keep: Tensor, sizes: Tuple[int, int, int, int]) -> Tensor:
        """What the mask lets through.

        Args:
            keep: bool, broadcasts to `sizes`: what the function says.
            sizes: (B, H, N, M).
        """
        mask, (N, M) = self.mask, sizes[2:]
        size = mask.BLOCK_SIZE
        rows, columns = (size, size) if isinstance(size, int) else size
        if rows >= 1 << 30 and columns >= 1 << 30:
            return keep  # FlexAttention's own mask of everything
        if tuple(mask.seq_lengths) != (N, M):
            raise ValueError(f"mask_mod: a BlockMask of {mask.seq_lengths[0]} queries and "
                             f"{mask.seq_lengths[1]} keys arrived, one of {N} and {M} is right")
        partial = self._pairs("kv", rows, columns, sizes)
        seen = partial & keep
        if mask.full_kv_num_blocks is not None:
            seen = seen | self._pairs("full_kv", rows, columns, sizes)
        return seen

    def _pairs(self, name: str, rows: int, columns: int,
               sizes: Tuple[int, int, int, int]) -> Tensor:
        """bool [1 or B, 1 or H, N, M], True in the blocks of a list."""
        B, H, N, M = sizes
        counts, indices = (getattr(self.mask, f"{name}_{part}") for part in (
            "num_blocks", "indices"))
        down, across = -(-N // rows), -(-M // columns)
        shape = (1,) * (3 - counts.dim()) + tuple(counts.shape)
        if (counts.dim() > 3 or indices.dim() != counts.dim() + 1 or shape[0] not in (1, B) or
                shape[1] not in (1, H) or shape[2] < down or indices.shape[:-1] != counts.shape):
            raise ValueError(f"mask_mod: a BlockMask whose {name}_num_blocks is "
                             f"{list(counts.shape)} and {name}_indices {list(indices.shape)} "
                             f"arrived; {[B, H, down]} (or 1 for B and H) is right for {N} queries "
                             f"in blocks of {rows}")
        counts = counts.reshape(shape)[:, :, :down]
        indices = indices.reshape(*shape, indices.shape[-1])[:, :, :down].long()
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        wrong = listed & ((indices < 0) | (indices >= across))
        if bool(wrong.any()) or bool((counts > indices.shape[-1]).any()):
            raise ValueError(f"mask_mod: a BlockMask whose {name}_indices name block "
                             f"{int(indices[wrong][0]) if bool(wrong.any()) else 'after the last'} "
                             f"arrived; {M} keys in blocks of {columns} have {across}")
        blocks = torch.zeros(*shape[:2], down, across + 1, dtype=torch.bool)
        blocks.scatter_(-1, torch.where(listed, indices, across), True)
        seen = blocks[..., :across].repeat_interleave(rows, -2)[..., :N, :]
        return seen.repeat_interleave(columns, -1)[..., :M]


def blocks_of(mask_mod: Any) -> Optional[_Blocks]:
    """What FlexAttention's BlockMask says; None for anything else."""
    if isinstance(mask_mod, BlockMask) or not all(hasattr(mask_mod, name) for name in (
            "kv_num_blocks", "kv_indices", "BLOCK_SIZE", "seq_lengths")):
        return None
    return _Blocks(mask_mod)


def _vmapped(mask_mod: MaskMod) -> Callable[..., Tensor]:
    def one(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = mask_mod(b, h, i, j)
        if not isinstance(kept, Tensor):
            kept = torch.as_tensor(kept)
        if kept.dim() != 0 or kept.dtype != torch.bool:
            raise TypeError(f"mask_mod: gave {kept.dtype} of shape {list(kept.shape)}, a boolean "
                            "scalar is right")
        return kept

    call: Callable[..., Tensor] = one
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None),
                 (0, None, None, None)):
        call = torch.vmap(call, in_dims=axes)
    return call


def _evaluated(mask_mod: MaskMod, B: int, H: int, N: int, M: int) -> Tensor:
    """keep [B, H, N, M], B and H being 1 where all entries are the same."""
    call = _vmapped(mask_mod)
    heads, keys = torch.arange(H), torch.arange(M)
    if B * H * N * M == 0:
        return torch.ones(min(B, 1), min(H, 1), N, M, dtype=torch.bool)
    keep = torch.empty(B, H, N, M, dtype=torch.bool)
    some = max(1, _BLOCK // (H * M))
    with torch.no_grad():
        for b in range(B):
            for i in range(0, N, some):
                keep[b, :, i:i + some] = call(torch.tensor([b]), heads,
                                              torch.arange(i, min(N, i + some)), keys)[0]
    return _without_repeats(keep)


def _without_repeats(keep: Tensor) -> Tensor:
    """Where all batch entries, or all heads, are the same, one of them."""
    if keep.shape[0] > 1 and bool((keep == keep[:1]).all()):
        keep = keep[:1].clone()
    if keep.shape[1] > 1 and bool((keep == keep[:, :1]).all()):
        keep = keep[:, :1].clone()
    return keep


# ---- structure -----------------------------------------------------------------------------------


def _simplified(keep: Tensor, mask_mod: MaskMod) -> BlockMask:
    B, H, N, M = keep.shape
    shape = (B, H, N, M)
    if keep.numel() == 0 or bool(keep.all()):
        return BlockMask(shape, mask_mod)
    if H == 1:
        count = keep.sum(-1)[:, 0]  # [B, N]
        if B == 1:
            for align in ("bottom-right", "top-left"):
                window = _window(keep[0, 0], count[0], M - N if align == "bottom-right" else 0)
                if window is not None:
                    return BlockMask(shape, mask_mod, window=window, window_align=align)
        lengths = count[:, :1]
        if bool((count == lengths).all()) and bool(
                (keep[:, 0] == (torch.arange(M) < lengths[..., None])).all()):
            return BlockMask(shape, mask_mod, key_lengths=lengths[:, 0].contiguous())
    return BlockMask(shape, mask_mod, keep=keep)


def _window(keep: Tensor, count: Tensor,
            shift: int) -> Optional[Tuple[Optional[int], Optional[int]]]:
    """(left, right) if every row keeps exactly p - left ... p + right, p = i + shift."""
    N, M = keep.shape
    p = torch.arange(N) + shift
    some = count > 0
    if not bool(some.any()):
        return None
    first = keep.int().argmax(-1)
    last = first + count - 1
    # A bound shows in rows that it cuts; where no row shows it, there is none.
    left, right = (p - first)[some & (first > 0)], (last - p)[some & (last < M - 1)]
    sides = tuple(int(x[0]) if x.numel() else None for x in (left, right))
    if any(side is not None and side < 0 for side in sides):
        return None
    j = torch.arange(M)
    low = 0 if sides[0] is None else (p - sides[0])[:, None]
    high = M if sides[1] is None else (p + sides[1])[:, None]
    if not bool((keep == ((j >= low) & (j <= high))).all()):
        return None
    return sides[0], sides[1]


# ---- functions given to a call -------------------------------------------------------------------

_MOST_MASKS = 8
_masks: "OrderedDict[Tuple[Any, ...], Tuple[BlockMask, List[Any]]]" = OrderedDict()


def mask_of(mask_mod: Union[MaskMod, BlockMask], B: int, H: int, N: int, M: int) -> BlockMask:
    """The mask of a call of these sizes. A function is evaluated anew unless it is certain that it
    would give the same."""
    if isinstance(mask_mod, BlockMask):
        for name, own, size in zip(("B", "H", "N", "M"), mask_mod.shape, (B, H, N, M)):
            if own != size and not (own == 1 and name in "BH"):
                raise ValueError(f"mask_mod: a mask of shape {list(mask_mod.shape)} arrived, "
                                 f"{name} = {size} is right")
        return mask_mod
    blocks = blocks_of(mask_mod)
    if blocks is None and not callable(mask_mod):
        raise TypeError(f"mask_mod: {type(mask_mod).__name__} arrived, a function "
                        "(b, h, q_idx, kv_idx) or a BlockMask is right")
    held: List[Any] = []
    print_ = _fingerprint(mask_mod if blocks is None else blocks.mask_mod, held)
    if blocks is not None and print_ is not None:
        lists = [_fingerprint(t, held) for t in blocks.tensors]
        print_ = None if None in lists else (
            print_, *lists, blocks.mask.full_kv_num_blocks is None, str(blocks.mask.BLOCK_SIZE),
            tuple(blocks.mask.seq_lengths))
    if print_ is None:
        return create_block_mask(mask_mod, B, H, N, M)
    key = (print_, B, H, N, M)
    found = _masks.pop(key, None)
    if found is None:
        found = (create_block_mask(mask_mod, B, H, N, M), held)
    _masks[key] = found
    while len(_masks) > _MOST_MASKS:
        _masks.popitem(last=False)
    return found[0]


def _fingerprint(value: Any, held: List[Any]) -> Optional[Tuple[Any, ...]]:
    """What a function's result depends on, by value, or by identity and version for tensors; None
    where that cannot be told. ``held`` keeps alive what is known by identity."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value).__name__, value)
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.is_inference():
            return None
        held.append(value)
        return ("tensor", id(value), value._version, value.data_ptr())
    if value is torch or value is math:
        return ("module", id(value))
    if isinstance(value, types.BuiltinFunctionType):
        held.append(value)
        return ("builtin", id(value))
    if not isinstance(value, types.FunctionType):
        return None
    if value.__kwdefaults__ or value.__dict__ or any(
            isinstance(c, types.CodeType) for c in value.__code__.co_consts):
        return None
    parts: List[Any] = ["function", value.__code__]
    try:
        inner = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # an empty cell
        return None
    inner += value.__defaults__ or ()
    inner += [value.__globals__[name] for name in value.__code__.co_names
              if name in value.__globals__]
    for part in inner:
        if part is value:
            return None
        known = _fingerprint(part, held)
        if known is None:
            return None
        parts.append(known)
    return tuple(parts)
