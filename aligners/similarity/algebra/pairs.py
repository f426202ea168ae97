"""Centred rows, and sums over all pairs of different rows, of two kernels at once: what HSIC and RSA are made of."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.moments import check_rows

BLOCK = 256  # rows of a block of a Gram matrix: the blocks of a dozen layers then stay near the processor

Kernel = Callable[[Tensor, Tensor], Tensor]


def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows less their mean, and the mean: x (L, N, d) → (L, N, d), (L, 1, d).

    Rounding can move the mean of a constant away from it. Clamped to the range of the rows it is that constant, and
    constant features become exact zeros.
    """
    mean = x.mean(1, keepdim=True).clamp(
        x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    )
    return x - mean, mean


class CentredRows:
    """Rows (L, N, d) of any precision, read as w_i, float64 rows less their mean c, some of them at a time.

    `rows[:, some]` is (L, n, d), as of a tensor.

    Args:
        x: (L, N, d).
        of_length_one: scale each row to length 1 first.

    Attributes:
        along: c·w_i, (L, N).
        squares: the mean over rows of ‖x_i‖², (L,).
    """

    dtype = torch.float64

    def __init__(self, x: Tensor, of_length_one: bool = False) -> None:
        self._x, self._of_length_one = x, of_length_one
        self.shape, self.device = x.shape, x.device
        means, along, squares = [], [], []
        for layer in x.split(1):  # one at a time, for the memory
            rows = self._scaled(layer)
            squares.append(torch.linalg.vecdot(rows, rows).mean())
            from_mean, mean = centred(rows)
            along.append((from_mean @ mean.mT)[0, :, 0])
            means.append(mean)
        self._mean, self.along, self.squares = (
            torch.cat(means),
            torch.stack(along),
            torch.stack(squares),
        )

    def __len__(self) -> int:
        """L."""
        return len(self._x)

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        """Some layers and some rows."""
        return self._scaled(self._x[at]).sub_(self._mean[at[0]])

    def _scaled(self, rows: Tensor) -> Tensor:
        rows = rows.to(torch.float64, copy=True)
        return (
            rows.div_(torch.linalg.vector_norm(rows, dim=2, keepdim=True))
            if self._of_length_one
            else rows
        )


class PairSums(NamedTuple):
    """Sums over pairs of different rows i ≠ j (every pair twice) of kernels K of X and L of Y, in float64.

    Attributes:
        n: number of rows.
        xy: Σ K_ij L_ij, which is tr(K̃L̃) where K̃ is K with a zero diagonal, (L_x, L_y).
        xx: Σ K_ij², (L_x,); yy: Σ L_ij², (L_y,).
        rows_x: Σ_j K_ij, which is K̃1, (L_x, n); rows_y: (L_y, n).
    """

    n: int
    xy: Tensor
    xx: Tensor
    yy: Tensor
    rows_x: Tensor
    rows_y: Tensor


def check_enough(x: Tensor, y: Tensor, least: int, measure: str) -> None:
    """Raise unless x (L_x, N, d_x) and y (L_y, N, d_y) are at least `least` paired finite rows.

    Raises:
        ValueError: what is wrong with them.
    """
    check_rows(x, y)
    if x.shape[1] < least:
        raise UserError(
            f"{measure} expects at least {least} rows, but `x` and `y` have {x.shape[1]}: it is not defined on fewer. "
            "Give more rows; leave out a last batch that is too short, or make all batches the same size."
        )


def linear_pair_sums(x: Tensor | CentredRows, y: Tensor | CentredRows) -> PairSums:
    """Sums of the linear kernels K_ij = x_i·x_j and L_ij = y_i·y_j, by the route with fewer operations.

    The Gram side costs about N²(L_x d_x + L_y d_y + L_x L_y)/2 multiplications, half of them saved by symmetry; the
    feature side N(L_x L_y d_x d_y + L_x d_x² + L_y d_y²), twice that for float32 rows. Both are exact.

    Args:
        x: (L_x, N, d_x); Gram matrices are taken in its dtype, so float32 stays float32, and summed in float64.
        y: (L_y, N, d_y).
    """
    (l_x, n, d_x), (l_y, _, d_y) = x.shape, y.shape
    gram = by_gram(n, l_x, d_x, l_y, d_y, double=x.dtype == torch.float64)
    return gram_pair_sums(x, y) if gram else feature_pair_sums(x, y)


