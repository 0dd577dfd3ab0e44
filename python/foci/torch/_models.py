"""What register_transformers adds to transformers' models beside the attention function itself.

A model that runs on foci is asked two things in every call: whether its caller wants the weights
(``output_attentions``, which not every model tells its layers), and, in its first call, whether its
attention came to foci at all. Models whose attention classes stand in a table of their own, by the
names of transformers' own implementations, get one for foci there. Models that run on another
implementation are left as they are.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from contextvars import ContextVar
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

import torch

from ._legacy import Attend, attention_class

__all__ = ["NAME", "attach", "attention_classes", "note", "served", "warn_unreached",
           "weights_wanted"]

NAME = "foci"
_WANTED = "output_attentions"


class _Everywhere:
    """How many running calls of models want weights; what compiled code may ask, unlike a
    ContextVar. More than one thread's answer: then weights are made that nobody reads."""

    wanting = 0
    wanted = False


_wanted: ContextVar[bool] = ContextVar("foci_weights_wanted", default=False)
# The modules that came to foci since a model's first call began; None where none begins.
_came: ContextVar[Optional[Set[torch.nn.Module]]] = ContextVar("foci_came", default=None)
# Models of which it was told, or need not be, that their attention does not come to foci.
_known: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def weights_wanted() -> bool:
    """Whether a model whose call runs here was asked for the weights of its attention."""
    if torch.compiler.is_compiling():
        return _Everywhere.wanted
    return _wanted.get()


def note(module: torch.nn.Module) -> None:
    """A module's attention runs on foci."""
    if not torch.compiler.is_compiling():
        came = _came.get()
        if came is not None:
            came.add(module)


def attach(pretrained: Any, attend: Attend) -> None:
    """Wraps the construction and the call of transformers' PreTrainedModel, once.

    Args:
        attend: runs a module's attention on foci.
    """
    if getattr(pretrained.__init__, "_foci", False):
        return
    construct, call = pretrained.__init__, pretrained.__call__

    @functools.wraps(construct)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, config, *args, **kwargs)
        if _name_of(self) == NAME:
            _enter_tables(type(self), attend)
            _say_unreached(self)

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _name_of(self) != NAME:
            return call(self, *args, **kwargs)
        wants = _wants(self, args, kwargs)
        if not torch.compiler.is_compiling() and self not in _known:
            return _first_call(call, wants, self, args, kwargs)
        return _call(call, wants, self, args, kwargs)

    setattr(__init__, "_foci", True)
    pretrained.__init__ = __init__
    pretrained.__call__ = __call__


def _name_of(model: Any) -> Any:
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


# ---- weights that a caller wants -----------------------------------------------------------------


def _wants(model: Any, args: Any, kwargs: Any) -> bool:
    wants = kwargs.get(_WANTED)
    if wants is None and len(args) > 1:
        place = _place(type(model))
        if 0 < place <= len(args):
            wants = args[place - 1]
    if wants is None:
        wants = getattr(model.config, _WANTED, False)
    return bool(wants)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _place(model: type) -> int:
    """Which argument of a model's forward output_attentions is, or 0."""
    names = list(inspect.signature(model.forward).parameters)  # type: ignore[attr-defined]
    return names.index(_WANTED) if _WANTED in names else 0


def _call(call: Callable[..., Any], wants: bool, model: Any, args: Any, kwargs: Any) -> Any:
    if not wants:
        return call(model, *args, **kwargs)
    token = None if torch.compiler.is_compiling() else _wanted.set(True)
    _Everywhere.wanting += 1
    _Everywhere.wanted = True
    try:
        return call(model, *args, **kwargs)
    finally:
        _Everywhere.wanting -= 1
        _Everywhere.wanted = _Everywhere.wanting > 0
        if token is not None:
            _wanted.reset(token)


# ---- attention that does not come to foci --------------------------------------------------------


def warn_unreached(subject: str, what: str = "these models") -> None:
    """Warns that transformers computes an attention itself."""
    import transformers
    warnings.warn(
        f"{subject}: transformers {transformers.__version__} computes the attention of {what} "
        f"itself, attn_implementation='{NAME}' does not reach it", stacklevel=3)


