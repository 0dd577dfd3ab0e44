"""Whose threads a call on PyTorch's tensors uses."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

COUNT = """
import os, sys
import numpy as np
import torch
import foci.torch
q, k, v = (torch.randn(1, 8, 512, 32) for _ in range(3))
arrays = [x.numpy() for x in (q, k, v)]
foci.set_num_threads(2)
def threads():
    return len(os.listdir("/proc/self/task"))
"""


def script(text):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COUNT + text], timeout=240,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_one_thread_of_pytorchs_is_one_of_a_calls():
    script("""
torch.set_num_threads(1)
before = threads()
y = foci.torch.attention(q.requires_grad_(), k, v)
y.sum().backward()
foci.torch.entmax(q.detach())
assert threads() == before, (before, threads())
""")


def test_calls_share_the_threads_of_pytorchs_own_operators():
    script("""
torch.set_num_threads(4)
before = threads()
q @ k.transpose(-1, -2)
own = threads()
assert own >= before + 3, (before, own)
y = foci.torch.attention(q.requires_grad_(), k, v)
y.sum().backward()
assert threads() == own, (own, threads())
# NumPy's arrays are computed on by foci's threads.
z = foci.attention(*arrays)
assert threads() > own
assert (z == y.detach().numpy()).all()
""")


def test_results_do_not_depend_on_how_many_there_are():
    script("""
def both():
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = foci.torch.attention(*leaves, causal=True)
    y.sum().backward()
    return [y.detach()] + [x.grad for x in leaves]
torch.set_num_threads(1)
one = both()
for n in (2, 3, 7):
    torch.set_num_threads(n)
    assert all(torch.equal(a, b) for a, b in zip(both(), one)), n
""")


def test_threads_of_python_each_have_a_team():
    script("""
import threading
torch.set_num_threads(2)
want = foci.torch.attention(q, k, v)
bad = []
def work():
    for _ in range(10):
        if not torch.equal(foci.torch.attention(q, k, v), want):
            bad.append(1)
workers = [threading.Thread(target=work) for _ in range(4)]
for w in workers: w.start()
for w in workers: w.join()
assert not bad
""")


def test_children_of_a_fork_do_without_them():
    script("""
torch.set_num_threads(2)
want = foci.torch.attention(q, k, v)
foci.attention(*arrays)
pid = os.fork()
if pid == 0:
    # (PyTorch's own operators would wait here for ever, torch.equal too.)
    same = (foci.torch.attention(q, k, v).numpy() == want.numpy()).all()
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""")


def test_a_call_on_them_can_be_interrupted():
    script("""
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
big = torch.randn(1, 8, 60000, 64)
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    foci.torch.attention(big, big, big)
except KeyboardInterrupt:
    assert torch.isfinite(foci.torch.attention(q, k, v)).all()
else:
    sys.exit("it ran to its end")
""")
