"""Training as a person lives it: demo, resume, kill, Ctrl-C, a full disk, a loss that explodes."""
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import program  # noqa: E402
from program import TINY  # noqa: E402

# Files that hold what a run learned; train.json and the clock inside training.safetensors differ.
WEIGHTS = ("model.safetensors", "config.json")


class Demo(program.ProgramTest):
    def test_a_short_demo_tells_its_numbers_and_writes_its_page(self):
        out = json.loads(self.ok("demo", *TINY, "--steps", 8, "--scenes", 60, "--json", "-q"))
        self.assertEqual(out["steps"], 8)
        rates = out["landmark_hit_rate"]
        for estimate in (out["accuracy"], rates["trained"], rates["untrained"]):
            self.assertLessEqual(0, estimate["low"])
            self.assertLessEqual(estimate["low"], estimate["value"])
            self.assertLessEqual(estimate["value"], estimate["high"])
            self.assertLessEqual(estimate["high"], 1)
        self.assertTrue(0.05 < out["chance"] < 0.5, out["chance"])
        self.assertGreater(out["seconds"], 0)
        self.assertAlmostEqual(out["ms_per_step"], 1000 * out["seconds"] / 8, places=6)
        page = program.read(self.path(out["report"])).decode()
        self.assertLess(len(page), 2 << 20)
        for words in ("Where it looks", "Landmark hit rate", "Attention entropy", "How it learned",
                      "What it mixes up", "Its mistakes", "SHA-256", "CC BY 4.0"):
            self.assertIn(words, page)

    def test_one_scene_is_said_to_be_one(self):
        out = json.loads(self.ok("demo", *TINY, "--steps", 1, "--scenes", 1, "--json", "-q"))
        for estimate in (out["accuracy"], *list(out["landmark_hit_rate"].values())[1:]):
            self.assertEqual((estimate["count"], estimate["independent"]), (1, 1))
            self.assertGreater(estimate["high"] - estimate["low"], 0.7)  # Wilson's, of 0 or 1 in 1
        self.assertIn("only 1 scene: 95 % interval",
                      self.ok("demo", *TINY, "--steps", 1, "--scenes", 1, "-q"))
        page = program.read(self.path("foci-demo/report.html")).decode()
        self.assertIn("only 1 scene: 95 % interval", page)
        self.assertNotIn("0.0 – 0.0 %", page)
        self.assertNotIn("100.0 – 100.0 %", page)

    def test_scenes_of_one_digit_count_once(self):
        out = json.loads(self.ok("demo", *TINY, "--steps", 1, "--scenes", 900, "--json", "-q"))
        self.assertEqual(out["accuracy"]["count"], 900)
        self.assertLess(out["accuracy"]["independent"], 450)

    def test_again_elsewhere_and_on_the_clock(self):
        for extra in (["--anywhere"], ["--report", "page.html"]):
            out = json.loads(self.ok("demo", *TINY, "--minutes", "0.005", "--scenes", 10, "--json",
                                     "-q", *extra))
            self.assertGreaterEqual(out["steps"], 1)
            self.assertTrue(os.path.exists(self.path(out["report"])))

    def test_progress_goes_to_stderr_and_quiet_silences_it(self):
        loud = self.foci("demo", *TINY, "--steps", 4, "--scenes", 5)
        self.assertIn("ETA", loud.stderr)
        self.assertNotIn("\r", loud.stderr)
        self.assertNotIn("ETA", loud.stdout)
        quiet = self.foci("demo", *TINY, "--steps", 4, "--scenes", 5, "--quiet")
        self.assertEqual(quiet.stderr, "")
        self.assertIn("right on unseen digits", quiet.stdout)


