import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from aligners.models import FrozenModel
from aligners.models.architectures import Architecture, architecture_of, known_architectures, register
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


def count_calls(frozen: FrozenModel) -> Counter[nn.Module]:
    """How often the weights of each block are used, seen from inside the block."""
    calls: Counter[nn.Module] = Counter()
    for block in set(frozen.blocks):
        linears = [part for part in block.modules() if isinstance(part, (nn.Linear, Conv1D))]
        linears[-1].register_forward_pre_hook(lambda module, args, block=block: calls.update([block]))
    return calls


def test_every_registered_architecture_is_tested() -> None:
    assert set(known_architectures()) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_max_length_is_what_the_positions_allow(architecture: str) -> None:
    frozen = tiny_frozen(architecture)
    if architecture in RELATIVE:  # any length runs: it is what the config says
        assert frozen.max_length == (None if architecture in ("t5", "xlnet") else 64)
        return
    assert frozen.logits({"input_ids": torch.full((1, frozen.max_length), 9)}).isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        frozen.logits({"input_ids": torch.full((1, frozen.max_length + 1), 9)})


@pytest.mark.parametrize("side", ["right", "left"])
def test_injecting_what_was_read_changes_nothing(frozen: FrozenModel, side: str) -> None:
    inputs = tokenised(side=side)
    other = {**inputs, "input_ids": inputs["input_ids"].where(inputs["attention_mask"] == 0, 9)}
    expected = frozen.logits(inputs)
    for site in SITES:
        states = frozen.front(inputs, [site])[0]
        assert torch.equal(frozen.tail(inputs, site, states), expected)
        assert torch.equal(frozen.tail(other, site, states), expected)  # it sees nothing of the text but where it is
        assert not torch.allclose(frozen.tail(inputs, site, states.roll(1, 0)), expected, atol=1e-2)


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


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_alone_gives_what_it_gives_in_a_batch(frozen: FrozenModel, side: str) -> None:
    batch = tokenised(side=side)
    for i, text in enumerate(TEXTS):
        alone = tokenised((text,))
        mask = batch["attention_mask"][i].bool()
        assert torch.allclose(frozen.logits(batch)[i], frozen.logits(alone)[0], atol=1e-4)
        for many, one in zip(frozen.front(batch, SITES), frozen.front(alone, SITES), strict=True):
            assert torch.allclose(many[i][mask], one[0], atol=1e-4)


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


def test_gradients_reach_the_states_and_no_weight(varied: FrozenModel) -> None:
    frozen, inputs = varied, tokenised(side="left")
    for site in SITES:
        states = frozen.front(inputs, [site])[0].requires_grad_()
        frozen.tail(inputs, site, states).square().sum().backward()
        assert states.grad is not None
        assert states.grad.abs().sum() > 0
        assert states.grad.isfinite().all()
    assert all(weight.grad is None and not weight.requires_grad for weight in frozen.model.parameters())


