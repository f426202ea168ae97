"""Maps and their errors as their definitions read, one site at a time, in NumPy and SciPy float64."""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import orthogonal_procrustes
from scipy.optimize import linprog
from tests.references.measures import canonical_variables

Array = NDArray[np.float64]


def ridge_regression(x: Array, y: Array, ridge: float, common: bool = False) -> tuple[Array, Array]:
    """W and b of argmin ‖XW + b − Y‖² + ridge · Σ_i ‖X_i‖² ‖W_i‖², features X_i centred, as one least-squares system.

    The penalty is √ridge · ‖X_i‖ under the centred rows, which is another route than the normal equations; `common`:
    with the mean of ‖X_i‖² in the place of each.
    """
    centred, target = x - x.mean(0), y - y.mean(0)
    sizes = np.linalg.norm(centred, axis=0)
    if common:
        sizes = np.full_like(sizes, np.sqrt(np.square(sizes).mean()))
    rows = np.vstack([centred, np.sqrt(ridge) * np.diag(sizes)])
    solution = np.linalg.lstsq(rows, np.vstack([target, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
    return solution, y.mean(0) - x.mean(0) @ solution


def procrustes(x: Array, y: Array) -> tuple[Array, float]:
    """R and the best factor of argmin ‖s(X − X̄)R − (Y − Ȳ)‖ with RᵀR = I."""
    centred, target = x - x.mean(0), y - y.mean(0)
    rotation, nuclear = orthogonal_procrustes(centred, target)
    return rotation, nuclear / (centred**2).sum()


def best_matching(x: Array, y: Array, signed: bool) -> Array:
    """The matching of columns with the largest sum of (absolute) correlations, (d_x, d_y), by trying all of them."""
    if x.shape[1] > y.shape[1]:
        return best_matching(y, x, signed).T
    correlations = np.corrcoef(x, y, rowvar=False)[: x.shape[1], x.shape[1] :]
    values = np.abs(correlations) if signed else correlations
    rows = np.arange(x.shape[1])
    best = max(itertools.permutations(range(y.shape[1]), len(rows)), key=lambda columns: values[rows, columns].sum())
    weight = np.zeros_like(correlations)
    weight[rows, best] = np.sign(correlations[rows, best]) if signed else 1
    return weight


class Canonical(NamedTuple):
    """Canonical variates h, k (n, r) of unit length, best first, and their correlations rho (r,)."""

    h: Array
    k: Array
    rho: Array


def canonical(x: Array, y: Array) -> Canonical:
    """CCA of the rows themselves."""
    rho, a, b = canonical_variables(x, y)
    return Canonical((x - x.mean(0)) @ a, (y - y.mean(0)) @ b, rho)


def canonical_map(x: Array, y: Array, found: Canonical, shrink: bool) -> Array:
    """W (d_x, d_y) that takes the rows of X onto h, h onto k (or its least-squares estimate), and k onto Y."""
    into = np.linalg.pinv(x - x.mean(0), rcond=1e-7) @ found.h
    return into * (found.rho if shrink else 1) @ (found.k.T @ (y - y.mean(0)))


def components(x: Array, share: float) -> Array:
    """The fewest principal axes (d, k) that hold `share` of the variance."""
    _, s, vh = np.linalg.svd(x - x.mean(0), full_matrices=False)
    held = np.cumsum(s**2) / (s**2).sum()
    return vh[: 1 + int((held < share).sum())].T


def carrying(x: Array, found: Canonical, share: float) -> Canonical:
    """The fewest directions that carry `share` of α_i = Σ_j |⟨h_i, x_j⟩| (Ren et al. eq. 8)."""
    alpha = np.abs(found.h.T @ (x - x.mean(0))).sum(1)
    order = np.argsort(-alpha)
    kept = np.sort(order[: 1 + int((np.cumsum(alpha[order]) / alpha.sum() < share).sum())])
    return Canonical(found.h[:, kept], found.k[:, kept], found.rho[kept])


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


def reduced_rank(x: Array, y: Array, rank: int, ridge: float) -> tuple[Array, Array]:
    """W of least penalised error among those of a rank, and the shares of the fit of every rank (Izenman 1975).

    The penalty of `ridge_regression` is written as rows under X, so that the fitted values are those of plain least
    squares, of which the leading singular directions are kept.
    """
    weight, _ = ridge_regression(x, y, ridge)
    centred = x - x.mean(0)
    rows = np.vstack([centred, np.sqrt(ridge) * np.diag(np.linalg.norm(centred, axis=0))])
    _, sizes, directions = np.linalg.svd(rows @ weight, full_matrices=False)
    kept = directions[:rank].T @ directions[:rank]
    return weight @ kept, np.cumsum(sizes**2) / np.sum(sizes**2)


def soft_matching(x: Array, y: Array) -> tuple[Array, float]:
    """P of the transport polytope with the largest sum of P_ij corr(x_i, y_j), and that sum, as a dense programme."""
    n, m = x.shape[1], y.shape[1]
    gains = np.corrcoef(x, y, rowvar=False)[:n, n:]
    sums = []
    for axis, size in ((0, n), (1, m)):
        for place in range(size):
            one = np.zeros((n, m))
            one[(slice(None),) * axis + (place,)] = 1
            sums.append(one.ravel())
    totals = np.array([1 / n] * n + [1 / m] * m)
    found = linprog(-gains.ravel(), A_eq=np.array(sums), b_eq=totals, method="highs-ipm")
    return found.x.reshape(n, m), -found.fun


def nearest_neighbours(x: Array, y: Array, new: Array, k: int, weighted: bool) -> Array:
    """The mean of y over the k rows of x with the largest cosines to each new row, about the mean of x."""
    mean = x.mean(0)
    images = []
    for row in new - mean:
        cosines = (x - mean) @ row / np.linalg.norm(x - mean, axis=1) / np.linalg.norm(row)
        nearest = np.argsort(-cosines)[:k]
        weights = np.maximum(cosines[nearest], 0) if weighted else np.ones(k)
        images.append(np.average(y[nearest], axis=0, weights=weights))
    return np.array(images)


def kernel_ridge(x: Array, y: Array, new: Array, landmarks: Array, sigma: float, penalty: float) -> Array:
    """argmin Σ ‖f(x_i) + b − y_i‖² + penalty ‖f‖² over f of the landmarks' kernels, at new rows.

    f = Σ_j k(·, l_j) α_j has ‖f‖² = tr(αᵀ K_mm α): the normal equations of α, not of whitened features.
    """

    def kernel(a: Array, b: Array) -> Array:
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * sigma**2))

    features, target = kernel(x, landmarks), y - y.mean(0)
    centred = features - features.mean(0)
    system = centred.T @ centred + penalty * kernel(landmarks, landmarks)
    alpha = np.linalg.solve(system, centred.T @ target)
    return (kernel(new, landmarks) - features.mean(0)) @ alpha + y.mean(0)
