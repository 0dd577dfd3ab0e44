"""foci through its plain C functions (foci_peers.h)."""
import ctypes
import json
import os


class FociError(Exception):
    """What a C function said."""


FLOATS = ctypes.c_void_p  # addresses, as torch's data_ptr() gives them


class Library:
    """libfoci_peers.so in a build folder. Addresses are integers; nothing is copied."""

    def __init__(self, build):
        path = os.path.join(build, "lib", "libfoci_peers.so")
        self.lib = ctypes.CDLL(path)
        for name, arguments in (
                ("about", [ctypes.POINTER(ctypes.c_char_p)]),
                ("set_threads", [ctypes.c_int]),
                ("make", [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64),
                          ctypes.POINTER(ctypes.c_void_p)]),
                ("forward", [ctypes.c_void_p] + [FLOATS] * 5),
                ("backward", [ctypes.c_void_p] + [FLOATS] * 6 +
                 [ctypes.POINTER(ctypes.c_void_p)] * 3)):
            self.function(name).argtypes = arguments
            self.function(name).restype = ctypes.c_char_p
        self.lib.foci_peers_free.argtypes = [ctypes.c_void_p]
        self.lib.foci_peers_free.restype = None

    def function(self, name):
        return getattr(self.lib, "foci_peers_" + name)

    def call(self, name, *arguments):
        said = self.function(name)(*arguments)
        if said is not None:
            raise FociError(said.decode("utf-8", "replace"))

    def about(self):
        text = ctypes.c_char_p()
        self.call("about", ctypes.byref(text))
        return text.value.decode()

    def set_threads(self, n):
        self.call("set_threads", n)

    def attention(self, spec, shape):
        return Attention(self, spec, shape)


class Attention:
    """One plan. spec: a dict (docs/attention.md); shape: (B, H, Hk, N, M, D, Dv)."""

    def __init__(self, library, spec, shape):
        self.library, self.handle = library, ctypes.c_void_p()
        library.call("make", json.dumps(spec).encode(), (ctypes.c_int64 * 7)(*shape),
                     ctypes.byref(self.handle))

    def __del__(self):
        self.library.lib.foci_peers_free(self.handle)

    def forward(self, q, k, v, y, statistic):
        self.library.call("forward", self.handle, q, k, v, y, statistic)

    def backward(self, q, k, v, y, statistic, dy):
        """Addresses of dq, dk, dv, good until the next call."""
        made = [ctypes.c_void_p() for _ in range(3)]
        self.library.call("backward", self.handle, q, k, v, y, statistic, dy,
                          *map(ctypes.byref, made))
        return [p.value for p in made]
