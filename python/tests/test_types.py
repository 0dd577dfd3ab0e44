"""What type checkers see of the package: py.typed, the stub of its compiled part, annotations."""

import os
import subprocess
import sys

import pytest

import foci

STUB = os.path.join(os.path.dirname(foci.__file__), "_core.pyi")
PROGRAM = """
import numpy as np
import torch
import foci
import foci.torch

x = np.zeros((1, 1, 2, 4), np.float32)
spec = foci.Spec(causal=True, normalizer="entmax", alpha=1.5)
text: str = spec.to_json()
cache = foci.Cache(kv_heads=1, head_size=4)
p: np.ndarray = foci.sparsemax(x)
w: torch.Tensor = foci.torch.entmax(torch.zeros(2, 3))
m = foci.torch.MultiheadAttention(8, 2)
foci.torch.register_transformers()
with foci.torch.observe(m) as o:
    pass
y: np.ndarray = foci.attention(x, x, x, spec)
e = foci.attention(x, x, x, causal=True, statistics=["entropy"]).entropy
t = torch.zeros(1, 1, 2, 4)
z: torch.Tensor = foci.torch.attention(t, t, t, normalizer="sparsemax", keep=t > 0)
c = foci.torch.attention(t, t, t, statistics="coverage").coverage
"""


def mypy(*words, cwd):
    pytest.importorskip("mypy", reason="mypy is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    if not os.path.exists(STUB):
        pytest.skip("the package was built without the stub of its compiled part")
    folder = os.path.dirname(os.path.dirname(STUB))
    # mypy finds by itself what is installed.
    env = os.environ if "site-packages" in folder else {**os.environ, "MYPYPATH": folder}
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", *words], cwd=cwd, env=env,
                          capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


WRONG = """
import numpy as np
import foci
x = np.zeros((1, 1, 2, 4), np.float32)
foci.attention(x, x, x, casual=True)
foci.attention(x, x, x, normalizer="sofmax")
"""


def test_the_package_and_a_program_that_uses_it(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(WRONG)
    code, said = mypy("-p", "foci", "-m", "program", cwd=tmp_path)
    assert code == 0, said
    code, said = mypy("-m", "wrong", cwd=tmp_path)
    assert code == 1 and "wrong.py:5" in said and "wrong.py:6" in said, said
