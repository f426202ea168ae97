"""Affine maps as a matrix and an offset, in float64: y ↦ y W + b."""

import copy
from typing import Any

import torch
from torch import Tensor

from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.maps.linear import Affine, Identity

Parts = tuple[Tensor, Tensor]  # W (d_x, d_y) and b (d_y,)


def affine_parts(aligner: Aligner) -> Parts | None:
    """W and b of the first map of a bank; None if it is not affine."""
    if not isinstance(aligner, (Identity, Affine, AffineLayer)) or getattr(aligner, "norm", False):
        return None
    exact = copy.deepcopy(aligner).double()
    image = exact(torch.eye(aligner.d_x + 1, aligner.d_x, dtype=torch.float64).repeat(exact.sites, 1, 1))[0].detach()
    return image[:-1] - image[-1], image[-1]


def linearised(aligner: Aligner) -> Parts:
    """W and b of an affine map; of any other its Jacobian at the mean of the fitting rows, with what meets it there."""
    parts = affine_parts(aligner)
    if parts is not None:
        return parts
    mean = _mean(aligner)
    with torch.enable_grad():
        weight = torch.autograd.functional.jacobian(lambda x: aligner(x[None, None])[0, 0], mean).T.double()
    return weight, aligner(mean[None, None])[0, 0].double() - mean.double() @ weight


def pseudo_inverse(aligner: Aligner, parts: Parts) -> Parts:
    """W and b of the way back through an affine map, the nearest to the mean of its fitting rows."""
    weight, mean = torch.linalg.pinv(parts[0]), _mean(aligner).double()
    return weight, mean - (mean @ parts[0] + parts[1]) @ weight


def _mean(aligner: Aligner) -> Tensor:
    """The mean of the fitting rows of X, (d_x,); 0 where a map does not know it."""
    mean: Any = getattr(getattr(aligner, "scaling", aligner), "mean_x", None)
    return torch.zeros(aligner.d_x) if mean is None else mean[0, 0]
