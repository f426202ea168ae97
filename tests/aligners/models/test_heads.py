"""Heads other than classifiers, one in another's place, and what single families need beyond the table."""

from typing import Any

import pytest
import torch
from tests.kinds import WORDS
from tests.tiny import LANGUAGE_HEADS, TEXTS, tiny_frozen, tiny_model, tokenised
from torch import nn
from transformers import BertLMHeadModel, XLNetLMHeadModel

from aligners import api
from aligners.injection.routes import build_routes, check_routes
from aligners.models import FrozenModel
from aligners.models.classifiers import head_parts, with_head
from aligners.models.hooks import inject

SITES = range(4)
CAUSAL = [architecture for architecture, task in LANGUAGE_HEADS if task == "causal"]


@pytest.fixture(params=LANGUAGE_HEADS, ids="-".join)
def frozen(request: pytest.FixtureRequest) -> FrozenModel:
    architecture, task = request.param
    return tiny_frozen(architecture, task=task)


def test_knows_its_head(frozen: FrozenModel) -> None:
    causal = frozen.model.config.model_type in CAUSAL
    assert (frozen.task, frozen.n_labels) == ("causal" if causal else "masked", None)
    assert frozen.causal is causal
    assert tiny_frozen(frozen.model.config.model_type).task == "classification"
    with pytest.raises(ValueError, match="fine-tuned to classify"), frozen.fresh_head(0):
        pass


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_are_what_the_plain_model_computes_in_the_layout_of_the_caller(frozen: FrozenModel, side: str) -> None:
    inputs = tokenised()
    with torch.no_grad():
        expected = frozen.model(**inputs).logits
    assert expected.shape == (*inputs["input_ids"].shape, len(WORDS) + 4)
    turned = tokenised(side=side)
    real, there = (batch["attention_mask"].bool() for batch in (inputs, turned))
    assert torch.equal(frozen.logits(turned)[there], expected[real])


@pytest.mark.parametrize("architecture", CAUSAL)
def test_causal_models_see_nothing_of_what_follows_and_cache_nothing(architecture: str) -> None:
    frozen = tiny_frozen(architecture, task="causal")
    received: list[Any] = []
    frozen.model.register_forward_hook(lambda model, args, output: received.append(output))
    frozen.logits(tokenised())
    assert not received[0].get("past_key_values")
    inputs = tokenised(TEXTS[1:2])
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 6:] = 9
    for a, b in zip(frozen.front(inputs, SITES), frozen.front(changed, SITES), strict=True):
        assert torch.allclose(a[:, :6], b[:, :6], atol=1e-5)
        assert not torch.allclose(a[:, 6:], b[:, 6:], atol=1e-2)


def test_a_causal_classifier_without_a_padding_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`pad_token_id` in the config of tiny-gpt2.*Set it to the padding token"):
        tiny_frozen("gpt2", pad_token_id=None)
    tiny_frozen("gpt2", task="causal", pad_token_id=None).self_test(tokenised())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t5_encoder_hands_its_position_bias_past_the_blocks_that_are_not_run(dtype: torch.dtype) -> None:
    encoder = tiny_frozen("t5", n_labels=None)
    encoder.model.to(dtype)
    inputs, blocks, seen = tokenised(), list(encoder.blocks), list[nn.Module]()
    with torch.no_grad():
        expected = encoder.model(**inputs).last_hidden_state
    for block in encoder.blocks:
        block.register_forward_hook(lambda block, args, output: seen.append(block))
    for site, states in enumerate(encoder.front(inputs, SITES)):
        seen.clear()
        with inject(encoder.blocks, encoder.architecture, site, states):
            assert torch.equal(encoder.model(**inputs).last_hidden_state, expected)
        assert seen == blocks[site:]
        with inject(encoder.blocks, encoder.architecture, site, states.roll(1, 0)):
            assert not torch.allclose(encoder.model(**inputs).last_hidden_state, expected, atol=1e-2)
        assert list(encoder.blocks) == blocks


