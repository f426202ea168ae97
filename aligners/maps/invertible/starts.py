"""Starting points of invertible networks: linear bijections from moments, and the choice of the best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from aligners.maps.linear import determined_svd, least_squares, procrustes_rotation
from aligners.maps.solving import batch_inverse
from similarity.algebra.moments import Moments

__all__ = ["START_NAMES", "Start", "invertible_start"]

Start = Literal["identity", "procrustes", "linear", "covariance", "best"]

RIDGE = 1e-4
# Least squares shrinks what it cannot predict, in the limit to zero, and the start needs a usable inverse.
SMALLEST_SINGULAR_VALUE = 0.03
# States after a LayerNorm do not vary in one direction: without a floor their covariance has no inverse square root.
SMALLEST_VARIANCE = 1e-4


def invertible_start(moments: Moments, start: Start, both_ways: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Find each site's starting map, between centred states divided by their model's root mean variance.

    `best` takes, site by site, the candidate with the least expected error on other rows: its FVU, plus that of its
    inverse under `both_ways`. Each is the FVU on the fitting rows, from moments, times (n / (n − p))², the correction
    of generalised cross-validation (Golub, Heath and Wahba 1979) for p fitted numbers per output.

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
        chosen = torch.stack(
            [
                _expected(moments, there, back, name, both_ways)
                for name, there, back in zip(names, maps, inverses, strict=True)
            ]
        ).argmin(0)
    sites = torch.arange(maps.shape[1], device=maps.device)
    known = torch.tensor([START_NAMES.index(name) for name in names], device=maps.device)
    return maps[chosen, sites], inverses[chosen, sites], known[chosen]


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
_FITTED = {"identity": 0.0, "procrustes": 0.5, "linear": 1.0, "covariance": 1.0}  # numbers per output, as shares of d


def _expected(moments: Moments, there: Tensor, back: Tensor, name: Start, both_ways: bool) -> Tensor:
    """The criterion of `invertible_start`, (S,); infinite where there are no more rows than fitted numbers."""
    left = moments.n - 1 - _FITTED[name] * moments.xx.shape[-1]
    error = _fvu(there, moments.xx, moments.yy, moments.xy)
    if both_ways:
        error = error + _fvu(back, moments.yy, moments.xx, moments.xy.mT)
    return torch.where(left > 0, error * (moments.n / left).square(), torch.inf)


def _fvu(weight: Tensor, xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    """FVU of x ↦ x W from moments, (S,)."""
    total = yy.diagonal(dim1=-2, dim2=-1).sum(-1)
    return 1 + ((weight * (xx @ weight)).sum((1, 2)) - 2 * (weight * xy).sum((1, 2))) / total
