import pytest
import torch
from scipy.special import softmax
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN

from aligners.models.architectures import SoLU, register_solu, solu
from aligners.models.calling import Caller, Layout
from tests.tiny import CLASSIFIERS, TEXTS, tiny_model, tiny_tokenizer, tokenised

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
    layout = Layout({"attention_mask": mask})
    turned = layout.turn(mask)
    assert turned[mask.any(1), 0].all()
    assert torch.equal(turned.sum(1), mask.sum(1))
    for before, after in zip(mask, turned, strict=True):  # real tokens keep their distances
        assert torch.equal(before.nonzero().diff(dim=0), after.nonzero().diff(dim=0))
    states = torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    assert torch.equal(layout.turn_back(layout.turn(states)), states)
    assert torch.equal(layout.turn(layout.turn_back(states)), states)
    unmasked = Layout({})
    assert unmasked.turn(states) is unmasked.turn_back(states) is states


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_batch_is_answered_as_its_texts_alone(architecture: str) -> None:
    model, caller = tiny_model(architecture), Caller(tiny_model(architecture))
    with torch.no_grad():
        expected = torch.cat([model(**tokenised((text,))).logits for text in TEXTS])
        for side in ("left", "right"):
            options = {"padding_side": side, "return_token_type_ids": True, "return_tensors": "pt"}
            batch = dict(tiny_tokenizer()(list(TEXTS), padding=True, **options))
            assert "token_type_ids" in batch  # not every family has them
            # The mask says what is padding, whatever token stands there.
            batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)
            assert torch.allclose(caller.logits(batch), expected, atol=1e-5)


def test_solu_is_the_normalised_product_of_the_paper_and_the_next_map_absorbs_gain_and_bias() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=draw, dtype=torch.float64) * 3
    product = x.numpy() * softmax(x.numpy(), axis=-1)
    centred = product - product.mean(-1, keepdims=True)
    expected = centred / (product.var(-1, keepdims=True) + 1e-5) ** 0.5
    torch.testing.assert_close(solu(x), torch.from_numpy(expected))
    gain, bias, weight, shift = (torch.randn(n, generator=draw) for n in (8, 8, 40, 5))
    weight, z = weight.view(5, 8), solu(torch.randn(4, 8, generator=draw))
    absorbed = nn.functional.linear(z, weight * gain, shift + weight @ bias)
    torch.testing.assert_close(nn.functional.linear(gain * z + bias, weight, shift), absorbed)


def test_transformers_knows_solu_once_it_is_registered() -> None:
    ACT2FN.pop("solu", None)
    register_solu()
    register_solu()
    config = GPT2Config(vocab_size=5, n_positions=4, n_embd=8, n_layer=1, n_head=1, activation_function="solu")
    activation = GPT2LMHeadModel(config).transformer.h[0].mlp.act
    assert isinstance(activation, SoLU)
    assert not list(activation.parameters())
