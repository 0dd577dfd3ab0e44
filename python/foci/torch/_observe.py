"""observe: what a model's attention does, layer by layer, while it runs."""

from __future__ import annotations

from contextvars import Token
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch

from . import _watch
from ._attention import attention
from ._sdpa import scaled_dot_product_attention
from ._sinks import attention_with_sinks

__all__ = ["LayerRecord", "Observation", "observe"]

_STATISTICS = ("entropy", "coverage", "max_weight", "support")


@dataclass
class LayerRecord:
    """One call of attention.

    Attributes:
        name: the path, inside the observed model, of the layer or of the innermost module that
            called: ``encoder.layer.0.attention.self``, say.
        entropy: [B, H, N] in nats, of the weights before dropout.
        coverage: [B, H, M], the weight that each key got from all queries.
        max_weight: [B, H, N]; max_key, int64, is the first key that has it.
        support: [B, H, N], the number of keys that take part.
        weights: [B, len(heads), len(rows), M], exact; only if rows were asked for.

    What was not asked for is None.
    """

    name: str
    entropy: Optional[torch.Tensor] = None
    coverage: Optional[torch.Tensor] = None
    max_weight: Optional[torch.Tensor] = None
    max_key: Optional[torch.Tensor] = None
    support: Optional[torch.Tensor] = None
    weights: Optional[torch.Tensor] = None


class Observation:
    """What :func:`observe` collects; see there.

    Attributes:
        layers: a :class:`LayerRecord` a call of an attention layer, in the order of the calls.
    """

    def __init__(self, model: torch.nn.Module, statistics: Union[str, Iterable[str]],
                 rows: Optional[Sequence[int]], heads: Optional[Sequence[int]]) -> None:
        names = (statistics,) if isinstance(statistics, str) else tuple(statistics)
        for name in names:
            if name not in _STATISTICS:
                raise ValueError(f"statistics: {name!r} arrived, names among "
                                 f"{', '.join(_STATISTICS)} are right")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: {type(model).__name__} arrived, a torch.nn.Module is right")
        if heads is not None and rows is None:
            raise ValueError("heads: given without rows; they choose the heads of the exact rows")
        _require_backend(model)
        self.layers: List[LayerRecord] = []
        self._statistics = names
        self._rows = None if rows is None else list(rows)
        self._heads = None if heads is None else list(heads)
        self._names: Dict[torch.nn.Module, str] = {m: name for name, m in model.named_modules()}
        self._model = model
        self._entered: List[Tuple[Token[Tuple[Any, ...]], _watch.Modules]] = []

    def __enter__(self) -> "Observation":
        token = _watch.observations.set(_watch.observations.get() + (self,))
        self._entered.append((token, _watch.Modules(self._model)))
        return self

    def __exit__(self, *_: Any) -> None:
        token, modules = self._entered.pop()
        modules.close()
        _watch.observations.reset(token)

    @property
    def names(self) -> List[str]:
        """The layers' paths, in the order of ``layers``."""
        return [record.name for record in self.layers]

    @property
    def entropy(self) -> torch.Tensor:
        """[layers, B, H, N], in nats."""
        return self._stack("entropy")

    @property
    def coverage(self) -> torch.Tensor:
        """[layers, B, H, M]."""
        return self._stack("coverage")

    @property
    def max_weight(self) -> torch.Tensor:
        """[layers, B, H, N]."""
        return self._stack("max_weight")

    @property
    def max_key(self) -> torch.Tensor:
        """[layers, B, H, N] int64."""
        return self._stack("max_key")

    @property
    def support(self) -> torch.Tensor:
        """[layers, B, H, N]."""
        return self._stack("support")

    @property
    def weights(self) -> torch.Tensor:
        """[layers, B, len(heads), len(rows), M], the exact rows."""
        return self._stack("weights")

    def clear(self) -> None:
        """Forgets what was collected."""
        self.layers.clear()

    def __repr__(self) -> str:
        return f"Observation({len(self.layers)} layer calls, {', '.join(self._statistics)})"

    def _stack(self, name: str) -> torch.Tensor:
        if not self.layers:
            raise ValueError(
                f"{name}: no attention layer of the model has run on foci yet, inside `with "
                "observe(...)`, in this thread and uncompiled")
        values = [getattr(record, name) for record in self.layers]
        if values[0] is None:
            asked = ("rows=[...]" if name == "weights" else
                     f"statistics=({'max_weight' if name == 'max_key' else name!r},)")
            raise ValueError(f"{name}: not collected; observe(model, {asked}) asks for it")
        for record, value in zip(self.layers, values):
            if value.shape != values[0].shape:
                raise ValueError(
                    f"{name}: layers differ in shape, {list(values[0].shape)} in "
                    f"{self.layers[0].name!r} and {list(value.shape)} in {record.name!r}; read "
                    "them one by one from .layers")
        return torch.stack(values)

    def _record(self, module: torch.nn.Module, outputs: Any) -> None:
        record = LayerRecord(self._names[module])
        for name in self._statistics:
            setattr(record, name, getattr(outputs, name))
        if "max_weight" in self._statistics:
            record.max_key = outputs.max_key
        if self._rows is not None:
            record.weights = outputs.weights(self._rows, self._heads)
        self.layers.append(record)


