"""What arrives as an array and is more than its memory: resolved into an ordinary one, or refused.

The compiled part reads NumPy's own arrays and PyTorch's plain tensors where they lie. It asks here
about every other object, and about those whose memory it cannot read.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

__all__ = ["is_plain", "ordinary", "refusal", "refuse_gradient", "refused_tensor"]


def ordinary(name: str, array: Any) -> Any:
    """An array whose memory tells its values.

    Args:
        name: the argument, for messages.
        array: anything.

    Returns:
        ``array`` itself where nothing is known about it.

    Raises:
        TypeError, ValueError: naming the argument, what arrived and what would be right.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return _of_numpy(name, array)
    if isinstance(array, memoryview):
        return _of_numpy(name, np.asarray(array))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _of_torch(name, array, torch)
    if hasattr(array, "toarray") and hasattr(array, "nnz"):
        raise TypeError(f"{name}: {type(array).__name__} arrived, which is sparse; a dense array "
                        "is right (toarray())")
    return array


def is_plain(kind: type) -> bool:
    """Whether the memory of objects of this type tells all, as far as a type can say."""
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(kind, torch.Tensor):
        return True
    return kind in (torch.Tensor, torch.nn.Parameter)


def _of_numpy(name: str, array: Any) -> Any:
    if isinstance(array, np.ma.MaskedArray):
        masked = int(np.count_nonzero(np.ma.getmaskarray(array)))
        if masked:
            raise TypeError(f"{name}: a masked array arrived, {masked} of whose elements are "
                            "masked; an ordinary one is right (filled(...), say, and keep=... for "
                            "keys that are not there)")
        array = array.data
    dtype = array.dtype
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise TypeError(f"{name}: elements of {8 * dtype.itemsize} bits ({_dtype(dtype)}) arrived, "
                        "of a type that foci does not know; float32 is right where numbers are "
                        "meant")
    array = np.asarray(array)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _dtype(dtype: Any) -> str:
    if dtype.names is not None:
        return f"records ({', '.join(dtype.names)})"
    return {"O": "Python objects", "U": "text", "S": "bytes", "V": "raw bytes"}.get(
        dtype.kind, str(dtype))


def refused_tensor(t: Any) -> str:
    """Why a tensor of PyTorch's has no memory that can be read, and what would be right; empty
    where nothing is wrong with it."""
    import torch
    import torch.masked

    if t.is_nested:
        layout = "jagged" if t.layout is torch.jagged else "strided"
        return (f"a nested tensor (layout {layout}) arrived; one padded tensor is right "
                "(torch.nested.to_padded_tensor)")
    if t.layout is not torch.strided:
        return f"a tensor of layout {t.layout} arrived, a strided one is right (to_dense())"
    if t.is_quantized:
        return f"a quantised tensor ({t.dtype}) arrived, numbers are right (dequantize())"
    if isinstance(t, torch.masked.MaskedTensor):
        return ("a MaskedTensor arrived, whose mask would be lost; a plain tensor is right "
                "(to_tensor(...), and keep=... for keys that are not there)")
    if t.dtype.is_complex:
        return f"{t.dtype} arrived, real numbers are right (.real, .imag or torch.view_as_real)"
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return "a tensor inside of torch.func's transforms arrived; foci.torch's functions take it"
    if not t.is_cpu:
        return (f"a tensor on {t.device} arrived" +
                (", which holds no numbers" if t.is_meta else "") + "; foci computes on the CPU")
    if getattr(t, "has_names", bool)():  # PyTorch had them up to 2.12
        return "a tensor with named dimensions arrived, one without is right (rename(None))"
    return ""


def refusal(name: str, t: Any) -> Exception:
    """The error of a tensor of which :func:`refused_tensor` says something."""
    kind = ValueError if not t.is_cpu or (
        not t.is_nested and "a tensor of layout" in refused_tensor(t)) else TypeError
    return kind(f"{name}: {refused_tensor(t)}")


def _of_torch(name: str, t: Any, torch: Any) -> Any:
    reason = refused_tensor(t)
    if reason:
        raise refusal(name, t)
    if type(t) is not torch.Tensor:
        dispatch = getattr(type(t), "__torch_dispatch__", None)
        if dispatch is not torch._C._disabled_torch_dispatch_impl:
            raise TypeError(f"{name}: {type(t).__name__} arrived, which hides its numbers; "
                            "a plain torch.Tensor is right")
        if _own_function(type(t), torch):
            raise TypeError(f"{name}: {type(t).__name__} arrived, which computes by rules of its "
                            "own; a plain torch.Tensor is right")
        t = t.as_subclass(torch.Tensor)
    with torch.no_grad():
        return (t.clone() if t._is_zerotensor() else t).detach().resolve_neg()


def _own_function(kind: type, torch: Any) -> bool:
    own = getattr(kind, "__torch_function__", None)
    plain = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)
    return getattr(own, "__func__", own) not in plain


def refuse_gradient(name: str, array: Any) -> None:
    """Raises ValueError for a tensor of PyTorch's that wants a gradient, which it would not get."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return
    forward = torch.autograd.forward_ad
    if array.requires_grad and torch.is_grad_enabled() or forward._current_level >= 0 and (
            forward.unpack_dual(array).tangent is not None):
        raise ValueError(f"{name}: a tensor that wants a gradient arrived, and NumPy's arrays have "
                         "none; foci.torch gives gradients, detach() goes without")
