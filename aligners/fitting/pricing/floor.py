"""The least FVU that a map can have whose image has Y's covariance, as that of a map that is also good backwards."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["floor", "gelbrich"]


def gelbrich(x: Tensor, y: Tensor) -> Tensor:
    """Gelbrich's lower bound of the squared Wasserstein distance, from means and covariances alone.

    ‖μ_x − μ_y‖² + tr(Σ_x + Σ_y − 2 (Σ_x^(1/2) Σ_y Σ_x^(1/2))^(1/2)), which Gaussians attain.

    Reference: Gelbrich 1990, "On a formula for the L2 Wasserstein metric between measures on Euclidean and Hilbert
    spaces", Math. Nachr. 147, theorem 2.1.

    Args:
        x: (S, N, d) sample of one law.
        y: (S, M, d) sample of the other.

    Returns:
        (S,) in float64.
    """
    (mean_x, cov_x), (mean_y, cov_y) = (_law(rows) for rows in (x, y))
    root = _root(cov_x)
    cross = _root(root @ cov_y @ root)
    trace = (cov_x + cov_y - 2 * cross).diagonal(dim1=-2, dim2=-1).sum(-1)
    return (mean_x - mean_y).square().sum(-1) + trace.clamp(min=0)


def floor(predicted: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    """FVU of a prediction plus the distance from its law to that of Y, as a share of Y's variance: (S,).

    For a map h and p = E[Y | X], E‖h − Y‖² = E‖h − p‖² + E‖p − Y‖², and the first term is at least the squared
    Wasserstein distance between the laws of h and p. Where h has the covariance of Y, Gelbrich's bound limits it from
    below. `predicted` stands for p: a better prediction can only lower the floor.

    Reference: Freirich, Michaeli and Meir 2021, "A theory of the distortion-perception tradeoff in Wasserstein
    space", arXiv 2107.02555, theorem 1.

    Args:
        predicted: (S, N, d) what a free network says of the held-out rows.
        y: (S, N, d) what they are.
        mean: (S, d) mean of Y on the fitting rows.
    """
    y, predicted = y.double(), predicted.double()
    total = (y - mean[:, None]).square().sum(-1).mean(-1)
    return ((predicted - y).square().sum(-1).mean(-1) + gelbrich(predicted, y)) / total


def _law(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.double()
    mean = rows.mean(1)
    centred = rows - mean[:, None]
    return mean, centred.mT @ centred / rows.shape[1]


def _root(matrix: Tensor) -> Tensor:
    """The square root of a symmetric positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT
