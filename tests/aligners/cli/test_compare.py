"""`evaluate.py compare`: its report, its files, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.shell import options
from tests.tiny import tiny_folder, tiny_model, tiny_tokenizer
from tests.world import World

from aligners.cli.table import evaluate, train
from aligners.errors import UserError
from aligners.fitting.saved_bank import FORWARD, load_bank, save_bank
from aligners.maps.sparse.sparse_aligner import SparseAligner

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


@pytest.fixture(scope="module")
def edited(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The options of a language model, and of a copy in which one word's embedding is another."""
    folder = tmp_path_factory.mktemp("edited")
    old, new = tiny_folder(folder / "old", "gpt2", task="causal"), folder / "new"
    model = tiny_model("gpt2", task="causal")
    word = tiny_tokenizer().convert_tokens_to_ids("great")
    with torch.no_grad():
        model.transformer.wte.weight[word, 1] += 3
    model.save_pretrained(new)
    tiny_tokenizer().save_pretrained(new)
    texts = {"data__text__source": world.fit, "data__text__held_out": world.test}
    return {**USUAL, **texts, "data__model_x": str(old), "data__model_y": str(new)}


@pytest.fixture(scope="module")
def dictionary(edited: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dictionary at site 0 whose latent 5 is what differs there, while the others say the same of both models."""
    run = tmp_path_factory.mktemp("dictionary") / "fit"
    train(["fit", *options(**edited, run=str(run), data__sites="0"), "--model.aligners", "{mean: Mean}"])
    bank = load_bank(run / "aligners.safetensors")
    width = bank.maps[FORWARD]["mean"].d_x
    torch.manual_seed(0)
    aligner = SparseAligner(1, width, width, latents=16, active=1, selection="l1")
    crosscoder = aligner.crosscoder
    with torch.no_grad():
        crosscoder.decoders[1].copy_(crosscoder.decoders[0])
        for model, sign in enumerate((-1, 1)):
            crosscoder.encoders[model][0, :, 5] = sign * torch.eye(width)[1]
            crosscoder.decoders[model][0, 5] = model * torch.eye(width)[1]
    bank.maps[FORWARD] = {"sparse": aligner}
    save_bank(bank, run / "sparse.safetensors")
    return run / "sparse.safetensors"


def test_the_latent_of_a_planted_change_is_named(edited: dict[str, object], dictionary: Path, tmp_path: Path) -> None:
    evaluate(["compare", *options(**edited, run=str(tmp_path), maps="[]", costs=0, latents=str(dictionary))])
    report = json.loads((tmp_path / "comparison.json").read_text())
    (row,) = report["latents"]
    assert (row["site"], row["latent"], row["top_tokens"]) == (0, 5, "great 100%")
    assert row["share"] == pytest.approx(1, abs=1e-6)
    assert "great" in row["context"].split()
    (said,) = [sentence for sentence in report["findings"] if "latents 5" in sentence]
    assert said.startswith("At site 0 the change lies in latents 5 (100.0%; great 100%)")
    assert "great 100%" in (tmp_path / "latents.csv").read_text()
    assert "Latents with the most of what differs at site 0" in (tmp_path / "report.html").read_text()


def test_dictionaries_of_other_models_sites_and_rows_are_refused(
    edited: dict[str, object], dictionary: Path, tmp_path: Path
) -> None:
    swapped = {"data__model_x": edited["data__model_y"], "data__model_y": edited["data__model_x"]}
    cases = [
        ({**swapped}, "was fitted on other models"),
        ({"data__sites": "1"}, r"Expected `data.sites` to hold those of .*\[\(0, 0\)\]"),
        ({"data__rows": "mean"}, "`data.rows` 'tokens', but got 'mean'"),
        ({"latents": str(dictionary.parent / "aligners.safetensors")}, "to hold a sparse dictionary of both models"),
    ]
    for changes, said in cases:
        given = {**edited, "run": str(tmp_path / "run"), "maps": "[]", "latents": str(dictionary), **changes}
        with pytest.raises(UserError, match=said):
            evaluate(["compare", *options(**given)])
