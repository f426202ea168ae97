from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from similarity import measures
from similarity.functional import cca, cka, neurons, regression, summaries
from similarity.functional.moments import grid_moments
from similarity.measures import PWCCA, SVCCA, LinearCKA
from similarity.moments import GridMomentsMetric
from tests.rows import paired

SIZES = 3, 6, 2, 5
FUNCTIONS = {
    "CCA": cca.cca,
    "SVCCA": cca.svcca,
    "PWCCA": cca.pwcca,
    "LinearCKA": cka.linear_cka,
    "UnbiasedCKA": cka.unbiased_cka,
    "R2": regression.r2,
    "MixedSim": regression.mixedsim,
    "NeuronSim": neurons.neuronsim,
    "NuclearNorm": lambda x, y: (summaries.nuclear_norm(x), summaries.nuclear_norm(y)),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    x, y = paired(60)
    return list(zip((x + 1000).split(25, 1), y.split(25, 1), strict=True))


def collection() -> MetricCollection:
    return MetricCollection({name: getattr(measures, name)(*SIZES) for name in measures.__all__})


def test_every_measure_has_a_function() -> None:
    assert set(FUNCTIONS) == set(measures.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_batches_each_is_its_function_of_all_rows(name: str) -> None:
    metric = getattr(measures, name)(*SIZES)
    for x, y in batches():
        metric.update(x, y)
    x, y = paired(60)
    torch.testing.assert_close(metric.compute(), FUNCTIONS[name](x + 1000, y), rtol=1e-9, atol=1e-9)
    again = pickle.loads(pickle.dumps(metric))
    torch.testing.assert_close(again.compute(), metric.compute(), rtol=0, atol=0)


def test_in_a_collection_they_accumulate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    update = GridMomentsMetric.update
    monkeypatch.setattr(GridMomentsMetric, "update", lambda self, x, y: (updates.append(1), update(self, x, y))[1])
    together = collection()
    for count, (x, y) in zip((9, 10, 11), batches(), strict=True):  # torchmetrics finds the group by the first batch
        together.update(x, y)
        assert len(updates) == count
    assert len(together.compute_groups) == 1
    x, y = paired(60)
    for name, value in together.compute().items():
        torch.testing.assert_close(value, FUNCTIONS[name](x + 1000, y), rtol=1e-9, atol=1e-9, msg=name)


def test_a_collection_starts_afresh_and_goes_on_after_it_was_computed() -> None:
    together = collection()
    x, y = paired(60)
    for rows in batches():
        together.update(*rows)
        together.compute()
    together.reset()
    for start, end in ((0, 20), (20, 60)):
        together.update(x[:, start:end], y[:, start:end])
        for name, value in together.compute().items():
            expected = FUNCTIONS[name](x[:, :end], y[:, :end])
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9, msg=name)


def test_forward_gives_the_measure_of_the_batch() -> None:
    together = collection()
    for x, y in batches()[:2]:
        for name, value in together(x, y).items():
            torch.testing.assert_close(value, FUNCTIONS[name](x, y), rtol=1e-8, atol=1e-8, msg=name)


def test_a_single_pair_of_layers_is_a_grid_too() -> None:
    x, y = paired(60)
    metric = LinearCKA(1, 6, 1, 5)
    assert metric(x[:1], y[:1]).shape == (1, 1)
    assert metric.compute().shape == (1, 1)


@pytest.mark.parametrize("measure", [SVCCA, PWCCA])
def test_the_share_reaches_the_measure_and_is_checked_first(measure: type[SVCCA]) -> None:
    x, y = paired(60)
    metric = measure(*SIZES, share=0.5)
    metric.update(x, y)
    function = FUNCTIONS[measure.__name__]
    torch.testing.assert_close(metric.compute(), function(x, y, share=0.5), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(metric.compute(), function(x, y))
    with pytest.raises(ValueError, match=r"Expected `share` of the variance in \(0, 1\], but got 99"):
        measure(*SIZES, share=99)


def test_what_is_no_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments"):
        LinearCKA(*SIZES, shares=0.5)


def test_too_few_rows_are_an_error_with_a_reason() -> None:
    metric = measures.CCA(*SIZES)
    x, y = paired(5)
    metric.update(x, y)
    with pytest.raises(ValueError, match="CCA expects more rows than the two layers have directions"):
        metric.compute()
    assert metric.moments().n == grid_moments(x, y).n
