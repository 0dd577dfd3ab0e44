"""safetensors files, and case files made elsewhere against the engine."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Mapping, Optional, Tuple, Union, cast

import numpy as np

from . import _core

__all__ = ["inspect", "load", "load_metadata", "save", "verify"]

Path = Union[str, "os.PathLike[str]"]


class Tensors(Dict[str, np.ndarray]):
    """The arrays of a safetensors file by name, and of those that NumPy cannot hold the reason.

    Asking for one of the latter (`tensors["w"]`) raises ValueError with that reason.
    """

    unreadable: Dict[str, str]
    _path: str

    def __missing__(self, name: str) -> np.ndarray:
        if name in self.unreadable:
            raise ValueError(f"{self._path}: tensor {name!r}: {self.unreadable[name]}")
        raise KeyError(name)


def _path(name: str, path: Path) -> bytes:
    try:
        native = os.fsencode(path)
    except TypeError:
        raise TypeError(f"{name}: {type(path).__name__} arrived, a path is right") from None
    except UnicodeEncodeError:
        raise ValueError(f"{name}: {path!r} arrived, which is no name that a file can have") from None
    if b"\0" in native:
        raise ValueError(f"{name}: {path!r} arrived, but no file's name holds a null character")
    return native


def load(path: Path) -> Tensors:
    """The arrays of a safetensors file by name. bfloat16 becomes float32, which holds it exactly.

    Tensors of types that NumPy lacks (8-bit floats, say) do not keep the others from being read:
    they are left out, `unreadable` of what is returned tells their names and the reasons, and
    asking for one raises ValueError.

    Raises:
        OSError: the file cannot be read. ValueError: it is no safetensors file, or lies.
    """
    where = _path("path", path)
    arrays, _, unreadable = _core.load(where)
    tensors = Tensors(cast(Dict[str, np.ndarray], arrays))
    tensors.unreadable = dict(unreadable)
    tensors._path = os.fsdecode(where)
    return tensors


def load_metadata(path: Path) -> Dict[str, str]:
    """The text that a safetensors file carries beside its arrays.

    Raises:
        OSError: the file cannot be read. ValueError: it is no safetensors file, or lies.
    """
    metadata: Dict[str, str] = _core.load(_path("path", path))[1]
    return metadata


def save(path: Path, tensors: Mapping[str, Any],
         metadata: Optional[Mapping[str, str]] = None) -> None:
    """Writes arrays to a safetensors file, all or nothing: the old file stays until the new one
    is whole.

    Raises:
        OSError: it cannot be written. ValueError, TypeError: names the array that cannot.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: {type(tensors).__name__} arrived, a dictionary of arrays is "
                        "right")
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata: {key!r}: {value!r} arrived, text is right")
    _core.save(_path("path", path), dict(tensors), dict(metadata or {}))


def verify(paths: Union[Path, Iterable[Path]], *, reference: bool = False,
           targets: Iterable[str] = (), implementation: Optional[str] = None) -> Dict[str, Any]:
    """Runs case files (safetensors, docs/attention.md) on the engine, as ``foci verify`` does.

    Args:
        paths: files, or folders of them.
        reference: the double-precision oracle instead, which checks the cases.
        targets: SIMD targets; all that the machine has where empty.
        implementation: "plain" or "fused"; both where None.

    Returns:
        passed, failed, skipped, runs: numbers; failures: a list of dictionaries; unreadable: pairs
        of path and message.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = (paths,)
    return _core.verify([_path("paths", p) for p in paths], bool(reference), list(targets),
                        implementation)


def inspect(model: Path, images: Union[Path, Iterable[Path]],
            report: Optional[Path] = None) -> Tuple[Dict[str, Any], ...]:
    """Where a model that ``foci train vit`` made looks in pictures, as ``foci inspect`` does.

    Args:
        model: the folder of a trained model.
        images: PNG or JPEG files, upright as their EXIF orientation says; what is transparent is
            laid over white.
        report: where the page is to be written; none is where None.

    Returns:
        For each picture its class, probability, grid of patches, and for each head its layer,
        entropy in nats and top patch (row, column).

    Raises:
        OSError: a file cannot be read, or the report not written. ValueError: the folder holds no
        model, or a file is no picture; the file is named.
    """
    import json

    if isinstance(images, (str, os.PathLike)):
        images = (images,)
    text = _core.inspect(_path("model", model), [_path("images", p) for p in images],
                         b"" if report is None else _path("report", report))
    return tuple(json.loads(text)["pictures"])
