import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.tiny import (
    ARCHITECTURES,
    CLASSIFIERS,
    TEXTS,
    VARIED,
    hooks_of,
    reference,
    tiny_frozen,
    tiny_model,
    tokenised,
)
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from aligners.models import FrozenModel
from aligners.models.architectures import architecture_of
from aligners.models.calling import Layout

SITES = range(4)
RELATIVE = {
    *("deberta-v2", "gemma2", "gemma3_text", "gpt_neox", "llama", "mistral", "modernbert", "phi", "qwen2", "qwen3"),
    *("t5", "xlnet"),
}


@pytest.fixture(params=CLASSIFIERS)
def frozen(request: pytest.FixtureRequest) -> FrozenModel:
    return tiny_frozen(request.param)


@pytest.fixture(params=VARIED)
def varied(request: pytest.FixtureRequest) -> FrozenModel:
    return tiny_frozen(request.param)


MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
    "mixed": [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]],
    "with a hole": [[0, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
    "empty": [[0, 0, 0, 0, 0], [0, 0, 1, 1, 0]],
}


@pytest.mark.parametrize("rows", MASKS.values(), ids=MASKS.keys())
def test_the_first_real_token_is_turned_to_the_front_and_back(rows: list[list[int]]) -> None:
    mask = torch.tensor(rows)
    layout = Layout({"input_ids": mask, "attention_mask": mask}, "right", mask.device)
    turned = layout.turn(mask)
    assert turned[mask.any(1), 0].all()
    assert torch.equal(turned.sum(1), mask.sum(1))
    for before, after in zip(mask, turned, strict=True):  # real tokens keep their distances
        assert torch.equal(before.nonzero().diff(dim=0), after.nonzero().diff(dim=0))
    states = torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    assert torch.equal(layout.turn_back(layout.turn(states)), states)
    assert torch.equal(layout.turn(layout.turn_back(states)), states)
    unmasked = Layout({"input_ids": mask}, "right", mask.device)
    assert unmasked.turn(states) is unmasked.turn_back(states) is unmasked.bring_back(states) is states


def count_calls(frozen: FrozenModel) -> Counter[nn.Module]:
    """How often the weights of each block are used, seen from inside the block."""
    calls: Counter[nn.Module] = Counter()
    for block in set(frozen.blocks):
        linears = [part for part in block.modules() if isinstance(part, (nn.Linear, Conv1D))]
        linears[-1].register_forward_pre_hook(lambda module, args, block=block: calls.update([block]))
    return calls


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_max_length_is_what_the_positions_allow(architecture: str) -> None:
    frozen = tiny_frozen(architecture)
    if architecture in RELATIVE:  # any length runs: it is what the config says
        assert frozen.max_length == (None if architecture in ("t5", "xlnet") else 64)
        return
    assert frozen.logits({"input_ids": torch.full((1, frozen.max_length), 9)}).isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        frozen.logits({"input_ids": torch.full((1, frozen.max_length + 1), 9)})


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "mpnet"])
def test_positions_begin_after_the_padding_index_whatever_it_is(family: str, padding: int) -> None:
    frozen = tiny_frozen(family, pad_token_id=padding)
    first = 1 if family == "mpnet" else padding  # whose table has its own
    assert frozen.max_length == frozen.config.max_position_embeddings - first - 1
    assert frozen.front({"input_ids": torch.full((1, frozen.max_length), 9)}, [0])[0].isfinite().all()
    with pytest.raises((RuntimeError, IndexError)):
        frozen.front({"input_ids": torch.full((1, frozen.max_length + 1), 9)}, [0])


@pytest.mark.parametrize("side", ["right", "left"])
def test_injecting_what_was_read_changes_nothing_and_gradients_reach_it(frozen: FrozenModel, side: str) -> None:
    inputs = tokenised(side=side)
    other = {**inputs, "input_ids": inputs["input_ids"].where(inputs["attention_mask"] == 0, 9)}
    expected = frozen.logits(inputs)
    for site, states in enumerate(frozen.front(inputs, SITES)):
        assert torch.equal(frozen.tail(inputs, site, states), expected)
        assert torch.equal(frozen.tail(other, site, states), expected)  # it sees nothing of the text but where it is
        states = states.requires_grad_()
        changed = frozen.tail(inputs, site, states.roll(1, 0))
        assert not torch.allclose(changed, expected, atol=1e-2)
        (gradient,) = torch.autograd.grad(changed.square().sum(), states)
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0
    assert all(weight.grad is None and not weight.requires_grad for weight in frozen.model.parameters())


