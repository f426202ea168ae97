"""Matchings of single neurons as scores: one to one, and as an optimal transport between layers of any widths."""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aligners.similarity.algebra.grid import of_moments
from aligners.similarity.algebra.moments import (
    GridMoments,
    by_tile,
    check_moments,
    squares,
)

# copies of neurons up to which a transport is solved as a matching; above it, as a linear programme
MOST_COPIES = 8192

Matrix = NDArray[np.float64]  # correlations of d_x neurons of X with d_y of Y
Solver = Callable[[Matrix], float]


@of_moments
def hard_matching(moments: GridMoments) -> Tensor:
    """Mean correlation of the neurons of X and Y under the best one-to-one matching, for all layer pairs.

    Σ ρ(x_i, y_π(i)) / min(d_x, d_y), largest over all π that use no neuron twice (Li et al. 2016, "Convergent
    learning"); of unequal widths some neurons of the wider layer have no partner. In [−1, 1], and above 0 where
    any permutation is; symmetric. Invariant to permuting neurons, and to translating and scaling each by a positive
    factor; not to negating or rotating. Biased upwards where rows are few. Feature side.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: fewer than 3 rows, non-finite rows, or constant features.
    """
    return _matched(moments, "Hard matching", _assigned)


@of_moments
def soft_matching(moments: GridMoments) -> Tensor:
    """Correlation of the neurons of X and Y under the best transport between them, for all layer pairs.

    Σ P_ij ρ(x_i, y_j), largest over P ≥ 0 whose rows add up to 1/d_x and columns to 1/d_y: every neuron counts,
    whatever the widths (Khosla and Williams 2024, "Soft matching distance", of neurons of length 1). At equal widths it
    is `hard_matching`. Symmetric, and invariant to the same.

    Route: one matching of lcm(d_x, d_y) copies of neurons, up to 8,192 of them; above it a linear programme of
    d_x · d_y variables. Both are exact, and run on the CPU.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `hard_matching`.
    """
    return _matched(moments, "Soft matching", _transported)


def _matched(moments: GridMoments, measure: str, solve: Solver) -> Tensor:
    """Solve a matching of the correlations of all layer pairs, (L_x, L_y)."""
    check_moments(moments, measure, 3, x="features", y="features")
    length_x = squares(moments.xx).sqrt()
    length_y = squares(moments.yy).sqrt()

    def of_tile(i: int, some: slice, xy: Tensor) -> Tensor:
        lengths = length_x[i][:, None] * length_y[some, None]
        correlations = (xy / lengths).cpu().numpy()
        scores = [solve(each) for each in correlations]
        return torch.tensor(scores, dtype=torch.float64, device=xy.device)

    return by_tile(moments, of_tile)


def _assigned(correlations: Matrix) -> float:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(correlations, maximize=True)
    return float(correlations[rows, columns].mean())


def _transported(correlations: Matrix) -> float:
    d_x, d_y = correlations.shape
    copies = math.lcm(d_x, d_y)
    if copies > MOST_COPIES:
        return _programme(correlations)
    of_x = correlations.repeat(copies // d_x, 0)
    return _assigned(of_x.repeat(copies // d_y, 1))


def _programme(correlations: Matrix) -> float:
    """The transport as a linear programme."""
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, kron, vstack

    d_x, d_y = correlations.shape
    ones_x = np.ones((1, d_x))
    ones_y = np.ones((1, d_y))
    rows = kron(eye_array(d_x), ones_y)
    columns = kron(ones_x, eye_array(d_y))
    sums = np.concatenate([np.full(d_x, 1 / d_x), np.full(d_y, 1 / d_y)])
    constraints = vstack([rows, columns]).tocsr()
    solved = linprog(-correlations.ravel(), A_eq=constraints, b_eq=sums)
    return -float(solved.fun)
