from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.catalogue import catalogue
from aligners.similarity.functional import cca, cka, regression
from aligners.similarity.functional.cca import SharedMoments
from tests.rows import paired

SHARE = 0.5
FUNCTIONS = {
    "cca": cca.cca,
    "svcca": partial(cca.svcca, share=SHARE),
    "r2_cca": cca.r2_cca,
    "r2_svcca": partial(cca.r2_svcca, share=SHARE),
    "pwcca": partial(cca.pwcca, share=SHARE),
    "cka": cka.linear_cka,
    "unbiased_cka": cka.unbiased_cka,
    "r2": regression.r2,
    "mixedsim": regression.mixedsim,
    "neuronsim": regression.neuronsim,
}


def accumulated(x: Tensor, y: Tensor) -> SharedMoments:
    """What three batches of rows leave behind."""
    sums = GridSums.zeros(3, 6, 2, 5)
    for rows in zip(x.split(25, 1), y.split(25, 1), strict=True):
        sums.add_(*rows)
    return SharedMoments(sums.moments())


def test_every_measure_on_moments_has_a_function() -> None:
    assert {name for name, measure in catalogue().items() if measure.family == "moments"} == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_batches_each_is_its_function_of_all_rows(name: str) -> None:
    x, y = paired(60)
    found = catalogue(SHARE)[name].compute(accumulated(x + 1000, y))
    torch.testing.assert_close(found, FUNCTIONS[name](x + 1000, y), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["svcca", "pwcca"])
def test_the_share_reaches_the_measure_and_is_checked(name: str) -> None:
    moments = accumulated(*paired(60))
    assert not torch.allclose(catalogue(SHARE)[name].compute(moments), catalogue()[name].compute(moments))
    with pytest.raises(ValueError, match=r"Expected `share` to be above 0 and at most 1, but got 99"):
        catalogue(99)[name].compute(moments)


def test_too_few_rows_are_an_error_with_a_reason() -> None:
    with pytest.raises(ValueError, match="CCA expects more rows than the two layers have directions"):
        catalogue()["cca"].compute(accumulated(*paired(5)))