def test_gradient_is_the_true_one() -> None:
    frozen = FrozenModel(tiny_model("mpnet").double(), name="double")
    inputs = tokenised(TEXTS[:2], side="left")
    states = frozen.front(inputs, [2])[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: frozen.tail(inputs, 2, x), states, fast_mode=True)


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
    expected, blocks, before = frozen.logits(inputs), list(frozen.blocks), hooks_of(frozen)
    states = frozen.front(inputs, SITES)

    def fail(module: nn.Module, args: object) -> None:
        raise ZeroDivisionError

    embeddings = [part for part in frozen.model.modules() if isinstance(part, nn.Embedding)]
    failing = [part.register_forward_pre_hook(fail) for part in (frozen.blocks[2], *embeddings)]
    for site in SITES:
        for call, args in ((frozen.front, (inputs, [site, 3])), (frozen.tail, (inputs, site, states[site]))):
            with pytest.raises(ZeroDivisionError):
                call(*args)
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
    kept: list[Tensor] = []  # a path around the sites: block 3 looks at what block 1 said

    def keep(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        kept[:] = [output]

    def use(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return output + kept.pop() if kept else None

    frozen.blocks[0].register_forward_hook(keep)
    frozen.blocks[2].register_forward_hook(use)
    with pytest.raises(RuntimeError, match=r"site 1 of tiny-bert changes its logits by up to \d"):
        frozen.self_test(tokenised())
    frozen.blocks[1].register_forward_hook(lambda block, args, output: output * float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
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


def test_token_types_are_turned_and_used() -> None:
    frozen = tiny_frozen()
    right, left = tokenised(), tokenised(side="left")
    lengths = right["attention_mask"].sum(1, keepdim=True)
    types = (torch.arange(right["input_ids"].shape[1]) >= lengths // 2).long() * right["attention_mask"]
    turned = types.flip(1).where(left["attention_mask"].bool(), 0)
    for i, n in enumerate(lengths[:, 0].tolist()):
        turned[i, -n:] = types[i, :n]
    expected = frozen.logits(right | {"token_type_ids": types})
    assert torch.allclose(frozen.logits(left | {"token_type_ids": turned}), expected, atol=1e-5)
    assert not torch.allclose(frozen.logits(right), expected, atol=1e-2)


def test_token_types_are_left_out_where_there_are_none() -> None:
    frozen, inputs = tiny_frozen("distilbert"), tokenised()
    with_types = inputs | {"token_type_ids": torch.ones_like(inputs["input_ids"])}
    received: set[str] = set()
    frozen.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: received.update(kwargs), with_kwargs=True
    )
    assert torch.equal(frozen.front(with_types, [3])[0], frozen.front(inputs, [3])[0])
    assert received == {"input_ids", "attention_mask"}


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
    assert first.identity() == {"name": "tiny-bert", "revision": None, "fingerprint": second.fingerprint}


def test_fresh_head_is_drawn_from_its_seed_and_goes_away(varied: FrozenModel) -> None:
    frozen, inputs = varied, tokenised()
    native, states = frozen.logits(inputs), frozen.front(inputs, [3])[0]
    for weight in frozen.model.parameters():
        weight._is_hf_initialized = True  # as transformers marks what was loaded
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    drawn = []
    for seed in (1, 1, 2):
        with frozen.fresh_head(seed):
            drawn.append(frozen.logits(inputs))
            assert torch.equal(frozen.front(inputs, [3])[0], states)
            assert not any(weight.requires_grad for weight in frozen.model.parameters())
    assert torch.equal(torch.rand(3), expected_draw)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[0], drawn[2], atol=1e-2)
    assert not torch.allclose(drawn[0], native, atol=1e-2)
    with pytest.raises(ZeroDivisionError), frozen.fresh_head(1):
        raise ZeroDivisionError
    assert torch.equal(frozen.logits(inputs), native)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_bare_encoder_is_read_but_has_no_logits(architecture: str) -> None:
    bare, inputs = tiny_frozen(architecture, n_labels=None), tokenised()
    assert bare.n_labels is None
    states = bare.front(inputs, SITES)
    assert [tuple(s.shape) for s in states] == [(*inputs["input_ids"].shape, 16)] * 4
    for call in (
        lambda: bare.logits(inputs),
        lambda: bare.tail(inputs, 1, states[1]),
        lambda: bare.self_test(inputs),
        lambda: bare.fresh_head(0).__enter__(),
    ):
        with pytest.raises(ValueError, match=f"classification head.*got tiny-{architecture}"):
            call()


def test_sites_states_and_inputs_that_there_are_not_are_refused() -> None:
    frozen, inputs = tiny_frozen(), tokenised()
    states = frozen.front(inputs, [0])[0]
    for site in (-1, 4):
        with pytest.raises(ValueError, match=rf"`here` between 0 and 3, but got {site}.*L = 3"):
            frozen.check_site(site, "here")
        with pytest.raises(ValueError, match="`sites`"):
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
    with pytest.raises(ValueError, match=r"out of bert, but got 'electra'.*register\('electra'"):
        tiny_frozen("electra")
    register("electra", Architecture("encoder.layer"))
    tiny_frozen("electra").self_test(tokenised())
