"""Centred rows, and sums over all pairs of different rows, of two kernels at once: what HSIC and RSA are made of."""

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.moments import Device, check_rows, zeros_of

# rows of a block of a Gram matrix: the blocks of a dozen layers then stay near the processor
BLOCK = 256
# on a GPU, where the host launches a dozen kernels a block
GPU_BLOCK = 512

Kernel = Callable[[Tensor, Tensor], Tensor]


def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows minus their mean, and the mean: x (L, N, d) → (L, N, d), (L, 1, d).

    Rounding can move the mean of a constant away from it. Clamped to the range of the rows it is that constant, and
    constant features become exact zeros.
    """
    least = x.amin(1, keepdim=True)
    most = x.amax(1, keepdim=True)
    mean = x.mean(1, keepdim=True)
    mean = mean.clamp(least, most)
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
        self._x = x
        self._of_length_one = of_length_one
        self.shape = x.shape
        self.device = x.device
        means, along, squares = [], [], []
        for layer in x.split(1):  # one at a time, for the memory
            rows = self._scaled(layer)
            lengths = torch.linalg.vecdot(rows, rows)
            squares.append(lengths.mean())
            from_mean, mean = centred(rows)
            means.append(mean)
            products = from_mean @ mean.mT
            along.append(products[0, :, 0])
        self._mean = torch.cat(means)
        self.along = torch.stack(along)
        self.squares = torch.stack(squares)

    def __len__(self) -> int:
        """L, the number of layers."""
        return len(self._x)

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        """Return some layers and some rows."""
        layers, _ = at
        rows = self._scaled(self._x[at])
        mean = self._mean[layers]
        return rows.sub_(mean)

    def _scaled(self, rows: Tensor) -> Tensor:
        """Return a copy in float64, scaled to length 1 if requested."""
        rows = rows.to(torch.float64, copy=True)
        if self._of_length_one:
            lengths = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
            rows /= lengths
        return rows


Rows = Tensor | CentredRows


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


class _Kernels:
    """Sums over pairs of different rows of the kernels of all layers of both models, side by side, in float64.

    Args:
        layers: L_x + L_y.
        n: number of rows.
        device: where the rows are.

    Attributes:
        products: Σ K_ij K'_ij of all layers with all, (L_x + L_y, L_x + L_y).
        rows: Σ_j K_ij, (L_x + L_y, n).
    """

    def __init__(self, layers: int, n: int, device: Device) -> None:
        square = (layers, layers)
        self.products, self.rows = zeros_of([square, (layers, n)], device)

    def add(self, blocks: Tensor, i: slice, j: slice) -> None:
        """Add blocks (L_x + L_y, r, c) at rows i and columns j, and their mirror images; diagonals become 0 in place.

        The products with the other layers of the same model cost little, and save the launches of squares.
        """
        times = 1
        if i == j:
            blocks.diagonal(dim1=1, dim2=2).zero_()
        else:
            times = 2
            self.rows[:, j].add_(blocks.sum(1))
        self.rows[:, i].add_(blocks.sum(2))
        flat = blocks.flatten(1)
        self.products.addmm_(flat, flat.mT, alpha=times)

    def of(self, layers_x: int) -> PairSums:
        """The sums of so many layers of X and all others, which are Y's."""
        squares = self.products.diagonal()
        return PairSums(
            n=self.rows.shape[1],
            xy=self.products[:layers_x, layers_x:],
            xx=squares[:layers_x],
            yy=squares[layers_x:],
            rows_x=self.rows[:layers_x],
            rows_y=self.rows[layers_x:],
        )


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


def linear_pair_sums(x: Rows, y: Rows) -> PairSums:
    """Sums of the linear kernels K_ij = x_i·x_j and L_ij = y_i·y_j, by the route with fewer operations.

    The Gram side costs about N²(L_x d_x + L_y d_y + L_x L_y)/2 multiplications, half of them saved by symmetry; the
    feature side N(L_x L_y d_x d_y + L_x d_x² + L_y d_y²), twice that for float32 rows. Both are exact.

    Args:
        x: (L_x, N, d_x); Gram matrices are taken in its dtype, so float32 stays float32, and summed in float64.
        y: (L_y, N, d_y).
    """
    l_x, n, d_x = x.shape
    l_y, _, d_y = y.shape
    double = x.dtype == torch.float64
    if by_gram(n, l_x, d_x, l_y, d_y, double=double):
        return gram_pair_sums(x, y)
    return feature_pair_sums(x, y)


