"""MultiheadAttention: torch.nn.MultiheadAttention's weights and signature, foci's options."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec import spec_of
from . import _op
from ._observe import attend

__all__ = ["MultiheadAttention"]


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Multi-head attention with learned projections, as ``torch.nn.MultiheadAttention``: the same
    parameters, so that state_dicts go either way, and the same call.

    What differs: any option of :class:`foci.Spec` may be given beside; a query that may see no key
    gets zeros, not NaN; the weights returned are those before dropout; and no N x M matrix is made
    unless weights are asked for (``need_weights=False`` spares it).

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype: as there; ``dropout`` acts in training.
        options: of :class:`foci.Spec`, but for what this module or its call says (dropout, keep,
            bias, key_lengths, segments): ``normalizer="entmax"``, ``window=(128, 0)``,
            ``score="cosine"``. Tensors that an option reads (``slopes``, ``table1d``, ``table2d``,
            ``score_w``, ``scale``) may be given too; a Parameter becomes one of this module's.

    Example:
        >>> mha = foci.torch.MultiheadAttention(512, 8, batch_first=True, normalizer="sparsemax")
        >>> y, _ = mha(x, x, x, need_weights=False)
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
                 add_bias_kv: bool = False, add_zero_attn: bool = False,
                 kdim: Optional[int] = None, vdim: Optional[int] = None,
                 batch_first: bool = False, device: Any = None, dtype: Any = None,
                 **options: Any) -> None:
        for name in ("dropout_seed", "keep", "bias", "key_lengths", "segments", "past_lengths",
                     "q_segments", "k_segments"):
            if name in options:
                raise TypeError(f"{name}: no option of this module; its call says it")
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim,
                         vdim, batch_first, device, dtype)
        self._packed = self.in_proj_weight is not None
        self._options: Dict[str, Any] = {}
        self._tensor_options: Tuple[str, ...] = ()
        for name, value in options.items():
            if not isinstance(value, Tensor):
                self._options[name] = value
                continue
            self._tensor_options += (name,)
            if isinstance(value, torch.nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value, persistent=False)
        # Unknown options and wrong values are refused here, not in the first call.
        spec_of({"dropout": 0.5, **self._options})

    def extra_repr(self) -> str:
        options = {**self._options, **{name: "..." for name in self._tensor_options}}
        return ", ".join([f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"] +
                         [f"{name}={value}" for name, value in options.items()])

    def _reset_parameters(self) -> None:
        # False keeps TransformerEncoderLayer from going around forward, and so around the options.
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor,
                key_padding_mask: Optional[Tensor] = None, need_weights: bool = True,
                attn_mask: Optional[Tensor] = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> Tuple[Tensor, Optional[Tensor]]:
        """Attention of query to key, summed over value, projected.

        Args:
            query: [N, B, E], or [B, N, E] with batch_first, or [N, E].
            key: [M, B, kdim] likewise. value: [M, B, vdim].
            key_padding_mask: [B, M] (or [M]); True hides a key, a float is added to its scores.
            need_weights: whether the weights are given too.
            attn_mask: [N, M] or [B * num_heads, N, M]; True hides, a float is added.
            average_attn_weights: the weights' mean over heads instead of each head's.
            is_causal: a query sees keys up to its own position (top-left). Stands for attn_mask,
                which need not be given.

        Returns:
            The output as query, and the weights [B, N, M] or [B, num_heads, N, M], or None.
        """
        batched = query.dim() == 3
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.dim() != (3 if batched else 2) or query.dim() not in (2, 3):
                raise ValueError(f"{name}: shape {list(t.shape)} arrived, "
                                 f"{3 if query.dim() != 2 else 2} dimensions are right")
        order = (lambda t: t.unsqueeze(0)) if not batched else (
            (lambda t: t) if self.batch_first else (lambda t: t.transpose(0, 1)))
        q, k, v = self._projected(query, key, value, order)
        B, H, N, D = q.shape
        M = k.shape[2]
        options = self._masks(key_padding_mask, attn_mask, is_causal, B, N, M, q.dtype)
        k, v, options = self._extended(k, v, options, N)
        options.update(self._options)
        options.update({name: getattr(self, name) for name in self._tensor_options})
        if self.training and self.dropout > 0:
            options["dropout"] = self.dropout
        else:
            options.pop("dropout_place", None)
        y, weights = attend(self, q, k, v, options, want_weights=need_weights)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.to(query.dtype)
        y = F.linear(y.transpose(1, 2).reshape(B, N, self.embed_dim), self.out_proj.weight,
                     self.out_proj.bias)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _heads(self, t: Tensor) -> Tensor:
        """[B, N, E] as heads [B, H, N, D], without a copy."""
        return t.reshape(*t.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor,
                   order: Any) -> Tuple[Tensor, Tensor, Tensor]:
        E = self.embed_dim
        if not self._packed:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            inputs = (query, key, value)
            return tuple(  # type: ignore[return-value]
                self._heads(F.linear(order(x), w, b)) for x, w, b in zip(inputs, weights, biases))
        w, b = self.in_proj_weight, self.in_proj_bias
        if query is key and key is value:
            parts = F.linear(order(query), w, b).chunk(3, -1)
        elif key is value:
            first = F.linear(order(query), w[:E], None if b is None else b[:E])
            both = F.linear(order(key), w[E:], None if b is None else b[E:])
            parts = (first, *both.chunk(2, -1))
        else:
            biases = (None,) * 3 if b is None else b.chunk(3)
            parts = tuple(F.linear(order(x), part, one) for x, part, one in zip(
                (query, key, value), w.chunk(3), biases))
        return tuple(self._heads(part) for part in parts)  # type: ignore[return-value]

    def _masks(self, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor],
               is_causal: bool, B: int, N: int, M: int, dtype: torch.dtype) -> Dict[str, Any]:
        """The call's masks as options: bool ones as keep, the others as a bias."""
        keep: Optional[Tensor] = None
        bias: Optional[Tensor] = None
        options: Dict[str, Any] = {}
        if is_causal:
            options["causal"] = "top-left"
        elif attn_mask is not None:
            shapes = ([N, M], [B * self.num_heads, N, M])
            if list(attn_mask.shape) not in shapes:
                raise ValueError(f"attn_mask: shape {list(attn_mask.shape)} arrived, {shapes[0]} "
                                 f"or {shapes[1]} is right")
            mask = attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(
                B, self.num_heads, N, M)
            keep, bias = _told("attn_mask", mask)
        if key_padding_mask is not None:
            if key_padding_mask.dim() == 1:
                key_padding_mask = key_padding_mask.unsqueeze(0)
            if list(key_padding_mask.shape) != [B, M]:
                raise ValueError(f"key_padding_mask: shape {list(key_padding_mask.shape)} arrived, "
                                 f"{[B, M]} is right")
            lengths = None if self.bias_k is not None or self.add_zero_attn else _lengths(
                key_padding_mask)
            if lengths is not None:
                options["key_lengths"] = lengths
                own_keep = own_bias = None
            else:
                own_keep, own_bias = _told("key_padding_mask", key_padding_mask[:, None, None])
            if own_keep is not None:
                keep = own_keep if keep is None else keep & own_keep
            if own_bias is not None:
                bias = own_bias if bias is None else bias + own_bias
        if keep is not None:
            options["keep"] = keep
        if bias is not None:
            options["bias"] = bias
        return options

    def _extended(self, k: Tensor, v: Tensor, options: Dict[str, Any],
                  N: int) -> Tuple[Tensor, Tensor, Dict[str, Any]]:
        """Keys and values with the learned one and the zero one at their end, which all see."""
        M = k.shape[2]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([t, self._heads(own).expand(t.shape[0], -1, -1, -1)], 2)
                    for t, own in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        more = k.shape[2] - M
        if more == 0:
            return k, v, options
        if options.pop("causal", None) is not None:
            causal = torch.ones(N, M, dtype=torch.bool, device=k.device).tril()
            keep = options.get("keep")
            options["keep"] = causal if keep is None else keep & causal
        for name, seen in (("keep", True), ("bias", 0.0)):
            if name in options:
                t = options[name]
                t = t.expand(*t.shape[:-1], M)
                options[name] = F.pad(t, (0, more), value=seen)
        return k, v, options


def _lengths(padding: Tensor) -> Optional[Tensor]:
    """The keys before the padding, where it is bool and at the end; looks at values, so not while a
    graph is made."""
    if torch.compiler.is_compiling() or padding.dtype != torch.bool or not _op.plain(padding):
        return None
    seen = padding.logical_not()
    lengths = seen.sum(-1)
    same = seen == (torch.arange(seen.shape[1]) < lengths[:, None])
    return lengths if bool(same.all()) else None


def _told(name: str, mask: Tensor) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """A mask of torch.nn's as (keep, None) or (None, bias)."""
    if mask.dtype == torch.bool:
        return mask.logical_not(), None
    if mask.is_floating_point():
        return None, mask
    raise TypeError(f"{name}: {mask.dtype} arrived, bool or a floating type is right")
