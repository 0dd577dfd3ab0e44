"""What a caller's tensors are: those that the engine can read, those that say something else than
their memory, and those that are refused."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch import Tensor
from torch.masked import MaskedTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from .._arrays import refusal
from ..spec import Spec

__all__ = ["CausalBias", "causal_of", "check_kind", "explained", "renamed", "without_causal_biases"]

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def check_kind(name: str, t: Any) -> None:
    """Raises TypeError (ValueError for sparse ones) for a tensor whose memory is no array of
    numbers: nested, sparse, quantised, masked, one of PyTorch's causal biases."""
    if isinstance(t, CausalBias):
        raise TypeError(f"{name}: a causal bias of torch.nn.attention.bias arrived, which holds no "
                        "numbers; bias, keep and attn_mask take it")
    if (t.layout is not torch.strided or t.is_nested or t.is_quantized or
            isinstance(t, MaskedTensor)):
        raise refusal(name, t)


def explained(error: Exception, named: Dict[str, Any]) -> Exception:
    """An error by which a class derived from Tensor refused, as one that names the argument; any
    other error as it is."""
    text = str(error)
    if text.startswith("foci ") or text.partition(":")[0].isidentifier() and (
            "arrived" in text or "given" in text):
        return error
    for name, t in named.items():
        if isinstance(t, Tensor) and type(t) not in _PLAIN:
            return TypeError(f"{name}: {type(t).__name__} arrived, which does not take part in "
                             "foci's operators; a plain torch.Tensor is right")
    return error


def causal_of(name: str, mask: CausalBias, N: int, M: int) -> str:
    """How ``causal_upper_left`` and ``causal_lower_right`` of torch.nn.attention.bias align.

    Raises:
        ValueError: if it was made for other sizes than N queries and M keys.
    """
    if (mask.seq_len_q, mask.seq_len_kv) != (N, M):
        raise ValueError(f"{name}: a causal bias of {mask.seq_len_q} queries and "
                         f"{mask.seq_len_kv} keys arrived, one of {N} and {M} is right")
    return "top-left" if mask.variant == CausalVariant.UPPER_LEFT else "bottom-right"


def without_causal_biases(spec: Optional[Spec], options: Dict[str, Any], N: int,
                          M: int) -> Dict[str, Any]:
    """The options with PyTorch's causal biases as what they mean: causal, or a boolean mask where
    the call has a causal mask or segments of its own."""
    for name in ("bias", "keep"):
        mask = options.get(name)
        if not isinstance(mask, CausalBias):
            continue
        align = causal_of(name, mask, N, M)
        options = {key: value for key, value in options.items() if key != name}
        apart = spec is None and all(options.get(key) in (None, False) for key in (
            "causal", "segments")) and all(options.get(key) is None for key in (
                "q_segments", "k_segments"))
        if apart:
            options["causal"] = align
            continue
        dense = torch.ones(N, M, dtype=torch.bool).tril(0 if align == "top-left" else M - N)
        if spec is not None:
            options[name] = dense if name == "keep" else torch.zeros(N, M).masked_fill(
                ~dense, -torch.inf)
            continue
        other = options.get("keep")
        options["keep"] = (dense if other is None or isinstance(other, (bool, CausalBias))
                           else dense & other)
        if isinstance(other, CausalBias):
            causal_of("keep", other, N, M)
            options["keep"] = dense & other._materialize()
    return options


def renamed(error: Exception, names: Dict[str, str]) -> Exception:
    """An error whose message begins with an argument's name, with the caller's name for it."""
    name, colon, rest = str(error).partition(":")
    if not colon or name not in names:
        return error
    return type(error)(f"{names[name]}:{rest}")
