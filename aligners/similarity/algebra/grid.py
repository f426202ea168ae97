"""Moments of the layers of a model and of all pairs of layers of two, summed over batches and ranks."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aligners.similarity.algebra.moments import TILE, GridMoments, check_rows

SHIFT_ROWS = 64  # enough for a shift within a fraction of a deviation of the mean


class Move(NamedTuple):
    """What a move of the shift by δ does to sums: with x'' = x' − δ, ‖x''‖² = ‖x'‖² − 2 δ·x' + ‖δ‖².

    Attributes:
        by: δ, (L, d).
        after: Σx'', (L, d).
        length: ‖δ‖², (L,).
        partly: Σ(‖x'‖² − 2 δ·x'), (L,); total: Σ‖x''‖², (L,).
    """

    by: Tensor
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

    About one shift they simply add, in place, over batches and over ranks; a shift near the mean keeps them
    from cancelling where a mean dwarfs its deviation. The cubic sums are there because a quartic sum about
    another shift needs them.

    Attributes:
        n: ().
        shift: c, (L, d). Taken from the first rows that are added.
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
    def zeros(
        cls, layers: int, d: int, device: torch.device | str | None = None
    ) -> Self:
        """The sums of no rows."""
        shapes: tuple[tuple[int, ...], ...] = (
            (),
            (layers, d),
            (layers, d),
            (layers, d, d),
            (layers, d),
            (layers,),
        )
        return cls(
            *(
                torch.zeros(shape, dtype=torch.float64, device=device)
                for shape in shapes
            )
        )

    def add_(self, states: Tensor) -> ShiftedRows:
        """Add rows (L, N, d) in place, and return them about the shift.

        The first rows set the shift to the mean of a few of them, decided on the device: no number is read back.
        """
        if states.shape[1] == 0:
            return self.shifted(states)
        first = states[:, :SHIFT_ROWS].mean(1, dtype=torch.float64)
        self.shift.copy_(torch.where(self.n == 0, first, self.shift))
        shifted = self.shifted(states)
        rows, squares = shifted
        self.n.add_(len(rows))
        self.sum.add_(rows.sum(0))
        self.xx.baddbmm_(rows.permute(1, 2, 0), rows.transpose(0, 1))
        self.cubic.add_(torch.einsum("nl,nld->ld", squares, rows))
        self.quartic.add_(squares.square().sum(0))
        return shifted

    def shifted(self, states: Tensor) -> ShiftedRows:
        """Rows (L, N, d) about the shift, through a single buffer."""
        rows = torch.empty(
            states.shape[1],
            *self.shift.shape,
            dtype=torch.float64,
            device=states.device,
        )
        rows.copy_(states.transpose(0, 1)).sub_(self.shift)
        return ShiftedRows(rows, torch.linalg.vecdot(rows, rows))

    def mean(self) -> Tensor:
        """The mean, (L, d); of no rows, the shift."""
        return self.shift + self.sum / self.n.clamp(min=1)

    def move(self, to: Tensor) -> Move:
        """What it takes to express these sums about another shift, (L, d)."""
        by = to - self.shift
        length, along = by.square().sum(-1), (by * self.sum).sum(-1)
        partly = self.xx.diagonal(dim1=-2, dim2=-1).sum(-1) - 2 * along
        return Move(
            by, self.sum - self.n * by, length, partly, partly + self.n * length
        )

    def move_(self, to: Tensor) -> None:
        """Express these sums about another shift, (L, d), in their own memory; exact but for rounding."""
        by, after, length, partly, total = self.move(to)
        along = (self.xx @ by[..., None])[..., 0]
        cubic = (
            self.cubic - 2 * along + length[:, None] * self.sum - total[:, None] * by
        )
        quartic = (
            self.quartic
            + ((along - self.cubic) * by).sum(-1) * 4
            + length * (partly + total)
        )
        # two rank-one corrections
        self.xx.baddbmm_(
            torch.stack([by, self.sum], 2), torch.stack([after, by], 1), alpha=-1
        )
        for old, moved in zip(
            self, (self.n, to, after, self.xx, cubic, quartic), strict=True
        ):
            old.copy_(moved)

    def of(self, layers: slice) -> Self:
        """The sums of some layers, a view of these."""
        return type(self)(self.n, *(sums[layers] for sums in self[1:]))


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
        """The sums of no rows, of models within which these are summed."""
        (layers_x, d_x), (layers_y, d_y) = x.shift.shape, y.shift.shape
        of_pairs = (
            (layers_x, layers_y, d_y),
            (layers_y, layers_x, d_x),
            (layers_x, layers_y),
        )
        shapes = ((layers_x * d_x, layers_y * d_y), *of_pairs)
        return cls(
            *(
                torch.zeros(shape, dtype=torch.float64, device=x.n.device)
                for shape in shapes
            )
        )

    def add_(
        self, x: ShiftedRows, y: ShiftedRows, products: torch.dtype = torch.float64
    ) -> None:
        """Add paired rows in place, without a temporary of the grid's size.

        Args:
            x: rows of X about its shift.
            y: rows of Y about its.
            products: precision of the products of X with Y; float32 takes a small temporary.
        """
        flat_x, flat_y, width = x.rows.flatten(1), y.rows.flatten(1), x.rows.shape[2]
        if products == torch.float64:
            self.xy.addmm_(flat_x.T, flat_y)
        else:
            some = max(
                1, TILE // (flat_x.element_size() * width)
            )  # columns, for a small temporary
            columns = flat_y.to(products).split(some, 1)
            for layer, rows in zip(
                self.xy.split(width), flat_x.to(products).split(width, 1), strict=True
            ):
                for part, single in zip(layer.split(some, 1), columns, strict=True):
                    part.add_(rows.T @ single)
        self.cubic_xy.flatten(1).addmm_(x.squares.T, flat_y)
        self.cubic_yx.flatten(1).addmm_(y.squares.T, flat_x)
        self.quartic_xy.addmm_(x.squares.T, y.squares)

    def move_(self, x: SideSums, y: SideSums, to_x: Tensor, to_y: Tensor) -> None:
        """Express these sums about other shifts, in their own memory.

        Args:
            x: the sums within X, about the old shift; they are to be moved after this call.
            y: within Y, likewise.
            to_x: the new shift of X, (L_x, d_x).
            to_y: of Y, (L_y, d_y).
        """
        (layers_x, d_x), (layers_y, d_y) = to_x.shape, to_y.shape
        a, b = x.move(to_x), y.move(to_y)
        along_x = (a.by[:, None] @ self.xy.view(layers_x, d_x, -1)).view(
            layers_x, layers_y, d_y
        )
        along_y = (
            self.xy.view(-1, layers_y, d_y).transpose(0, 1) @ b.by[..., None]
        ).view(layers_y, layers_x, d_x)
        cubic_xy = (
            self.cubic_xy
            - 2 * along_x
            + _pairs(a.length, y.sum)
            - _pairs(a.total, b.by)
        )
        cubic_yx = (
            self.cubic_yx
            - 2 * along_y
            + _pairs(b.length, x.sum)
            - _pairs(b.total, a.by)
        )
        quartic = (
            self.quartic_xy
            + 2 * ((2 * along_x - self.cubic_xy) * b.by).sum(-1)
            - 2 * (self.cubic_yx * a.by).sum(-1).T
            + _pairs(a.partly, b.length)
            + _pairs(a.length, b.total)
        )
        self.xy.addmm_(  # two rank-one corrections in one product
            torch.stack([a.by.flatten(), x.sum.flatten()], 1),
            torch.stack([b.after.flatten(), b.by.flatten()]),
            alpha=-1,
        )
        for old, moved in zip(self[1:], (cubic_xy, cubic_yx, quartic), strict=True):
            old.copy_(moved)

    def pair(self, i: int, j: int) -> Self:
        """The sums of one layer of X and one of Y, by index: a 1 x 1 grid, a view of this one."""
        one, other, d_x, d_y = (
            slice(i, i + 1),
            slice(j, j + 1),
            self.cubic_yx.shape[2],
            self.cubic_xy.shape[2],
        )
        xy = self.xy[i * d_x : (i + 1) * d_x, j * d_y : (j + 1) * d_y]
        return type(self)(
            xy,
            self.cubic_xy[one, other],
            self.cubic_yx[other, one],
            self.quartic_xy[one, other],
        )


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
        cls,
        layers_x: int,
        d_x: int,
        layers_y: int,
        d_y: int,
        device: torch.device | str | None = None,
    ) -> Self:
        """The sums of no rows."""
        x, y = (
            SideSums.zeros(layers_x, d_x, device),
            SideSums.zeros(layers_y, d_y, device),
        )
        return cls(x, y, CrossSums.zeros(x, y))

    def add_(self, x: Tensor, y: Tensor, products: torch.dtype = torch.float64) -> Self:
        """Add paired rows in place: x (L_x, N, d_x), y (L_y, N, d_y); `products` as in `CrossSums.add_`."""
        self.cross.add_(self.x.add_(x), self.y.add_(y), products)
        return self

    def about(self, to_x: Tensor, to_y: Tensor) -> Self:
        """The same sums about other shifts, (L_x, d_x) and (L_y, d_y)."""
        x, y = (SideSums(*(value.clone() for value in side)) for side in self[:2])
        cross = CrossSums(*(value.clone() for value in self.cross))
        cross.move_(x, y, to_x, to_y)
        x.move_(to_x)
        y.move_(to_y)
        return type(self)(x, y, cross)

    def moments(self) -> GridMoments:
        """The centred moments of all rows added."""
        return self.about(self.x.mean(), self.y.mean()).centred()

    def centred(self) -> GridMoments:
        """The moments, in the memory of these sums, if they are about the means already."""
        (x, y, cross), shapes = self, (*self.x.shift.shape, *self.y.shift.shape)
        xy = cross.xy.view(shapes).transpose(1, 2)
        return GridMoments(
            x.n,
            x.shift,
            y.shift,
            x.xx,
            y.xx,
            xy,
            x.quartic,
            y.quartic,
            cross.quartic_xy,
        )

    def pair(self, i: int, j: int) -> Self:
        """The sums of one layer of X and one of Y, by index: a 1 x 1 grid, a view of this one."""
        return type(self)(
            self.x.of(slice(i, i + 1)),
            self.y.of(slice(j, j + 1)),
            self.cross.pair(i, j),
        )

    def __add__(self, other: object) -> Self:
        """The sums of two disjoint sets of rows, about the shift of the first that has any."""
        if not isinstance(other, GridSums):
            return NotImplemented
        to = [
            torch.where(a.n == 0, b.shift, a.shift)
            for a, b in zip(self[:2], other[:2], strict=True)
        ]
        a, b = self.about(*to), other.about(*to)
        x, y = (
            SideSums(s.n + t.n, s.shift, *map(torch.add, s[2:], t[2:]))
            for s, t in zip(a[:2], b[:2], strict=True)
        )
        return type(self)(x, y, CrossSums(*map(torch.add, a.cross, b.cross)))


def grid_moments(x: Tensor, y: Tensor) -> GridMoments:
    """Moments of paired rows for all layer pairs.

    Args:
        x: (L_x, N, d_x) states of X.
        y: (L_y, N, d_y) states of Y, row by row the partners of `x`. `grid_moments(x, x)` sets a model against itself.

    Raises:
        ValueError: rows that are not paired, or not finite.
    """
    check_rows(x, y)
    sums = GridSums.zeros(x.shape[0], x.shape[2], y.shape[0], y.shape[2], x.device)
    return sums.add_(x.detach(), y.detach()).moments()


def of_moments(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a formula of `GridMoments` take paired rows, x (L_x, N, d_x) and y (L_y, N, d_y), in their place."""

    @wraps(formula)
    def either(*given: Any, **options: Any) -> Tensor:
        return formula(given[0] if len(given) == 1 else grid_moments(*given), **options)

    return either


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """Every entry of a (L,) times all of b (M, ...) -> (L, M, ...)."""
    return torch.tensordot(a, b, dims=0)
