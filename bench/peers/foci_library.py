"""foci's training steps, through the plain C functions of foci_peers.h."""
import ctypes
import json
import os


class FociError(Exception):
    """What a C function said."""


class Library:
    """libfoci_peers.so in a build folder. Addresses are integers; nothing is copied."""

    def __init__(self, build):
        path = os.path.join(build, "lib", "libfoci_peers.so")
        self.lib = ctypes.CDLL(path)
        for name, arguments in (
                ("about", [ctypes.POINTER(ctypes.c_char_p)]),
                ("set_threads", [ctypes.c_int]),
                ("training_make", [ctypes.c_char_p, ctypes.c_uint64,
                                   ctypes.POINTER(ctypes.c_void_p)]),
                ("training_about", [ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)]),
                ("training_tensor", [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p,
                                     ctypes.POINTER(ctypes.c_void_p)]),
                ("training_step", [ctypes.c_void_p, ctypes.POINTER(ctypes.c_double)])):
            self.function(name).argtypes = arguments
            self.function(name).restype = ctypes.c_char_p
        self.function("training_free").argtypes = [ctypes.c_void_p]
        self.function("training_free").restype = None

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

    def training(self, workload, seed=1):
        return Training(self, workload, seed)


class Training:
    """A workload's model, optimiser and batch, one step old."""

    def __init__(self, library, workload, seed):
        self.library, self.handle = library, ctypes.c_void_p()
        library.call("training_make", workload.encode(), seed, ctypes.byref(self.handle))

    def __del__(self):
        self.library.lib.foci_peers_training_free(self.handle)

    def about(self):
        text = ctypes.c_char_p()
        self.library.call("training_about", self.handle, ctypes.byref(text))
        return json.loads(text.value)

    def tensor(self, name, part="value"):
        """An address, good as long as this lives."""
        data = ctypes.c_void_p()
        self.library.call("training_tensor", self.handle, name.encode(), part.encode(),
                          ctypes.byref(data))
        return data.value

    def step(self):
        loss = ctypes.c_double()
        self.library.call("training_step", self.handle, ctypes.byref(loss))
        return loss.value
