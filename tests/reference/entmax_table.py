"""Makes entmax_table.txt: right values of entmax and its gradient, from mpmath. By hand:

    pip install mpmath && python3 tests/reference/entmax_table.py tests/reference/entmax_table.txt

With c = alpha − 1, P = 1/c, and s_n the smallest score that has weight, w the weight of it, the
definition p_j = [c s_j − τ]₊^P reads p_j = (c (s_j − s_n) + w^c)^P, since τ = c s_n − w^c. For large
alpha τ lies so near to c s_n that no number of common length tells them apart; w does. Every number
is computed with 60 digits; where the digits suffice to write τ down, the definition is checked too.

The file, by lines:

    row NAME list SCORE …                 scores, decimal numbers that name one float32 each
    row NAME steps COUNT MUL MOD EXP      score j is ((j·MUL) mod MOD)·2^EXP
    case NAME ALPHA                       a row under an alpha, followed by
    tau TAU SUPPORT ENTROPY LARGEST       τ, how many keys have weight, Σ −p ln p, the largest weight
    key J P DS DTAU                       weight p_j; gradient of Σ g_j p_j with
                                          g_j = ((7 j) mod 11 − 5)/8, and of τ, for score j

Keys without a line have no weight, but where more than 48 have, only some have a line: the first
24 in the order of the row and the last 24. Numbers too large for a double are inf.
"""

import sys

from mpmath import mp, mpf

mp.dps = 60
ALPHAS = ("1.01", "1.1", "1.25", "1.5", "1.75", "2", "2.01", "2.5", "3", "4", "6", "8", "10", "20",
          "50", "100", "1000", "1e6")


def rows():
    """(name, what stands in the file, the scores as exact numbers)."""
    def given(name, *texts):
        return name, "list " + " ".join(texts), [mpf(to_float32(t)) for t in texts]

    def steps(name, count, mul, mod, exp):
        scores = [mpf(j * mul % mod) * mpf(2) ** exp for j in range(count)]
        return name, f"steps {count} {mul} {mod} {exp}", scores

    yield given("one", "0.3")
    yield given("pair", "1.042304515838623", "1.1530563831329346")
    yield given("pair_far", "-1", "1")
    yield given("pair_ulp", "1", "1.00000012")
    yield given("pair_of_zero", "0", "1e-30")
    yield given("ties", "0.5", "0.5", "0.5")
    yield given("ties_first", "0.7", "0.7", "0.4", "0.1")
    yield given("ties_last", "1", "0.984375", "0.984375", "0.984375", "0.984375", "-3")
    yield given("steps", "0", "0.25", "0.5", "0.75", "1")
    yield given("near", "1", "0.99999994", "0.999999", "0.99999", "0.9999", "0.999", "0.99", "0.9")
    yield given("near_last", "0.3", "0.20000002", "0.2", "0.19999999", "0.19", "0.1")
    yield given("near_zero", "0.1", "0.001", "0.0010000001", "0.00099", "-0.0001", "-0.0001000001")
    yield given("far_from_zero", "10000", "10000.001", "10000.002", "9999.999", "9999.99", "9990")
    yield given("negative", "-30", "-30.000002", "-30.2", "-30.7", "-31", "-40")
    yield steps("levels_10", 10, 3, 7, -5)
    yield steps("spread_40", 40, 1103515245, 2097143, -20)
    yield steps("spread_100", 100, 1103515245, 16777213, -23)
    yield steps("spread_1000", 1000, 1103515245, 16777213, -22)
    yield steps("narrow_100", 100, 1103515245, 16777213, -29)
    yield steps("equal_10000", 10000, 0, 2, 0)
    yield steps("levels_10000", 10000, 7919, 37, -6)
    yield steps("spread_10000", 10000, 1103515245, 16777213, -21)


def to_float32(text):
    import struct
    return struct.unpack("f", struct.pack("f", float(text)))[0]


