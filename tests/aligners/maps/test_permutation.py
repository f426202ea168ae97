import numpy as np
import pytest
import torch
from tests.references.maps import best_matching
from tests.rows import fitted
from tests.runs import related_rows
from torch import Tensor

from aligners.maps.linear import Permutation
from aligners.similarity.algebra.moments import moments_of

SITES = 2


def shuffled(d: int, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """X, its neurons in another order (and signs) with other offsets, and that order, each site its own."""
    draw = torch.Generator().manual_seed(3)
    x, _ = related_rows(SITES, 60, d, d)
    order = torch.stack([torch.randperm(d, generator=draw) for _ in range(SITES)])
    weight = torch.nn.functional.one_hot(order, d).double().mT
    if signed:
        weight = weight * (2 * torch.randint(0, 2, (SITES, 1, d), generator=draw) - 1)
    return x, x @ weight + torch.randn(SITES, 1, d, generator=draw).double(), weight


@pytest.mark.parametrize(("d_x", "d_y"), [(6, 6), (4, 6), (6, 4)])
@pytest.mark.parametrize("signed", [False, True])
def test_the_matching_is_the_best_of_all(d_x: int, d_y: int, signed: bool) -> None:
    x, y = related_rows(SITES, 50, d_x, d_y)
    aligner = fitted(Permutation(SITES, d_x, d_y, signed=signed), x, y)
    for site in range(SITES):
        a, b = x[site].numpy(), y[site].numpy()
        weight = best_matching(a, b, signed)
        np.testing.assert_array_equal(aligner.weight[site].numpy(), weight)
        np.testing.assert_allclose(aligner(x)[site].numpy(), (a - a.mean(0)) @ weight + b.mean(0), atol=1e-12)
        pairs = [np.corrcoef(a[:, i], b[:, j])[0, 1] for i, j in zip(*weight.nonzero(), strict=True)]
        expected = np.abs(pairs).mean() if signed else np.mean(pairs)
        assert aligner.findings()["mean_correlation"][site] == pytest.approx(expected)
    back = fitted(Permutation(SITES, d_y, d_x, signed=signed), y, x)
    torch.testing.assert_close(aligner.inverse(y), back(y))  # and neurons without a partner get their mean
    assert aligner.bijective == (d_x == d_y)


@pytest.mark.parametrize("signed", [False, True])
def test_neurons_in_another_order_are_recovered_exactly(signed: bool) -> None:
    x, y, weight = shuffled(12, signed)
    aligner = fitted(Permutation(SITES, 12, 12, signed=signed), x, y)
    assert torch.equal(aligner.weight, weight)
    torch.testing.assert_close(aligner(x), y, atol=1e-12, rtol=0)
    factors = torch.logspace(-3, 3, 12).double()  # scale and offset of a neuron do not change the matching
    other = fitted(Permutation(SITES, 12, 12, signed=signed), (x + 1000) * factors, y / factors - 5)
    assert torch.equal(other.weight, weight)


def test_constant_neurons_are_refused() -> None:
    x, y = related_rows(SITES, 50, 6, 6)
    x[1, :, 2] = 3.7
    x[1, :, 4] = 0.0
    assert moments_of(x, y).xx[1, 2, 2] > 0  # its mean is rounded
    with pytest.raises(ValueError, match=r"every neuron of X to vary.*2 of 6 neurons are constant.*site pair number 1"):
        Permutation(SITES, 6, 6).fit(moments_of(x, y))
    x, y = related_rows(SITES, 50, 6, 6)
    y[0, 3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"every neuron of Y to vary.*1 of 6 .* not finite at site pair number 0"):
        Permutation(SITES, 6, 6).fit(moments_of(x, y))
