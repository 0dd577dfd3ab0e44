"""Wrong calls: each raises ValueError or TypeError that names what is wrong; none ends Python."""

import os
import subprocess
import sys

import numpy as np
import pytest

import foci

F = np.float32


def good(**changes):
    given = {"q": np.zeros((2, 4, 3, 8), F), "k": np.zeros((2, 2, 5, 8), F),
             "v": np.zeros((2, 2, 5, 6), F)}
    given.update(changes)
    return given


@pytest.mark.parametrize("changes, kind, says", [
    ({"q": [[1.0]]}, TypeError, "q: list arrived, an array"),
    ({"q": None}, ValueError, "q: None arrived"),
    ({"q": np.zeros((4, 3, 8), F)}, ValueError, r"q: shape \[4, 3, 8\] arrived, four dimensions"),
    ({"q": np.zeros((2, 4, 3, 8))}, ValueError, "float64 arrived"),
    ({"q": np.zeros((2, 4, 3, 8), np.int16)}, ValueError, "q: int16 arrived, float32"),
    ({"q": np.zeros((2, 4, 3, 8), np.complex64)}, TypeError, "q: elements of 64 bits"),
    ({"q": np.array("text")}, TypeError, "q: "),
    ({"q": np.ndarray((2, 4, 3, 8), "V0")}, TypeError, "q: elements of 0 bits"),
    ({"q": np.ndarray((2, 4, 3, 8), "S0")}, TypeError, "q: elements of 0 bits"),
    ({"k": np.zeros((2, 2, 5, 7), F)}, ValueError, "k: "),
    ({"k": np.zeros((2, 3, 5, 8), F)}, ValueError, "k: 3 heads arrived beside 4 of q"),
    ({"k": np.zeros((2, 0, 5, 8), F)}, ValueError, "k: 0 heads arrived beside 4 of q"),
    ({"q": np.zeros((2, 0, 3, 8), F)}, ValueError, "k: 2 heads arrived beside 0 of q"),
    ({"v": np.zeros((2, 2, 4, 6), F)}, ValueError, "v: "),
    ({"nonsense": 1}, TypeError, "nonsense"),
    ({"score": "best"}, ValueError, "score: 'best' arrived"),
    ({"score": 3}, TypeError, "score: int arrived"),
    ({"normalizer": "entmax", "alpha": 1.0}, ValueError, "alpha"),
    ({"normalizer": "entmax", "alpha": "x"}, TypeError, "alpha: str arrived"),
    ({"normalizer": "topk", "top_k": 0}, ValueError, "k: "),
    ({"normalizer": "topk", "top_k": 2.5}, TypeError, "top_k: float arrived"),
    ({"scale": [1.0, 2.0]}, ValueError, "scale"),
    ({"scale": float("nan")}, ValueError, "scale: nan arrived"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"causal": "diagonal"}, ValueError, "causal: 'diagonal' arrived"),
    ({"window": (1, 2, 3)}, ValueError, "window: 3 sides"),
    ({"window": -1}, ValueError, "^window: -1"),
    ({"alpha": 1.7}, ValueError, "alpha: 1.7 arrived, but nothing reads it without norm"),
    ({"normalizer": "entmax", "top_k": 3}, ValueError, "top_k: 3 arrived, but nothing"),
    ({"gamma": 2.0}, ValueError, "gamma: 2.0 arrived, but nothing reads it without score='l2'"),
    ({"window_align": "past"}, ValueError, "window_align: 'past' arrived, but nothing"),
    ({"dropout_seed": 1}, ValueError, "dropout_seed: 1 arrived, but nothing"),
    ({"is_causal": True}, TypeError, "is_causal: .*causal='top-left' is meant"),
    ({"casual": True}, TypeError, "casual: .*causal is meant"),
    ({"score_mod": abs}, TypeError, "score_mod: .*bias"),
    ({"normalizer": "entmax", "alpha": 0.5}, ValueError, "^alpha: 0.5"),
    ({"dropout": 1.5}, ValueError, "^dropout: 1.5"),
    ({"dropout": 1.5}, ValueError, "dropout"),
    ({"key_lengths": np.array([1, 9])}, ValueError, "key_lengths"),
    ({"key_lengths": np.array([1.0, 2.0], F)}, TypeError, "key_lengths: float32 arrived"),
    ({"key_lengths": True}, ValueError, "key_lengths: no tensor was given"),
    ({"keep": np.zeros((3, 4), bool)}, ValueError, "keep"),
    ({"keep": np.zeros((3, 5), F)}, ValueError, "keep"),
    ({"bias": np.zeros((9, 9), F)}, ValueError, "bias"),
    ({"slopes": np.zeros(3, F)}, ValueError, "slopes"),
    ({"table1d": np.zeros((4, 4), F)}, ValueError, "table1d"),
    ({"table1d": np.zeros(4, F)}, ValueError, "table1d"),
    ({"q_segments": np.full((2, 3), 2**40)}, ValueError, "q_segments"),
    ({"statistics": ["entropie"]}, ValueError, "statistics"),
    ({"statistics": 5}, ValueError, "statistics"),
    ({"statistics": np.zeros(3)}, ValueError, "statistics: ndarray arrived"),
    ({"spec": "softmax"}, TypeError, "spec: str arrived"),
    # Told in the names of the options, not in those of the library.
    ({"normalizer": "entmax", "alpha": 1e7}, ValueError, "^alpha: 1"),
    ({"score": "l2", "gamma": 1e39}, ValueError, "^gamma: 1e"),
    ({"relative1d": 2**31, "table1d": np.zeros((4, 3), F)}, ValueError, "^relative1d: 2147483648"),
    ({"table2d": np.zeros((4, 3, 3), F)}, ValueError, r"^relative2d: \[2, 2\] holds 4 positions"),
    ({"relative2d": (0, 1), "table2d": np.zeros((4, 3, 3), F)}, ValueError, "^relative2d: .0, 1."),
    # Arrays that nothing reads.
    ({"past_lengths": np.array([1, 2])}, ValueError, "past_lengths: an array arrived, but nothing"),
    ({"score_w": np.zeros(8, F)}, ValueError, "score_w: .* without score='additive'"),
    ({"slopes": np.zeros(4, F), "alibi": False}, ValueError, "slopes: .* without alibi=True"),
    ({"keep": np.ones((3, 5), bool), "relative1d": None, "table1d": np.zeros((4, 3), F)},
     ValueError, "table1d: .* without relative1d"),
])
def test_names_the_argument(changes, kind, says):
    with pytest.raises(kind, match=says) as caught:
        foci.attention(**good(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call, kind, says", [
    (lambda: foci.set_num_threads(0), ValueError, "n: 0 arrived, a number from 1"),
    (lambda: foci.set_num_threads(2**70), ValueError, "n: 1180591620717411303424 arrived"),
    (lambda: foci.set_num_threads("2"), TypeError, "n: str arrived, an integer is right"),
    (lambda: foci.set_num_threads(None), TypeError, "n: NoneType arrived"),
    (lambda: foci.set_num_threads(1.5), TypeError, "n: float arrived"),
    (lambda: foci.set_target(3), TypeError, "name: int arrived, str is right"),
    (lambda: foci.set_target("sse"), ValueError, "SIMD target: 'sse' is unknown"),
    (lambda: foci.Cache(kv_heads=0, head_size=8), ValueError, "kv_heads: 0 key/value heads"),
    (lambda: foci.Cache(kv_heads=1, head_size=-8), ValueError, "head_size: -8 arrived"),
    (lambda: foci.Cache(kv_heads=1, head_size=8, value_size=-1), ValueError, "value_size: -1"),
    (lambda: foci.Cache(kv_heads=1, head_size=8, sequences=-1), ValueError, "sequences: -1"),
    (lambda: foci.Cache(kv_heads=2**70, head_size=8), ValueError, "kv_heads: 118"),
    (lambda: foci.Cache(kv_heads=1.0, head_size=8), TypeError, "kv_heads: float arrived"),
    (lambda: foci.Cache(kv_heads=1, head_size=8, dtype=object()), ValueError, "dtype: object arr"),
    (lambda: foci.Cache(kv_heads=2, head_size=8).append(*[np.zeros((1, 2, 3, 8), F)] * 2,
                                                        counts=[9]),
     ValueError, r"counts\[0\]: 9 arrived"),
    (lambda: foci.Cache(kv_heads=2, head_size=8).append(*[np.zeros((1, 2, 3, 8), F)] * 2,
                                                        sequences=[4]),
     ValueError, r"sequences\[0\]: 4 arrived"),
    (lambda: foci.attention_backward(np.zeros(3, F), *good().values()), ValueError, "dy: shape"),
    (lambda: foci.attention_backward(np.zeros((2, 4, 3, 6), F), *good().values(), wanted=["dbias"]),
     ValueError, "wanted: 'dbias' arrived, but the call had no bias"),
    (lambda: foci.attention(**good(), statistics="row_stat").backward(
        dentropy=np.zeros((2, 4, 3), F)), ValueError, "dentropy: given, but the call did not ask"),
    (lambda: foci.attention(**good(), statistics="row_stat").backward(
        dmax_weight=np.zeros((2, 4, 3), F)), ValueError, "dmax_weight: given, but the call did"),
    (lambda: foci.weights([[1.0]], good()["k"]), TypeError, "q: list arrived"),
    (lambda: foci.weights(good()["q"], [[1.0]]), ValueError, "k: list arrived"),
])
def test_other_calls_name_theirs(call, kind, says):
    with pytest.raises(kind, match="^" + says) as caught:
        call()
    assert "\n" not in str(caught.value)


