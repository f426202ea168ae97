"""Measures made of the similarities or distances between rows, on a sample of rows: RSA and RBF CKA.

They are not additive over rows: memory and time grow with the square of the sample. Everything is in float64.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from aligners.errors import check_known, check_range
from aligners.similarity.algebra import pairs
from aligners.similarity.algebra.moments import refuse_layers
from aligners.similarity.functional.cka import (
    HSIC,
    LEAST_ROWS,
    cka_from_hsic,
    unbiased_hsic_from_sums,
)

Kernel = Literal["cosine", "linear", "euclidean"]
# Variances below these shares, of the mean square and of the square of a row's similarity with itself, are rounding.
_CONSTANT, _CONSTANT_TO_SELF = 1e-13, 1e-28


def rsa(x: Tensor, y: Tensor, kernel: Kernel = "cosine") -> Tensor:
    """Pearson correlation of K_ij with L_ij over the pairs of rows i < j, for all layer pairs (Merchant 2020, §5.1).

    K_ij is the similarity of rows i and j of X, L_ij that of the same rows of Y: `cosine`, the cosine of the two
    rows; `linear`, x_i·x_j; `euclidean`, −‖x_i − x_j‖. Symmetric; in [−1, 1].

    Invariant to rotation and isotropic scaling of either side; `euclidean` also to translation. Rows are not
    centred: `cosine` and `linear` depend on the mean, so centre beforehand if they should not.

    Route: `cosine` is `linear` on rows of length 1. Both come from the linear sums over pairs of rows, for which
    `linear_pair_sums` takes the cheaper of the feature side and the Gram side. `euclidean` has no feature side: it
    is summed in blocks of the distance matrices. No route holds an n × n matrix.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        kernel: `cosine`, `linear` or `euclidean`.

    Raises:
        ValueError: another kernel, fewer than 3 rows, rows that are not paired or not finite, a row of zeros (its
            cosine is not defined), similarities that are all equal.
    """
    check_known(get_args(Kernel), kernel=kernel)
    pairs.check_enough(x, y, 3, "RSA")
    if kernel == "cosine":
        for name, rows in (("x", x), ("y", y)):
            expected = "rows that are not zero, whose cosine is not defined"
            refuse_layers(
                ~rows.any(2).all(1),
                name,
                expected,
                f"has {int((~rows.any(2)).sum())} rows of zeros in",
            )
    rows_x, rows_y = (
        pairs.CentredRows(rows, of_length_one=kernel == "cosine") for rows in (x, y)
    )
    if kernel == "euclidean":
        return _correlation(
            pairs.kernel_pair_sums(rows_x, rows_y, _minus_distances, _minus_distances)
        )
    # With x_i = c + w_i, K_ij is w_i·w_j + c·w_i + c·w_j and a constant, which no correlation sees.
    sums = _added(pairs.linear_pair_sums(rows_x, rows_y), rows_x.along, rows_y.along)
    return _correlation(sums, rows_x.squares, rows_y.squares)


def rbf_cka(x: Tensor, y: Tensor, width: float = 0.5, unbiased: bool = False) -> Tensor:
    """CKA with the kernel exp(−‖x_i − x_j‖² / 2σ²), for all layer pairs (Kornblith et al. 2019, §2.3).

    σ is `width` times the median distance of rows i < j, for each layer its own. (The code released with the paper
    takes the median over the whole matrix, its zero diagonal included.) HSIC is tr(KHLH), biased as in the paper.

    Invariant to rotation, isotropic scaling and translation of either side. Symmetric.

    Route: Gram side, in blocks; an RBF kernel has no finite feature side. The median needs the N²/2 distances of one
    layer at a time.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        width: σ in units of the median distance.
        unbiased: HSIC_1 instead of the biased HSIC.

    Raises:
        ValueError: `width` is not positive, fewer than 4 rows, rows that are not paired or not finite, a median
            distance of zero.
    """
    check_range(above=0, width=width)  # σ in units of the median distance
    pairs.check_enough(x, y, LEAST_ROWS, "RBF CKA")
    rows_x, rows_y = pairs.CentredRows(x), pairs.CentredRows(y)
    kernels = [
        _rbf(width**2 * _median_squares(rows, name))
        for name, rows in (("x", rows_x), ("y", rows_y))
    ]
    sums = pairs.kernel_pair_sums(rows_x, rows_y, *kernels)
    if unbiased:
        return cka_from_hsic(unbiased_hsic_from_sums(sums))
    # HSICs of kernels with ones on the diagonal; a factor of (N − 1)² falls out of their ratio
    n, a, b = sums.n, sums.rows_x + 1, sums.rows_y + 1
    total_a, total_b = a.sum(1), b.sum(1)
    hsic = HSIC(
        sums.xy + n - 2 / n * a @ b.mT + total_a[:, None] * total_b / n**2,
        sums.xx + n - 2 / n * (a**2).sum(1) + total_a**2 / n**2,
        sums.yy + n - 2 / n * (b**2).sum(1) + total_b**2 / n**2,
    )
    return cka_from_hsic(hsic)


def _added(sums: pairs.PairSums, a: Tensor, b: Tensor) -> pairs.PairSums:
    """The sums of K_ij + a_i + a_j and L_ij + b_i + b_j, from those of K and L; a is (L_x, N), b (L_y, N)."""
    n = sums.n
    total_a, total_b = a.sum(1), b.sum(1)
    return pairs.PairSums(
        n,
        sums.xy
        + 2
        * (
            sums.rows_x @ b.mT
            + a @ sums.rows_y.mT
            + (n - 2) * a @ b.mT
            + total_a[:, None] * total_b
        ),
        sums.xx
        + 4 * (sums.rows_x * a).sum(1)
        + 2 * ((n - 2) * (a**2).sum(1) + total_a**2),
        sums.yy
        + 4 * (sums.rows_y * b).sum(1)
        + 2 * ((n - 2) * (b**2).sum(1) + total_b**2),
        sums.rows_x + (n - 2) * a + total_a[:, None],
        sums.rows_y + (n - 2) * b + total_b[:, None],
    )


def _correlation(
    sums: pairs.PairSums, self_x: Tensor | None = None, self_y: Tensor | None = None
) -> Tensor:
    """Pearson correlation over pairs of rows; `self_x` (L_x,) is a row's mean similarity with itself, if not zero."""
    count = sums.n * (sums.n - 1)
    total_x, total_y = sums.rows_x.sum(1), sums.rows_y.sum(1)
    variances = []
    for name, squares, total, to_self in (
        ("x", sums.xx, total_x, self_x),
        ("y", sums.yy, total_y, self_y),
    ):
        variance = (squares - total**2 / count) / count
        least = _CONSTANT * squares / count
        if to_self is not None:
            least = torch.maximum(least, _CONSTANT_TO_SELF * to_self**2)
        expected = "rows whose similarities to one another differ, so that there is a correlation"
        refuse_layers(
            ~(variance > least), name, expected, "has rows of equal similarities in"
        )
        variances.append(variance)
    covariance = (sums.xy - total_x[:, None] * total_y / count) / count
    return covariance / (variances[0].sqrt()[:, None] * variances[1].sqrt())


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_j‖², (L, r, c). Those that rounding leaves below zero become zero."""
    squares_a, squares_b = (a**2).sum(2), (b**2).sum(2)
    return (squares_a[:, :, None] + squares_b[:, None] - 2 * a @ b.mT).clamp_(min=0)


def _minus_distances(a: Tensor, b: Tensor) -> Tensor:
    return -_squared_distances(a, b).sqrt()


def _rbf(variance: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The kernel of layers whose σ² is `variance`, (L,)."""
    return lambda a, b: torch.exp(
        _squared_distances(a, b) / (-2 * variance[:, None, None])
    )


def _median_squares(x: pairs.CentredRows, name: str) -> Tensor:
    """Square of the median distance of rows i < j at each layer, (L,)."""
    medians = []
    n = x.shape[1]
    for place in range(len(x)):
        layer, filled = x[place : place + 1, :], 0
        squares = layer.new_empty(n * (n - 1) // 2)
        for i, j in pairs.upper_blocks(n):
            block = _squared_distances(layer[:, i], layer[:, j])[0]
            some = (
                block.flatten()
                if i != j
                else block[torch.ones_like(block, dtype=torch.bool).triu(1)]
            )
            squares[filled : filled + len(some)] = some
            filled += len(some)
        # The mean of the two in the middle, as statistics has it: `torch.median` is the lower one.
        middle = [
            squares.kthvalue(k).values.sqrt()
            for k in ((len(squares) + 1) // 2, len(squares) // 2 + 1)
        ]
        medians.append((middle[0] + middle[1]) / 2)
    median = torch.stack(medians)
    expected = "rows with a median distance above 0: features that vary, and no row that most rows repeat"
    refuse_layers(median == 0, name, expected, "has others in")
    return median**2
