from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from aligners.finetuning.jobs import FINISHED, finished_row, save_classifier
from aligners.models import load_frozen
from datamodules.text.texts import FittedTexts
from tests.tiny import tiny_model, tiny_tokenizer

FITTED = FittedTexts.of({}, Dataset.from_dict({"text": ["a film"]}))
ROW = {"accuracy": 0.5, "base": "x", "base_fingerprint": "abc"}


def test_a_saved_classifier_is_whole_and_recognised(tmp_path: Path) -> None:
    folder = tmp_path / "none" / "seed-0"
    assert finished_row(folder, "abc") is None
    model = tiny_model("bert")
    save_classifier(folder, model, tiny_tokenizer(), ROW, FITTED)
    assert finished_row(folder, "abc") == ROW
    weight = load_frozen(folder).model.classifier.weight
    assert torch.equal(weight, model.classifier.weight)
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["seed-0"]


def test_nothing_is_left_of_one_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        save_classifier(
            tmp_path / "seed-0", tiny_model("bert"), tiny_tokenizer(), ROW | {"accuracy": float("nan")}, FITTED
        )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"to hold a fine-tuned classifier with its {FINISHED}"):
        finished_row(tmp_path, "abc")


def test_damaged_figures_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / FINISHED).write_text('{"accuracy": 0.')
    with pytest.raises(ValueError, match=rf"JSON in .*{FINISHED}, but it is damaged: .*Move"):
        finished_row(tmp_path, "abc")


def test_a_classifier_from_other_weights_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path / "seed-0", tiny_model("bert"), tiny_tokenizer(), ROW, FITTED)
    with pytest.raises(ValueError, match=r"fine-tuned from x with the fingerprint abc, but the base model's is other"):
        finished_row(tmp_path / "seed-0", "other")