def test_t5_classifier_has_no_logits_because_its_decoder_reads_the_text() -> None:
    frozen = tiny_frozen("t5")
    assert (frozen.task, frozen.n_labels) == (None, None)
    with pytest.raises(ValueError, match="no logits that follow from them alone"):
        frozen.logits(tokenised())
    assert torch.equal(frozen.front(tokenised(), [0])[0], frozen.model.transformer.shared(tokenised()["input_ids"]))


@pytest.mark.parametrize(("layers", "groups", "inner"), [(4, 2, 1), (5, 2, 2), (6, 6, 1)])
def test_shared_blocks_in_groups(layers: int, groups: int, inner: int) -> None:
    settings = {"layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    frozen, inputs = tiny_frozen("albert", **settings), tokenised(side="left")
    assert (frozen.depth, len(frozen.blocks), len(set(frozen.blocks))) == (layers, layers, groups)
    frozen.self_test(inputs)
    seen: list[nn.Module] = []
    for block in set(frozen.blocks):
        block.register_forward_hook(lambda block, args, output: seen.append(block))
    frozen.logits(inputs)
    assert seen == list(frozen.blocks)


def test_a_setting_that_the_table_does_not_cover_is_refused() -> None:
    with pytest.raises(ValueError, match="'deberta-v2' model without `conv_kernel_size`, but got one with"):
        tiny_frozen("deberta-v2", conv_kernel_size=3)


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("multi_label_classification", r"answers 3 questions of yes or no at once \(its `problem_type` is multi_label"),
        ("regression", r"predicts 3 numbers at once \(its `problem_type` is regression\)"),
    ],
)
def test_a_head_whose_problem_is_another_is_never_scored_as_one_of_classes(problem: str, says: str) -> None:
    frozen = tiny_frozen("bert", n_labels=3, problem_type=problem)
    assert (frozen.task, frozen.n_labels, frozen.regression) == (None, None, False)
    route = build_routes([frozen, frozen], [1], "forward")
    for asked in (
        lambda: frozen.logits(tokenised()),
        lambda: frozen.tail(tokenised(), 3, frozen.front(tokenised(), [3])[0]),
        lambda: api.inject(frozen, frozen, lambda rows: rows, TEXTS, site=1, labels=[0, 1, 2, 0, 1]),
        lambda: api.compare(frozen, frozen, TEXTS, labels=[0, 1, 2, 0, 1]),
        lambda: check_routes(route, torch.tensor([0, 1, 2]), "a.csv", allow_mixed=False, gradients=True),
    ):
        with pytest.raises(ValueError, match=says):
            asked()


@pytest.mark.parametrize(("architecture", "kind"), [("bert", BertLMHeadModel), ("xlnet", XLNetLMHeadModel)])
def test_a_next_token_head_on_blocks_that_see_the_next_token_is_none(architecture: str, kind: type) -> None:
    assert FrozenModel(kind(tiny_model(architecture).config), name="sees").task is None


@pytest.mark.parametrize("architecture", ["albert", "bert", "xlnet"])  # no final norm: all above the states is head
def test_another_head_stands_in_and_leaves(architecture: str) -> None:
    frozen, other = (tiny_frozen(architecture, seed=seed) for seed in (0, 1))
    own, states, parts = frozen.logits(tokenised()), frozen.front(tokenised(), [3])[0], head_parts(other.model)
    with with_head(frozen.model, parts):
        assert torch.equal(frozen.tail(tokenised(), 3, states), other.tail(tokenised(), 3, states))
        assert not torch.equal(frozen.logits(tokenised()), own)
    with pytest.raises(RuntimeError), with_head(frozen.model, parts):
        raise RuntimeError
    with pytest.raises(AttributeError), with_head(frozen.model, {**parts, "no.such": nn.Linear(1, 1)}):
        pass
    assert torch.equal(frozen.logits(tokenised()), own)
