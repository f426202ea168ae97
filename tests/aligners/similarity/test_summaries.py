import numpy as np
import pytest
import torch
from tests.references import measures as reference
from tests.rows import CASES, paired, rows_of

from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.functional.cka import linear_cka
from aligners.similarity.functional.regression import neuronsim
from aligners.similarity.functional.summaries import angular_distance, localization, nuclear_norm


@pytest.mark.parametrize("case", CASES)
def test_a_nuclear_norm_is_the_sum_of_singular_values(case: str) -> None:
    moments = grid_moments(*rows_of(case))
    for rows, scatter in zip(rows_of(case), (moments.xx, moments.yy), strict=True):
        expected = torch.tensor([reference.nuclear_norm(np.asarray(layer)) for layer in rows], dtype=torch.float64)
        torch.testing.assert_close(nuclear_norm(scatter), expected, rtol=1e-8, atol=0)


def test_localization_leaves_a_layer_with_itself_out() -> None:
    x, _ = paired(30)
    neuron, subspace, own = neuronsim(x, x), linear_cka(x, x), torch.eye(3, dtype=torch.bool)
    expected = reference.localization(*(np.asarray(value) for value in (neuron, subspace, own)))
    torch.testing.assert_close(localization(neuron, subspace, own), torch.tensor(expected, dtype=torch.float64))
    elsewhere = localization(neuron + 5 * own, subspace, own)
    torch.testing.assert_close(elsewhere, localization(neuron, subspace, own))


def test_an_angular_distance_adds_up_over_matching_layers() -> None:
    x, _ = paired(30)
    y = x + 0.5 * paired(30, seed=1)[0]
    cka = linear_cka(x, y)
    torch.testing.assert_close(float(angular_distance(cka)), reference.angular_distance(np.asarray(cka)))
    assert angular_distance(torch.full((2, 2), 1 + 1e-13, dtype=torch.float64)) == 0
    torch.testing.assert_close(angular_distance(torch.zeros(4, 4)), torch.tensor(torch.pi))


def test_refusals() -> None:
    cka, one = torch.eye(3, dtype=torch.float64), torch.ones(2, 2)
    for value in (1.001, -1.1, float("nan")):
        cka[1, 1] = value
        with pytest.raises(ValueError, match=r"`cka` in \[-1, 1\], but layer 1 has"):
            angular_distance(cka)
    with pytest.raises(ValueError, match=r"leaves none to \[1\]"):
        localization(one, one, torch.tensor([[True, False], [True, True]]))
    with pytest.raises(ValueError, match="nuclear norm met or gave values that are not finite"):
        nuclear_norm(torch.full((1, 2, 2), torch.inf))
