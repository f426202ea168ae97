"""What the directions of a shared space are: which all models share, and which only some."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aligners.fitting.universe.joint import JointMoments

__all__ = ["Directions", "directions"]


class Directions(NamedTuple):
    """Principal axes of the mean of all models in the shared space, the largest first.

    Attributes:
        variance: of the mean along each axis, (S, d): the eigenvalues of its covariance.
        explained: share of the variance of the other models' mean along each axis that a model explains, the squared
            correlation, (k, S, d); 0 where nothing varies.
    """

    variance: Tensor
    explained: Tensor


def directions(joint: JointMoments) -> Directions:
    """Find the axes, and how far each model follows the others along them.

    Args:
        joint: of the embedded states u_i(x_i) of all models.
    """
    covariance, models = joint.scatter / joint.n, len(joint.mean)
    variance, axes = torch.linalg.eigh(covariance.sum((0, 1)) / models**2)
    along = torch.einsum("sab,ijsac,scb->ijsb", axes, covariance, axes).flip(-1)  # (k, k, S, d)
    own = along.diagonal(dim1=0, dim2=1).movedim(-1, 0)
    shared = along.sum(1) - own
    others = along.sum((0, 1)) - 2 * along.sum(1) + own
    both = own * others
    varies = both > 1e-20 * both.amax(-1, keepdim=True)
    return Directions(variance.flip(-1), torch.where(varies, shared.square() / torch.where(varies, both, 1.0), 0.0))
