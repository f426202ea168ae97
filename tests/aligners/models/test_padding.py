from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aligners.models.calling import Layout

MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
    "mixed": [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]],
    "with a hole": [[0, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
    "empty": [[0, 0, 0, 0, 0], [0, 0, 1, 1, 0]],
}


@pytest.fixture(params=MASKS.values(), ids=MASKS.keys())
def mask(request: pytest.FixtureRequest) -> Tensor:
    return torch.tensor(request.param)


def test_turns_the_first_real_token_to_the_front(mask: Tensor) -> None:
    turned = Layout({"attention_mask": mask}).turn(mask)
    real = mask.any(1)
    assert turned[real, 0].all()
    assert torch.equal(turned.sum(1), mask.sum(1))


def test_keeps_distances_between_real_tokens(mask: Tensor) -> None:
    turned = Layout({"attention_mask": mask}).turn(mask)
    for before, after in zip(mask, turned, strict=True):
        assert torch.equal(before.nonzero().diff(dim=0), after.nonzero().diff(dim=0))


def test_turns_back(mask: Tensor) -> None:
    layout = Layout({"attention_mask": mask})
    states = torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    assert torch.equal(layout.turn_back(layout.turn(states)), states)
    assert torch.equal(layout.turn(layout.turn_back(states)), states)


def test_without_a_mask_nothing_moves() -> None:
    states = torch.arange(30.0).reshape(2, 5, 3)
    layout = Layout({})
    assert layout.turn(states) is states
    assert layout.turn_back(states) is states
