"""Inputs for a row, and attention of them, whoever computes it."""
import torch

import foci.torch

LETTERS = ("B", "H", "Hk", "N", "M", "D", "Dv")


def shape_of(definition):
    """(B, H, Hk, N, M, D, Dv); letters left out as rows.json says."""
    given = definition["shape"]
    s = {"B": given.get("B", 1), "H": given.get("H", 1), "N": given["N"], "D": given["D"]}
    s["Hk"] = given.get("Hk", s["H"])
    s["M"] = given.get("M", s["N"])
    s["Dv"] = given.get("Dv", s["D"])
    return tuple(s[letter] for letter in LETTERS)


class Case:
    """q, k, v and dy, normal, and foci.torch.attention of them."""

    def __init__(self, definition, seed=1):
        self.shape = shape_of(definition)
        b, h, hk, n, m, d, dv = self.shape
        torch.manual_seed(seed)
        self.q, self.k, self.v = (torch.randn(b, h, n, d), torch.randn(b, hk, m, d),
                                  torch.randn(b, hk, m, dv))
        self.dy = torch.randn(b, h, n, dv)
        self.spec = foci.Spec.from_json(definition.get("spec", {}))

    def attend(self, q, k, v):
        return foci.torch.attention(q, k, v, self.spec)

    def leaves(self):
        """q, k, v as leaves of a graph of PyTorch."""
        return [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]

    def forward(self, attend):
        """A call of forward alone."""
        return lambda: attend(self.q, self.k, self.v)

    def backward(self, attend):
        """A call of backward alone, of one forward that was."""
        leaves = self.leaves()
        y = attend(*leaves)
        return lambda: torch.autograd.grad(y, leaves, self.dy, retain_graph=True)

    def both(self, attend):
        """A call of forward and then backward, as a training step has them."""
        leaves = self.leaves()
        return lambda: torch.autograd.grad(attend(*leaves), leaves, self.dy)


class Disagreement(Exception):
    """foci and a peer differ by more than rounding."""


def difference(own, peer, tolerance, what):
    """The largest difference, relative to the peer's largest absolute value."""
    worst = 0.0
    for a, b in zip(own, peer):
        most = b.abs().max().item()
        far = (a - b).abs().max().item() / (most or 1.0)
        if not far <= tolerance:  # also where it is no number
            raise Disagreement(f"{what}: results differ by {far:.1e} of the largest value, "
                               f"{tolerance:.0e} is what rounding explains")
        worst = max(worst, far)
    return worst
