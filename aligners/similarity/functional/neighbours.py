"""Measures of neighbourhoods: whether a row of X and its partner in Y have the same rows near them.

The nearest rows are those with the largest cosines. Cosines come in blocks of rows, so memory grows with N, and the
values do not depend on the blocks. Everything is in float64.

**Ties.** Rows as near as the k-th nearest, such as copies of one row, share the places that are left: three rows that
are equally near and two places are two thirds of a neighbour each. So no order of rows decides, rows set against
themselves have 1, and rows that nothing tells apart have what chance gives.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.similarity.algebra import pairs
from aligners.similarity.algebra.moments import refuse_layers
from aligners.similarity.functional.cka import LEAST_ROWS
from aligners.similarity.functional.kernels import check_lengths

K = 10  # as Huh et al. 2024
AT_ONCE = 2**22  # cosines that are held at a time
# cosines that differ by less than this share of the spread of the rows' directions are equal
TIE = 1e-9
_CONSTANT = 1e-26  # a spread that is rounding
COARSE = 1e-3  # of some rows beside all: too small a spread for the directions less the mean of all
_Found = tuple[Tensor, Tensor, Tensor]  # place, weight and cosine of `Neighbours`


class Neighbours(NamedTuple):
    """The k nearest rows of every row, those as near as the k-th included.

    Attributes:
        n: number of rows; k: number of neighbours.
        place: i · n + j of each row i and neighbour j, in order, (E,).
        weight: 1; less where neighbours share places. The weights of a row add up to k, (E,) float64.
        cosine: of i and j, (E,) float64.
    """

    n: int
    k: int
    place: Tensor
    weight: Tensor
    cosine: Tensor

    @classmethod
    def of(cls, rows: Tensor, k: int, groups: Tensor | None = None) -> Self:
        """Find them.

        Args:
            rows: (N, d), none of them zero.
            k: neighbours of a row.
            groups: (N,) group of each row, whose rows are not its neighbours; None: only a row itself is left out.

        Raises:
            ValueError: some row has fewer than k others.
        """
        n = len(rows)
        if groups is not None:
            groups = groups.to(rows.device)
        _check_k(k, n, groups)
        directions = _Directions.of(rows)
        step = max(AT_ONCE // n, 1)
        blocks = []
        for start in range(0, n, step):
            block = _Block.of(directions, start, step, groups)
            blocks.append(block.nearest(k))
        return cls._of_blocks(n, k, blocks)

    @classmethod
    def of_rests(
        cls, rows: Tensor, k: int, parts: Sequence[slice], groups: Tensor | None = None
    ) -> list[Self]:
        """Find those among the rows without each part in turn. The cosines are computed once for all parts.

        Args:
            rows: (N, d), none of them zero.
            k: neighbours of a row.
            parts: one after the other, all rows together.
            groups: as in `of`.

        Returns:
            What `of` finds among the rows outside of each part.

        Raises:
            ValueError: some row has fewer than k others outside of a part.
        """
        if groups is not None:
            groups = groups.to(rows.device)
        directions = _Directions.of(rows)
        rests = [_Rest.of(directions, part) for part in parts]
        for rest in rests:
            _check_k(k, rest.n, rest.outside(groups))
        step = max(AT_ONCE // len(rows), 1)
        for own in parts:
            for start in range(own.start, own.stop, step):
                count = min(step, own.stop - start)
                block = _Block.of(directions, start, count, groups)
                for rest in rests:
                    if rest.part != own:
                        rest.add(block, k)
        found = []
        for rest in rests:
            near = cls._of_blocks(rest.n, k, rest.blocks)
            if rest.nearly_equal:
                near = cls.of(rest.outside(rows), k, rest.outside(groups))
            found.append(near)
        return found

    @classmethod
    def _of_blocks(cls, n: int, k: int, blocks: Sequence["_Found"]) -> Self:
        """Put the neighbours of blocks of rows together."""
        places, weights, cosines = zip(*blocks, strict=True)
        place = torch.cat(places)
        weight = torch.cat(weights)
        cosine = torch.cat(cosines)
        return cls(n, k, place, weight, cosine)

    @property
    def row(self) -> Tensor:
        """Number of each row, i, (E,)."""
        return self.place // self.n

    @property
    def other(self) -> Tensor:
        """Number of each neighbour, j, (E,)."""
        return self.place % self.n

    def reordered(self, order: Tensor) -> Self:
        """Return the neighbours of the rows in another order: row i is then what was row `order[i]`."""
        now = order.argsort()
        row = now[self.row]
        other = now[self.other]
        moved = row * self.n + other
        place, sorting = moved.sort()
        weight = self.weight[sorting]
        cosine = self.cosine[sorting]
        return type(self)(self.n, self.k, place, weight, cosine)


class _Directions(NamedTuple):
    """Rows of length 1 less their mean, w_i, (N, d), ‖w_i‖², (N,), and the cosines that are equal but for rounding."""

    rows: Tensor
    squares: Tensor
    tie: float

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """Make them of any rows (N, d)."""
        layer = rows[None]
        centred = pairs.CentredRows(layer, of_length_one=True)
        directions = centred[:, :][0]
        squares = torch.linalg.vecdot(directions, directions)
        spread = float(squares.mean())
        return cls(directions, squares, TIE * spread)


class _Block(NamedTuple):
    """Cosines of some rows with all.

    Attributes:
        start: number of the first row.
        squares: ‖w_i‖² of the rows, (M,).
        nearness: cos(i, j) − 1 + ‖w_i‖²/2, which nothing cancels in where all rows have nearly one direction, (M, N);
            −∞ where j is no neighbour of i.
        tie: as of `_Directions`.
    """

    start: int
    squares: Tensor
    nearness: Tensor
    tie: float

    @classmethod
    def of(
        cls, directions: _Directions, start: int, step: int, groups: Tensor | None
    ) -> Self:
        """Compute them for up to `step` rows."""
        rows, squares, tie = directions
        some = slice(start, start + step)
        nearness = rows[some] @ rows.T
        nearness -= squares / 2
        if groups is None:
            itself = nearness.diagonal(start)
            itself.fill_(-torch.inf)
        else:
            own = groups[some, None] == groups
            nearness.masked_fill_(own, -torch.inf)
        return cls(start, squares[some], nearness, tie)

    def nearest(self, k: int) -> "_Found":
        """Places, weights and cosines of the neighbours of the rows, (E,) each."""
        last, row, other = self._candidates(k)
        near = self.nearness[row, other]
        surely = near > last[row] + self.tie
        weight = _weights(row, surely, k)
        cosine = 1 - self.squares[row] / 2 + near
        n = self.nearness.shape[1]
        place = (row + self.start) * n + other
        return place, weight, cosine

    def _candidates(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k-th largest of each row, (M,); rows and columns of those as large, in order, (E,) each.

        They are looked for among the 2k largest; where more than these may be tied, among all.
        """
        n = self.nearness.shape[1]
        count = min(2 * k, n)
        largest, columns = self.nearness.topk(count)
        last = largest[:, k - 1]
        least = last[:, None] - self.tie
        near = largest >= least
        if near[:, -1].any():
            every = self.nearness >= least
            row, other = every.nonzero(as_tuple=True)
            return last, row, other
        ordered = columns.where(near, n).sort().values
        there = ordered < n
        row, _ = there.nonzero(as_tuple=True)
        return last, row, ordered[there]