def test_reading_is_what_the_plain_model_computes(frozen: FrozenModel) -> None:
    inputs = tokenised(side=frozen.architecture.padding)
    expected, output = reference(tiny_frozen(frozen.model.config.model_type), inputs)
    states = frozen.front(inputs, SITES)
    for found, wanted in zip(states, expected, strict=True):
        assert torch.equal(found, wanted)
    # Its own list agrees below the last site, where it may be after a final norm.
    for found, wanted in zip(states[:-1], output.hidden_states[:-1], strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(frozen.logits(inputs), output.logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_alone_gives_what_it_gives_in_a_batch(architecture: str, side: str) -> None:
    frozen, batch = tiny_frozen(architecture), tokenised(side=side)
    real = batch["attention_mask"].bool()
    # The mask says what is padding, whatever token stands there; not every family has token types.
    ids = batch["input_ids"].where(real, 7)
    batch = {"input_ids": ids, "attention_mask": batch["attention_mask"], "token_type_ids": torch.zeros_like(ids)}
    states, logits = frozen.front(batch, SITES), frozen.logits(batch) if frozen.task else None
    for i, text in enumerate(TEXTS):
        alone = tokenised((text,))
        if logits is not None:
            torch.testing.assert_close(logits[i], frozen.logits(alone)[0], atol=1e-4, rtol=0)
        for many, one in zip(states, frozen.front(alone, SITES), strict=True):
            torch.testing.assert_close(many[i][real[i]], one[0], atol=1e-4, rtol=0)


def test_head_and_tail_run_each_block_once_between_them_in_eval_mode(varied: FrozenModel) -> None:
    inputs = tokenised()
    expected, calls = varied.logits(inputs), count_calls(varied)
    for site in SITES:
        varied.model.train()  # as a module that holds the bare model may be
        calls.clear()
        lowest, states, again = varied.front(inputs, [0, site, 0])
        assert lowest is again
        assert calls == Counter(varied.blocks[:site])
        calls.clear()
        assert torch.equal(varied.tail(inputs, site, states), expected)
        assert calls == Counter(varied.blocks[site:])
    assert varied.front(inputs, []) == []


def test_hooks_of_the_user_act_and_survive(varied: FrozenModel) -> None:
    frozen, inputs = varied, tokenised()
    plain = frozen.front(inputs, [2])[0]

    def halve(block: nn.Module, args: tuple[Tensor, ...], output: Tensor | Sequence[Any]) -> object:
        return output / 2 if isinstance(output, Tensor) else (output[0] / 2, *output[1:])

    frozen.blocks[1].register_forward_hook(halve)
    frozen.blocks[2].register_forward_pre_hook(lambda block, args: (args[0] + 1, *args[1:]))
    frozen.blocks[0].register_forward_pre_hook(lambda block, args: (args[0] * 1.5, *args[1:]))
    before = hooks_of(frozen)
    frozen.self_test(inputs)
    assert hooks_of(frozen) == before
    assert not torch.allclose(frozen.front(inputs, [2])[0], plain / 2)
    assert frozen.blocks[1]._forward_hooks


def test_the_model_is_whole_again_after_an_exception(varied: FrozenModel) -> None:
    frozen, inputs = varied, tokenised()
    frozen.model.set_attn_implementation("eager")
    frozen.attention(inputs)  # transformers puts its own hooks in
    expected, blocks, before = frozen.logits(inputs), list(frozen.blocks), hooks_of(frozen)
    states = frozen.front(inputs, SITES)

    def fail(module: nn.Module, args: object) -> None:
        raise ZeroDivisionError

    calls = [partial(frozen.attention, inputs, SITES)]
    calls += [partial(frozen.front, inputs, [site, 3]) for site in SITES]
    calls += [partial(frozen.tail, inputs, site, states[site]) for site in SITES]
    for component in ("attention", "mlp"):
        calls += [partial(frozen.front, inputs, [3], component), partial(frozen.tail, inputs, 1, states[1], component)]
    embeddings = [part for part in frozen.model.modules() if isinstance(part, nn.Embedding)]
    failing = [part.register_forward_pre_hook(fail) for part in (frozen.blocks[2], *embeddings)]
    for call in calls:
        with pytest.raises(ZeroDivisionError):
            call()
    for handle in failing:
        handle.remove()
    assert all(a is b for a, b in zip(frozen.blocks, blocks, strict=True))
    assert hooks_of(frozen) == before
    assert torch.equal(frozen.logits(inputs), expected)


def test_a_head_keeps_no_memory(varied: FrozenModel) -> None:
    gc.disable()
    try:
        states = varied.front(tokenised(), [2])
        alive = weakref.ref(states[0])
        del states
        assert alive() is None
    finally:
        gc.enable()


def test_self_test_names_the_site_where_it_fails() -> None:
    frozen = tiny_frozen()
    said: list[Tensor] = []  # a path around the sites: block 3 looks at what block 1 said
    frozen.blocks[0].register_forward_hook(lambda block, args, output: said.append(output))
    frozen.blocks[2].register_forward_hook(lambda block, args, output: output + said.pop() if said else None)
    with pytest.raises(RuntimeError, match=r"site 1 of tiny-bert changes its logits by up to \d"):
        frozen.self_test(tokenised())
    frozen.blocks[1].register_forward_hook(lambda block, args, output: output * float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        frozen.self_test(tokenised())


def test_states_of_another_dtype_are_converted_and_autocast_is_self_consistent() -> None:
    frozen, inputs = tiny_frozen(), tokenised()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        frozen.self_test(inputs)
    states = frozen.front(inputs, [1])[0]
    assert torch.equal(frozen.tail(inputs, 1, states.double()), frozen.logits(inputs))
    half = FrozenModel(tiny_model("bert").bfloat16(), name="half")
    half.self_test(inputs)
    assert half.tail(inputs, 1, states).dtype == torch.bfloat16


def test_token_types_are_turned_and_used_where_there_are_some() -> None:
    frozen, right, left = tiny_frozen(), tokenised(), tokenised(side="left")
    types, turned = (torch.zeros_like(inputs["input_ids"]) for inputs in (right, left))
    for i, n in enumerate(right["attention_mask"].sum(1).tolist()):
        types[i, n // 2 : n] = turned[i, n // 2 - n :] = 1
    expected = frozen.logits(right | {"token_type_ids": types})
    assert torch.allclose(frozen.logits(left | {"token_type_ids": turned}), expected, atol=1e-5)
    assert not torch.allclose(frozen.logits(right), expected, atol=1e-2)
    without = tiny_frozen("distilbert")
    assert torch.equal(without.logits(right | {"token_type_ids": types}), without.logits(right))


def test_fingerprint_is_of_the_weights() -> None:
    first, second = tiny_frozen(), tiny_frozen()
    other, lower = tiny_model("bert"), FrozenModel(tiny_model("bert").bfloat16(), name="lower")
    weight = other.bert.encoder.layer[1].attention.self.query.weight
    weight.detach().view(torch.int32)[0, 0] ^= 1
    assert first.fingerprint == second.fingerprint
    assert len({first.fingerprint, FrozenModel(other, name="other").fingerprint, lower.fingerprint}) == 3
    for reading in (lambda w: w.view(torch.float16), lambda w: w.reshape(w.shape[::-1])):  # the same bytes
        half = tiny_model("bert").bfloat16()
        half.bert.embeddings.word_embeddings.weight.data = reading(half.bert.embeddings.word_embeddings.weight.data)
        assert FrozenModel(half, name="read otherwise").fingerprint != lower.fingerprint
    assert first.identity() == {**second.identity(), "name": "tiny-bert", "revision": None}
    assert first.identity()["fingerprint"] == second.fingerprint


def test_fresh_head_is_drawn_from_its_seed_and_goes_away(varied: FrozenModel) -> None:
    frozen, inputs = varied, tokenised()
    native, states = frozen.logits(inputs), frozen.front(inputs, [3])[0]
    for weight in frozen.model.parameters():
        weight._is_hf_initialized = True  # as transformers marks what was loaded
    drawn, before = [], torch.get_rng_state()
    for seed in (1, 1, 2):
        with frozen.fresh_head(seed):
            drawn.append(frozen.logits(inputs))
            assert torch.equal(frozen.front(inputs, [3])[0], states)
            assert not any(weight.requires_grad for weight in frozen.model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[0], drawn[2], atol=1e-2)
    assert not torch.allclose(drawn[0], native, atol=1e-2)
    with pytest.raises(ZeroDivisionError), frozen.fresh_head(1):
        raise ZeroDivisionError
    assert torch.equal(frozen.logits(inputs), native)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_bare_encoder_is_read_but_has_no_logits(architecture: str) -> None:
    bare, inputs = tiny_frozen(architecture, n_labels=None), tokenised()
    for call in (
        lambda: bare.logits(inputs),
        lambda: bare.tail(inputs, 1, *bare.front(inputs, [1])),
        lambda: bare.self_test(inputs),
        lambda: bare.fresh_head(0).__enter__(),
    ):
        with pytest.raises(ValueError, match=f"classification head.*got tiny-{architecture}"):
            call()


def test_sites_states_and_inputs_that_there_are_not_are_refused() -> None:
    frozen, inputs = tiny_frozen(), tokenised()
    states = frozen.front(inputs, [0])[0]
    for site in (-1, 4):
        with pytest.raises(ValueError, match=rf"`sites` between 0 and 3, but got {site}.*L = 3"):
            frozen.front(inputs, [0, site])
        with pytest.raises(ValueError, match="`site`"):
            frozen.tail(inputs, site, states)
    with pytest.raises(ValueError, match=r"`states` of shape \(B, T, d\) = \(5, 14, 16\).*\(5, 13, 16\)"):
        frozen.tail(inputs, 1, torch.zeros(5, 13, 16))
    with pytest.raises(ValueError, match="labels"):
        frozen.logits(inputs | {"labels": torch.zeros(5)})
    with pytest.raises(ValueError, match="input_ids"):
        frozen.front({"attention_mask": inputs["attention_mask"]}, [0])


def test_an_unknown_architecture_says_how_to_register_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.models.architectures._ARCHITECTURES", {"bert": architecture_of("bert")})
    with pytest.raises(ValueError, match=r"`model_type` 'electra'\..*register\('electra', .*Known are bert\.$"):
        tiny_frozen("electra")
