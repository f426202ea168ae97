from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.tiny import ARCHITECTURES, TEXTS, VARIED, reference, tiny_folder, tiny_frozen, tokenised

from aligners.models import FrozenModel, load_frozen

SITES = (3, 0, 1)


def eager(architecture: str = "bert", **options: int | None) -> FrozenModel:
    frozen = tiny_frozen(architecture, **options)
    frozen.model.set_attn_implementation("eager")
    return frozen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_states_are_what_the_plain_model_computes(architecture: str) -> None:
    frozen = eager(architecture)
    inputs = tokenised(side=frozen.architecture.padding)
    expected, output = reference(eager(architecture), inputs, output_attentions=True)
    weights, states = frozen.attention(inputs, SITES)
    assert len(weights) == frozen.depth
    own = output.encoder_attentions if "encoder_attentions" in output else output.attentions
    for found, wanted in zip(weights, own, strict=True):
        assert found.shape == (len(TEXTS), 2, *inputs["input_ids"].shape[1:] * 2)
        assert torch.equal(found, wanted)
    for site, found in zip(SITES, states, strict=True):
        assert torch.equal(found, expected[site])
    # Far from uniform and from each other: random models would otherwise agree with anything.
    assert weights[0].std() > 0.05
    assert not torch.allclose(weights[0], weights[1], atol=0.1)


@pytest.mark.parametrize("architecture", [*VARIED, "t5"])
def test_rows_are_distributions_over_the_tokens_of_their_text_wherever_it_is_padded(architecture: str) -> None:
    frozen = eager(architecture)
    right, left = tokenised(), tokenised(side="left")
    lengths, mask = right["attention_mask"].sum(1).tolist(), left["attention_mask"].bool()
    frozen.model.train()  # nothing is dropped all the same
    for weights, other in zip(frozen.attention(left)[0], frozen.attention(right)[0], strict=True):
        rows = weights.transpose(1, 2)[mask]
        torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:2]))
        assert rows.masked_fill(mask[:, None, None].expand_as(weights).transpose(1, 2)[mask], 0).eq(0).all()
        for text, n in enumerate(lengths):
            torch.testing.assert_close(weights[text, :, -n:, -n:], other[text, :, :n, :n], atol=1e-5, rtol=0)


def test_weights_that_a_model_does_not_form_or_hand_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other, frozen = tiny_frozen(), eager()
    other.blocks[0].register_forward_pre_hook(lambda block, args: pytest.fail("a block was run"))
    with pytest.raises(ValueError, match=r"got tiny-bert with 'sdpa'.*attn_implementation=\"eager\""):
        other.attention(tokenised())
    monkeypatch.setattr(frozen.model.bert, "forward", lambda **arguments: SimpleNamespace(attentions=()))
    with pytest.raises(ValueError, match="weights of 3 blocks, but got those of 0 from tiny-bert"):
        frozen.attention(tokenised())


@pytest.mark.parametrize(
    ("architecture", "n_labels"), [*((name, 2) for name in ARCHITECTURES), ("bert", None), ("t5", None)]
)
def test_untrained_is_drawn_from_its_seed_alone(architecture: str, n_labels: int | None) -> None:
    frozen, inputs = eager(architecture, n_labels=n_labels), tokenised()
    before, state = frozen.fingerprint, torch.get_rng_state()
    first, again, other = (frozen.untrained(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.fingerprint == again.fingerprint
    assert len({before, first.fingerprint, other.fingerprint}) == 3
    assert first.name == f"tiny-{architecture} (untrained, seed 1)"
    assert (first.depth, first.width, first.n_labels) == (frozen.depth, frozen.width, frozen.n_labels)
    assert first.tokenizer is frozen.tokenizer
    if n_labels is not None and architecture != "openai-gpt":  # of a scale that its recipe does not know
        assert first.fingerprint == eager(architecture, seed=1).fingerprint
    a, b = (model.attention(inputs)[0][0] for model in (first, frozen))  # eager, like the original
    assert not torch.allclose(a, b, atol=0.1)
    assert type(frozen)(frozen.model, name="again").fingerprint == before


def test_untrained_keeps_how_a_loaded_model_computes(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", n_labels=None)
    frozen = load_frozen(folder, dtype="bfloat16", attn_implementation="eager", tokenizer=False)
    frozen.blocks[0].register_forward_hook(lambda block, args, output: 0 * output)
    fresh = frozen.untrained(3)
    assert fresh.dtype == torch.bfloat16
    assert fresh.model.config._attn_implementation == "eager"
    assert fresh.model.config is not frozen.model.config
    assert fresh.model.state_dict().keys() == frozen.model.state_dict().keys()
    assert not fresh.blocks[0]._forward_hooks
    assert not any(weight.requires_grad for weight in fresh.model.parameters())
