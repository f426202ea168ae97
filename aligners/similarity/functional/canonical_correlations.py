"""Whitening, canonical correlations and directions, and what a fit explains of unrelated data by chance."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.similarity.algebra.moments import GridMoments, decomposed

# ten rows a direction; above it values of fitted measures carry a caution
MOST_BY_CHANCE = 0.1
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

    def in_use(self) -> Tensor:
        """The columns of W up to the largest rank."""
        most = int(self.rank.max())
        return self.weight[..., :most]


# of all layers, from `share` and `standardised`
Whitenings = Callable[[float, bool], Whitening]


def whitenings(scatter: Tensor) -> Whitenings:
    """`whitening` of the layers of one model, each computed once for all measures and all models beside it.

    Args:
        scatter: of each layer, (L, d, d).
    """

    @cache
    def of_share(share: float, standardised: bool) -> Whitening:
        return whitening(scatter, share=share, standardised=standardised)

    return of_share


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
    check_range(above=0, below=1, tolerance=tolerance)
    *lead, d, _ = scatter.shape
    weight = torch.empty_like(scatter, memory_format=torch.contiguous_format)
    rank = torch.empty(lead, dtype=torch.int64, device=scatter.device)
    weights = weight.view(-1, d, d)
    ranks = rank.view(-1)
    layers = scatter.reshape(-1, d, d)
    standardised = standardised or share == 1
    options = share, tolerance, standardised
    for i, layer in enumerate(layers):  # one at a time, for the memory
        weights[i], ranks[i] = _whitened(layer, *options)
    return Whitening(weight, rank)


def _whitened(
    scatter: Tensor, share: float, tolerance: float, standardised: bool
) -> tuple[Tensor, Tensor]:
    """`whitening` of one layer: weight (d, d) and rank, ()."""
    variance = scatter.diagonal()
    scale = torch.ones_like(variance)
    if standardised:
        scale = variance.sqrt()
    correlation = scatter / (scale[:, None] * scale)
    what = "eigendecomposition behind a whitening"
    values, vectors = decomposed(what, torch.linalg.eigh, correlation)
    values = values.flip(-1)
    vectors = vectors.flip(-1)

    largest = values[:1]
    used = values > tolerance * largest
    if share < 1:
        carried = values.cumsum(-1) - values  # by the components before this one
        enough = share * values.sum()
        used &= carried < enough
    root = values.where(used, 1).rsqrt()
    root = root * used
    weight = vectors * root
    weight = weight / scale[:, None]
    return weight, used.sum()


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
    weight_x = white_x.in_use()
    weight_y = white_y.in_use()
    core = weight_x.mT @ xy @ weight_y
    *lead, k_x, k_y = core.shape
    rank_x = white_x.rank.expand(lead).flatten()
    rank_y = white_y.rank.expand(lead).flatten()
    blocks = core.reshape(-1, k_x, k_y)
    rho, u, v = _singular(blocks, rank_x, rank_y, directions)

    rank = torch.minimum(rank_x, rank_y)
    u = u.view(*lead, k_x, -1)
    v = v.view(*lead, k_y, -1)
    return Canonical(
        rho=rho.view(*lead, -1), rank=rank.view(lead), a=weight_x @ u, b=weight_y @ v
    )


def _singular(
    blocks: Tensor, rank_x: Tensor, rank_y: Tensor, directions: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values and vectors of blocks (M, k_x, k_y), each of its own ranks, (M,)."""
    m, k_x, k_y = blocks.shape
    rank = torch.minimum(rank_x, rank_y)
    c = int(rank.max())
    vectors = c * directions
    rho = blocks.new_zeros(m, c)
    u = blocks.new_zeros(m, k_x, vectors)
    v = blocks.new_zeros(m, k_y, vectors)
    for some, of_x, of_y in _of_one_rank(rank_x, rank_y):
        block = blocks[some, :of_x, :of_y]
        k = min(of_x, of_y)
        if not directions:
            values = decomposed(SVD, torch.linalg.svdvals, block)
            rho[some, :k] = values
            continue
        left, values, right = decomposed(SVD, _thin_svd, block)
        rho[some, :k] = values
        u[some, :of_x, :k] = left
        v[some, :of_y, :k] = right.mT
    return rho, u, v


def _of_one_rank(rank_x: Tensor, rank_y: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Indices of the members that share (rank_x, rank_y), with these ranks.

    Each group is decomposed at its own size. In one padded batch the singular vectors of a correlation of 0
    could lie in the padding, and small ranks would cost as much as the largest.
    """
    ranks = torch.stack([rank_x, rank_y], 1)
    pairs, group = ranks.unique(dim=0, return_inverse=True)
    for i, (of_x, of_y) in enumerate(pairs.tolist()):
        same = group == i
        some = same.nonzero()
        yield some[:, 0], of_x, of_y


def _thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.linalg.svd(matrix, full_matrices=False)


def regression_chance(moments: GridMoments) -> Tensor:
    """E[R²] of regressing an independent X on all of Y: d_y / (n − 1), at most 1, (L_x, L_y).

    Centred rows span n − 1 dimensions, Y's features d_y of them, and an independent X lies in such a subspace with that
    share of its squared length on average, whatever its distribution. A multiple correlation is about its root.
    """
    d_y = moments.yy.shape[-1]
    return _share(moments, d_y)


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
        moments: moments of the rows.
        share: share of the variance that the k_x and k_y directions carry; 1: all features.
        standardised: as in `whitening`.
        white: whitenings of X's layers and of Y's, if they are known.
    """
    if share == 1:
        d_x = moments.xx.shape[-1]
        d_y = moments.yy.shape[-1]
        return _share(moments, max(d_x, d_y))
    if not white:
        white = whitenings(moments.xx), whitenings(moments.yy)
    white_x, white_y = white
    kept_x = white_x(share, standardised).rank
    kept_y = white_y(share, standardised).rank
    most = kept_x[:, None].maximum(kept_y)
    return _share(moments, most)


def _share(moments: GridMoments, directions: Tensor | int) -> Tensor:
    """So many directions of n − 1, at most 1, (L_x, L_y)."""
    share = directions / (moments.n - 1)
    share = share.clamp(max=1)
    layers_x = len(moments.xx)
    layers_y = len(moments.yy)
    return share.expand(layers_x, layers_y)


def nuclear_norm(scatter: Tensor) -> Tensor:
    """‖X‖_* of the centred rows of each layer as a measure of complexity (Ren et al. B.2).

    The sum of the singular values, in the states' own units; it grows with √n and with the rank. Invariant to
    rotations and translation. Feature side: roots of the eigenvalues of XᵀX, one decomposition per layer.
    Rounding leaves eigenvalues of order d ε λ_max where there is exactly none (after a LayerNorm, or with fewer
    rows than features), whose roots would be 1e-8 of the largest singular value: those are not counted.

    Args:
        scatter: XᵀX of centred rows, (L, d, d).

    Returns:
        (L,).

    Raises:
        ValueError: a scatter that is not finite, or a decomposition that does not converge.
    """
    what = "eigendecomposition behind a nuclear norm"
    epsilon = torch.finfo(scatter.dtype).eps
    norms = []
    for layer in scatter:  # one at a time, for the memory
        values = decomposed(what, torch.linalg.eigvalsh, layer)
        rounding = len(layer) * epsilon * values[-1]
        known = values > rounding
        roots = values.where(known, 0).sqrt()
        norms.append(roots.sum())
    return torch.stack(norms)