def observe(model: torch.nn.Module,
            statistics: Union[str, Iterable[str]] = ("entropy", "coverage", "max_weight"), *,
            rows: Optional[Sequence[int]] = None,
            heads: Optional[Sequence[int]] = None) -> Observation:
    """Collects what the attention layers of a model do, without its weights as N x M tensors.

        >>> with foci.torch.observe(model) as o:
        ...     model(**inputs)
        >>> o.entropy                        # [layers, B, H, N]
        >>> o.layers[3].name, o.layers[3].coverage

    Every call of an attention layer adds a record, and so does every call of
    :func:`foci.torch.attention` or :func:`foci.torch.scaled_dot_product_attention` that a module of
    the model makes in its forward, under the path of the innermost module that
    runs. So several forward calls, a ``generate`` or gradient checkpointing add several a layer.
    Statistics belong to the graph of gradients where
    those are on, so a penalty on the entropy can be learned from; use ``torch.no_grad()`` where
    that is not wanted. Rows of padding queries are among the results; they mean nothing, and to
    leave them out is the caller's part. Code under ``torch.compile`` is not seen.

    Args:
        model: one whose attention runs on foci (``attn_implementation="foci"``, layers of
            :class:`foci.torch.MultiheadAttention`, a call of foci's functions), or a part of it:
            ``model.encoder``, say.
        statistics: names among entropy, coverage, max_weight (brings max_key), support.
        rows: queries whose exact weights are wanted; negative ones count from the end.
        heads: of those rows; all where None.

    Raises:
        ValueError: if the model's attention is another than foci's.
    """
    return Observation(model, statistics, rows, heads)


def _require_backend(model: torch.nn.Module) -> None:
    if torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention:
        return  # "sdpa" is foci's then
    found = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if isinstance(name, str):
            found.add(name)
    if found and "foci" not in found:
        raise ValueError(
            f"model: its attention is {', '.join(sorted(map(repr, found)))}; observe needs "
            "attn_implementation='foci' (foci.torch.register_transformers(), then "
            "model.set_attn_implementation('foci'))")


def attend(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
           options: Dict[str, Any], want_weights: bool = False,
           sinks: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Attention on behalf of a module, told to the observations that are open for it.

    Args:
        sinks: [H] logits that take part in the softmax and have no value; they get gradients.

    Returns:
        y [B, H, N, Dv], and the weights [B, H, N, M] if wanted.
    """
    if torch.compiler.is_compiling() or not _watch.listening:  # compilers trace no ContextVar
        return _attend(module, [], q, k, v, options, want_weights, sinks)
    with _watch.quiet():
        return _attend(module, _watching(module), q, k, v, options, want_weights, sinks)


def _watching(module: Optional[torch.nn.Module]) -> List[Tuple["Observation", torch.nn.Module]]:
    """The observations that are open here, each with the module of its own that calls."""
    found = []
    for o in dict.fromkeys(_watch.observations.get()):
        caller = module if module in o._names else _watch.innermost(o._names)
        if caller is not None:
            found.append((o, caller))
    return found


def _attend(module: torch.nn.Module, watching: List[Tuple["Observation", torch.nn.Module]],
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Dict[str, Any],
            want_weights: bool, sinks: Optional[torch.Tensor]) -> Tuple[
                torch.Tensor, Optional[torch.Tensor]]:
    if not watching and not want_weights and sinks is None:
        y: torch.Tensor = attention(q, k, v, **options)
        return y, None
    statistics = {name for o, _ in watching for name in o._statistics} | {"row_stat"}
    outputs: Any
    if sinks is not None:
        outputs = attention_with_sinks(q, k, v, sinks, statistics, options)
    else:
        outputs = attention(q, k, v, statistics=tuple(sorted(statistics)), **options)
    for o, caller in watching:
        o._record(caller, outputs)
    return outputs.y, outputs.weights() if want_weights else None


def _tell(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Any, statistics: Any,
          mask_mod: Any, options: Dict[str, Any]) -> Any:
    """A call of attention by whomever, told to the observations whose modules run.

    Returns:
        What the call gives; None where nobody looks on.
    """
    watching = [] if _watch.is_quiet() else _watching(None)
    if not watching:
        return None
    asked = (statistics,) if isinstance(statistics, str) else tuple(statistics or ())
    wanted = {name for o, _ in watching for name in o._statistics} | {"row_stat", *asked}
    wanted.discard("")
    with _watch.quiet():
        outputs = attention(q, k, v, spec, statistics=tuple(sorted(wanted)), mask_mod=mask_mod,
                            **options)
        for o, caller in watching:
            o._record(caller, outputs)
    if not any(asked):
        return outputs.y
    for name in _STATISTICS:
        if name not in asked:
            setattr(outputs, name, None)
    if "max_weight" not in asked:
        outputs.max_key = None
    return outputs


_watch.tell = _tell
