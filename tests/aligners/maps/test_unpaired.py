"""Rows without partners: clusters, their matching, and a rotation that is found from other rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from aligners.api import Matching, Procrustes
from aligners.maps.unpaired.clusters import k_means, matched_order

QUICK = Matching(repeats=6, runs=15, neighbours=20, steps=20, sample=400)
WIDTH = 10


def clustered(turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one side, other rows of the other side, and rows of the first to judge on, in 20 clusters."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, -1, WIDTH)
    centres = torch.randn(20, WIDTH, generator=draw) * 2 * sizes + torch.randn(WIDTH, generator=draw)
    shares = torch.rand(20, generator=draw) ** 2

    def rows(n: int) -> Tensor:
        of_rows = centres[torch.multinomial(shares, n, True, generator=draw)]
        return (of_rows + 0.3 * sizes * torch.randn(n, WIDTH, generator=draw)).double()

    return rows(1500), rows(1500) @ turn, rows(200)


@pytest.fixture(scope="module")
def turn() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64))[0]


def test_k_means_finds_clusters_that_are_apart() -> None:
    centres = 100 * torch.eye(5, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    rows = centres.repeat_interleave(20, 0) + torch.randn(100, 5, generator=draw, dtype=torch.float64)
    found = k_means(rows, 5, draw)
    means = rows.reshape(5, 20, 5).mean(1)
    nearest = torch.cdist(means, found).argmin(1)
    torch.testing.assert_close(found[nearest], means)
    assert len(nearest.unique()) == 5


def test_centres_in_another_order_and_turned_are_matched() -> None:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    order = torch.randperm(8, generator=draw)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=draw, dtype=torch.float64))[0]
    found, alike = matched_order(a, 3 * (a @ turn)[order] + 1, 60, 0)
    assert torch.equal(order[found], torch.arange(8))
    assert alike == pytest.approx(1)


@pytest.mark.slow
def test_a_rotation_is_found_without_any_pair(turn: Tensor) -> None:
    x, y, new = clustered(turn)
    found = Procrustes(scale=True).fit_unpaired(x, 2 * y + 3, how=QUICK)
    report = found.report(new, 2 * new @ turn + 3).rows()[0]
    assert report["fvu"] < 0.02
    assert found.nearest_cosine_ > 0.9
    torch.testing.assert_close(found.inverse(found.predict(new)), new)
    again = Procrustes(scale=True).fit_unpaired(x, 2 * y + 3, how=QUICK)
    assert torch.equal(again.predict(new), found.predict(new))


@pytest.mark.slow
def test_known_pairs_help_where_structure_alone_does_not(turn: Tensor) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, -0.3, WIDTH)
    x, y, new = (torch.randn(800, WIDTH, generator=draw).double() * sizes for _ in range(3))
    pairs = np.stack([np.arange(30)] * 2, 1)
    y[:30] = x[:30]  # rows without clusters, of which thirty are partners
    found = Procrustes().fit_unpaired(x, y @ turn, pairs, QUICK)
    with_pairs = found.report(new, new @ turn).rows()[0]["fvu"]
    alone = Procrustes().fit_unpaired(x, y @ turn, how=QUICK).report(new, new @ turn).rows()[0]["fvu"]
    assert with_pairs < 0.1 < 0.5 < alone


def test_known_pairs_decide_the_scale_and_far_rows_do_not(turn: Tensor) -> None:
    x, y, _ = clustered(turn)
    y[:40] = x[:40] @ turn
    y[-1] = 1e4
    pairs = np.stack([np.arange(40)] * 2, 1)
    quick = Matching(repeats=1, runs=1, steps=5, neighbours=20)
    found = Procrustes(scale=True).fit_unpaired(x, y - y.mean(0), pairs, quick)
    a, b = (x[:40] - x.mean(0)) @ found.bank.weight[0], (y - y.mean(0))[:40]
    assert float((a * b).sum() / a.square().sum()) == pytest.approx(1)  # no other factor is better on the pairs


def test_what_cannot_be_matched_is_refused(turn: Tensor) -> None:
    x, y, _ = clustered(turn)
    with pytest.raises(ValueError, match="at least 50 rows in `y`"):
        Procrustes().fit_unpaired(x, y[:49])
    with pytest.raises(ValueError, match=r"`pairs` of rows 0 to 1499 of X.*from \[0, 5\] to \[0, 1500\]"):
        Procrustes().fit_unpaired(x, y, [[0, 5], [0, 1500]])
    with pytest.raises(ValueError, match=r"`pairs` \(P, 2\) of whole numbers"):
        Procrustes().fit_unpaired(x, y, [[0.5, 1.0]])
    with pytest.raises(ValueError, match="one site"):
        Procrustes().fit_unpaired(torch.stack([x, x]), y)
    bad = x.clone()
    bad[0, 0] = torch.nan
    with pytest.raises(ValueError, match="`x` to be finite"):
        Procrustes().fit_unpaired(bad, y)
    with pytest.raises(ValueError, match="`step_size`"):
        Matching(step_size=0.0)
