"""Maps on arrays: the banks of one site, with NumPy or tensors in and out, and errors that say what to do."""

import numpy as np
import pytest
import torch
from tests.runs import related_rows

from aligners import api, maps
from aligners.api import INN, MLP, ArrayMap, Linear, NotFittedError, TrainedMap
from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import moments_of

CLOSED = {
    "Linear": {"ridge": 0.1},
    "Procrustes": {"scale": True},
    "Permutation": {"signed": True},
    "ReducedRank": {"rank": 2},
    "SoftMatching": {},
    "CCA": {"directions": 3},
    "SVCCA": {"share": 0.9},
    "PWCCA": {"share": 0.8},
    "Mean": {},
    "Identity": {},
}


def fitted(name: str) -> tuple[ArrayMap, Aligner, torch.Tensor, torch.Tensor]:
    x, y = related_rows(1, 80, 5, 5)
    bank = getattr(maps, name)(1, 5, 5, **CLOSED[name]).double()
    bank.fit(moments_of(x, y))
    return getattr(api, name)(**CLOSED[name]).fit(x[0], y[0]), bank, x, y


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_form_is_its_bank(name: str) -> None:
    found, bank, x, y = fitted(name)
    torch.testing.assert_close(found.transform(x[0]), bank(x)[0])
    if bank.invertible:
        torch.testing.assert_close(found.inverse(y[0]), bank.inverse(y)[0])
    centred = y - y.mean(1, keepdim=True)
    fvu = (bank(x) - y).square().sum() / centred.square().sum()
    assert found.score(x[0], y[0]) == pytest.approx(1 - float(fvu))


def test_ridge_is_chosen_on_the_last_tenth_of_the_rows() -> None:
    x, y = related_rows(1, 80, 5, 5)
    bank = maps.Ridge(1, 5, 5).double()
    bank.fit(moments_of(x[:, :72], y[:, :72]), moments_of(x[:, 72:], y[:, 72:]))
    found = api.Ridge().fit(x[0], y[0])
    torch.testing.assert_close(found.transform(x[0]), bank(x)[0])
    assert found.bank.findings()["ridge_chosen_by"] == "8 validation rows"


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, ">f8"])
def test_numpy_comes_back_as_numpy(kind: str) -> None:
    x, y = (part[0].numpy().astype(kind) for part in related_rows(1, 60, 4, 3))
    found = Linear().fit(x, y)
    for given, back in ((x, found.transform(x)), (x[::-1], found.transform(x[::-1]))):
        assert isinstance(back, np.ndarray)
        assert back.dtype == given.dtype
        assert back.shape == (60, 3)
    np.testing.assert_array_equal(found.transform(x[::-1]), found.transform(x)[::-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_keeps_its_type(dtype: torch.dtype) -> None:
    x, y = (part[0].to(dtype).requires_grad_() for part in related_rows(1, 60, 4, 4))
    found = Linear().fit(x, y)
    assert found.transform(x).dtype == dtype
    assert found.inverse(y).dtype == dtype
    assert not found.transform(x).requires_grad


@pytest.mark.parametrize("kind", [INN, MLP])
def test_a_network_is_trained_and_the_same_again(kind: type[TrainedMap]) -> None:
    x, y = (part[0] for part in related_rows(1, 200, 4, 4))
    bent = torch.tanh(y)
    options = {"hidden": 8, "couplings": 2} if kind is INN else {"hidden": [8]}
    before, after, again = (kind(steps=steps, **options) for steps in (1, 40, 40))
    scores = [each.fit(x, bent).score(x, bent) for each in (before, after, again)]
    assert scores[1] > scores[0] + 0.02
    assert scores[1] == scores[2]


ROWS = np.ones((10, 3)) * np.arange(10.0)[:, None]
NAN = np.where(np.arange(10)[:, None] == 2, np.nan, ROWS)
WRONG = {
    "one axis": (ROWS[:, 0], ROWS, "of shape"),
    "two sites and one": (np.stack([ROWS, ROWS]), ROWS, "as many sites"),
    "other sites": ({1: ROWS}, {2: ROWS}, "of the sites"),
    "sites of two widths": ([ROWS, ROWS[:, :2]], [ROWS, ROWS], "equal at all sites"),
    "no site": ({}, {}, "no site"),
    "uneven rows": ([[1.0, 2.0], [3.0]], ROWS, "a list"),
    "complex": (ROWS * 1j, ROWS, "real numbers"),
    "strings": (ROWS.astype(str), ROWS, "an array of <U"),
    "not finite": (ROWS, NAN, "1 of its 10 rows"),
    "not paired": (ROWS, ROWS[:9], "paired one by one"),
    "no rows": (ROWS[:0], ROWS[:0], "of shape"),
    "too few": (ROWS[:3], ROWS[:3], "at least 4 fitting rows"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_fitted_is_refused(case: str) -> None:
    x, y, said = WRONG[case]
    with pytest.raises(ValueError, match=said):
        Linear().fit(x, y)


def test_what_is_asked_too_early_or_too_much_is_refused() -> None:
    x, y = (part[0] for part in related_rows(1, 60, 4, 3))
    with pytest.raises(NotFittedError, match="Call `fit"):
        Linear().score(x, y)
    found = Linear().fit(x, y)
    for ask, says in (
        (lambda: found.inverse_transform(y), "has none"),
        (lambda: found.transform(y), "of width 4"),
        (lambda: found.transform(torch.stack([x, x])), "as many sites"),
        (lambda: found.at(1), "there is only one"),
        (lambda: found.score(x, 0 * y + found.bank.mean_y[0]), "differ from the mean"),
        (lambda: found.set_params(rigde=1), "out of ridge, inverse_tolerance, but got rigde"),
        (lambda: ArrayMap(maps.MLP).fit(x, y), "TrainedMap"),
        (lambda: MLP(steps=30, learning_rate=1e12).fit(x, y), "diverged at step"),
        (lambda: INN(steps=0).fit(x, x), "`steps` to be at least 1"),
    ):
        with pytest.raises(ValueError, match=says):
            ask()
