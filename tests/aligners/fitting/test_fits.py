"""Maps fitted from moments, their errors on held-out rows, and the outcome of their training in words."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.references.maps import cosine, fvu, mse
from tests.runs import related_rows
from torch import Tensor

from aligners.fitting.fits import fit_map
from aligners.fitting.map_errors import MapErrors
from aligners.fitting.training_status import (
    MEANING,
    TRAINED_WELL,
    is_trained,
    no_better_than_the_mean,
    outcomes,
    trained_methods,
    what_did_not_train,
)
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Procrustes
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import Moments, moments_of

TRAINED = {"inn": partial(INN, couplings=2, hidden=4), "mlp": partial(MLP, hidden=[4])}
SITES, ROWS, D_X, D_Y = 3, 200, 6, 4


@pytest.mark.parametrize("factory", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("side", ["X", "Y"])
def test_a_constant_site_is_named(factory: Any, side: str) -> None:
    x, y = related_rows(3, 50, D_X, D_X)
    (x if side == "X" else y)[1] = 2.5
    with pytest.raises(ValueError, match=rf"states of {side} to vary.*6 of 6 neurons are constant.*number 1\."):
        fit_map("net", factory(3, D_X, D_X), moments_of(x, y))
    for rows in (x, y):
        rows[1] = rows[0]
    fit_map("net", factory(3, D_X, D_X), moments_of(x, y))


def test_too_few_rows_are_refused_by_the_maps_name() -> None:
    with pytest.raises(ValueError, match="mine expects at least 7 fitting rows at these widths, but got 6"):
        fit_map("mine", Linear(2, D_X, D_X), moments_of(*related_rows(2, 6, D_X, D_X)))


class Leaky(Procrustes):
    """An inverse that is wrong by a known amount at one row."""

    wrong = 0.0

    def inverse(self, y: Tensor) -> Tensor:
        x = super().inverse(y)
        x[0, 0, 0] += self.wrong
        return x


def measured(aligner: Aligner, batches: int) -> tuple[dict[str, Tensor], Tensor, Tensor, Moments]:
    """Its errors on held-out rows in some batches, after a fit to as many others; these rows and the moments."""
    x, y = related_rows(SITES, 2 * ROWS, D_X, aligner.d_y)
    moments = moments_of(x[:, :ROWS], y[:, :ROWS])
    aligner.double().fit(moments)
    x, y = x[:, ROWS:], y[:, ROWS:]
    errors = MapErrors(moments.mean_x, moments.mean_y)
    for a, b in zip(x.tensor_split(batches, 1), y.tensor_split(batches, 1), strict=True):
        errors.update(aligner, a, b)
    return errors.compute(), x, y, moments


@pytest.mark.parametrize("batches", [1, 7])
def test_figures_are_those_of_the_definitions_for_any_batching(batches: int) -> None:
    aligner = Linear(SITES, D_X, D_Y)
    found, x, y, moments = measured(aligner, batches)
    for site in range(SITES):
        g, b, mean = aligner(x)[site].numpy(), y[site].numpy(), moments.mean_y[site].numpy()
        assert found["mse"][site] == pytest.approx(mse(g, b), rel=1e-9)
        assert found["fvu"][site] == pytest.approx(fvu(g, b, mean), rel=1e-9)
        assert found["relative_error"][site] == pytest.approx(fvu(g, b, mean) ** 0.5, rel=1e-9)
        assert found["cosine"][site] == pytest.approx(cosine(g, b), rel=1e-9)
        assert found["l2"][site] == pytest.approx((((g - b) ** 2).sum(1) ** 0.5).mean(), rel=1e-9)
    assert found["fvu_inverse"].isnan().all()
    assert found["round_trip"].isnan().all()


@pytest.mark.parametrize("batches", [1, 7])
@pytest.mark.parametrize("wrong", [0.0, 0.25, torch.inf])
def test_an_inverse_is_a_map_from_y_to_x_and_its_round_trip_the_largest_gap_over_the_largest_state(
    batches: int, wrong: float
) -> None:
    aligner = Leaky(SITES, D_X, D_X)
    aligner.wrong = wrong
    found, x, y, moments = measured(aligner, batches)
    assert found["round_trip"][0].item() == pytest.approx(wrong / x[0].abs().max().item(), rel=1e-6, abs=1e-12)
    assert (found["round_trip"][1:] < 1e-12).all()
    for site in range(bool(wrong), SITES):
        expected = fvu(aligner.inverse(y)[site].numpy(), x[site].numpy(), moments.mean_x[site].numpy())
        assert found["fvu_inverse"][site] == pytest.approx(expected, rel=1e-9)


RECORD = {
    "best_step": [40, 0, 20, 0],
    "diverged_step": [0, 0, 33, 3],
    "start": ["covariance", "procrustes", "linear", "identity"],
    "steps": 60,
}


def test_each_site_is_called_what_it_is_and_only_what_did_not_train_is_said_and_where() -> None:
    assert outcomes(None, 2) == [None, None]
    found = outcomes(RECORD, 4)
    assert found == [
        TRAINED_WELL,
        "untrained start (procrustes)",
        "diverged at step 33, set back to step 20",
        "diverged at step 3, set back to the untrained start (identity)",
    ]
    rows = [
        {"method": method, "site_x": i, "site_y": j, "training": training}
        for method, outcome in (("inn", found), ("linear", outcomes(None, 4)))
        for (i, j), training in zip([(1, 1), (2, 2), (3, 5), (4, 4)], outcome, strict=True)
    ]
    rows.append({"method": "inn", "site_x": 6, "site_y": 6, "training": found[1]})
    assert trained_methods(rows) == ["linear"]
    assert what_did_not_train(rows) == [
        MEANING,
        f"* inn at sites 2, 6: {found[1]}.",
        f"* inn at site 3→5: {found[2]}.",
        f"* inn at site 4: {found[3]}.",
    ]
    assert all(is_trained(row) for row in ({}, *({"training": told} for told in (None, float("nan"), TRAINED_WELL))))


def test_routes_are_named_where_they_differ() -> None:
    """Two directions with the same sites, rows of two kinds, and a third route with another site."""
    routes = [("a", "b", 3), ("a", "b", 6), ("b", "a", 3), ("b", "a", 6)]
    rows = [
        {"method": "mlp", "model_x": x, "model_y": y, "site_x": s, "site_y": s, "rows": kind, "training": "untrained"}
        for x, y, s in routes
        for kind in ("words", "tokens")
    ]
    assert what_did_not_train(rows)[1:] == ["* mlp at sites 3, 6: untrained."]
    other = {**rows[0], "model_x": "c", "site_x": 2, "site_y": 2}
    assert what_did_not_train([*rows, other])[1:] == [
        "* mlp at sites 3, 6, a → b; b → a: untrained.",
        "* mlp at site 2, c → b: untrained.",
    ]


def test_maps_that_leave_all_of_the_variance_are_named() -> None:
    fvu = {"linear": (0.9, 1.06, 1.01), "ridge": (0.4, 0.5, 0.999), "cca": (None, 1.0, 2.5), "identity": (4, 4, 4)}
    rows = [
        {"method": name, "role": "floor" if name == "identity" else "method", "fvu": value}
        for name, values in fvu.items()
        for value in values
    ]
    said = "No better than the mean of the target's states at some site, by its largest FVU: linear 1.06, cca 2.5."
    assert no_better_than_the_mean(rows) == [said]
    assert no_better_than_the_mean(rows[3:6]) == []
