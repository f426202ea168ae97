from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.functional.cca import cca, pwcca, svcca
from aligners.similarity.functional.chance import canonical_chance, regression_chance
from aligners.similarity.functional.regression import mixedsim, r2

SHARE = 0.99


def independent(n: int, d_x: int, d_y: int, skewed: bool) -> tuple[Tensor, Tensor]:
    """Twenty draws as layers, each side with a falling spectrum turned at random: the diagonal is independent pairs."""
    draw = torch.Generator().manual_seed(0)

    def rows(d: int) -> Tensor:
        normal = torch.randn(20, n, d, generator=draw, dtype=torch.float64)
        turn, _ = torch.linalg.qr(torch.randn(d, d, generator=draw, dtype=torch.float64))
        return (normal.exp() if skewed else normal) * torch.logspace(0, -1, d, dtype=torch.float64) @ turn

    return rows(d_x), rows(d_y)


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("n", "d_x", "d_y"), [(40, 8, 8), (40, 6, 20), (60, 20, 6), (300, 12, 12)])
def test_independent_data_explain_what_chance_says(n: int, d_x: int, d_y: int, skewed: bool) -> None:
    x, y = independent(n, d_x, d_y, skewed)
    moments = grid_moments(x, y)
    chance = regression_chance(moments)
    assert torch.allclose(chance, torch.tensor(d_y / (n - 1), dtype=torch.float64))
    assert float(r2(x, y).mean()) == pytest.approx(float(chance.mean()), rel=0.05)
    assert float(mixedsim(x, y).mean()) == pytest.approx(float(chance.mean()) ** 0.5, rel=0.08)
    whole, kept = canonical_chance(moments), canonical_chance(moments, SHARE)
    assert (kept <= whole).all()
    for found, bound in (
        (cca(x, y), whole),
        (svcca(x, y, share=SHARE), kept),
        (pwcca(x, y, share=SHARE), kept),
    ):
        ratio = float(found.mean() / bound.mean().sqrt())
        assert 0.7 < ratio < 1.02
