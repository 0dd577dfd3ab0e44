"""Right values of entmax and its gradient: the table of mpmath's numbers that the C++ tests read."""

from pathlib import Path

import numpy as np

TABLE = Path(__file__).resolve().parents[2] / "tests" / "reference" / "entmax_table.txt"


def cases():
    """(name, alpha, scores, keys, weights of those, gradients of those), as entmax_table.py says."""
    rows, found = {}, []
    for line in TABLE.read_text(encoding="ascii").splitlines():
        kind, *words = line.split()
        if kind == "row":
            name, how, *numbers = words
            if how == "list":
                rows[name] = np.array(numbers, np.float32)
            else:
                count, mul, mod, exponent = map(int, numbers)
                rows[name] = np.array([j * mul % mod * 2.0**exponent for j in range(count)],
                                      np.float32)
        elif kind == "case":
            found.append((words[0], float(words[1]), rows[words[0]], []))
        elif kind == "key":
            found[-1][3].append([float(x) for x in words[:3]])
    for name, alpha, scores, keys in found:
        j, p, ds = np.array(keys).T
        yield f"{name} {alpha}", alpha, scores, j.astype(int), p, ds


def upstream(count):
    """The gradient that reaches weight j in the table."""
    return ((7 * np.arange(count) % 11 - 5) / 8).astype(np.float32)


def same_gradient(got, want):
    """Within 2e-5 of the row's largest finite number; infinite where float32 ends."""
    finite = np.abs(want) < np.finfo(np.float32).max
    scale = np.abs(want[finite]).max(initial=1e-30)
    return bool((np.abs(got[finite] - want[finite]) <= 2e-5 * scale).all()
                and (got[~finite] == np.sign(want[~finite]) * np.inf).all())
