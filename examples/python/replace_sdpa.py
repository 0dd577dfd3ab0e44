"""Replaces scaled_dot_product_attention in a model of your own, and asks it for its entropy.

    python examples/python/replace_sdpa.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

import foci.torch


class SelfAttention(torch.nn.Module):
    """A causal layer as many write it; ``sdpa`` is whose attention it calls."""

    def __init__(self, width: int, heads: int, sdpa: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: [B, N, width]
        B, N, width = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = self.sdpa(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, N, width))


def main() -> None:
    torch.manual_seed(0)
    theirs = SelfAttention(64, 4, F.scaled_dot_product_attention)
    ours = SelfAttention(64, 4, foci.torch.scaled_dot_product_attention)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 100, 64)
    ys = []
    for layer in (theirs, ours):
        y = layer(x)
        y.square().mean().backward()
        ys.append(y.detach())
    print(f"largest difference of outputs:   {(ys[0] - ys[1]).abs().max():.1e} "
          f"(outputs up to {ys[0].abs().max():.2f})")
    pairs = zip(theirs.parameters(), ours.parameters())
    print(f"largest difference of gradients: "
          f"{max((a.grad - b.grad).abs().max() for a, b in pairs):.1e}")

    # foci.torch.attention has all that foci can do. Where queries and keys differ in number,
    # is_causal=True is causal="top-left" there.
    q, k, v = torch.randn(3, 2, 4, 100, 16)
    out = foci.torch.attention(q, k, v, causal=True, statistics=("entropy", "max_weight"))
    print(f"entropy of the last row:         {out.entropy[..., -1].mean():.2f} nats "
          f"(uniform would be {torch.tensor(100.0).log():.2f})")
    print(f"its weights, exactly:            {list(out.weights(rows=[99], heads=[0]).shape)}, "
          f"largest {out.max_weight[0, 0, -1]:.3f}")


if __name__ == "__main__":
    main()