class _Rest:
    """The rows outside of a part.

    Args:
        part: the rows that are left out.
        n: number of those outside.
        tie: as of `_Directions`, of the rows outside.
        nearly_equal: the directions of these are so near to each other that those of all rows are too coarse.

    Attributes:
        blocks: what `add` found of each block.
    """

    def __init__(self, part: slice, n: int, tie: float, *, nearly_equal: bool) -> None:
        self.part = part
        self.n = n
        self.tie = tie
        self.nearly_equal = nearly_equal
        self.blocks: list[_Found] = []

    @classmethod
    def of(cls, directions: _Directions, part: slice) -> Self:
        """Find out how far apart the directions of the rows outside are."""
        n = len(directions.rows) - (part.stop - part.start)
        total = directions.rows.sum(0) - directions.rows[part].sum(0)
        squares = directions.squares.sum() - directions.squares[part].sum()
        mean = total / n
        spread = float(squares / n - mean @ mean)
        tie = TIE * spread
        return cls(part, n, tie, nearly_equal=tie < COARSE * directions.tie)

    def outside(self, values: Any) -> Any:
        """The values (N, ...) of the rows outside; None of None."""
        if values is None:
            return None
        return torch.cat([values[: self.part.start], values[self.part.stop :]])

    def add(self, block: _Block, k: int) -> None:
        """Find the neighbours, outside, of the rows of a block outside; places count the rows outside alone."""
        inside = block.nearness[:, self.part]
        kept = inside.clone()
        inside.fill_(-torch.inf)
        place, weight, cosine = block._replace(tie=self.tie).nearest(k)
        inside.copy_(kept)
        every = block.nearness.shape[1]
        left_out = every - self.n
        row = place // every
        other = place % every
        row = row - left_out * (row >= self.part.stop)
        other = other - left_out * (other >= self.part.stop)
        self.blocks.append((row * self.n + other, weight, cosine))


