"""Masks of transformers models, held as the rules that make them and not as [B, 1, N, M] tensors.

transformers asks a backend for a mask once a forward call, and hands it to every layer. What comes
here is a function of (batch, head, query, key) indices and a [B, M] padding mask. Where the
function is a rule that foci knows (causal, windows, packed sequences), the mask that goes through
the model is a :class:`PatternMask`: a tensor of the right shape that holds that rule. Anything else
becomes the boolean tensor that PyTorch's own backend would get. A model that was not written for
boolean masks gets the one that is added to scores, as transformers' "eager" makes it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.utils._pytree import tree_map

from ._models import attention_classes, served, warn_unreached

__all__ = ["PatternMask", "is_tracing", "mask_function_for"]


def is_tracing() -> bool:
    """A graph is being made of what runs: nothing may depend on values."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


class PatternMask(torch.Tensor):
    """A boolean mask [B, 1, N, M], True where a query may see a key, without N x M memory.

    A model that passes it on keeps the rule; any operation on it sees the dense tensor. Made
    outside of what torch.compile sees, it may go into it.

    Args:
        shape: [B, 1, N, M].
        past: the key at which query 0 stands; query i stands at past + i.
        causal: keys after the query's own position are hidden.
        window: (left, right), how many keys on either side are seen; None is all of them.
        padding: [B, M] boolean, False where a key is padding; None where none is.
        segments: [B, N] integers, equal for tokens of one packed sequence (then M = N).
    """

    past: int
    causal: bool
    window: Optional[Tuple[Optional[int], Optional[int]]]
    padding: Optional[torch.Tensor]
    segments: Optional[torch.Tensor]
    _pasts: torch.Tensor
    _options: Optional[Dict[str, Any]]
    # Operations come to __torch_dispatch__; without this, even asking for the shape is slow.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Tuple[int, int, int, int], device: Any, **_: Any) -> "PatternMask":
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)

    def __init__(self, shape: Tuple[int, int, int, int], device: Any, *, past: int = 0,
                 causal: bool = False,
                 window: Optional[Tuple[Optional[int], Optional[int]]] = None,
                 padding: Optional[torch.Tensor] = None,
                 segments: Optional[torch.Tensor] = None) -> None:
        self.past, self.causal, self.window = past, causal, window
        self.padding, self.segments = padding, segments
        # For a graph, where a number that changes from call to call would ask for a new one.
        self._pasts = torch.full((shape[0],), past, dtype=torch.int64)
        self._options = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any,  # type: ignore[override]
                           args: Tuple[Any, ...] = (),
                           kwargs: Optional[Dict[str, Any]] = None) -> Any:
        def dense(x: Any) -> Any:
            return x.dense() if isinstance(x, PatternMask) else x
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copy elsewhere is a plain tensor
        return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def dense(self) -> torch.Tensor:
        """The same mask as a plain tensor [B, 1, N, M]."""
        B, _, N, M = self.shape
        p = torch.arange(N, device=self.device)[:, None] + self.past
        j = torch.arange(M, device=self.device)[None, :]
        mask = torch.ones(B, 1, N, M, dtype=torch.bool, device=self.device)
        if self.causal:
            mask &= j <= p
        if self.window is not None:
            left, right = self.window
            if left is not None:
                mask &= j >= p - left
            if right is not None:
                mask &= j <= p + right
        if self.padding is not None:
            mask &= self.padding[:, None, None, :]
        if self.segments is not None:
            mask &= (self.segments[:, :, None] == self.segments[:, None, :])[:, None]
        return mask

    def options(self) -> Dict[str, Any]:
        """The mask as options of foci.torch.attention; worked out once, or anew in a graph."""
        if is_tracing():
            return self._traced_options()
        if self._options is None:
            self._options = self._make_options()
        return self._options

    def _make_options(self) -> Dict[str, Any]:
        _, _, N, M = self.shape
        options: Dict[str, Any] = {}
        align = ("bottom-right" if self.past == M - N else
                 "top-left" if self.past == 0 else "past")
        if self.window is not None:
            left, right = self.window
            if self.causal:
                right = 0 if right is None else min(right, 0)
            options["window"], options["window_align"] = (left, right), align
        elif self.causal and self.past < M - 1:
            options["causal"] = align
        if options and align == "past":
            options["past_lengths"] = self._pasts
        if self.segments is not None:
            segments = self.segments.to(torch.int32).contiguous()
            options["q_segments"] = options["k_segments"] = segments
        if self.padding is not None and not bool(self.padding.all()):
            lengths = self.padding.sum(-1)
            before = torch.arange(M, device=self.device)[None, :] < lengths[:, None]
            if bool((before == self.padding).all()):
                options["key_lengths"] = lengths
            else:  # padding on the left or in between
                options["keep"] = self.padding[:, None, None, :]
        return options

    def _traced_options(self) -> Dict[str, Any]:
        """The same mask by tensors alone, whatever is in them."""
        options: Dict[str, Any] = {}
        if self.window is not None:
            left, right = self.window
            if self.causal:
                right = 0 if right is None else min(right, 0)
            options["window"], options["window_align"] = (left, right), "past"
        elif self.causal:
            options["causal"] = "past"
        if options:
            options["past_lengths"] = self._pasts
        if self.segments is not None:
            options["q_segments"] = options["k_segments"] = self.segments.to(torch.int32)
        if self.padding is not None:
            options["keep"] = self.padding[:, None, None, :]
        return options


class _Unknown(Exception):
    """A mask function whose rule is not among those known."""


def _cell(function: Callable[..., Any], name: str) -> Any:
    code, closure = function.__code__, function.__closure__ or ()
    return dict(zip(code.co_freevars, (c.cell_contents for c in closure)))[name]


