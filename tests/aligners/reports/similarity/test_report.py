from __future__ import annotations

import csv
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image
from rich.console import Console

from aligners.reports.publishing import write
from aligners.reports.runs.similarity import report, similarity_tables

CONTROLS = ("low", "high", "held_out", "null", "null_high", "untrained", "ceiling")


def rows(pairs: list[tuple[str, str]], controls: bool) -> list[dict[str, Any]]:
    found = []
    for (x, y), label, i, j in product(pairs, ("cka", "r2 of X"), (0, 1, 2), (0, 1, 2)):
        found.append(
            {
                "model_x": x,
                "model_y": y,
                "measure": label.split()[0],
                "label": label,
                "direction": "both" if label == "cka" else "forward",
                "features": "raw",
                "layer_x": i,
                "layer_y": j,
                "value": 0.1 * i + 0.25 * j,
                **dict.fromkeys(CONTROLS, 0.125 if controls else None),
            }
        )
    return found


def test_more_than_two_models_get_a_figure_for_each_measure(tmp_path: Path) -> None:
    every = rows([("a", "b"), ("a", "c"), ("b", "c")], False)
    names = {figure.name for figure in write(report({}, every, [], []), tmp_path)}
    assert {"all_cka.png", "all_r2.png"} < names
    assert image.imread(tmp_path / "all_cka.png").std() > 0


def test_models_in_deep_folders_make_files_that_a_disk_takes(tmp_path: Path) -> None:
    long = "/tmp/" + "folder/" * 40
    every = rows([(f"{long}a/x", f"{long}b/x")], False)
    names = [figure.name for figure in write(report({}, every, [], []), tmp_path)]
    assert names == ["layers_a-x_b-x.png", "diagonal_a-x_b-x.png"]
    assert json.loads((tmp_path / "similarity.json").read_text())["rows"] == every


@pytest.mark.parametrize("controls", [False, True])
def test_files_hold_every_row_and_figures_can_be_read(tmp_path: Path, controls: bool) -> None:
    every = rows([("a/x", "b"), ("b", "b")], controls)
    layers = [{"model": "b", "layer": 0, "nuclear_norm": 2.5, "localization": None}]
    figures = write(report({"seed": 3}, every, layers, []), tmp_path / "new")
    found = json.loads((tmp_path / "new" / "similarity.json").read_text())
    assert found["rows"] == every
    assert found["layers"] == layers
    assert found["meta"] == {"seed": 3}
    with (tmp_path / "new" / "similarity.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(every)
    assert [figure.name for figure in figures] == ["layers_x_b.png", "diagonal_x_b.png", "layers_b_b.png"]
    assert all(image.imread(figure).std() > 0 for figure in figures)
    assert not list(tmp_path.rglob("*.part*"))


def test_the_table_shows_matching_layers_of_different_models(capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = similarity_tables(rows([("a", "b"), ("b", "b")], True))
    Console(width=120).print(table)
    screen = capsys.readouterr().out
    assert "a and b, matching layers" in screen
    assert "0.350" in screen  # layer 1 with layer 1
    assert "0.600" not in screen  # layer 1 with layer 2
    assert "null" in screen
    (plain,) = similarity_tables(rows([("a", "b")], False))
    assert plain.row_count == 2
