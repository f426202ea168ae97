"""Heads other than classifiers, one in another's place, and what single families need beyond the table."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertLMHeadModel, XLNetLMHeadModel

from aligners.models import FrozenModel
from aligners.models.classifiers import head_parts, with_head
from aligners.models.hooks import inject
from tests.tiny import LANGUAGE_HEADS, TEXTS, WORDS, reference, tiny_frozen, tiny_model, tokenised

SITES = range(4)
CAUSAL = [architecture for architecture, task in LANGUAGE_HEADS if task == "causal"]


@pytest.fixture(params=LANGUAGE_HEADS, ids="-".join)
def frozen(request: pytest.FixtureRequest) -> FrozenModel:
    architecture, task = request.param
    return tiny_frozen(architecture, task=task)


def real(values: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return values[inputs["attention_mask"].bool()]


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
    assert torch.equal(real(frozen.logits(turned), turned), real(expected, inputs))


def test_self_test_passes_and_replaced_states_are_used(frozen: FrozenModel) -> None:
    inputs = tokenised(side="left")
    frozen.self_test(inputs)
    native = frozen.logits(inputs)
    for site in SITES:
        states = frozen.front(inputs, [site])[0].roll(1, 0).requires_grad_()
        logits = frozen.tail(inputs, site, states)
        assert not torch.allclose(logits, native, atol=1e-2)
        logits.square().sum().backward()
        assert states.grad is not None
        assert states.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in frozen.model.parameters())


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


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt2", "openai-gpt", "opt"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_causal_classifier_reads_the_last_real_token_whatever_pads(architecture: str, side: str) -> None:
    frozen, inputs = tiny_frozen(architecture), tokenised(side=side)
    expected = torch.cat([frozen.logits(tokenised((text,))) for text in TEXTS])
    padded_otherwise = {**inputs, "input_ids": inputs["input_ids"].where(inputs["attention_mask"].bool(), 9)}
    assert torch.allclose(frozen.logits(padded_otherwise), expected, atol=1e-4)
    for site, states in enumerate(frozen.front(padded_otherwise, SITES)):
        assert torch.allclose(frozen.tail(padded_otherwise, site, states), expected, atol=1e-4)


def test_a_causal_classifier_without_a_padding_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`pad_token_id` in the config of tiny-gpt2.*Set it to the padding token"):
        tiny_frozen("gpt2", pad_token_id=None)
    tiny_frozen("gpt2", task="causal", pad_token_id=None).self_test(tokenised())


@pytest.fixture
def encoder() -> FrozenModel:
    return tiny_frozen("t5", n_labels=None)


@pytest.mark.parametrize("side", ["right", "left"])
def test_t5_encoder_is_read_in_any_padding(encoder: FrozenModel, side: str) -> None:
    inputs = tokenised(side=side)
    expected, output = reference(tiny_frozen("t5", n_labels=None), tokenised())
    states = encoder.front(inputs, SITES)
    for found, wanted in zip(states, expected, strict=True):
        assert torch.equal(real(found, inputs), real(wanted, tokenised()))
    assert torch.equal(real(states[2], inputs), real(output.hidden_states[2], tokenised()))
    for i, text in enumerate(TEXTS):
        for many, one in zip(states, encoder.front(tokenised((text,)), SITES), strict=True):
            assert torch.allclose(many[i][inputs["attention_mask"][i].bool()], one[0], atol=1e-3)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t5_encoder_hands_its_position_bias_past_the_blocks_that_are_not_run(
    encoder: FrozenModel, site: int, dtype: torch.dtype
) -> None:
    encoder.model.to(dtype)
    inputs, blocks, seen = tokenised(), list(encoder.blocks), []
    with torch.no_grad():
        expected = encoder.model(**inputs).last_hidden_state
    for block in encoder.blocks:
        block.register_forward_hook(lambda block, args, output: seen.append(block))
    states = encoder.front(inputs, [0, site])[1]
    with inject(encoder.blocks, encoder.architecture, site, states):
        assert torch.equal(encoder.model(**inputs).last_hidden_state, expected)
    assert seen == blocks
    with inject(encoder.blocks, encoder.architecture, site, states.roll(1, 0)):
        assert not torch.allclose(encoder.model(**inputs).last_hidden_state, expected, atol=1e-2)
    with pytest.raises(ZeroDivisionError), inject(encoder.blocks, encoder.architecture, site, states):
        raise ZeroDivisionError
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


def test_shared_blocks_are_told_apart() -> None:
    frozen, inputs = tiny_frozen("albert"), tokenised()
    states = frozen.front(inputs, SITES)
    with torch.no_grad():
        expected = frozen.model(**inputs, output_hidden_states=True).hidden_states
    for a, b in zip(states, expected, strict=True):
        assert torch.equal(a, b)
    assert not torch.allclose(frozen.tail(inputs, 1, states[2]), frozen.tail(inputs, 2, states[2]), atol=1e-3)


@pytest.mark.parametrize(
    ("architecture", "setting"),
    [("bert", "is_decoder"), ("deberta-v2", "conv_kernel_size"), ("gemma3_text", "use_bidirectional_attention")],
)
def test_a_setting_that_the_table_does_not_cover_is_refused(architecture: str, setting: str) -> None:
    with pytest.raises(ValueError, match=f"'{architecture}' model without `{setting}`, but got one with"):
        tiny_frozen(architecture, **{setting: 3 if setting == "conv_kernel_size" else True})


@pytest.mark.parametrize(("architecture", "kind"), [("bert", BertLMHeadModel), ("xlnet", XLNetLMHeadModel)])
def test_a_next_token_head_on_blocks_that_see_the_next_token_is_none(architecture: str, kind: type) -> None:
    assert FrozenModel(kind(tiny_model(architecture).config), name="sees").task is None


@pytest.mark.parametrize("architecture", ["albert", "bert", "xlnet"])  # no final norm: all above the states is head
def test_another_head_stands_in_and_leaves(architecture: str) -> None:
    frozen, other = (tiny_frozen(architecture, seed=seed) for seed in (0, 1))
    own, states = frozen.logits(tokenised()), frozen.front(tokenised(), [3])[0]
    with with_head(frozen.model, head_parts(other.model)):
        assert torch.equal(frozen.tail(tokenised(), 3, states), other.tail(tokenised(), 3, states))
        assert not torch.equal(frozen.logits(tokenised()), own)
    with (
        pytest.raises(AttributeError),
        with_head(frozen.model, {**head_parts(other.model), "no.such": nn.Linear(1, 1)}),
    ):
        pass
    with pytest.raises(RuntimeError), with_head(frozen.model, head_parts(other.model)):
        raise RuntimeError
    assert torch.equal(frozen.logits(tokenised()), own)
