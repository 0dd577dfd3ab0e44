"""foci as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

import sys
from typing import Any, Dict, Optional, Tuple

import torch

from . import _models, _observe
from ._models import NAME
from ._pattern import PatternMask, mask_function_for

__all__ = ["register_transformers"]

# What some models pass to their attention and foci does not compute.
_REFUSED = ("head_mask", "layer_head_mask")


def register_transformers() -> None:
    """Registers the attention implementation ``"foci"`` with transformers.

    Afterwards ``attn_implementation="foci"`` (in ``from_pretrained`` and ``from_config``) or
    ``model.set_attn_implementation("foci")`` runs an unmodified model on foci: grouped heads,
    causal and sliding-window masks, padding, packed sequences, position biases, softcaps, caches
    and dropout in training; forward and backward. Masks that foci knows as rules never exist as an
    N x M tensor. Calling it again does nothing more.

    Which models call an implementation that is not transformers' own depends on its release. A
    model whose file computes its attention itself (Bloom, MPT, T5 up to 5.0) says in a warning,
    when it is made or first called, that foci does not reach it, and stays as right as with
    "eager"; one that has no place for another implementation (GIT, say) is refused when it is made.

    ``PreTrainedModel`` of transformers is told, for models on "foci" alone, whether a call wants
    ``output_attentions``.

    Raises:
        ImportError: without transformers, or with one older than 4.48.
    """
    try:
        from transformers import modeling_utils
        functions: Any = modeling_utils.ALL_ATTENTION_FUNCTIONS
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "foci.torch.register_transformers needs transformers >= 4.48, "
            f"{_installed()}: {error}") from error
    _register(functions, attention_forward)
    _models.attach(modeling_utils.PreTrainedModel, attention_forward)
    try:
        from transformers import masking_utils
        masks: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    except (ImportError, AttributeError):  # before 4.53 models make their masks themselves
        return
    _register(masks, mask_function_for(masking_utils))


def _installed() -> str:
    try:
        from importlib.metadata import version
        return f"{version('transformers')} is installed"
    except ImportError:
        return "which is not installed (pip install 'transformers>=4.48')"


def _register(functions: Any, function: Any) -> None:
    if NAME in functions:
        return
    if hasattr(functions, "register"):
        type(functions).register(NAME, function)
    else:
        functions[NAME] = function


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                      value: torch.Tensor, attention_mask: Optional[torch.Tensor],
                      dropout: float = 0.0, scaling: Optional[float] = None,
                      is_causal: Optional[bool] = None,
                      position_bias: Optional[torch.Tensor] = None,
                      softcap: Optional[float] = None, sliding_window: Optional[int] = None,
                      s_aux: Optional[torch.Tensor] = None,
                      sinks: Optional[torch.Tensor] = None,
                      rule: Optional[Dict[str, Any]] = None,
                      **kwargs: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """What a transformers layer calls.

    Args:
        module: the layer; its ``is_causal`` counts where there is no mask.
        query: [B, H, N, D]; key: [B, Hk, M, D]; value: [B, Hk, M, Dv].
        attention_mask: a :class:`PatternMask`; or a tensor that broadcasts to [B, H, N, M],
            boolean (True attends) or added to the scores.
        dropout: of weights; the layer passes 0 outside training.
        scaling: of the scores, 1/sqrt(D) where None.
        position_bias: [1 or B, H, N, M], added to the scores.
        softcap: of the scaled scores.
        s_aux: attention sinks, [H] or, by the name of ``sinks``, [B, H, N, 1]: logits that take
            part in the softmax and have no value.
        rule: options of :class:`foci.Spec` that hide keys beside the mask.
        sliding_window: counts only where there is no mask, as a mask has it in it.

    Returns:
        y [B, N, H, Dv]; and the weights [B, H, N, M] if the caller passed
        ``output_attentions=True``, None otherwise.
    """
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: foci does not compute it; run this model with "
                             "attn_implementation='eager'")
    B, N, M = key.shape[0], query.shape[2], key.shape[2]
    if query.shape[0] != B:  # learned queries, shared by the batch
        query = query.expand(B, -1, -1, -1)
    options: Dict[str, Any] = {}
    if attention_mask is None:
        # A layer that says nothing has no mask: those that look back are given theirs.
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if causal and N > 1:
            if sliding_window is not None and sliding_window < M:
                options.update(window=(sliding_window - 1, 0), window_align="top-left")
            else:
                options["causal"] = "top-left"
    else:
        options.update(_mask_options(attention_mask, N, M))
    if rule is not None:
        options.update(rule)
    if position_bias is not None:
        position_bias = position_bias[..., :M]
        bias = options.get("bias")
        options["bias"] = position_bias if bias is None else position_bias + bias
    if scaling is not None:
        options["scale"] = scaling
    if softcap is not None:
        options["softcap"] = softcap
    if dropout > 0.0:
        options["dropout"] = float(dropout)  # its seed comes from PyTorch's generator
    wanted = (bool(kwargs.get("output_attentions")) or _models.weights_wanted()
              or _collects_attentions())
    _models.note(module)
    y, weights = _observe.attend(module, query, key, value, options, want_weights=wanted,
                                 sinks=sinks if s_aux is None else s_aux)
    return y.transpose(1, 2).contiguous(), weights


def _collects_attentions() -> bool:
    """Whether weights are collected from layers' results, where only a model's forward was called
    and not the model."""
    if torch.compiler.is_compiling():
        return False
    module = sys.modules.get("transformers.utils.output_capturing")  # since transformers 5
    collector = getattr(module, "_active_collector", None)
    names = None if collector is None else collector.get()
    return any("attentions" in str(name) for name in names or ())


def _mask_options(mask: torch.Tensor, N: int, M: int) -> Dict[str, Any]:
    if isinstance(mask, PatternMask) and mask.shape[2] == N and mask.shape[3] == M:
        return mask.options()
    if mask.ndim != 4:
        raise ValueError(f"attention_mask: shape {list(mask.shape)} arrived, [B, 1 or H, N, M] is "
                         "right")
    if mask.shape[-1] > M:
        mask = mask[..., :M]
    if mask.dtype == torch.bool:
        return {"keep": mask}
    if not mask.is_floating_point():
        raise ValueError(f"attention_mask: {mask.dtype} arrived, bool (True attends) or floating "
                         "point (added to the scores) is right")
    return {"bias": mask}