class _Reader:
    """Tells which rules of transformers' masking_utils a mask function is made of.

    The functions are closures; one is known by its code, and its parameters are in its cells.
    """

    def __init__(self, masking_utils: Any) -> None:
        m = masking_utils
        some = torch.zeros(1, 1, dtype=torch.int64)
        makers: List[Tuple[str, str, Callable[[], Any]]] = [
            ("and", "mask_functions", lambda: m.and_masks(m.causal_mask_function)),
            ("left", "sliding_window", lambda: m.sliding_window_overlay(1)),
            ("both", "sliding_window", lambda: m.sliding_window_bidirectional_overlay(1)),
            ("segments", "packed_sequence_mask", lambda: m.packed_sequence_mask_function(some)),
            # Positions inside a packed sequence: foci counts there by itself.
            ("inside", "mask_function",
             lambda: m.remap_positions_for_packed_sequence(m.causal_mask_function, some))]
        self.codes: Dict[Any, Tuple[str, str]] = {}
        for kind, cell, make in makers:
            try:
                self.codes[make().__code__] = (kind, cell)
            except AttributeError:  # a release without this rule
                continue
        self.causal = m.causal_mask_function
        self.everything = getattr(m, "bidirectional_mask_function", None)

    def read(self, function: Any) -> Dict[str, Any]:
        """Arguments of a PatternMask.

        Raises:
            _Unknown: if the function is, or has in it, something else.
        """
        rules: Dict[str, Any] = {}
        self._add(function, rules)
        return rules

    def _add(self, function: Any, rules: Dict[str, Any]) -> None:
        if function is self.causal:
            rules["causal"] = True
            return
        if self.everything is not None and function is self.everything:
            return
        kind, cell = self.codes.get(getattr(function, "__code__", None), ("", ""))
        if not kind:
            raise _Unknown
        value = _cell(function, cell)
        if kind == "and":
            for part in value:
                self._add(part, rules)
        elif kind == "inside":
            self._add(value, rules)
        else:
            name = "segments" if kind == "segments" else "window"
            if name in rules:
                raise _Unknown
            rules[name] = (value if kind == "segments" else
                           (int(value) - 1, None) if kind == "left" else (int(value), int(value)))


@functools.lru_cache(maxsize=None)
def _ways(config: type) -> Tuple[bool, bool]:
    """What the models of a configuration do with masks.

    Returns:
        Whether they know no masks but those that are added to scores, since they were written for
        "eager" alone (warns where they compute their attention themselves); and whether all their
        attention layers say by ``is_causal`` what is meant where there is no mask.
    """
    module = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if module is None or module.__name__ == config.__module__:
        return False, False
    classes = [c for c in vars(module).values()
               if isinstance(c, type) and issubclass(c, torch.nn.Module)]
    layers = attention_classes(module)
    say = bool(layers) and all("is_causal" in c.__init__.__code__.co_names for c in layers)
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        if layers and not served(module):
            warn_unreached(config.__name__)
        return True, say
    flags = ("_supports_sdpa", "_supports_flex_attn")
    models = [c for c in classes if getattr(c, "config_class", None) is config
              and hasattr(c, flags[0])]
    boolean = any(getattr(c, flag, False) for c in models for flag in flags)
    return bool(models) and not boolean, say


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_ways(config: type) -> Tuple[bool, bool]:
    return _ways(config)


def mask_function_for(masking_utils: Any) -> Callable[..., Optional[torch.Tensor]]:
    """The backend's entry for transformers' AttentionMaskInterface."""
    reader = _Reader(masking_utils)

    def foci_mask(*args: Any, **kwargs: Any) -> Optional[torch.Tensor]:
        config = kwargs.get("config")
        adds, says = (False, False) if config is None else _constant_ways(type(config))
        if adds:
            added: Optional[torch.Tensor] = masking_utils.eager_mask(*args, **kwargs)
            return added
        if not args and not is_tracing():
            try:
                return _pattern(reader, **kwargs)
            except _Unknown:
                pass
        if not says:  # not left to a layer's is_causal, which not every layer has
            kwargs["allow_is_causal_skip"] = False
        made: Optional[torch.Tensor] = masking_utils.sdpa_mask(*args, **kwargs)
        return made

    return foci_mask


def _pattern(reader: _Reader, *, batch_size: int, kv_length: int,
             q_length: Optional[int] = None, q_offset: Any = 0, kv_offset: Any = 0,
             cache_position: Optional[torch.Tensor] = None, mask_function: Any = None,
             attention_mask: Optional[torch.Tensor] = None,
             allow_is_bidirectional_skip: bool = False, device: Any = None,
             **_: Any) -> Optional[torch.Tensor]:
    rules = reader.read(reader.causal if mask_function is None else mask_function)
    if q_length is None:  # before transformers 5 positions came as a tensor
        if cache_position is None:
            raise _Unknown
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    past = q_offset - kv_offset
    positions = rules.get("causal") or "window" in rules
    if past < 0 or ("segments" in rules and (q_length != kv_length or past != 0)):
        raise _Unknown
    padding = attention_mask
    if padding is not None:
        if padding.ndim != 2 or padding.shape[0] != batch_size:
            raise _Unknown
        missing = kv_length + kv_offset - padding.shape[1]
        if missing > 0:
            padding = torch.nn.functional.pad(padding, (0, missing))
        padding = padding[:, kv_offset:kv_offset + kv_length].to(torch.bool)
        if bool(padding.all()):
            padding = None
    if (padding is None and not positions and "segments" not in rules
            and allow_is_bidirectional_skip):
        return None
    if device is None:
        device = padding.device if padding is not None else "cpu"
    return PatternMask((batch_size, 1, q_length, kv_length), device, past=past, padding=padding,
                       **rules)
