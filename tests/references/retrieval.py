"""Retrieval as its definition reads: every cosine in float64, every place counted, every tie written out."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def retrieval_scores(mapped: Array, y: Array, *, centred: bool = False) -> Array:
    """Top 1, top 10 and reciprocal place of each mapped row, (3, n), its partner being the row of y of its number."""
    candidates = [y[i] for i in range(len(y)) if not any(np.array_equal(y[i], y[j]) for j in range(i))]
    shift = y.mean(0) if centred else 0 * y[0]
    scores = []
    for row, partner in zip(mapped, y, strict=False):
        near = np.array([_cosine(row - shift, candidate - shift) for candidate in candidates])
        own = near[next(i for i, candidate in enumerate(candidates) if np.array_equal(candidate, partner))]
        above, tied = int((near > own + 1e-6).sum()), int((abs(near - own) <= 1e-6).sum())
        places = np.arange(above + 1, above + tied + 1)
        scores.append([(places <= 1).mean(), (places <= 10).mean(), (1 / places).mean()])
    return np.array(scores).T


def _cosine(a: Array, b: Array) -> float:
    length = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / length) if length else 0.0
