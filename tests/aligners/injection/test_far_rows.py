"""With far rows, errors, similarity and injection are those of the other rows, and both are said."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.shell import options
from tests.sinks import sink_folder
from tests.world import World

from aligners.cli.table import evaluate, train
from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.pairings import pair_states
from aligners.fitting.alignment import Alignment
from aligners.injection.injecting import InjectionEvaluation
from aligners.maps.linear import Linear
from aligners.similarity.similarity_evaluation import SimilarityEvaluation

QUIET: dict[str, Any] = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "accelerator": "cpu",
}


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models whose first token's states are some hundred times as large as the others."""
    folder = tmp_path_factory.mktemp("sinks")
    return [str(sink_folder(folder / str(seed), seed=seed)) for seed in range(2)]


def measured(sinks: list[str], world: World, far_rows: str) -> dict[str, dict[str, Any]]:
    """The rows of an injection of least squares, by method."""
    options = {"text": world.text, "max_length": 32, "held_out_types": 0.0, "far_rows": far_rows}
    data = pair_states(*sinks, sites=[2], **options)
    trainer, fit = pl.Trainer(**QUIET, num_sanity_val_steps=0), Alignment({"linear": Linear})
    trainer.fit(fit, datamodule=data)
    evaluation = InjectionEvaluation([fit.stored()], closed_form=[])
    pl.Trainer(**QUIET).test(evaluation, datamodule=pair_states(*sinks, sites=[2], **options), verbose=False)
    return {row["method"]: row for row in evaluation.rows}


def plain_fvu(sinks: list[str], world: World) -> tuple[float, float]:
    """FVU of least squares fitted on the near rows, on these, and on all rows, by plain code."""
    data = pair_states(*sinks, sites=[2], text=world.text, max_length=32, held_out_types=0.0, far_rows="keep")
    parts: dict[str, list[torch.Tensor]] = {"fit": [], "test": []}
    for split, found in parts.items():
        for batch in data.paired(split):
            first = batch.rows.place == 0
            found.append(torch.cat([batch.x[0], batch.y[0], first[:, None].float()], 1).double())
    fit, test = (torch.cat(found) for found in parts.values())
    near = fit[fit[:, -1] == 0]
    inputs = torch.cat([near[:, :16], torch.ones(len(near), 1)], 1)
    weights = torch.linalg.lstsq(inputs, near[:, 16:32]).solution

    def fvu(rows: torch.Tensor, mean: torch.Tensor) -> float:
        mapped = torch.cat([rows[:, :16], torch.ones(len(rows), 1)], 1) @ weights
        y = rows[:, 16:32]
        return float((mapped - y).square().sum() / (y - mean).square().sum())

    held = test[test[:, -1] == 0]
    return fvu(held, near[:, 16:32].mean(0)), fvu(test, test[:, 16:32].mean(0))


def test_errors_are_those_of_the_near_rows_beside_those_of_all(sinks: list[str], world: World) -> None:
    without, every = plain_fvu(sinks, world)
    row = measured(sinks, world, "leave_out")["linear"]
    assert row["fvu"] == pytest.approx(without, rel=1e-3)
    assert row["fvu_with_far"] == pytest.approx(every, rel=1e-3)
    assert row["fvu_without_far"] is None
    kept = measured(sinks, world, "keep")["linear"]
    assert kept["fvu"] < 0.05  # a few rows decide it
    assert kept["fvu_without_far"] > 0.5
    assert kept["fvu_with_far"] is None


def test_injection_leaves_far_rows_as_they_are(sinks: list[str], world: World) -> None:
    same = measured([sinks[1]] * 2, world, "leave_out")["identity"]
    assert same["penalty"] == pytest.approx(0, abs=1e-6)
    mean = {how: measured(sinks, world, how)["mean"] for how in ("leave_out", "keep")}
    assert mean["leave_out"]["loss"] != mean["keep"]["loss"]


def test_similarity_tells_models_apart_that_share_a_sink(sinks: list[str], world: World, tmp_path: Path) -> None:
    options = {"rows": "tokens", "special_tokens": True, "layers": [2], "text": world.text, "max_length": 32}
    found = {}
    for how in ("leave_out", "keep"):
        evaluation = SimilarityEvaluation(["cka"])
        data = LayerActivations(sinks, far_rows=how, **options)
        pl.Trainer(**QUIET).test(evaluation, datamodule=data, verbose=False)
        (found[how],) = evaluation.rows
    assert found["keep"]["value"] > 0.99
    assert found["leave_out"]["value"] < 0.6
    assert found["leave_out"]["with_far"] == pytest.approx(found["keep"]["value"], rel=1e-6)
    assert found["keep"]["without_far"] == pytest.approx(found["leave_out"]["value"], rel=1e-6)


def test_a_comparison_has_its_figures_with_far_rows_beside(sinks: list[str], world: World, tmp_path: Path) -> None:
    rows = {}
    for far_rows in ("leave_out", "keep"):
        words = options(data__model_x=sinks[0], data__model_y=sinks[1], data__text__source=world.fit)
        words += options(data__text__held_out=world.test, data__max_length=32, data__far_rows=far_rows)
        words += options(trainer__accelerator="cpu", trainer__logger=False)
        evaluate(["compare", *words, "--run", str(tmp_path / far_rows)])
        found = json.loads((tmp_path / far_rows / "comparison.json").read_text())["rows"]
        rows[far_rows] = {(row["method"], row["site_y"]): row for row in found}
    assert "FVU with the rows that are far from all others" in (tmp_path / "leave_out/comparison.md").read_text()
    for place, row in rows["keep"].items():
        beside = rows["leave_out"][place]
        assert "fvu_with_far" not in row
        if place[0] == "identity":  # the same map in both
            assert beside["fvu_with_far"] != pytest.approx(beside["fvu"], rel=0.1)
            assert beside["fvu_with_far"] == pytest.approx(row["fvu"], rel=0.05)  # about another mean


@pytest.mark.slow
def test_a_universe_has_its_figures_with_far_rows_beside(world: World, tmp_path: Path) -> None:
    models = [str(sink_folder(tmp_path / f"sink{seed}", seed=seed)) for seed in range(3)]
    text = options(data__text__source=world.fit, data__text__held_out=world.test, data__max_length=32)
    words = [*text, *options(data__sites=[1], trainer__accelerator="cpu", trainer__logger=False)]
    train(["universe", *words, *options(data__models=models, trainer__max_steps=1), "--run", str(tmp_path / "all")])
    rows = json.loads((tmp_path / "all/universe.json").read_text())["rows"]
    of_pair = {row["method"]: row for row in rows if (row["model_x"], row["model_y"]) == (models[0], models[1])}
    pair = tmp_path / "all/pairs/sink0--sink1/aligners.safetensors"
    evaluate(["inject", *options(checkpoints=[str(pair)], closed_form=[]), "--run", str(tmp_path / "pair")])
    found = json.loads((tmp_path / "pair/report.json").read_text())["rows"]
    methods = {row["method"]: row for row in found if row["model_x"] == models[0] and row["role"] == "method"}
    for name in ("universe", "gcca"):  # the same maps, measured by another command
        assert of_pair[name]["fvu_with_far"] == pytest.approx(methods[name]["fvu_with_far"], rel=1e-4)
        assert of_pair[name]["fvu"] == pytest.approx(methods[name]["fvu"], rel=1e-4)
    assert "FVU with the rows that are far from all others" in (tmp_path / "all/universe.md").read_text()
