"""Measures of neighbourhoods as their papers and code have them: whole matrices of cosines, one layer pair, NumPy."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def cosines(rows: Array) -> Array:
    """All cosines, (N, N), from the distances of the rows of length 1, which few digits cancel in."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    squares = np.array([((unit - row) ** 2).sum(1) for row in unit])
    return 1 - squares / 2


def weights(rows: Array, k: int, groups: Array | None = None) -> Array:
    """W (N, N): 1 for the k nearest of each row; those that are as near as the last share the places left."""
    n = len(rows)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    spread = ((unit - unit.mean(0)) ** 2).sum(1).mean()
    found = np.zeros((n, n))
    for i in range(n):
        far = ((unit - unit[i]) ** 2).sum(1) / 2
        left_out = np.arange(n) == i if groups is None else groups == groups[i]
        far[left_out] = np.inf
        last = np.sort(far)[k - 1]
        sure = far < last - 1e-9 * spread
        tied = (abs(far - last) <= 1e-9 * spread) & ~left_out
        found[i, sure] = 1
        found[i, tied] = (k - sure.sum()) / tied.sum()
    return found


def mutual_knn(x: Array, y: Array, k: int, groups: Array | None = None) -> float:
    """Huh et al. 2024, Appendix A."""
    return float((np.minimum(weights(x, k, groups), weights(y, k, groups)).sum(1) / k).mean())


def jaccard_knn(x: Array, y: Array, k: int, groups: Array | None = None) -> float:
    """The sizes of the intersection and of the union of sets, of each row."""
    a, b = weights(x, k, groups), weights(y, k, groups)
    return float((np.minimum(a, b).sum(1) / np.maximum(a, b).sum(1)).mean())


def cknna(x: Array, y: Array, k: int, groups: Array | None = None) -> float:
    """Huh et al. 2024, Appendix A: masked matrices of cosines in the unbiased HSIC, without what keeps it off zero."""
    a, b = weights(x, k, groups), weights(y, k, groups)
    of_x, of_y = cosines(x), cosines(y)
    both = np.minimum(a, b)
    between = _hsic(both * of_x, both * of_y)
    return float(between / np.sqrt(_hsic(a * of_x, a * of_x) * _hsic(b * of_y, b * of_y)))


def _hsic(k: Array, l: Array) -> float:  # noqa: E741
    """Song et al. 2012, eq. 5, of matrices that need not be symmetric, as that code has it."""
    m = len(k)
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    total = (k * l.T).sum() + k.sum() * l.sum() / ((m - 1) * (m - 2)) - 2 * (k @ l).sum() / (m - 2)
    return float(total / (m * (m - 3)))


def sets_of_code(rows: Array, k: int) -> list[set[int]]:
    """The neighbours as platonic-rep's code finds them: the products of rows of length 1, sorted."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    products = unit @ unit.T
    np.fill_diagonal(products, -1e8)
    return [set(order[:k]) for order in np.argsort(-products, axis=1)]
