"""Nested tensors: sequences of different lengths, which run packed one behind the other."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch
from torch import Tensor

__all__ = ["pack", "packed_options", "padded", "refuse_laid_out", "unpack",
           "unpadded"]

# What is laid out by batch entry, query or key, and so means nothing for packed sequences.
_LAID_OUT = ("keep", "bias", "key_lengths", "past_lengths", "q_segments", "k_segments", "segments",
             "table2d", "relative2d")


def _refuse(name: str, arrived: str, right: str) -> TypeError:
    return TypeError(f"{name}: {arrived} arrived, {right} is right")


def _jagged(name: str, t: Any, dim: int, letters: str) -> None:
    if t._ragged_idx != dim:
        raise _refuse(name, f"a nested tensor whose dimension {t._ragged_idx} differs in length",
                      f"{letters}, of which dimension {dim} does,")
    if t.lengths() is not None:
        raise _refuse(name, "a nested tensor with gaps between its sequences",
                      "one without (contiguous())")


def pack(name: str, t: Any) -> Tuple[Tensor, Tensor]:
    """A nested tensor [B, H, lengths, D] as one [1, H, sum of lengths, D], and the lengths [B]."""
    if not t.is_nested:
        raise _refuse(name, "a tensor that is not nested, beside nested ones,", "a nested one")
    if t.dim() != 4:
        raise ValueError(f"{name}: a nested tensor of {t.dim()} dimensions arrived, "
                         "[B, heads, lengths, size] is right")
    if t.layout is torch.jagged:
        _jagged(name, t, 2, "[B, heads, lengths, size]")
        return t.values().unsqueeze(0), t.offsets().diff()
    parts = t.unbind()
    if len({(p.shape[0], p.shape[2]) for p in parts}) > 1:
        raise _refuse(name, "a nested tensor whose heads or sizes differ",
                      "[B, heads, lengths, size], of which the lengths may,")
    lengths = torch.tensor([p.shape[1] for p in parts], dtype=torch.int64)
    if not parts:
        raise ValueError(f"{name}: a nested tensor of no sequences arrived, one at least is right")
    return torch.cat(list(parts), 1).unsqueeze(0), lengths


def _bounds(like: Any) -> Dict[str, Any]:
    """The shortest and longest length, where a jagged tensor knows them already."""
    return {"min_seqlen": getattr(like, "_maybe_min_seqlen", None),
            "max_seqlen": getattr(like, "_maybe_max_seqlen", None)}


def unpack(y: Tensor, like: Any) -> Tensor:
    """What :func:`pack` made, as a nested tensor of `like`'s layout and lengths."""
    if like.layout is torch.jagged:
        made = torch.nested.nested_tensor_from_jagged(
            y[0].transpose(0, 1), like.offsets(), **_bounds(like))
        return made.transpose(1, 2)
    parts = torch.split(y[0], [p.shape[1] for p in like.unbind()], 1)
    return torch.nested.as_nested_tensor(list(parts), layout=torch.strided)


def refuse_laid_out(options: Dict[str, Any]) -> None:
    """Raises for an option that sequences of different lengths cannot have together."""
    for name in _LAID_OUT:
        if options.get(name) is not None and options[name] is not False:
            raise TypeError(f"{name}: given beside nested tensors; padded ones are right with it "
                            "(torch.nested.to_padded_tensor, with key_lengths)")


def packed_options(options: Dict[str, Any], names: Tuple[str, str, str], q: Any, k: Any,
                   v: Any) -> Tuple[Tensor, Tensor, Tensor, Dict[str, Any]]:
    """The tensors and options of a call on nested tensors, as one on packed sequences.

    Args:
        names: of q, k and v, in messages.
    """
    refuse_laid_out(options)
    (pq, nq), (pk, nk), (pv, nv) = (pack(name, t) for name, t in zip(names, (q, k, v)))
    if len(nq) != len(nk):
        raise ValueError(f"{names[1]}: {len(nk)} sequences arrived beside {len(nq)} of {names[0]}; "
                         "as many are right")
    if k is not v and (len(nk) != len(nv) or not bool((nk == nv).all())):
        raise ValueError(f"{names[2]}: other lengths than those of {names[1]} arrived; "
                         "the same are right")
    ids = torch.arange(len(nq), dtype=torch.int32)
    segments = {"q_segments": ids.repeat_interleave(nq, output_size=pq.shape[2])[None],
                "k_segments": ids.repeat_interleave(nk, output_size=pk.shape[2])[None]}
    return pq, pk, pv, {**options, **segments}


def padded(name: str, t: Any) -> Tuple[Tensor, Tensor]:
    """A nested tensor [B, lengths, E] as [B, longest, E] with zeros, and the lengths [B]."""
    if t.dim() != 3:
        raise ValueError(f"{name}: a nested tensor of {t.dim()} dimensions arrived, "
                         "[B, lengths, size] is right")
    if t.layout is torch.jagged:
        _jagged(name, t, 1, "[B, lengths, size]")
        lengths = t.offsets().diff()
    else:
        lengths = torch.tensor([p.shape[0] for p in t.unbind()], dtype=torch.int64)
    return torch.nested.to_padded_tensor(t, 0.0), lengths


def unpadded(y: Tensor, like: Any) -> Tensor:
    """[B, longest, E] without the padding, nested as `like`."""
    lengths = (like.offsets().diff().tolist() if like.layout is torch.jagged else
               [p.shape[0] for p in like.unbind()])
    parts = [row[:n] for row, n in zip(y.unbind(), lengths)]
    if like.layout is torch.jagged:
        return torch.nested.nested_tensor_from_jagged(
            torch.cat(parts), like.offsets(), **_bounds(like))
    return torch.nested.as_nested_tensor(parts, layout=torch.strided)
