"""Comparing holds one copy of what it accumulates, and computes from it a tile at a time."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from torch import Tensor

from aligners.similarity.algebra import moments
from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.algebra.pairs import CentredRows
from aligners.similarity.catalogue import Measure, catalogue
from aligners.similarity.functional.cca import SharedMoments, cca_held_out
from aligners.similarity.functional.regression import mixedsim_held_out, r2_held_out
from aligners.similarity.moments import MomentsMetric
from aligners.similarity.outcome import evaluate
from tests.contents import content_of

MEASURES = [measure for measure in catalogue().values() if measure.family in ("moments", "rows", "batches")]


def paired(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 90, 6, generator=draw, dtype=torch.float64)
    return x, torch.randn(2, 90, 5, generator=draw, dtype=torch.float64) + x[:2, :, :5]


def test_what_a_state_is_reset_to_is_one_number() -> None:
    x, y = paired()
    made = MomentsMetric(2, 6, 5)
    for metric in (made, copy.deepcopy(made).to("cpu")):
        metric.update(x[:2], y)
        for name, default in cast(dict[str, Tensor], metric._defaults).items():
            assert default.untyped_storage().nbytes() <= 8, name
            assert default.shape == getattr(metric, name).shape
        metric.reset()
        for name, default in cast(dict[str, Tensor], metric._defaults).items():
            state = getattr(metric, name)
            assert torch.equal(state, default)
            assert state.is_contiguous()  # its own memory, which an update can write to


def test_moments_take_the_place_of_their_sums() -> None:
    (cka,) = (measure for measure in MEASURES if measure.name == "cka")
    content, expected = content_of(*paired(), MEASURES), grid_moments(*paired())
    found = content.of(cka).moments
    x, y, cross = content.grids["moments", 0, None]
    for name, sums in (("xx", x.xx), ("yy", y.xx), ("xy", cross.xy)):
        assert getattr(found, name).data_ptr() == sums.data_ptr()
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-12)


def test_a_sample_is_not_kept_twice() -> None:
    (rsa,) = (measure for measure in MEASURES if measure.name == "rsa")
    content = content_of(*paired(), MEASURES)
    sample = content.of(rsa)
    assert sample.x.data_ptr() == content.x.samples[rsa.budget].data_ptr()
    assert sample.x.shape[1] == 90
    rows = CentredRows(sample.x)
    with torch.profiler.profile(profile_memory=True) as profile:
        rows[:, :10]
    assert max(event.cpu_memory_usage for event in profile.events()) < sample.x.nbytes / 2


@pytest.mark.parametrize(
    "measure", [measure for measure in MEASURES if measure.family == "moments"], ids=lambda m: m.name
)
def test_tiles_change_nothing(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(measure, SharedMoments(grid_moments(*paired())))
    monkeypatch.setattr(moments, "TILE", 1)
    for direction, values in evaluate(measure, SharedMoments(grid_moments(*paired()))).items():
        torch.testing.assert_close(values, whole[direction], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [cca_held_out, r2_held_out, mixedsim_held_out])
def test_tiles_change_nothing_held_out(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [grid_moments(*paired(seed)) for seed in (0, 1)]
    whole = function(*given)  # type: ignore[operator]
    monkeypatch.setattr(moments, "TILE", 1)
    torch.testing.assert_close(function(*given), whole, rtol=1e-12, atol=1e-12)  # type: ignore[operator]
