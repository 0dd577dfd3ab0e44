"""A headless Chromium driven over WebDriver with the standard library alone."""
import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib

FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--force-device-scale-factor=1",
]


def missing():
    """The Debian package whose program is absent, or None."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            return package
    return None


class Browser:
    """with Browser() as b: b.open(path) …"""

    def __enter__(self):
        self.session = ""
        self.profile = tempfile.mkdtemp(prefix="foci-browser-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        # No proxy: the driver listens on this machine.
        self.http = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": self.profile})
        try:
            self._wait_for_driver()
            answer = self.call("POST", "/session", {"capabilities": {"alwaysMatch": {
                "browserName": "chrome",
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
                "goog:chromeOptions": {
                    "binary": shutil.which("chromium"),
                    "args": FLAGS + [f"--user-data-dir={self.profile}/data", "about:blank"],
                }}}})
            self.session = "/session/" + answer["sessionId"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused):
        try:
            if self.session:
                self.call("DELETE", "")
        except (OSError, RuntimeError):
            pass
        self.driver.terminate()
        try:
            self.driver.wait(10)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            self.driver.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def _wait_for_driver(self):
        for _ in range(400):
            try:
                self.http.open(self.base + "/status", timeout=5).read()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("chromedriver does not answer")

    def call(self, method, path, body=None):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(
            self.base + self.session + path, data=data, method=method,
            headers={"Content-Type": "application/json"})
        try:
            answer = self.http.open(request, timeout=120)
        except urllib.error.HTTPError as e:
            raise RuntimeError(json.loads(e.read())["value"]["message"]) from None
        return json.loads(answer.read())["value"]

    def cdp(self, command, **parameters):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path):
        self.call("POST", "/url", {"url": "file://" + os.path.abspath(path)})

    def resize(self, width, height):
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=False)

    def dark(self, on):
        self.cdp("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if on else "light"}])

    def javascript(self, on):
        self.cdp("Emulation.setScriptExecutionDisabled", value=not on)

    def run(self, script, *arguments):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script, *arguments):
        return self.call("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def log(self, kind):
        return self.call("POST", "/se/log", {"type": kind})

    def screenshot(self, scale=1):
        """PNG bytes of the whole page, also where scripts are off."""
        for _ in range(200):
            # A slow machine may not have laid the page out yet.
            size = self.cdp("Page.getLayoutMetrics")["cssContentSize"]
            if size["width"] > 0 and size["height"] > 0:
                break
            time.sleep(0.05)
        shot = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                        clip={"x": 0, "y": 0, "width": size["width"],
                              "height": min(size["height"], 16000), "scale": scale})
        return base64.b64decode(shot["data"])


class Pixels:
    """An 8-bit RGB or RGBA PNG without interlace, as Chromium writes them."""

    def __init__(self, png):
        at, data = 8, b""
        while at < len(png):
            length, kind = struct.unpack(">I4s", png[at:at + 8])
            chunk = png[at + 8:at + 8 + length]
            if kind == b"IHDR":
                self.width, self.height, depth, colour, _, _, interlace = struct.unpack(
                    ">IIBBBBB", chunk)
                assert depth == 8 and colour in (2, 6) and interlace == 0
                self.step = 3 if colour == 2 else 4
            elif kind == b"IDAT":
                data += chunk
            at += 12 + length
        raw = zlib.decompress(data)
        stride = self.width * self.step
        self.rows, previous = [], bytes(stride)
        for y in range(self.height):
            line = bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
            self._unfilter(raw[y * (stride + 1)], line, previous)
            self.rows.append(line)
            previous = line

    def _unfilter(self, kind, line, up):
        step = self.step
        if kind == 1:
            for i in range(step, len(line)):
                line[i] = (line[i] + line[i - step]) & 255
        elif kind == 2:
            line[:] = bytes((a + b) & 255 for a, b in zip(line, up))
        elif kind == 3:
            for i in range(len(line)):
                left = line[i - step] if i >= step else 0
                line[i] = (line[i] + (left + up[i]) // 2) & 255
        elif kind == 4:
            for i in range(len(line)):
                a = line[i - step] if i >= step else 0
                b, c = up[i], up[i - step] if i >= step else 0
                pa, pb, pc = abs(b - c), abs(a - c), abs(a + b - 2 * c)
                line[i] = (line[i] + (a if pa <= pb and pa <= pc else b if pb <= pc else c)) & 255

    def colours(self, x, y, width, height, limit=64):
        """How many different colours a rectangle holds, counted up to `limit`."""
        seen = set()
        for row in range(max(0, int(y)), min(self.height, int(y + height))):
            line = self.rows[row]
            for column in range(max(0, int(x)), min(self.width, int(x + width))):
                seen.add(bytes(line[column * self.step:column * self.step + 3]))
                if len(seen) >= limit:
                    return limit
        return len(seen)