def _check_k(k: int, n: int, groups: Tensor | None) -> None:
    """Raise unless every row has at least k others that are not of its group."""
    check_range(least=1, k=k)
    largest = 1
    if groups is not None:
        _, sizes = groups.unique(return_counts=True)
        largest = int(sizes.max())
    most = n - largest
    if k <= most:
        return
    others = "others"
    if largest > 1:
        others = "others that are not of its own group"
    raise UserError(
        f"Expected `k` of at most {most}, as some row has only so many {others} among {n} rows, but got {k}. Give more "
        "rows, or a smaller `k`."
    )


def _weights(row: Tensor, surely: Tensor, k: int) -> Tensor:
    """Weights of the neighbours of each row, (E,): 1 of those surely among its k, and of those tied their share."""
    count = row.bincount()
    sure = row[surely].bincount(minlength=len(count))
    places = k - sure
    tied = count - sure
    share = places.double() / tied
    return share[row].where(~surely, 1)


def mutual_knn(
    x: Tensor, y: Tensor, k: int = K, groups: Tensor | None = None
) -> Tensor:
    """Mean share of the k nearest rows that a row of X and its partner in Y have in common, for all layer pairs.

    Σ_i |S_i ∩ T_i| / (N k), S_i the k rows of X with the largest cosines to row i, T_i those of Y. In [0, 1]; of
    unrelated rows k / (N − 1) on average. Symmetric. Invariant to rotation and isotropic scaling of either side, and to
    any positive factor of a single row; not to translation: rows are not centred.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        k: neighbours of a row.
        groups: (N,) numbers of the rows' texts, to leave a row's own text out of its neighbours.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: some row has fewer than k others, rows that are not paired or not finite, a row of zeros, a layer
            whose rows all have one direction.

    References:
        Huh et al. 2024, "The Platonic Representation Hypothesis", arXiv 2405.07987, Appendix A. There ties are broken
        by the order of the rows.
    """
    return _of_layers(x, y, k, groups, mutual)


