"""What the program says about itself, and to whoever mistypes."""
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import program  # noqa: E402

VERBS = ["demo", "train vit", "classify", "inspect", "bench attention", "verify",
         "version"]


class Help(program.ProgramTest):
    def test_help_fits_one_screen(self):
        text = self.ok("--help")
        self.assertLessEqual(len(text.splitlines()), 24)
        self.assertLessEqual(max(len(line) for line in text.splitlines()), 100)
        for verb in VERBS:
            self.assertIn(verb, text)
        self.assertEqual(self.ok("-h"), text)
        self.assertEqual(self.ok("help"), text)

    def test_every_verb_lists_its_options_with_defaults(self):
        for verb in VERBS:
            text = self.ok(*verb.split(), "--help")
            self.assertIn("foci " + verb, text)
            self.assertIn("--config", text)
        demo = self.ok("demo", "--help")
        for words in ("--threads", "--json", "--anywhere", "--report", "--steps"):
            self.assertIn(words, demo)
        # Newer CLI11 writes a default as [1].
        for words in (r"--minutes MINUTES( \[1\]|=1)", r"--seed N( \[1\]|=1)",
                      r"--out FOLDER( \[foci-demo\]|=foci-demo)"):
            self.assertRegex(demo, words)

    def test_version(self):
        facts = json.loads(self.ok("version", "--json"))
        self.assertLessEqual({"version", "commit", "compiler", "targets_built",
                              "targets_supported", "target", "threads", "libraries"}, set(facts))
        self.assertIn(facts["target"], facts["targets_supported"])
        self.assertLessEqual(set(facts["targets_supported"]), set(facts["targets_built"]))
        self.assertIn("Highway", facts["libraries"])
        self.assertIn(facts["version"], self.ok("version"))
        self.assertIn(facts["version"], self.ok("--version"))
        self.assertEqual(json.loads(self.ok("version", "--json", "--threads", 3))["threads"], 3)

    def test_targets_can_be_forced(self):
        for target in json.loads(self.ok("version", "--json"))["targets_supported"]:
            facts = json.loads(self.ok("version", "--json", env={"FOCI_TARGET": target}))
            self.assertEqual(facts["target"], target)
        self.refused("version", says="avx9", env={"FOCI_TARGET": "avx9"})
        self.refused("train", "vit", "--steps", "1", "--out", "model", says="avx9", code=2,
                     env={"FOCI_TARGET": "avx9"})
        self.assertEqual(self.files(), [])