class Pages(program.ProgramTest):
    def test_pictures_of_one_patch_get_a_page(self):
        for kind in "ab":
            for i in range(4):
                program.write(self.path("d", kind, f"{i}.png"),
                              program.png(32, 32, lambda x, y: 40 * i + (x if kind == "a" else y)))
        # log 2: the patch and the class token. Without that token there is nothing to choose.
        for pooling, words in (("class_token", "a full bar is 0.69 nats"), ("mean", "no bar, since"),
                               ("attention", "no bar, since")):
            out = self.ok("train", "vit", *TINY, "--data", "d", "--patch", 32, "--steps", 2, "-q",
                          "--out", pooling, "--report", "page.html", "--pooling", pooling)
            self.assertIn("only 2 pictures", out)
            page = program.read(self.path("page.html")).decode()
            self.assertIn("Attention entropy", page)
            self.assertIn(words, page)
            self.ok("inspect", pooling, "d/a/0.png", "--report", "page.html")
            self.assertIn(words, program.read(self.path("page.html")).decode())

    def test_a_full_bar_of_entropy_holds_every_number(self):
        self.ok("demo", *TINY, "--steps", 1, "--scenes", 1, "--out", "m", "-q")
        large = program.write(self.path("large.png"), program.png(64, 64, lambda x, y: x))
        small = program.write(self.path("small.png"), program.png(4, 4, lambda x, y: 90))
        out = json.loads(self.ok("inspect", "m", large, small, small, small, "--report", "page.html",
                                 "--json"))
        page = program.read(self.path("page.html")).decode()
        full = float(re.search(r"a full bar is ([0-9.]+) nats", page).group(1))
        tokens = [p["grid"][0] * p["grid"][1] + 1 for p in out["pictures"]]
        self.assertAlmostEqual(full, sum(math.log(n) for n in tokens) / 4, places=2)
        heads = len(out["pictures"][0]["heads"])
        for h in range(heads):
            mean = sum(p["heads"][h]["entropy"] for p in out["pictures"]) / 4
            self.assertLessEqual(mean, full + 5e-3)
        for picture, n in zip(out["pictures"], tokens):
            for head in picture["heads"]:
                self.assertLessEqual(head["entropy"], math.log(n) + 1e-5)


class Bits(program.ProgramTest):
    def weights(self, folder):
        return [program.read(self.path(folder, name)) for name in WEIGHTS]

    def train(self, out, *extra):
        return ("train", "vit", *TINY, "--out", out, "-q", *extra)

    def test_threads_change_no_bit_and_seeds_do(self):
        self.ok(*self.train("whole", "--steps", 30))
        self.ok(*self.train("one", "--steps", 30, "--threads", 1))
        self.assertEqual(self.weights("one"), self.weights("whole"))
        self.ok(*self.train("other", "--steps", 30, "--seed", 2))
        self.assertNotEqual(self.weights("other"), self.weights("whole"))

    def started(self, out, *extra):
        """A run that has begun to train, seen by its checkpoint being rewritten."""
        child = subprocess.Popen(
            [program.PROGRAM, *self.train(out, "--checkpoint-seconds", "0.02", *extra)],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(child.stdout.close)
        self.addCleanup(child.stderr.close)
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        file, first = self.path(out, "training.safetensors"), None
        for _ in range(12000):
            if child.poll() is not None:
                self.fail("the run ended before it could be stopped: " + child.stderr.read())
            if os.path.exists(file):
                now = os.stat(file).st_ino
                first = first or now
                if now != first:
                    return child
            time.sleep(0.01)
        self.fail("no checkpoint was written")

    def test_kill_and_resume_ends_with_the_same_bits(self):
        steps = ["--steps", "400"]
        self.ok(*self.train("whole", *steps))
        child = self.started("killed", *steps)
        child.send_signal(signal.SIGKILL)
        child.wait()
        self.assertEqual(child.returncode, -signal.SIGKILL)
        self.refused(*self.train("killed", *steps), says=["killed", "resume"], code=2)
        self.ok("train", "vit", "--out", "killed", "--resume", "-q")
        self.assertEqual(self.weights("killed"), self.weights("whole"))

    def test_interrupts_keep_a_checkpoint(self):
        child = self.started("model", "--steps", "1000000")
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=120)
        self.assertEqual(child.returncode, 130, said)
        self.assertEqual([f for f in self.files("model") if ".tmp" in f], [])
        self.ok("train", "vit", "--out", "model", "--resume", "--steps", 1, "-q")

    def test_a_demo_resumes_too(self):
        demo = ["demo", *TINY, "--steps", 30, "--scenes", 5, "-q"]
        self.ok(*demo, "--out", "whole")
        self.ok(*demo, "--out", "part")
        self.ok(*demo, "--out", "part", "--resume")
        self.assertEqual(self.weights("part"), self.weights("whole"))

    def test_a_resumed_run_may_be_given_minutes_instead_of_steps(self):
        self.ok(*self.train("model", "--steps", 3))
        more = ["train", "vit", "--out", "model", "--resume", "-q", "--json"]
        self.assertEqual(json.loads(self.ok(*more))["steps"], 3)
        # So long have three steps surely not taken.
        self.assertGreater(json.loads(self.ok(*more, "--minutes", "0.05"))["steps"], 3)
        self.refused(*more, "--minutes", 1, "--steps", 9, says=["--minutes", "--steps"], code=2)

    def test_what_a_resumed_run_may_not_change(self):
        self.ok(*self.train("model", "--steps", 3))
        resume = ["train", "vit", "--out", "model", "--resume", "-q"]
        self.refused(*resume, "--width", 32, says="model", code=2)
        self.refused(*resume, "--batch", 8, says="batch", code=2)
        self.refused(*resume, "--seed", 5, says="seed", code=2)
        self.refused("train", "vit", "--out", "nowhere", "--resume", says="nowhere", code=2)
        whole = program.read(self.path("model", "training.safetensors"))
        program.write(self.path("model", "training.safetensors"), whole[:-100])
        self.refused(*resume, says="training.safetensors", code=2)


