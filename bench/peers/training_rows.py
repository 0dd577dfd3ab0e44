"""Training steps against PyTorch: forward, backward, clipping and AdamW of the same model."""
import inputs
import twins

# Losses of this many steps must agree, each side on the parameters of its own steps: forward,
# backward, clipping and the optimiser are then the same maths.
STEPS, TOLERANCE = 4, 1e-3


def rows(run):
    for definition in run.definitions("training"):
        with run.row(definition, "step"):
            one(run, definition)


def one(run, definition):
    job = run.library.training(definition["workload"])
    about = job.about()
    even = len(set(about["lengths"])) == 1
    peers = {"packed" if packed else "padded": twins.Twin(job, packed)
             for packed in ((False,) if even else (False, True))}
    for twin in peers.values():
        if twin.parameters() != about["parameters"]:
            raise inputs.Disagreement(f"{twin.parameters()} parameters, foci's model has "
                                      f"{about['parameters']}")
    own = [job.step() for _ in range(STEPS)]
    far = 0.0
    for name, twin in peers.items():
        theirs = [twin.step() for _ in range(STEPS)]
        worst = max(abs(a - b) / abs(b) for a, b in zip(own, theirs))
        if not worst <= TOLERANCE:
            raise inputs.Disagreement(f"PyTorch, {name}: losses {theirs}, foci's are {own}")
        far = max(far, worst)
    t = run.time({**{name: twin.step for name, twin in peers.items()}, "foci": job.step})
    best = min(peers, key=t.median)
    note = f"{1e3 * t.median(best):.3g} : {1e3 * t.median('foci'):.3g} ms"
    note += "" if even else f", {best}"
    run.add(definition, "step PyTorch / foci", t.ratio(best, "foci"),
            f"{note}, {about['parameters']} parameters, losses differ {far:.0e}")
