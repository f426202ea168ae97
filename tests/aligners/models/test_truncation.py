import copy
from pathlib import Path

import pytest
import torch
from tests.tiny import CLASSIFIERS, VARIED, tiny_frozen, tiny_model, tokenised
from transformers import PreTrainedModel

from aligners.models import FrozenModel, load_frozen
from aligners.models.classifiers import freeze, shortened
from aligners.models.hooks import blocks_of

SPANS = [(1, 1), (2, 2), (3, 3), (1, 2), (2, 3)]


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


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_the_state_below_a_span_injected_above_it_is_a_model_without_these_blocks(architecture: str) -> None:
    frozen, batch = tiny_frozen(architecture), tokenised()
    before, native = frozen.fingerprint, frozen.logits(batch)
    for first, last in SPANS:
        expected = without(frozen.model, first, last).logits(batch)
        (states,) = frozen.front(batch, [first - 1])
        assert torch.equal(frozen.tail(batch, last, states), expected), (first, last)
        assert not torch.equal(expected, native)
    assert torch.equal(frozen.logits(batch), native)
    del frozen.fingerprint
    assert frozen.fingerprint == before


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_shortened_model_is_a_real_one(architecture: str, tmp_path: Path) -> None:
    model, batch = tiny_model(architecture), tokenised()
    whole = FrozenModel(copy.deepcopy(model), name="whole")
    short = shortened(model, 2)
    assert not short.training
    short.save_pretrained(tmp_path)
    loaded = load_frozen(tmp_path, tokenizer=False)
    assert loaded.depth == 2
    assert torch.equal(loaded.logits(batch), whole.tail(batch, 3, *whole.front(batch, [2])))
    assert model.config.num_hidden_layers == 3
    assert torch.equal(FrozenModel(model, name="model").logits(batch), whole.logits(batch))


def test_blocks_that_a_model_has_not_cannot_be_left_or_frozen() -> None:
    model = tiny_model("bert")
    for layers in (0, 4):
        with pytest.raises(ValueError, match=rf"`layers` between 1 and L = 3.*got {layers}"):
            shortened(model, layers)
    for name, count in (("bottom", 4), ("bottom", -1), ("top", 4)):
        with pytest.raises(ValueError, match=rf"`{name}` between 0 and L = 3, .*got {count}"):
            freeze(model, name, count)
    with pytest.raises(ValueError, match="one shared block, but got a AlbertForSequenceClassification with 2"):
        shortened(tiny_model("albert", layers=4, num_hidden_groups=2), 2)
    model.bert.encoder.layer[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="A config of 2 layers does not describe"):
        shortened(model, 2)


@pytest.mark.parametrize(
    ("architecture", "bottom"),
    [(name, 2) for name in VARIED if name != "albert"] + [("bert", 0), ("opt", 0)],  # 0: the embeddings alone
)
def test_what_is_frozen_at_the_bottom_stays_and_the_rest_moves(architecture: str, bottom: int) -> None:
    model, batch = tiny_model(architecture), tokenised()
    model.requires_grad_(True)
    freeze(model, "bottom", bottom)
    assert not any(weight.requires_grad for block in blocks_of(model)[:bottom] for weight in block.parameters())
    before = FrozenModel(copy.deepcopy(model), name="before").front(batch, range(4))
    torch.nn.functional.cross_entropy(model(**batch).logits, torch.tensor([0, 1, 0, 1, 1])).backward()
    torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0).step()
    after = FrozenModel(model, name="after").front(batch, range(4))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [site <= bottom for site in range(4)]


def test_the_top_can_be_frozen_under_a_head_that_trains() -> None:
    model = tiny_model("bert")
    model.requires_grad_(True)
    freeze(model, "top", 2)
    still = {name.split(".")[3] for name, w in model.named_parameters() if ".layer." in name and not w.requires_grad}
    assert still == {"1", "2"}
    assert all(weight.requires_grad for weight in model.classifier.parameters())
    assert all(weight.requires_grad for weight in model.bert.embeddings.parameters())


def test_shared_blocks_freeze_all_or_none() -> None:
    model = tiny_model("albert")
    model.requires_grad_(True)
    for kind, count in (("bottom", 1), ("top", 2)):
        with pytest.raises(ValueError, match=rf"`{kind}` of 0 or 3, but got {count}: a Albert.* the same block"):
            freeze(model, kind, count)
    freeze(model, "top", 3)
    assert not any(weight.requires_grad for weight in model.albert.encoder.albert_layer_groups.parameters())
    freeze(model, "bottom", 3)
    trains = {name.rsplit(".", 1)[0] for name, weight in model.named_parameters() if weight.requires_grad}
    assert trains == {"albert.pooler", "classifier"}
