"""Starting points of invertible networks: linear bijections from moments, and the choice of the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from scipy.stats import wishart
from torch import Tensor

from aligners.maps.linear import determined_svd, least_squares, procrustes_rotation
from aligners.maps.solving import batch_inverse
from aligners.similarity.algebra.moments import Moments

Start = Literal["identity", "procrustes", "linear", "covariance", "best"]

RIDGE = 1e-4
# Least squares shrinks what it cannot predict, in the limit to zero, and the start needs a usable inverse.
SMALLEST_SINGULAR_VALUE = 0.03
# States after a LayerNorm do not vary in one direction: without a floor their covariance has no inverse square root.
SMALLEST_VARIANCE = 1e-4
JUDGED = 0.5


def invertible_start(moments: Moments, start: Start, both_ways: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Find each site's starting map, between centred states divided by their model's root mean variance.

    `best` takes, site by site, the candidate with the least error on rows that it was not solved on: its FVU, plus that
    of its inverse under `both_ways`, where each is solved on one half of the rows and judged on the other. What is
    returned is solved on all of them. See `thinned` for how moments, which have no rows any more, are parted.

    Args:
        moments: moments of the fitting rows; the widths are equal.
        start: the map.
        both_ways: whether the error of the inverse counts.

    Returns:
        M (S, d, d), M⁻¹ (S, d, d), and the place in `START_NAMES` of what was taken (S,).
    """
    moments = _scaled(moments)
    names = START_NAMES if start == "best" else (start,)
    maps = torch.stack([_MAPS[name](moments) for name in names])
    inverses = batch_inverse(maps)
    chosen = torch.zeros(maps.shape[1], dtype=torch.long, device=maps.device)
    if start == "best":
        solved, judged = thinned(moments, JUDGED)
        chosen = torch.stack([_error(_MAPS[name](solved), judged, both_ways) for name in names]).argmin(0)
    sites = torch.arange(maps.shape[1], device=maps.device)
    known = torch.tensor([START_NAMES.index(name) for name in names], device=maps.device)
    return maps[chosen, sites], inverses[chosen, sites], known[chosen]


def thinned(moments: Moments, share: float) -> tuple[Moments, Moments]:
    """Part the moments of n rows in two, as if those of some rows had been gathered apart.

    The scatter of n normal rows is a Wishart matrix with n − 1 degrees of freedom, T = L Lᵀ. For B from the matrix beta
    distribution, L B Lᵀ and T − L B Lᵀ are independent Wishart matrices (Muirhead 1982, "Aspects of Multivariate
    Statistical Theory", section 3.3): just what two sets of rows would give. The draw is the same at every site and in
    every run. Where rows are alike, as neighbours in a text are, so are the two sets, as after a random split.

    Args:
        moments: of n rows, at least 2.
        share: of the rows in the second set.

    Returns:
        The moments of the two sets, with the means of all rows.
    """
    d, rows = moments.xx.shape[-1], int(moments.n) - 1
    rank = min(d + moments.yy.shape[-1], rows)
    second = max(1, round(share * rows))
    first = max(1, rows - second)
    draw = np.random.default_rng(0)
    of_first, of_second = (torch.from_numpy(_scatter(n, rank, draw)).to(moments.xx) for n in (first, second))
    joint = torch.cat((torch.cat((moments.xx, moments.xy), 2), torch.cat((moments.xy.mT, moments.yy), 2)), 1)
    values, vectors = torch.linalg.eigh(joint)
    # signs of eigenvectors are rounding's to choose: fix them
    fixed = torch.arange(1.0, 1 + values.shape[-1], dtype=values.dtype, device=values.device).cos()
    vectors = vectors * (fixed @ vectors).sign()[:, None]
    root = vectors[..., -rank:] * values[..., -rank:].clamp(min=0).sqrt()[:, None]
    factor = torch.linalg.cholesky(of_first + of_second)
    parts = []
    for n, scatter in ((first, of_first), (second, of_second)):
        half = torch.linalg.solve_triangular(factor, scatter, upper=False)
        beta = torch.linalg.solve_triangular(factor, half.mT, upper=False)
        part = root @ beta @ root.mT
        count = torch.full_like(moments.n, n + 1)
        parts.append(moments._replace(n=count, xx=part[:, :d, :d], yy=part[:, d:, d:], xy=part[:, :d, d:]))
    return parts[0], parts[1]