def solve(values, c):
    """values: (score, how many), from the largest down. How many of them have weight, and w."""
    P = 1 / c

    def power(x):
        return x ** P if x > 0 else mpf(0)

    def total(n, delta):
        s = values[n][0]
        return mp.fsum(k * power(c * (x - s) + delta) for x, k in values[:n + 1])

    # The longest prefix whose smallest score lies above τ: weights from there on would not add to 1.
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle, mpf(0)) < 1 else (low, middle)
    n = low
    # Σ grows with w with a slope of 1 or more: by halves, then by the secant.
    a, b = mpf(0), mpf(1) / values[n][1]
    fa, fb = total(n, mpf(0)) - 1, total(n, b ** c) - 1
    if fb == 0:
        a = b
    for step in range(400):
        if b - a <= mpf(10) ** -57 * b:
            break
        x = a - fa * (b - a) / (fb - fa) if step % 3 else (a + b) / 2
        if step % 3 == 2:  # and a little to the other side, so that both ends close in
            x += (x - a) * mpf(10) ** -3 if x - a < b - x else -(b - x) * mpf(10) ** -3
        if not a < x < b:
            x = (a + b) / 2
        f = total(n, x ** c) - 1
        if f < 0:
            a, fa = x, f
        else:
            b, fb = x, f
    return n + 1, (a + b) / 2


def number(x):
    x = float(x) if abs(x) < mpf(10) ** 308 else (float("inf") if x > 0 else float("-inf"))
    return repr(x)


def case(scores, alpha):
    c = alpha - 1
    P = 1 / c
    counts = {}
    for s in scores:
        counts[s] = counts.get(s, 0) + 1
    values = sorted(counts.items(), reverse=True)
    n, w = solve(values, c)
    last = values[n - 1][0]
    delta = w ** c
    over = {s: c * (s - last) + delta for s, _ in values[:n]}
    p = {s: x ** P for s, x in over.items()}
    assert abs(mp.fsum(k * p[s] for s, k in values[:n]) - 1) < mpf(10) ** -50
    tau = c * last - delta
    # By the definition, with digits enough to hold τ.
    with mp.workdps(int(70 + c * max(0, -mp.log10(w)) + 30) if c < 200 else 60):
        if c < 200:
            exact = c * last - w ** c
            direct = mp.fsum(k * (c * s - exact) ** P for s, k in values[:n])
            assert abs(direct - 1) < mpf(10) ** -20, (alpha, direct)
            assert all(c * s <= exact for s, _ in values[n:])
    f = {s: x ** (P - 1) for s, x in over.items()}
    top = f[last] if alpha > 2 else f[values[0][0]]
    ratio = {s: x / top for s, x in f.items()}
    in_support = [(j, s) for j, s in enumerate(scores) if s in p]
    up = [mpf(7 * j % 11 - 5) / 8 for j in range(len(scores))]
    # Against the key of the largest f, so that what others leave of its gradient keeps its digits.
    origin = up[next(j for j, s in in_support if ratio[s] == 1)]
    total = mp.fsum(ratio[s] for _, s in in_support)
    mean = mp.fsum(ratio[s] * (up[j] - origin) for j, s in in_support) / total
    entropy = -mp.fsum(k * p[s] * mp.log(p[s]) for s, k in values[:n])
    lines = [f"tau {number(tau)} {len(in_support)} {number(entropy)} {number(p[values[0][0]])}"]
    shown = in_support if len(in_support) <= 48 else in_support[:24] + in_support[-24:]
    for j, s in shown:
        ds = f[s] * (up[j] - origin - mean)
        if abs(ds) < mpf(10) ** -40:
            ds = mpf(0)
        lines.append(f"key {j} {number(p[s])} {number(ds)} {number(c * ratio[s] / total)}")
    return lines


def main():
    with open(sys.argv[1], "w", encoding="ascii") as out:
        everything = list(rows())
        for name, text, _ in everything:
            print(f"row {name} {text}", file=out)
        for name, _, scores in everything:
            for alpha in ALPHAS:
                print(f"case {name} {alpha}", file=out)
                for line in case(scores, mpf(alpha)):
                    print(line, file=out)
                print(name, alpha, file=sys.stderr)


if __name__ == "__main__":
    main()
