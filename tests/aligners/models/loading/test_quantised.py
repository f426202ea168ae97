"""Models with quantised weights, by torchao, whose weights are no plain tensors."""

import copy
from pathlib import Path

import pytest
import torch
from tests.tiny import tiny_folder, tiny_tokenizer, tokenised
from transformers import AutoModelForCausalLM, TorchAoConfig

from aligners.models import FrozenModel, load_frozen
from aligners.models.loading.known import KnownModels, SleepingModel

quantization = pytest.importorskip("torchao.quantization")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain = tiny_folder(tmp_path / "plain", "llama", task="causal")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(tmp_path / "int8")
    tiny_tokenizer().save_pretrained(tmp_path / "int8")
    return tmp_path / "int8"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_model_is_entered_bit_exactly(folder: Path, dtype: str) -> None:
    frozen = load_frozen(folder, dtype=dtype)
    for component in ("residual", "attention", "mlp"):
        frozen.self_test(tokenised(), component)
    assert (frozen.quantised, frozen.dtype, frozen.task) == ("torchao", getattr(torch, dtype), "causal")
    plain = load_frozen(folder.parent / "plain", dtype=dtype)
    assert 0 < (frozen.logits(tokenised()) - plain.logits(tokenised())).abs().mean() < 0.5
    assert frozen.untrained(0).quantised is None


def test_its_bytes_and_its_fingerprint_are_those_of_its_parts(folder: Path) -> None:
    frozen, plain = load_frozen(folder), load_frozen(folder.parent / "plain")
    assert frozen.nbytes < plain.nbytes
    assert frozen.fingerprint == load_frozen(folder).fingerprint != plain.fingerprint
    for part in ("qdata", "scale"):
        other = copy.deepcopy(frozen.model)
        values = getattr(other.model.layers[1].mlp.up_proj.weight, part)
        values[0] += 1
        assert FrozenModel(other, name="other").fingerprint != frozen.fingerprint


def test_it_is_known_again(folder: Path, tmp_path: Path) -> None:
    known = KnownModels(tmp_path / "known")
    first = load_frozen(folder, known=known)
    known.save()
    again = load_frozen(folder, known=known)
    assert isinstance(again, SleepingModel)
    assert (again.nbytes, again.quantised, again.awake) == (first.nbytes, "torchao", False)
    assert torch.equal(again.logits(tokenised()), first.logits(tokenised()))
    assert again.fingerprint == first.fingerprint
