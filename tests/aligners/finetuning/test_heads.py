from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aligners.finetuning.truncating import HeadBank
from aligners.models import FrozenModel
from tests.tiny import CLASSIFIERS, TEXTS, tiny_frozen, tiny_tokenizer

LABELS = torch.tensor([0, 1, 0, 1, 1])


def inputs() -> dict[str, Tensor]:
    return dict(tiny_tokenizer()(list(TEXTS), padding=True, return_tensors="pt"))


def answers(bank: HeadBank, model: FrozenModel) -> Tensor:
    return bank.logits(model, inputs(), model.front(inputs(), range(model.depth + 1)))


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_heads_start_as_the_model_s_own_and_alone_get_gradients(architecture: str) -> None:
    model = tiny_frozen(architecture)
    bank = HeadBank(model, 4)
    logits = answers(bank, model)
    assert logits.shape == (4, len(TEXTS), 2)
    for site in range(4):
        assert torch.equal(logits[site], model.tail(inputs(), model.depth, model.front(inputs(), [site])[0]))
    logits.square().sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in bank.parameters() if weight.ndim > 1)
    assert all(weight.grad is None and not weight.requires_grad for weight in model.model.parameters())


def trained(model: FrozenModel, sites: list[int]) -> Tensor:
    """The weights of the last head after some steps on the sum of all losses."""
    bank = HeadBank(model, len(sites))
    optimizer = torch.optim.AdamW(bank.parameters(), lr=1e-2)
    states = model.front(inputs(), sites)
    for _ in range(3):
        optimizer.zero_grad()
        loss = [torch.nn.functional.cross_entropy(each, LABELS) for each in bank.logits(model, inputs(), states)]
        torch.stack(loss).sum().backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in bank.heads[-1].parameters()])


def test_a_head_in_a_bank_is_trained_as_alone() -> None:
    model = tiny_frozen()
    before = model.fingerprint
    assert torch.equal(trained(model, [0, 1, 3, 2]), trained(model, [2]))
    assert not torch.equal(trained(model, [1]), trained(model, [2]))
    del model.fingerprint
    assert model.fingerprint == before
