"""Neurons that are matched in parts: optimal transport between the neurons of two models."""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from aligners.maps.linear import Affine
from aligners.maps.solvers import deviations
from aligners.similarity.algebra.moments import Moments

MOST_COPIES = 4096  # with more, the linear programme is the faster of the two


class SoftMatching(Affine):
    """y_j = ȳ_j + Σ_i d_y P_ij (x_i − x̄_i): every neuron of Y gets a mean of the neurons of X matched to it.

    P ≥ 0 is the soft matching of Khosla and Williams 2024 (2311.09466), here by correlation: of all P whose rows sum to
    1/d_x and whose columns to 1/d_y the one with the largest Σ_ij P_ij corr(x_i, y_j). All neurons of both sides are
    matched, however many there are. Like `Permutation`, it scales nothing, and does not depend on the scale or the
    offset of any neuron. The paper defines a distance; that its P is used as a map is ours.

    At equal widths the best P is a permutation, and the map is `Permutation`, bijective. At unequal widths P has at
    most d_x + d_y − 1 entries, and `inverse` takes means of Y's neurons by the same P.

    It is exact. At unequal widths neurons are copied up to the least common multiple of the widths, if that is at
    most 4,096, and the copies assigned one to one: 384 to 768 takes 0.1 s a site on one core, 768 to 1,024 4 s. Else a
    linear programme is solved: 256 by 192 takes 1 s, 312 by 384 7 s, and widths around 1,000 take minutes.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.

    Attributes:
        correlation: (S,) Σ_ij P_ij corr(x_i, y_j), the mean correlation of what is matched.
    """

    figures: ClassVar = {"correlation": ()}
    invertible = True
    rows_needed = 3  # over two rows every correlation is 1 or −1
    correlation: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int) -> None:
        super().__init__(sites, d_x, d_y)
        self.bijective = d_x == d_y

    def fit(self, moments: Moments) -> None:
        """Match neurons by their correlations, in float64, site by site on the CPU.

        Raises:
            ValueError: a neuron is constant over the fitting rows, or not finite.
        """
        x, y = deviations(moments)
        covariances = moments.xy / moments.n
        scales = x[:, :, None] * y[:, None]
        correlations = covariances / scales
        plans = []
        for values in correlations.cpu().numpy():
            of_site = transport_plan(values)
            plans.append(torch.from_numpy(of_site))
        plan = torch.stack(plans).to(correlations)
        gained = plan * correlations
        total = gained.sum((1, 2))
        self.correlation.copy_(total)
        weight = self.d_y * plan
        weight_back = self.d_x * plan.mT
        self.set_map(moments, weight, weight_back)

    def findings(self) -> dict[str, Any]:
        """How well what is matched correlates at each site, on the fitting rows."""
        return {"mean_correlation": self.correlation.tolist()}


def transport_plan(gains: np.ndarray, most_copies: int = MOST_COPIES) -> np.ndarray:
    """The P ≥ 0 with rows that sum to 1/n and columns that sum to 1/m with the largest Σ_ij P_ij gains_ij.

    Args:
        gains: (n, m).
        most_copies: copies of neurons up to which the problem is solved as an assignment.

    Returns:
        (n, m), float64.
    """
    n, m = gains.shape
    copies = math.lcm(n, m)
    if copies <= max(n, m, most_copies):
        return _by_assignment(gains, copies)
    return _by_programme(gains)


def _by_assignment(gains: np.ndarray, copies: int) -> np.ndarray:
    """Copy every row and column so often that both are equally many: the best plan of these is one to one."""
    from scipy.optimize import linear_sum_assignment

    n, m = gains.shape
    of_rows = copies // n
    of_columns = copies // m
    copied = gains.repeat(of_rows, 0)
    copied = copied.repeat(of_columns, 1)
    rows, columns = linear_sum_assignment(copied, maximize=True)
    plan = np.zeros((n, m))
    places = rows // of_rows, columns // of_columns
    np.add.at(plan, places, 1 / copies)
    return plan


def _by_programme(gains: np.ndarray) -> np.ndarray:
    """Solve the linear programme of the transport problem."""
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, kron, vstack

    n, m = gains.shape
    ones_of_row = np.ones((1, m))
    ones_of_column = np.ones((1, n))
    sums_of_rows = kron(eye_array(n), ones_of_row)
    sums_of_columns = kron(ones_of_column, eye_array(m))
    sums = vstack([sums_of_rows, sums_of_columns], format="csr")
    # in units of 1/(n m), so that the solver's tolerances are small beside what is transported
    of_rows = np.full(n, m)
    of_columns = np.full(m, n)
    totals = np.concatenate([of_rows, of_columns])
    costs = -gains.ravel()
    found = linprog(costs, A_eq=sums, b_eq=totals, method="highs")
    if found.x is None:
        raise RuntimeError(
            f"The linear programme of the matching failed: {found.message}"
        )
    transported = found.x.reshape(n, m)
    return transported / (n * m)
