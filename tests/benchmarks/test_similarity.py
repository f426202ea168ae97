"""The benchmark of similarity at a size at which its times mean nothing, but its comparisons do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import similarity


def test_both_sides_of_every_comparison_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = "--layers 2 --width 16 --batch 64 --rows 300 --rounds 1 --threads 1 --device cpu"
    written = tmp_path / "figures.json"
    parts = ["--parts", "minibatch", "pairs", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["similarity.py", *sizes.split(), *parts])
    similarity.main()
    figures = json.loads(written.read_text())["figures"]
    differences = {name: figure for name, figure in figures.items() if "difference" in name}
    assert len(differences) >= 2
    for name, figure in differences.items():
        assert figure["value"] <= figure["bar"], name


def test_streaming_prints_its_peak_memory(capsys: pytest.CaptureFixture[str]) -> None:
    similarity.stream(layers=2, width=8, rows=3000)
    assert float(capsys.readouterr().out) > 10
