"""The program under test, and files for it, with the standard library alone."""
import base64
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

PROGRAM = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else "foci"

# A model that trains in a moment.
TINY = ["--width", "16", "--layers", "1", "--heads", "2", "--feed-forward", "16", "--batch", "4",
        "--threads", "2"]

JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4"
    "UG1RV19iZ2hnPk1xeXBkeFxlZ2P/wAALCAAQABABAREA/8QAFgABAQEAAAAAAAAAAAAAAAAABwAG/8QAFBABAAAAAAAA"
    "AAAAAAAAAAAAAP/aAAgBAQAAPwDEmlBZ/9k=")


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, pixel, claimed=None):
    """A grey PNG; pixel(x, y) gives 0 … 255. `claimed` lies about (width, height)."""
    rows = b"".join(b"\0" + bytes(pixel(x, y) for x in range(width)) for y in range(height))
    head = struct.pack(">IIBBBBB", *(claimed or (width, height)), 8, 0, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) +
            chunk(b"IEND", b""))


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data)
    return path


def read(path):
    with open(path, "rb") as f:
        return f.read()


def safetensors(header, data=b"", length=None):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


class ProgramTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="foci-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def foci(self, *arguments, limit_file=None, limit_memory=None, stdout=subprocess.PIPE,
             env=None):
        def limits():
            if limit_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_file, limit_file))
            if limit_memory is not None:
                resource.setrlimit(resource.RLIMIT_AS, (limit_memory, limit_memory))

        # A write beyond the limit fails as on a full disk: the program ignores SIGXFSZ.
        return subprocess.run([PROGRAM, *map(str, arguments)], stdout=stdout,
                              stderr=subprocess.PIPE, text=True, cwd=self.folder, timeout=240,
                              preexec_fn=limits,
                              env={**os.environ, **(env or {})})

    def ok(self, *arguments, **options):
        result = self.foci(*arguments, **options)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def refused(self, *arguments, says, code=None, **options):
        """Fails with one line on stderr that holds each of `says`, and nothing on stdout."""
        result = self.foci(*arguments, **options)
        if code is None:
            self.assertIn(result.returncode, (1, 2), result.stderr)
        else:
            self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertTrue(result.stderr.startswith("foci: "), result.stderr)
        self.assertLess(len(result.stderr), 600)
        for word in [says] if isinstance(says, str) else says:
            self.assertIn(word, result.stderr)
        self.assertFalse(result.stdout)
        return result.stderr

    def files(self, *parts):
        """Every file below, without folders."""
        return sorted(os.path.relpath(os.path.join(base, name), self.path(*parts))
                      for base, _, names in os.walk(self.path(*parts)) for name in names)

    def tiny_model(self, name="model", steps=3):
        self.ok("train", "vit", *TINY, "--steps", steps, "--out", name, "-q")
        return name


def main():
    unittest.main(argv=sys.argv[:1])
