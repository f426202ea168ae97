"""Attention measures as Wu et al. 2020, A.4, define them: loops over texts, words and heads, in NumPy and SciPy."""

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.stats import pearsonr

Array = NDArray[np.float64]


def fold(weights: Array, words: list[list[int]]) -> tuple[Array, Array]:
    """One head on one text, (T, T), to (W, W) and the share that stayed on words (W,); `words`: tokens of each word."""
    to_words = np.array([[sum(row[token] for token in word) for word in words] for row in weights])
    folded = np.array([np.mean([to_words[token] for token in word], axis=0) for word in words])
    mass = folded.sum(1)
    return folded / mass[:, None], mass


def similarities(a: list[Array], b: list[Array]) -> tuple[float, float, float]:
    """1 - mean Frobenius distance, mean r, 1 - mean JS of two heads; one (W, W) for each text."""
    distances, correlations, divergences = [], [], []
    for head_a, head_b in zip(a, b, strict=True):
        if len(head_a) < 2:
            continue
        distances.append(np.linalg.norm(head_a - head_b))
        for row_a, row_b in zip(head_a, head_b, strict=True):
            if np.ptp(row_a) > 0 and np.ptp(row_b) > 0:
                correlations.append(pearsonr(row_a, row_b).statistic)
            divergences.append(jensenshannon(row_a, row_b) ** 2)
    return 1 - np.mean(distances), np.mean(correlations), 1 - np.mean(divergences)


def best_heads(x: list[list[Array]], y: list[list[Array]]) -> tuple[float, ...]:
    """Layer by layer: for each head of X (its texts) the best head of Y, averaged over the heads of X."""
    found = np.array([[similarities(head_x, head_y) for head_y in y] for head_x in x])
    return tuple(found.max(1).mean(0))
