"""Variants of fine-tuning, and the folders of finished classifiers."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from aligners.finetuning.jobs import FINISHED, Variant, finished_row, parse_variants, save_classifier
from aligners.models import load_frozen
from datamodules.text.texts import FittedTexts
from tests.tiny import tiny_model, tiny_tokenizer


def names(written: list[str], depth: int = 3) -> list[str]:
    return [variant.name for variant in parse_variants(written, depth)]


def test_what_is_written_is_what_is_tried_each_once() -> None:
    assert names(["none", "top:4", " bottom:0", "none"]) == ["none", "top-4", "bottom-0"]
    assert names(["bottom:all"]) == ["none", "bottom-0", "bottom-1", "bottom-2", "bottom-3"]
    assert names(["top:all", "none"]) == ["none", "top-1", "top-2", "top-3"]
    assert names(["layers:all"]) == ["layers-1", "layers-2", "layers-3"]


@pytest.mark.parametrize(
    ("written", "said"),
    [([], "at least one of `variants`")]
    + [([entry], "Expected `variants` out of none, bottom:4")
       for entry in ("bottom", "bottom:", "bottom:-1", "none:1", "middle:2", "layers:two", "")],
)  # fmt: skip
def test_anything_else_is_refused(written: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_variants(written, 3)


def trained(variant: Variant) -> set[str]:
    """Blocks of a BERT of three that train."""
    model = tiny_model("bert")
    variant.apply(model.requires_grad_(True))
    return {
        name.split(".")[3] for name, weight in model.named_parameters() if ".layer." in name and weight.requires_grad
    }


def test_variants_freeze_and_shorten() -> None:
    assert trained(Variant()) == {"0", "1", "2"}
    assert trained(Variant("bottom", 2)) == {"2"}
    assert trained(Variant("top", 1)) == {"0", "1"}
    model = tiny_model("bert")
    assert Variant("layers", 2).apply(model).config.num_hidden_layers == 2
    assert model.config.num_hidden_layers == 3


@pytest.mark.parametrize("variant", [Variant("bottom", 4), Variant("top", 4), Variant("layers", 0)])
def test_blocks_that_are_not_there_are_refused_beforehand(variant: Variant) -> None:
    with pytest.raises(ValueError, match=rf"`{variant.kind}` between . and L = 3"):
        variant.check(tiny_model("bert"))
    Variant().check(tiny_model("bert"))


FITTED = FittedTexts.of({}, Dataset.from_dict({"text": ["a film"]}))
ROW = {"accuracy": 0.5, "base": "x", "base_fingerprint": "abc"}


def test_a_saved_classifier_is_whole_and_recognised_and_anything_else_is_refused(tmp_path: Path) -> None:
    folder, model = tmp_path / "none" / "seed-0", tiny_model("bert")
    assert finished_row(folder, "abc") is None
    with pytest.raises(ValueError, match="Out of range float"):
        save_classifier(folder, model, tiny_tokenizer(), ROW | {"accuracy": float("nan")}, FITTED)
    assert list((tmp_path / "none").iterdir()) == []
    save_classifier(folder, model, tiny_tokenizer(), ROW, FITTED)
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["seed-0"]
    assert finished_row(folder, "abc") == ROW
    assert torch.equal(load_frozen(folder).model.classifier.weight, model.classifier.weight)
    with pytest.raises(ValueError, match=r"fine-tuned from x with the fingerprint abc, but the base model's is other"):
        finished_row(folder, "other")
    (folder / FINISHED).write_text('{"accuracy": 0.')
    with pytest.raises(ValueError, match=rf"JSON in .*{FINISHED}, but it is damaged: .*Move"):
        finished_row(folder, "abc")
    with pytest.raises(ValueError, match=rf"to hold a fine-tuned classifier with its {FINISHED}"):
        finished_row(tmp_path, "abc")