def by_gram(n: int, l_x: int, d_x: int, l_y: int, d_y: int, *, double: bool) -> bool:
    """Whether the Gram side is the cheaper route of `linear_pair_sums`, for rows of such sizes in double precision."""
    gram = n * n * (l_x * d_x + l_y * d_y + l_x * l_y) / 2
    feature = n * (l_x * l_y * d_x * d_y + l_x * d_x**2 + l_y * d_y**2)
    return gram <= (
        feature if double else 2 * feature
    )  # the feature side is in float64, at half the speed


def gram_pair_sums(x: Tensor | CentredRows, y: Tensor | CentredRows) -> PairSums:
    """`linear_pair_sums` from blocks of the Gram matrices: memory (L_x + L_y)·256², whatever the number of rows."""
    return kernel_pair_sums(x, y, _inner, _inner)


def feature_pair_sums(x: Tensor | CentredRows, y: Tensor | CentredRows) -> PairSums:
    """`linear_pair_sums` from the features: tr(K̃L̃) = ‖XᵀY‖² − Σ‖x_i‖²‖y_i‖² and K̃1 = x_i·Σ_j x_j − ‖x_i‖².

    All of it in float64: with few rows the two terms of tr(K̃L̃) nearly cancel.
    """
    x, y = x[:, :].double(), y[:, :].double()
    squares_x, squares_y = (x**2).sum(2), (y**2).sum(2)
    wide = y.transpose(0, 1).flatten(1)  # (N, L_y d_y): one product for all layers of Y
    cross = ((rows.mT @ wide).unflatten(1, y.shape[::2]) for rows in x)
    xx, yy = (((rows.mT @ rows) ** 2).sum((1, 2)) for rows in (x, y))
    return PairSums(
        x.shape[1],
        torch.stack([(products**2).sum((0, 2)) for products in cross])
        - squares_x @ squares_y.mT,
        xx - (squares_x**2).sum(1),
        yy - (squares_y**2).sum(1),
        (x @ x.sum(1)[:, :, None])[:, :, 0] - squares_x,
        (y @ y.sum(1)[:, :, None])[:, :, 0] - squares_y,
    )


def kernel_pair_sums(
    x: Tensor | CentredRows, y: Tensor | CentredRows, kernel_x: Kernel, kernel_y: Kernel
) -> PairSums:
    """Sums of any two symmetric kernels, for all layer pairs by one product a block, over the upper triangle.

    Args:
        x: (L_x, N, d_x).
        y: (L_y, N, d_y).
        kernel_x: from rows (L_x, r, d_x) and rows (L_x, c, d_x) of X to their kernel (L_x, r, c).
        kernel_y: likewise for Y.
    """
    (l_x, n, _), l_y = x.shape, len(y)
    shapes = ((l_x, l_y), (l_x,), (l_y,), (l_x, n), (l_y, n))
    sums = PairSums(
        n,
        *(torch.zeros(shape, dtype=torch.float64, device=x.device) for shape in shapes),
    )
    for i, j in upper_blocks(n):
        twice = 1 if i == j else 2
        if i == j:  # the first of its row of blocks
            rows_x, rows_y = x[:, i], y[:, i]
        k = _off_diagonal(kernel_x(rows_x, x[:, j]), i == j)
        l = _off_diagonal(kernel_y(rows_y, y[:, j]), i == j)  # noqa: E741
        for rows, block in ((sums.rows_x, k), (sums.rows_y, l)):
            rows[:, i] += block.sum(2)
            if i != j:
                rows[:, j] += block.sum(1)
        k, l = k.flatten(1), l.flatten(1)  # noqa: E741
        sums.xy.add_(k @ l.mT, alpha=twice)
        sums.xx.add_(torch.linalg.vecdot(k, k), alpha=twice)
        sums.yy.add_(torch.linalg.vecdot(l, l), alpha=twice)
    return sums


def upper_blocks(n: int) -> list[tuple[slice, slice]]:
    """The blocks on and above the diagonal of an n × n matrix, as slices of rows and of columns."""
    parts = [slice(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK)]
    return [(i, j) for place, i in enumerate(parts) for j in parts[place:]]


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.mT


def _off_diagonal(block: Tensor, on_diagonal: bool) -> Tensor:
    """A block in float64, without the matrix's diagonal."""
    block = block.double()
    if on_diagonal:
        block.diagonal(dim1=1, dim2=2).zero_()
    return block