def jaccard_knn(
    x: Tensor, y: Tensor, k: int = K, groups: Tensor | None = None
) -> Tensor:
    """Mean over rows of |S_i ∩ T_i| / |S_i ∪ T_i|, S_i and T_i as in `mutual_knn`, for all layer pairs.

    In [0, 1], and no larger than `mutual_knn`; symmetric, and invariant to the same. Where neighbours share places, the
    sizes are sums of the smaller and of the larger weights.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        k: neighbours of a row.
        groups: as in `mutual_knn`.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `mutual_knn`.

    References:
        Wang et al. 2022, "Quantifying the differences of word embedding neighbourhoods"; Klabunde et al. 2025,
        "ReSi", whose code takes k = 10 and cosines.
    """
    return _of_layers(x, y, k, groups, jaccard)


def cknna(x: Tensor, y: Tensor, k: int = K, groups: Tensor | None = None) -> Tensor:
    """CKA of cosines between mutual neighbours alone, for all layer pairs.

    HSIC₁(M∘K, M∘L) / √(HSIC₁(S∘K, S∘K) HSIC₁(T∘L, T∘L)) with K and L the cosines within X and within Y, S and T the
    neighbours (1 where j is among the k nearest of i, else 0), and M where both have it. At most about 1; of unrelated
    rows near 0. Invariant to what `mutual_knn` is. Where neighbours share places, M has the smaller weight. Not quite
    symmetric, as i may be near j and j not near i: the two directions differ in the third digit.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        k: neighbours of a row, at least 2.
        groups: as in `mutual_knn`.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: as `mutual_knn`; k below 2, fewer than 4 rows, an HSIC₁ of a layer with itself that is not positive.

    References:
        Huh et al. 2024, arXiv 2405.07987, Appendix A; HSIC₁ as in the code released with it, which adds 1e-6 to the
        denominator.
    """
    check_range(least=2, k=k)
    return _of_layers(x, y, k, groups, local_cka)


Formula = Callable[[Neighbours, Neighbours], Tensor]


def _of_layers(
    x: Tensor, y: Tensor, k: int, groups: Tensor | None, formula: Formula
) -> Tensor:
    """A formula of neighbours at all layer pairs, (L_x, L_y)."""
    pairs.check_enough(x, y, LEAST_ROWS, "A measure of neighbours")
    of_x = neighbours_of(x, "x", k, groups)
    of_y = neighbours_of(y, "y", k, groups)
    return of_pairs(of_x, of_y, formula)


def neighbours_of(
    rows: Tensor, name: str, k: int = K, groups: Tensor | None = None
) -> list[Neighbours]:
    """Find the neighbours of the rows (L, N, d) of each layer of the side `name`; errors as of `mutual_knn`."""
    pairs.check_enough(rows, rows, LEAST_ROWS, "A measure of neighbours")
    n = rows.shape[1]
    if groups is not None and groups.shape != (n,):
        raise UserError(
            f"Expected `groups` of shape ({n},), but got {tuple(groups.shape)}."
        )
    check_lengths(name, rows)
    _check_directions(name, rows)
    found = []
    for layer in rows:
        near = Neighbours.of(layer, k, groups)
        found.append(near)
    return found


def neighbours_of_rests(
    rows: Tensor,
    name: str,
    sizes: Sequence[int],
    k: int = K,
    groups: Tensor | None = None,
) -> list[Neighbours]:
    """Find the neighbours of one layer's rows without each part in turn, as `neighbours_of` would.

    Args:
        rows: (N, d).
        name: of the side.
        sizes: of the parts, which are consecutive rows.
        k: neighbours of a row.
        groups: as in `mutual_knn`.

    Raises:
        ValueError: as `mutual_knn`, of the rows outside of a part.
    """
    check_lengths(name, rows[None])
    parts = []
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        outside = torch.cat([rows[: part.start], rows[part.stop :]])[None]
        pairs.check_enough(outside, outside, LEAST_ROWS, "A measure of neighbours")
        _check_directions(name, outside)
        parts.append(part)
        start += size
    return Neighbours.of_rests(rows, k, parts, groups)


