"""foci for PyTorch: attention with gradients for every option.

    >>> y = foci.torch.attention(q, k, v, causal=True)                # [B, H, N, Dv]
    >>> out = foci.torch.attention(q, k, v, normalizer="entmax", statistics=["entropy"])
    >>> (loss + 0.1 * out.entropy.mean()).backward()

The operator is ``torch.ops.foci.attention``, which torch.compile and torch.export take;
``MultiheadAttention`` stands in for torch.nn's, ``mask_mod`` takes masks written for FlexAttention.
``register_transformers`` makes it the implementation "foci" of Hugging Face models, and ``observe``
tells what their heads do:

    >>> foci.torch.register_transformers()
    >>> model = AutoModel.from_pretrained(name, attn_implementation="foci")
    >>> with foci.torch.observe(model) as o:
    ...     model(**inputs)
    >>> o.entropy                                                     # [layers, B, H, N]
"""

try:
    import torch as _torch
except ImportError:
    raise ImportError("foci.torch needs PyTorch 2.6 or newer, which is not installed") from None
if tuple(int(n) for n in _torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"foci.torch needs PyTorch 2.6 or newer, {_torch.__version__} is installed")

from . import _threads as _threads
from ._attention import Outputs, attention
from ._mask import BlockMask, create_block_mask
from ._multihead import MultiheadAttention
from ._observe import LayerRecord, Observation, observe
from ._rows import entmax, softmax, sparsemax, topk
from ._sdpa import scaled_dot_product_attention
from ._transformers import register_transformers

__all__ = ["BlockMask", "LayerRecord", "MultiheadAttention", "Observation", "Outputs", "attention",
           "create_block_mask", "entmax", "observe", "register_transformers",
           "scaled_dot_product_attention", "softmax", "sparsemax", "topk"]
