"""HSIC, CKA of kernels and RSA as their definitions read, one layer pair at a time, in NumPy and SciPy float64."""

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist, squareform
from scipy.stats import pearsonr

Array = NDArray[np.float64]


def hsic_1(k: Array, l: Array) -> float:  # noqa: E741
    """Song et al. 2012, eq. 5, with the matrices as they are written there."""
    n = len(k)
    k, l, one = k - np.diag(np.diag(k)), l - np.diag(np.diag(l)), np.ones(n)  # noqa: E741
    first = np.trace(k @ l)
    second = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    third = 2 / (n - 2) * (one @ k @ l @ one)
    return float((first + second - third) / (n * (n - 3)))


def minibatch_cka(x: Array, y: Array, batch: int) -> float:
    """Nguyen et al. 2021, eq. 2 to 4, linear kernels of centred batches, which changes nothing but the rounding."""
    sums = np.zeros(3)
    for start in range(0, len(x), batch):
        a, b = (rows[start : start + batch] - rows[start : start + batch].mean(0) for rows in (x, y))
        k, l = a @ a.T, b @ b.T  # noqa: E741
        sums += hsic_1(k, l), hsic_1(k, k), hsic_1(l, l)
    return float(sums[0] / np.sqrt(sums[1] * sums[2]))


def mean_minibatch_cka(x: Array, y: Array, batch: int) -> float:
    """The mean of the CKAs of batches."""
    parts = [(x[start : start + batch], y[start : start + batch]) for start in range(0, len(x), batch)]
    return float(np.mean([minibatch_cka(*part, batch) for part in parts]))


def biased_cka(k: Array, l: Array) -> float:  # noqa: E741
    """Kornblith et al. 2019, eq. 2 to 4."""
    h = np.eye(len(k)) - 1 / len(k)
    hsic = [np.trace(a @ h @ b @ h) for a, b in ((k, l), (k, k), (l, l))]
    return float(hsic[0] / np.sqrt(hsic[1] * hsic[2]))


def rbf_cka(x: Array, y: Array, width: float, unbiased: bool = False) -> float:
    """Kernels from all distances and their median."""
    grams = []
    for rows in (x, y):
        distances = pdist(rows)
        sigma = width * np.median(distances)
        grams.append(np.exp(-(squareform(distances) ** 2) / (2 * sigma**2)))
    k, l = grams  # noqa: E741
    return float(hsic_1(k, l) / np.sqrt(hsic_1(k, k) * hsic_1(l, l))) if unbiased else biased_cka(k, l)


def rsa(x: Array, y: Array, kernel: str) -> float:
    """Correlation of the two condensed similarity matrices. Cosines as 1 − u²/2, u the distance of unit vectors."""
    found = []
    for rows in (x, y):
        if kernel == "centred_cosine":
            rows = rows - rows.mean(0)
        if kernel == "linear":
            found.append((rows @ rows.T)[np.triu_indices(len(rows), 1)])
        elif kernel.endswith("cosine"):
            found.append(-(pdist(rows / np.linalg.norm(rows, axis=1, keepdims=True)) ** 2))
        else:
            found.append(-pdist(rows))
    return float(pearsonr(*found).statistic)
