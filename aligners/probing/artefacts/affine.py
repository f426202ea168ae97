"""Affine maps as a matrix and an offset, in float64: y ↦ y W + b."""

from typing import Any

import torch
from torch import Tensor

from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.maps.linear import Affine, Identity, Linear

Parts = tuple[Tensor, Tensor]  # W (d_x, d_y) and b (d_y,)


def affine_parts(aligner: Aligner) -> Parts | None:
    """W and b of the first map of a bank; None if it is not affine."""
    if isinstance(aligner, Identity):
        return torch.eye(aligner.d_x, dtype=torch.float64), torch.zeros(aligner.d_x, dtype=torch.float64)
    if isinstance(aligner, Affine):
        weight, mean_x, mean_y = (part[0].double() for part in (aligner.weight, aligner.mean_x, aligner.mean_y))
        return weight, (mean_y - mean_x @ weight)[0]
    if isinstance(aligner, AffineLayer) and not aligner.norm:
        origin = torch.zeros(1, 1, aligner.d_x, dtype=torch.float64)
        scaling = aligner.scaling
        weight = (aligner.affine.weight.double() * scaling.scale_y.double() / scaling.scale_x.double())[0]
        return weight, _at(aligner, origin)
    return None


def _at(aligner: Aligner, point: Tensor) -> Tensor:
    """g(point), (d_y,), in float64."""
    exact: Any = type(aligner)(1, aligner.d_x, aligner.d_y, **aligner.options()).double()
    exact.load_state_dict(aligner.state_dict())
    return exact(point)[0, 0]


def linearised(aligner: Aligner) -> Parts:
    """W and b of an affine map; of any other its Jacobian at the mean of the fitting rows, with what meets it there."""
    parts = affine_parts(aligner)
    if parts is not None:
        return parts
    mean = _mean(aligner)
    with torch.enable_grad():
        jacobian = torch.autograd.functional.jacobian(lambda x: aligner(x[None, None])[0, 0], mean)
    weight = jacobian.T.double()
    return weight, aligner(mean[None, None])[0, 0].double() - mean.double() @ weight


def pseudo_inverse(aligner: Aligner, parts: Parts) -> Parts:
    """W and b of the way back through an affine map, the nearest to the mean of its fitting rows."""
    weight, mean = torch.linalg.pinv(parts[0]), _mean(aligner).double()
    return weight, mean - (mean @ parts[0] + parts[1]) @ weight


def _mean(aligner: Aligner) -> Tensor:
    """The mean of the fitting rows of X, (d_x,); 0 where a map does not know it."""
    mean: Any = getattr(getattr(aligner, "scaling", aligner), "mean_x", None)
    return torch.zeros(aligner.d_x) if mean is None else mean[0, 0]


def bank_of(parts: Parts) -> Linear:
    """W and b as a bank of one map, its inverse among the tensors."""
    weight, offset = parts
    bank = Linear(1, *weight.shape)
    bank.weight.copy_(weight)
    bank.mean_y.copy_(offset)
    singular = torch.linalg.svdvals(weight)
    bank.condition.copy_(singular[0] / singular[-1])
    bank.weight_back.copy_(torch.linalg.pinv(weight, rtol=bank.inverse_tolerance))
    return bank
