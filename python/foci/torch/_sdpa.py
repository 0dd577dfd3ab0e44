"""PyTorch's scaled_dot_product_attention on foci: the same arguments, the same meaning."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from . import _inputs, _nested
from ._attention import attention

__all__ = ["scaled_dot_product_attention"]

_NAMES = {"q": "query", "k": "key", "v": "value", "keep": "attn_mask", "bias": "attn_mask",
          "dropout": "dropout_p"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor,
                                 attn_mask: Optional[Tensor] = None, dropout_p: float = 0.0,
                                 is_causal: bool = False,
                                 scale: Union[None, float, Tensor] = None,
                                 enable_gqa: bool = False) -> Tensor:
    """:func:`foci.torch.attention` with the signature of
    ``torch.nn.functional.scaled_dot_product_attention``, for code that is written for that one.

    Args:
        query: [..., H, N, D], or [N, D], float32, bfloat16 or float16, on the CPU.
        key: [..., H, M, D]; value: [..., H, M, Dv]. Leading dimensions and heads broadcast, as
            there. With ``enable_gqa`` their heads divide those of query.
        attn_mask: broadcasts to [..., H, N, M]; boolean (True attends) or added to the scores, and
            then with a gradient; or ``causal_upper_left``, ``causal_lower_right`` of
            torch.nn.attention.bias.
        dropout_p: of the weights, whenever it is above 0; 1 drops all.
        is_causal: query i sees the keys up to i ("top-left").
        scale: of the scores, 1/sqrt(D) where None; a tensor gets a gradient.

    Returns:
        [..., H, N, Dv]. A query that may see no key gets 0. Nested tensors [B, H, lengths, D] give
        one as query; they take no attn_mask.

    Raises:
        ValueError, TypeError: naming the argument, what arrived and what would be right.
    """
    if torch.compiler.is_compiling():
        return _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    try:
        return _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        own = _inputs.explained(_inputs.renamed(error, _NAMES), {
            "query": query, "key": key, "value": value, "attn_mask": attn_mask})
        if own is error:
            raise
        raise own from None


def _call(query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor],
          dropout_p: float, is_causal: bool, scale: Union[None, float, Tensor],
          enable_gqa: bool) -> Tensor:
    _check_tensors(query, key, value)
    options, dropped = _numbers(dropout_p, scale)
    if is_causal:
        if attn_mask is not None:
            raise ValueError("attn_mask: given beside is_causal=True; one of the two is right")
        options["causal"] = "top-left"
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask: {type(attn_mask).__name__} arrived, a torch.Tensor is right")
    if query.is_nested or key.is_nested or value.is_nested:
        return _nested_call(query, key, value, attn_mask, options, dropped)
    lead, heads = _check_shapes(query, key, value, enable_gqa)
    N, M = query.shape[-2], key.shape[-2]
    if isinstance(attn_mask, _inputs.CausalBias):
        options["causal"] = _inputs.causal_of("attn_mask", attn_mask, N, M)
    elif attn_mask is not None:
        _inputs.check_kind("attn_mask", attn_mask)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask: {attn_mask.dtype} arrived, bool or a floating type is "
                            "right")
        shape = (*lead, *([heads[0]] if _ranks(query, key, value) > 2 else []), N, M)
        options["keep" if attn_mask.dtype == torch.bool else "bias"] = _mask(attn_mask, shape)
    q, k, v = (_four(t, lead, own) for t, own in zip((query, key, value), heads))
    y: Tensor = attention(q, k, v, **options)
    if dropped:
        y = F.dropout(y, 1.0)
    if _ranks(query, key, value) < 3:
        return y.reshape(N, value.shape[-1])
    return y.reshape(*lead, heads[0], N, value.shape[-1])


def _numbers(dropout_p: Any, scale: Any) -> Tuple[Dict[str, Any], bool]:
    """dropout_p and scale as options, and whether all weights are dropped."""
    options: Dict[str, Any] = {}
    try:
        p = float(dropout_p)
    except (TypeError, ValueError):
        raise TypeError(f"dropout_p: {type(dropout_p).__name__} arrived, a number is "
                        "right") from None
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_p: {p} arrived, a number from 0 to 1 is right")
    if 0 < p < 1:
        options["dropout"] = p
    if scale is not None:
        if not isinstance(scale, (int, float, Tensor)):
            raise TypeError(f"scale: {type(scale).__name__} arrived, a number is right")
        options["scale"] = scale if isinstance(scale, Tensor) else float(scale)
    return options, p == 1


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: {type(t).__name__} arrived, a torch.Tensor is right")
        if not t.is_nested:
            _inputs.check_kind(name, t)
        if torch.is_autocast_enabled("cpu") and t.is_floating_point():
            continue
        if t.dtype not in _DTYPES:
            raise ValueError(f"{name}: {t.dtype} arrived, float32, float16 or bfloat16 is right")
        if t.dtype != query.dtype:
            raise ValueError(f"{name}: {t.dtype} arrived beside query of {query.dtype}; the same "
                             "is right")


def _ranks(query: Tensor, key: Tensor, value: Tensor) -> int:
    return max(query.dim(), key.dim(), value.dim())


def _check_shapes(query: Tensor, key: Tensor, value: Tensor,
                  enable_gqa: bool) -> Tuple[Tuple[int, ...], Tuple[int, int, int]]:
    """The leading dimensions of the result, and the heads that query, key and value are to have."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() < 2:
            raise ValueError(f"{name}: shape {list(t.shape)} arrived, [..., heads, length, size] "
                             "is right")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: shape {list(key.shape)} arrived beside query {list(query.shape)}; "
                         f"a last dimension of {query.shape[-1]} is right")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: shape {list(value.shape)} arrived beside key {list(key.shape)}; "
                         f"a length of {key.shape[-2]} is right")
    H, Hk, Hv = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
    if enable_gqa:
        for name, own in (("key", Hk), ("value", Hv)):
            if own != H and (own == 0 or H == 0 or H % own):
                raise ValueError(f"{name}: {own} heads arrived beside {H} of query; a number that "
                                 "divides them is right")
        heads = (H, Hk, Hv) if Hk == Hv else (H, H, H)
    else:
        most = H if H != 1 else Hk if Hk != 1 else Hv
        for name, own in (("key", Hk), ("value", Hv)):
            if own not in (1, most):
                raise ValueError(f"{name}: {own} heads arrived beside {most}; as many, 1, or "
                                 "enable_gqa=True, is right")
        # Engines share one key head among all; with more, or with none, they are as many.
        few = 1 if Hk == Hv == 1 and most > 0 else most
        heads = (most, few, few)
    lead: Tuple[int, ...] = ()
    for name, t in (("query", query), ("key", key), ("value", value)):
        try:
            lead = tuple(torch.broadcast_shapes(  # type: ignore[no-untyped-call]
                lead, t.shape[:-3]))
        except RuntimeError:
            raise ValueError(f"{name}: shape {list(t.shape)} arrived, whose leading dimensions do "
                             f"not broadcast with {list(lead)}") from None
    return lead, heads


