"""Comparing holds one copy of what it accumulates, and computes from it a tile at a time."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from similarity.algebra import tiles
from similarity.algebra.grid import grid_moments
from similarity.arms import Arm, PairedRows, Shape, evaluate
from similarity.catalogue import Measure, catalogue
from similarity.functional.cca import cca_held_out, pwcca_held_out
from similarity.functional.regression import mixedsim_held_out, r2_held_out
from similarity.shared import SharedMoments

MEASURES = [measure for measure in catalogue().values() if measure.family in ("moments", "rows", "batches")]


def paired(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 90, 6, generator=draw, dtype=torch.float64)
    return x, torch.randn(2, 90, 5, generator=draw, dtype=torch.float64) + x[:2, :, :5]


def filled() -> Arm:
    x, y = paired()
    arm = Arm(MEASURES, Shape(3, 6), Shape(2, 5))
    rows = torch.arange(x.shape[1])
    arm.update(PairedRows(x, y, rows, rows))
    return arm


def metrics(arm: Arm) -> list[Metric]:
    return [metric for metric in arm.modules() if isinstance(metric, Metric)]


def test_what_a_state_is_reset_to_is_one_number() -> None:
    for arm in (filled(), copy.deepcopy(filled()).to("cpu")):
        for metric in metrics(arm):
            for name, default in cast(dict[str, Tensor], metric._defaults).items():
                assert default.untyped_storage().nbytes() <= 8, name
                assert default.shape == getattr(metric, name).shape
            metric.reset()
            for name, default in cast(dict[str, Tensor], metric._defaults).items():
                state = getattr(metric, name)
                assert torch.equal(state, default)
                assert state.is_contiguous()  # its own memory, which an update can write to


def test_moments_take_the_place_of_their_sums() -> None:
    arm = filled()
    assert arm.grid is not None
    sums, expected = arm.grid.sums(), grid_moments(*paired())
    (cka,) = (measure for measure in MEASURES if measure.name == "cka")
    found = arm.content(cka).moments
    assert arm.grid is None
    for name in ("xx", "yy", "xy"):
        assert getattr(found, name).data_ptr() == getattr(sums, name).data_ptr()
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-12)


def test_a_sample_is_not_kept_twice() -> None:
    arm = filled()
    (rsa,) = (measure for measure in MEASURES if measure.name == "rsa")
    evaluate(rsa, arm.content(rsa))
    assert list(arm.samples) == ["2000"]


@pytest.mark.parametrize(
    "measure", [measure for measure in MEASURES if measure.family == "moments"], ids=lambda m: m.name
)
def test_tiles_change_nothing(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(measure, SharedMoments(grid_moments(*paired())))
    monkeypatch.setattr(tiles, "TILE", 1)
    for direction, values in evaluate(measure, SharedMoments(grid_moments(*paired()))).items():
        torch.testing.assert_close(values, whole[direction], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [cca_held_out, pwcca_held_out, r2_held_out, mixedsim_held_out])
def test_tiles_change_nothing_held_out(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [grid_moments(*paired(seed)) for seed in (0, 1)]
    whole = function(*given)  # type: ignore[operator]
    monkeypatch.setattr(tiles, "TILE", 1)
    torch.testing.assert_close(function(*given), whole, rtol=1e-12, atol=1e-12)  # type: ignore[operator]