def _scatter(rows: int, width: int, draw: np.random.Generator) -> np.ndarray:
    """The sum of z zᵀ over so many standard normal rows z, (width, width)."""
    if rows < width:
        drawn = draw.standard_normal((rows, width))
        return drawn.T @ drawn
    return np.reshape(wishart(rows, np.eye(width)).rvs(random_state=draw), (width, width))


def _scaled(moments: Moments) -> Moments:
    """Moments of states divided by their root mean variance."""
    scale_x, scale_y = (
        (scatter.diagonal(dim1=-2, dim2=-1).mean(-1) / moments.n).sqrt()[:, None, None]
        for scatter in (moments.xx, moments.yy)
    )
    return moments._replace(
        xx=moments.xx / scale_x.square(), yy=moments.yy / scale_y.square(), xy=moments.xy / (scale_x * scale_y)
    )


def _identity(moments: Moments) -> Tensor:
    return torch.eye(moments.xx.shape[-1], dtype=moments.xx.dtype, device=moments.xx.device).expand_as(moments.xx)


def _procrustes(moments: Moments) -> Tensor:
    return procrustes_rotation(moments)[0]


def _linear(moments: Moments) -> Tensor:
    """Least squares, the smallest singular values raised."""
    u, s, vh = determined_svd(least_squares(moments, RIDGE))
    return u * s.clamp(min=SMALLEST_SINGULAR_VALUE * s[:, :1])[:, None] @ vh


def _covariance(moments: Moments) -> Tensor:
    """Find the map with the least error both ways among those that turn X's covariance into Y's.

    M = Σ_x^(−1/2) R Σ_y^(1/2), R orthogonal. The cross terms of both errors, each relative to its total variance (d on
    scaled states), are linear in R: R = U Vᵀ of the SVD of Σ_x^(−1/2) Σ_xy Σ_y^(1/2) + Σ_x^(1/2) Σ_xy Σ_y^(−1/2).
    """
    (root_x, inverse_x), (root_y, inverse_y) = (_roots(scatter / moments.n) for scatter in (moments.xx, moments.yy))
    cross = moments.xy / moments.n
    u, _, vh = determined_svd(inverse_x @ cross @ root_y + root_x @ cross @ inverse_y)
    return inverse_x @ u @ vh @ root_y


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ^(1/2) and Σ^(−1/2), small variances raised."""
    values, vectors = torch.linalg.eigh(covariance)
    root = values.clamp(min=SMALLEST_VARIANCE * values.mean(-1, keepdim=True)).sqrt()[:, None]
    return vectors * root @ vectors.mT, vectors / root @ vectors.mT


_MAPS: dict[Start, Callable[[Moments], Tensor]] = {
    "identity": _identity,
    "procrustes": _procrustes,
    "linear": _linear,
    "covariance": _covariance,
}
START_NAMES: tuple[Start, ...] = tuple(_MAPS)


def _error(weight: Tensor, moments: Moments, both_ways: bool) -> Tensor:
    """The criterion of `invertible_start`, (S,)."""
    error = _fvu(weight, moments.xx, moments.yy, moments.xy)
    if both_ways:
        error = error + _fvu(batch_inverse(weight), moments.yy, moments.xx, moments.xy.mT)
    return error


def _fvu(weight: Tensor, xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    """FVU of x ↦ x W from moments, (S,)."""
    total = yy.diagonal(dim1=-2, dim2=-1).sum(-1)
    return 1 + ((weight * (xx @ weight)).sum((1, 2)) - 2 * (weight * xy).sum((1, 2))) / total
