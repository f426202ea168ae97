"""Maps and their errors as their definitions read, one site at a time, in NumPy and SciPy float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import orthogonal_procrustes

__all__ = ["cosine", "fvu", "mse", "procrustes", "ridge_regression"]

Array = NDArray[np.float64]


def ridge_regression(x: Array, y: Array, ridge: float) -> tuple[Array, Array]:
    """W and b of argmin ‖XW + b − Y‖² + λ‖W‖², λ = ridge · tr(XᵀX)/d of centred X, as one least-squares system.

    The penalty is √λ · I under the centred rows, which is another route than the normal equations.
    """
    centred, target = x - x.mean(0), y - y.mean(0)
    weight = ridge * (centred**2).sum() / x.shape[1]
    rows = np.vstack([centred, np.sqrt(weight) * np.eye(x.shape[1])])
    solution = np.linalg.lstsq(rows, np.vstack([target, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
    return solution, y.mean(0) - x.mean(0) @ solution


def procrustes(x: Array, y: Array) -> tuple[Array, float]:
    """R and the best factor of argmin ‖s(X − X̄)R − (Y − Ȳ)‖ with RᵀR = I."""
    centred, target = x - x.mean(0), y - y.mean(0)
    rotation, nuclear = orthogonal_procrustes(centred, target)
    return rotation, nuclear / (centred**2).sum()


def mse(mapped: Array, y: Array) -> float:
    """Mean over rows and dimensions of the squared residual."""
    return float(((mapped - y) ** 2).mean())


def fvu(mapped: Array, y: Array, mean: Array) -> float:
    """‖g(X) − Y‖² / ‖Y − mean‖²."""
    return float(((mapped - y) ** 2).sum() / ((y - mean) ** 2).sum())


def cosine(mapped: Array, y: Array) -> float:
    """Mean cosine of a mapped row with its target."""
    lengths = np.linalg.norm(mapped, axis=1) * np.linalg.norm(y, axis=1)
    return float(((mapped * y).sum(1) / lengths).mean())
