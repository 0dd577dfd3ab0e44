#!/usr/bin/env python3
"""Writes mpmath_table.json: what attention is, worked out in 50 digits by code that shares nothing
with foci, so that a flaw of the oracle shows.

    pip install mpmath
    python3 tests/reference/mpmath_tables.py            # rewrites the table beside this file
    python3 tests/reference/mpmath_tables.py --check    # says whether it would change

Results follow the definitions of docs/attention.md, one number at a time. Gradients are central
differences of the loss Σ upstream · result over every single input, the numbers of the spec (scale,
alpha) among them: with 60 digits and steps of 1e-18 they are good to 30 digits, and no formula of a
derivative enters. mpmath_test.cc compares the oracle with the table.
"""

import functools
import json
import pathlib
import random
import sys

from mpmath import mp, mpf

mp.dps = 60
STEP = mpf(10) ** -18
INF = mpf("inf")

# ---- random bits of dropout (Salmon et al. 2011: Philox 4x32-10) ---------------------------------


def philox(key, counter):
    mask = 0xFFFFFFFF
    k = [key & mask, key >> 32]
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def dropped(dropout, b, h, i, j):
    word = philox(dropout["seed"], [j // 8, i, h, b])[j % 8 // 2]
    return (word >> 16 * (j % 2)) & 0xFFFF < round(dropout["p"] * 65536)


# ---- row maps: {key: score} -> {key: weight} and the statistic -----------------------------------


def softmax(scores):
    total = sum(mp.exp(s) for s in scores.values())
    return {j: mp.exp(s) / total for j, s in scores.items()}, mp.log(total)


def sparsemax(scores):
    """The support is tried in every size; the right one is that whose members alone exceed τ."""
    order = sorted(scores.values(), reverse=True)
    for n in range(1, len(order) + 1):
        tau = (sum(order[:n]) - 1) / n
        if order[n - 1] > tau and (n == len(order) or order[n] <= tau):
            return {j: s - tau for j, s in scores.items() if s > tau}, tau
    raise AssertionError("no support")


def entmax(scores, alpha):
    power = 1 / (alpha - 1)
    z = [(alpha - 1) * s for s in scores.values()]
    low, high = max(z) - 1, max(z)

    def total(tau):
        return sum((x - tau) ** power for x in z if x > tau)

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) >= 1 else (low, middle)
    tau = low
    for _ in range(8):  # by now no key is left between low and high: Newton's method
        slope = sum(power * (x - tau) ** (power - 1) for x in z if x > tau)
        tau += (total(tau) - 1) / slope
    assert abs(total(tau) - 1) < mpf(10) ** -50, (alpha, scores)
    weights = {j: ((alpha - 1) * s - tau) ** power
               for j, s in scores.items() if (alpha - 1) * s > tau}
    return weights, tau


def topk(scores, k):
    best = sorted(scores, key=lambda j: (-scores[j], j))[:k]
    return softmax({j: scores[j] for j in sorted(best)})


# ---- attention -----------------------------------------------------------------------------------


class Array:
    """Numbers in row-major order; broadcasts right-aligned when asked for an element."""

    def __init__(self, shape, data):
        self.shape, self.data = list(shape), list(data)
        assert len(self.data) == size(shape), (shape, len(self.data))

    def __call__(self, *index):
        at = 0
        for n, i in zip(self.shape, index[len(index) - len(self.shape):]):
            at = at * n + (0 if n == 1 else i)
        return self.data[at]


def size(shape):
    n = 1
    for d in shape:
        n *= d
    return n


def raw_score(score, q, k, w):
    kind = score["kind"]
    if kind == "dot":
        return sum((a * b for a, b in zip(q, k)), mpf(0))
    if kind == "cosine":
        lengths = mp.sqrt(sum(a * a for a in q)) * mp.sqrt(sum(b * b for b in k))
        return sum(a * b for a, b in zip(q, k)) / lengths if lengths else mpf(0)
    if kind == "l2":
        return -mpf(score["gamma"]) * sum((a - b) ** 2 for a, b in zip(q, k))
    return sum(c * mp.tanh(a + b) for a, b, c in zip(q, k, w))


def attend(spec, t):
    """Every result of the operator. `spec` is docs/attention.md's JSON as a dictionary."""
    (B, H, N, D), (_, Hk, M, _), Dv = t["q"].shape, t["k"].shape, t["v"].shape[3]
    score, normalizer = spec.get("score", {"kind": "dot"}), spec.get("normalizer",
                                                                     {"kind": "softmax"})
    masks, biases, dropout = spec.get("masks", []), spec.get("biases", []), spec.get("dropout")
    segmented = any(m["kind"] == "segments" for m in masks)
    past_aligned = any(m.get("align") == "past" for m in masks)

    def row(name, b, h, i, n):
        return [t[name](b, h, i, d) for d in range(n)]

    def scale(h):
        s = spec.get("scale", "auto")
        if isinstance(s, list):
            return mpf(s[h])
        if s == "auto":
            return 1 / mp.sqrt(D) if score["kind"] == "dot" and D else mpf(1)
        return mpf(s)

    def place(b, i, j):
        """The query's number, the key's, and how many there are of both, within the segment."""
        if not segmented:
            return i, j, N, M
        queries = [x for x in range(N) if t["q_segments"](b, x) == t["q_segments"](b, i)]
        keys = [x for x in range(M) if t["k_segments"](b, x) == t["q_segments"](b, i)]
        own = [x for x in range(M) if t["k_segments"](b, x) == t["k_segments"](b, j)]
        return queries.index(i), own.index(j), len(queries), len(keys)

    def position(align, b, i, n, m):
        return {"bottom-right": i + m - n, "top-left": i}.get(
            align, i + int(t["past_lengths"](b)) if past_aligned else 0)

    def seen(b, h, i, j):
        own, key, n, m = place(b, i, j)
        for mask in masks:
            kind, at = mask["kind"], position(mask.get("align", "bottom-right"), b, own, n, m)
            if kind == "causal" and key > at:
                return False
            if kind == "window":
                if mask["left"] is not None and key < at - mask["left"]:
                    return False
                if mask["right"] is not None and key > at + mask["right"]:
                    return False
            if kind == "key_lengths" and j >= t["key_lengths"](b):
                return False
            if kind == "segments" and t["q_segments"](b, i) != t["k_segments"](b, j):
                return False
            if kind == "keep" and not t["keep"](b, h, i, j):
                return False
        if any(x["kind"] == "tensor" for x in biases) and t["bias"](b, h, i, j) == -INF:
            return False
        return not (dropout and dropout["place"] == "keys" and dropped(dropout, b, h, i, j))

    def bias(b, h, i, j):
        align = "past" if past_aligned else "bottom-right"
        own, key, n, m = place(b, i, j)
        away, total = key - position(align, b, own, n, m), mpf(0)
        for x in biases:
            if x["kind"] == "tensor":
                total += t["bias"](b, h, i, j)
            elif x["kind"] == "alibi":
                total -= t["slopes"](h) * abs(away)
            elif x["kind"] == "relative1d":
                most = x["max_distance"]
                total += t["table1d"](h, max(-most, min(most, away)) + most)
            else:
                rows, columns = x["grid"]
                at = position(align, b, i, N, M)
                total += t["table2d"](h, j // columns - at // columns + rows - 1,
                                      j % columns - at % columns + columns - 1)
        return total

    def weights_of(h, scores):
        kind = normalizer["kind"]
        if kind == "softmax":
            return softmax(scores)
        if kind == "sparsemax":
            return sparsemax(scores)
        if kind == "entmax":
            alpha = normalizer["alpha"]
            return entmax(scores, mpf(alpha[h] if isinstance(alpha, list) else alpha))
        return topk(scores, normalizer["k"])

    out = {name: [] for name in ("raw", "scaled", "capped", "scores", "weights", "y", "row_stat",
                                 "entropy", "max_weight", "max_key", "support")}
    out["coverage"] = [mpf(0)] * (B * H * M)
    w = t["score_w"].data if "score_w" in t else None
    for b in range(B):
        for h in range(H):
            for i in range(N):
                scores = {}
                for j in range(M):
                    raw = raw_score(score, row("q", b, h, i, D), row("k", b, h * Hk // H, j, D), w)
                    scaled = scale(h) * raw
                    cap = spec.get("softcap")
                    capped = mpf(cap) * mp.tanh(scaled / mpf(cap)) if cap else scaled
                    biased = capped + bias(b, h, i, j)
                    for name, x in (("raw", raw), ("scaled", scaled), ("capped", capped),
                                    ("scores", biased)):
                        out[name].append(x)
                    if seen(b, h, i, j):
                        scores[j] = biased
                if scores:
                    p, stat = weights_of(h, scores)
                else:
                    p, stat = {}, INF if normalizer["kind"] in ("sparsemax", "entmax") else -INF
                out["weights"] += [p.get(j, mpf(0)) for j in range(M)]
                out["row_stat"].append(stat)
                out["entropy"].append(-sum((x * mp.log(x) for x in p.values()), mpf(0)))
                best = max(p.values()) if p else mpf(0)
                out["max_weight"].append(best)
                out["max_key"].append(min((j for j, x in p.items() if x == best), default=-1))
                out["support"].append(len(p))
                for j, x in p.items():
                    out["coverage"][(b * H + h) * M + j] += x
                for d in range(Dv):
                    y = mpf(0)
                    for j, x in p.items():
                        if dropout and dropout["place"] == "weights":
                            if dropped(dropout, b, h, i, j):
                                continue
                            x = x / (1 - mpf(round(dropout["p"] * 65536)) / 65536)
                        y += x * t["v"](b, h * Hk // H, j, d)
                    out["y"].append(y)
    return out


# ---- cases ---------------------------------------------------------------------------------------

UPSTREAM = {"dy": "y", "drow_stat": "row_stat", "dentropy": "entropy",
            "dmax_weight": "max_weight", "dcoverage": "coverage"}
INTEGERS = ("key_lengths", "past_lengths", "q_segments", "k_segments", "keep")


def loss(spec, tensors, upstream):
    out = attend(spec, tensors)
    return sum(g * x for name, result in UPSTREAM.items()
               for g, x in zip(upstream[name], out[result]) if abs(x) != INF)


def slope(f):
    """The derivative at 0 of a function of one step."""
    return (f(STEP) - f(-STEP)) / (2 * STEP)


def gradients(spec, tensors, upstream):
    def element(array, n, x, step):
        array.data[n] = x + step
        value = loss(spec, tensors, upstream)
        array.data[n] = x
        return value

    grads = {}
    for name, array in tensors.items():
        if name not in INTEGERS:  # an infinity is a mask entry of the bias
            grads["d" + name] = [
                mpf(0) if abs(x) == INF else slope(functools.partial(element, array, n, x))
                for n, x in enumerate(array.data)]

    def numbers(respecified, at):
        """The gradient of a number of the spec, or of each number of a list."""
        listed = isinstance(at, list)

        def moved(n, step):
            value = list(map(mpf, at if listed else [at]))
            value[n] += step
            return loss(respecified(value if listed else value[0]), tensors, upstream)

        return [slope(functools.partial(moved, n)) for n in range(len(at) if listed else 1)]

    scale = spec.get("scale", "auto")
    if scale == "auto":
        dot = spec.get("score", {"kind": "dot"})["kind"] == "dot"
        D = tensors["q"].shape[3]
        scale = 1 / mp.sqrt(D) if dot and D else mpf(1)
    grads["dscale"] = numbers(lambda x: {**spec, "scale": x}, scale)
    if spec.get("normalizer", {}).get("kind") == "entmax":
        grads["dalpha"] = numbers(
            lambda x: {**spec, "normalizer": {"kind": "entmax", "alpha": x}},
            spec["normalizer"]["alpha"])
    return grads


class Cases:
    def __init__(self):
        self.made = []

    def add(self, name, spec=None, B=1, H=2, Hk=1, N=2, M=4, D=2, Dv=2, spread=1.0, grads=True,
            **given):
        """given: arrays (shape, numbers) in the place of random ones; a bare list is flat."""
        spec = spec or {}
        tensors, out, dyadic = self._drawn(name, 0, spec, B, H, Hk, N, M, D, Dv, spread, given)
        for attempt in range(1, 20):
            if not grads or D == 0 or not near_a_corner(spec, out, M):
                break
            tensors, out, dyadic = self._drawn(name, attempt, spec, B, H, Hk, N, M, D, Dv, spread,
                                               given)
        assert not grads or D == 0 or not near_a_corner(spec, out, M), name
        for stage, after in (("raw", "scaled"), ("scaled", "capped"), ("capped", "scores")):
            if out[stage] == out[after]:
                out[stage] = []  # the same as the next one
        case = {"name": name, "spec": spec,
                "in": {key: written(t.shape, t.data) for key, t in tensors.items()},
                "out": {key: list(map(number, values)) for key, values in out.items()}}
        if grads:
            shape = {"dy": [B, H, N, Dv], "dcoverage": [B, H, M]}
            upstream = {key: dyadic(shape.get(key, [B, H, N])) for key in UPSTREAM}
            flat = {key: t.data for key, t in upstream.items()}
            case["up"] = {key: written(t.shape, t.data) for key, t in upstream.items()}
            case["grad"] = {key: list(map(number, values))
                            for key, values in gradients(spec, tensors, flat).items()}
        self.made.append(case)

    @staticmethod
    def _drawn(name, attempt, spec, B, H, Hk, N, M, D, Dv, spread, given):
        rng = random.Random(f"{name} {attempt}" if attempt else name)

        def dyadic(shape, wide=1.0):
            return Array(shape, [mpf(round(rng.gauss(0, wide) * 64)) / 64
                                 for _ in range(size(shape))])

        shapes = {"q": [B, H, N, D], "k": [B, Hk, M, D], "v": [B, Hk, M, Dv]}
        tensors = {"q": dyadic(shapes["q"], spread), "k": dyadic(shapes["k"]),
                   "v": dyadic(shapes["v"])}
        if spec.get("score", {}).get("kind") == "additive":
            tensors["score_w"] = dyadic([D])
        for bias in spec.get("biases", []):
            if bias["kind"] == "alibi":
                tensors["slopes"] = dyadic([H])
            elif bias["kind"] == "relative1d":
                tensors["table1d"] = dyadic([H, 2 * bias["max_distance"] + 1])
            elif bias["kind"] == "relative2d":
                rows, columns = bias["grid"]
                tensors["table2d"] = dyadic([H, 2 * rows - 1, 2 * columns - 1])
            elif "bias" not in given:
                tensors["bias"] = dyadic([H, N, M])
        for key, value in given.items():
            shape, data = value if isinstance(value, tuple) else (shapes[key], value)
            if data is None:
                tensors[key] = dyadic(shape)
            else:
                tensors[key] = Array(shape, data if key in INTEGERS else [mpf(x) for x in data])
        return tensors, attend(spec, tensors), dyadic


def near_a_corner(spec, out, M):
    """Whether a tie, or a key that has just got its weight, leaves some result without a
    derivative."""
    near = mpf(10) ** -9
    for at in range(0, len(out["weights"]), M) if M else ():
        weights = sorted(out["weights"][at:at + M], reverse=True)
        if len(weights) > 1 and 0 < weights[0] and weights[0] - weights[1] < near:
            return True
        if any(0 < w < near for w in weights) and spec.get("normalizer", {}).get("kind") in (
                "sparsemax", "entmax"):
            return True
    return False


def number(x):
    """An integer, or the nearest double, of which json writes every digit; infinities are texts."""
    if isinstance(x, int):
        return x
    if abs(x) == INF:
        return "inf" if x > 0 else "-inf"
    return float(x)


def written(shape, data):
    return {"shape": list(shape), "data": [number(x) for x in data]}


SPARSE = [("sparsemax", {"kind": "sparsemax"})] + [
    (f"entmax {a}", {"kind": "entmax", "alpha": a})
    for a in (1.0078125, 1.0625, 1.25, 1.5, 1.75, 1.9375, 2.0, 2.125, 2.5, 3.0, 4.0)]
TOPK = [(f"topk {k}", {"kind": "topk", "k": k}) for k in (1, 2, 3, 9)]
ALIGNS = ("bottom-right", "top-left", "past")


def all_cases():
    c = Cases()
    c.add("softmax of dot products")
    c.add("no channels", D=0)
    c.add("one key", M=1)
    c.add("scale and softcap", {"scale": -0.75, "softcap": 1.5}, spread=2)
    c.add("scale of each head", {"scale": [0.5, -2.0], "softcap": 3.0})
    c.add("scores of hundreds", {"scale": 64.0}, spread=4)
    c.add("heads share keys", H=4, Hk=2, B=2)
    for score in ({"kind": "cosine"}, {"kind": "l2", "gamma": 0.375}, {"kind": "additive"}):
        c.add(score["kind"], {"score": score}, D=3)
        c.add(score["kind"] + " scaled and capped",
              {"score": score, "scale": [3.0, -1.5], "softcap": 0.75}, D=3)
    c.add("cosine of zero vectors", {"score": {"kind": "cosine"}}, grads=False,
          q=[0, 0, 1, 2, 0.5, 0, -1, 3], k=[1, 1, 0, 0, -2, 1, 0, 0])
    for name, normalizer in SPARSE + TOPK:
        c.add(name, {"normalizer": normalizer, "scale": 1.0}, H=1, M=7)
        c.add(name + " of heads, capped",
              {"normalizer": normalizer, "scale": [0.75, 2.0], "softcap": 2.0,
               "biases": [{"kind": "tensor"}], "masks": [{"kind": "causal", "align": "top-left"}]},
              N=3, M=5, bias=([1, 5], [0.25, -INF, 0.5, -1, 0]))
    for place, alphas in enumerate(([1.25, 3.0], [2.0, 1.0625])):
        c.add(f"alpha of each head {place}",
              {"normalizer": {"kind": "entmax", "alpha": alphas}, "scale": 1.0}, M=6)
    c.add("one key takes all", {"normalizer": {"kind": "entmax", "alpha": 1.5}}, H=1, D=1,
          q=[4, 8], k=[4, 1, 0, -2])
    c.add("one key alone", {"normalizer": {"kind": "entmax", "alpha": 1.25}}, M=1)
    c.add("equal scores", {"normalizer": {"kind": "entmax", "alpha": 1.5}}, H=1, D=1, grads=False,
          q=[1, 2], k=[1, 1, 1, 1])
    c.add("equal scores under topk", {"normalizer": {"kind": "topk", "k": 2}}, H=1, D=1, M=5,
          grads=False, q=[1, 2], k=[1, 2, 5, 5, 5])
    for align in ALIGNS:
        past = {"past_lengths": ([1], [2])} if align == "past" else {}
        c.add("causal " + align, {"masks": [{"kind": "causal", "align": align}]}, N=3, **past)
        c.add("window " + align,
              {"masks": [{"kind": "window", "left": 1, "right": 0, "align": align},
                         {"kind": "window", "left": None, "right": 1, "align": align}]},
              N=3, M=5, **past)
        c.add("positions " + align,
              {"masks": [{"kind": "window", "left": None, "right": None, "align": align}],
               "biases": [{"kind": "alibi"}, {"kind": "relative1d", "max_distance": 2}]},
              N=2, M=5, **past)
    c.add("more queries than keys", {"masks": [{"kind": "causal"}]}, N=4, M=2)
    c.add("empty rows of a sparse map",
          {"masks": [{"kind": "causal"}], "normalizer": {"kind": "sparsemax"}}, N=4, M=2)
    c.add("grid", {"biases": [{"kind": "relative2d", "grid": [2, 3]}]}, N=3, M=6)
    c.add("grid past",
          {"biases": [{"kind": "relative2d", "grid": [3, 2]}],
           "masks": [{"kind": "causal", "align": "past"}]},
          B=2, H=1, N=2, M=6, past_lengths=([2], [0, 4]))
    for name, shape in (("rows", [2, 1]), ("keys", [4]), ("heads", [2, 1, 1]),
                        ("all", [2, 2, 2, 4]), ("batches", [2, 1, 1, 4])):
        c.add("bias of " + name, {"biases": [{"kind": "tensor"}]}, B=2, bias=(shape, None))
    c.add("lengths and keep", {"masks": [{"kind": "key_lengths"}, {"kind": "keep"}]}, B=2,
          key_lengths=([2], [3, 0]), keep=([2, 1, 4], [1, 1, 0, 1, 0, 1, 1, 1]))
    packed = {"q_segments": ([1, 4], [3, 3, 7, 7]), "k_segments": ([1, 5], [3, 3, 3, 7, 7])}
    mixed = {"q_segments": ([1, 4], [2, 1, 2, 1]), "k_segments": ([1, 5], [1, 2, 1, 1, 2])}
    for name, ids in (("packed", packed), ("mixed", mixed)):
        c.add(name + " segments", {"masks": [{"kind": "segments"}]}, H=1, N=4, M=5, **ids)
        c.add(name + " segments with positions",
              {"masks": [{"kind": "segments"}, {"kind": "causal"}],
               "biases": [{"kind": "alibi"}, {"kind": "relative1d", "max_distance": 1}]},
              H=1, N=4, M=5, **ids)
    for place in ("weights", "keys"):
        for name, normalizer in (("softmax", {"kind": "softmax"}), SPARSE[4], TOPK[1]):
            c.add(f"dropout of {place} under {name}",
                  {"dropout": {"p": 0.375, "seed": 11, "place": place}, "normalizer": normalizer},
                  B=2, H=1, N=3, M=9, D=1, Dv=1)
    for name, normalizer in (("softmax", {"kind": "softmax"}), SPARSE[0], SPARSE[3], TOPK[1]):
        c.add("everything under " + name,
              {"score": {"kind": "additive"}, "scale": [1.5, -0.5], "softcap": 2.0,
               "normalizer": normalizer,
               "masks": [{"kind": "window", "left": 2, "right": 1, "align": "past"},
                         {"kind": "keep"}],
               "biases": [{"kind": "tensor"}, {"kind": "alibi"},
                          {"kind": "relative1d", "max_distance": 1},
                          {"kind": "relative2d", "grid": [2, 3]}],
               "dropout": {"p": 0.25, "seed": 5, "place": "weights"}},
              N=3, M=6, past_lengths=([1], [2]), keep=([6], [1, 1, 0, 1, 1, 1]))
    return c.made


# ---- rotary --------------------------------------------------------------------------------------


def rotary_cases():
    """Each pair of channels as a complex number, multiplied by e^(i·angle)."""
    made = []
    for pairs, D, half in (("half_split", 6, 3), ("interleaved", 6, 3), ("half_split", 7, 2),
                           ("interleaved", 7, 2)):
        rng = random.Random(pairs + str(half))
        B, H, N = 2, 2, 2
        x = Array([B, H, N, D], [mpf(round(rng.gauss(0, 1) * 64)) / 64
                                 for _ in range(B * H * N * D)])
        angle = Array([B, N, half], [mpf((b + 2) * (n + 5)) * mpf(100) ** (-mpf(r) / half)
                                     for b in range(B) for n in range(N) for r in range(half)])
        y = []
        for b in range(B):
            for h in range(H):
                for n in range(N):
                    row = [x(b, h, n, d) for d in range(D)]
                    for r in range(half):
                        u, v = ((2 * r, 2 * r + 1) if pairs == "interleaved" else (r, r + half))
                        z = mp.mpc(row[u], row[v]) * mp.expj(angle(b, n, r))
                        row[u], row[v] = z.real, z.imag
                    y += row
        made.append({"pairs": pairs, "x": written(x.shape, x.data),
                     "cos": written(angle.shape, map(mp.cos, angle.data)),
                     "sin": written(angle.shape, map(mp.sin, angle.data)),
                     "y": list(map(number, y))})
    return made


def main():
    cases = ",\n".join(json.dumps(c) for c in all_cases())
    rotary = ",\n".join(json.dumps(c) for c in rotary_cases())
    text = f'{{"attention": [\n{cases}\n],\n"rotary": [\n{rotary}\n]}}\n'
    path = pathlib.Path(__file__).with_name("mpmath_table.json")
    if "--check" in sys.argv[1:]:
        same = path.read_text() == text
        print("as committed" if same else f"{path} would change")
        return 0 if same else 1
    path.write_text(text)
    print(f"{path}: {len(text)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
