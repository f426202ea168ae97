"""Fewer rows than directions: what the rows leave open is a fixed choice, not that of the last digit."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from tests.runs import activations
from tests.world import World

from aligners.fitting.fits import fit_map
from aligners.maps import solvers
from aligners.maps.affine import AffineLayer, Orthogonal
from aligners.maps.base import Aligner
from aligners.maps.baselines import GaussianStates
from aligners.maps.canonical import SVCCA
from aligners.maps.inn import INN
from aligners.maps.linear import Permutation, Procrustes
from aligners.maps.mlp import MLP
from aligners.maps.solvers import determined_svd
from aligners.similarity.algebra.moments import Moments, MomentsMetric, moments_of

SITES, D, TEXTS = 2, 16, 9
MAPS: dict[str, Callable[[int, int, int], Aligner]] = {
    "procrustes": Procrustes,
    "scaled": partial(Procrustes, scale=True),
    "permutation": Permutation,
    "signed": partial(Permutation, signed=True),
    "svcca": partial(SVCCA, share=0.5),
    "mlp": MLP,
    "affine": partial(AffineLayer, start="procrustes"),
    "norm": partial(AffineLayer, norm=True, start="procrustes"),
    "orthogonal": Orthogonal,
    **{f"inn-{start}": partial(INN, start=start) for start in ("best", "procrustes", "linear", "covariance")},
}


@pytest.fixture(scope="module")
def read(world: World) -> list[Moments]:
    """Moments of the same texts' first tokens in batches of other sizes; ranks' shares are batches, too."""
    found = []
    for batch_size in (TEXTS, 5, 3):
        data = activations(world, rows="cls", sites=[1, 3])
        moments = MomentsMetric(SITES, D, D)
        for batch in data.paired("fit", only=TEXTS, batch_size=batch_size):
            moments.update(batch.x, batch.y)
        found.append(moments.compute())
    assert found[0].n == TEXTS < D
    assert not torch.equal(found[0].xy, found[1].xy)
    return found


@pytest.mark.parametrize("name", MAPS)
def test_batches_and_ranks_do_not_choose(read: list[Moments], name: str) -> None:
    other = torch.randn(SITES, 50, D, generator=torch.Generator().manual_seed(0))
    mapped = []
    for moments in read:
        torch.manual_seed(0)
        aligner = MAPS[name](SITES, D, D)
        fit_map(name, aligner, moments)
        mapped.append(aligner(other).detach())
    for values in mapped[1:]:
        torch.testing.assert_close(values, mapped[0], rtol=1e-3, atol=1e-3)


def test_nor_what_is_drawn(read: list[Moments]) -> None:
    drawn = [GaussianStates(moments, seed=0)([0], [5]) for moments in read]
    torch.testing.assert_close(drawn[1], drawn[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rows", "columns", "rank"), [(6, 6, 2), (6, 4, 2), (4, 6, 3), (5, 5, 0), (5, 5, 5)])
def test_it_is_an_svd_and_leaves_in_place_what_is_open(rows: int, columns: int, rank: int) -> None:
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(2, d, rank, generator=draw, dtype=torch.float64) for d in (rows, columns))
    matrix = left @ right.mT
    u, s, vh = determined_svd(matrix)
    torch.testing.assert_close(u * s[:, None] @ vh, matrix)
    small = torch.eye(min(rows, columns), dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(u.mT @ u, small)
    torch.testing.assert_close(vh @ vh.mT, small)
    # of all rotations with the same product with the matrix, none is nearer to the identity
    identity = torch.eye(rows, columns, dtype=torch.float64)
    of_u, of_v = u[..., :rank], vh[:, :rank]
    rest = identity - of_u @ of_u.mT @ identity
    rest = rest - rest @ of_v.mT @ of_v
    best = (of_u @ of_v).diagonal(dim1=1, dim2=2).sum(-1) + torch.linalg.matrix_norm(rest, "nuc")
    torch.testing.assert_close((u @ vh).diagonal(dim1=1, dim2=2).sum(-1), best)


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (6, 5)])
def test_sites_of_several_ranks_are_those_of_each(rows: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(0)
    matrices = []
    for rank in (2, 5, 0, 4):
        left, right = (torch.randn(d, rank, generator=draw, dtype=torch.float64) for d in (rows, columns))
        matrices.append(left @ right.mT)
    u, s, vh = determined_svd(torch.stack(matrices))
    for site, matrix in enumerate(matrices):
        u_alone, s_alone, vh_alone = determined_svd(matrix[None])
        torch.testing.assert_close(u[site] @ vh[site], u_alone[0] @ vh_alone[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(s[site], s_alone[0], rtol=0, atol=1e-12)


def test_states_after_a_layer_norm_take_one_svd_of_their_size() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 50, 8, generator=draw, dtype=torch.float64)
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    with patch.object(solvers, "thin_svd", side_effect=solvers.thin_svd) as decomposed:
        solvers.procrustes_rotation(moments_of(x, y))
    assert [call.args[0].shape for call in decomposed.call_args_list] == [(3, 8, 8), (3, 1, 1)]


def test_two_rows_match_no_neurons(read: list[Moments]) -> None:
    with pytest.raises(ValueError, match=r"permutation expects at least 3 fitting rows"):
        fit_map("permutation", Permutation(SITES, D, D), read[0]._replace(n=torch.tensor(2.0)))
