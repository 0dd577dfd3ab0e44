"""The C functions of bench/peers and the modules around them that need no peer."""
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


class Functions(unittest.TestCase):
    def setUp(self):
        self.library = foci_library.Library(BUILD)

    def refused(self, words, call):
        with self.assertRaises(foci_library.FociError) as raised:
            call()
        self.assertIn(words, str(raised.exception))
        self.assertEqual(len(str(raised.exception).splitlines()), 1)

    def test_threads_and_about(self):
        self.library.set_threads(1)
        self.assertRegex(self.library.about(), "^SIMD target [a-z0-9]+, 1 threads$")
        self.refused("0", lambda: self.library.set_threads(0))
        self.refused("text: a null", lambda: self.library.call("about", None))

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
        self.refused("training: a null",
                     lambda: lib.call("training_tensor", None, None, None, None))
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
            script = os.path.join(PEERS, "run.py")
            r = subprocess.run([sys.executable, "-B", script, "--build", BUILD, *words],
                               capture_output=True, text=True, check=False)
            self.assertEqual((r.returncode, len(r.stderr.splitlines())), (2, 1), r.stderr)


class Turns(unittest.TestCase):
    def test_candidates_take_turns_and_ratios_go_round_by_round(self):
        now, calls = [0.0], []

        def candidate(name, seconds):
            def call():
                calls.append(name)
                now[0] += seconds
            return call

        t = timing.interleaved({"peer": candidate("peer", 0.3), "foci": candidate("foci", 0.2)},
                               2.0, clock=lambda: now[0])
        self.assertEqual(calls[:2], ["peer", "foci"])  # asked once how long they take
        self.assertEqual(calls[2:], ["peer", "foci"] * 5)
        self.assertAlmostEqual(t.median("foci"), 0.2)
        for ratio in t.ratio("peer", "foci"):
            self.assertAlmostEqual(ratio, 1.5)
        for time in t.microseconds("foci"):
            self.assertAlmostEqual(time, 2e5)

    def test_rounds_go_on_until_the_time_is_spent(self):
        now = [0.0]

        def call():
            now[0] += 0.25

        self.assertEqual(len(timing.interleaved({"a": call}, 3.0, lambda: now[0]).seconds["a"]), 12)
        self.assertEqual(len(timing.interleaved({"a": call}, 0.1, lambda: now[0]).seconds["a"]), 3)


if __name__ == "__main__":
    unittest.main()
