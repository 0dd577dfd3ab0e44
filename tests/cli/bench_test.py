"""foci bench attention and train: what they print, what they refuse, how they end."""
import json
import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import program  # noqa: E402

SMALL = ["--shape", "1,2,1,24,32,8,4", "--seconds", "0.5", "--threads", "2"]


class Bench(program.ProgramTest):
    def bench(self, *options):
        return json.loads(self.ok("bench", "attention", *SMALL, "--json", *options))

    def test_json_names_all_that_was_measured(self):
        r = self.bench("--spec", '{"masks":[{"kind":"causal"}]}')
        self.assertEqual(r["shape"], {"B": 1, "H": 2, "Hk": 1, "N": 24, "M": 32, "D": 8, "Dv": 4})
        self.assertEqual(r["spec"]["masks"][0]["kind"], "causal")
        self.assertEqual(r["pairs"], 2 * 24 * 32)
        self.assertEqual(r["visible_pairs"], 2 * sum(range(9, 33)))
        self.assertEqual(r["threads"], 2)
        self.assertTrue(r["explain"].startswith("fused on SIMD target " + r["target"]))
        self.assertTrue(r["processor"])
        self.assertGreater(r["peak_gflops"], 0)
        self.assertIs(r["stopped"], False)
        self.assertEqual([(row["pass"], row["implementation"]) for row in r["rows"]],
                         [("forward", "fused"), ("forward", "plain"),
                          ("backward", "fused"), ("backward", "plain")])
        for row in r["rows"]:
            self.assertGreater(row["gflops"], 0)
            self.assertGreater(row["workspace_bytes"], 0)
            self.assertAlmostEqual(row["share_of_peak"], row["gflops"] / r["peak_gflops"])

    def test_the_table_says_the_same(self):
        text = self.ok("bench", "attention", *SMALL)
        for words in ("B 1 H 2 Hk 1 N 24 M 32 D 8 Dv 4, float32", "multiply-add peak",
                      "1536 of 1536 visible", "forward   fused", "backward  plain", "of peak",
                      "workspace"):
            self.assertIn(words, text)

    def test_clusters_spare_top_k_its_scores(self):
        options = ["--shape", "1,1,1,256,512,8,4", "--clusters", "8", "--spec",
                   '{"normalizer":{"kind":"topk","k":4}}']
        r = self.bench(*options)
        self.assertEqual(r["clusters"], 8)
        self.assertGreater(r["skipped_pairs"], 0)
        self.assertAlmostEqual(r["skipped_share"], r["skipped_pairs"] / r["visible_pairs"])
        text = self.ok("bench", "attention", *SMALL, *options)
        self.assertIn("%d of the visible pairs not scored" % r["skipped_pairs"], text)
        self.assertNotIn("skipped_pairs", self.bench())

    def test_every_tensor_of_a_spec_is_drawn(self):
        for spec in ({"score": {"kind": "additive"}, "normalizer": {"kind": "topk", "k": 3}},
                     {"masks": [{"kind": "key_lengths"}, {"kind": "segments"}, {"kind": "keep"},
                                {"kind": "causal", "align": "past"}]},
                     {"biases": [{"kind": "tensor"}, {"kind": "alibi"},
                                 {"kind": "relative1d", "max_distance": 5},
                                 {"kind": "relative2d", "grid": [4, 8]}],
                      "dropout": {"p": 0.1, "seed": 3}, "softcap": 5}):
            r = self.bench("--spec", json.dumps(spec), "--all-gradients")
            self.assertGreaterEqual(len(r["rows"]), 2, spec)
        self.assertEqual(self.bench("--dtype", "bfloat16")["dtype"], "bfloat16")

    def test_what_cannot_be_is_one_line(self):
        for words, says in (
                (["--shape", "1,2,3"], "--shape: '1,2,3'"),
                (["--clusters", "-1"], "--clusters: -1"),
                (["--shape", "1,2,1,24,32,8,4,5"], "--shape"),
                (["--shape", "1,2,1,24,32,8,x"], "--shape"),
                (["--shape", "1,2,1,24,32,8,"], "--shape"),
                (["--shape", ""], "--shape"),
                (["--shape", "1,3,2,24,32,8,4"], "do not divide"),
                (["--shape", "1,2,1,-24,32,8,4"], "shape.N"),
                (["--shape", "1,1,1,%d,%d,1,1" % (1 << 40, 1 << 40)], "shape"),
                (["--shape", "1,1,1,%d,1,64,64" % (1 << 29)], "memory"),
                (["--shape", "99999999999999999999,1,1,1,1,1,1"], "--shape"),
                (["--spec", "{"], "--spec"),
                (["--spec", '{"score":{"kind":"dott"}}'], "--spec"),
                (["--spec", '{"scale":[1,2,3]}'], "scale"),
                (["--spec", '{"biases":[{"kind":"relative2d","grid":[2,2]}]}'], "grid"),
                (["--dtype", "float64"], "--dtype"),
                (["--seconds", "0"], "--seconds: 0 given, a number above 0"),
                (["--seconds", "soon"], "--seconds: soon given, a number above 0"),
                (["--clusters", "010"], "--clusters: 010"),
                (["--seed", "-1"], "--seed"), (["--threads", "0"], "--threads")):
            self.refused("bench", "attention", *SMALL, *words, says=says, code=2)
        self.refused("bench", says="usage: foci bench attention|train", code=2)
        self.refused("bench", "attentoin", says="did you mean attention?", code=2)

    def test_training_steps(self):
        r = json.loads(self.ok("bench", "train", "--seconds", "0.01", "--profile", "--json",
                               "--threads", "2"))
        (w,) = r["workloads"]
        self.assertEqual(w["workload"], "vit-demo")
        self.assertGreaterEqual(w["steps"], 5)
        self.assertGreater(w["share_of_peak"], 0)
        self.assertAlmostEqual(sum(row["share"] for row in w["profile"]), 1)
        text = self.ok("bench", "train", "--seconds", "0.01", "--profile", "--threads", "1")
        for words in ("vit-demo", "1 threads", "% of peak", "linear", "optimiser", "other"):
            self.assertIn(words, text)
        for words, says in ((["--workload", "vit"], "--workload: 'vit' given, there are vit-demo"),
                            (["--seconds", "0"], "--seconds")):
            self.refused("bench", "train", *words, says=says, code=2)

    def test_memory_that_is_not_to_be_had(self):
        self.refused("bench", "attention", "--shape", "1,1,1,1000000,1000000,64,64", says="memory",
                     code=2, limit_memory=1 << 30)

    def test_interrupted(self):
        p = subprocess.Popen([program.PROGRAM, "bench", "attention", "--shape", "1,1,1,64,64,8,8",
                              "--seconds", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
        try:
            p.communicate(timeout=2)
            self.fail("ended by itself")
        except subprocess.TimeoutExpired:
            p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
        self.assertEqual(p.returncode, 130, err)
        self.assertIn("stopped", out)
        self.assertEqual(err, "")


if __name__ == "__main__":
    program.main()
