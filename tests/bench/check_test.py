"""bench/check.py: what it lists, what breaks it, and the page it rewrites; with programs that only
pretend to measure."""
import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest

TOP = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
sys.path.insert(0, os.path.join(TOP, "bench"))
import check  # noqa: E402
import rows  # noqa: E402

# Writes what the environment holds for it, and ends as that says.
PRETENDER = """#!{python}
import json, os, sys
said = json.loads(os.environ.get("PRETEND_" + {name!r}, "{{}}"))
if "text" in said:
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as f:
        f.write(said["text"])
sys.exit(said.get("code", 0))
"""
ROW = "N131072 D64 softmax"
MEASURE = "MB beside the tensors"


def results(bench, *measured, simd="avx2"):
    return {"bench": bench, "simd": simd, "threads": 2, "quick": False, "facts": {},
            "rows": list(measured)}


def memory_row(value):
    definition, = rows.definitions("memory", pattern=f"^{ROW}$")
    return rows.result(definition, MEASURE, "avx2", value, value, value)


class Check(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="foci-test-")
        self.addCleanup(folder.cleanup)
        self.build = folder.name
        os.mkdir(os.path.join(self.build, "bin"))
        for name in check.PROGRAMS:
            path = os.path.join(self.build, "bin", f"{name}_bench")
            with open(path, "w", encoding="utf-8") as f:
                f.write(PRETENDER.format(python=sys.executable, name=name))
            os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)

    def check(self, *options, pattern=f"^{ROW}$", **pretended):
        env = dict(os.environ)
        for name in check.PROGRAMS:
            said = pretended.get(name, {"text": json.dumps(results(name))})
            env["PRETEND_" + name] = json.dumps(said)
        words = ["--build", self.build, "--no-peers", *options]
        if pattern is not None:
            words += ["--rows", pattern]
        script = os.path.join(TOP, "bench", "check.py")
        return subprocess.run([sys.executable, "-B", script, *words],
                              env=env, capture_output=True, text=True, check=False)

    def memory(self, value):
        return {"text": json.dumps(results("memory", memory_row(value)))}

    def test_a_row_short_of_its_target_is_listed_and_no_error(self):
        r = self.check(memory=self.memory(70))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("1 rows with targets, 1 fall short", r.stdout)
        self.assertRegex(r.stdout, rf"{ROW} +{MEASURE} +at most 64 +reached 70")

    def test_a_met_row_is_not_listed(self):
        r = self.check(memory=self.memory(63))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("1 rows with targets, 0 fall short", r.stdout)
        self.assertNotIn(ROW, r.stdout)

    def test_a_broken_benchmark_is_an_error(self):
        for said, expected in (({"code": 3}, "attention: ended with exit code 3"),
                               ({}, "attention: "), ({"text": "{"}, "attention: "),
                               ({"text": "[]"}, "attention: ")):
            r = self.check(memory=self.memory(63), attention=said)
            self.assertEqual(r.returncode, 1, said)
            self.assertRegex(r.stdout, "(?m)^broke: " + expected)
            self.assertNotIn("Traceback", r.stderr)

    def test_a_benchmark_that_is_not_there_is_an_error(self):
        os.remove(os.path.join(self.build, "bin", "decode_bench"))
        r = self.check(memory=self.memory(63))
        self.assertEqual(r.returncode, 1)
        self.assertIn("broke: decode: could not be started", r.stdout)

    def test_results_of_an_earlier_run_do_not_count(self):
        self.assertEqual(self.check(memory=self.memory(63)).returncode, 0)
        r = self.check(memory={})
        self.assertEqual(r.returncode, 1)

    def test_a_target_that_nobody_measured_is_an_error(self):
        r = self.check()
        self.assertEqual(r.returncode, 1)
        self.assertIn(f"broke: memory: nothing about {ROW}, {MEASURE}", r.stdout)

    def test_json_holds_everything(self):
        path = os.path.join(self.build, "all.json")
        self.assertEqual(self.check("--json", path, memory=self.memory(70)).returncode, 0)
        with open(path, encoding="utf-8") as f:
            data = json.load(f)
        self.assertEqual(data["benches"]["memory"]["rows"][0]["met"], False)
        self.assertEqual(data["broken"], [])
        self.assertEqual(self.check("--json", "/no/such/x", memory=self.memory(70)).returncode, 1)

    def test_what_cannot_be_is_one_line_and_two(self):
        for words in (["--fast"], ["--threads", "0"], ["--threads", "x"], ["--quic"],
                      ["--markdown"]):
            r = self.check(*words)
            self.assertEqual(r.returncode, 2, words)
            self.assertEqual(len(r.stderr.splitlines()), 1, r.stderr)
        r = self.check(pattern="(")
        self.assertEqual((r.returncode, len(r.stderr.splitlines())), (2, 1))


