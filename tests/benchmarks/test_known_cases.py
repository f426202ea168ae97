from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.known_cases import CASES, CURVES, MEASURES, averaged, bias_figure, draw, known_cases_figure

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "known_cases.py"
EVERY = {name: pair for group in CASES.values() for name, pair in group.items()}


def of(case: str, *measures: str, seeds: int = 1) -> dict[str, float | None]:
    """Values of one case."""
    chosen = {name: MEASURES[name] for name in measures or MEASURES}
    return {name: line[case] for name, line in averaged(chosen, {case: EVERY[case]}, seeds)[0].items()}


def test_rows_depend_on_the_seed_alone_and_have_the_spectrum_that_is_promised() -> None:
    rows, again, other = (draw(20_000, 8, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(rows, again)
    assert not torch.allclose(rows, other)
    found = torch.linalg.eigvalsh(rows.T @ rows / len(rows)).flip(0)
    assert float(found.sum()) == pytest.approx(8, rel=0.05)
    assert (found[0] / found).tolist() == pytest.approx(range(1, 9), rel=0.1)


def test_what_is_one_by_counting_is_refused_with_its_reason() -> None:
    table, refused = averaged(MEASURES, {"24 rows": EVERY["24 rows"]}, 1)
    without = [measure for measure, line in table.items() if line["24 rows"] is None]
    assert without == ["cca", "svcca", "pwcca", "r2", "mixedsim"]
    assert list(refused) == [f"{measure}, 24 rows" for measure in without]
    assert "23 correlations would be 1 whatever the data" in refused["cca, 24 rows"]


def test_figures_say_what_the_tables_say() -> None:
    table, _ = averaged({name: MEASURES[name] for name in ("cka", "cca")}, {"24 rows": EVERY["24 rows"]}, 1)
    axis = known_cases_figure(table, {"few": ["24 rows"]}).axes[0]
    assert [text.get_text() for text in axis.texts] == [f"{table['cka']['24 rows']:.2f}"[1:], "—", "few"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["cka", "cca"]
    lines = {name: {"32": None, "128": 0.1 * place} for place, name in enumerate(CURVES)}
    drawn = {line.get_label(): line.get_xydata() for line in bias_figure(lines).axes[0].lines[: len(CURVES)]}
    assert {name: points.tolist() for name, points in drawn.items()} == {
        name: [[128, line["128"]]] for name, line in lines.items()
    }


def test_runs_from_anywhere_with_torch_and_matplotlib_alone(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['datasets', 'lightning', 'wandb', 'torchmetrics']));"
    run = f"import runpy; sys.argv = sys.argv[1:]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    options = "--seeds 1 --threads 1 --json out.json --figure cases.png --bias-figure bias.png"
    command = [sys.executable, "-c", blocked + run, str(SCRIPT), *options.split()]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found["known_cases"]) == list(MEASURES)
    assert found["known_cases"]["cca"]["24 rows"] is None
    assert found["refused"]["cca, 24 rows"] in said
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["bias.png", "cases.png"]