def of_pairs(
    of_x: Sequence[Neighbours], of_y: Sequence[Neighbours], formula: Formula
) -> Tensor:
    """Compute a formula of the neighbours of each layer of X and each of Y, (L_x, L_y)."""
    grid = []
    for near_x in of_x:
        values = [formula(near_x, near_y) for near_y in of_y]
        row = torch.stack(values)
        grid.append(row)
    return torch.stack(grid)


def _check_directions(name: str, layers: Tensor) -> None:
    """Raise if all rows of a layer have one direction."""
    bad = []
    for layer in layers.split(1):
        centred = pairs.CentredRows(layer, of_length_one=True)
        squares = centred[:, :].square()
        spread = squares.sum(-1).mean()
        bad.append(spread <= _CONSTANT)
    refuse_layers(
        torch.stack(bad),
        name,
        "rows of several directions, some nearer than others,",
        "has rows of one direction in",
    )


# ---------------------------------------------------------------------- formulas


class _Common(NamedTuple):
    """Neighbours that two layers have in common.

    Attributes:
        place: as of `Neighbours`, (C,).
        weight: the smaller of the two, (C,).
        cosines: in the one layer and in the other, (C,) each.
    """

    place: Tensor
    weight: Tensor
    cosines: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, a: Neighbours, b: Neighbours) -> Self:
        """Find them."""
        at, there = _found(b.place, a.place)
        at = at[there]
        smaller = torch.minimum(a.weight[there], b.weight[at])
        cosines = a.cosine[there], b.cosine[at]
        return cls(a.place[there], smaller, cosines)


def _found(places: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where among ordered places (E,) each wanted one (F,) is, and whether it is there, (F,) each."""
    at = torch.searchsorted(places, wanted)
    at.clamp_(max=len(places) - 1)
    return at, places[at] == wanted


def mutual(a: Neighbours, b: Neighbours) -> Tensor:
    """Compute `mutual_knn` of one pair of layers from their neighbours."""
    shared = _Common.of(a, b).weight
    every = a.n * a.k
    return shared.sum() / every


def jaccard(a: Neighbours, b: Neighbours) -> Tensor:
    """Compute `jaccard_knn` likewise."""
    common = _Common.of(a, b)
    row = common.place // a.n
    both = common.weight.new_zeros(a.n)
    both.index_add_(0, row, common.weight)
    either = 2 * a.k - both
    shares = both / either
    return shares.mean()


def local_cka(a: Neighbours, b: Neighbours) -> Tensor:
    """Compute `cknna` likewise."""
    common = _Common.of(a, b)
    of_a, of_b = common.cosines
    weighted_a = common.weight * of_a
    weighted_b = common.weight * of_b
    between = _hsic(a.n, common.place, weighted_a, weighted_b)
    of_x = _hsic_with_itself(a)
    of_y = _hsic_with_itself(b)
    product = of_x * of_y
    if not (of_x > 0 and of_y > 0):
        raise UserError(
            "CKNNA expects a positive HSIC of each layer's neighbourhoods with themselves, but got "
            f"{float(of_x):.3g} and {float(of_y):.3g}. Give more rows, or a larger `k`."
        )
    return between / product.sqrt()


def _hsic_with_itself(near: Neighbours) -> Tensor:
    values = near.weight * near.cosine
    return _hsic(near.n, near.place, values, values)


def _hsic(n: int, place: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """HSIC₁ of two matrices that are zero except at the same places, where they have `a` and `b`, (C,) each."""
    if not len(place):
        return a.sum()
    row = place // n
    column = place % n
    at, there = _found(place, column * n + row)
    mirrored = a * b[at]
    traced = mirrored[there].sum()
    columns = a.new_zeros(n)
    columns.index_add_(0, column, a)
    rows = b.new_zeros(n)
    rows.index_add_(0, row, b)
    totals = a.sum() * b.sum()
    totals = totals / ((n - 1) * (n - 2))
    crossed = 2 * (columns @ rows)
    crossed = crossed / (n - 2)
    total = traced + totals - crossed
    return total / (n * (n - 3))
