from __future__ import annotations

import pytest
import torch

from aligners.similarity.algebra.checks import check_rows, constant_features
from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.algebra.moments import squares
from tests.rows import paired


def test_what_rounding_leaves_of_a_constant_is_constant() -> None:
    mean = torch.tensor([[5.0, 5.0, 5.0, 0.0, 0.0, -5.0]], dtype=torch.float64)
    deviation = torch.tensor([[0.0, 1e-9, 1e-5, 0.0, 1e-30, -1e-9]], dtype=torch.float64) * 5
    found = constant_features(deviation**2, mean)
    assert found.tolist() == [[True, True, False, True, False, True]]


def test_constants_of_any_value_are_found_among_features_that_vary() -> None:
    x, y = paired(1003)
    constants = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([x, constants.expand(3, 1003, -1)], -1)
    parts = [GridSums.zeros(3, 106, 2, 5).add_(x[:, rows], y[:, rows]) for rows in (slice(0, 7), slice(7, None))]
    moments = (parts[0] + parts[1]).moments()
    found = constant_features(squares(moments.xx) / moments.n, moments.mean_x)
    assert not found[:, :6].any()
    assert found[:, 6:].all()


def test_only_floating_point_states_are_rows() -> None:
    x, y = paired(5)
    with pytest.raises(ValueError, match=r"`y` as floating-point states .* but got torch.int64"):
        check_rows(x, y.long())
    with pytest.raises(ValueError, match="at least one, but got 0 and 0"):
        check_rows(x[:, :0], y[:, :0])
