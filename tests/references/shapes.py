"""Shape, matching, predictivity and Spearman's RSA as papers and netrep have them: one layer pair, NumPy, SciPy."""

from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr

Array = NDArray[np.float64]


def nbs(x: Array, y: Array) -> float:
    """The fidelity of the Gram matrices: tr((K^½ L K^½)^½), the sum of the singular values of K^½ L^½."""
    k, l = (rows @ rows.T for rows in _centred(x, y))  # noqa: E741
    fidelity = np.linalg.svd(_root(k) @ _root(l), compute_uv=False).sum()
    return float(fidelity / np.sqrt(np.trace(k) * np.trace(l)))


def _root(gram: Array) -> Array:
    values, vectors = np.linalg.eigh(gram)
    values[values < 1e-12 * values[-1]] = 0
    return (vectors * np.sqrt(values)) @ vectors.T


def turned(x: Array, y: Array) -> tuple[Array, Array]:
    """Centred rows of equal widths, filled with zeros, each multiplied by its rotation, as netrep aligns them."""
    x, y = _centred(x, y)
    width = max(x.shape[1], y.shape[1])
    x, y = (np.pad(rows, ((0, 0), (0, width - rows.shape[1]))) for rows in (x, y))
    u, _, vt = np.linalg.svd(x.T @ y)
    return x @ u, y @ vt.T


def angular_shape_distance(x: Array, y: Array) -> float:
    x, y = turned(x, y)
    return float(np.arccos(np.clip((x * y).sum() / (np.linalg.norm(x) * np.linalg.norm(y)), -1, 1)))


def angular_shape(x: Array, y: Array) -> float:
    return 1 - angular_shape_distance(x, y) / (np.pi / 2)


def procrustes_distance(x: Array, y: Array, scaled: bool = True) -> float:
    if scaled:
        x, y = (rows / np.linalg.norm(rows) for rows in _centred(x, y))
    return float(np.linalg.norm(np.subtract(*turned(x, y))))


def correlations(x: Array, y: Array) -> Array:
    return np.corrcoef(x.T, y.T)[: x.shape[1], x.shape[1] :]


def hard_matching(x: Array, y: Array) -> float:
    """Every matching is tried."""
    c = correlations(x, y)
    c = c if len(c) <= len(c.T) else c.T
    rows = np.arange(len(c))
    return float(max(c[rows, columns].mean() for columns in permutations(range(len(c.T)), len(c))))


def soft_matching(x: Array, y: Array) -> float:
    """The transport with its constraints written out one by one."""
    c = correlations(x, y)
    d_x, d_y = c.shape
    constraints, sums = [], []
    for i in range(d_x):
        constraints.append([float(a == i) for a in range(d_x) for _ in range(d_y)])
        sums.append(1 / d_x)
    for j in range(d_y):
        constraints.append([float(b == j) for _ in range(d_x) for b in range(d_y)])
        sums.append(1 / d_y)
    return -float(linprog(-c.ravel(), A_eq=constraints, b_eq=sums).fun)


def linear_predictivity(x: Array, y: Array, groups: Array | None = None, folds: int = 5, ridge: float = 0.0) -> float:
    """A regression of least squares in each fold."""
    names = np.unique(groups) if groups is not None else np.arange(len(x))
    place = np.searchsorted(names, groups) if groups is not None else names
    fold = place * folds // len(names)
    residual = total = 0.0
    for number in range(folds):
        new, old = fold == number, fold != number
        mean_x, mean_y = x[old].mean(0), y[old].mean(0)
        a, b = y[old] - mean_y, x[old] - mean_x
        penalty = np.sqrt(ridge * (a**2).sum() / a.shape[1]) * np.eye(a.shape[1])
        a, b = np.concatenate([a, penalty]), np.concatenate([b, np.zeros((a.shape[1], b.shape[1]))])
        weight = np.linalg.lstsq(a, b, rcond=1e-5)[0]
        residual += ((x[new] - mean_x - (y[new] - mean_y) @ weight) ** 2).sum()
        total += ((x[new] - mean_x) ** 2).sum()
    return float(1 - residual / total)


def rsa_spearman(x: Array, y: Array, kernel: str = "cosine") -> float:
    """SciPy's, of distances that are rounded, so that equal ones are."""
    found = []
    for rows in (x, y):
        if kernel == "centred_cosine":
            rows = rows - rows.mean(0)
        if kernel != "euclidean":
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows - rows.mean(0)
        squares = pdist(rows) ** 2
        step = 4 * (rows**2).sum(1).max() / (2**30 - 1)
        found.append(np.round(squares / step))
    return float(spearmanr(*found).statistic)


def rsa_centred(x: Array, y: Array) -> float:
    found = []
    for rows in _centred(x, y):
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        found.append((unit @ unit.T)[np.triu_indices(len(rows), 1)])
    return float(np.corrcoef(*found)[0, 1])


def _centred(x: Array, y: Array) -> tuple[Array, Array]:
    return x - x.mean(0), y - y.mean(0)
