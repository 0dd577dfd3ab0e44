"""Files that are broken, lie, or are not there: one line, nothing half-written."""
import json
import os
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import program  # noqa: E402
from program import JPEG, png, safetensors, write  # noqa: E402

# Enough for the program, far less than the lying files ask for.
MEMORY = 3 << 30


class Pictures(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = self.tiny_model()
        write(self.path("good.png"), png(16, 12, lambda x, y: 15 * x))
        write(self.path("good.jpg"), JPEG)

    def both_refuse(self, file, says=""):
        self.refused("classify", self.model, file, says=[file, says], code=2,
                     limit_memory=MEMORY)
        # Beside another one it is named, and the other is answered.
        result = self.foci("classify", self.model, file, "good.png", limit_memory=MEMORY)
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertIn(file, result.stderr)
        self.assertEqual([line.split("\t")[0] for line in result.stdout.splitlines()],
                         ["good.png"])
        self.refused("inspect", self.model, file, "--report", "page.html", says=[file, says],
                     code=2, limit_memory=MEMORY)
        self.assertFalse(os.path.exists(self.path("page.html")))

    def test_good_ones_are_named_in_order(self):
        lines = self.ok("classify", self.model, "good.png", "good.jpg").splitlines()
        self.assertEqual([line.split("\t")[0] for line in lines], ["good.png", "good.jpg"])
        answer = json.loads(self.ok("classify", self.model, "good.jpg", "--json", "--top", 20))
        shares = [c["probability"] for c in answer[0]["classes"]]
        self.assertEqual(len(shares), 10)
        self.assertAlmostEqual(sum(shares), 1, places=5)
        self.assertEqual(shares, sorted(shares, reverse=True))

    def test_missing_empty_and_not_a_picture(self):
        self.both_refuse("nowhere.png")
        write(self.path("empty.png"), b"")
        self.both_refuse("empty.png")
        write(self.path("text.png"), b"this is no picture at all, not even a little")
        self.both_refuse("text.png")
        self.both_refuse("model")

    def test_other_kinds_are_named(self):
        write(self.path("x.webp"), b"RIFF\x24\0\0\0WEBPVP8 " + bytes(20))
        self.both_refuse("x.webp", "it looks like a WebP picture")
        write(self.path("x.pt"), b"PK\3\4" + bytes(26) + b"archive/data.pkl" + bytes(40))
        self.both_refuse("x.pt", "it looks like a checkpoint of PyTorch")
        write(self.path("model", "model.safetensors"), png(8, 8, lambda x, y: 0))
        self.refused("classify", "model", "good.png", code=2,
                     says="model/model.safetensors: looks like a PNG picture")
        write(self.path("model", "model.safetensors"), b"")
        self.refused("classify", "model", "good.png", code=2, says="the file is empty")

    def test_orientation_of_a_png_is_applied(self):
        exif = b"MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"  # a quarter turn
        plain = png(24, 8, lambda x, y: 10 * x)
        write(self.path("turned.png"), plain[:33] + program.chunk(b"eXIf", exif) + plain[33:])
        write(self.path("plain.png"), plain)
        out = json.loads(self.ok("inspect", self.model, "plain.png", "turned.png", "--report",
                                 "page.html", "--json"))
        grids = [p["grid"] for p in out["pictures"]]
        self.assertEqual(grids, [[2, 6], [6, 2]])

    def test_the_others_are_answered_and_the_bad_ones_told(self):
        write(self.path("bad.png"), b"no picture")
        images = ["nowhere.png", "good.png", "bad.png", "good.jpg"]
        result = self.foci("classify", self.model, *images, "--json")
        self.assertEqual(result.returncode, 1)
        answers = json.loads(result.stdout)
        self.assertEqual([a["image"] for a in answers], images)
        self.assertEqual(["error" in a for a in answers], [True, False, True, False])
        for name in ("nowhere.png", "bad.png"):
            self.assertIn(name, result.stderr)
        alone = json.loads(self.ok("classify", self.model, "good.png", "good.jpg", "--json"))
        self.assertEqual([answers[1], answers[3]], alone)
        result = self.foci("inspect", self.model, *images, "--report", "page.html", "--json")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr.count("\n"), 2)
        out = json.loads(result.stdout)
        self.assertEqual([p["image"] for p in out["pictures"]], ["good.png", "good.jpg"])
        self.assertEqual([u["image"] for u in out["unread"]], ["nowhere.png", "bad.png"])
        self.assertIn("2 pictures", program.read(self.path("page.html")).decode())
        # None at all: all are named, nothing is written.
        result = self.foci("inspect", self.model, "nowhere.png", "bad.png", "--report", "none.html")
        self.assertEqual(result.returncode, 2)
        self.assertEqual(result.stderr.count("\n"), 3)
        self.assertFalse(os.path.exists(self.path("none.html")))

    def test_truncated(self):
        for name in ("good.png", "good.jpg"):
            data = program.read(self.path(name))
            for keep in (4, 20, len(data) // 2, len(data) - 14):
                write(self.path("cut-" + name), data[:keep])
                self.both_refuse("cut-" + name)

    def test_larger_than_memory(self):
        write(self.path("huge.png"), png(4, 4, lambda x, y: 0, claimed=(2000000000, 2000000000)))
        self.both_refuse("huge.png", "2000000000")
        write(self.path("wide.png"), png(4, 4, lambda x, y: 0, claimed=(1000000, 1000)))
        self.both_refuse("wide.png", "1000000")
        at = JPEG.index(b"\xff\xc0")
        lying = JPEG[:at + 5] + struct.pack(">HH", 65500, 65500) + JPEG[at + 9:]
        write(self.path("huge.jpg"), lying)
        self.both_refuse("huge.jpg", "65500")

    def test_inspect_writes_a_page_and_numbers(self):
        out = json.loads(self.ok("inspect", self.model, "good.png", "good.jpg", "--report",
                                 "page.html", "--json"))
        self.assertEqual([p["image"] for p in out["pictures"]], ["good.png", "good.jpg"])
        self.assertEqual(out["pictures"][0]["grid"], [3, 4])
        page = program.read(self.path("page.html")).decode()
        self.assertIn("Content-Security-Policy", page)
        self.assertIn("good.jpg", page)
        self.assertNotIn("<script", page)


class Folders(program.ProgramTest):
    def train(self, folder, says):
        self.refused("train", "vit", *program.TINY, "--steps", 2, "--data", folder, "--out",
                     "model", says=says, code=2)
        self.assertFalse(os.path.exists(self.path("model")))

    def test_data_that_is_none(self):
        self.train("nowhere", "nowhere")
        os.makedirs(self.path("empty"))
        self.train("empty", "empty")
        os.makedirs(self.path("hollow", "cats"))
        os.makedirs(self.path("hollow", "dogs"))
        self.train("hollow", "hollow")
        for name in ("a.png", "b.png"):
            write(self.path("single", "cats", name), png(8, 8, lambda x, y: 9))
        self.train("single", "single")
        for name in ("cats/a.png", "cats/b.png", "dogs/a.png", "dogs/b.png"):
            write(self.path("bad", name), png(8, 8, lambda x, y: 9)[:30 if "s/b" in name else None])
        self.train("bad", "b.png")

    def fill(self, *classes, count=4):
        for c, name in enumerate(classes):
            for i in range(count):
                write(self.path("data", name, f"{i}.png"),
                      png(8, 8, lambda x, y, v=100 * c + 2 * i + 1: v))

    def test_all_bad_pictures_are_named_at_once(self):
        self.fill("cats", "dogs", count=40)
        write(self.path("data/cats/3.png"), b"")
        write(self.path("data/dogs/8.png"), b"GIF89a")
        self.train("data", ["2 of 80 pictures", "cats/3.png", "dogs/8.png", "empty"])
        for i in range(40):
            write(self.path(f"data/cats/{i}.png"), png(8, 8, lambda x, y: 9)[:50])
        write(self.path("data/dogs/9.png"), b"no")
        for i in range(15):
            write(self.path(f"data/dogs/{20 + i}.png"), b"no")
        result = self.foci("train", "vit", *program.TINY, "--data", "data", "--out", "model")
        self.assertEqual(result.returncode, 2)
        lines = result.stderr.splitlines()
        self.assertIn("57 of 80 pictures", lines[0])
        self.assertEqual(len(lines), 52)
        self.assertIn("7 more", lines[-1])
        self.assertFalse(os.path.exists(self.path("model")))

    def test_what_is_left_out_is_counted_and_told(self):
        self.fill("cats", "dogs")
        os.rename(self.path("data/cats/0.png"), self.path("data/cats/0.JPE"))
        write(self.path("data/cats/jpeg.jfif"), JPEG)
        write(self.path("data/cats/picture.dat"), png(8, 8, lambda x, y: 3))
        write(self.path("data/dogs/deep/er/1.PNG"), png(8, 8, lambda x, y: 5))
        for name in ("cats/1.webp", "cats/2.webp", "dogs/3.WEBP"):
            write(self.path("data", name), b"RIFF\0\0\0\0WEBPVP8 ")
        write(self.path("data/dogs/a.gif"), b"GIF89a")
        write(self.path("data/dogs/unknown"), b"II*\0....")
        write(self.path("data/dogs/notes.txt"), b"notes")
        write(self.path("data/cats/.hidden.png"), png(8, 8, lambda x, y: 5))
        write(self.path("data/loose.png"), png(8, 8, lambda x, y: 5))
        os.symlink("../cats", self.path("data/dogs/link"))
        os.symlink("nowhere.png", self.path("data/dogs/broken.png"))
        os.mkfifo(self.path("data/dogs/pipe.png"))
        result = self.foci("train", "vit", *program.TINY, "--steps", 1, "--data", "data", "--out",
                           "model", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        data = json.loads(result.stdout)["data"]
        self.assertEqual(data["pictures"], 11)
        self.assertEqual(data["in_folders_inside_a_class"],
                         {"count": 1, "example": "dogs/deep/er/1.PNG"})
        self.assertEqual(data["by_first_bytes_only"],
                         {"count": 1, "example": "cats/picture.dat"})
        left_out = {r["what"]: (r["count"], r["example"]) for r in data["left_out"]}
        self.assertEqual(left_out, {
            "WebP": (3, "cats/1.webp"), "GIF": (1, "dogs/a.gif"), "TIFF": (1, "dogs/unknown"),
            "other files": (1, "dogs/notes.txt"), "hidden": (1, "cats/.hidden.png"),
            "outside the classes": (1, "loose.png"), "links to folders": (1, "dogs/link"),
            "links to nothing": (1, "dogs/broken.png"), "special files": (1, "dogs/pipe.png")})
        said = [line for line in result.stderr.splitlines() if "left out" in line]
        self.assertEqual(len(said), 1, result.stderr)
        for words in ("11 pictures", "dogs/deep/er/1.PNG", "3 WebP (cats/1.webp)", "1 GIF"):
            self.assertIn(words, said[0])
        # Where all is as one expects nothing is said.
        self.fill("a", "b")
        os.rename(self.path("data"), self.path("old"))
        self.fill("a", "b")
        result = self.foci("train", "vit", *program.TINY, "--steps", 1, "--data", "data", "--out",
                           "other")
        self.assertNotIn("pictures in", result.stderr)
        # A class without any says what it has instead.
        write(self.path("data/c/1.gif"), b"GIF89a")
        self.train_fails("data", ["data/c", "1 GIF"])

    def train_fails(self, folder, says):
        self.refused("train", "vit", *program.TINY, "--data", folder, "--out", "new", says=says,
                     code=2)

    def test_a_folder_of_ones_own(self):
        for i in range(10):
            write(self.path("data", "dark", f"{i}.png"), png(12, 9 + i, lambda x, y, i=i: 10 + i))
            write(self.path("data", "light", f"{i}.png"), png(9 + i, 12, lambda x, y, i=i: 240 - i))
        out = json.loads(self.ok("train", "vit", *program.TINY, "--steps", 60, "--lr", "0.01",
                                 "--data", "data", "--out", "model", "--report", "page.html",
                                 "--json", "-q"))
        self.assertEqual(out["accuracy"]["count"], 4)
        self.assertEqual(out["accuracy"]["value"], 1)
        self.assertIn("dark", self.ok("classify", "model", "data/dark/0.png", "--top", 1))
        self.assertIn("light", self.ok("classify", "model", "data/light/0.png", "--top", 1))
        self.assertIn("light", program.read(self.path("page.html")).decode())


class Models(program.ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = self.tiny_model()
        write(self.path("a.png"), png(16, 16, lambda x, y: 100))

    def refuse(self, says):
        self.refused("classify", self.model, "a.png", says=says, code=2, limit_memory=MEMORY)

    def test_no_folder_no_config_no_weights(self):
        self.refused("classify", "nowhere", "a.png", says="nowhere", code=2)
        os.rename(self.path("model", "config.json"), self.path("config.json"))
        self.refuse("config.json")
        os.rename(self.path("config.json"), self.path("model", "config.json"))
        os.remove(self.path("model", "model.safetensors"))
        self.refuse("model.safetensors")

    def test_configs_that_lie(self):
        path = self.path("model", "config.json")
        good = json.loads(program.read(path))
        for key, value in (("hidden_size", 32), ("num_hidden_layers", 2), ("hidden_size", "many"),
                           ("patch_size", 0), ("num_attention_heads", 3),
                           ("hidden_size", 10 ** 9)):
            self.assertIn(key, good)
            write(path, json.dumps({**good, key: value}).encode())
            self.refuse("model/")
        for text in (b"", b"{", b"[]", b"\xff\xfe"):
            write(path, text)
            self.refuse("config.json")

    def test_json_without_end_costs_nothing(self):
        path = self.path("model", "config.json")
        for piece in (b"[", b'{"a":', b"[1,", b'{"a":[],', b'"'):
            for size in (1 << 20, 60 << 20):
                write(path, piece * (size // len(piece)))
                self.refused("classify", "model", "a.png", code=2, says="config.json",
                             limit_memory=700 << 20)
        write(self.path("settings.json"), b"[" * (1 << 20))
        self.refused("demo", "--config", "settings.json", code=2, says="settings.json",
                     limit_memory=700 << 20)
        self.refused("bench", "attention", "--spec", "[" * 100_000, code=2, says="spec",
                     limit_memory=700 << 20)

    def test_weights_that_are_no_numbers(self):
        path = self.path("model", "model.safetensors")
        good = program.read(path)
        data = 8 + struct.unpack("<Q", good[:8])[0]
        write(path, good[:data] + b"\xff" * (len(good) - data))
        for more in ([], ["--json"]):
            self.refused("classify", "model", "a.png", *more, says=["a.png", "not finite"],
                         code=1)

    def test_weights_that_lie(self):
        path = self.path("model", "model.safetensors")
        good = program.read(path)
        for keep in (0, 7, 8, 50, len(good) // 2, len(good) - 1):
            write(path, good[:keep])
            self.refuse("model.safetensors")
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        for bad in (safetensors(b"{}", length=1 << 60), safetensors(b"{}", length=100 << 20),
                    safetensors({"w": {**entry, "data_offsets": [0, 400]}}, bytes(4)),
                    safetensors({"w": {**entry, "dtype": "Q7"}}, bytes(4)),
                    safetensors({"w": {**entry, "shape": [1 << 40, 1 << 40]}}, bytes(4)),
                    safetensors({"w": entry, "v": entry}, bytes(4)),
                    safetensors(b'{"w":%s,"w":%s}' % ((json.dumps(entry).encode(),) * 2), bytes(4)),
                    safetensors(b"not json"), safetensors({"w": entry}, bytes(4))):
            write(path, bad)
            self.refuse("model.safetensors")


class Cases(program.ProgramTest):
    def test_verify_says_what_passed_and_what_cannot_be_read(self):
        os.makedirs(self.path("empty"))
        write(self.path("broken.safetensors"), b"12345")
        for path in ("nowhere", "empty", "broken.safetensors"):
            result = self.foci("verify", path)
            self.assertEqual(result.returncode, 2)
            self.assertEqual(result.stderr.count("\n"), 1)
            self.assertIn(path, result.stderr)
            self.assertEqual(result.stdout, "")
        self.refused("verify", "broken.safetensors", "--implementation", "quick",
                     says="--implementation", code=2)
        self.refused("verify", "broken.safetensors", "--target", "avx9", says="avx9", code=2)

    def case(self, expected):
        header, data = {"__metadata__": {"op": "foci.attention", "attributes": "{}"}}, b""
        # One query on two equal keys: the mean of the values.
        for name, shape, values in (("in.q", [1, 1, 1, 2], [1, 2]),
                                    ("in.k", [1, 1, 2, 2], [3, 4, 3, 4]),
                                    ("in.v", [1, 1, 2, 1], [5, 7]),
                                    ("out.y", [1, 1, 1, 1], [expected])):
            end = len(data) + 4 * len(values)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), end]}
            data += struct.pack(f"<{len(values)}f", *values)
        return write(self.path("case.safetensors"), safetensors(header, data))

    def test_a_pipe_is_refused_not_waited_for(self):
        os.mkfifo(self.path("pipe.safetensors"))
        self.assertEqual(self.foci("verify", "pipe.safetensors").returncode, 2)

    def test_upstream_gradients_of_another_shape_are_refused(self):
        header, data = {"__metadata__": {"op": "refuse", "attributes": "{}",
                                         "message_contains": "dcoverage"}}, bytes(4)
        for name in ("in.q", "in.k", "in.v"):
            header[name] = {"dtype": "F32", "shape": [1, 1, 1, 1],
                            "data_offsets": [len(data) - 4, len(data)]}
            data += bytes(4)
        header["in.dcoverage"] = {"dtype": "F32", "shape": [1],
                                  "data_offsets": [len(data) - 4, len(data)]}
        write(self.path("case.safetensors"), safetensors(header, data))
        self.assertEqual(self.ok("verify", "case.safetensors"), "1 passed, 0 failed\n")

    def test_right_and_wrong_cases(self):
        self.case(6)
        self.assertEqual(self.ok("verify", "case.safetensors"), "1 passed, 0 failed\n")
        self.assertEqual(self.ok("verify", "."), "1 passed, 0 failed\n")
        self.assertEqual(self.ok("verify", ".", "--reference"), "1 passed, 0 failed\n")
        self.case(6.5)
        result = self.foci("verify", "case.safetensors")
        self.assertEqual(result.returncode, 1)
        self.assertIn("case.safetensors", result.stdout.splitlines()[0])
        self.assertTrue(result.stdout.endswith("0 passed, 1 failed\n"))
        answer = json.loads(self.foci("verify", "case.safetensors", "--json").stdout)
        self.assertEqual((answer["passed"], answer["failed"]), (0, 1))
        self.assertEqual(answer["failures"][0]["tensor"], "y")


if __name__ == "__main__":
    program.main()
