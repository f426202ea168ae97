"""Linear CKA of all layer pairs, biased and unbiased; unbiased HSIC of a block of rows, and the minibatch CKA of it."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.grid import of_moments
from aligners.similarity.algebra.moments import (
    Device,
    GridMoments,
    by_tile,
    check_moments,
    refuse_layers,
    squares,
    zeros_of,
)
from aligners.similarity.algebra.pairs import PairSums, centred, check_enough
from aligners.similarity.algebra.permuted_pairs import PermutedPairs


@of_moments
def linear_cka(moments: GridMoments) -> Tensor:
    """‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of centred rows (Kornblith et al. 2019, Table 1; Brown et al., eq. 1).

    In [0, 1], symmetric, and invariant to rotations, to one factor for all features and to translation. Biased
    upwards where rows are few for the width. Feature side: the Gram side gives the same number, but is not
    additive over rows.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: fewer than 3 rows (of two CKA is 1, whatever they are), non-finite rows, or a layer in which nothing
            varies.
    """
    check_moments(moments, "Linear CKA", 3, x="layers", y="layers")
    xx = _squared(moments.xx)
    yy = _squared(moments.yy)
    product = xx[:, None] * yy
    return _cross(moments) / product.sqrt()


@of_moments
def unbiased_cka(moments: GridMoments) -> Tensor:
    """HSIC₁(K, L) / √(HSIC₁(K, K) HSIC₁(L, L)) over all rows at once, K = XXᵀ and L = YYᵀ.

    HSIC₁ is the unbiased estimator of Song et al. 2012 (Nguyen et al. 2021, eq. 3), of Gram matrices K̃ and L̃ with
    zeroed diagonals. It does not change when rows are translated, and a K of centred rows sums to zero over each
    row. So (K̃1)_i = −‖x_i‖², 1ᵀK̃L̃1 = Σ‖x_i‖²‖y_i‖² and tr K̃L̃ = ‖XᵀY‖² − Σ‖x_i‖²‖y_i‖²: with quartic sums the
    feature side is exact, in one pass and without any n x n matrix.

    Symmetric, with the invariances of linear CKA. Its expectation for unrelated rows is 0: it may be negative,
    and is returned as it is.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: fewer than 4 rows, non-finite rows, a layer in which nothing varies, or an estimate of HSIC(K, K)
            that is not positive.
    """
    check_moments(moments, "Unbiased CKA", 4, x="layers", y="layers")
    n = moments.n
    trace_x = squares(moments.xx).sum(-1)
    trace_y = squares(moments.yy).sum(-1)
    traces = trace_x[:, None] * trace_y
    xy = _hsic(n, _cross(moments), moments.q_xy, traces)

    xx = _own_hsic("x", n, moments.xx, moments.q_xx, trace_x)
    yy = _own_hsic("y", n, moments.yy, moments.q_yy, trace_y)
    product = xx[:, None] * yy
    return xy / product.sqrt()


def _own_hsic(
    name: str, n: Tensor, scatter: Tensor, quartic: Tensor, trace: Tensor
) -> Tensor:
    """`_hsic` of each layer with itself, (L,). Raises where it is not positive."""
    square = trace.square()
    hsic = _hsic(n, _squared(scatter), quartic, square)
    positive = hsic > 1e-12 * square  # what rounding leaves of 0 is not
    expected = (
        f"a positive HSIC of each layer with itself from {int(n)} rows for Unbiased CKA"
    )
    refuse_layers(~positive, name, expected, "has none in")
    return hsic


def _cross(moments: GridMoments) -> Tensor:
    """‖XᵀY‖² of all pairs, (L_x, L_y)."""
    return by_tile(moments, lambda i, some, xy: _squared(xy))


def _squared(scatter: Tensor) -> Tensor:
    """Squared Frobenius norm over the last two axes."""
    norm = scatter.flatten(-2).norm(dim=-1)
    return norm.square()


def _hsic(n: Tensor, squared: Tensor, quartic: Tensor, traces: Tensor) -> Tensor:
    """HSIC₁ times n (n − 3), of centred rows; the factor cancels in a CKA."""
    hsic = squared - quartic
    pairs = (n - 1) * (n - 2)
    hsic = hsic + traces / pairs
    return hsic - 2 * quartic / (n - 2)


LEAST_ROWS = 4  # HSIC_1 divides by N − 3


class HSIC(NamedTuple):
    """HSIC of all layers of X with all layers of Y, and of each layer with itself, in float64.

    Attributes:
        xy: (L_x, L_y).
        xx: (L_x,); yy: (L_y,).
        ratios: sum over batches of each batch's own CKA, (L_x, L_y); NaN if a batch has none.
        batches: number of them, ().
    """

    xy: Tensor
    xx: Tensor
    yy: Tensor
    ratios: Tensor = torch.zeros(())
    batches: Tensor = torch.zeros(())

    @classmethod
    def zeros(cls, layers_x: int, layers_y: int, device: Device = None) -> Self:
        """The sums of no batches."""
        pairs = (layers_x, layers_y)
        within = (layers_x,), (layers_y,)
        shapes = [pairs, *within, pairs, ()]
        return cls(*zeros_of(shapes, device))

    def __add__(self, other: object) -> Self:
        """The sums of two disjoint sets of batches."""
        if not isinstance(other, HSIC):
            return NotImplemented
        sums = map(torch.add, self, other)
        return type(self)(*sums)

    def pair(self, i: int, j: int) -> Self:
        """Those of one layer of X and one of Y, by index."""
        one = slice(i, i + 1)
        other = slice(j, j + 1)
        return type(self)(
            xy=self.xy[one, other],
            xx=self.xx[one],
            yy=self.yy[other],
            ratios=self.ratios[one, other],
            batches=self.batches,
        )


def unbiased_hsic(x: Tensor, y: Tensor) -> HSIC:
    """HSIC_1 of linear kernels K = XXᵀ and L = YYᵀ, for all layer pairs (Song et al. 2012, eq. 5; Nguyen et al. 2021).

    HSIC_1 = [tr(K̃L̃) + 1ᵀK̃1 1ᵀL̃1 / ((N−1)(N−2)) − 2/(N−2) 1ᵀK̃L̃1] / (N(N−3)), diagonals of K̃ and L̃ zero. Its mean
    over samples of N rows is the HSIC of the population, so it may be negative, and is returned as it is.

    Invariant to translation and rotation of either side, to which its rows are therefore centred: it costs no digits
    when a mean dwarfs its deviation. Scaling x by a scales it by a².

    Route: `linear_pair_sums` counts and takes the cheaper of the Gram side and the feature side.

    Args:
        x: (L_x, N, d_x) rows of X; float16 and bfloat16 are lifted to float32. Gram matrices are in float32
            for float32 rows, everything else in float64.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.

    Raises:
        ValueError: fewer than 4 rows, rows that are not paired, values that are not finite.
    """
    return unbiased_hsic_from_sums(hsic_pairs(x, y).sums)


def hsic_pairs(x: Tensor, y: Tensor) -> PermutedPairs:
    """Return what `unbiased_hsic` is made of, for Y's rows in any order."""
    x = _lifted(x)
    y = _lifted(y)
    check_enough(x, y, LEAST_ROWS, "Unbiased HSIC")
    rows_x, _ = centred(x)
    rows_y, _ = centred(y)
    return PermutedPairs(rows_x, rows_y)


