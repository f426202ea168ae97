"""Whitening, canonical correlations and directions, and what a fit explains of unrelated data by chance."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.similarity.algebra.moments import GridMoments, decomposed

MOST_BY_CHANCE = (
    0.1  # ten rows a direction; above it values of fitted measures carry a caution
)
SVD = "SVD behind canonical correlations"


class Whitening(NamedTuple):
    """A basis in which centred rows have unit, uncorrelated columns.

    Attributes:
        weight: W (..., d, d). WᵀSW is the identity on the first `rank` columns; the columns after them are zero.
            Columns come in descending order of the eigenvalue that each belongs to.
        rank: number of columns in use, (...), an integer.
    """

    weight: Tensor
    rank: Tensor

    def of(self, some: int | slice) -> Self:
        """The whitening of one layer, or of some."""
        return type(self)(self.weight[some], self.rank[some])


Whitenings = Callable[
    [float, bool], Whitening
]  # of all layers, from `share` and `standardised`


def whitenings(scatter: Tensor) -> Whitenings:
    """`whitening` of the layers of one model, each computed once for all measures and all models beside it.

    Args:
        scatter: of each layer, (L, d, d).
    """
    return cache(
        lambda share, standardised: whitening(
            scatter, share=share, standardised=standardised
        )
    )


class Canonical(NamedTuple):
    """Canonical correlations and directions of centred rows X and Y (Hotelling 1936).

    The last axis holds the c pairs that the batch's largest `rank` needs. Where `rank` is smaller, what lies
    beyond it is zero.

    Attributes:
        rho: correlations, descending, (..., c).
        rank: min(rank_x, rank_y) of each pair, (...), an integer.
        a: (..., d_x, c): XA has unit (AᵀXᵀXA = I) and uncorrelated columns; b: (..., d_y, c), likewise, and
            AᵀXᵀYB = diag(rho).
    """

    rho: Tensor
    rank: Tensor
    a: Tensor
    b: Tensor


def whitening(
    scatter: Tensor,
    *,
    share: float = 1.0,
    tolerance: float = 1e-10,
    standardised: bool = False,
) -> Whitening:
    """Whiten the rows whose centred scatter this is, for any number of leading axes at once.

    With `share` 1 every direction that varies is kept. The scatter is scaled to a correlation matrix first, so
    that neither the result nor the rank depends on the scale of single features. With a smaller share it is a
    PCA of the scatter as it is, cut to the fewest components that carry that share of the variance (of the
    eigenvalues, not of their roots), as SVCCA asks; or, `standardised`, of the correlation matrix.

    Rows may be exactly deficient, as states after a LayerNorm are: a direction whose eigenvalue is below
    `tolerance` times the largest is dropped and not divided by. A direction near that limit is known from a scatter
    to ε/`tolerance`, about 1e-6 of itself; the mean over d directions to much less.

    Args:
        scatter: S = Σ (x − x̄)(x − x̄)ᵀ, (..., d, d), float64.
        share: share of the variance to keep, in (0, 1].
        tolerance: smallest eigenvalue kept, relative to the largest.
        standardised: whether the share is that of features that are divided by their deviations.

    Raises:
        ValueError: `share` or `tolerance` is out of range; the scatter is not finite; with `share` 1 or `standardised`,
            a feature has no variance; the decomposition does not converge.
    """
    check_range(above=0, most=1, share=share)
    check_range(
        above=0, below=1, tolerance=tolerance
    )  # relative to the largest eigenvalue
    d = scatter.shape[-1]
    weight = torch.empty_like(scatter, memory_format=torch.contiguous_format)
    rank = torch.empty(scatter.shape[:-2], dtype=torch.int64, device=scatter.device)
    layers = zip(
        scatter.reshape(-1, d, d), weight.view(-1, d, d), rank.view(-1), strict=True
    )
    for one, into, count in layers:  # one at a time, for the memory
        matrix, number = _whitened(one, share, tolerance, standardised or share == 1)
        into.copy_(matrix)
        count.copy_(number)
    return Whitening(weight, rank)


def _whitened(
    scatter: Tensor, share: float, tolerance: float, standardised: bool
) -> tuple[Tensor, Tensor]:
    """`whitening` of one layer: weight (d, d) and rank, ()."""
    variance = scatter.diagonal()
    scale = variance.sqrt() if standardised else torch.ones_like(variance)
    correlation = scatter / (scale[:, None] * scale)
    factors = decomposed(
        "eigendecomposition behind a whitening", torch.linalg.eigh, correlation
    )
    values, vectors = (part.flip(-1) for part in factors)
    used = values > tolerance * values[:1]
    if share < 1:
        carried = values.cumsum(-1) - values  # by the components before this one
        used &= carried < share * values.sum()
    root = torch.where(used, values, 1).rsqrt() * used
    return vectors * root / scale[:, None], used.sum()


def canonical(
    white_x: Whitening, white_y: Whitening, xy: Tensor, *, directions: bool = True
) -> Canonical:
    """Canonical correlations and directions from whitenings and the cross scatter.

    Leading axes broadcast. For paired sites all are (S, ...); for the grid of all layer pairs each layer is
    whitened once, and then x is unsqueezed to (L_x, 1, ...) and y to (1, L_y, ...) against xy (L_x, L_y, d_x, d_y).
    A correlation may exceed 1 by rounding; none is clamped.

    Args:
        white_x: of X, weight (..., d_x, d_x).
        white_y: of Y, weight (..., d_y, d_y).
        xy: Σ (x − x̄)(y − ȳ)ᵀ, (..., d_x, d_y), float64.
        directions: whether `a` and `b` are wanted: without them no singular vectors are computed, and both are empty.

    Raises:
        ValueError: a decomposition does not converge or is not finite.
    """
    weight_x, weight_y = (
        white.weight[..., : int(white.rank.max())] for white in (white_x, white_y)
    )
    core = weight_x.mT @ xy @ weight_y
    lead = core.shape[:-2]
    core = core.reshape(-1, *core.shape[-2:])
    rank_x, rank_y = (white.rank.expand(lead).flatten() for white in (white_x, white_y))
    rank = torch.minimum(rank_x, rank_y)
    rho = core.new_zeros(len(core), int(rank.max()))
    u, v = (
        core.new_zeros(len(core), size, rho.shape[1] * directions)
        for size in core.shape[1:]
    )
    thin_svd = partial(torch.linalg.svd, full_matrices=False)
    for members, k_x, k_y in _of_one_rank(rank_x, rank_y):
        block, k = core[members, :k_x, :k_y], min(k_x, k_y)
        if directions:
            u[members, :k_x, :k], rho[members, :k], right = decomposed(
                SVD, thin_svd, block
            )
            v[members, :k_y, :k] = right.mT
        else:
            rho[members, :k] = decomposed(SVD, torch.linalg.svdvals, block)
    a, b = (
        weight_x @ u.view(*lead, *u.shape[1:]),
        weight_y @ v.view(*lead, *v.shape[1:]),
    )
    return Canonical(rho.view(*lead, -1), rank.view(lead), a, b)


def _of_one_rank(rank_x: Tensor, rank_y: Tensor) -> list[tuple[Tensor, int, int]]:
    """Indices of the members that share (rank_x, rank_y), with these ranks.

    Each group is decomposed at its own size. In one padded batch the singular vectors of a correlation of 0
    could lie in the padding, and small ranks would cost as much as the largest.
    """
    pairs, group = torch.stack([rank_x, rank_y], 1).unique(dim=0, return_inverse=True)
    return [
        ((group == i).nonzero()[:, 0], k_x, k_y)
        for i, (k_x, k_y) in enumerate(pairs.tolist())
    ]


def regression_chance(moments: GridMoments) -> Tensor:
    """E[R²] of regressing an independent X on all of Y: d_y / (n − 1), at most 1, (L_x, L_y).

    Centred rows span n − 1 dimensions, Y's features d_y of them, and an independent X lies in such a subspace with that
    share of its squared length on average, whatever its distribution. A multiple correlation is about its root.
    """
    return _share(moments, moments.yy.shape[-1])


def canonical_chance(
    moments: GridMoments,
    share: float = 1.0,
    standardised: bool = False,
    *white: Whitenings,
) -> Tensor:
    """Mean ρ² of the canonical correlations of independent X and Y: max(k_x, k_y) / (n − 1), at most 1, (L_x, L_y).

    The ρ² add up to tr(P_X P_Y), whose mean is k_x k_y / (n − 1) by the same argument, over min(k_x, k_y) of them. Mean
    correlations are at most the root of it, weighted by what they account for or not.

    Args:
        moments: of the rows.
        share: of the variance that the k_x and k_y directions carry; 1: all features.
        standardised: as in `whitening`.
        white: whitenings of X's layers and of Y's, if they are known.
    """
    if share == 1:
        return _share(moments, max(moments.xx.shape[-1], moments.yy.shape[-1]))
    both = white or map(whitenings, (moments.xx, moments.yy))
    kept_x, kept_y = (of_model(share, standardised).rank for of_model in both)
    return _share(moments, kept_x[:, None].maximum(kept_y))


def _share(moments: GridMoments, directions: Tensor | int) -> Tensor:
    return (
        (directions / (moments.n - 1))
        .clamp(max=1)
        .expand(len(moments.xx), len(moments.yy))
    )
