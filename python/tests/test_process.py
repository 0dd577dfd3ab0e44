"""What a call does to the process around it: the GIL, fork, Ctrl-C, threads."""

import signal
import subprocess
import sys
import threading
import time

import numpy as np

import foci


def long_arrays(n=6000, d=64):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, n, d)).astype(np.float32) for _ in range(3)]


def test_other_python_threads_run_meanwhile():
    q, k, v = long_arrays()
    steps, done = 0, threading.Event()

    def work():
        foci.attention(q, k, v)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        steps += 1
    thread.join()
    # A held GIL would give this thread a turn or two only.
    assert steps > 1000


def test_calls_from_many_threads_agree():
    q, k, v = (x[:, :, :300] for x in long_arrays(300))
    spec = foci.Spec(causal=True)
    want = foci.attention(q, k, v, spec)
    results = [None] * 8

    def work(i):
        for _ in range(5):
            results[i] = foci.attention(q, k, v, spec)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all((y == want).all() for y in results)


FORK = """
import os, sys, threading
import numpy as np
import foci
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 4, 700, 32)).astype(np.float32) for _ in range(3))
foci.set_num_threads(4)
want = foci.attention(q, k, v, causal=True)
stop = False
def busy():
    while not stop:
        foci.attention(q, k, v)
threads = [threading.Thread(target=busy) for _ in range(2)]
for t in threads: t.start()
bad = 0
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        same = (foci.attention(q, k, v, causal=True) == want).all()
        g = foci.attention_backward(want, q, k, v)["dq"]
        os._exit(0 if same and np.isfinite(g).all() else 1)
    bad += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
stop = True
for t in threads: t.join()
sys.exit(bad)
"""


def test_children_of_a_fork_compute_the_same():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=240,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


LONG = """
import signal, sys
import numpy as np
import foci
# A shell starts what it puts into the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 8, 60000, 64)).astype(np.float32) for _ in range(3))
print("ready", flush=True)
try:
    foci.attention(q, k, v)
except KeyboardInterrupt:
    small = foci.attention(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    sys.exit(7 if np.isfinite(small).all() else 8)
"""


def test_ctrl_c_ends_a_long_call():
    process = subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "ready"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    try:
        # The whole call takes minutes.
        assert process.wait(timeout=60) == 7
    finally:
        process.kill()
