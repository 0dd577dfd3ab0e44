"""Annotations for type checkers and editors."""

from __future__ import annotations

from typing import Any, Literal, Sequence, Tuple, TypedDict, Union


class Options(TypedDict, total=False):
    """The options of a call of attention, those of :class:`foci.Spec`, and the arrays that they
    read (True instead of an array in a Spec)."""

    score: Literal["dot", "cosine", "l2", "additive"]
    gamma: Union[None, float]
    scale: Any  # a number, H of them, or a tensor that learns
    softcap: Union[None, float]
    normalizer: Literal["softmax", "sparsemax", "entmax", "topk"]
    alpha: Any  # a number, H of them, or a tensor that learns
    top_k: Union[None, int]
    causal: Union[bool, Literal["bottom-right", "top-left", "past"]]
    window: Union[None, int, Tuple[Union[None, int], Union[None, int]], Sequence[int]]
    window_align: Literal[None, "bottom-right", "top-left", "past"]
    segments: bool
    alibi: bool
    relative1d: Union[None, int]
    relative2d: Union[None, Tuple[int, int]]
    dropout: Union[None, float]
    dropout_seed: Any  # an integer, or an int64 tensor
    dropout_place: Literal[None, "weights", "keys"]
    key_lengths: Any
    past_lengths: Any
    q_segments: Any
    k_segments: Any
    keep: Any
    bias: Any
    slopes: Any
    table1d: Any
    table2d: Any
    score_w: Any
