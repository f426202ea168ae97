import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import ARCHITECTURES, CLASSIFIERS, LANGUAGE_HEADS, tiny_folder, tiny_frozen, tiny_model, tokenised
from transformers import PreTrainedModel, T5ForConditionalGeneration, T5ForSequenceClassification, T5Model
from transformers.utils import logging

from aligners.datamodules.store.stored_states import BESIDE
from aligners.errors import UserError
from aligners.models import load_frozen
from aligners.models.loading.known import KnownModels, SleepingModel
from aligners.models.model_identity import same_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "model")


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def keep_weights(folder: Path, keep: Callable[[str], bool], dtype: torch.dtype = torch.float32) -> None:
    path = folder / "model.safetensors"
    save_file({k: v.to(dtype) for k, v in load_file(path).items() if keep(k)}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "task"), [*((name, "classification") for name in CLASSIFIERS), *LANGUAGE_HEADS]
)
def test_loads_what_was_saved(architecture: str, task: str, tmp_path: Path) -> None:
    # AutoTokenizer takes a qwen2 model's tokenizer for Qwen2's own, whatever was saved.
    frozen = load_frozen(tiny_folder(tmp_path, architecture, task=task), tokenizer=architecture != "qwen2")
    saved = tiny_frozen(architecture, task=task)
    assert (frozen.task, frozen.n_labels) == (task, 2 if task == "classification" else None)
    assert torch.equal(frozen.logits(tokenised()), saved.logits(tokenised()))
    known = {**saved.identity(), "name": str(tmp_path), "revision": None}
    assert frozen.identity() == {**known, "attention": frozen.attention_used}
    assert frozen.identity()["fingerprint"] == saved.fingerprint
    assert frozen.tokenizer is None or frozen.tokenizer("the film")["input_ids"] == [0, 5, 8, 2]
    assert not frozen.model.training
    assert not any(weight.requires_grad for weight in frozen.model.parameters())


@pytest.mark.parametrize("head", ["BertLMHeadModel", "BertForPreTraining", None])
def test_any_other_head_is_left_aside(folder: Path, head: str | None) -> None:
    edit_config(folder, architectures=head and [head])
    frozen = load_frozen(folder)
    assert type(frozen.model).__name__ == "BertModel"
    assert frozen.task is None


def test_a_language_model_without_its_head_is_loaded_bare_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_folder(tmp_path, "mpnet", task="masked")
    assert load_frozen(tmp_path).task == "masked"
    keep_weights(tmp_path, lambda name: "lm_head" not in name)
    known = KnownModels(tmp_path / "known")
    frozen = load_frozen(tmp_path, known=known)
    known.save()
    assert (frozen.task, type(frozen.model).__name__) == (None, "MPNetModel")
    asleep = load_frozen(tmp_path, known=known)
    assert (asleep.task, type(asleep)) == (None, SleepingModel)
    assert [record.message for record in caplog.records if record.name == "aligners.models.loading.load_models"] == [
        f"{tmp_path} has no weights for the head of a MPNetForMaskedLM: no head is loaded."
    ]
    keep_weights(tmp_path, lambda name: "layer.1" not in name)
    with pytest.raises(ValueError, match=r"all weights of a MPNetForMaskedLM.*and 18 more"):
        load_frozen(tmp_path)