def attention_classes(module: Any) -> List[Any]:
    """The attention layers that a file defines."""
    return [c for c in vars(module).values() if isinstance(c, type) and c.__module__ ==
            module.__name__ and issubclass(c, torch.nn.Module) and "Attention" in c.__name__]


def _say_unreached(model: Any) -> None:
    """At construction: no attention class of the model's file calls implementations. What a model
    of parts has in its own file may be one part's; its first call tells."""
    module = sys.modules.get(type(model).__module__)
    if (module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS") or served(module)
            or getattr(model.config, "sub_configs", None)):
        return
    if attention_classes(module) and "transformers" in module.__name__:
        _known.add(model)
        warn_unreached(type(model.config).__name__)


def _first_call(call: Callable[..., Any], wants: bool, model: Any, args: Any,
                kwargs: Any) -> Any:
    """A call that watches which attention modules run, and which come to foci."""
    _known.add(model)
    ran: Set[torch.nn.Module] = set()

    def entered(module: torch.nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            ran.add(module)

    hooks = [m.register_forward_pre_hook(entered) for m in _attention_modules(model)]
    came: Set[torch.nn.Module] = set()
    outer = _came.get()
    token = _came.set(came)
    try:
        result = _call(call, wants, model, args, kwargs)
    finally:
        _came.reset(token)
        if outer is not None:
            outer |= came
        for hook in hooks:
            hook.remove()
    missed = {type(m).__name__ for m in _unreached(model, ran, came)}
    if missed:
        warn_unreached(type(model).__name__, ", ".join(sorted(missed)))
    return result


def _attention_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that are attention by their names, but for models inside that run on something
    else, or tell themselves."""
    for child in model.children():
        if hasattr(child, "_supports_attention_backend") or hasattr(child, "_supports_sdpa"):
            continue  # a model of its own
        if "Attention" in type(child).__name__:
            yield child
        yield from _attention_modules(child)


def _unreached(model: torch.nn.Module, ran: Set[torch.nn.Module],
               came: Set[torch.nn.Module]) -> List[torch.nn.Module]:
    """Of the attention modules that ran, those around which, in which and inside which none came
    to foci; the innermost."""
    missed: List[torch.nn.Module] = []

    def visit(module: torch.nn.Module, covered: bool) -> bool:
        covered = covered or module in came
        inside = [visit(child, covered) for child in module.children()]
        if module in ran and not covered and not any(m in came for m in module.modules()) and (
                not any(inside)):
            missed.append(module)
        return module in ran or any(inside)

    visit(model, False)
    return missed


# ---- tables of attention classes -----------------------------------------------------------------


def _tables(module: Any) -> List[Dict[str, Any]]:
    """Of a file of transformers: its dicts of attention classes by implementations' names."""
    return [value for name, value in vars(module).items()
            if name.endswith("_CLASSES") and type(value) is dict and
            isinstance(value.get("eager"), type)]


def served(module: Any) -> bool:
    """Whether a file's attention classes come to foci by its tables."""
    return any(NAME in table for table in _tables(module))


def _enter_tables(model: type, attend: Attend) -> None:
    """Gives foci its place in the tables of a model's files."""
    for owner in model.__mro__:
        module = sys.modules.get(owner.__module__)
        if module is None or not issubclass(owner, torch.nn.Module):
            continue
        for table in _tables(module):
            if NAME not in table:
                table[NAME] = attention_class(table, attend) or _refusal(table)


def _refusal(table: Dict[str, Any]) -> Callable[..., Any]:
    def refuse(config: Any, *_: Any, **__: Any) -> Any:
        import transformers
        family = type(config).__name__.replace("Config", "")
        others = [f"{name!r}" for name in table if name != NAME and "flash" not in name]
        raise ValueError(
            f"attn_implementation: '{NAME}' arrived, {family} of transformers "
            f"{transformers.__version__} has attention layers of its own that foci cannot take "
            f"over; {' or '.join(others)} is right")
    return refuse
