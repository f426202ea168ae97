from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from aligners.fitting.fits import fit_map
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import moments_of
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
