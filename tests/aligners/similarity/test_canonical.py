import pytest
import torch
from torch import Tensor

from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.functional.canonical import (
    Whitening,
    canonical,
    canonical_chance,
    regression_chance,
    whitening,
)
from aligners.similarity.functional.cca import cca, pwcca, svcca
from aligners.similarity.functional.regression import mixedsim, r2
from tests.rows import CASES, paired, rows_of

ENOUGH = [case for case in CASES if case not in ("few", "barely")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_whitened_rows_have_unit_uncorrelated_columns(case: str, share: float) -> None:
    scatter = grid_moments(*rows_of(case)).xx
    found = whitening(scatter, share=share)
    for layer, k in enumerate(found.rank.tolist()):
        whitened = found.weight[layer].T @ scatter[layer] @ found.weight[layer]
        expected = torch.diag((torch.arange(scatter.shape[-1]) < k).double())
        torch.testing.assert_close(whitened, expected, rtol=0, atol=1e-8)
        assert not found.weight[layer, :, k:].any()


def test_ranks_drop_deficient_directions_alone_whatever_the_scale_and_shares_are_of_the_variance() -> None:
    moments = grid_moments(*rows_of("deficient"))
    assert whitening(moments.xx).rank.tolist() == [5, 5, 5]
    assert whitening(moments.yy).rank.tolist() == [5, 5]
    x, y = rows_of("scaled")
    assert whitening(grid_moments(1e6 * x, y).xx).rank.tolist() == [6, 6, 6]
    scatter = torch.diag(torch.tensor([90.0, 9.0, 0.9, 0.1], dtype=torch.float64))
    ranks = {share: int(whitening(scatter, share=share).rank) for share in (0.5, 0.9, 0.91, 0.99, 0.995, 1.0)}
    assert ranks == {0.5: 1, 0.9: 1, 0.91: 2, 0.99: 2, 0.995: 3, 1.0: 4}


@pytest.mark.parametrize("case", ENOUGH)
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_canonical_variables_are_unit_and_correlated_in_pairs_alone(case: str, share: float) -> None:
    m = grid_moments(*rows_of(case))
    white_x, white_y = whitening(m.xx, share=share), whitening(m.yy, share=share)
    grid = (
        Whitening(white_x.weight[:, None], white_x.rank[:, None]),
        Whitening(white_y.weight[None], white_y.rank[None]),
    )
    found = canonical(*grid, m.xy)
    rho, rank, *_ = canonical(*grid, m.xy, directions=False)
    torch.testing.assert_close(rho, found.rho, rtol=0, atol=1e-12)
    assert rank.equal(found.rank)
    assert rank.equal(torch.minimum(white_x.rank[:, None], white_y.rank))
    assert (rho.diff(dim=-1) <= 0).all()
    used = torch.diag_embed((torch.arange(rho.shape[-1]) < rank[..., None]).double())
    torch.testing.assert_close(found.a.mT @ m.xx[:, None] @ found.a, used, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.b.mT @ m.yy @ found.b, used, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.a.mT @ m.xy @ found.b, torch.diag_embed(rho), rtol=0, atol=1e-8)
    # One pair alone, without leading axes, is what the grid says of it.
    alone = canonical(
        Whitening(white_x.weight[2], white_x.rank[2]), Whitening(white_y.weight[1], white_y.rank[1]), m.xy[2, 1]
    )
    torch.testing.assert_close(alone.rho, found.rho[2, 1, : len(alone.rho)], rtol=0, atol=1e-12)


def test_directions_without_correlation_do_not_leave_a_smaller_rank() -> None:
    eye = torch.eye(4, dtype=torch.float64)
    weight = torch.stack([eye, eye * torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)])
    white = Whitening(weight, torch.tensor([4, 2]))
    found = canonical(white, white, torch.zeros(2, 4, 4, dtype=torch.float64))
    assert not found.rho.any()
    torch.testing.assert_close(found.a.mT @ found.a, weight, rtol=0, atol=1e-12)


def test_what_cannot_be_whitened_is_refused() -> None:
    scatter = grid_moments(*paired(30)).xx
    with pytest.raises(ValueError, match="values that are not finite"):
        whitening(torch.zeros(1, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="values that are not finite"):
        whitening(scatter * torch.nan)
    with pytest.raises(ValueError, match="Expected `share`"):
        whitening(scatter, share=0)
    with pytest.raises(ValueError, match="Expected `tolerance`"):
        whitening(scatter, tolerance=1)


def test_a_failed_decomposition_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    m = grid_moments(*paired(30))
    white = whitening(m.xx[:2]), whitening(m.yy)
    with pytest.raises(ValueError, match="values that are not finite"):
        canonical(*white, torch.full_like(m.xy[0], torch.nan))

    def fail(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("no convergence")

    for name in ("svd", "svdvals", "eigh"):
        monkeypatch.setattr(torch.linalg, name, fail)
    with pytest.raises(ValueError, match="SVD behind canonical correlations did not converge: no convergence"):
        canonical(*white, m.xy[0])
    with pytest.raises(ValueError, match="SVD behind canonical correlations did not converge"):
        canonical(*white, m.xy[0], directions=False)
    with pytest.raises(ValueError, match="eigendecomposition behind a whitening did not converge"):
        whitening(m.xx)


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
