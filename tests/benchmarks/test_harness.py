from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Figures, interleaved, ratio

ROOT = Path(__file__).parents[2]


def test_alternatives_take_turns() -> None:
    order: list[str] = []
    alternatives = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleaved(alternatives, rounds=3, device="cpu", warmup=0)
    assert "".join(order) == "abcbcacab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratio_is_taken_within_rounds() -> None:
    assert ratio({"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 1.0]}, "a", "b") == 2.0


def test_figures_say_whether_a_bar_is_met(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = Figures("cpu")
    figures.add("cost", 1.2, bar=1.15)
    figures.add("speed", 1.2, bar=1.15, sense=">=")
    cost, speed = capsys.readouterr().out.splitlines()
    assert cost.endswith("<= 1.15: MISSED")
    assert speed.endswith(">= 1.15: met")
    figures.write(tmp_path / "results" / "figures.json")
    written = json.loads((tmp_path / "results" / "figures.json").read_text())
    assert written["figures"]["cost"] == {"value": 1.2, "bar": 1.15, "sense": "<="}
    assert written["machine"]["device"] == "cpu"
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["figures.json"]


def test_stitched_forward_runs_from_anywhere_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "stitched_forward.py"
    blocked = "import sys; sys.modules.update(dict.fromkeys(['datasets', 'lightning', 'wandb', 'torchmetrics']));"
    run = f"import runpy; sys.argv = sys.argv[1:]; runpy.run_path({str(script)!r}, run_name='__main__')"
    small = "--width 64 --layers 2 --batch 2 --tokens 8 --rounds 1 --threads 1 --device cpu --json out.json"
    subprocess.run([sys.executable, "-c", blocked + run, str(script), *small.split()], cwd=tmp_path, check=True)
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert figures["head + tail / full forward"]["bar"] == 1.15