RANDOM_CALLS = r"""
import random, sys
import numpy as np
import foci

rng = random.Random(int(sys.argv[1]))
dtypes = [np.float32] * 6 + [np.float16, np.float64, np.int32, np.int64, np.uint8, np.bool_,
                             np.complex64, np.int8, object, "U3", ">f4"]

def number():
    return rng.choice([0, 1, 2, 3, 5, 8, -1, 2**31, 2**63, 2**70, 1.5, -2.0, float("inf"),
                       float("nan"), True, None, "x", b"y", [], (1,), {}, object()])

def shape(like=None):
    if like is not None and rng.random() < 0.7:
        return like
    return tuple(rng.choice([0, 1, 1, 2, 2, 3, 4, 5, 8, 17]) for _ in range(rng.choice(
        [0, 1, 2, 3, 4, 4, 4, 4, 5, 9])))

def array(like=None):
    if like is not None and rng.random() < 0.6:
        return np.asarray(np.random.default_rng(rng.randrange(99)).standard_normal(like), "f4")
    if rng.random() < 0.06:
        return number()
    dtype = rng.choice(dtypes)
    x = np.zeros(shape(like), dtype)
    if dtype is not object and x.dtype.kind in "fi" and rng.random() < 0.5:
        x = x + np.asarray(rng.choice([0, 1, -1, 100]), x.dtype)
    if x.ndim and rng.random() < 0.2:
        x = x[tuple(slice(None, None, rng.choice([1, 1, 2, -1])) for _ in x.shape)]
    if x.ndim > 1 and rng.random() < 0.2:
        x = x.swapaxes(rng.randrange(x.ndim), rng.randrange(x.ndim))
    if rng.random() < 0.05:
        x = np.broadcast_to(x, (2,) + x.shape)
    if rng.random() < 0.05 and x.dtype == np.float32:
        x = np.frombuffer(bytes(4 * x.size + 1), np.uint8)[1:].view(np.float32).reshape(x.shape)
    if rng.random() < 0.1:
        if rng.random() < 0.5:
            x = x.copy()
        elif x.dtype.kind in "fiub":
            x = memoryview(np.ascontiguousarray(x))
    return x

names = ["score", "gamma", "scale", "softcap", "normalizer", "alpha", "top_k", "causal", "window",
         "window_align", "key_lengths", "segments", "keep", "bias", "alibi", "relative1d",
         "relative2d", "dropout", "dropout_seed", "dropout_place", "past_lengths", "q_segments",
         "k_segments", "slopes", "table1d", "table2d", "score_w", "statistics", "spec", "other"]
words = ["dot", "cosine", "l2", "additive", "softmax", "sparsemax", "entmax", "topk", "past",
         "bottom-right", "top-left", "keys", "weights", "entropy", ["coverage", "support"],
         foci.Spec(causal=True), foci.Spec(normalizer="entmax")]

def value():
    pick = rng.random()
    return number() if pick < 0.3 else rng.choice(words) if pick < 0.6 else array()

fine = wrong = 0
for _ in range(int(sys.argv[2])):
    b, h, hk, n, m, d = (rng.choice([1, 2, 4]) for _ in range(6))
    q, k, v = array((b, h, n, d)), array((b, hk, m, d)), array((b, hk, m, d))
    options = {rng.choice(names): value() for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))}
    what = rng.choice(["attention", "attention", "attention", "backward", "weights", "cache",
                       "explain"])
    try:
        if what == "attention":
            foci.attention(q, k, v, **options)
        elif what == "backward":
            options.pop("statistics", None)
            foci.attention_backward(array((b, h, n, d)), q, k, v, **options)
        elif what == "weights":
            options.pop("statistics", None)
            foci.weights(q, k, rng.choice([None, [0], [5], [number()], number()]),
                         rng.choice([None, [0], [number()]]), **options)
        elif what == "explain":
            foci.explain(q, k, v, **options)
        else:
            cache = foci.Cache(kv_heads=rng.choice([hk, number()]), head_size=d,
                               sequences=rng.choice([b, 1, number()]),
                               window=rng.choice([None, None, 2, number()]))
            cache.append(k, v, counts=rng.choice([(), (1,), [number()]]))
            cache.attend(q, **options)
            cache.truncate(rng.choice([0, number()]), rng.choice([0, number()]))
        fine += 1
    except (ValueError, TypeError, OverflowError, MemoryError, BufferError) as error:
        wrong += 1
        assert str(error), repr(error)
print(fine, wrong)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_random_calls_end_in_errors_or_results(seed):
    done = subprocess.run([sys.executable, "-c", RANDOM_CALLS, str(seed), "1000"],
                          capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    fine, wrong = map(int, done.stdout.split())
    assert fine > 50 and wrong > 200
