"""README and HACKING keep up with the code: quoted code and named files are those of the tree."""
import os
import re
import subprocess
import unittest

TOP = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

# Named in HACKING.md as what is to come.
PLANNED = ("foci/lab/",)


def read(*path):
    with open(os.path.join(TOP, *path), encoding="utf-8") as f:
        return f.read()


def outside_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)


class Docs(unittest.TestCase):
    def test_the_readmes_code_is_the_examples(self):
        blocks = re.findall(r"^```cpp\n(.*?)^```$", read("README.md"), re.S | re.M)
        self.assertEqual(len(blocks), 1)
        self.assertGreaterEqual(len(blocks[0].splitlines()), 10)
        self.assertIn(blocks[0], read("examples", "attention.cc"))

    def test_named_files_exist(self):
        seen = 0
        for page in ("README.md", "HACKING.md"):
            text = outside_blocks(read(page))
            names = re.findall(r"`([\w./*-]+)`", text) + re.findall(r"\]\(([\w./-]+)\)", text)
            for name in names:
                # Files and folders of the tree, also those named from inside foci/; no placeholders
                # (NAME, FLOOR), built things, or bare words.
                if ("/" not in name or re.search(r"[A-Z]{3,}[_/-]|NAME|FLOOR|^\.\.", name) or
                        name.startswith(("build", *PLANNED))):
                    continue
                places = [os.path.join(TOP, base, name) for base in ("", "foci")]
                found = any(self.exists(place) for place in places)
                self.assertTrue(found, f"{page} names {name}, which is not there")
                seen += 1
        self.assertGreater(seen, 20)

    def exists(self, path):
        if "*" in path:
            folder, pattern = os.path.split(path)
            pattern = re.compile(re.escape(pattern).replace(r"\*", ".*"))
            return os.path.isdir(folder) and any(map(pattern.fullmatch, os.listdir(folder)))
        return os.path.exists(path)

    def test_every_floor_stands_in_the_map(self):
        floors = [f for f in os.listdir(os.path.join(TOP, "foci"))
                  if os.path.exists(os.path.join(TOP, "foci", f, "CMakeLists.txt"))]
        hacking = read("HACKING.md")
        for floor in floors:
            self.assertIn(f"| `foci/{floor}` |", hacking)

    def test_run_helps_with_every_verb(self):
        text = subprocess.run([os.path.join(TOP, "run"), "help"], check=True, capture_output=True,
                              text=True).stdout
        for page in ("README.md", "HACKING.md"):
            for verb in re.findall(r"\./run ([a-z]+)", read(page)):
                self.assertRegex(text, rf"(?m)^  {verb}\b")


if __name__ == "__main__":
    unittest.main()
