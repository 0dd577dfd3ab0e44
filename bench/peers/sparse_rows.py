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
        for what in ("forward", "backward", "both"):
            with run.row(definition, what):
                compare(run, definition, what)


def attention(definition, case):
    """The peer's, as a function of q, k, v."""
    normalise, scale = normaliser(definition["spec"]), case.shape[5] ** -0.5
    return lambda q, k, v: torch.matmul(
        normalise(torch.matmul(q, k.transpose(-1, -2)) * scale), v)


def compare(run, definition, what):
    case = inputs.Case(definition)
    make = getattr(case, what)
    peer, own = make(attention(definition, case)), make(case.attend)
    with torch.set_grad_enabled(what != "forward"):
        results = own(), peer()
        if what == "forward":
            results = [[y] for y in results]
        far = inputs.difference(*results, FORWARD if what == "forward" else BACKWARD,
                                f"{what}, {PEER}")
        t = run.time({PEER: peer, "foci": own})
    run.add(definition, f"{what} {PEER} / foci", t.ratio(PEER, "foci"),
            f"{1e3 * t.median(PEER):.3g} : {1e3 * t.median('foci'):.3g} ms, differ {far:.0e}")


VERSIONS = {"entmax": getattr(entmax, "__version__", "")}
