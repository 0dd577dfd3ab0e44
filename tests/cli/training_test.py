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
        before = [program.read(self.path("model", name)) for name in self.files("model")]
        self.refused(*resume, "--width", 32, code=2,
                     says=["model", "--width is 16 in this run, 32 was given"])
        self.refused(*resume, "--batch", 8, "--lr", "0.1", code=2,
                     says=["--batch is 4 in this run, 8 was given",
                           "--lr is 0.003 in this run, 0.1 was given"])
        self.refused(*resume, "--seed", 5, says="--seed is 1", code=2)
        self.refused(*resume, "--anywhere", says="--anywhere was not given", code=2)
        self.refused(*resume, "--data", ".", says="--data was not given", code=2)
        self.refused(*resume, "--spec", '{"score":{"kind":"cosine"}}', says="--spec is {}", code=2)
        config = program.write(self.path("settings.json"), b'{"width": 32, "batch": 4}')
        self.refused(*resume, "--config", config, says="--width is 16", code=2)
        self.assertEqual([program.read(self.path("model", name)) for name in self.files("model")],
                         before)
        # The same in other words, and what changes nothing of the weights.
        self.ok(*resume, "--lr", "3.0e-3", "--spec", "{ }", "--width", 16, "--checkpoint-seconds",
                7, "--checkpoint-layers", "--report", "page.html", "--threads", 1)
        self.refused("train", "vit", "--out", "nowhere", "--resume", says="nowhere", code=2)
        whole = program.read(self.path("model", "training.safetensors"))
        program.write(self.path("model", "training.safetensors"), whole[:-100])
        self.refused(*resume, says="training.safetensors", code=2)


    def stopped(self, *words):
        """Ctrl-C once it trains; the command that it names to go on."""
        child = subprocess.Popen([program.PROGRAM, *map(str, words)], cwd=self.folder,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(child.kill)
        file = self.path(words[words.index("--out") + 1], "model.safetensors")
        for _ in range(12000):
            if os.path.exists(file) or child.poll() is not None:
                break
            time.sleep(0.005)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=120)
        self.assertEqual(child.returncode, 130, said)
        self.assertIn("go on with: ", said)
        return said.splitlines()[-1].split("go on with: ")[1]

    def test_the_command_that_is_named_goes_on_with_the_same_run(self):
        tiny = [*TINY, "--heads", 4]
        more = ["--lr", "0.01", "--weight-decay", "0.1", "--seed", 7, "--pooling", "mean",
                "--steps", 300, "--anywhere"]
        for verb in (["demo", "--scenes", 5], ["train", "vit", "--report", "page.html"]):
            whole, part = verb[0] + " whole", verb[0] + "'s part"
            self.ok(*verb, *tiny, *more, "--out", whole, "-q")
            command = self.stopped(*verb, *tiny, *more, "--json", "--out", part)
            done = subprocess.run(command, shell=True, cwd=self.folder, text=True,
                                  capture_output=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(json.loads(done.stdout)["steps"], 300)
            self.assertEqual(self.weights(part), self.weights(whole))
            self.assertEqual(self.files(part), self.files(whole))

    def test_killed_again_and_again_ends_with_the_same_bits_and_leaves_nothing(self):
        steps = ["--steps", "300"]
        self.ok(*self.train("whole", *steps))
        self.started("part", *steps).kill()
        kills = 0
        for i in range(40):
            child = subprocess.Popen([program.PROGRAM, "train", "vit", "--out", "part", "--resume",
                                      "-q"], cwd=self.folder, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.PIPE, text=True)
            time.sleep(0.03 + 0.011 * (i % 9))
            child.kill()
            _, said = child.communicate()
            self.assertEqual(said, "")
            kills += child.returncode == -signal.SIGKILL
        self.assertGreater(kills, 3)
        self.ok("train", "vit", "--out", "part", "--resume", "-q")
        self.assertEqual(self.weights("part"), self.weights("whole"))
        self.assertEqual(self.files("part"), self.files("whole"))

    def test_what_killed_runs_left_is_removed_and_nothing_else(self):
        model = self.tiny_model()
        gone = subprocess.Popen(["true"])
        gone.wait()
        left = [f"{name}.tmp-{gone.pid}-{i}" for i, name in enumerate(
            ("training.safetensors", "model.safetensors", "config.json", "report.html"))]
        kept = [f"mine.tmp-{gone.pid}-0", "model.safetensors.tmp", "model.safetensors.tmp-x-1",
                f"model.safetensors.tmp-{gone.pid}", f"model.safetensors.tmp-{os.getpid()}-0"]
        for name in left + kept:
            program.write(self.path(model, name), b"half")
        page = program.write(self.path(f"page.html.tmp-{gone.pid}-3"), b"half")
        self.ok("train", "vit", "--out", model, "--resume", "-q", "--report", "page.html")
        files = self.files(model)
        self.assertEqual([f for f in left if f in files], [])
        self.assertEqual([f for f in kept if f not in files], [])
        self.assertFalse(os.path.exists(page))
        self.assertNotIn(".lock", files)

    def test_two_runs_in_one_folder(self):
        child = self.started("model", "--steps", "1000000")
        start = time.monotonic()
        for words in (["train", "vit", "--resume"], ["train", "vit", *TINY], ["demo"]):
            self.refused(*words, "--out", "model", "-q", code=2,
                         says=["--out", "model", f"process {child.pid}"])
        self.assertLess(time.monotonic() - start, 20)
        child.kill()
        child.wait()
        self.ok("train", "vit", "--out", "model", "--resume", "--steps", 1, "-q")

    def test_a_folder_knows_its_verb(self):
        self.ok("demo", *TINY, "--steps", 2, "--scenes", 5, "--out", "show", "-q")
        model = self.tiny_model()
        before = {f: [program.read(self.path(f, name)) for name in self.files(f)]
                  for f in ("show", model)}
        train, demo = ["train", "vit", "-q", "--out"], ["demo", "-q", "--out"]
        self.refused(*train, "show", "--resume", says=["show", "foci demo"], code=2)
        self.refused(*train, "show", says=["show", "foci demo"], code=2)
        self.refused(*demo, model, "--resume", says=[model, "foci train vit"], code=2)
        self.refused(*demo, model, says=[model, "foci train vit"], code=2)
        self.refused(*train, "nowhere", "--resume", says="nowhere", code=2)
        for f, files in before.items():
            self.assertEqual([program.read(self.path(f, name)) for name in self.files(f)], files)
        self.ok(*demo, "show", *TINY, "--steps", 1, "--scenes", 5)

    def test_a_page_of_another_model_does_not_stay(self):
        demo = ["demo", *TINY, "--scenes", 5, "--out", "m"]
        self.ok(*demo, "--steps", 2, "-q")
        page = self.path("m", "report.html")
        self.assertTrue(os.path.exists(page))
        self.started_again = subprocess.Popen([program.PROGRAM, *map(str, demo), "--steps",
                                               "1000000", "-q"], cwd=self.folder)
        for _ in range(12000):
            if not os.path.exists(page):
                break
            time.sleep(0.01)
        self.started_again.send_signal(signal.SIGINT)
        self.assertEqual(self.started_again.wait(), 130)
        self.assertFalse(os.path.exists(page))


class Data(program.ProgramTest):
    """A run goes on with the pictures that it began with, or says what changed."""

    def setUp(self):
        super().setUp()
        for c, name in enumerate(("cat", "dog")):
            for i in range(8):
                program.write(self.path("data", name, f"{i}.png"), program.png(
                    8, 8, lambda x, y, v=100 * c + 10 * i: v + x))
        self.ok("train", "vit", *TINY, "--data", "data", "--steps", 3, "--out", "m", "-q")
        self.resume = ["train", "vit", "--resume", "--out", "m", "--steps", 4, "-q"]

    def move(self, old, new):
        os.makedirs(os.path.dirname(self.path("data", new)), exist_ok=True)
        os.rename(self.path("data", old), self.path("data", new))

    def changed(self, *says):
        before = program.read(self.path("m", "model.safetensors"))
        self.refused(*self.resume, says=["the pictures changed", *says], code=2)
        self.assertEqual(program.read(self.path("m", "model.safetensors")), before)

    def test_unchanged_or_moved_as_a_whole(self):
        self.ok(*self.resume)
        os.rename(self.path("data"), self.path("elsewhere"))
        self.refused(*self.resume, says=["--data", "no such folder"], code=2)
        self.ok(*self.resume, "--data", "elsewhere")
        # From then on it is known to lie there.
        self.ok(*self.resume)

    def test_moved_between_classes(self):
        self.move("cat/1.png", "dog/91.png")
        self.move("cat/2.png", "dog/92.png")
        self.changed("2 moved from cat to dog (dog/91.png)")

    def test_changed_places(self):
        self.move("cat/3.png", "x.png")
        self.move("dog/3.png", "cat/3.png")
        self.move("x.png", "dog/3.png")
        self.changed("1 moved from cat to dog", "1 moved from dog to cat")

    def test_gone_new_changed_and_renamed(self):
        os.remove(self.path("data/cat/1.png"))
        os.remove(self.path("data/cat/2.png"))
        program.write(self.path("data/dog/new.png"), program.png(8, 8, lambda x, y: 3 * x))
        program.write(self.path("data/dog/4.png"), program.png(8, 8, lambda x, y: 5 * x))
        self.move("dog/5.png", "dog/five.png")
        self.changed("2 are gone from cat (cat/1.png)", "1 is new in dog (dog/new.png)",
                     "1 has other bytes in dog (dog/4.png)",
                     "1 has another name in dog (dog/five.png)")

    def test_classes(self):
        self.move("cat", "kitten")
        self.changed("class cat is called kitten now")
        self.move("kitten", "cat")
        for i in range(2):
            program.write(self.path(f"data/bird/{i}.png"), program.png(8, 8, lambda x, y: x + i))
        self.changed("class bird is new")
        os.remove(self.path("data/bird/0.png"))
        os.remove(self.path("data/bird/1.png"))
        os.rmdir(self.path("data/bird"))
        self.ok(*self.resume)

    def test_without_the_list_of_pictures_a_change_is_seen_all_the_same(self):
        os.remove(self.path("m/pictures.txt"))
        self.ok(*self.resume)
        program.write(self.path("m/pictures.txt"), b"nonsense")
        self.move("cat/1.png", "dog/91.png")
        self.changed("pictures.txt")


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
