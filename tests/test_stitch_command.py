"""`train.py stitch` and `evaluate.py stitch` as users type them."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests import stitches
from tests.shell import command, options
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World

from aligners.callbacks.best import BestPerSite
from aligners.cli.table import evaluate
from aligners.fitting.saved_bank import load_bank
from aligners.maps.affine import AffineLayer

CPU = ["--trainer.accelerator", "cpu"]
QUIET = [*CPU, "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
LAYERS = {"affine": "AffineLayer", "norm": {"class_path": "AffineLayer", "init_args": {"norm": True}}}


def data_options(world: World, *models: str) -> list[str]:
    return options(
        data__models=models or [world.model_x, world.model_y], data__text__source=world.fit,
        data__text__held_out=world.test, data__sites="1:2,3", data__max_length=60, data__batch_size=17,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = options(trainer__max_steps=6, trainer__val_check_interval=3, trainer__log_every_n_steps=3)
    layers = options(model__layers=LAYERS)
    return command(tmp_path_factory.mktemp("stitch"), "train", "stitch", *data_options(world), *layers, *steps, *CPU)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def report(run: Path) -> dict[str, Any]:
    """Read as strict JSON: NaN is none."""
    return json.loads((run / "stitching.json").read_text(), parse_constant=refuse)


def test_a_layer_that_no_step_improves_is_called_untrained(world: World) -> None:
    """At a rate of almost nothing, validation sees no change."""
    never = partial(torch.optim.SGD, lr=1e-30)
    module = stitches.train(world, {"affine": AffineLayer}, optimizer=never, trainer={"callbacks": [BestPerSite()]})
    rows = stitches.rows_of(stitches.evaluate(world, module.stored().freeze()), "affine")
    (training,) = {row["training"] for row in rows}
    assert training.startswith("untrained start (")


def test_training_leaves_all_that_a_run_should(world: World, trained: Path) -> None:
    assert trained.name.startswith("stitch-")
    assert {path.name for path in trained.iterdir()} >= {
        *("stitching.safetensors", "last.ckpt", "config.yaml", "metrics.csv", "wandb"),
        *("stitching.json", "stitching.csv", "stitching.md", "curves.csv", "penalty.png", "curves_affine.png"),
    }
    stored = load_bank(trained / "stitching.safetensors")
    assert list(stored.maps) == ["0_1", "1_0", "0_0", "1_1"]
    assert all(list(layers) == ["affine", "norm"] for layers in stored.maps.values())
    whole = report(trained)
    meta, rows = whole["meta"], whole["rows"]
    assert {row["method"] for row in rows} == {"native", "identity", "affine", "norm"}
    assert len(rows) == 4 * (1 + 3 * 2)
    assert {row["n_texts"] for row in rows} == {TEST_TEXTS}
    assert {point["step"] for point in whole["curves"]} == {0, 3, 6}
    assert (meta["ranks"], meta["split"], meta["task"], meta["unit"]) == (1, "test", "classification", "text")
    assert [model["name"] for model in meta["models"]] == [world.model_x, world.model_y]
    assert meta["versions"]["torch"] == torch.__version__
    with (trained / "stitching.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    with (trained / "metrics.csv").open() as file:
        logged = {name for line in csv.DictReader(file) for name, value in line.items() if value}
    assert {f"{kind}/1_0/norm/2-1/{figure}" for kind, figure in (("step", "loss"), ("validation", "penalty"))} <= logged
    assert str(trained.relative_to(trained.parent.parent)) in (trained / "screen.txt").read_text()
    assert world.model_x in str(yaml.safe_load((trained / "config.yaml").read_text()))


def test_what_was_trained_is_measured_again_from_its_file(trained: Path, tmp_path: Path) -> None:
    """Without naming the models and texts again, in batches of other sizes."""
    evaluate(
        ["stitch", "--checkpoint", str(trained / "stitching.safetensors"), *QUIET, "--run", str(tmp_path / "again")]
    )
    again, first = report(tmp_path / "again"), report(trained)
    assert again["rows"] == [
        {name: pytest.approx(value, 1e-6, 1e-6) if isinstance(value, float) else value for name, value in row.items()}
        for row in first["rows"]
    ]
    assert again["curves"] == first["curves"]
    assert again["meta"]["batch_size"] == 128


def test_many_models_are_compared_without_training(world: World, tmp_path: Path) -> None:
    more = [str(tiny_folder(tmp_path / name, seed=seed)) for name, seed in (("c", 2), ("d", 3))]
    groups = {"good": [world.model_x, world.model_y], "bad": more}
    given = ["stitch", *data_options(world, world.model_x, world.model_y, *more), *QUIET]
    evaluate([*given, *options(groups=groups, run=str(tmp_path / "many"))])
    whole = report(tmp_path / "many")
    assert {row["method"] for row in whole["rows"]} == {"native", "identity"}
    assert len({(row["model_x"], row["model_y"]) for row in whole["rows"]}) == 16
    assert whole["pairs"]
    assert whole["curves"] == []
    assert (tmp_path / "many" / "pairs.csv").exists()
    assert not (tmp_path / "many" / "curves.csv").exists()
    for row in whole["rows"]:
        if row["method"] == "identity" and row["same_model"]:
            assert (row["penalty"], row["agreement"]) == (0, 1)
    with pytest.raises(ValueError, match="nobody"):
        evaluate([*given, *options(groups={"some": ["nobody"]}, run=str(tmp_path / "not"))])
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("closed", [["linear"], []])
def test_layers_are_injected_from_their_file(trained: Path, tmp_path: Path, closed: list[str]) -> None:
    """What stitching says of them, beside closed forms that are fitted on the spot, or alone."""
    given = options(checkpoints=[str(trained / "stitching.safetensors")], closed_form=closed, both_directions=True)
    evaluate(["inject", *given, *QUIET, "--run", str(tmp_path / "run")])
    rows = json.loads((tmp_path / "run" / "report.json").read_text())["rows"]
    methods = {row["method"]: row["fit"] for row in rows if row["role"] == "method"}
    assert methods == {"affine": "task loss", "norm": "task loss", **dict.fromkeys(closed, "closed form")}
    for row in rows:
        if row["method"] in ("affine", "norm", "identity"):
            place = {name: row[name] for name in ("model_x", "model_y", "site_x", "site_y", "method")}
            (same,) = [each for each in report(trained)["rows"] if place.items() <= each.items()]
            for column in ("loss", "penalty", "accuracy", "agreement", "penalty_low"):
                assert row[column] == pytest.approx(same[column], rel=1e-6, abs=1e-6), (place, column)
