"""foci: attention for CPUs, fused, differentiable and open to inspection.

    >>> y = foci.attention(q, k, v, causal=True)                   # [B, H, N, Dv]
    >>> out = foci.attention(q, k, v, statistics=["entropy", "coverage"])
    >>> out.weights(rows=[0, 7], heads=[2])                        # exact, of these rows alone

``foci.torch`` is the same for PyTorch, with gradients, and a backend for transformers.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version as _version

from ._attention import Outputs, attention, attention_backward, explain, weights
from ._core import num_threads, set_num_threads, set_target, supported_targets, target
from .cache import Cache, CacheOutputs
from .files import inspect, load, load_metadata, save, verify
from .rows import alpha_gradient, entmax, normalize_backward, softmax, sparsemax, topk
from .spec import Spec

try:
    __version__ = _version("foci")
except PackageNotFoundError:  # a source tree on the path
    __version__ = "0"

__all__ = ["Cache", "CacheOutputs", "Outputs", "Spec", "alpha_gradient", "attention",
           "attention_backward", "entmax", "explain", "inspect", "load", "load_metadata",
           "normalize_backward", "num_threads", "save", "set_num_threads", "set_target", "softmax",
           "sparsemax", "supported_targets", "target", "topk", "verify", "weights"]
