"""Rows of attention, forward and backward, against PyTorch's SDPA, FlexAttention, ONNX Runtime."""
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.attention import flex_attention as flex

import inputs
import onnx_peer

# Both sums run in float32, in another order.
FORWARD, BACKWARD = 2e-5, 1e-4


def masks(definition):
    return definition.get("spec", {}).get("masks", [])


def pytorch(definition, case):
    """SDPA as a function of q, k, v. Its causal is aligned top-left, which N = M makes the same."""
    causal = masks(definition) == [{"kind": "causal"}]
    assert causal or not masks(definition), definition["row"]
    gqa = case.shape[1] != case.shape[2]
    return lambda q, k, v: sdpa(q, k, v, is_causal=causal, enable_gqa=gqa)


def flex_attention(definition, case):
    """Compiled FlexAttention as a function of q, k, v."""
    mask, = masks(definition)
    if mask["kind"] == "causal":
        def sees(b, h, i, j):
            return j <= i
    else:
        left, right = mask["left"], mask["right"]

        def sees(b, h, i, j):
            return (j >= i - left) & (j <= i + right)
    block_mask = flex.create_block_mask(sees, None, None, case.shape[3], case.shape[4],
                                        device="cpu")
    compiled = torch.compile(flex.flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def whose_fault(definition, case, own_y, flex_y):
    """Where FlexAttention's result is not foci's: a note that it is wrong, if PyTorch's own SDPA
    with the same mask as a matrix agrees with foci. (2.13 held to AVX2 is, at N = 8192.)"""
    mask, = masks(definition)
    i, j = torch.arange(case.shape[3])[:, None], torch.arange(case.shape[4])[None]
    sees = j <= i
    if mask["kind"] == "window":
        sees = (j >= i - mask["left"]) & (j <= i + mask["right"])
    with torch.no_grad():
        y = sdpa(case.q, case.k, case.v, attn_mask=sees)
    inputs.difference([own_y], [y], FORWARD, "forward, PyTorch with the mask as a matrix")
    far = (flex_y - y).abs().max().item() / y.abs().max().item()
    return f", FlexAttention is wrong by {far:.0e} of SDPA's largest value"


def forward(run, definition, case):
    candidates, checks, notes = {}, {}, {}
    for peer in definition["peers"]:
        if peer == "PyTorch":
            f = pytorch(definition, case)
        elif peer == "FlexAttention":
            f = flex_attention(definition, case)
        else:
            for name, operator in onnx_peer.operators(case, run.threads).items():
                candidates[f"{peer} {name}"] = operator.run
                operator.run()
                checks[f"{peer} {name}"] = operator.result()
            continue
        with torch.no_grad():
            begin = time.perf_counter()
            checks[peer] = f(case.q, case.k, case.v)
            if peer == "FlexAttention":
                notes[peer] = f", first call {time.perf_counter() - begin:.1f} s"
        candidates[peer] = case.forward(f)
    candidates["foci"] = case.forward(case.attend)
    with torch.no_grad():
        own_y = candidates["foci"]()
    far = {}
    for name, y in checks.items():
        try:
            worst = inputs.difference([own_y], [y], FORWARD, f"forward, {name}")
            far[name] = f", differ {worst:.0e}"
        except inputs.Disagreement:
            if name != "FlexAttention":
                raise
            far[name] = whose_fault(definition, case, own_y, y)
    with torch.no_grad():
        t = run.time(candidates)
    for peer in definition["peers"]:
        name = min((n for n in checks if n.startswith(peer)), key=t.median)
        note = f"{1e3 * t.median(name):.3g} : {1e3 * t.median('foci'):.3g} ms"
        note += f", {name[len(peer) + 1:]}" if name != peer else ""
        run.add(definition, f"forward {peer} / foci", t.ratio(name, "foci"),
                f"{note}{notes.get(peer, '')}{far[name]}")


def backward(run, definition, case):
    if "PyTorch" not in definition["peers"]:
        return  # the others have no backward on CPUs
    peer, own = case.backward(pytorch(definition, case)), case.backward(case.attend)
    far = inputs.difference(own(), peer(), BACKWARD, "backward, PyTorch")
    t = run.time({"PyTorch": peer, "foci": own})
    run.add(definition, "backward PyTorch / foci", t.ratio("PyTorch", "foci"),
            f"{1e3 * t.median('PyTorch'):.3g} : {1e3 * t.median('foci'):.3g} ms, differ {far:.0e}")


def rows(run):
    for definition in run.definitions("attention"):
        for direction in (forward, backward):
            with run.row(definition, direction.__name__):
                direction(run, definition, inputs.Case(definition))


def decode_rows(run):
    """One query: forward alone."""
    for definition in run.definitions("decode"):
        with run.row(definition, "forward"):
            forward(run, definition, inputs.Case(definition))
