"""Moments of the layers of a model and of all pairs of layers of two, summed over batches and ranks."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aligners.similarity.algebra.moments import (
    TILE,
    Device,
    GridMoments,
    check_rows,
    squares,
    zeros_of,
)

SHIFT_ROWS = (
    64  # enough rows for a shift within a fraction of a deviation from the mean
)


class Move(NamedTuple):
    """What a move of the shift by δ does to sums: with x'' = x' − δ, ‖x''‖² = ‖x'‖² − 2 δ·x' + ‖δ‖².

    Attributes:
        by: δ, (L, d).
        before: Σx', (L, d); after: Σx'', (L, d).
        length: ‖δ‖², (L,).
        partly: Σ(‖x'‖² − 2 δ·x'), (L,); total: Σ‖x''‖², (L,).
    """

    by: Tensor
    before: Tensor
    after: Tensor
    length: Tensor
    partly: Tensor
    total: Tensor


class ShiftedRows(NamedTuple):
    """Rows of a batch about the shift of their model, computed once for all models that it is compared with.

    Attributes:
        rows: x', (N, L, d) float64.
        squares: ‖x'‖², (N, L).
    """

    rows: Tensor
    squares: Tensor


class SideSums(NamedTuple):
    """Sums over rows of the layers of one model about a fixed shift, x' = x − c, in float64.

    About one shift they simply add, in place, over batches and over ranks. A shift near the mean keeps them
    from cancelling where a mean dwarfs its deviation. The cubic sums are there because a quartic sum about
    another shift needs them.

    Attributes:
        n: ().
        shift: c, (L, d), from the first rows that are added.
        sum: Σx', (L, d).
        xx: Σx'x'ᵀ, (L, d, d).
        cubic: Σ‖x'‖²x', (L, d).
        quartic: Σ‖x'‖⁴, (L,).
    """

    n: Tensor
    shift: Tensor
    sum: Tensor
    xx: Tensor
    cubic: Tensor
    quartic: Tensor

    @classmethod
    def zeros(cls, layers: int, d: int, device: Device = None) -> Self:
        """Return the sums of no rows."""
        row = (layers, d)
        scatter = (layers, d, d)
        quartic = (layers,)
        shapes = [(), row, row, scatter, row, quartic]
        return cls(*zeros_of(shapes, device))

    def add_(self, states: Tensor) -> ShiftedRows:
        """Add rows (L, N, d) in place, and return them about the shift.

        The first rows set the shift to the mean of a few of them, decided on the device: no number is read back.
        """
        if states.shape[1] == 0:
            return self.shifted(states)
        few = states[:, :SHIFT_ROWS]
        first = few.mean(1, dtype=torch.float64)
        empty = self.n == 0
        shift = first.where(empty, self.shift)
        self.shift.copy_(shift)

        shifted = self.shifted(states)
        rows, squares = shifted
        by_layer = rows.transpose(0, 1)
        transposed = rows.permute(1, 2, 0)
        cubic = torch.einsum("nl,nld->ld", squares, rows)
        fourth = squares.square()
        total = rows.sum(0)

        self.n.add_(len(rows))
        self.sum.add_(total)
        self.xx.baddbmm_(transposed, by_layer)
        self.cubic.add_(cubic)
        self.quartic.add_(fourth.sum(0))
        return shifted

    def shifted(self, states: Tensor) -> ShiftedRows:
        """Return rows (L, N, d) about the shift, through a single buffer."""
        n = states.shape[1]
        rows = self.shift.new_empty(n, *self.shift.shape)
        rows.copy_(states.transpose(0, 1))
        rows.sub_(self.shift)
        squares = torch.linalg.vecdot(rows, rows)
        return ShiftedRows(rows, squares)

    def mean(self) -> Tensor:
        """Return the mean, (L, d); the shift, if there are no rows."""
        n = self.n.clamp(min=1)
        return self.shift + self.sum / n

    def move(self, to: Tensor) -> Move:
        """Return what is needed to express these sums about another shift, (L, d)."""
        by = to - self.shift
        squared = by.square()
        length = squared.sum(-1)
        products = by * self.sum
        along = products.sum(-1)
        trace = squares(self.xx).sum(-1)
        partly = trace - 2 * along
        moved = self.n * by
        lengths = self.n * length
        return Move(
            by=by,
            before=self.sum,
            after=self.sum - moved,
            length=length,
            partly=partly,
            total=partly + lengths,
        )

    def move_(self, to: Tensor) -> None:
        """Express these sums about another shift, (L, d), in their own memory; exact but for rounding."""
        move = self.move(to)
        by = move.by
        along = self.xx @ by[..., None]
        along = along[..., 0]
        cubic = self._moved_cubic(along, move)
        quartic = self._moved_quartic(along, move)

        # two rank-one corrections
        left = torch.stack([by, move.before], 2)
        right = torch.stack([move.after, by], 1)
        self.xx.baddbmm_(left, right, alpha=-1)
        self.shift.copy_(to)
        self.sum.copy_(move.after)
        self.cubic.copy_(cubic)
        self.quartic.copy_(quartic)

    def _moved_cubic(self, along: Tensor, move: Move) -> Tensor:
        """Return Σ‖x''‖²x'', (L, d), from Σ(δ·x')x', (L, d)."""
        with_length = move.length[:, None] * move.before
        with_total = move.total[:, None] * move.by
        cubic = self.cubic - 2 * along
        cubic = cubic + with_length
        return cubic - with_total

    def _moved_quartic(self, along: Tensor, move: Move) -> Tensor:
        """Return Σ‖x''‖⁴, (L,), likewise."""
        crossed = (along - self.cubic) * move.by
        crossed = crossed.sum(-1)
        both = move.partly + move.total
        quartic = self.quartic + crossed * 4
        return quartic + move.length * both

    def of(self, layers: slice) -> Self:
        """Return the sums of some layers, as a view."""
        n, *sums = self
        some = [values[layers] for values in sums]
        return type(self)(n, *some)

    def clone(self) -> Self:
        """Copy the sums to other memory."""
        copies = map(torch.clone, self)
        return type(self)(*copies)

    def plus(self, other: Self) -> Self:
        """Add two sums about the same shift."""
        n, shift, *mine = self
        more, _, *others = other
        sums = map(torch.add, mine, others)
        return type(self)(n + more, shift, *sums)

    def common_shift(self, other: Self) -> Tensor:
        """Return the shift of these sums; if they have no rows, that of the others."""
        empty = self.n == 0
        return other.shift.where(empty, self.shift)


class CrossSums(NamedTuple):
    """Sums over paired rows of two models about the shifts of their `SideSums`, in float64.

    Attributes:
        xy: Σx'y'ᵀ of all pairs as one matrix, (L_x · d_x, L_y · d_y), so that a batch is one matrix product.
        cubic_xy: Σ‖x'‖²y', (L_x, L_y, d_y); cubic_yx: Σ‖y'‖²x', (L_y, L_x, d_x).
        quartic_xy: Σ‖x'‖²‖y'‖², (L_x, L_y).
    """

    xy: Tensor
    cubic_xy: Tensor
    cubic_yx: Tensor
    quartic_xy: Tensor

    @classmethod
    def zeros(cls, x: SideSums, y: SideSums) -> Self:
        """The sums of no rows, between models within which `x` and `y` are summed."""
        layers_x, d_x = x.shift.shape
        layers_y, d_y = y.shift.shape
        xy = (layers_x * d_x, layers_y * d_y)
        cubic_xy = (layers_x, layers_y, d_y)
        cubic_yx = (layers_y, layers_x, d_x)
        quartic = (layers_x, layers_y)
        shapes = [xy, cubic_xy, cubic_yx, quartic]
        zeros = zeros_of(shapes, x.n.device)
        return cls(*zeros)

    def add_(
        self, x: ShiftedRows, y: ShiftedRows, products: torch.dtype = torch.float64
    ) -> None:
        """Add paired rows in place, without a temporary of the grid's size.

        Args:
            x: rows of X about its shift.
            y: rows of Y about its.
            products: precision of the products of X with Y; float32 takes a small temporary.
        """
        rows_x = x.rows.flatten(1)
        rows_y = y.rows.flatten(1)
        if products == torch.float64:
            self.xy.addmm_(rows_x.T, rows_y)
        else:
            single_x = x.rows.to(products)
            self._add_products(single_x, rows_y.to(products))
        squares_x = x.squares.T
        squares_y = y.squares.T
        cubic_xy = self.cubic_xy.flatten(1)  # a view
        cubic_yx = self.cubic_yx.flatten(1)
        cubic_xy.addmm_(squares_x, rows_y)
        cubic_yx.addmm_(squares_y, rows_x)
        self.quartic_xy.addmm_(squares_x, y.squares)

    def _add_products(self, x: Tensor, y: Tensor) -> None:
        """Add the products of X (N, L_x, d_x) with Y (N, L_y · d_y), some columns at a time."""
        width = x.shape[2]
        bytes_of_a_column = self.xy.element_size() * width
        some = max(TILE // bytes_of_a_column, 1)
        columns = y.split(some, 1)
        layers = x.unbind(1)
        sums_of_layers = self.xy.split(width)
        for rows, sums in zip(layers, sums_of_layers, strict=True):
            parts = sums.split(some, 1)
            for part, of_y in zip(parts, columns, strict=True):
                part.add_(rows.T @ of_y)

    def move_(self, x: SideSums, y: SideSums, to_x: Tensor, to_y: Tensor) -> None:
        """Express these sums about other shifts, in their own memory.

        Args:
            x: the sums within X, about the old shift; they are to be moved after this call.
            y: within Y, likewise.
            to_x: the new shift of X, (L_x, d_x).
            to_y: of Y, (L_y, d_y).
        """
        a = x.move(to_x)
        b = y.move(to_y)
        along_x = self._along_x(a.by)
        along_y = self._along_y(b.by)
        cubic_xy = _moved_cubic(self.cubic_xy, along_x, a, b)
        cubic_yx = _moved_cubic(self.cubic_yx, along_y, b, a)
        quartic = self._moved_quartic(along_x, a, b)

        # two rank-one corrections in one product
        left = torch.stack([a.by, a.before])
        right = torch.stack([b.after, b.by])
        columns = left.flatten(1).T
        self.xy.addmm_(columns, right.flatten(1), alpha=-1)
        self.cubic_xy.copy_(cubic_xy)
        self.cubic_yx.copy_(cubic_yx)
        self.quartic_xy.copy_(quartic)

    def _along_x(self, by: Tensor) -> Tensor:
        """Return Σ(δ·x')y' of all pairs for δ (L_x, d_x), (L_x, L_y, d_y)."""
        of_layers = self.xy.view(*by.shape, -1)
        along = by[:, None] @ of_layers
        return along.view(self.cubic_xy.shape)

    def _along_y(self, by: Tensor) -> Tensor:
        """Return Σ(δ·y')x' of all pairs for δ (L_y, d_y), (L_y, L_x, d_x)."""
        of_layers = self.xy.view(-1, *by.shape)
        by_layer = of_layers.transpose(0, 1)
        along = by_layer @ by[..., None]
        return along.view(self.cubic_yx.shape)

    def _moved_quartic(self, along_x: Tensor, a: Move, b: Move) -> Tensor:
        """Return Σ‖x''‖²‖y''‖² of all pairs, (L_x, L_y)."""
        of_y = 2 * along_x - self.cubic_xy
        of_y = of_y * b.by
        of_y = of_y.sum(-1)
        of_x = self.cubic_yx * a.by
        of_x = of_x.sum(-1).T
        quartic = self.quartic_xy + 2 * of_y
        quartic = quartic - 2 * of_x
        partly = _pairs(a.partly, b.length)
        quartic = quartic + partly
        return quartic + _pairs(a.length, b.total)

    def pair(self, i: int, j: int) -> Self:
        """Return the sums of one layer of X and one of Y, by index: a 1 x 1 grid, as a view."""
        d_x = self.cubic_yx.shape[2]
        d_y = self.cubic_xy.shape[2]
        one = slice(i, i + 1)
        other = slice(j, j + 1)
        rows = self.xy.narrow(0, i * d_x, d_x)
        return type(self)(
            xy=rows.narrow(1, j * d_y, d_y),
            cubic_xy=self.cubic_xy[one, other],
            cubic_yx=self.cubic_yx[other, one],
            quartic_xy=self.quartic_xy[one, other],
        )


def _moved_cubic(cubic: Tensor, along: Tensor, a: Move, b: Move) -> Tensor:
    """Return Σ‖x''‖²y'' of all pairs, from Σ‖x'‖²y' and Σ(δ·x')y', each (L_x, L_y, d_y)."""
    cubic = cubic - 2 * along
    cubic = cubic + _pairs(a.length, b.before)
    total = _pairs(a.total, b.by)
    return cubic - total


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """Multiply every entry of a (L,) by all of b (M, ...) -> (L, M, ...)."""
    return torch.tensordot(a, b, dims=0)


class GridSums(NamedTuple):
    """Sums over rows within X, within Y and between them, from which `GridMoments` follow exactly.

    Attributes:
        x: of X; y: of Y.
        cross: of both, about the shifts that these have.
    """

    x: SideSums
    y: SideSums
    cross: CrossSums

    @classmethod
    def zeros(
        cls, layers_x: int, d_x: int, layers_y: int, d_y: int, device: Device = None
    ) -> Self:
        """The sums of no rows."""
        x = SideSums.zeros(layers_x, d_x, device)
        y = SideSums.zeros(layers_y, d_y, device)
        cross = CrossSums.zeros(x, y)
        return cls(x, y, cross)

    def add_(self, x: Tensor, y: Tensor, products: torch.dtype = torch.float64) -> Self:
        """Add paired rows in place: x (L_x, N, d_x), y (L_y, N, d_y); `products` as in `CrossSums.add_`."""
        rows_x = self.x.add_(x)
        rows_y = self.y.add_(y)
        self.cross.add_(rows_x, rows_y, products)
        return self

    def about(self, to_x: Tensor, to_y: Tensor) -> Self:
        """Return the same sums about other shifts, (L_x, d_x) and (L_y, d_y)."""
        x = self.x.clone()
        y = self.y.clone()
        copies = map(torch.clone, self.cross)
        cross = CrossSums(*copies)
        cross.move_(x, y, to_x, to_y)
        x.move_(to_x)
        y.move_(to_y)
        return type(self)(x, y, cross)

    def moments(self) -> GridMoments:
        """Return the centred moments of all rows added."""
        mean_x = self.x.mean()
        mean_y = self.y.mean()
        sums = self.about(mean_x, mean_y)
        return sums.centred()

    def centred(self) -> GridMoments:
        """Return the moments, in the memory of these sums, if they are already about the means."""
        x, y, cross = self
        shape = *x.shift.shape, *y.shift.shape
        by_pair = cross.xy.view(shape)
        return GridMoments(
            n=x.n,
            mean_x=x.shift,
            mean_y=y.shift,
            xx=x.xx,
            yy=y.xx,
            xy=by_pair.transpose(1, 2),
            q_xx=x.quartic,
            q_yy=y.quartic,
            q_xy=cross.quartic_xy,
        )

    def pair(self, i: int, j: int) -> Self:
        """Return the sums of one layer of X and one of Y, by index: a 1 x 1 grid, as a view."""
        one = slice(i, i + 1)
        other = slice(j, j + 1)
        x = self.x.of(one)
        y = self.y.of(other)
        cross = self.cross.pair(i, j)
        return type(self)(x, y, cross)

    def __add__(self, other: object) -> Self:
        """Add the sums of two disjoint sets of rows, about the shift of the first that has any."""
        if not isinstance(other, GridSums):
            return NotImplemented
        to_x = self.x.common_shift(other.x)
        to_y = self.y.common_shift(other.y)
        a = self.about(to_x, to_y)
        b = other.about(to_x, to_y)
        x = a.x.plus(b.x)
        y = a.y.plus(b.y)
        sums = map(torch.add, a.cross, b.cross)
        cross = CrossSums(*sums)
        return type(self)(x, y, cross)


def grid_moments(x: Tensor, y: Tensor) -> GridMoments:
    """Compute moments of paired rows for all layer pairs.

    Args:
        x: (L_x, N, d_x) states of X.
        y: (L_y, N, d_y) states of Y, row by row the partners of `x`. `grid_moments(x, x)` sets a model against itself.

    Raises:
        ValueError: rows that are not paired, or not finite.
    """
    check_rows(x, y)
    layers_x, _, d_x = x.shape
    layers_y, _, d_y = y.shape
    sizes = layers_x, d_x, layers_y, d_y
    sums = GridSums.zeros(*sizes, x.device)
    sums.add_(x.detach(), y.detach())
    return sums.moments()


def of_moments(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a formula of `GridMoments` accept paired rows, x (L_x, N, d_x) and y (L_y, N, d_y), instead."""

    @wraps(formula)
    def either(*given: Any, **options: Any) -> Tensor:
        if len(given) == 1:
            return formula(*given, **options)
        moments = grid_moments(*given)
        return formula(moments, **options)

    return either
