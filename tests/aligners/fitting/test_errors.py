from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aligners.fitting.errors import MapErrors
from aligners.maps.linear import Linear, Procrustes
from aligners.similarity.algebra.moments import Moments, moments_of
from tests.references.maps import cosine, fvu, mse
from tests.runs import related_rows

SITES, ROWS, D_X, D_Y = 3, 200, 6, 4


def rows(d_y: int = D_Y) -> tuple[Moments, Tensor, Tensor]:
    """Moments of the first half, and the held-out second half."""
    x, y = related_rows(SITES, 2 * ROWS, D_X, d_y)
    return moments_of(x[:, :ROWS], y[:, :ROWS]), x[:, ROWS:], y[:, ROWS:]


@pytest.mark.parametrize("batches", [1, 7])
def test_figures_are_those_of_the_definitions_for_any_batching(batches: int) -> None:
    moments, x, y = rows()
    aligner = Linear(SITES, D_X, D_Y).double()
    aligner.fit(moments)
    errors = MapErrors(moments.mean_x, moments.mean_y)
    for a, b in zip(x.tensor_split(batches, 1), y.tensor_split(batches, 1), strict=True):
        errors.update(aligner, a, b)
    found, mapped = errors.compute(), aligner(x)
    for site in range(SITES):
        g, b, mean = mapped[site].numpy(), y[site].numpy(), moments.mean_y[site].numpy()
        assert found["mse"][site] == pytest.approx(mse(g, b), rel=1e-9)
        assert found["fvu"][site] == pytest.approx(fvu(g, b, mean), rel=1e-9)
        assert found["relative_error"][site] == pytest.approx(fvu(g, b, mean) ** 0.5, rel=1e-9)
        assert found["cosine"][site] == pytest.approx(cosine(g, b), rel=1e-9)
        assert found["l2"][site] == pytest.approx((((g - b) ** 2).sum(1) ** 0.5).mean(), rel=1e-9)
    assert found["fvu_inverse"].isnan().all()
    assert found["round_trip"].isnan().all()


def test_the_inverse_is_measured_as_a_map_from_y_to_x() -> None:
    moments, x, y = rows(D_X)
    aligner = Procrustes(SITES, D_X, D_X).double()
    aligner.fit(moments)
    errors = MapErrors(moments.mean_x, moments.mean_y)
    for a, b in zip(x.tensor_split(5, 1), y.tensor_split(5, 1), strict=True):
        errors.update(aligner, a, b)
    found, back = errors.compute(), aligner.inverse(y)
    for site in range(SITES):
        expected = fvu(back[site].numpy(), x[site].numpy(), moments.mean_x[site].numpy())
        assert found["fvu_inverse"][site] == pytest.approx(expected, rel=1e-9)
    assert (found["round_trip"] < 1e-12).all()


class Leaky(Procrustes):
    """An inverse that is wrong by a known amount at one row."""

    wrong = 0.25

    def inverse(self, y: Tensor) -> Tensor:
        x = super().inverse(y)
        x[0, 0, 0] += self.wrong
        return x


@pytest.mark.parametrize("batches", [1, 7])
def test_round_trip_is_the_largest_gap_over_the_largest_state(batches: int) -> None:
    moments, x, y = rows(D_X)
    aligner = Leaky(SITES, D_X, D_X).double()
    aligner.fit(moments)
    errors = MapErrors(moments.mean_x, moments.mean_y)
    for a, b in zip(x.tensor_split(batches, 1), y.tensor_split(batches, 1), strict=True):
        errors.update(aligner, a, b)
    found = errors.compute()["round_trip"]
    assert found[0].item() == pytest.approx(0.25 / x[0].abs().max().item(), rel=1e-6)
    assert (found[1:] < 1e-12).all()


def test_a_round_trip_that_overflows_is_not_passed_over() -> None:
    moments, x, y = rows(D_X)
    aligner = Leaky(SITES, D_X, D_X).double()
    aligner.fit(moments)
    aligner.wrong = torch.inf
    errors = MapErrors(moments.mean_x, moments.mean_y)
    errors.update(aligner, x, y)
    found = errors.compute()["round_trip"]
    assert found[0] == torch.inf
    assert found[1:].isfinite().all()
