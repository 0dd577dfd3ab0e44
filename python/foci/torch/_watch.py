"""Who looks on while attention runs: the observations that are open and the modules that run.

A call of attention asks :data:`listening` alone while nobody observes.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch

__all__ = ["Modules", "innermost", "listening", "observations", "quiet", "tell"]

# How many observations are open, in whichever thread.
listening = 0
# Set by _observe: told of a call's arguments, gives its result, or None where nobody looks on here.
tell: Optional[Callable[..., Any]] = None
# Observations that are open here; a thread sees its own alone.
observations: ContextVar[Tuple[Any, ...]] = ContextVar("foci_observations", default=())
# Modules of observed models whose forward runs here, the innermost last.
_running: ContextVar[Tuple[torch.nn.Module, ...]] = ContextVar("foci_running", default=())
_quiet: ContextVar[bool] = ContextVar("foci_quiet", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Calls of attention in here belong to one that is told of already."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def is_quiet() -> bool:
    return _quiet.get()


def innermost(names: Any) -> Optional[torch.nn.Module]:
    """The innermost module that runs here, of those in ``names``."""
    for module in reversed(_running.get()):
        if module in names:
            return module
    return None


class Modules:
    """Follows which modules of a model run, by hooks on those that may hold attention."""

    def __init__(self, model: torch.nn.Module) -> None:
        global listening
        listening += 1
        self._hooks: List[Any] = []
        for module in model.modules():
            if _holds_none(module):
                continue
            self._hooks.append(module.register_forward_pre_hook(_enter))
            self._hooks.append(module.register_forward_hook(_leave, always_call=True))

    def close(self) -> None:
        global listening
        listening -= 1
        for hook in self._hooks:
            hook.remove()


def _holds_none(module: torch.nn.Module) -> bool:
    """Layers of torch.nn without parts (Linear, GELU) call no attention; compiled ones take no
    hooks."""
    return isinstance(module, torch.jit.ScriptModule) or (
        type(module).__module__.startswith("torch.nn.modules.")
        and next(module.children(), None) is None)


def _enter(module: torch.nn.Module, _: Any) -> None:
    if not torch.compiler.is_compiling() and observations.get():
        _running.set((*_running.get(), module))


def _leave(module: torch.nn.Module, _: Any, __: Any) -> None:
    if torch.compiler.is_compiling():
        return
    running = _running.get()
    for n in range(len(running) - 1, -1, -1):
        if running[n] is module:
            _running.set(running[:n])
            return
