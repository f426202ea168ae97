"""Reduced-rank regression and the soft matching against their definitions, and what each must not depend on."""

import numpy as np
import pytest
import torch
from tests.references.maps import reduced_rank, soft_matching
from tests.rows import fitted
from tests.runs import related_rows

from aligners.maps.from_moments.reduced_rank import ReducedRank
from aligners.maps.from_moments.soft_matching import SoftMatching, transport_plan
from aligners.maps.linear import Linear, Permutation
from aligners.similarity.algebra.moments import merge_moments, moments_of

SITES = 2


@pytest.mark.parametrize(("d_x", "d_y"), [(6, 6), (4, 7), (7, 4)])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_reduced_rank_is_its_definition(d_x: int, d_y: int, ridge: float) -> None:
    x, y = related_rows(SITES, 50, d_x, d_y)
    for rank in range(1, min(d_x, d_y) + 1):
        aligner = fitted(ReducedRank(SITES, d_x, d_y, rank=rank, ridge=ridge), x, y)
        for site in range(SITES):
            weight, shares = reduced_rank(x[site].numpy(), y[site].numpy(), rank, ridge)
            np.testing.assert_allclose(aligner.weight[site].numpy(), weight, atol=1e-9)
            assert np.linalg.matrix_rank(aligner.weight[site].numpy(), tol=1e-9) == rank
            assert aligner.findings()["kept_share"][site] == pytest.approx(shares[rank - 1])


def test_no_map_of_that_rank_has_a_lower_error() -> None:
    x, y = related_rows(1, 60, 6, 5)
    aligner = fitted(ReducedRank(1, 6, 5, rank=2, ridge=0.0), x, y)
    left, sizes, right = torch.linalg.svd(aligner.weight[0])
    left, right = left[:, :2] * sizes[:2], right[:2]
    x, y = x[0] - x[0].mean(0), y[0] - y[0].mean(0)
    best = (x @ left @ right - y).square().sum()
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        other = left + 0.01 * torch.randn(6, 2, generator=draw, dtype=torch.float64)
        turned = right + 0.01 * torch.randn(2, 5, generator=draw, dtype=torch.float64)
        assert (x @ other @ turned - y).square().sum() > best


def test_the_share_chooses_the_least_rank_that_keeps_it() -> None:
    x, y = related_rows(SITES, 80, 6, 6)
    y[1] = x[1] @ torch.ones(6, 1, dtype=torch.float64) @ torch.arange(1.0, 7).double()[None]  # one direction
    for share in (0.5, 0.9, 0.999):
        aligner = fitted(ReducedRank(SITES, 6, 6, share=share), x, y)
        _, shares = reduced_rank(x[0].numpy(), y[0].numpy(), 6, 1e-6)
        assert aligner.findings()["rank"] == [1 + int((shares < share).sum()), 1]
    whole, linear = ReducedRank(SITES, 6, 6, share=1.0), Linear(SITES, 6, 6)
    torch.testing.assert_close(fitted(whole, x, y)(x), fitted(linear, x, y)(x))


def test_reduced_rank_follows_a_rotation_of_y_and_any_change_of_x() -> None:
    x, y = related_rows(1, 60, 5, 5)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    mixed = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = fitted(ReducedRank(1, 5, 5, rank=2, ridge=0.0), x, y)
    turned = fitted(ReducedRank(1, 5, 5, rank=2, ridge=0.0), x @ mixed + 7, 3 * y @ turn - 1)
    torch.testing.assert_close(turned(x @ mixed + 7), 3 * plain(x) @ turn - 1)


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 6}, {"share": 0.0}, {"share": 1.1}, {"ridge": -1.0}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        ReducedRank(1, 7, 5, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("d_x", "d_y"), [(4, 6), (6, 4), (7, 5), (3, 8)])
def test_soft_matching_is_its_definition(d_x: int, d_y: int) -> None:
    x, y = related_rows(SITES, 50, d_x, d_y)
    aligner = fitted(SoftMatching(SITES, d_x, d_y), x, y)
    for site in range(SITES):
        plan, gained = soft_matching(x[site].numpy(), y[site].numpy())
        np.testing.assert_allclose(aligner.weight[site].numpy(), d_y * plan, atol=1e-6)
        assert aligner.findings()["mean_correlation"][site] == pytest.approx(gained)
    torch.testing.assert_close(aligner.weight.sum(1), torch.ones(SITES, d_y).double())
    torch.testing.assert_close(aligner.weight_back.sum(1), torch.ones(SITES, d_x).double())
    back = fitted(SoftMatching(SITES, d_y, d_x), y, x)
    torch.testing.assert_close(aligner.inverse(y), back(y))


def test_copies_and_the_linear_programme_agree() -> None:
    gains = np.random.default_rng(0).normal(size=(9, 12))
    copied, solved = transport_plan(gains), transport_plan(gains, most_copies=1)
    np.testing.assert_allclose(copied, solved, atol=1e-9)
    for plan in (copied, solved):
        np.testing.assert_allclose(plan.sum(0), 1 / 12)
        np.testing.assert_allclose(plan.sum(1), 1 / 9)


def test_at_equal_widths_soft_matching_is_the_permutation_whatever_the_scales() -> None:
    x, y = related_rows(SITES, 50, 6, 6)
    hard = fitted(Permutation(SITES, 6, 6), x, y)
    factors = torch.logspace(-3, 3, 6).double()
    torch.testing.assert_close(fitted(SoftMatching(SITES, 6, 6), x * factors + 9, y / factors).weight, hard.weight)


def test_doubled_neurons_share_what_one_had() -> None:
    x, _ = related_rows(1, 50, 4, 4)
    aligner = fitted(SoftMatching(1, 4, 8), x, torch.cat([x, x], 2))
    torch.testing.assert_close(aligner(x), torch.cat([x, x], 2))
    assert aligner.findings()["mean_correlation"] == pytest.approx([1])


@pytest.mark.parametrize("kind", [ReducedRank, SoftMatching])
def test_any_split_of_the_rows_gives_the_same_map(kind: type[ReducedRank | SoftMatching]) -> None:
    x, y = related_rows(1, 60, 5, 3)
    whole, parts = kind(1, 5, 3).double(), kind(1, 5, 3).double()
    whole.fit(moments_of(x, y))
    parts.fit(merge_moments(moments_of(x[:, :13], y[:, :13]), moments_of(x[:, 13:], y[:, 13:])))
    torch.testing.assert_close(parts(x), whole(x))


def test_constant_neurons_are_refused_by_soft_matching() -> None:
    x, y = related_rows(1, 50, 4, 6)
    x[0, :, 2] = 3.7
    with pytest.raises(ValueError, match="1 of 4 neurons are constant"):
        SoftMatching(1, 4, 6).fit(moments_of(x, y))
