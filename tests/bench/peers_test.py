"""The C functions of bench/peers and the modules around them that need no peer."""
import array
import ctypes
import math
import os
import subprocess
import sys
import unittest

TOP = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
PEERS = os.path.join(TOP, "bench", "peers")
sys.path[:0] = [PEERS]
import foci_library  # noqa: E402
import timing  # noqa: E402

BUILD = sys.argv.pop(1) if len(sys.argv) > 1 else os.path.join(TOP, "build")
SHAPE = (1, 2, 1, 3, 4, 2, 5)  # B, H, Hk, N, M, D, Dv


def floats(count, seed):
    """Numbers between −1 and 1."""
    state, out = seed, array.array("f")
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        out.append(state / 2**30 - 1)
    return out


def address(values):
    return values.buffer_info()[0]


def softmax_attention(q, k, v):
    _, H, _, N, M, D, Dv = SHAPE
    y = []
    for row in range(H * N):
        s = [sum(q[row * D + d] * k[j * D + d] for d in range(D)) / math.sqrt(D) for j in range(M)]
        e = [math.exp(x - max(s)) for x in s]
        y += [sum(e[j] * v[j * Dv + d] for j in range(M)) / sum(e) for d in range(Dv)]
    return y


class Functions(unittest.TestCase):
    def setUp(self):
        self.library = foci_library.Library(BUILD)
        _, H, Hk, N, M, D, Dv = SHAPE
        self.q, self.k, self.v = floats(H * N * D, 1), floats(Hk * M * D, 2), floats(Hk * M * Dv, 3)
        self.dy = floats(H * N * Dv, 4)
        self.y, self.statistic = floats(H * N * Dv, 5), floats(H * N, 6)
        self.tensors = [address(a) for a in (self.q, self.k, self.v, self.y, self.statistic)]

    def refused(self, words, call):
        with self.assertRaises(foci_library.FociError) as raised:
            call()
        self.assertIn(words, str(raised.exception))
        self.assertEqual(len(str(raised.exception).splitlines()), 1)

    def test_forward_writes_into_the_callers_memory(self):
        self.library.attention({}, SHAPE).forward(*self.tensors)
        for a, b in zip(self.y, softmax_attention(self.q, self.k, self.v)):
            self.assertAlmostEqual(a, b, places=5)

    def test_backward_gives_the_gradients(self):
        attention = self.library.attention({}, SHAPE)
        attention.forward(*self.tensors)
        gradients = [floats(len(x), 7) for x in (self.q, self.k, self.v)]
        attention.backward(*self.tensors, address(self.dy), *map(address, gradients))
        for values, got in zip((self.q, self.k, self.v), gradients):
            for i in range(len(values)):
                step, kept = 1e-3, values[i]
                sides = []
                for sign in (1, -1):
                    values[i] = kept + sign * step
                    y = softmax_attention(self.q, self.k, self.v)
                    sides.append(sum(a * b for a, b in zip(y, self.dy)))
                values[i] = kept
                self.assertAlmostEqual(got[i], (sides[0] - sides[1]) / (2 * step), places=3)

    def test_specs_that_cannot_be_are_messages(self):
        def make(spec, shape=SHAPE):
            return lambda: self.library.attention(spec, shape)
        self.refused("normalizer", make({"normalizer": {"kind": "hardmax"}}))
        self.refused("scal", make({"scal": 1}))
        self.refused("spec", make([]))
        self.refused("heads", make({}, (1, 3, 2, 1, 1, 4, 4)))
        self.refused("-1", make({}, (1, 1, 1, -1, 1, 4, 4)))
        for text in (b"", b"{", b"\xff", b"[" * 5000):
            made = ctypes.c_void_p()
            said = self.library.function("make")(text, (ctypes.c_int64 * 7)(*SHAPE),
                                                 ctypes.byref(made))
            self.assertTrue(said)
            self.assertNotIn(b"\n", said)
            self.assertIsNone(made.value)

    def test_a_spec_that_reads_more_tensors_is_a_message(self):
        attention = self.library.attention({"biases": [{"kind": "tensor"}]}, SHAPE)
        self.refused("bias", lambda: attention.forward(*self.tensors))

    def test_null_pointers_are_messages(self):
        attention = self.library.attention({}, SHAPE)
        for i, name in enumerate(("q", "k", "v", "y", "statistic")):
            tensors = list(self.tensors)
            tensors[i] = None
            self.refused(f"{name}: a null pointer", lambda: attention.forward(*tensors))
            self.refused(f"{name}: a null pointer",
                         lambda: attention.backward(*tensors, address(self.dy), *self.tensors[:3]))
        for i, name in enumerate(("dy", "dq", "dk", "dv")):
            tensors = [address(self.dy), *self.tensors[:3]]
            tensors[i] = None
            self.refused(f"{name}: a null pointer",
                         lambda: attention.backward(*self.tensors, *tensors))
        lib = self.library
        self.refused("attention: a null", lambda: lib.call("forward", None, *self.tensors))
        self.refused("spec: a null", lambda: lib.call("make", None, None, None))
        self.refused("shape: a null", lambda: lib.call("make", b"{}", None, None))
        self.refused("text: a null", lambda: lib.call("about", None))
        lib.lib.foci_peers_free(None)

    def test_empty_tensors_need_no_memory(self):
        attention = self.library.attention({}, (1, 1, 1, 0, 2, 1, 1))
        attention.forward(None, address(self.k), address(self.v), None, None)

    def test_threads_and_about(self):
        self.library.set_threads(1)
        self.assertRegex(self.library.about(), "^SIMD target [a-z0-9]+, 1 threads$")
        self.refused("0", lambda: self.library.set_threads(0))

    def test_training_steps_learn(self):
        training = self.library.training("vit-demo-even")
        about = training.about()
        self.assertEqual((about["width"], about["steps"], about["language"]), (64, 1, False))
        tensors = {t["name"]: t for t in about["tensors"]}
        self.assertEqual(sum(math.prod(t["shape"]) for t in tensors.values() if t["trained"]),
                         about["parameters"])
        self.assertEqual(tensors["labels"]["shape"], [64])
        labels = (ctypes.c_int64 * 64).from_address(training.tensor("labels"))
        self.assertTrue(all(0 <= x < about["classes"] for x in labels))
        self.assertTrue(training.tensor("classifier.weight", "second"))
        first = training.step()
        for _ in range(5):
            last = training.step()
        self.assertLess(last, first)
        self.refused("'no'", lambda: training.tensor("no"))
        self.refused("third", lambda: training.tensor("labels", "third"))
        self.refused("labels", lambda: training.tensor("labels", "first"))

    def test_trainings_that_cannot_be_are_messages(self):
        lib = self.library
        self.refused("vit-s", lambda: lib.training("no such workload"))
        self.refused("workload: a null", lambda: lib.call("training_make", None, 1, None))
        self.refused("training: a null", lambda: lib.call("training_step", None, None))
        self.refused("training: a null", lambda: lib.call("training_about", None, None))
        self.refused("training: a null", lambda: lib.call("training_tensor", None, None, None, None))
        lib.lib.foci_peers_training_free(None)

    def test_a_wrong_target_is_a_message(self):
        r = subprocess.run([sys.executable, "-B", "-c", f"""
import sys; sys.path.insert(0, {PEERS!r})
import foci_library
try:
    foci_library.Library({BUILD!r}).about()
except foci_library.FociError as e:
    print(e)
"""], env={**os.environ, "FOCI_TARGET": "mmx"}, capture_output=True, text=True, check=True)
        self.assertIn("mmx", r.stdout)


