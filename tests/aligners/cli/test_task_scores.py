"""Scores by task and labels that are numbers or missing, through the command lines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from tests.runs import activations, quiet_trainer
from tests.tiny import WORDS
from tests.world import TEST_TEXTS, World, sentences
from torchmetrics.functional.classification import binary_matthews_corrcoef

from aligners.cli.table import evaluate, train
from aligners.datamodules.model_texts import labelled_texts
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.maps.linear import Linear
from aligners.models import load_frozen

QUIET = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


def write(path: Path, texts: list[str], labels: list[Any]) -> str:
    lines = ["sentence1\tsentence2\tlabel", *(f"{t}\t{t}\t{label}" for t, label in zip(texts, labels, strict=True))]
    path.write_text("\n".join(lines))
    return str(path)


def similarity(text: str) -> float:
    """A number with a fraction that a text of known words has."""
    return sum(WORDS.index(word) for word in text.split()) / len(text.split()) / 8


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of STS-B-like files: sentence pairs and a number, tab-separated."""
    folder, texts = tmp_path_factory.mktemp("numbers"), sentences(120)
    fit, test = texts[TEST_TEXTS:], texts[:TEST_TEXTS]
    return [
        "--data.text.source", write(folder / "fit.tsv", fit, [f"{similarity(text):.2f}" for text in fit]),
        "--data.text.held_out", write(folder / "test.tsv", test, [f"{similarity(text):.2f}" for text in test]),
        "--data.text.text_columns", "[sentence1, sentence2]", "--data.max_length", "60", *QUIET,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tuned(world: World, numbers: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tuned") / "run"
    options = ["--seeds", "2", "--learning_rate", "3e-3", "--trainer.max_epochs", "2", "--run", str(run)]
    train(["finetune", "--data.models", world.model_x, *numbers, *options])
    return run


def answers_of(folder: Path, numbers: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model answers to the held-out texts, and their labels."""
    text = TextSource(numbers[1], held_out=numbers[3], text_columns=["sentence1", "sentence2"])
    batch = labelled_texts(str(folder), text=text, max_length=60).split("test")[list(range(TEST_TEXTS))]
    return load_frozen(folder).logits(batch.inputs[0])[:, 0], batch.labels


def test_a_regression_head_is_fine_tuned_on_numbers(tuned: Path, numbers: list[str]) -> None:
    found = json.loads((tuned / "finetuning.json").read_text())
    for row in found["rows"]:
        answers, labels = answers_of(tuned / row["folder"], numbers)
        assert row["score"] == pytest.approx(stats.pearsonr(answers, labels).statistic, abs=1e-4)
        assert row["score_low"] < row["score"] < row["score_high"]
        assert row["loss"] == pytest.approx((answers - labels).square().mean().item(), rel=1e-4)
        assert (row["score_name"], row["accuracy"], row["validation_accuracy"]) == ("pearson", None, None)
    model = load_frozen(tuned / "none" / "seed-0")
    assert (model.n_labels, model.regression, model.model.config.problem_type) == (1, True, "regression")
    assert (found["meta"]["score"], found["meta"]["majority_score"]) == ("pearson", 0)
    assert found["summary"][0]["score"] == pytest.approx(sum(row["score"] for row in found["rows"]) / 2)


@pytest.mark.slow
def test_surgery_follows_the_score(tuned: Path, numbers: list[str], tmp_path: Path, world: World) -> None:
    models = ["--data.models", f"{tuned}/none/seed-0", "--data.bases", world.model_x]
    scored = ["--data.text.score", "spearman", "--trainer.max_epochs", "1", "--run", str(tmp_path / "run")]
    evaluate(["surgery", *models, *numbers, *scored])
    found = json.loads((tmp_path / "run" / "surgery.json").read_text())
    native = [row for row in found["rows"] if row["kind"] == "native"]
    expected = stats.spearmanr(*answers_of(tuned / "none" / "seed-0", numbers)).statistic
    assert [row["score"] for row in native] == [pytest.approx(expected, abs=1e-4)]
    assert {(row["score_name"], row["accuracy"]) for row in found["rows"]} == {("spearman", None)}
    assert {row["kind"] for row in found["rows"]} == {"native", "untuned", "tuned", "tuned_orig", "skip"}
    assert found["meta"]["majority_score"] == 0
    assert (tmp_path / "run" / "truncation.png").is_file()


def test_numbers_that_no_head_answers_or_that_are_all_equal_are_refused(
    tuned: Path, world: World, numbers: list[str], tmp_path: Path
) -> None:
    source = write(tmp_path / "one.tsv", sentences(80), [0.5] * 80)
    equal = ["--data.text.source", source, "--data.text.text_columns", "[sentence1]", "--data.max_length", "60", *QUIET]
    model, further = f"{tuned}/none/seed-0", f"{tuned}/none/seed-1"
    same = "Expected different numbers to predict"
    for run, text, options, said in (
        (evaluate, numbers, ["surgery", "--data.models", world.model_x], r"Expected classes.*fractional numbers"),
        (evaluate, numbers, ["inject", "--data.model_x", world.model_x, "--data.model_y", world.model_y],
         r"Expected classes.*fractional numbers"),
        (train, equal, ["finetune", "--data.models", world.model_x], same),
        (evaluate, equal, ["surgery", "--data.models", model], same),
        (evaluate, equal, ["inject", "--data.model_x", model, "--data.model_y", further], same),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            run([*options, *text, "--run", str(tmp_path / f"{options[0]}-{text is equal}")])


def test_a_regression_head_is_injected_into(tuned: Path, numbers: list[str], tmp_path: Path) -> None:
    models = ["--data.model_x", f"{tuned}/none/seed-0", "--data.model_y", f"{tuned}/none/seed-1"]
    options = ["--data.sites", "[1, 3]", "--closed_form", "[linear]", "--both_directions", "true"]
    evaluate(["inject", *models, *numbers, *options, "--run", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run" / "report.json").read_text())
    rows = {(row["direction"], row["method"], row["site_y"]): row for row in found["rows"]}
    x, labels = answers_of(tuned / "none" / "seed-0", numbers)
    y, _ = answers_of(tuned / "none" / "seed-1", numbers)
    for name, answers in (("native_x", x), ("native_y", y)):
        row = rows["forward", name, None]
        assert row["score"] == pytest.approx(stats.pearsonr(answers, labels).statistic, abs=1e-4)
        assert row["loss"] == pytest.approx((answers - labels).square().mean().item(), rel=1e-4)
        assert row["agreement"] == pytest.approx(stats.pearsonr(answers, y).statistic, abs=1e-4)
        assert row["score_low"] < row["score"] < row["score_high"]
    assert rows["backward", "native_y", None]["score"] == rows["forward", "native_x", None]["score"]
    for method, site in (("linear", 1), ("identity", 3), ("random_classifier", None), ("random_label", None)):
        assert -1 <= rows["forward", method, site]["score"] <= 1
        assert rows["forward", method, site]["loss"] > 0
    constant = rows["forward", "constant_label", None]
    fitted = [float(line.rsplit("\t", 1)[1]) for line in Path(numbers[1]).read_text().splitlines()[1:]]
    assert constant["score"] == 0
    assert constant["loss"] == pytest.approx((labels - sum(fitted) / len(fitted)).square().mean().item(), rel=0.05)
    assert {(row["score_name"], row["accuracy"]) for row in found["rows"]} == {("pearson", None)}
    assert found["meta"]["score"] == "pearson"
    assert (tmp_path / "run" / "accuracy.png").is_file()


def test_injection_by_matthews_correlation(world: World, tmp_path: Path, capsys: Any) -> None:
    text = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.max_length", "60"]
    models = ["--data.model_x", world.model_x, "--data.model_y", world.model_y, "--data.text.score", "mcc"]
    options = ["--data.sites", "[2]", "--closed_form", "[linear]", "--run", str(tmp_path / "run")]
    evaluate(["inject", *models, *text, *QUIET, *options])
    assert "MCC × 100" in capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "report.json").read_text())
    rows = {row["method"]: row for row in found["rows"]}
    data = labelled_texts(
        [world.model_x, world.model_y], text=TextSource(world.fit, held_out=world.test), max_length=60
    )
    batch = data.split("test")[list(range(TEST_TEXTS))]
    for name, model in zip(("native_x", "native_y"), data.frozen, strict=True):
        answers = model.logits(batch.inputs[0]).argmax(-1)
        expected = binary_matthews_corrcoef(answers, batch.labels).item()
        assert rows[name]["score"] == pytest.approx(expected, abs=1e-6)
        assert rows[name]["accuracy"] == pytest.approx((answers == batch.labels).double().mean().item())
    assert rows["constant_label"]["score"] == 0
    assert rows["constant_label"]["accuracy"] > 0.3


@pytest.mark.parametrize("labels", [[-1], [""], [0.25, 1.5]])
def test_maps_are_fitted_whatever_the_labels(world: World, tmp_path: Path, labels: list[Any]) -> None:
    source = write(tmp_path / "texts.tsv", sentences(80), [labels[i % len(labels)] for i in range(80)])
    data = activations(world, text=TextSource(source, text_columns=["sentence1"]), sites=[1])
    module = Alignment({"linear": Linear})
    quiet_trainer(max_epochs=-1).fit(module, datamodule=data)
    assert module.moments.n > 0
