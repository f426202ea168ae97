"""The models that come with the package: what `.ci/ship` makes of their recipe, small, and the same for everybody."""

import json
import os
import runpy
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.processes import ROOT
from torch.testing import assert_close

from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.texts import Texts
from aligners.models import embedded
from aligners.models.embedded import embedded_model
from aligners.models.loading.load_models import load_frozen
from aligners.models.recipes import GPTRecipe

(FAMILY,) = embedded.SHIPPED.iterdir()
MANIFEST = json.loads((FAMILY / "manifest.json").read_text())
SHIP: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "ship"))


@pytest.fixture(scope="module")
def texts() -> Texts:
    return load_texts(TextSource(MANIFEST["text"]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_shipped_model_is_loaded_in_full_precision_and_predicts_as_well_as_recorded(
    seed: int, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "train", None)
    fit, held_out = list(texts.fit["text"]), list(texts.test["text"])
    folder = embedded_model(seed, fit, recipe=GPTRecipe(**MANIFEST["recipe"]), cache=tmp_path)
    weights, expected = FAMILY / f"seed-{seed}" / "model.safetensors", MANIFEST["seeds"][str(seed)]
    assert weights.stat().st_size <= 2**20
    assert sha256(weights.read_bytes()).hexdigest() == expected["sha256"]
    shipped, loaded = load_file(weights), load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in shipped.values()} == {torch.float16}
    for name, tensor in loaded.items():
        assert_close(tensor, shipped[name].float(), rtol=0, atol=0)
    assert load_frozen(str(folder)).tokenizer is not None
    losses = expected["held_out_loss"]
    assert SHIP["held_out_loss"](folder, folder, held_out) == pytest.approx(losses["shipped"], rel=1e-4)
    assert losses["shipped"] == pytest.approx(losses["trained"], rel=1e-4)  # rounding costs nothing


@pytest.mark.slow
def test_training_begins_again_as_recorded(texts: Texts) -> None:
    expected = MANIFEST["seeds"]["0"]["training_loss"]
    assert SHIP["first_losses"](0, list(texts.fit["text"])) == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif("ALIGNERS_RETRAIN" not in os.environ, reason="it takes a minute: ALIGNERS_RETRAIN=1 runs it")
def test_training_again_gives_the_same_held_out_loss(texts: Texts, tmp_path: Path) -> None:
    """Of one of the two; `.ci/ship check` trains both."""
    assert SHIP["check"](list(texts.fit["text"]), list(texts.test["text"]), tmp_path, seeds=(1,))


def test_one_that_was_trained_before_is_not_taken_for_it(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "embedded" / FAMILY.name
    shutil.copytree(FAMILY / "seed-0", old / "seed-0")
    fit = list(texts.fit["text"])
    assert embedded_model(0, fit, recipe=GPTRecipe(), cache=tmp_path) == old / "shipped-0"
    monkeypatch.setattr(embedded, "SHIPPED", tmp_path / "none")
    assert embedded_model(0, fit, recipe=GPTRecipe(), cache=tmp_path) == old / "seed-0"