def _four(t: Tensor, lead: Tuple[int, ...], heads: int) -> Tensor:
    """[..., H, L, D] as [B, heads, L, D]."""
    own = t.shape[-3] if t.dim() > 2 else 1
    if own not in (1, heads):  # grouped, and unlike the other's
        t = t.repeat_interleave(heads // own, -3)
    shape = (*lead, heads, *t.shape[-2:])
    if tuple(t.shape) != shape:
        t = t.expand(shape)
    if t.dim() == 4:
        return t
    return t.unsqueeze(0) if t.dim() == 3 else t.flatten(0, -4)


def _mask(mask: Tensor, whole: Tuple[int, ...]) -> Tensor:
    """The mask as [1 or B, 1 or H, 1 or N, 1 or M]."""
    try:
        broadcast = torch.broadcast_shapes(mask.shape, whole)  # type: ignore[no-untyped-call]
    except RuntimeError:
        broadcast = torch.Size()
    if broadcast != torch.Size(whole):
        raise ValueError(f"attn_mask: shape {list(mask.shape)} arrived, one that broadcasts to "
                         f"{list(whole)} is right")
    if mask.dim() <= (4 if len(whole) <= 4 else 3):
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return mask.expand(*whole[:-3], *mask.shape[-3:]).flatten(0, -4)


def _nested_call(query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor],
                 options: Dict[str, Any], dropped: bool) -> Tensor:
    if attn_mask is not None:
        raise TypeError("attn_mask: given beside nested tensors; padded ones are right with it "
                        "(torch.nested.to_padded_tensor)")
    q, k, v, options = _nested.packed_options(options, ("query", "key", "value"), query, key, value)
    y: Tensor = attention(q, k, v, **options)
    return _nested.unpack(F.dropout(y, 1.0) if dropped else y, query)