class Mistakes(program.ProgramTest):
    def test_unknown_verbs(self):
        self.refused("demmo", says=["'demmo'", "did you mean demo?"], code=2)
        self.refused("xyzzy", says="'xyzzy'", code=2)
        self.refused(says="which verb?", code=2)
        self.refused("train", says=["train", "vit"], code=2)
        self.refused("train", "vti", says=["'vti'", "did you mean vit?"], code=2)

    def test_unknown_options(self):
        self.refused("demo", "--minuts", "1", says=["--minuts", "did you mean --minutes?"], code=2)
        self.refused("demo", "--stepz=5", says=["--stepz", "did you mean --steps?"], code=2)
        self.refused("demo", "stray", says="'stray'", code=2)
        self.refused("version", "--frobnicate", says="--frobnicate", code=2)

    def test_values_that_cannot_be(self):
        self.refused("demo", "--threads", "0", says="--threads", code=2)
        self.refused("demo", "--threads", "-1", says="--threads", code=2)
        self.refused("demo", "--threads", "two", says="--threads", code=2)
        self.refused("demo", "--seed", "-1", says="--seed", code=2)
        self.refused("demo", "--steps", says="--steps", code=2)
        # Not taken for the largest number that fits, for octal, or for infinity.
        for option, value in (("--steps", 1 << 63), ("--steps", -(1 << 63) - 1),
                              ("--batch", 1 << 64), ("--seed", 1 << 64), ("--layers", "1e2"),
                              ("--width", "0x40"), ("--batch", "010"),
                              ("--threads", 1 << 64), ("--scenes", 1 << 80),
                              ("--minutes", "1e999"), ("--lr", "inf"), ("--dropout", "0.1x")):
            self.refused("demo", option, value, says=[option + ":", str(value)], code=2)
        self.refused("classify", "model", "a.png", "--top", 1 << 70, says="--top", code=2)
        self.refused("demo", "--minutes", 1, "--steps", 1, says=["--minutes", "--steps"], code=2)
        self.refused("demo", "--scenes", "0", says="--scenes", code=2)
        for option, value, word in (
                ("--steps", "-5", "--steps"), ("--steps", "0", "--steps"),
                ("--minutes", "0", "minutes"), ("--minutes", "nan", "minutes"),
                ("--lr", "-1", "learning rate"), ("--batch", "0", "batch"),
                ("--width", "0", "width"), ("--heads", "3", "heads"),
                ("--layers", "-1", "layers"), ("--layers", "0", "--layers"),
                ("--pooling", "max", "--pooling"),
                ("--spec", "{\"score\":{\"kind\":\"dott\"}}", "--spec"),
                ("--spec", "{", "--spec"), ("--spec", "{\"scale\":[1,2]}", "scale"),
                ("--spec", "{\"masks\":[{\"kind\":\"keep\"}]}", "mask keep"),
                ("--spec", "{\"biases\":[{\"kind\":\"alibi\"}]}", "bias alibi"),
                ("--report", "no/page.html", "--report"), ("--dropout", "1.5", "dropout")):
            self.refused("train", "vit", option, value, "--out", "model", says=word, code=2)
            self.assertEqual(self.files(), [], (option, value))

    def test_arguments_that_lack(self):
        self.refused("classify", says="MODEL", code=2)
        self.refused("classify", "model", says="IMAGE", code=2)
        self.refused("inspect", "model", "image.png", says="--report", code=2)
        self.refused("verify", says="PATH", code=2)

    def test_a_result_that_cannot_be_written_is_a_failure(self):
        with open("/dev/full", "w") as full:
            self.refused("version", stdout=full, says="stdout", code=1)


class Config(program.ProgramTest):
    def config(self, value):
        text = value if isinstance(value, str) else json.dumps(value)
        return program.write(self.path("config.json"), text.encode())

    def test_what_is_dumped_can_be_read(self):
        dumped = self.ok("train", "vit", "--lr", "0.01", "--mirror", "--pooling", "mean",
                         "--dump-config")
        settings = json.loads(dumped)
        self.assertEqual(settings["lr"], 0.01)
        self.assertEqual(settings["pooling"], "mean")
        self.assertIs(settings["mirror"], True)
        self.assertIs(settings["anywhere"], False)
        self.assertEqual(settings["width"], 64)
        again = self.ok("train", "vit", "--config", self.config(dumped), "--dump-config")
        self.assertEqual(again, dumped)

    def test_the_command_line_goes_before_the_file(self):
        config = self.config({"lr": 0.5, "width": 32})
        for words in (["--config", config, "--lr", "0.25"], ["--lr=0.25", "--config=" + config]):
            settings = json.loads(self.ok("train", "vit", *words, "--dump-config"))
            self.assertEqual((settings["lr"], settings["width"]), (0.25, 32))

    def test_bad_files_are_refused(self):
        self.refused("demo", "--config", "nowhere.json", says="nowhere.json", code=2)
        for value, word in (("{", "not JSON"), ("[1]", "one JSON object"),
                            ({"stepss": 3}, "did you mean steps?"), ({"steps": [1]}, "steps"),
                            ({"steps": "many"}, "--steps"), ({"json": 1}, "json"),
                            ({"threads": 0}, "--threads"), ({"help": True}, "help")):
            self.refused("demo", "--config", self.config(value), says=word, code=2)


if __name__ == "__main__":
    program.main()
