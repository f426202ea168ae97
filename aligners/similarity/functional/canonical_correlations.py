"""Whitening, canonical correlations and directions, and what a fit explains of unrelated data by chance."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.similarity.algebra.decompositions import singular_values, thin_svd
from aligners.similarity.algebra.moments import (
    GridMoments,
    at_once,
    check_finite,
    converged,
    decomposed,
    squares,
)

# ten rows a direction; above it values of fitted measures carry a caution
MOST_BY_CHANCE = 0.1
TOLERANCE = 1e-10
SVD = "SVD behind canonical correlations"
Ranks = tuple[int, int]  # of X and of Y


class Whitening(NamedTuple):
    """A basis in which centred rows have unit, uncorrelated columns.

    Attributes:
        weight: W (..., d, d). WᵀSW is the identity on the first `rank` columns; those after them are not in use.
            Columns come in descending order of the eigenvalue that each belongs to.
        rank: number of columns in use, (...), an integer.
        on_host: the same on the CPU, so that nobody has to wait for the device again; None: not known there.
    """

    weight: Tensor
    rank: Tensor
    on_host: Tensor | None = None

    def of(self, some: int | slice) -> Self:
        """The whitening of one layer, or of some."""
        ranks = self.ranks()
        return type(self)(self.weight[some], self.rank[some], ranks[some])

    def ranks(self) -> Tensor:
        """`rank` on the CPU."""
        if self.on_host is None:
            return self.rank.cpu()
        return self.on_host

    def most(self) -> int:
        """The largest rank."""
        return max(self.ranks().flatten().tolist())

    def in_use(self) -> Tensor:
        """The columns of W up to the largest rank, (..., d, k); zero where they are not in use."""
        most = self.most()
        numbers = torch.arange(most, device=self.rank.device)
        used = numbers < self.rank[..., None]
        return self.weight[..., :most] * used[..., None, :]


class Spectrum(NamedTuple):
    """Eigenvalues and whitened directions of scatters, from which whitenings of every share follow.

    Attributes:
        values: eigenvalues, descending, (..., d).
        weight: W (..., d, d): WᵀSW is the identity on the columns whose eigenvalue is not dropped; these are zero.
        tolerance: below which share of the largest they are dropped.
    """

    values: Tensor
    weight: Tensor
    tolerance: float

    @classmethod
    def of(cls, scatter: Tensor, tolerance: float, standardised: bool) -> Self:
        """Decompose scatters (..., d, d), some at a time, for the memory; see `whitening`."""
        *lead, d, _ = scatter.shape
        weight = torch.empty_like(scatter, memory_format=torch.contiguous_format)
        values = weight.new_empty(*lead, d)
        layers = scatter.reshape(-1, d, d)
        some = at_once(layers)
        parts = layers.split(some)
        weights = weight.view(-1, d, d).split(some)
        spectra = values.view(-1, d).split(some)
        for part, to, spectrum in zip(parts, weights, spectra, strict=True):
            _decompose(part, tolerance, standardised, to, spectrum)
        return cls(values, weight, tolerance)

    def whitening(self, share: float) -> Whitening:
        """The whitening that keeps a share of the variance."""
        values = self.values
        largest = values[..., :1]
        used = values > self.tolerance * largest
        if share < 1:
            carried = values.cumsum(-1) - values  # by the components before this one
            enough = share * values.sum(-1, keepdim=True)
            used &= carried < enough
        rank = used.sum(-1)
        return Whitening(self.weight, rank, rank.cpu())


def _decompose(
    scatter: Tensor,
    tolerance: float,
    standardised: bool,
    weight: Tensor,
    spectrum: Tensor,
) -> None:
    """Set W (L, d, d) and the eigenvalues (L, d) of `Spectrum`, of scatters (L, d, d)."""
    variance = squares(scatter)
    scale = torch.ones_like(variance)
    if standardised:
        scale = variance.sqrt()
    rows = scale[:, :, None]
    correlation = scatter / (rows * scale[:, None])
    what = "eigendecomposition behind a whitening"
    values, vectors = decomposed(what, torch.linalg.eigh, correlation)
    values = values.flip(-1)
    used = values > tolerance * values[:, :1]
    root = values.where(used, 1).rsqrt()
    root = root * used
    torch.mul(vectors.flip(-1), root[:, None], out=weight)
    weight.div_(rows)
    spectrum.copy_(values)


class Whitenings:
    """The whitenings of the layers of one model, for all measures and all models beside it.

    A layer is decomposed once as it is, and once with standardised features, for all shares of the variance.

    Args:
        scatter: of each layer, (L, d, d).
    """

    def __init__(self, scatter: Tensor) -> None:
        self._scatter = scatter
        self._spectra: dict[bool, Spectrum] = {}
        self._known: dict[tuple[float, bool], Whitening] = {}

    def __call__(self, share: float, standardised: bool) -> Whitening:
        """`whitening` of all layers, computed at the first call."""
        standardised = standardised or share == 1
        key = (share, standardised)
        if key not in self._known:
            check_range(above=0, most=1, share=share)
            spectrum = self._spectrum(standardised)
            self._known[key] = spectrum.whitening(share)
        return self._known[key]

    def _spectrum(self, standardised: bool) -> Spectrum:
        """The decomposition of all layers, made at the first call."""
        if standardised not in self._spectra:
            spectrum = Spectrum.of(self._scatter, TOLERANCE, standardised)
            self._spectra[standardised] = spectrum
        return self._spectra[standardised]

    def nuclear_norm(self) -> Tensor:
        """`nuclear_norm` of all layers, (L,), from what is decomposed already, if it is."""
        known = self._spectra.get(False)
        if known is None:
            return nuclear_norm(self._scatter)
        return _sum_of_roots(known.values)


def whitenings(scatter: Tensor) -> Whitenings:
    """`whitening` of the layers of one model, each computed once for all measures and all models beside it.

    Args:
        scatter: of each layer, (L, d, d).
    """
    return Whitenings(scatter)


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
    tolerance: float = TOLERANCE,
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
    standardised = standardised or share == 1
    spectrum = Spectrum.of(scatter, tolerance, standardised)
    return spectrum.whitening(share)


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
    weight_x = white_x.weight[..., : white_x.most()]
    weight_y = white_y.weight[..., : white_y.most()]
    core = weight_x.mT @ xy @ weight_y
    *lead, k_x, k_y = core.shape
    ranks = []
    for white in (white_x, white_y):
        of_each = white.ranks().expand(lead)
        ranks.append(of_each.flatten().tolist())
    blocks = core.reshape(-1, k_x, k_y)
    rho, u, v = _singular(blocks, list(zip(*ranks, strict=True)), directions)

    rank = torch.minimum(white_x.rank, white_y.rank)
    u = u.view(*lead, k_x, -1)
    v = v.view(*lead, k_y, -1)
    return Canonical(
        rho=rho.view(*lead, -1), rank=rank.expand(lead), a=weight_x @ u, b=weight_y @ v
    )


def _singular(
    blocks: Tensor, ranks: Sequence[Ranks], directions: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values and vectors of blocks (M, k_x, k_y), each of its own ranks."""
    m, k_x, k_y = blocks.shape
    c = max(map(min, ranks))
    vectors = c * directions
    rho = blocks.new_zeros(m, c)
    u = blocks.new_zeros(m, k_x, vectors)
    v = blocks.new_zeros(m, k_y, vectors)
    check_finite(SVD, blocks)
    for some, of_x, of_y in _of_one_rank(ranks, blocks.device):
        block = blocks[some, :of_x, :of_y]
        k = min(of_x, of_y)
        if not directions:
            rho[some, :k] = converged(SVD, singular_values, block)
            continue
        left, values, right = converged(SVD, thin_svd, block)
        rho[some, :k] = values
        u[some, :of_x, :k] = left
        v[some, :of_y, :k] = right.mT
    check_finite(SVD, rho, u, v)
    return rho, u, v