class Reader(unittest.TestCase):
    def broken(self, change, says):
        data = results("b", memory_row(1))
        change(data)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
            json.dump(data, f)
            f.flush()
            with self.assertRaisesRegex(rows.Broken, says):
                rows.read_results(f.name)

    def test_what_is_no_result_is_told(self):
        def put(key, value):
            return lambda d: d["rows"][0].__setitem__(key, value)
        self.broken(lambda d: d.pop("simd"), "simd")
        self.broken(lambda d: d.__setitem__("rows", {}), "rows")
        self.broken(lambda d: d["rows"].append(3), r"rows\[1\]: no object")
        self.broken(put("row", 3), r"rows\[0\]\.row")
        self.broken(put("value", None), r"rows\[0\]\.value")
        self.broken(put("low", True), r"rows\[0\]\.low")
        self.broken(put("high", float("nan")), r"rows\[0\]\.high")
        self.broken(put("target", {"at_last": 3}), "at_last")
        self.broken(put("target", {"at_least": {"avx2": 3}}), "one number")
        self.broken(put("met", False), "met")
        self.broken(put("target", None), "met")

    def test_a_result_that_is_one_is_read(self):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
            json.dump(results("b", memory_row(70)), f)
            f.flush()
            row, = rows.read_results(f.name)["rows"]
        self.assertIs(row["met"], False)
        self.assertEqual(row["target"], {"at_most": 64})

    def test_targets_of_simd_targets(self):
        d = {"row": "r", "targets": {"m": {"at_least": {"avx2": 0.7, "avx512": 0.6}}}}
        self.assertEqual(rows.target_of(d, "m", "avx512"), {"at_least": 0.6})
        self.assertIsNone(rows.target_of(d, "m", "baseline"))
        self.assertIsNone(rows.target_of(d, "other", "avx2"))

    def test_every_target_of_the_list_belongs_to_a_benchmark(self):
        for section, definitions in rows.read_list().items():
            if section == "about":
                continue
            for d in definitions:
                for measure in d.get("targets", {}):
                    rows.parse_target(d["targets"][measure], d["row"])
                    self.assertIn(section, (*check.PROGRAMS, *check.SECTIONS_OF_PEERS))


class Page(unittest.TestCase):
    def test_the_table_between_the_markers_is_replaced(self):
        page = ("a\n<!-- measured avx2: begin -->\nold\n<!-- measured avx2: end -->\nb\n"
                "<!-- measured avx512: begin -->\nkept\n<!-- measured avx512: end -->\n")
        new = check.rewrite(page, "avx2", "new | \\1")
        self.assertEqual(new, page.replace("old", "new | \\1"))
        self.assertEqual(check.rewrite(new, "avx2", "old"), page)

    def test_a_page_without_markers_is_refused(self):
        for page in ("", "<!-- measured avx2: end --><!-- measured avx2: begin -->",
                     "<!-- measured avx2: begin -->"):
            with self.assertRaises(rows.Broken):
                check.rewrite(page, "avx2", "x")

    def test_the_page_has_its_markers(self):
        with open(check.PAGE, encoding="utf-8") as f:
            page = f.read()
        for simd in ("avx2", "avx512"):
            self.assertIn("table of today", check.rewrite(page, simd, "table of today"))

    def test_a_target_against_a_peer_says_which_share_of_peak_it_asks(self):
        name = "H8 N512 D64"
        definition, = rows.definitions("attention", pattern=f"^{name}$")
        measured = {
            "attention": results("attention", rows.result(definition, "forward of peak", "avx2",
                                                          0.8, 0.8, 0.8)),
            "peers": results("peers", rows.result(definition, "forward PyTorch / foci", "avx2",
                                                  1.2, 1.2, 1.2))}
        check.say_what_targets_ask(measured)
        text = "asks 93 % of peak"  # 0.8 of peak, times 1.4 over 1.2
        self.assertEqual(definition["targets"]["forward PyTorch / foci"], {"at_least": 1.4})
        self.assertIn(text, "\n".join(check.summary(measured, [])))
        self.assertIn(text, check.markdown(measured))
        measured["peers"]["rows"][0] = rows.result(definition, "forward PyTorch / foci", "avx2",
                                                   1.5, 1.5, 1.5)
        check.say_what_targets_ask(measured)
        self.assertNotIn("asks", check.markdown(measured))

    def test_the_table_names_row_value_and_verdict(self):
        table = check.markdown({"memory": results("memory", memory_row(70), memory_row(60))})
        self.assertIn(f"| {ROW} | {MEASURE} | 70 | at most 64 | **short** |", table)
        self.assertIn("| 60 | at most 64 | met |", table)


if __name__ == "__main__":
    unittest.main()
