"""Inputs for a row, and foci called on the same memory as the peers."""
import torch

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
    """q, k, v and dy, normal, and foci's plan with buffers for what it writes."""

    def __init__(self, library, definition, seed=1):
        self.shape = shape_of(definition)
        b, h, hk, n, m, d, dv = self.shape
        torch.manual_seed(seed)
        self.q, self.k, self.v = (torch.randn(b, h, n, d), torch.randn(b, hk, m, d),
                                  torch.randn(b, hk, m, dv))
        self.dy = torch.randn(b, h, n, dv)
        self.y, self.statistic = torch.zeros(b, h, n, dv), torch.zeros(b, h, n)
        self.attention = library.attention(definition.get("spec", {}), self.shape)
        self.addresses = [t.data_ptr() for t in (self.q, self.k, self.v, self.y, self.statistic)]
        self.gradients = [torch.zeros_like(t) for t in (self.q, self.k, self.v)]
        self.backward_addresses = self.addresses + [self.dy.data_ptr()] + [
            g.data_ptr() for g in self.gradients]

    def forward(self):
        """Bind and forward, into self.y."""
        self.attention.forward(*self.addresses)

    def backward(self):
        """Bind and backward of what forward gave, into self.gradients."""
        self.attention.backward(*self.backward_addresses)

    def leaves(self):
        """q, k, v as leaves of a graph of PyTorch."""
        return [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]


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