class Failures(program.ProgramTest):
    def test_a_full_disk_leaves_no_half_file(self):
        self.refused("train", "vit", *TINY, "--steps", 3, "--out", "model", "-q", says="model",
                     code=1, limit_file=8192)
        self.assertEqual(os.listdir(self.folder), [])
        # Neither where the disk fills up later, nor in a folder that was there.
        os.makedirs(self.path("there", "config.json"))
        self.refused("train", "vit", *TINY, "--steps", 3, "--out", "there", "-q",
                     says="config.json", code=1)
        self.assertEqual(os.listdir(self.path("there")), ["config.json"])
        self.refused("demo", *TINY, "--steps", 3, "--out", "deep/er", "-q", says="deep/er", code=1,
                     limit_file=100)
        self.assertFalse(os.path.exists(self.path("deep")))
        # The disk fills up in the middle of a run that goes on.
        model = self.tiny_model("other")
        before = program.read(self.path(model, "training.safetensors"))
        self.refused("train", "vit", "--out", model, "--resume", "--steps", 6, "-q", says=model,
                     code=1, limit_file=8192)
        self.assertEqual(program.read(self.path(model, "training.safetensors")), before)
        self.assertEqual([f for f in self.files() if ".tmp" in f], [])
        program.write(self.path("a.png"), program.png(16, 16, lambda x, y: 100))
        self.refused("inspect", model, "a.png", "--report", "page.html", says="page.html", code=1,
                     limit_file=4096)
        self.assertFalse(os.path.exists(self.path("page.html")))

    def test_folders_that_cannot_be_made(self):
        program.write(self.path("file"), b"")
        self.refused("train", "vit", *TINY, "--steps", 3, "--out", "file/model", "-q",
                     says="file/model")
        # Told before the work, not after.
        for path in ("no/page.html", "file/page.html", "."):
            self.refused("demo", "--minutes", 60, "--report", path, says=["--report", path], code=2)
        self.assertFalse(os.path.exists(self.path("foci-demo")))

    def test_a_demo_overwrites_demos_only(self):
        model = self.tiny_model()
        before = program.read(self.path(model, "model.safetensors"))
        self.refused("demo", *TINY, "--steps", 1, "--scenes", 5, "--out", model, "-q", says="--out",
                     code=2)
        self.assertEqual(program.read(self.path(model, "model.safetensors")), before)
        # What is wrong with a new demo leaves the old one whole.
        self.ok("demo", *TINY, "--steps", 1, "--scenes", 5, "-q")
        before = program.read(self.path("foci-demo", "model.safetensors"))
        self.refused("demo", *TINY, "--steps", 1, "--heads", 3, "-q", says="heads", code=2)
        self.assertEqual(program.read(self.path("foci-demo", "model.safetensors")), before)

    def test_weights_that_explode_in_the_last_step_are_not_kept(self):
        self.refused("train", "vit", *TINY, "--steps", 1, "--lr", "1e30", "--out", "model", "-q",
                     says=["step 1", "learning rate"], code=1)
        program.write(self.path("a.png"), program.png(16, 16, lambda x, y: 100))
        answer = json.loads(self.ok("classify", "model", "a.png", "--json"))
        self.assertTrue(0 < answer[0]["classes"][0]["probability"] <= 1)

    def test_names_that_are_not_utf8(self):
        out = b"model\xe9"
        command = [os.fsencode(program.PROGRAM), b"train", b"vit", *map(str.encode, TINY),
                   b"--steps", b"1", b"--json", b"-q", b"--out", out]
        done = subprocess.run(command, stdout=subprocess.PIPE, cwd=os.fsencode(self.folder),
                              check=True)
        self.assertEqual(json.loads(done.stdout)["steps"], 1)
        self.assertTrue(os.path.exists(os.path.join(os.fsencode(self.folder), out,
                                                    b"model.safetensors")))

    def test_a_loss_that_explodes_stops_and_keeps_the_last_good_checkpoint(self):
        said = self.refused("train", "vit", *TINY, "--steps", 500, "--lr", "1e38", "--warm-up", "0",
                            "--clip", "0", "--checkpoint-seconds", "1000", "--out", "model", "-q",
                            says="step", code=1)
        self.assertRegex(said, r"step \d+")
        program.write(self.path("a.png"), program.png(16, 16, lambda x, y: 100))
        answer = json.loads(self.ok("classify", "model", "a.png", "--json"))
        self.assertTrue(0 < answer[0]["classes"][0]["probability"] <= 1)


if __name__ == "__main__":
    program.main()