class Options(unittest.TestCase):
    def test_what_cannot_be_is_one_line_and_two(self):
        for words in (["--fast"], ["--threads", "0"], ["--rows", "("], ["--threads"]):
            r = subprocess.run([sys.executable, "-B", os.path.join(PEERS, "run.py"), "--build", BUILD,
                                *words], capture_output=True, text=True, check=False)
            self.assertEqual((r.returncode, len(r.stderr.splitlines())), (2, 1), r.stderr)


class Turns(unittest.TestCase):
    def test_candidates_take_turns_and_ratios_go_round_by_round(self):
        now, calls = [0.0], []

        def candidate(name, seconds):
            def call():
                calls.append(name)
                now[0] += seconds
            return call

        t = timing.interleaved({"peer": candidate("peer", 0.3), "foci": candidate("foci", 0.2)}, 2.0,
                               clock=lambda: now[0])
        self.assertEqual(calls[:2], ["peer", "foci"])  # asked once how long they take
        self.assertEqual(calls[2:], ["peer", "foci"] * 5)
        self.assertAlmostEqual(t.median("foci"), 0.2)
        for ratio in t.ratio("peer", "foci"):
            self.assertAlmostEqual(ratio, 1.5)

    def test_rounds_go_on_until_the_time_is_spent(self):
        now = [0.0]

        def call():
            now[0] += 0.25

        self.assertEqual(len(timing.interleaved({"a": call}, 3.0, lambda: now[0]).seconds["a"]), 12)
        self.assertEqual(len(timing.interleaved({"a": call}, 0.1, lambda: now[0]).seconds["a"]), 3)


if __name__ == "__main__":
    unittest.main()
