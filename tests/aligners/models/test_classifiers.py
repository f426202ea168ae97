import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import CLASSIFIERS, TEXTS, tiny_folder, tiny_model, tokenised
from torch import Tensor

from aligners.models import FrozenModel, load_frozen
from aligners.models.classifiers import head_parts, new_classifier

# The tokenizer that transformers makes of this family's saved folder has one token more than the tiny model.
FAMILIES = [name for name in CLASSIFIERS if name not in ("qwen2", "qwen3")]


def body(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.base_model.state_dict().items() if not name.startswith("pooler.")}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_bare_model_gets_a_head_and_keeps_its_body(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "base", architecture, n_labels=None)
    bare, state = load_frozen(folder), torch.random.get_rng_state()
    model, tokenizer = new_classifier(folder, 3, 5)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.num_labels == 3
    assert not model.training
    assert all(weight.requires_grad for weight in model.parameters())
    states = bare.front(tokenised(), [bare.depth])[0]
    frozen = FrozenModel(model, tokenizer, name="new")
    assert torch.equal(frozen.front(tokenised(), [bare.depth])[0], states)
    assert frozen.logits(tokenised()).shape == (len(TEXTS), 3)
    assert frozen.fingerprint == FrozenModel(new_classifier(folder, 3, 5)[0], name="same").fingerprint
    assert frozen.fingerprint != FrozenModel(new_classifier(folder, 3, 6)[0], name="other").fingerprint


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("mpnet", {"task": "masked"}), ("gpt2", {"task": "causal"}), ("bert", {}), ("distilbert", {}), ("llama", {})],
)
def test_another_model_loses_its_head_and_nothing_else(
    architecture: str, options: dict[str, str], tmp_path: Path
) -> None:
    old = tiny_model(architecture, **options)
    folder = tiny_folder(tmp_path / "base", architecture, **options)
    for n_labels in (2, 4):
        model, _ = new_classifier(folder, n_labels, 0)
        for name, value in body(old).items():
            assert torch.equal(model.base_model.state_dict()[name], value), name
        for name, part in head_parts(model).items() if not options else ():
            kept = name.startswith(model.base_model_prefix)  # the pooler, which this checkpoint has
            for weight, before in zip(part.parameters(), old.get_submodule(name).parameters(), strict=True):
                if weight.ndim > 1:  # biases are zero before and after
                    assert torch.equal(weight, before) == kept, name


def test_a_pooler_is_kept_where_there_is_one_and_drawn_where_there_is_none(tmp_path: Path) -> None:
    with_pooler = tiny_folder(tmp_path / "with", "bert", n_labels=None)
    without = tiny_folder(tmp_path / "without", "bert", task="masked")
    written = load_file(with_pooler / "model.safetensors")["pooler.dense.weight"]
    assert torch.equal(new_classifier(with_pooler, 2, 0)[0].bert.pooler.dense.weight, written)
    drawn = [new_classifier(without, 2, seed)[0].bert.pooler.dense.weight for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_it_is_saved_and_loaded_as_any_model_with_its_classes(tmp_path: Path) -> None:
    model, tokenizer = new_classifier(tiny_folder(tmp_path / "base", n_labels=None), 2, 0, label_names=["no", "yes"])
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "new")
    loaded = load_frozen(tmp_path / "new")
    assert loaded.task == "classification"
    assert loaded.model.config.id2label == {0: "no", 1: "yes"}
    assert torch.equal(loaded.logits(tokenised()), FrozenModel(model, name="new").logits(tokenised()))


@pytest.mark.parametrize("end", ["</s>", None])
def test_a_causal_model_without_padding_token_ends_texts_with_one(end: str | None, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "gpt2", task="causal")
    lacking = {"pad_token": None, "eos_token": end}
    for name, changes in (("config.json", {"pad_token_id": None}), ("tokenizer_config.json", lacking)):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    if end is None:
        with pytest.raises(ValueError, match="padding or an end-of-text token"):
            new_classifier(folder, 2, 0)
        return
    model, tokenizer = new_classifier(folder, 2, 0)
    assert tokenizer.pad_token == end
    assert model.config.pad_token_id == tokenizer.pad_token_id == 2


def test_a_missing_weight_of_the_body_is_an_error(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "base", n_labels=None)
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"below the head of a BertFor.*layer\.1\.output\.dense\.weight"):
        new_classifier(folder, 2, 0)


def test_bases_and_classes_that_there_are_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads the text a second time"):
        new_classifier(tiny_folder(tmp_path / "t5", "t5", n_labels=None), 2, 0)
    with pytest.raises(ValueError, match="`n_labels` of 2 or more classes, or 1 for a number, but got 0"):
        new_classifier(tmp_path, 0, 0)
    with pytest.raises(ValueError, match="3 different `label_names`, but got a, b"):
        new_classifier(tmp_path, 3, 0, label_names=["a", "b"])
