"""`evaluate.py compare`: its report, its files, and what it refuses."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.shell import options
from tests.world import World

from aligners.cli.table import evaluate, train
from aligners.errors import UserError

USUAL = {"data__max_length": 60, "data__batch_size": 12, "trainer__accelerator": "cpu", "trainer__logger": False}


@pytest.fixture(scope="module")
def given(world: World) -> dict[str, object]:
    """The options of two classifiers and their texts."""
    models = {f"data__model_{side}": getattr(world, f"model_{side}") for side in "xy"}
    return {**USUAL, **models, "data__text__source": world.fit, "data__text__held_out": world.test}


def test_a_report_says_what_changed_beside_a_map_of_another_run(given: dict[str, object], tmp_path: Path) -> None:
    fitted, run = tmp_path / "fit", tmp_path / "run"
    train(["fit", *options(**given, run=str(fitted)), "--model.aligners", "{mean: Mean}"])
    file = str(fitted / "aligners.safetensors")
    evaluate(
        [
            "compare",
            *options(**given, run=str(run), most=20, maps="[permutation, rotation]"),
            "--checkpoints",
            json.dumps([file]),
        ]
    )
    report = json.loads((run / "comparison.json").read_text())
    assert report["findings"][0].startswith("These are different models")
    assert {row["method"] for row in report["rows"]} == {"identity", "permutation", "rotation", "mean"}
    assert report["function"][0]["loss_new"] > 0  # labels were found, and matched
    assert report["meta"]["n_texts"] == 20
    assert all(row["penalty"] is not None for row in report["rows"])
    assert (run / "report.html").is_file()
    assert (run / "comparison.png").is_file()
    directions = load_file(run / "directions.safetensors")
    assert directions["site_0"].norm(dim=-1).numpy() == pytest.approx(1)


def test_several_processes_and_unknown_maps_are_refused(given: dict[str, object], tmp_path: Path) -> None:
    for changes, said in (({"trainer__devices": 2}, "One process compares"), ({"maps": "[cca]"}, "Expected `maps`")):
        with pytest.raises(UserError, match=said):
            evaluate(["compare", *options(**{**given, "run": str(tmp_path / "run"), **changes})])
