"""The linear map at which a bijection starts, and the space in which its training disturbs that map least."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from aligners.maps.base import deviation
from aligners.maps.matrices import batch_inverse, identity_like
from aligners.maps.solvers import (
    RIDGES,
    determined_svd,
    fixed_direction,
    procrustes_rotation,
    ridge_regression,
)
from aligners.similarity.algebra.moments import Moments, squares

Start = Literal["identity", "procrustes", "linear", "covariance", "best"]

RIGID: tuple[Start, ...] = ("identity", "procrustes")  # starts that stretch nothing

# Least squares shrinks what it cannot predict, in the limit to zero, and a start needs a usable inverse.
SMALLEST_SINGULAR_VALUE = 0.03

# States after a LayerNorm do not vary in one direction: without a floor their covariance has no inverse square root.
SMALLEST_VARIANCE = 1e-4

# A feature with less than this share of the usual variance does not vary.
NO_VARIANCE = 1e-12

JUDGED = 0.5  # the share of the rows that candidates are judged on


class StartingMap(NamedTuple):
    """Where a bijection starts, between centred states divided by their model's root mean variance.

    Attributes:
        weight: M, (S, d, d).
        inverse: M⁻¹, (S, d, d).
        taken: the place in `START_NAMES` of the start that was taken, (S,).
        error: its FVU on rows that it was not solved on, or the mean of both directions' FVU, (S,).
    """

    weight: Tensor
    inverse: Tensor
    taken: Tensor
    error: Tensor

    @property
    def rigid(self) -> Tensor:
        """Whether the map stretches nothing, (S,)."""
        rigid = _places(RIGID).to(self.taken)
        return torch.isin(self.taken, rigid)


def invertible_start(moments: Moments, start: Start, both_ways: bool) -> StartingMap:
    """Find each site's starting map.

    `best` takes, site by site, the candidate with the least error on rows that it was not solved on: its FVU, plus that
    of its inverse under `both_ways`. For this, each candidate is solved on one half of the rows and judged on the
    other. The one that is taken is solved on all of them. `thinned` says how moments, which hold no rows, are split.

    Args:
        moments: moments of the fitting rows; the widths are equal.
        start: the map.
        both_ways: whether the error of the inverse counts.
    """
    moments = scaled_moments(moments)
    solved, judged = thinned(moments, JUDGED)
    names: tuple[Start, ...] = (start,)
    if start == "best":
        names = START_NAMES

    candidate_errors = []
    for name in names:
        trial = _SOLVERS[name](solved)
        error = start_error(trial, judged, both_ways)
        candidate_errors.append(error)

    errors = torch.stack(candidate_errors)
    error, chosen = errors.min(0)
    if both_ways:
        error = error / 2
    weight = _solved(moments, names, chosen)
    inverse = batch_inverse(weight)
    taken = _places(names).to(chosen)[chosen]
    return StartingMap(weight, inverse, taken, error)


def _solved(moments: Moments, names: Sequence[Start], chosen: Tensor) -> Tensor:
    """The map of the start that each site chose, by its place in `names`; no start is solved where it is not taken."""
    weight = torch.empty_like(moments.xx)
    places = chosen.tolist()
    for place, name in enumerate(names):
        sites = [site for site, taken in enumerate(places) if taken == place]
        if sites:
            weight[sites] = _SOLVERS[name](_at(moments, sites))
    return weight


def _at(moments: Moments, sites: Sequence[int]) -> Moments:
    """The moments of some of the sites."""
    if len(sites) == len(moments.xx):
        return moments
    some = torch.tensor(sites, device=moments.xx.device)
    n, *others = moments
    parts = [part[some] for part in others]
    return Moments(n, *parts)


def _places(names: Sequence[Start]) -> Tensor:
    """The places of starts in `START_NAMES`."""
    places = []
    for name in names:
        place = START_NAMES.index(name)
        places.append(place)
    return torch.tensor(places)


def calm_space(moments: Moments, start: Tensor, rigid: Tensor) -> tuple[Tensor, Tensor]:
    """Find the space in which steps of matrices move a map and its inverse least, where the map starts at M.

    A step changes all entries of a matrix alike. To a state xA of that space it adds noise of one size in every
    direction, in proportion to the state's norm. Y's space sees this noise through A⁻¹M; X's space, on the way back,
    through A⁻¹. Both together are least, per size of step, where A Aᵀ is the geometric mean of Σ⁻¹ and I + M Mᵀ: the
    symmetric W with W Σ W = I + M Mᵀ. (By Cauchy and Schwarz, tr(W Σ) · tr(W⁻¹ (I + M Mᵀ)) is then least.)

    Args:
        moments: moments of the fitting rows; Σ is the covariance of x, divided by its mean variance.
        start: M, (S, d, d).
        rigid: (S,) where M stretches nothing, and so amplifies nothing: there A is I.

    Returns:
        A (S, d, d), symmetric, which gives states of mean variance 1, and A⁻¹ (S, d, d).
    """
    same = identity_like(start)
    into = same.repeat(len(start), 1, 1)
    out_of = into.clone()
    stretched = (~rigid).nonzero()[:, 0].tolist()
    if stretched:
        some = _at(moments, stretched)
        into[stretched], out_of[stretched] = _calm(some, start[stretched])
    return into, out_of


def _calm(moments: Moments, start: Tensor) -> tuple[Tensor, Tensor]:
    """`calm_space` where M stretches."""
    moments = scaled_moments(moments)
    covariance = moments.xx / moments.n
    root, inverse_root = _roots(covariance)
    amplified = start @ start.mT
    both = identity_like(start) + amplified
    within = root @ both @ root
    middle, _ = _roots(within)
    mean = inverse_root @ middle @ inverse_root
    into, out_of = _roots(mean)

    spread = covariance @ into
    products = into * spread
    total_variance = products.sum((1, 2), keepdim=True)
    variance = total_variance / start.shape[-1]
    scale = variance.sqrt()
    return into / scale, out_of * scale


def thinned(moments: Moments, share: float) -> tuple[Moments, Moments]:
    """Split the moments of n rows in two, as if those of some rows had been gathered apart.

    The scatter of n normal rows is a Wishart matrix with n − 1 degrees of freedom, T = L Lᵀ. For B from the matrix beta
    distribution, L B Lᵀ and T − L B Lᵀ are independent Wishart matrices (Muirhead 1982, "Aspects of Multivariate
    Statistical Theory", section 3.3): just what two sets of rows would give. The draw is the same at every site and in
    every run. Where rows are alike, as neighbours in a text are, so are the two sets, as after a random split.

    Args:
        moments: moments of n rows, at least 2.
        share: share of the rows in the second set.

    Returns:
        The moments of the two sets, with the means of all rows.
    """
    rows = int(moments.n)
    freedom = rows - 1
    wanted = round(share * freedom)
    second = max(1, wanted)
    left = freedom - second
    first = max(1, left)
    widths = moments.xy.shape[-2:]
    rank = min(sum(widths), freedom)

    draw = np.random.default_rng(0)
    of_first = _scatter(first, rank, draw)
    of_first = of_first.to(moments.xx)
    of_second = _scatter(second, rank, draw)
    of_second = of_second.to(moments.xx)
    of_both = of_first + of_second
    factor = torch.linalg.cholesky(of_both)
    root = _joint_root(moments, rank)
    part = _part(moments, root, factor, of_first, first)
    rest = _part(moments, root, factor, of_second, second)
    return part, rest


def _scatter(rows: int, width: int, draw: np.random.Generator) -> Tensor:
    """The sum of z zᵀ over so many standard normal rows z, (width, width).

    Of many rows only its Cholesky factor is drawn (Bartlett 1933, "On the theory of statistical regression").
    """
    if rows < width:
        drawn = draw.standard_normal((rows, width))
        scatter = drawn.T @ drawn
        return torch.from_numpy(scatter)
    factor = np.zeros((width, width))
    below = np.tril_indices(width, -1)
    entries = width * (width - 1) // 2
    factor[below] = draw.standard_normal(entries)
    freedom = rows - np.arange(width)
    squared = draw.chisquare(freedom)
    lengths = np.sqrt(squared)
    np.fill_diagonal(factor, lengths)
    scatter = factor @ factor.T
    return torch.from_numpy(scatter)


def _joint_root(moments: Moments, rank: int) -> Tensor:
    """R (S, d_x + d_y, rank) with R Rᵀ the joint scatter of x and y."""
    upper = torch.cat((moments.xx, moments.xy), 2)
    lower = torch.cat((moments.xy.mT, moments.yy), 2)
    joint = torch.cat((upper, lower), 1)
    values, vectors = torch.linalg.eigh(joint)
    # rounding chooses the signs of eigenvectors: fix them
    fixed = fixed_direction(values)
    shares = fixed @ vectors
    signs = shares.sign()
    vectors = vectors * signs[:, None]
    largest = values[..., -rank:]
    variances = largest.clamp(min=0)
    sizes = variances.sqrt()
    directions = vectors[..., -rank:]
    return directions * sizes[:, None]


def _part(
    moments: Moments, root: Tensor, factor: Tensor, scatter: Tensor, freedom: int
) -> Moments:
    """The moments of one of the two sets: R B Rᵀ, where B = F⁻¹ `scatter` F⁻ᵀ."""
    half = torch.linalg.solve_triangular(factor, scatter, upper=False)
    beta = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    joint = root @ beta @ root.mT
    n = torch.full_like(moments.n, freedom + 1)
    d = moments.xx.shape[-1]
    of_x = joint[:, :d]
    of_y = joint[:, d:]
    xx = of_x[..., :d]
    xy = of_x[..., d:]
    yy = of_y[..., d:]
    return moments._replace(n=n, xx=xx, yy=yy, xy=xy)


def scaled_moments(moments: Moments) -> Moments:
    """Moments of states divided by their root mean variance."""
    x = deviation(moments.xx, moments.n)
    y = deviation(moments.yy, moments.n)
    xx = moments.xx / x.square()
    yy = moments.yy / y.square()
    xy = moments.xy / (x * y)
    return moments._replace(xx=xx, yy=yy, xy=xy)


def _identity(moments: Moments) -> Tensor:
    """I, at every site."""
    return identity_like(moments.xx).expand_as(moments.xx)


def _procrustes(moments: Moments) -> Tensor:
    """The orthogonal map with the least error."""
    rotation, _ = procrustes_rotation(moments)
    return rotation


def _linear(moments: Moments) -> Tensor:
    """Least squares, the smallest singular values raised, between states whose features have one size."""
    of_x = feature_deviations(moments.xx)[..., None]
    of_y = feature_deviations(moments.yy)[:, None]
    weight, _ = ridge_regression(moments, RIDGES)
    alike = weight * of_x / of_y
    u, s, vh = determined_svd(alike)
    smallest = SMALLEST_SINGULAR_VALUE * s[:, :1]
    raised = s.clamp(min=smallest)
    raised_weight = u * raised[:, None] @ vh
    return raised_weight / of_x * of_y


def _covariance(moments: Moments) -> Tensor:
    """Find the map with the least error both ways among those that turn X's covariance into Y's.

    M = Σ_x^(−1/2) R Σ_y^(1/2), R orthogonal. The cross terms of both errors, each relative to its total variance (d on
    scaled states), are linear in R: R = U Vᵀ of the SVD of Σ_x^(−1/2) Σ_xy Σ_y^(1/2) + Σ_x^(1/2) Σ_xy Σ_y^(−1/2).
    """
    scatters = torch.cat((moments.xx, moments.yy))
    roots, inverses = _roots(scatters / moments.n)
    root_x, root_y = roots.chunk(2)
    inverse_x, inverse_y = inverses.chunk(2)
    cross = moments.xy / moments.n
    there = inverse_x @ cross @ root_y
    back = root_x @ cross @ inverse_y
    u, _, vh = determined_svd(there + back)
    return inverse_x @ u @ vh @ root_y


_SOLVERS = {
    "identity": _identity,
    "procrustes": _procrustes,
    "linear": _linear,
    "covariance": _covariance,
}

START_NAMES: tuple[Start, ...] = get_args(Start)[: len(_SOLVERS)]


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ^(1/2) and Σ^(−1/2), small variances raised.

    They are raised between features of one size: next to a feature of 10,000 times the others' size, these would all
    be small.
    """
    sizes = feature_deviations(covariance)
    rows = sizes[..., None]
    columns = sizes[:, None]
    both = rows * columns
    alike = covariance / both
    values, vectors = torch.linalg.eigh(alike)
    values = values.clamp(min=SMALLEST_VARIANCE)
    raised = vectors * values[:, None] @ vectors.mT

    again = raised * both
    values, vectors = torch.linalg.eigh(again)
    lengths = values.sqrt()[:, None]
    root = vectors * lengths @ vectors.mT
    inverse_root = vectors / lengths @ vectors.mT
    return root, inverse_root


def feature_deviations(scatter: Tensor) -> Tensor:
    """The root of each feature's sum of squares, (S, d); of one that does not vary the root of the median of all."""
    variance = squares(scatter)
    mean = variance.mean(-1, keepdim=True)
    median = variance.median(-1, keepdim=True).values
    usual = torch.where(median > 0, median, mean)
    varies = variance > NO_VARIANCE * usual
    raised = torch.where(varies, variance, usual)
    return raised.sqrt()


def start_error(weight: Tensor, moments: Moments, both_ways: bool) -> Tensor:
    """FVU of x ↦ x W from moments, plus that of its inverse under `both_ways`, (S,)."""
    there = _fvu(weight, moments)
    if not both_ways:
        return there
    inverse = batch_inverse(weight)
    back = _fvu(inverse, moments.swap())
    return there + back


def _fvu(weight: Tensor, moments: Moments) -> Tensor:
    """FVU of x ↦ x W from moments, (S,)."""
    variances = squares(moments.yy)
    total = variances.sum(-1)
    spread = moments.xx @ weight
    products = weight * spread
    mapped = products.sum((1, 2))
    products = weight * moments.xy
    shared = products.sum((1, 2))
    missed = mapped - 2 * shared
    return 1 + missed / total
