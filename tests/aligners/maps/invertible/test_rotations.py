from __future__ import annotations

import pytest
import torch

from aligners.maps.invertible.rotations import ShuffledHadamard


@pytest.mark.parametrize("width", [2, 3, 4, 7, 64, 70, 100, 384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_orthogonal_without_rounding(width: int, dtype: torch.dtype) -> None:
    one = torch.eye(width, dtype=dtype)
    matrix = ShuffledHadamard(width, 3)(one)
    assert matrix.dtype == dtype
    torch.testing.assert_close(matrix @ matrix.mT, one, rtol=0, atol=0)
    torch.testing.assert_close(ShuffledHadamard(width, 3).inverse(one), matrix.mT, rtol=0, atol=0)


def test_features_are_mixed_and_each_number_mixes_others() -> None:
    first, again, second = (ShuffledHadamard(128, number)(torch.eye(128)) for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert ((first != 0).sum(0) == 64).all()
    assert (first != second).float().mean() > 0.4


def test_no_checkpoint_holds_it() -> None:
    assert not ShuffledHadamard(8, 0).state_dict()


def test_gradients_are_those_of_finite_differences() -> None:
    rotation = ShuffledHadamard(7, 0)
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotation, x)
    assert torch.autograd.gradcheck(rotation.inverse, x)
