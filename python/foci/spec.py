"""Spec: what attention computes, as a value."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import numbers
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import _core

__all__ = ["Spec"]

_ALIGNS = ("bottom-right", "top-left", "past")
_SCORES = ("dot", "cosine", "l2", "additive")
_NORMALIZERS = ("softmax", "sparsemax", "entmax", "topk")
_PLACES = ("weights", "keys")


def _kind(value: object) -> str:
    return type(value).__name__


def _choice(name: str, value: object, known: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: {_kind(value)} arrived, one of {', '.join(known)} is right")
    if value not in known:
        raise ValueError(f"{name}: {value!r} arrived, one of {', '.join(known)} is right")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {_kind(value)} arrived, a number is right")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: {number} arrived, a finite number is right")
    return number


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: {_kind(value)} arrived, an integer is right")
    return int(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {_kind(value)} arrived, True or False is right")
    return value


def _side(name: str, value: object) -> Optional[int]:
    return None if value is None else _integer(name, value)


def _window(window: object, align: str) -> Dict[str, Any]:
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(
                f"window: {len(window)} sides arrived, (left, right) are right")
        left, right = window
    else:
        left, right = window, window
    return {"kind": "window", "left": _side("window", left), "right": _side("window", right),
            "align": align}


def _numbers(name: str, value: object) -> Any:
    """One number, or a list of one a head."""
    if getattr(value, "requires_grad", False):
        raise TypeError(f"{name}: a tensor that wants a gradient arrived, which a Spec would lose; "
                        f"a call of foci.torch.attention takes it ({name}=...)")
    if isinstance(value, (list, tuple)) or (hasattr(value, "tolist") and getattr(
            value, "ndim", 0) == 1):
        values: Any = value.tolist() if hasattr(value, "tolist") else value
        return [_number(name, x) for x in values]
    if hasattr(value, "item") and not isinstance(value, numbers.Real):
        value = value.item()
    return _number(name, value)


def one_number(name: str, value: object) -> float:
    """Of a row map, whose rows have no heads."""
    number: Any = _numbers(name, value)
    if isinstance(number, list):
        raise ValueError(f"{name}: {len(number)} numbers arrived, one is right: rows of scores "
                         "have no heads")
    return float(number)


def _dropout(dropout: object, seed: object, place: object) -> Optional[Dict[str, Any]]:
    _read("dropout_seed", seed, "dropout", dropout is not None)
    _read("dropout_place", place, "dropout", dropout is not None)
    if dropout is None:
        return None
    return {"p": _number("dropout", dropout),
            "seed": 0 if seed is None else _integer("dropout_seed", seed),
            "place": "weights" if place is None else _choice("dropout_place", place, _PLACES)}


def _read(name: str, value: object, by: str, on: bool) -> None:
    """Refuses an option that nothing reads: it was meant to change something."""
    if value is not None and not on:
        raise ValueError(f"{name}: {value!r} arrived, but nothing reads it without {by}")


# Options by the names that the engine's messages have for them, those of JSON.
_NAMES = {"normalizer.alpha": "alpha", "normalizer.k": "top_k", "score.gamma": "gamma",
          "dropout.p": "dropout", "dropout.seed": "dropout_seed"}


def in_options(message: str) -> str:
    name, colon, rest = message.partition(":")
    if name.startswith("masks[") and name.endswith((".left", ".right")):
        return f"window{colon}{rest}"
    if name.startswith("biases["):
        name = {"grid": "relative2d", "max_distance": "relative1d"}.get(
            name.rpartition(".")[2], name)
    base, bracket, index = name.partition("[")
    return f"{_NAMES.get(base, base)}{bracket}{index}{colon}{rest}"


class Spec:
    """What attention computes; nothing about how, and no array.

    ``s = scale * score(q, k)``, then softcap, biases, masks, the normaliser and dropout; the
    weights are summed over the values. Immutable, hashable and picklable. Dimension letters: B
    batch, H query heads, Hk key/value heads, N queries, M keys, D and Dv head sizes.

    Args:
        score: ``"dot"``, ``"cosine"``, ``"l2"`` (minus gamma times the squared distance) or
            ``"additive"`` (``w . tanh(q + k)``, w given as ``score_w [D]``).
        gamma: of ``"l2"``, 1 where None.
        scale: ``None`` for 1/sqrt(D) of dot and 1 of the others; a number; or H of them.
        softcap: scores become ``softcap * tanh(s / softcap)``.
        normalizer: ``"softmax"``, ``"sparsemax"``, ``"entmax"`` or ``"topk"`` (softmax over the
            k best scores).
        alpha: of ``"entmax"``, above 1; or H of them; 1.5 where None.
        top_k: of ``"topk"``, at least 1, which it is where None.
        causal: True (the last query sees all keys, ``"bottom-right"``), ``"top-left"`` (as
            PyTorch's ``is_causal``) or ``"past"`` (reads ``past_lengths [B]``).
        window: a query sees so many keys on either side, ``(left, right)`` or one number; None
            is without bound.
        window_align: where a query stands among the keys, as for ``causal``; ``"bottom-right"``
            where None.
        key_lengths: reads ``key_lengths [B]``: only the first so many keys exist.
        segments: reads ``q_segments [B, N]`` and ``k_segments [B, M]``: packed sequences.
        keep: reads ``keep``, boolean, broadcast to [B, H, N, M]; True attends.
        bias: reads ``bias``, broadcast to [B, H, N, M] and added to the scores.
        alibi: reads ``slopes [H]``: minus slope times distance.
        relative1d: the largest distance R; reads ``table1d [H, 2 * R + 1]``, whose entry
            ``clamp(j - i, -R, R) + R`` is added for a query at i and a key at j. In a call the
            table alone asks for it.
        relative2d: ``(h, w)`` of a grid that the keys fill; reads ``table2d [H, 2h - 1, 2w - 1]``,
            whose entry ``[y + h - 1, x + w - 1]`` is added, y rows and x columns from the query to
            the key. In a call the table alone asks for it.
        dropout: the chance that a weight is dropped. For training only.
        dropout_seed: equal seeds drop equal weights, whatever the batch or the threads; 0 where
            None.
        dropout_place: ``"weights"`` (so where None), or ``"keys"`` (DropKey: dropped before the
            normaliser).

    Raises:
        ValueError, TypeError: naming the option, what arrived and what would be right; so for an
            option that nothing reads (alpha without entmax, say).
    """

    __slots__ = ("_held", "_json", "_reads")
    _held: _core.Spec
    _json: str
    _reads: Tuple[str, ...]

    def __init__(self, *, score: str = "dot", gamma: Optional[float] = None,
                 scale: Union[None, float, Sequence[float]] = None,
                 softcap: Optional[float] = None, normalizer: str = "softmax",
                 alpha: Union[None, float, Sequence[float]] = None, top_k: Optional[int] = None,
                 causal: Union[bool, str] = False,
                 window: Union[None, int, Tuple[Optional[int], Optional[int]]] = None,
                 window_align: Optional[str] = None, key_lengths: bool = False,
                 segments: bool = False, keep: bool = False, bias: bool = False,
                 alibi: bool = False, relative1d: Optional[int] = None,
                 relative2d: Optional[Tuple[int, int]] = None, dropout: Optional[float] = None,
                 dropout_seed: Optional[int] = None,
                 dropout_place: Optional[str] = None) -> None:
        _read("gamma", gamma, "score='l2'", score == "l2")
        _read("alpha", alpha, "normalizer='entmax'", normalizer == "entmax")
        _read("top_k", top_k, "normalizer='topk'", normalizer == "topk")
        _read("window_align", window_align, "window", window is not None)
        options: Dict[str, Any] = {"scale": "auto" if scale is None else _numbers("scale", scale)}
        options["score"] = {"kind": _choice("score", score, _SCORES)}
        if score == "l2":
            options["score"]["gamma"] = 1.0 if gamma is None else _number("gamma", gamma)
        if softcap is not None:
            options["softcap"] = _number("softcap", softcap)
        options["normalizer"] = {"kind": _choice("normalizer", normalizer, _NORMALIZERS)}
        if normalizer == "entmax":
            options["normalizer"]["alpha"] = 1.5 if alpha is None else _numbers("alpha", alpha)
        if normalizer == "topk":
            options["normalizer"]["k"] = 1 if top_k is None else _integer("top_k", top_k)
        masks: List[Dict[str, Any]] = []
        if causal is not False:
            align = "bottom-right" if causal is True else _choice("causal", causal, _ALIGNS)
            masks.append({"kind": "causal", "align": align})
        if window is not None:
            masks.append(_window(window, "bottom-right" if window_align is None else
                                 _choice("window_align", window_align, _ALIGNS)))
        for name, on in (("key_lengths", key_lengths), ("segments", segments), ("keep", keep)):
            if _flag(name, on):
                masks.append({"kind": name})
        options["masks"] = masks
        biases: List[Dict[str, Any]] = []
        if _flag("bias", bias):
            biases.append({"kind": "tensor"})
        if _flag("alibi", alibi):
            biases.append({"kind": "alibi"})
        if relative1d is not None:
            biases.append({"kind": "relative1d",
                           "max_distance": _integer("relative1d", relative1d)})
        if relative2d is not None:
            if not isinstance(relative2d, (tuple, list)) or len(relative2d) != 2:
                raise TypeError("relative2d: (height, width) of a grid is right")
            biases.append({"kind": "relative2d",
                           "grid": [_integer("relative2d", x) for x in relative2d]})
        options["biases"] = biases
        options["dropout"] = _dropout(dropout, dropout_seed, dropout_place)
        try:
            self._set(json.dumps(options))
        except ValueError as error:
            raise ValueError(in_options(str(error))) from None

    def _set(self, text: str) -> None:
        held = _core.Spec(text)
        object.__setattr__(self, "_held", held)
        object.__setattr__(self, "_json", held.to_json())
        object.__setattr__(self, "_reads", tuple(held.tensors()))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Spec cannot be changed; make another one")

    @classmethod
    def from_json(cls, text: Union[str, Mapping[str, Any]]) -> "Spec":
        """The spec of a JSON text, or of a dictionary of its form (docs/attention.md)."""
        if not isinstance(text, (str, Mapping)):
            raise TypeError(f"text: {_kind(text)} arrived, JSON text or a dictionary is right")
        spec = cls.__new__(cls)
        spec._set(text if isinstance(text, str) else json.dumps(dict(text)))
        return spec

    def to_json(self) -> str:
        """Every option, defaults too; ``Spec.from_json`` reads it."""
        return self._json

    def to_dict(self) -> Dict[str, Any]:
        """Likewise as a dictionary."""
        result: Dict[str, Any] = json.loads(self._json)
        return result

    @property
    def tensors(self) -> Tuple[str, ...]:
        """Names of the arrays beside q, k and v that this spec reads."""
        return self._reads

    def replace(self, **changes: Any) -> "Spec":
        """Another spec, with other values of some of the constructor's options.

        Raises:
            ValueError: for a spec that only JSON can say (two windows, say).
        """
        if Spec(**self._options()) != self:
            raise ValueError("spec: the constructor's options cannot say this one; change its JSON")
        options = self._options()
        # What only read the options that go, goes with them.
        for option, readers in (("score", ("gamma",)), ("normalizer", ("alpha", "top_k"))):
            if changes.get(option, options.get(option)) != options.get(option):
                for name in readers:
                    options.pop(name, None)
        for option, readers in (("window", ("window_align",)),
                                ("dropout", ("dropout_seed", "dropout_place"))):
            if option in changes and changes[option] is None:
                for name in readers:
                    options.pop(name, None)
        return Spec(**{**options, **changes})

    def _options(self) -> Dict[str, Any]:
        """The constructor's options that are not at their defaults."""
        d = self.to_dict()
        options: Dict[str, Any] = {}
        score, normalizer = d["score"], d["normalizer"]
        if score["kind"] != "dot":
            options["score"] = score["kind"]
        if "gamma" in score:
            options["gamma"] = score["gamma"]
        if d["scale"] != "auto":
            options["scale"] = d["scale"]
        if d.get("softcap") is not None:
            options["softcap"] = d["softcap"]
        if normalizer["kind"] != "softmax":
            options["normalizer"] = normalizer["kind"]
        if "alpha" in normalizer:
            options["alpha"] = normalizer["alpha"]
        if "k" in normalizer:
            options["top_k"] = normalizer["k"]
        for mask in d["masks"]:
            if mask["kind"] == "causal":
                options["causal"] = True if mask["align"] == "bottom-right" else mask["align"]
            elif mask["kind"] == "window":
                options["window"] = (mask["left"], mask["right"])
                if mask["align"] != "bottom-right":
                    options["window_align"] = mask["align"]
            else:
                options[mask["kind"]] = True
        for bias in d["biases"]:
            if bias["kind"] == "tensor":
                options["bias"] = True
            elif bias["kind"] == "alibi":
                options["alibi"] = True
            elif bias["kind"] == "relative1d":
                options["relative1d"] = bias["max_distance"]
            else:
                options["relative2d"] = tuple(bias["grid"])
        if d.get("dropout"):
            options["dropout"] = d["dropout"]["p"]
            if d["dropout"]["seed"]:
                options["dropout_seed"] = d["dropout"]["seed"]
            if d["dropout"]["place"] != "weights":
                options["dropout_place"] = d["dropout"]["place"]
        return options

    def __repr__(self) -> str:
        options = self._options()
        if Spec(**options) != self:
            return f"Spec.from_json({json.dumps(self.to_dict())!r})"
        return "Spec(" + ", ".join(f"{k}={v!r}" for k, v in options.items()) + ")"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._json == other._json

    def __hash__(self) -> int:
        return hash(self._json)

    def __reduce__(self) -> Tuple[Any, Tuple[str]]:
        return (Spec.from_json, (self._json,))


_OPTIONS = frozenset(inspect.signature(Spec).parameters)
# Names that other libraries have for what is an option here.
_ELSEWHERE = {
    "is_causal": "causal='top-left'", "attn_mask": "keep=... (boolean) or bias=... (added)",
    "mask": "keep=... (boolean) or bias=... (added)", "dropout_p": "dropout",
    "key_padding_mask": "key_lengths=... or keep=...", "block_mask": "mask_mod=...",
    "score_mod": "bias=..., slopes=... or table1d=...", "enable_gqa": "nothing: k's heads say it",
    "normaliser": "normalizer", "k": "top_k", "sliding_window": "window", "softmax_scale": "scale",
    "alibi_slopes": "slopes=...", "window_size": "window"}


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raises TypeError for a name that is no option, with what is near it."""
    for name in options:
        if name in _OPTIONS:
            continue
        near = difflib.get_close_matches(name, _OPTIONS, 1)
        meant = _ELSEWHERE.get(name) or (near[0] if near else "")
        raise TypeError(f"{name}: foci knows no such option" +
                        (f"; {meant} is meant?" if meant else "; see foci.Spec"))


@functools.lru_cache(maxsize=256, typed=True)
def _spec_of(**options: Any) -> Spec:
    return Spec(**options)


def spec_of(options: Mapping[str, Any]) -> Spec:
    """The spec of a call's keyword options; equal ones share one spec, and so its plans."""
    if not options.keys() <= _OPTIONS:
        refuse_unknown(options)
    try:
        hash(tuple(options.values()))
    except TypeError:  # a list of scales, say
        return Spec(**options)
    return _spec_of(**options)