@pytest.mark.parametrize("kind", [T5Model, T5ForConditionalGeneration, T5ForSequenceClassification])
def test_the_encoder_is_taken_out_of_a_whole_t5(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    whole = kind(tiny_model("t5").config).eval()
    whole.save_pretrained(tmp_path)
    frozen = load_frozen(tmp_path, tokenizer=False)
    assert type(frozen.model).__name__ == "T5EncoderModel"
    with torch.no_grad():
        expected = whole.get_encoder()(**tokenised(), output_hidden_states=True).hidden_states[2]
    assert torch.equal(frozen.front(tokenised(), [2])[0], expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_bare_encoder_has_no_random_weights(architecture: str, tmp_path: Path) -> None:
    tiny_folder(tmp_path, architecture, n_labels=None)
    keep_weights(tmp_path, lambda name: "pooler" not in name)
    first, second = (load_frozen(tmp_path, tokenizer=False) for _ in range(2))
    assert (first.task, first.n_labels) == (None, None)
    assert first.fingerprint == second.fingerprint
    states = tiny_frozen(architecture, n_labels=None).front(tokenised(), [3])[0]
    assert torch.equal(first.front(tokenised(), [3])[0], states)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sleeping_model_of_any_family_has_the_config_of_the_model(tmp_path: Path, architecture: str) -> None:
    folder, known = tiny_folder(tmp_path / "model", architecture), KnownModels(tmp_path / "known")
    plain = load_frozen(folder, known=known, tokenizer=False)
    known.save()
    asleep = load_frozen(folder, known=known, tokenizer=False)
    assert isinstance(asleep, SleepingModel)
    configs = [{k: v for k, v in model.config.to_dict().items() if k not in BESIDE} for model in (asleep, plain)]
    assert configs[0] == configs[1]
    assert (asleep.task, asleep.depth, asleep.nbytes) == (plain.task, plain.depth, plain.nbytes)
    assert type(asleep.model) is type(plain.model)


def test_old_weights_are_read_as_tensors_only_and_cannot_run_code(folder: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
            return (Path.touch, (folder / "ran",))

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert load_frozen(folder).fingerprint == tiny_frozen().fingerprint
    torch.save({"weight": Code()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="it holds more than tensors, and only tensors are read") as found:
        load_frozen(folder)
    assert "weights_only" not in str(found.value)
    assert not (folder / "ran").exists()


def test_transformers_talks_again_afterwards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_tqdm_active", True)
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    load_frozen(folder)
    assert logging.get_verbosity() == logging.INFO
    assert logging.is_progress_bar_enabled()
    logging.set_verbosity(before)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda d: os.truncate(d / "model.safetensors", 5000), r"cannot be loaded \(SafetensorError"),
    "empty weights": (lambda d: os.truncate(d / "model.safetensors", 0), "download or save the model again"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no file named model.safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "config.json of the model .* not a valid JSON"),
    "a text for a size": (lambda d: edit_config(d, vocab_size="many"), r"config\.json of the model .*'vocab_size'"),
    "no size": (lambda d: edit_config(d, hidden_size=None), r"config\.json of the model .*'hidden_size'"),
    "no heads": (lambda d: edit_config(d, num_attention_heads=0), "`num_attention_heads` .* but got 0"),
    "fewer than no blocks": (lambda d: edit_config(d, num_hidden_layers=-1), "`num_hidden_layers` .* but got -1"),
    "whole numbers": (lambda d: keep_weights(d, lambda _: True, torch.int64), "floating-point .* as I64"),
    "no head": (
        lambda d: keep_weights(d, lambda name: "classifier" not in name),
        "BertForSequenceClassification.*classifier.bias, classifier.weight.*would be random",
    ),
    "a block too few": (lambda d: edit_config(d, num_hidden_layers=4), r"layer\.3\..* and 12 more"),
    "another shape": (lambda d: edit_config(d, vocab_size=20), "right shape, for bert.embeddings.word_embeddings"),
    "unknown family": (lambda d: edit_config(d, model_type="rwkv"), "one of `model_type` 'rwkv'"),
    "no tokenizer": (lambda d: [p.unlink() for p in d.glob("tokenizer*")], "without a vocabulary"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{"), "none that can be read"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_folder_is_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_frozen(folder)


def test_a_tokenizer_may_know_more_tokens_than_its_model(folder: Path) -> None:
    frozen = load_frozen(folder)
    frozen.tokenizer.add_special_tokens({"pad_token": "[more]"})
    frozen.tokenizer.save_pretrained(folder)
    again = load_frozen(folder)
    assert (again.vocabulary, len(again.tokenizer)) == (39, 40)
    assert again.tokenizer.pad_token_id is None  # a batch is padded with a token that the model has
    assert same_model(again.identity(), frozen.identity())


def test_models_and_options_that_there_are_not_are_refused(folder: Path) -> None:
    for name in ("no/such-model", "/no/such/folder"):
        with pytest.raises(ValueError, match=f"`name` to be a local model folder or a model on the Hub.*{name}"):
            load_frozen(name)
    with pytest.raises(ValueError, match="`dtype` to be float32, bfloat16 or float16, but got 'int8'"):
        load_frozen(folder, dtype="int8")
    with pytest.raises(ValueError, match='attn_implementation="none"'):
        load_frozen(folder, attn_implementation="none")
    if find_spec("flash_attn") is None:
        with pytest.raises(ValueError, match=r"cannot be loaded \(ImportError: FlashAttention2"):
            load_frozen(folder, attn_implementation="flash_attention_2")
