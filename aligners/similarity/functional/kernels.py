"""Measures made of the similarities or distances between rows, on a sample of rows: RSA and RBF CKA.

They do not add up over rows: memory and time grow with the square of the sample. Everything is in float64.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from aligners.errors import check_known, check_range
from aligners.similarity.algebra import pairs
from aligners.similarity.algebra.moments import refuse_layers
from aligners.similarity.algebra.permuted_pairs import OfPairs, Order, PermutedPairs
from aligners.similarity.functional.cka import (
    HSIC,
    LEAST_ROWS,
    cka_from_hsic,
    unbiased_hsic_from_sums,
)

Kernel = Literal["cosine", "centred_cosine", "linear", "euclidean"]
RankedKernel = Literal["cosine", "centred_cosine", "euclidean"]
MOST_SORTED = 2**23  # pairs of rows whose similarities are sorted; more are counted
BINS = 2**20  # of equal width, in which they are counted
SORTED_BINS = 2**30  # similarities in one of these are equal but for rounding
# Variances below these shares, of the mean square and of the square of a row's similarity with itself, are rounding.
_CONSTANT, _CONSTANT_TO_SELF = 1e-13, 1e-28


def rsa(x: Tensor, y: Tensor, kernel: Kernel = "cosine") -> Tensor:
    """Pearson correlation of K_ij with L_ij over the pairs of rows i < j, for all layer pairs (Merchant 2020, §5.1).

    K_ij is the similarity of rows i and j of X, L_ij that of the same rows of Y: `cosine`, the cosine of the two
    rows; `centred_cosine`, that of the rows less their mean; `linear`, x_i·x_j; `euclidean`, −‖x_i − x_j‖. Symmetric;
    in [−1, 1].

    Invariant to rotation and isotropic scaling of either side; `centred_cosine` and `euclidean` also to translation.
    `cosine` and `linear` depend on the mean.

    Route: `cosine` is `linear` on rows of length 1. Both come from the linear sums over pairs of rows, for which
    `linear_pair_sums` takes the cheaper of the feature side and the Gram side. `euclidean` has no feature side: it
    is summed in blocks of the distance matrices. No route holds an n × n matrix.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        kernel: `cosine`, `centred_cosine`, `linear` or `euclidean`.

    Raises:
        ValueError: another kernel, fewer than 3 rows, rows that are not paired or not finite, a row of zeros (its
            cosine is not defined), similarities that are all equal.
    """
    return rsa_pairs(x, y, kernel).value()


def rsa_pairs(x: Tensor, y: Tensor, kernel: Kernel = "cosine") -> OfPairs:
    """Return `rsa` for Y's rows in any order; arguments and errors as there."""
    check_known(get_args(Kernel), kernel=kernel)
    rows_x, rows_y = _rows_for(kernel, x, y)
    if kernel == "euclidean":
        kernels = _minus_distances, _minus_distances
        distances = PermutedPairs(rows_x, rows_y, kernels)
        return OfPairs(distances, lambda sums, order: _correlation(sums))

    def finish(sums: pairs.PairSums, order: Order) -> Tensor:
        # With x_i = c + w_i, K_ij is w_i·w_j + c·w_i + c·w_j and a constant, which no correlation sees.
        sums = _added(sums, rows_x.along, rows_y.along[:, order])
        return _correlation(sums, rows_x.squares, rows_y.squares)

    return OfPairs(PermutedPairs(rows_x, rows_y), finish)


