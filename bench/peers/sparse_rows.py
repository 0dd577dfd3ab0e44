"""Sparse normalisers against the entmax package: products by matmul, its function between them."""
import entmax
import torch

import inputs

# The package finds its thresholds by sorting or bisection, in float32.
FORWARD, BACKWARD = 1e-4, 1e-3
PEER = "entmax package"


def normaliser(spec):
    kind = spec["normalizer"]
    if kind["kind"] == "sparsemax":
        return lambda s: entmax.sparsemax(s, dim=-1)
    if kind["alpha"] == 1.5:
        return lambda s: entmax.entmax15(s, dim=-1)
    return lambda s: entmax.entmax_bisect(s, alpha=kind["alpha"], dim=-1)


def rows(run):
    for definition in run.definitions("sparse"):
        for measured in (forward, backward, both):
            with run.row(definition, measured.__name__):
                case = inputs.Case(run.library, definition)
                measured(run, definition, case, attention(definition, case))


def attention(definition, case):
    """The peer's, as a function of q, k, v."""
    normalise, scale = normaliser(definition["spec"]), case.shape[5] ** -0.5
    return lambda q, k, v: torch.matmul(
        normalise(torch.matmul(q, k.transpose(-1, -2)) * scale), v)


def forward(run, definition, case, attend):
    def peer():
        with torch.no_grad():
            return attend(case.q, case.k, case.v)

    case.forward()
    far = inputs.difference([case.y], [peer()], FORWARD, f"forward, {PEER}")
    compare(run, definition, "forward", peer, case.forward, far)


def backward(run, definition, case, attend):
    leaves = case.leaves()
    y = attend(*leaves)

    def peer():
        return torch.autograd.grad(y, leaves, case.dy, retain_graph=True)

    case.forward()
    case.backward()
    far = inputs.difference(case.gradients, peer(), BACKWARD, f"backward, {PEER}")
    compare(run, definition, "backward", peer, case.backward, far)


def both(run, definition, case, attend):
    """Forward and then backward, as a training step has them."""
    leaves = case.leaves()

    def peer():
        return torch.autograd.grad(attend(*leaves), leaves, case.dy)

    def own():
        case.forward()
        case.backward()

    own()
    far = inputs.difference(case.gradients, peer(), BACKWARD, f"both, {PEER}")
    compare(run, definition, "both", peer, own, far)


def compare(run, definition, what, peer, own, far):
    t = run.time({PEER: peer, "foci": own})
    run.add(definition, f"{what} {PEER} / foci", t.ratio(PEER, "foci"),
            f"{1e3 * t.median(PEER):.3g} : {1e3 * t.median('foci'):.3g} ms, differ {far:.0e}")


VERSIONS = {"entmax": getattr(entmax, "__version__", "")}
