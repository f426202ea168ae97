"""The site after the final norm, L + 1: what the model's trunk answers, and what its head reads."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.aligners.injection.test_injecting import evaluate, fit
from tests.contracts.families import heads
from tests.tiny import tiny_frozen, tokenised
from tests.world import World
from torch import Tensor

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.text.sources import TextSource
from aligners.maps.linear import Linear
from aligners.models import FrozenModel, load_frozen
from aligners.models.architectures import FAMILIES, architecture_of
from aligners.models.hooks import change

MAIN = ("bert", "esm", "gpt2", "llama", "mamba", "modernbert", "opt", "t5", "xlnet")
EVERY = [pytest.param(family, marks=() if family in MAIN else pytest.mark.slow) for family in FAMILIES]


def frozen_of(family: str, dtype: torch.dtype = torch.float32) -> FrozenModel:
    head = next(iter(heads(family)), None)
    frozen = tiny_frozen(family, **({"n_labels": None} if head is None else {"task": head}))
    return FrozenModel(frozen.model.to(dtype), name=f"tiny-{family}")


@torch.no_grad()
def last_hidden_state(frozen: FrozenModel, inputs: dict[str, Tensor]) -> Tensor:
    """As transformers returns it."""
    trunk = frozen._caller.trunk
    arguments = frozen._caller.arguments(trunk, inputs, frozen._layout(inputs))
    return trunk(**arguments).last_hidden_state


@pytest.mark.parametrize("family", EVERY)
def test_it_is_the_last_hidden_state(family: str) -> None:
    frozen = frozen_of(family)
    inputs = tokenised(side=frozen.architecture.padding)
    (found,) = frozen.front(inputs, [frozen.last_site])
    if family == "opt":  # which has one more map, to the width of its embeddings
        found = frozen._caller.trunk.get_submodule("decoder.project_out")(found)
    assert torch.equal(found, last_hidden_state(frozen, inputs))
    assert frozen.last_site - frozen.depth == bool(architecture_of(family).norm)


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_injection_there_feeds_the_head(family: str, dtype: torch.dtype) -> None:
    frozen = frozen_of(family, dtype)
    if not frozen.task:
        pytest.skip("it has no head")
    inputs = tokenised(side="left")
    expected = frozen.logits(inputs)
    (states,) = frozen.front(inputs, [frozen.last_site])
    other = {**inputs, "input_ids": inputs["input_ids"].where(inputs["attention_mask"] == 0, 9)}
    assert torch.equal(frozen.tail(other, frozen.last_site, states), expected)
    frozen.self_test(inputs)
    moved = states.clone().requires_grad_()
    changed = frozen.tail(inputs, frozen.last_site, moved.roll(1, 0))
    assert not torch.allclose(changed, expected, atol=1e-2)
    (gradient,) = torch.autograd.grad(changed.float().square().sum(), moved)
    assert gradient.abs().sum() > 0
    assert not any(module._forward_hooks for module in frozen.model.modules())


def test_the_norm_and_the_head_are_those_of_the_paper() -> None:
    """GPT-2's: layer normalisation, then the transposed embeddings, here in NumPy."""
    frozen, inputs = tiny_frozen("gpt2", task="causal"), tokenised()
    before, after = (states.double().numpy() for states in frozen.front(inputs, [3, 4]))
    norm = frozen.model.transformer.ln_f
    centred = before - before.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(before.var(-1, keepdims=True) + norm.eps)
    np.testing.assert_allclose(scaled * norm.weight.numpy() + norm.bias.numpy(), after, atol=1e-5)
    logits = after @ frozen.model.lm_head.weight.double().numpy().T
    np.testing.assert_allclose(logits, frozen.tail(inputs, 4, torch.tensor(after)).numpy(), atol=1e-5)


def test_only_the_head_is_run() -> None:
    frozen, inputs = tiny_frozen("llama", task="causal"), tokenised()
    (states,) = frozen.front(inputs, [4])
    frozen.logits(inputs)  # on first use it tests whether the model is causal
    for block in frozen.blocks:
        block.register_forward_pre_hook(lambda block, args: pytest.fail("a block was run"))
    frozen.tail(inputs, 4, states)


def test_a_model_without_one_says_so() -> None:
    frozen, inputs = tiny_frozen("bert"), tokenised()
    wanted = r"`sites` between 0 and 3, but got 4.*it has no final norm, whose output would be site L \+ 1"
    with pytest.raises(ValueError, match=wanted):
        frozen.front(inputs, [4])
    with pytest.raises(ValueError, match=r"`site` between 0 and 3, but got 4"):
        frozen.tail(inputs, 4, torch.zeros(5, 14, 16))
    with pytest.raises(ValueError, match=r"`sites` between 0 and 4, but got 5.*site L \+ 1 is the output of its final"):
        tiny_frozen("gpt2").front(inputs, [5])
    with pytest.raises(ValueError, match=r"`sites` between 1 and 3, but got 4"):
        tiny_frozen("gpt2").front(inputs, [4], "mlp")


def test_it_is_fitted_injected_and_stored_like_other_sites(world: World, causal: list[str], tmp_path: Path) -> None:
    """Models of 2 and of 3 blocks, whose norms are sites 3 and 4."""
    pair = world._replace(model_x=causal[0], model_y=causal[1])
    options = {"sites": ["1:norm", "norm", "2:3"], "store": tmp_path / "store"}
    stored = fit(pair, tmp_path, {"linear": Linear}, **options)
    assert stored.pairs["0_1"] == [(1, 4), (3, 4), (2, 3)]
    found = evaluate(pair, [stored], closed_form=["linear"], **options)
    rows = [row for row in found.rows if row["method"] == "linear"]
    assert [(row["site_x"], row["site_y"]) for row in rows] == stored.pairs["0_1"]
    assert all(row["fvu"] < 1 for row in rows)
    same = pair._replace(model_y=pair.model_x)
    alone = fit(same, tmp_path / "same", {"linear": Linear}, sites=["norm"])
    (own,) = [row for row in evaluate(same, [alone]).rows if row["method"] == "linear"]
    assert (own["agreement"], own["site_x"]) == (1, 3)  # a model's own states, put back where they came from
    with pytest.raises(ValueError, match=r"`sites` between 0 and 3, but got 4: .*it has no final norm"):
        fit(world, tmp_path / "bert", {"linear": Linear}, sites=["norm"])


def test_it_is_compared_and_generated_from(causal: list[str], world: World) -> None:
    text = TextSource(world.test)
    data = LayerActivations(causal[:1], layers=[2, 3], text=text, rows="tokens", special_tokens=True, max_length=60)
    frozen = load_frozen(causal[0])
    for batch in data.batches("test"):
        mask = batch.texts.inputs[0]["attention_mask"].bool()
        for layers, wanted in zip(batch.states[0], frozen.front(batch.texts.inputs[0], [2, 3]), strict=True):
            assert torch.equal(layers, wanted[mask])
    ids = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    (own,) = frozen.front(ids, [3])
    with change(frozen.model, frozen.blocks, 3, lambda states, _: own.roll(1, 1)):
        changed = frozen.logits(ids)
    assert torch.equal(changed, frozen.tail(ids, 3, own.roll(1, 1)))