def rsa_spearman(x: Tensor, y: Tensor, kernel: RankedKernel = "cosine") -> Tensor:
    """Spearman's correlation of K_ij with L_ij over the pairs of rows i < j, for all layer pairs (Kriegeskorte 2008).

    `rsa` of ranks: any increasing function of the similarities gives the same. Symmetric, in [−1, 1], and invariant to
    what `rsa` is. Similarities that are equal share the mean of their ranks.

    Route: Gram side, in blocks, twice: first for the ranks, then for the products of ranks. Up to 2²³ pairs (4,096
    rows) are sorted. More are counted in 2²⁰ bins of equal width, so that memory does not grow with their number; those
    of one bin share a rank, which moves the value by about the square of the share of the pairs in a bin.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        kernel: `cosine`, `centred_cosine` or `euclidean`, as in `rsa`.

    Raises:
        ValueError: as `rsa`.
    """
    return rsa_spearman_pairs(x, y, kernel).value()


def rsa_spearman_pairs(
    x: Tensor, y: Tensor, kernel: RankedKernel = "cosine"
) -> OfPairs:
    """Return `rsa_spearman` for Y's rows in any order; arguments and errors as there."""
    check_known(get_args(RankedKernel), kernel=kernel)
    rows_x, rows_y = _rows_for(kernel, x, y)
    kernels = _ranks(rows_x), _ranks(rows_y)
    ranks = PermutedPairs(rows_x, rows_y, kernels)
    return OfPairs(ranks, lambda sums, order: _correlation(sums))


def _rows_for(
    kernel: str, x: Tensor, y: Tensor
) -> tuple[pairs.CentredRows, pairs.CentredRows]:
    """The rows that a kernel is made of, of length 1 for cosines. Raises if there are none."""
    pairs.check_enough(x, y, 3, "RSA")
    both = []
    for name, rows in (("x", x), ("y", y)):
        if kernel == "centred_cosine":
            rows, _ = pairs.centred(rows.double())
        if kernel.endswith("cosine"):
            check_lengths(name, rows)
        both.append(pairs.CentredRows(rows, of_length_one=kernel.endswith("cosine")))
    rows_x, rows_y = both
    return rows_x, rows_y


class _Ranks(NamedTuple):
    """The ranks of the bins of similarities of one layer.

    Attributes:
        ranks: of each bin, the mean of those in it, from 1/2 for the smallest distance to −1/2.
        bins: numbers of these bins, in order; None: 0, 1, 2, ...
    """

    ranks: Tensor
    bins: Tensor | None = None

    def of(self, places: Tensor) -> Tensor:
        """Return the ranks of similarities whose bins are `places`."""
        if self.bins is not None:
            places = torch.searchsorted(self.bins, places)
            places.clamp_(max=len(self.bins) - 1)
        return self.ranks[places]


def _ranks(rows: pairs.CentredRows) -> pairs.Kernel:
    """The kernel whose values are the ranks of −‖w_i − w_j‖² over all pairs of rows.

    Of rows of length 1 that is 2 cos(i, j) − 2, which has the same ranks as the cosine.
    """
    n = rows.shape[1]
    sort = n * (n - 1) // 2 <= MOST_SORTED
    bins = SORTED_BINS if sort else BINS
    tables = []
    scales = []
    for place in range(len(rows)):
        layer = rows[place : place + 1, :]
        longest = 2 * layer.square().sum(-1).max().sqrt()
        largest = longest.square()  # of any squared distance
        scale = (bins - 1) / largest.where(largest > 0, 1)
        scales.append(scale)
        tables.append(_table(layer, scale, sort))
    scale = torch.stack(scales)[:, None, None]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        places = _binned(a, b, scale)
        ranks = []
        for table, of_layer in zip(tables, places, strict=True):
            ranks.append(table.of(of_layer))
        return torch.stack(ranks)

    return kernel


