"""Effects of latents in `evaluate.py features`: of a fine-tuning, at any batch size, and of models apart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligners.injection.latents.test_effects import noise
from tests.tiny import tiny_model, tiny_tokenizer
from tests.world import World

from aligners.cli.table import evaluate, train
from aligners.injection.latents.evaluated_effects import COLUMNS
from aligners.reports.finished_runs import make_report

QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
DICTIONARY = "{sparse: {class_path: SparseAligner, init_args: {latents: 200, active: 8}}}"


def folder_of(path: Path, model: Any) -> str:
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def banks(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Dictionaries of a language model and its fine-tuning, and of two classifiers that share nothing."""
    folder = tmp_path_factory.mktemp("banks")
    made = [tiny_model("gpt2", task="causal", tie_word_embeddings=False) for _ in range(2)]
    with torch.no_grad():
        noise(made[1])
    tuned = [folder_of(folder / name, model) for name, model in zip("xy", made, strict=True)]
    pairs = {"tuned": tuned, "apart": [world.model_x, world.model_y]}
    texts = [f"--data.text.source={world.test}", f"--data.text.held_out={world.fit}"]
    found = {}
    for name, (x, y) in pairs.items():
        models = [
            f"--data.model_x={x}",
            f"--data.model_y={y}",
            "--data.sites=1",
            "--data.max_length=64",
            "--data.batch_size=12",
        ]
        run = folder / name
        epochs = ["--trainer.max_epochs=1", f"--run={run}"]
        train(["fit", *models, *texts, f"--model.aligners={DICTIONARY}", *QUIET, *epochs])
        found[name] = str(run / "aligners.safetensors")
    return found


def report_of(run: Path, bank: str, *words: str) -> dict[str, Any]:
    evaluate(["features", f"--checkpoint={bank}", *words, *QUIET, f"--run={run}"])
    report: dict[str, Any] = json.loads((run / "features.json").read_text())
    return report


def test_latents_of_a_fine_tuning_are_moved_and_removed(banks: dict[str, str], tmp_path: Path) -> None:
    found = {}
    for size in (8, 64):
        options = ["--effects=3", "--effect_texts=20", f"--data.batch_size={size}"]
        found[size] = report_of(tmp_path / str(size), banks["tuned"], *options)
    meta = found[8]["meta"]["effects"]
    assert meta["texts"] == 20
    assert meta["divergence"] > 0
    assert meta["not_carried"] is None
    measured = [row for row in found[8]["rows"] if row["recovered"] is not None]
    assert 6 <= len(measured) <= 9
    assert {row["attributed"] is None for row in found[8]["rows"]} == {False}
    first = max(row["attributed"] for row in found[8]["rows"])
    assert first in [row["attributed"] for row in measured]
    moved = [row["moved"] for row in found[8]["cumulative"]]
    assert moved == ["first"] * 3 + ["all", "reconstruction", "state"]

    again = {row["latent"]: row for row in found[64]["rows"]}
    for row in measured:
        for name in COLUMNS:
            assert row[name] == pytest.approx(again[row["latent"]][name], rel=1e-2, abs=1e-4), name
    made = make_report("features", found[8]["meta"], found[8]["rows"], **tables(found[8]))
    said = " ".join(made.sentences)
    assert "of the change of the answers" in said
    assert "Y's whole state" not in said
    assert "whole state" in said
    sure = [row for row in measured if (row["attributed_by_row_low"] or 0) > 0]
    assert sure
    best = max(sure, key=lambda row: row["attributed_by_row"])
    assert f"Where they fire, these latents carry most of the change: {best['latent']} at site 1 (" in said
    titles = [table.title for table in made.screen]
    assert "Latents by what they carry where they fire" in titles

    for row in found[8]["rows"]:  # as files were written before
        for name in ("attributed_by_row", "attributed_by_row_low", "turned"):
            row.pop(name)
    before = make_report("features", found[8]["meta"], found[8]["rows"], **tables(found[8]))
    assert "Where they fire" not in " ".join(before.sentences)


def tables(report: dict[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in ("sites", "cumulative")}


def test_latents_of_models_apart_are_only_removed(banks: dict[str, str], tmp_path: Path) -> None:
    options = ["--effects=2", "--effect_texts=10", "--data.batch_size=20"]
    found = report_of(tmp_path / "apart", banks["apart"], *options)
    assert "neither was trained from the other" in found["meta"]["effects"]["not_carried"]
    assert {row["recovered"] for row in found["rows"]} == {None}
    assert sum(row["shift_y"] is not None for row in found["rows"]) == 4
    assert "cumulative" not in found


def test_effects_can_be_left_out(banks: dict[str, str], tmp_path: Path) -> None:
    found = report_of(tmp_path / "none", banks["tuned"], "--effects=0")
    assert "effects" not in found["meta"]
    assert {row[name] for row in found["rows"] for name in COLUMNS} == {None}
