from __future__ import annotations

import torch
from scipy.special import softmax
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN

from aligners.models.architectures import SoLU, register_solu, solu


def test_it_is_the_normalised_product_of_the_paper() -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    product = x.numpy() * softmax(x.numpy(), axis=-1)
    centred = product - product.mean(-1, keepdims=True)
    expected = centred / (product.var(-1, keepdims=True) + 1e-5) ** 0.5
    torch.testing.assert_close(solu(x), torch.from_numpy(expected))
    assert torch.equal(SoLU()(x), solu(x))
    assert not list(SoLU().parameters())


def test_the_next_map_absorbs_gain_and_bias() -> None:
    draw = torch.Generator().manual_seed(1)
    gain, bias, weight, shift = (torch.randn(n, generator=draw) for n in (8, 8, 40, 5))
    weight, z = weight.view(5, 8), solu(torch.randn(4, 8, generator=draw))
    absorbed = nn.functional.linear(z, weight * gain, shift + weight @ bias)
    torch.testing.assert_close(nn.functional.linear(gain * z + bias, weight, shift), absorbed)


def test_transformers_knows_it_once_it_is_registered() -> None:
    ACT2FN.pop("solu", None)
    register_solu()
    register_solu()
    config = GPT2Config(vocab_size=5, n_positions=4, n_embd=8, n_layer=1, n_head=1, activation_function="solu")
    assert isinstance(GPT2LMHeadModel(config).transformer.h[0].mlp.act, SoLU)
