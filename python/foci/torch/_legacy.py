"""Attention classes for models of transformers that choose one from a table of their own.

Those models do not call an attention function; they have a class for "eager", one for "sdpa" and so
on. For foci they get a class made of one of those: of that for "sdpa", whose call of PyTorch's
scaled_dot_product_attention goes to foci; or of one whose attention is a method of its own, as
GPT-Neo's.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["attention_class"]

_SDPA = torch.nn.functional.scaled_dot_product_attention
# What runs a module's attention: _transformers.attention_forward.
Attend = Callable[..., Tuple[torch.Tensor, Optional[torch.Tensor]]]


def attention_class(table: Dict[str, Any], attend: Attend) -> Optional[type]:
    """The class of a table for foci, or None where none can be made."""
    for base in table["eager"].__mro__:
        if base.__name__ in _METHODS:
            return _with_method(table["eager"], _METHODS[base.__name__], attend)
    if isinstance(table.get("sdpa"), type):
        return _with_sdpa(table["sdpa"], attend)
    return None


def _named_as(base: Any, members: Dict[str, Any]) -> type:
    """A class that is called as its base, so that what looks for that by name finds it."""
    members.update(__module__=base.__module__, __qualname__=base.__qualname__)
    return type(base.__name__, (base,), members)


# ---- classes that call scaled_dot_product_attention ----------------------------------------------


class _OnFoci(TorchFunctionMode):
    """Where it is at work, PyTorch's scaled_dot_product_attention is a module's on foci."""

    def __init__(self, module: Any, attend: Attend, wants: bool,
                 weights: List[Optional[torch.Tensor]]) -> None:
        super().__init__()
        self.module, self.attend, self.wants, self.weights = module, attend, wants, weights

    def __torch_function__(self, func: Any, types: Any, args: Tuple[Any, ...] = (),
                           kwargs: Optional[Dict[str, Any]] = None) -> Any:
        if func is _SDPA:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                   attn_mask: Optional[torch.Tensor] = None, dropout_p: float = 0.0,
                   is_causal: bool = False, scale: Optional[float] = None,
                   enable_gqa: bool = False) -> torch.Tensor:
        if attn_mask is not None and not (attn_mask.dtype == torch.bool
                                          or attn_mask.is_floating_point()):
            attn_mask = attn_mask != 0  # DistilBERT's before 5: a padding mask as it came
            attn_mask = attn_mask[:, None, None] if attn_mask.dim() == 2 else attn_mask
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        y, weights = self.attend(self.module, query, key, value, attn_mask, dropout=dropout_p,
                                 scaling=scale, is_causal=is_causal, output_attentions=self.wants)
        self.weights.append(weights)
        return y.transpose(1, 2)


def _with_sdpa(base: Any, attend: Attend) -> type:
    names = list(inspect.signature(base.forward).parameters)
    place = names.index("output_attentions") if "output_attentions" in names else 0
    flat = "SamVision" in base.__name__ or "SamHQVision" in base.__name__

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        if getattr(self, "config", None) is config:
            # Some classes ask it, in forward, which of two ways is theirs.
            self.config = copy.copy(config)
            self.config._attn_implementation_internal = "sdpa"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # These classes leave the weights to "eager", or give none; foci has them.
        wants = kwargs.get("output_attentions", False)
        if 0 < place <= len(args):
            wants = args[place - 1]
            args = (*args[:place - 1], False, *args[place:])
        elif wants:
            kwargs = {**kwargs, "output_attentions": False}
        made: List[Optional[torch.Tensor]] = []
        with _OnFoci(self, attend, bool(wants), made):
            result = base.forward(self, *args, **kwargs)
        weights = made[-1] if made else None
        if weights is None or not isinstance(result, tuple):
            return result
        if flat:  # heads and batch are one dimension there
            weights = weights.flatten(0, 1)
        if len(result) == 1:
            return (*result, weights) if wants else result
        return (result[0], weights, *result[2:]) if result[1] is None else result

    return _named_as(base, {"__init__": __init__, "forward": forward})


# ---- classes whose attention is a method ---------------------------------------------------------


def _of_gpt_neo(module: Any) -> Dict[str, Any]:
    if module._foci_kind == "local":
        return {"scaling": 1.0, "rule": {"window": (module.config.window_size - 1, 0)}}
    return {"scaling": 1.0, "rule": {"causal": True}}


def _of_bark(module: Any) -> Dict[str, Any]:
    return {"scaling": module.head_dim**-0.5,
            "rule": {"causal": True} if module.is_causal else {}}


def _of_gptj(module: Any) -> Dict[str, Any]:
    return {"scaling": module.head_dim**-0.5, "rule": {}}


# By the class for "eager": how its _attn scales the scores, and what hides keys beside the mask.
_METHODS: Dict[str, Callable[[Any], Dict[str, Any]]] = {
    "GPTNeoSelfAttention": _of_gpt_neo, "BarkSelfAttention": _of_bark, "GPTJAttention": _of_gptj}


def _with_method(base: Any, options_of: Callable[[Any], Dict[str, Any]], attend: Attend) -> type:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        # GPT-Neo's second argument, which older releases do not keep.
        self._foci_kind = kwargs.get("attention_type", args[0] if args else None)

    def _attn(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: Optional[torch.Tensor] = None,
              head_mask: Optional[torch.Tensor] = None) -> Any:
        options = options_of(self)
        if attention_mask is not None and "window" in options["rule"]:
            # Its buffer counts from the last key, also that of a static cache, whose end is empty:
            # added, as its own scores have it, window and mask mean the same there.
            N, M = query.shape[2], key.shape[2]
            lowest = torch.finfo(attention_mask.dtype).min
            hidden = self.bias[:, :, M - N:M, :M].logical_not()
            attention_mask = attention_mask[..., :M] + torch.zeros(
                (), dtype=attention_mask.dtype).masked_fill(hidden, lowest)
            options["rule"] = {}
        y, weights = attend(
            self, query.to(value.dtype), key.to(value.dtype), value, attention_mask,
            dropout=self.attn_dropout.p if self.training else 0.0, is_causal=False,
            head_mask=head_mask, **options)
        return y.transpose(1, 2), weights

    return _named_as(base, {"__init__": __init__, "_attn": _attn})