def _binned(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """The bins of squared distances, (L, r, c)."""
    squares = _squared_distances(a, b) * scale
    return squares.round_().long()


def _table(layer: Tensor, scale: Tensor, sort: bool) -> _Ranks:
    """The ranks of one layer (1, N, d), from all pairs in its bins: sorted, or counted."""
    n = layer.shape[1]
    places = []
    counts = torch.zeros(BINS, dtype=torch.int64, device=layer.device)
    for i, j in pairs.upper_blocks(n):
        block = _binned(layer[:, i], layer[:, j], scale)
        if i == j:
            above = torch.ones_like(block, dtype=torch.bool)
            block = block[above.triu(1)]
        block = block.flatten()
        if sort:
            places.append(block)
        else:
            counts += block.bincount(minlength=BINS)
    bins = None
    if sort:
        bins, counts = torch.cat(places).unique(return_counts=True)
    total = n * (n - 1) / 2
    last = counts.cumsum(0).double()
    middle = last - (counts - 1) / 2
    return _Ranks(0.5 + 0.5 / total - middle / total, bins)


def check_lengths(name: str, rows: Tensor) -> None:
    """Raise if a row (L, N, d) is zero."""
    zero = ~rows.any(2)  # (L, N)
    expected = "rows that are not zero, whose cosine is not defined"
    received = f"has {int(zero.sum())} rows of zeros in"
    refuse_layers(zero.any(1), name, expected, received)


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
    return rbf_cka_pairs(x, y, width, unbiased).value()


def rbf_cka_pairs(
    x: Tensor, y: Tensor, width: float = 0.5, unbiased: bool = False
) -> OfPairs:
    """Return `rbf_cka` for Y's rows in any order; arguments and errors as there."""
    check_range(above=0, width=width)  # σ in units of the median distance
    pairs.check_enough(x, y, LEAST_ROWS, "RBF CKA")
    rows_x = pairs.CentredRows(x)
    rows_y = pairs.CentredRows(y)
    variance_x = width**2 * _median_squares(rows_x, "x")
    variance_y = width**2 * _median_squares(rows_y, "y")
    kernel_x = _rbf(variance_x)
    kernel_y = _rbf(variance_y)
    hsic_of = unbiased_hsic_from_sums if unbiased else _biased_hsic
    kernels = PermutedPairs(rows_x, rows_y, (kernel_x, kernel_y))
    return OfPairs(kernels, lambda sums, order: cka_from_hsic(hsic_of(sums)))


def _biased_hsic(sums: pairs.PairSums) -> HSIC:
    """tr(KHLH) of kernels with ones on the diagonal; a factor of (N − 1)² is left out, as it cancels in a CKA."""
    n = sums.n
    a = sums.rows_x + 1
    b = sums.rows_y + 1
    total_a = a.sum(1)
    total_b = b.sum(1)
    totals = total_a[:, None] * total_b
    squares_a = (a**2).sum(1)
    squares_b = (b**2).sum(1)

    products = 2 / n * a @ b.mT
    xy = sums.xy + n - products
    xx = sums.xx + n - 2 / n * squares_a
    yy = sums.yy + n - 2 / n * squares_b
    return HSIC(
        xy=xy + totals / n**2, xx=xx + total_a**2 / n**2, yy=yy + total_b**2 / n**2
    )


def _added(sums: pairs.PairSums, a: Tensor, b: Tensor) -> pairs.PairSums:
    """The sums of K_ij + a_i + a_j and L_ij + b_i + b_j, from those of K and L; a is (L_x, N), b (L_y, N)."""
    n, xy, xx, yy, rows_x, rows_y = sums
    total_a = a.sum(1)
    total_b = b.sum(1)
    added = rows_x @ b.mT + a @ rows_y.mT
    many_a = (n - 2) * a
    many_b = (n - 2) * b
    added = added + many_a @ b.mT
    added = added + total_a[:, None] * total_b
    rows_of_x = rows_x + many_a
    rows_of_y = rows_y + many_b
    return pairs.PairSums(
        n=n,
        xy=xy + 2 * added,
        xx=_added_squares(n, xx, rows_x, a),
        yy=_added_squares(n, yy, rows_y, b),
        rows_x=rows_of_x + total_a[:, None],
        rows_y=rows_of_y + total_b[:, None],
    )


def _added_squares(n: int, squares: Tensor, rows: Tensor, a: Tensor) -> Tensor:
    """Σ (K_ij + a_i + a_j)², (L,), from Σ K_ij² and Σ_j K_ij."""
    products = (rows * a).sum(1)
    own = (a**2).sum(1)
    own = (n - 2) * own
    total = a.sum(1)
    both = own + total**2
    return squares + 4 * products + 2 * both


def _correlation(
    sums: pairs.PairSums, self_x: Tensor | None = None, self_y: Tensor | None = None
) -> Tensor:
    """Pearson correlation over pairs of rows; `self_x` (L_x,) is a row's mean similarity with itself, if not zero."""
    n, xy, xx, yy, rows_x, rows_y = sums
    count = n * (n - 1)
    total_x = rows_x.sum(1)
    total_y = rows_y.sum(1)
    deviation_x = _deviation("x", count, xx, total_x, self_x)
    deviation_y = _deviation("y", count, yy, total_y, self_y)
    totals = total_x[:, None] * total_y
    products = xy - totals / count
    covariance = products / count
    return covariance / (deviation_x[:, None] * deviation_y)


def _deviation(
    name: str, count: int, squares: Tensor, total: Tensor, to_self: Tensor | None
) -> Tensor:
    """Standard deviation over pairs of rows, (L,), from the sums of squares and of similarities."""
    of_total = total**2 / count
    variance = (squares - of_total) / count
    least = _CONSTANT * squares / count
    if to_self is not None:
        rounding = _CONSTANT_TO_SELF * to_self**2
        least = least.maximum(rounding)
    constant = ~(variance > least)
    expected = (
        "rows whose similarities to one another differ, so that there is a correlation"
    )
    received = "has rows of equal similarities in"
    refuse_layers(constant, name, expected, received)
    return variance.sqrt()


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_j‖², (L, r, c). Those that rounding leaves below zero become zero."""
    squares_a = (a**2).sum(2)
    squares_b = (b**2).sum(2)
    squares = squares_a[:, :, None] + squares_b[:, None]
    squares = squares - 2 * a @ b.mT
    return squares.clamp_(min=0)


def _minus_distances(a: Tensor, b: Tensor) -> Tensor:
    """−‖a_i − b_j‖, (L, r, c)."""
    return -_squared_distances(a, b).sqrt()


def _rbf(variance: Tensor) -> pairs.Kernel:
    """The kernel of layers whose σ² is `variance`, (L,)."""
    scale = -2 * variance[:, None, None]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(_squared_distances(a, b) / scale)

    return kernel


def _median_squares(x: pairs.CentredRows, name: str) -> Tensor:
    """Square of the median distance of rows i < j at each layer, (L,)."""
    medians = []
    for place in range(len(x)):
        layer = x[place : place + 1, :]
        squares = _squares_of_pairs(layer)
        # The mean of the two in the middle, as statistics has it: `torch.median` is the lower one.
        half, odd = divmod(len(squares), 2)
        lower = squares.kthvalue(half + odd)
        upper = squares.kthvalue(half + 1)
        middle = lower.values.sqrt() + upper.values.sqrt()
        medians.append(middle / 2)
    median = torch.stack(medians)
    expected = "rows with a median distance above 0: features that vary, and no row that most rows repeat"
    refuse_layers(median == 0, name, expected, "has others in")
    return median**2


def _squares_of_pairs(layer: Tensor) -> Tensor:
    """The squared distances of rows i < j, (N (N − 1) / 2,), of one layer (1, N, d), in no order."""
    n = layer.shape[1]
    count = n * (n - 1) // 2
    squares = layer.new_empty(count)
    filled = 0
    for i, j in pairs.upper_blocks(n, layer.device):
        block = _squared_distances(layer[:, i], layer[:, j])
        if i == j:
            above = torch.ones_like(block, dtype=torch.bool)
            block = block[above.triu(1)]
        end = filled + block.numel()
        squares[filled:end] = block.flatten()
        filled = end
    return squares
