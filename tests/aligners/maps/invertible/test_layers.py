from __future__ import annotations

import pytest
import torch

from aligners.maps.inn import INN
from aligners.maps.invertible import ShuffledHadamard, TriangularPair

SITES, WIDTH = 2, 5


def moved(width: int = WIDTH, size: float = 0.3) -> TriangularPair:
    torch.manual_seed(0)
    pair = TriangularPair(SITES, width).double()
    torch.nn.init.normal_(pair.entries, std=size)
    return pair


@pytest.mark.parametrize("width", [2, 5, 96])
def test_it_is_one_matrix_and_its_inverse(width: int) -> None:
    pair, one = moved(width, 0.5 / width), torch.eye(width, dtype=torch.float64).expand(SITES, -1, -1)
    matrix = pair(one)
    torch.testing.assert_close(pair.inverse(one), torch.linalg.inv(matrix))
    torch.testing.assert_close(pair.log_det(), torch.linalg.slogdet(matrix).logabsdet)
    x = torch.randn(SITES, 7, width, dtype=torch.float64)
    torch.testing.assert_close(pair(x), x @ matrix)
    torch.testing.assert_close(pair.inverse(pair(x)), x)


def test_it_starts_at_the_identity_and_can_move_anywhere() -> None:
    pair, x = TriangularPair(SITES, WIDTH), torch.randn(SITES, 9, WIDTH)
    assert torch.equal(pair(x), x)
    assert torch.equal(pair.inverse(x), x)
    pair(x).square().sum().backward()
    assert pair.entries.grad is not None
    assert (pair.entries.grad != 0).all()


@pytest.mark.parametrize("way", ["forward", "inverse"])
def test_gradients_are_those_of_finite_differences(way: str) -> None:
    pair, x = moved(3), torch.randn(SITES, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: getattr(pair, way)(x), (x, pair.entries))


def test_a_checkpoint_of_before_it_loads_as_the_same_map() -> None:
    torch.manual_seed(0)
    before, x = INN(SITES, 6, 6, couplings=3), torch.randn(SITES, 4, 6)
    for coupling in before.couplings:
        torch.nn.init.normal_(coupling.conditioner.last.weight)
    weights = {name: weight for name, weight in before.state_dict().items() if not name.startswith("pairs")}
    again = INN(SITES, 6, 6, couplings=3)
    torch.nn.init.normal_(again.pairs[1].entries)  # type: ignore[arg-type]
    again.load_state_dict(weights)
    assert torch.equal(again(x), before(x))


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
