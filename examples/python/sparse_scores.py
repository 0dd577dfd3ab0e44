"""Sparse attention on scores of your own: 3 of 500 candidates match, and the rest are noise.

    python examples/python/sparse_scores.py
"""

import numpy as np

import foci


def main() -> None:
    rng = np.random.default_rng(0)
    rows, candidates, relevant = 200, 500, 3
    scores = rng.standard_normal((rows, candidates), dtype=np.float32)
    scores[:, :relevant] += 6  # few that match, many that do not
    print(f"{relevant} of {candidates} candidates match; what each map leaves on them "
          f"(means of {rows} rows):")
    for name, weights in (("softmax", foci.softmax(scores)),
                          ("entmax 1.5", foci.entmax(scores, alpha=1.5)),
                          ("sparsemax", foci.sparsemax(scores)),
                          ("top 3", foci.topk(scores, 3))):
        mass = weights[:, :relevant].sum(-1).mean()
        reads = (weights > 0).sum(-1).mean()
        logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
        entropy = -(weights * logs).sum(-1).mean()
        print(f"  {name:10s} mass {mass:.3f}  reads {reads:5.1f}  entropy {entropy:.2f} nats")

    # The same inside attention, forward and backward, without the 200 x 500 weights: only where a
    # score comes from differs. Scores that are no product of queries and keys go in as a bias.
    values = rng.standard_normal((1, 1, candidates, 8), dtype=np.float32)
    q, k = np.zeros((1, 1, rows, 1), np.float32), np.zeros((1, 1, candidates, 1), np.float32)
    y = foci.attention(q, k, values, normalizer="sparsemax", bias=scores)
    difference = np.abs(y[0, 0] - foci.sparsemax(scores) @ values[0, 0]).max()
    print(f"attention with these scores as its bias: equal to {difference:.0e}")


if __name__ == "__main__":
    main()