def by_gram(n: int, l_x: int, d_x: int, l_y: int, d_y: int, *, double: bool) -> bool:
    """Whether the Gram side is the cheaper route of `linear_pair_sums`, for rows of such sizes in double precision."""
    features_x = l_x * d_x
    features_y = l_y * d_y
    grams = features_x + features_y
    gram = n * n * (grams + l_x * l_y) / 2
    own = features_x * d_x + features_y * d_y
    feature = n * (features_x * features_y + own)
    if not double:
        feature *= 2  # it is in float64, at half the speed
    return gram <= feature


def gram_pair_sums(x: Rows, y: Rows) -> PairSums:
    """`linear_pair_sums` from blocks of the Gram matrices: memory (L_x + L_y)·256², whatever the number of rows."""
    return kernel_pair_sums(x, y, inner, inner)


def feature_pair_sums(x: Rows, y: Rows) -> PairSums:
    """`linear_pair_sums` from the features: tr(K̃L̃) = ‖XᵀY‖² − Σ‖x_i‖²‖y_i‖² and K̃1 = x_i·Σ_j x_j − ‖x_i‖².

    All of it in float64: with few rows the two terms of tr(K̃L̃) nearly cancel.
    """
    x = x[:, :].double()
    y = y[:, :].double()
    squares_x = (x**2).sum(2)
    squares_y = (y**2).sum(2)
    same = squares_x @ squares_y.mT
    return PairSums(
        n=x.shape[1],
        xy=squared_products(x, y) - same,
        xx=_own_sums(x, squares_x),
        yy=_own_sums(y, squares_y),
        rows_x=_row_sums(x, squares_x),
        rows_y=_row_sums(y, squares_y),
    )


def squared_products(x: Tensor, y: Tensor) -> Tensor:
    """‖XᵀY‖² of all layer pairs, (L_x, L_y), of rows (L_x, N, d_x) and (L_y, N, d_y)."""
    layers_y, _, d_y = y.shape
    wide = y.transpose(0, 1)
    wide = wide.flatten(1)  # (N, L_y d_y): one product for all layers of Y
    norms = []
    for layer in x:
        products = layer.mT @ wide
        products = products.unflatten(1, (layers_y, d_y))
        norm = (products**2).sum((0, 2))
        norms.append(norm)
    return torch.stack(norms)


def _own_sums(x: Tensor, squares: Tensor) -> Tensor:
    """Σ K_ij², (L,), of rows (L, N, d) with ‖x_i‖² (L, N)."""
    scatter = x.mT @ x
    norms = (scatter**2).sum((1, 2))
    same = (squares**2).sum(1)
    return norms - same


def _row_sums(x: Tensor, squares: Tensor) -> Tensor:
    """K̃1, (L, N), likewise."""
    total = x.sum(1)
    products = x @ total[:, :, None]
    return products[:, :, 0] - squares


def kernel_pair_sums(x: Rows, y: Rows, kernel_x: Kernel, kernel_y: Kernel) -> PairSums:
    """Sums of any two symmetric kernels, for all layer pairs by one product a block, over the upper triangle.

    Args:
        x: (L_x, N, d_x).
        y: (L_y, N, d_y).
        kernel_x: from rows (L_x, r, d_x) and rows (L_x, c, d_x) of X to their kernel (L_x, r, c).
        kernel_y: likewise for Y.
    """
    l_x, n, _ = x.shape
    layers = l_x + len(y)
    sums = _Kernels(layers, n, x.device)
    for i, j in upper_blocks(n, x.device):
        if i == j:  # the first of its row of blocks
            rows_x = x[:, i]
            rows_y = y[:, i]
        size = i.stop - i.start, j.stop - j.start
        blocks = torch.empty(layers, *size, dtype=torch.float64, device=x.device)
        blocks[:l_x] = kernel_x(rows_x, x[:, j])
        blocks[l_x:] = kernel_y(rows_y, y[:, j])
        sums.add(blocks, i, j)
    return sums.of(l_x)


def block_of(device: Device) -> int:
    """Rows of a block of a Gram matrix on a device."""
    if torch.device(device or "cpu").type == "cpu":
        return BLOCK
    return GPU_BLOCK


def upper_blocks(n: int, device: Device = None) -> list[tuple[slice, slice]]:
    """The blocks on and above the diagonal of an n × n matrix on a device, as slices of rows and of columns."""
    size = block_of(device)
    parts = []
    for start in range(0, n, size):
        end = min(start + size, n)
        parts.append(slice(start, end))
    blocks = combinations_with_replacement(parts, 2)
    return list(blocks)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Compute the linear kernel."""
    return a @ b.mT
