"""Calls on PyTorch's tensors run on PyTorch's own threads, as many as torch.get_num_threads() says.

Beside a pool of foci's own PyTorch's threads, which spin for a while after their work, would keep
the cores that foci waits for. Where PyTorch has no OpenMP runtime to be found, or in a process that
was forked, foci's own threads serve.
"""

from __future__ import annotations

import ctypes
import pathlib

import torch

from .. import _core


def _share() -> None:
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # A search that begins in this library finds the runtime that it was linked with.
        loaded = ctypes.CDLL(str(library))
        parallel = loaded.GOMP_parallel
        threads = loaded._ZN2at15get_num_threadsEv  # int at::get_num_threads()
    except (OSError, AttributeError):
        return
    _core.set_host_pool(torch.Tensor, *(ctypes.cast(f, ctypes.c_void_p).value or 0
                                        for f in (parallel, threads)))


_share()