def unbiased_hsic_from_sums(sums: PairSums) -> HSIC:
    """HSIC_1 of any two kernels from their sums over pairs of different rows."""
    n, xy, xx, yy, x, y = sums
    total_x = x.sum(1)
    total_y = y.sum(1)
    totals = total_x[:, None] * total_y
    squares_x = (x**2).sum(1)
    squares_y = (y**2).sum(1)
    xy = _unbiased(n, xy, totals, x @ y.mT)
    xx = _unbiased(n, xx, total_x**2, squares_x)
    yy = _unbiased(n, yy, total_y**2, squares_y)
    ratios = _ratio(xy, xx, yy)
    batches = xy.new_ones(())
    return HSIC(xy, xx, yy, ratios, batches)


def _unbiased(n: int, traces: Tensor, totals: Tensor, products: Tensor) -> Tensor:
    """HSIC_1 from tr(K̃L̃), 1ᵀK̃1 1ᵀL̃1 and 1ᵀK̃L̃1."""
    pairs = (n - 1) * (n - 2)
    hsic = traces + totals / pairs
    hsic = hsic - 2 / (n - 2) * products
    return hsic / (n * (n - 3))


def _ratio(xy: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    """HSIC(X, Y) / √(HSIC(X, X) HSIC(Y, Y)), (L_x, L_y)."""
    norm = xx.sqrt()[:, None] * yy.sqrt()
    return xy / norm


def cka_from_hsic(hsic: HSIC) -> Tensor:
    """HSIC(X, Y) / √(HSIC(X, X) HSIC(Y, Y)), (L_x, L_y): not clamped, a negative estimate stays negative.

    Raises:
        ValueError: a layer's HSIC with itself is not positive, as where its features are constant.
    """
    for name, within in (("x", hsic.xx), ("y", hsic.yy)):
        expected = "rows whose HSIC with themselves is positive: features that vary, and enough rows for an estimate"
        refuse_layers(~(within > 0), name, expected, "has others in")
    return _ratio(hsic.xy, hsic.xx, hsic.yy)


def minibatch_cka(x: Tensor, y: Tensor, batch: int) -> Tensor:
    """Unbiased minibatch CKA: Σ HSIC_1(K, L) / √(Σ HSIC_1(K, K) Σ HSIC_1(L, L)) over batches of rows, (L_x, L_y).

    HSICs are averaged, not CKAs, and the normaliser has its root (Nguyen et al. 2021, eq. 2 to 4); Brown et al. 2023,
    C.1, print it without the root and average ratios. Every batch counts alike, whatever its number of rows.

    Invariant to rotation, isotropic scaling and translation of either side. The estimate's mean does not depend on
    the batch size; a batch of all rows has the least variance. Symmetric.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        batch: rows of a batch; the last batch has what is left.

    Raises:
        ValueError: a batch has fewer than 4 rows, or `unbiased_hsic` or `cka_from_hsic` refuse.
    """
    return cka_from_hsic(_of_batches(x, y, batch))


def mean_minibatch_cka(x: Tensor, y: Tensor, batch: int) -> Tensor:
    """Mean over batches of HSIC_1(K, L) / √(HSIC_1(K, K) HSIC_1(L, L)), (L_x, L_y).

    This is what Brown et al. 2023, C.1, average; they print the normaliser without its root, which would give a ratio
    units. A mean of ratios is biased where batches have few rows, however many they are; `minibatch_cka` is not.
    Otherwise as `minibatch_cka`.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        batch: rows of a batch; the last batch has what is left.

    Raises:
        ValueError: a batch has fewer than 4 rows, or `unbiased_hsic` or `mean_cka` refuse.
    """
    return mean_cka(_of_batches(x, y, batch))


def mean_cka(hsic: HSIC) -> Tensor:
    """The mean of the CKAs of batches, (L_x, L_y).

    Raises:
        ValueError: in some batch a layer's HSIC with itself is not positive.
    """
    unknown = ~hsic.ratios.isfinite()
    for name, refused in (("x", unknown.all(1)), ("y", unknown.all(0))):
        expected = "batches in each of which a layer's HSIC with itself is positive, as larger ones are"
        refuse_layers(refused, name, expected, "has others in")
    return hsic.ratios / hsic.batches


def _of_batches(x: Tensor, y: Tensor, batch: int) -> HSIC:
    """The sums over batches of rows."""
    left = batch
    if batch >= LEAST_ROWS:
        left = x.shape[1] % batch
    if 0 < left < LEAST_ROWS or batch < 1:
        raise UserError(
            f"Expected batches of at least {LEAST_ROWS} rows, but `batch` = {batch} leaves one of {left} of the "
            f"{x.shape[1]} rows. Choose another `batch`, or leave out the last rows."
        )
    parts_x = x.split(batch, 1)
    parts_y = y.split(batch, 1)
    batches = map(unbiased_hsic, parts_x, parts_y)
    sums = []
    for parts in zip(*batches, strict=True):
        stacked = torch.stack(parts)
        sums.append(stacked.sum(0))
    return HSIC(*sums)


def _lifted(x: Tensor) -> Tensor:
    """Half precision as float32: products in half precision would lose most digits."""
    if x.dtype in (torch.float32, torch.float64):
        return x
    return x.float()


def angular_distance(cka: Tensor) -> Tensor:
    """√Σ_l arccos(CKA_l)² over the layers of two models of one depth (Brown et al., eq. 2), ().

    In radians: 0 where every layer matches its partner, at most √L · π/2 for a CKA that is not negative. A metric
    for the linear CKA (Williams et al. 2021), which an unbiased estimate only approaches.

    Args:
        cka: (L, L), any CKA of all layer pairs; only its diagonal counts.

    Raises:
        ValueError: a CKA outside [-1, 1] by more than the 1e-12 that rounding explains.
    """
    diagonal = cka.diagonal()
    within = diagonal.abs() <= 1 + 1e-12
    outside = ~within
    if outside.any():
        layer = int(outside.nonzero()[0])
        raise UserError(
            f"Expected `cka` in [-1, 1], but layer {layer} has {float(diagonal[layer])}. "
            "An unbiased estimate exceeds 1 where rows are few: give more rows, or use linear CKA."
        )
    angles = diagonal.clamp(-1, 1).arccos()
    return angles.norm()