def _of_one_rank(
    ranks: Sequence[Ranks], device: torch.device
) -> Iterator[tuple[Tensor | slice, int, int]]:
    """Indices of the members that share their ranks of X and Y, on a device, with these ranks.

    Each group is decomposed at its own size. In one padded batch the singular vectors of a correlation of 0
    could lie in the padding, and small ranks would cost as much as the largest.
    """
    groups: dict[Ranks, list[int]] = {}
    for place, both in enumerate(ranks):
        groups.setdefault(both, []).append(place)
    for (of_x, of_y), places in groups.items():
        some: Tensor | slice = slice(None)
        if len(groups) > 1:
            some = torch.tensor(places).to(device, non_blocking=True)
        yield some, of_x, of_y


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
    some = at_once(scatter)
    values = []
    for layers in scatter.split(some):  # for the memory
        ascending = decomposed(what, torch.linalg.eigvalsh, layers)
        values.append(ascending.flip(-1))
    return _sum_of_roots(torch.cat(values))


def _sum_of_roots(values: Tensor) -> Tensor:
    """Σ√λ of eigenvalues (L, d), descending, that rounding cannot have made, (L,)."""
    epsilon = torch.finfo(values.dtype).eps
    rounding = values.shape[-1] * epsilon * values[:, :1]
    known = values > rounding
    roots = values.where(known, 0).sqrt()
    return roots.sum(-1)
