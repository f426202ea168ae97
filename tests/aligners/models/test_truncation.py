from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aligners.models import FrozenModel, load_frozen
from aligners.models.hooks import blocks_of
from aligners.models.truncation import freeze, shortened
from tests.tiny import CLASSIFIERS, TEXTS, tiny_frozen, tiny_model, tiny_tokenizer

SPANS = [(1, 1), (2, 2), (3, 3), (1, 2), (2, 3), (1, 3)]


def inputs() -> dict[str, Tensor]:
    return dict(tiny_tokenizer()(list(TEXTS), padding=True, return_tensors="pt"))


def without(model: PreTrainedModel, first: int, last: int) -> FrozenModel:
    """The honest alternative: a copy whose blocks first..last are removed."""
    operated = copy.deepcopy(model)
    blocks = blocks_of(operated)
    left = len(blocks) - (last - first + 1)
    if len(blocks.listed) == len(blocks):
        del blocks.listed[first - 1 : last]
    kinds = getattr(operated.config, "layer_types", None)
    if kinds:
        operated.config.layer_types = kinds[: first - 1] + kinds[last:]
    operated.config.num_hidden_layers = left
    return FrozenModel(operated, name="operated")


def skipped(model: FrozenModel, batch: dict[str, Tensor], first: int, last: int) -> Tensor:
    (states,) = model.front(batch, [first - 1])
    return model.tail(batch, last, states)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_the_state_below_a_span_injected_above_it_is_a_model_without_these_blocks(architecture: str) -> None:
    frozen, batch = tiny_frozen(architecture), inputs()
    before, native = frozen.fingerprint, frozen.logits(batch)
    for first, last in SPANS[:-1]:
        expected = without(frozen.model, first, last).logits(batch)
        assert torch.equal(skipped(frozen, batch, first, last), expected), (first, last)
        assert not torch.equal(expected, native)
    assert torch.equal(frozen.logits(batch), native)
    del frozen.fingerprint
    assert frozen.fingerprint == before


def test_blocks_that_are_skipped_are_not_run() -> None:
    frozen = tiny_frozen()
    calls: list[int] = []
    for number, block in enumerate(frozen.blocks, start=1):
        block.register_forward_hook(lambda *_, number=number: calls.append(number))
    skipped(frozen, inputs(), 2, 2)
    assert calls == [1, 3]


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_shortened_model_is_a_real_one(architecture: str, tmp_path: Path) -> None:
    model, batch = tiny_model(architecture), inputs()
    whole = FrozenModel(copy.deepcopy(model), name="whole")
    short = shortened(model, 2)
    assert not short.training
    expected = skipped(whole, batch, 3, 3)
    short.save_pretrained(tmp_path)
    loaded = load_frozen(tmp_path, tokenizer=False)
    assert loaded.depth == 2
    assert torch.equal(loaded.logits(batch), expected)
    assert model.config.num_hidden_layers == 3
    assert torch.equal(FrozenModel(model, name="model").logits(batch), whole.logits(batch))


@pytest.mark.parametrize("layers", [0, 4])
def test_layers_that_a_model_has_not_cannot_be_left(layers: int) -> None:
    with pytest.raises(ValueError, match=rf"`layers` between 1 and L = 3.*got {layers}"):
        shortened(tiny_model("bert"), layers)


def test_several_shared_blocks_cannot_be_shortened() -> None:
    with pytest.raises(ValueError, match="one shared block, but got a AlbertForSequenceClassification with 2"):
        shortened(tiny_model("albert", layers=4, num_hidden_groups=2), 2)


def test_a_config_that_does_not_describe_what_is_left_is_refused() -> None:
    model = tiny_model("bert")
    model.bert.encoder.layer[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="A config of 2 layers does not describe"):
        shortened(model, 2)


def states_after_training(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """All states before and after one step on all parameters that train."""
    frozen = FrozenModel(copy.deepcopy(model), name="before")
    before = frozen.front(batch, range(frozen.depth + 1))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    loss = torch.nn.functional.cross_entropy(model(**named(model, batch)).logits, torch.tensor([0, 1, 0, 1, 1]))
    loss.backward()
    torch.optim.SGD(weights, lr=1.0).step()
    after = FrozenModel(copy.deepcopy(model), name="after").front(batch, range(frozen.depth + 1))
    return before, after


def named(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "token_type_ids"}


@pytest.mark.parametrize(
    ("architecture", "bottom"),
    [(name, 2) for name in CLASSIFIERS if name != "albert"]
    + [(name, 0) for name in ("bert", "deberta-v2", "gpt2", "opt")],  # the embeddings alone
)
def test_what_is_frozen_at_the_bottom_stays_and_the_rest_moves(architecture: str, bottom: int) -> None:
    model, batch = tiny_model(architecture), inputs()
    model.requires_grad_(True)
    freeze(model, bottom=bottom)
    before, after = states_after_training(model, batch)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [site <= bottom for site in range(4)]


def test_the_top_can_be_frozen_under_a_head_that_trains() -> None:
    model = tiny_model("bert")
    model.requires_grad_(True)
    freeze(model, top=2)
    still = {name.split(".")[3] for name, w in model.named_parameters() if ".layer." in name and not w.requires_grad}
    assert still == {"1", "2"}
    assert all(weight.requires_grad for weight in model.classifier.parameters())
    assert all(weight.requires_grad for weight in model.bert.embeddings.parameters())


def test_shared_blocks_freeze_all_or_none() -> None:
    model = tiny_model("albert")
    model.requires_grad_(True)
    for wrong in ({"bottom": 1}, {"top": 2}):
        with pytest.raises(ValueError, match=r"`(bottom|top)` of 0 or 3, but got [12]: a Albert.* the same block"):
            freeze(model, **wrong)
    freeze(model, top=3)
    assert not any(weight.requires_grad for weight in model.albert.encoder.albert_layer_groups.parameters())
    freeze(model, bottom=3)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == {
        "albert.pooler.weight",
        "albert.pooler.bias",
        "classifier.weight",
        "classifier.bias",
    }


@pytest.mark.parametrize("wrong", [{"bottom": 4}, {"bottom": -1}, {"top": 4}])
def test_blocks_that_a_model_has_not_cannot_be_frozen(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"`{name}` between 0 and L = 3, .*got {wrong[name]}"):
        freeze(tiny_model("bert"), **wrong)
