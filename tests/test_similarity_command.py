"""`evaluate.py similarity` as users type it."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from aligners.similarity.catalogue import DEFAULT
from tests.shell import command
from tests.tiny import tiny_folder
from tests.world import World


@pytest.fixture(scope="module")
def compared(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("similarity")
    other = tiny_folder(folder / "other", "distilbert", seed=2, layers=1, width=12)
    options = [
        *("similarity", "--data.models", f"[{world.model_x}, {other}]"),
        *("--data.text.source", world.fit, "--data.text.held_out", world.test),
        *("--data.max_length", "60", "--data.batch_size", "8", "--trainer.accelerator", "cpu"),
        *("--measures", "all", "--data.attention", "true", "--controls", "true", "--groups", "4"),
    ]
    return command(folder, "evaluate", *options)


def report(run: Path) -> dict[str, Any]:
    return json.loads((run / "similarity.json").read_text())


def test_a_comparison_leaves_all_that_a_run_should(compared: Path, world: World) -> None:
    found = report(compared)
    assert compared.name.startswith("similarity-")
    assert found["meta"]["models"][0]["name"] == world.model_x
    assert found["meta"]["refusals"] == {}
    assert set(DEFAULT) < {row["measure"] for row in found["rows"]}
    with (compared / "similarity.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(found["rows"])
    assert {row["model"] for row in found["layers"]} == {model["name"] for model in found["meta"]["models"]}
    figures = {"layers_x_other", "layers_x_x", "layers_other_other", "diagonal_x_other"}
    assert {path.stem for path in compared.glob("*.png")} == figures
    screen = (compared / "screen.txt").read_text()
    assert "\nx and other, matching layers\n" in screen  # wherever the models are
    assert "3→1" in screen
    assert "models" in (compared / "config.yaml").read_text()
