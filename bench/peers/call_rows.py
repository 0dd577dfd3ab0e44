"""What a call from Python costs, whatever it computes: one query, one key, one channel."""
import numpy
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import foci
import inputs


def rows(run):
    for definition in run.definitions("python"):
        with run.row(definition, "call"):
            one(run, definition)


def one(run, definition):
    case = inputs.Case(definition)
    arrays = [t.numpy() for t in (case.q, case.k, case.v)]
    spec = case.spec
    candidates = {"PyTorch": case.forward(sdpa),
                  "foci": lambda: foci.attention(*arrays, spec),
                  "foci.torch": case.forward(case.attend)}
    with torch.no_grad():
        results = {name: torch.from_numpy(numpy.asarray(call()))
                   for name, call in candidates.items()}
        for name, y in results.items():
            inputs.difference([y], [results["PyTorch"]], 2e-5, name)
        t = run.time(candidates)
    for name in ("foci", "foci.torch"):
        run.add(definition, f"microseconds of {name}", t.microseconds(name), "")
        run.add(definition, f"PyTorch / {name}", t.ratio("PyTorch", name), "")
