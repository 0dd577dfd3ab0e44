"""Attention sinks: a learned logit a head that takes part in the softmax and has no value.

Beside a sink s every weight p becomes g p, g = sigmoid(log-sum-exp of the row's scores - s): so
does y, and the statistics follow.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Sequence

import torch

from ._attention import Outputs, attention

__all__ = ["SunkOutputs", "attention_with_sinks"]


class SunkOutputs:
    """As :class:`foci.torch.Outputs`: weights are the keys', which with the sink's sum to 1. The
    entropy is that of the keys' weights; coverage has no gradient."""

    def __init__(self, out: Outputs, sinks: torch.Tensor) -> None:
        column = sinks.reshape(1, -1, 1) if sinks.dim() < 4 else sinks.squeeze(-1)
        share = torch.sigmoid(out.row_stat - column)  # of the keys in a row, [B, H, N]
        self._out, self._share = out, share
        self.y = out.y * share.unsqueeze(-1).to(out.y.dtype)
        self.row_stat = torch.logaddexp(out.row_stat, column.to(out.row_stat.dtype))
        # Of a row without keys the share is 0, and so must be its gradient.
        logarithm = share.clamp_min(torch.finfo(share.dtype).tiny).log()
        self.entropy = None if out.entropy is None else share * (out.entropy - logarithm)
        self.max_weight = None if out.max_weight is None else share * out.max_weight
        self.max_key = out.max_key
        self.support = out.support
        self.coverage: Optional[torch.Tensor] = None

    @property
    def share(self) -> torch.Tensor:
        """[B, H, N]: how much of a row's weight is its keys'."""
        return self._share

    def weights(self, rows: Optional[Sequence[int]] = None,
                heads: Optional[Sequence[int]] = None) -> torch.Tensor:
        """Exact weights of the keys [B, len(heads), len(rows), M]."""
        share = self._share
        if heads is not None:
            share = share[:, list(heads)]
        if rows is not None:
            share = share[:, :, list(rows)]
        return self._out.weights(rows, heads) * share.unsqueeze(-1)


def attention_with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor,
                         statistics: Iterable[str], options: Dict[str, Any]) -> SunkOutputs:
    """:func:`foci.torch.attention` whose softmax has one more logit a head.

    Args:
        sinks: [H], or of every query, [B, H, N, 1]; gets a gradient.
        statistics: as of ``attention``.
    """
    B, H, N, _ = q.shape
    if tuple(sinks.shape) not in ((H,), (B, H, N, 1)):
        raise ValueError(f"sinks: shape {list(sinks.shape)} arrived, [{H}], one a head, or "
                         f"{[B, H, N, 1]}, one a query, is right")
    wanted = set(statistics) | {"row_stat"}
    out = attention(q, k, v, statistics=tuple(sorted(wanted - {"coverage"})), **options)
    sunk = SunkOutputs(out, sinks)
    if "coverage" in wanted:
        sunk.coverage = _coverage(q, k, sunk.share, options)
    return sunk


def _coverage(q: torch.Tensor, k: torch.Tensor, share: torch.Tensor,
              options: Dict[str, Any]) -> torch.Tensor:
    """Weights summed over the rows, each times its share: what a value of one channel gets as its
    gradient, where that of y is the share."""
    options = {name: value.detach() if isinstance(value, torch.Tensor) else value
               for name, value in options.items() if not name.startswith("dropout")}
    k = k.detach().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    with torch.enable_grad():
        v = k.new_zeros((*k.shape[:3], 1)).requires_grad_()
        y = attention(q.detach(), k, v, **options)
    coverage, = torch.autograd.grad(y, v, share.detach().unsqueeze(-1).to(y.dtype))
    return coverage.squeeze(-1).float()
