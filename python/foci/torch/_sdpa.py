"""PyTorch's scaled_dot_product_attention on foci: the same arguments, the same meaning."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch import Tensor

from ._attention import attention

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor,
                                 attn_mask: Optional[Tensor] = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: Optional[float] = None,
                                 enable_gqa: bool = False) -> Tensor:
    """:func:`foci.torch.attention` with the signature of
    ``torch.nn.functional.scaled_dot_product_attention``, for code that is written for that one.

    Args:
        query: [..., H, N, D], or [N, D], float32, bfloat16 or float16, on the CPU.
        key: [..., Hk, M, D]; value: [..., Hk, M, Dv]. Hk is H but with ``enable_gqa``, where it
            divides H.
        attn_mask: broadcasts to [..., H, N, M]; boolean (True attends) or added to the scores, and
            then with a gradient.
        dropout_p: of the weights, whenever it is above 0.
        is_causal: query i sees the keys up to i ("top-left").
        scale: of the scores, 1/sqrt(D) where None.

    Returns:
        [..., H, N, Dv]. A query that may see no key gets 0.

    Raises:
        ValueError, TypeError: naming the argument, what arrived and what would be right.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: {type(t).__name__} arrived, a torch.Tensor is right")
        if t.dim() < 2 or t.dim() != query.dim() or t.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name}: shape {list(t.shape)} arrived beside query "
                             f"{list(query.shape)}; [..., heads, length, size] with the same "
                             "leading dimensions is right")
    heads = query.shape[-3] if query.dim() > 2 else 1
    for name, t in (("key", key), ("value", value)):
        given = t.shape[-3] if t.dim() > 2 else 1
        if given != heads and not enable_gqa:
            raise ValueError(f"{name}: {given} heads arrived beside {heads} of query; as many, or "
                             "enable_gqa=True, is right")
    options: Dict[str, Any] = {}
    if is_causal:
        if attn_mask is not None:
            raise ValueError("attn_mask: given beside is_causal=True; one of the two is right")
        options["causal"] = "top-left"
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask: {type(attn_mask).__name__} arrived, a torch.Tensor is "
                            "right")
        boolean = attn_mask.dtype == torch.bool
        options["keep" if boolean else "bias"] = _mask(attn_mask, query, key)
    if dropout_p:
        options["dropout"] = float(dropout_p)
    if scale is not None:
        options["scale"] = float(scale)
    q, k, v = (_four(t) for t in (query, key, value))
    y: Tensor = attention(q, k, v, **options)
    return y.reshape(*query.shape[:-1], value.shape[-1])


def _four(t: Tensor) -> Tensor:
    """[..., H, L, D] as [B, H, L, D]."""
    if t.dim() == 4:
        return t
    if t.dim() < 4:
        return t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))
    return t.flatten(0, -4)


def _mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as [1 or B, 1 or H, 1 or N, 1 or M]."""
    whole = (*query.shape[:-1], key.shape[-2])
    try:
        broadcast = torch.broadcast_shapes(mask.shape, whole)  # type: ignore[no-untyped-call]
    except RuntimeError:
        broadcast = torch.Size()
    if broadcast != torch.Size(whole):
        raise ValueError(f"attn_mask: shape {list(mask.shape)} arrived, one that broadcasts to "
                         f"{list(whole)} is right")
    if mask.dim() <= (4 if query.dim() <= 4 else 3):
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
