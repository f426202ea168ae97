"""Maps fitted from moments, their errors on held-out rows, and the outcome of their training in words."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from aligners.fitting.errors import MapErrors
from aligners.fitting.fits import fit_map
from aligners.fitting.outcomes import (
    MEANING,
    TRAINED_WELL,
    is_trained,
    no_better_than_the_mean,
    outcomes,
    trained_methods,
    what_did_not_train,
)
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Procrustes
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import Moments, moments_of
from tests.references.maps import cosine, fvu, mse
from tests.runs import related_rows

WIDTH = 6


TRAINED = {"inn": partial(INN, couplings=2, hidden=4), "mlp": partial(MLP, hidden=[4])}


@pytest.mark.parametrize("factory", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("side", ["X", "Y"])
def test_a_constant_site_is_named(factory: Any, side: str) -> None:
    x, y = related_rows(3, 50, WIDTH, WIDTH)
    (x if side == "X" else y)[1] = 2.5
    with pytest.raises(ValueError, match=rf"states of {side} to vary.*6 of 6 neurons are constant.*number 1\."):
        fit_map("net", factory(3, WIDTH, WIDTH), moments_of(x, y))
    for rows in (x, y):
        rows[1] = rows[0]
    fit_map("net", factory(3, WIDTH, WIDTH), moments_of(x, y))


def test_too_few_rows_are_refused_by_the_maps_name() -> None:
    rows = related_rows(2, WIDTH, WIDTH, WIDTH)
    with pytest.raises(ValueError, match="mine expects at least 7 fitting rows at these widths, but got 6"):
        fit_map("mine", Linear(2, WIDTH, WIDTH), moments_of(*rows))


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


RECORD = {
    "best_step": [40, 0, 20, 0],
    "diverged_step": [0, 0, 33, 3],
    "start": ["covariance", "procrustes", "linear", "identity"],
    "steps": 60,
}


def test_each_site_is_called_what_it_is() -> None:
    assert outcomes(RECORD, 4) == [
        TRAINED_WELL,
        "untrained start (procrustes)",
        "diverged at step 33, set back to step 20",
        "diverged at step 3, set back to the untrained start (identity)",
    ]
    assert outcomes(None, 2) == [None, None]


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


def test_only_what_did_not_train_is_said_and_where() -> None:
    sites = [(1, 1), (2, 2), (3, 5), (4, 4)]
    rows = [
        {"method": method, "site_x": i, "site_y": j, "training": training}
        for method, record in (("inn", RECORD), ("linear", None))
        for (i, j), training in zip(sites, outcomes(record, 4), strict=True)
    ]
    rows.append({"method": "inn", "site_x": 6, "site_y": 6, "training": "untrained start (procrustes)"})
    assert trained_methods(rows) == ["linear"]
    assert what_did_not_train(rows) == [
        MEANING,
        "* inn at sites 2, 6: untrained start (procrustes).",
        "* inn at site 3→5: diverged at step 33, set back to step 20.",
        "* inn at site 4: diverged at step 3, set back to the untrained start (identity).",
    ]


def test_each_site_is_named_once_and_routes_where_they_differ() -> None:
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


@pytest.mark.parametrize("outcome", [None, float("nan"), TRAINED_WELL])
def test_closed_forms_and_trained_maps_may_be_compared(outcome: Any) -> None:
    assert is_trained({"training": outcome})
    assert is_trained({})
