"""MultiheadAttention: torch.nn.MultiheadAttention's weights and signature, foci's options."""

from __future__ import annotations

import types
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec import spec_of
from . import _inputs, _nested, _op
from ._observe import attend

__all__ = ["MultiheadAttention"]

_NAMES = {"q": "query", "k": "key", "v": "value", "keep": "attn_mask", "bias": "attn_mask"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _mentions(code: types.CodeType, text: str) -> bool:
    return any(text == c or (isinstance(c, types.CodeType) and _mentions(c, text))
               for c in code.co_consts)


# In evaluation torch.nn's TransformerEncoderLayer goes around its attention's forward, and so
# around foci, but not where a module has hooks. Before it asked about hooks, saying that weights
# are not packed was the only way.
_ASKS_ABOUT_HOOKS = _mentions(torch.nn.TransformerEncoderLayer.forward.__code__,
                              "_forward_pre_hooks")


def _through_forward(module: Any, args: Any) -> None:
    """A hook that does nothing but be there."""


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Multi-head attention with learned projections, as ``torch.nn.MultiheadAttention``: the same
    parameters, so that state_dicts go either way, and the same call.

    What differs: any option of :class:`foci.Spec` may be given beside; a query that may see no key
    gets zeros, not NaN; the weights returned are those before dropout; and no N x M matrix is made
    unless weights are asked for (``need_weights=False`` spares it).

    Nested query, key and value [B, lengths, E] give a nested output (batch_first=True).

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype: as there; ``dropout`` acts in training.
        options: of :class:`foci.Spec`, but for what this module or its call says (dropout, keep,
            bias, key_lengths, segments): ``normalizer="entmax"``, ``window=(128, 0)``,
            ``score="cosine"``. Tensors that an option reads (``slopes``, ``table1d``, ``table2d``,
            ``score_w``, ``scale``, ``alpha``) may be given too; a Parameter becomes one of this
            module's.

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
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim)
        if embed_dim % num_heads:
            raise ValueError(f"num_heads: {num_heads} arrived, which does not divide embed_dim = "
                             f"{embed_dim}")
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
            raise TypeError(f"dropout: {type(dropout).__name__} arrived, a number is right")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: {dropout} arrived, a number from 0 to 1 is right")
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim,
                         vdim, batch_first, device, dtype)
        self._keep_forward()
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

    def _keep_forward(self) -> None:
        if _ASKS_ABOUT_HOOKS:
            self.register_forward_pre_hook(_through_forward)
        else:
            self._qkv_same_embed_dim = False

    def __setstate__(self, state: Dict[str, Any]) -> None:
        if state.pop("_packed", None) is not None:  # pickled by an earlier release
            super().__setstate__(state)  # type: ignore[no-untyped-call]
            self._qkv_same_embed_dim = self.in_proj_weight is not None
            self._keep_forward()
            return
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def _reset_parameters(self) -> None:
        packed, self._qkv_same_embed_dim = (self._qkv_same_embed_dim,
                                            self.in_proj_weight is not None)
        super()._reset_parameters()
        self._qkv_same_embed_dim = packed

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
            attn_mask: [N, M] or [B * num_heads, N, M]; True hides, a float is added; or
                ``causal_upper_left``, ``causal_lower_right`` of torch.nn.attention.bias.
            average_attn_weights: the weights' mean over heads instead of each head's.
            is_causal: a query sees keys up to its own position (top-left). Stands for attn_mask,
                which need not be given.

        Returns:
            The output as query, and the weights [B, N, M] or [B, num_heads, N, M], or None.
        """
        arguments = (query, key, value, key_padding_mask, need_weights, attn_mask,
                     average_attn_weights, is_causal)
        if torch.compiler.is_compiling():
            return self._forward(*arguments)
        try:
            return self._forward(*arguments)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            own = _inputs.explained(_inputs.renamed(error, _NAMES), {
                "query": query, "key": key, "value": value, "key_padding_mask": key_padding_mask,
                "attn_mask": attn_mask})
            if own is error:
                raise
            raise own from None

    def _forward(self, query: Tensor, key: Tensor, value: Tensor,
                 key_padding_mask: Optional[Tensor], need_weights: bool,
                 attn_mask: Optional[Tensor], average_attn_weights: bool,
                 is_causal: bool) -> Tuple[Tensor, Optional[Tensor]]:
        for name, t in (("query", query), ("key", key), ("value", value),
                        ("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if t is None and name.endswith("mask"):
                continue
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: {type(t).__name__} arrived, a torch.Tensor is right")
            if t.is_meta and not query.is_meta:
                raise ValueError(f"{name}: a tensor on meta arrived beside others that hold "
                                 "numbers")
            if name != "attn_mask" and not (t.is_nested and not name.endswith("mask")):
                _inputs.check_kind(name, t)
        if query.is_nested or key.is_nested or value.is_nested:
            return self._on_nested(query, key, value, key_padding_mask, need_weights, attn_mask,
                                   average_attn_weights, is_causal)
        batched = query.dim() == 3
        self._check(query, key, value)
        order = (lambda t: t.unsqueeze(0)) if not batched else (
            (lambda t: t) if self.batch_first else (lambda t: t.transpose(0, 1)))
        q, k, v = self._projected(query, key, value, order)
        B, H, N, D = q.shape
        M = k.shape[2]
        options = self._masks(key_padding_mask, attn_mask, is_causal, B, N, M, q.dtype)
        k, v, options = self._extended(k, v, options, N)
        options.update(self._options)
        options.update({name: getattr(self, name) for name in self._tensor_options})
        dropped = self.training and self.dropout >= 1
        if self.training and 0 < self.dropout < 1:
            options["dropout"] = self.dropout
        else:
            options.pop("dropout_place", None)
        y, weights = attend(self, q, k, v, options, want_weights=need_weights)
        if dropped:
            y = F.dropout(y, 1.0)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.to(query.dtype)
        y = F.linear(y.transpose(1, 2).reshape(B, N, self.embed_dim), self.out_proj.weight,
                     self.out_proj.bias)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises for sizes that do not fit, in the caller's layout."""
        rank = 3 if query.dim() != 2 else 2
        layout = "[{}, {}]" if rank == 2 else (
            "[batch, {}, {}]" if self.batch_first else "[{}, batch, {}]")
        weight = self.out_proj.weight
        for name, t, length, size, means in (
                ("query", query, "queries", self.embed_dim, "embed_dim"),
                ("key", key, "keys", self.kdim, "kdim"), ("value", value, "keys", self.vdim,
                                                          "vdim")):
            right = layout.format(length, size)
            if t.dim() != rank:
                raise ValueError(f"{name}: shape {list(t.shape)} arrived, {rank} dimensions "
                                 f"{right} are right")
            if t.shape[-1] != size:
                raise ValueError(f"{name}: shape {list(t.shape)} arrived, {right} is right, whose "
                                 f"last dimension is {means} = {size}")
            if t.device != weight.device:
                raise ValueError(f"{name}: a tensor on {t.device} arrived, {weight.device} as this "
                                 "module's weights is right")
            if not torch.is_autocast_enabled("cpu"):
                if t.dtype != weight.dtype:
                    raise ValueError(f"{name}: {t.dtype} arrived, {weight.dtype} as this module's "
                                     "weights is right")
                if t.dtype not in _DTYPES:
                    raise ValueError(f"{name}: {t.dtype} arrived, float32, float16 or bfloat16 is "
                                     "right")
        along = 0 if rank == 2 or not self.batch_first else 1
        if rank == 3:
            batch = 1 - along
            for name, t in (("key", key), ("value", value)):
                if t.shape[batch] != query.shape[batch]:
                    raise ValueError(
                        f"{name}: shape {list(t.shape)} arrived, a batch of {t.shape[batch]} "
                        f"beside {query.shape[batch]} of query {list(query.shape)}; the same is "
                        "right")
        if value.shape[along] != key.shape[along]:
            raise ValueError(f"value: shape {list(value.shape)} arrived, of {value.shape[along]} "
                             f"keys beside {key.shape[along]} of key {list(key.shape)}; as many "
                             "are right")

    def _on_nested(self, query: Tensor, key: Tensor, value: Tensor,
                   key_padding_mask: Optional[Tensor], need_weights: bool,
                   attn_mask: Optional[Tensor], average_attn_weights: bool,
                   is_causal: bool) -> Tuple[Tensor, Optional[Tensor]]:
        """Nested inputs, padded for the call."""
        if not self.batch_first:
            raise ValueError("query: a nested tensor arrived, for which batch_first=True is right")
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                raise TypeError(f"{name}: given beside nested tensors; padded ones are right with "
                                "it (torch.nested.to_padded_tensor)")
        for name, t in (("query", query), ("key", key), ("value", value)):
            if not t.is_nested:
                raise TypeError(f"{name}: a tensor that is not nested arrived beside nested ones; "
                                "all or none is right")
        q, lengths = _nested.padded("query", query)
        k, key_lengths = (q, lengths) if key is query else _nested.padded("key", key)
        v, value_lengths = (q, lengths) if value is query else (
            (k, key_lengths) if value is key else _nested.padded("value", value))
        if len(key_lengths) != len(lengths):
            raise ValueError(f"key: {len(key_lengths)} sequences arrived beside {len(lengths)} of "
                             "query; as many are right")
        if not torch.equal(key_lengths, value_lengths):
            raise ValueError("value: sequences of other lengths than those of key arrived; the "
                             "same are right")
        padding = torch.arange(k.shape[1]) >= key_lengths[:, None]
        y, weights = self._forward(q, k, v, padding, need_weights, None, average_attn_weights,
                                  is_causal)
        return _nested.unpadded(y, query), weights

    def _heads(self, t: Tensor) -> Tensor:
        """[B, N, E] as heads [B, H, N, D], without a copy."""
        return t.reshape(*t.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor,
                   order: Any) -> Tuple[Tensor, Tensor, Tensor]:
        E = self.embed_dim
        if self.in_proj_weight is None:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            inputs = (query, key, value)
            return tuple(
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
        elif isinstance(attn_mask, _inputs.CausalBias):
            options["causal"] = _inputs.causal_of("attn_mask", attn_mask, N, M)
        elif attn_mask is not None:
            _inputs.check_kind("attn_mask", attn_mask)
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
        align = options.pop("causal", None)
        if align is not None:
            causal = torch.ones(N, M, dtype=torch.bool, device=k.device).tril(
                0 if align == "top-left" else M - N)
            keep = options.get("keep")
            options["keep"] = causal if keep is None else keep & causal
        for name, seen in (("keep", True), ("bias", 0.0)):
            if name in options:
                t = options[name]
                t = t.expand(*t.shape[:-1], M)
                options[name] = F.pad(t, (0, more), value=seen)
        return k, v, options


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if size is None and name in ("kdim", "vdim"):
            continue
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{name}: {type(size).__name__} arrived, an integer is right")
        if size < 1:
            raise ValueError(f"{name}: {size} arrived, 1 or more is right")


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
