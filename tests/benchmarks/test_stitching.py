"""The benchmark of stitching at a size at which its times mean nothing, but its comparisons do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import stitching


def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Instead of `subprocess.run`: saves importing everything twice."""
    said, given = io.StringIO(), sys.argv
    sys.argv = command[1:]
    try:
        with redirect_stdout(said):
            stitching.main()
    finally:
        sys.argv = given
    return subprocess.CompletedProcess(command, 0, said.getvalue())


def test_both_ways_find_the_same_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = "--layers 2 --width 64 --batch 4 --tokens 8 --rounds 1 --threads 1 --device cpu"
    monkeypatch.setattr(sys, "argv", ["stitching.py", *sizes.split(), "--json", str(tmp_path / "figures.json")])
    monkeypatch.setattr(stitching, "subprocess", SimpleNamespace(run=in_this_process))
    stitching.main()
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    differences = [figure for name, figure in figures.items() if "difference" in name]
    assert len(differences) == 2
    assert all(figure["value"] <= figure["bar"] == 1e-5 for figure in differences)
    assert {name: figure["bar"] for name, figure in figures.items() if figure["sense"] == ">="} == {
        "plain hooks / stitched, one step": 1.5,
        "one after another / bank": 1.3,
    }
    assert figures["peak memory, stitched, MB"]["value"] > 10


def test_another_gradient_is_seen() -> None:
    expected = [torch.tensor([1.0, -4.0]), torch.tensor([1e-3])]
    assert stitching.largest_difference([torch.tensor([1.0, -4.0]), torch.tensor([1.1e-3])], expected) == pytest.approx(
        0.1
    )
    assert stitching.largest_difference([torch.tensor([2.0, -4.0]), torch.tensor([1e-3])], expected) == 0.25
