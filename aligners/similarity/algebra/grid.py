"""Moments of all pairs of a layer of X and a layer of Y, summed over batches and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aligners.similarity.algebra.checks import check_rows
from aligners.similarity.algebra.moments import GridMoments
from aligners.similarity.algebra.sides import Move, SideSums, common_shift, squared_lengths
from aligners.similarity.algebra.tiles import TILE

__all__ = ["CrossSums", "GridSums", "grid_moments"]


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
    def zeros(
        cls, layers_x: int, d_x: int, layers_y: int, d_y: int, device: torch.device | str | None = None
    ) -> CrossSums:
        """The sums of no rows."""
        shapes = (
            (layers_x * d_x, layers_y * d_y),
            (layers_x, layers_y, d_y),
            (layers_y, layers_x, d_x),
            (layers_x, layers_y),
        )
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add_(self, x: Tensor, y: Tensor, products: torch.dtype = torch.float64) -> None:
        """Add paired rows about their shifts in place, without a temporary of the grid's size.

        Args:
            x: (N, L_x, d_x) float64.
            y: (N, L_y, d_y) float64.
            products: precision of the products of X with Y; float32 takes a small temporary.
        """
        flat_x, flat_y = x.flatten(1), y.flatten(1)
        norm_x, norm_y = squared_lengths(x), squared_lengths(y)
        if products == torch.float64:
            self.xy.addmm_(flat_x.T, flat_y)
        else:
            some = max(1, TILE // (x.element_size() * x.shape[2]))  # columns, for a small temporary
            columns = flat_y.to(products).split(some, 1)
            for layer, rows in zip(self.xy.split(x.shape[2]), flat_x.to(products).split(x.shape[2], 1), strict=True):
                for part, single in zip(layer.split(some, 1), columns, strict=True):
                    part.add_(rows.T @ single)
        self.cubic_xy.flatten(1).addmm_(norm_x.T, flat_y)
        self.cubic_yx.flatten(1).addmm_(norm_y.T, flat_x)
        self.quartic_xy.addmm_(norm_x.T, norm_y)

    def moved(self, x: Move, y: Move, *, in_place: bool = False) -> CrossSums:
        """The same sums about other shifts; exact but for rounding.

        Args:
            x: the move of X's sums.
            y: of Y's.
            in_place: in the memory of these sums, which are lost.
        """
        (layers_x, d_x), (layers_y, d_y) = x.by.shape, y.by.shape
        along_x = (x.by[:, None] @ self.xy.view(layers_x, d_x, -1)).view(layers_x, layers_y, d_y)
        along_y = (self.xy.view(-1, layers_y, d_y).transpose(0, 1) @ y.by[..., None]).view(layers_y, layers_x, d_x)
        cubic_xy = self.cubic_xy - 2 * along_x + _pairs(x.length, y.before) - _pairs(x.total, y.by)
        cubic_yx = self.cubic_yx - 2 * along_y + _pairs(y.length, x.before) - _pairs(y.total, x.by)
        quartic = (
            self.quartic_xy
            + 2 * ((2 * along_x - self.cubic_xy) * y.by).sum(-1)
            - 2 * (self.cubic_yx * x.by).sum(-1).T
            + _pairs(x.partly, y.length)
            + _pairs(x.length, y.total)
        )
        xy = self.xy if in_place else self.xy.clone()
        xy.addmm_(  # two rank-one corrections in one product
            torch.stack([x.by.flatten(), x.before.flatten()], 1),
            torch.stack([y.after.flatten(), y.by.flatten()]),
            alpha=-1,
        )
        return CrossSums(xy, cubic_xy, cubic_yx, quartic)

    def pair(self, i: int, j: int) -> CrossSums:
        """The sums of one layer of X and one of Y, by index: a 1 x 1 grid, a view of this one."""
        one, other, d_x, d_y = slice(i, i + 1), slice(j, j + 1), self.cubic_yx.shape[2], self.cubic_xy.shape[2]
        xy = self.xy[i * d_x : (i + 1) * d_x, j * d_y : (j + 1) * d_y]
        return CrossSums(xy, self.cubic_xy[one, other], self.cubic_yx[other, one], self.quartic_xy[one, other])


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
        cls, layers_x: int, d_x: int, layers_y: int, d_y: int, device: torch.device | str | None = None
    ) -> GridSums:
        """The sums of no rows."""
        x, y = SideSums.zeros(layers_x, d_x, device), SideSums.zeros(layers_y, d_y, device)
        return cls(x, y, CrossSums.zeros(layers_x, d_x, layers_y, d_y, device))

    @property
    def n(self) -> Tensor:
        """Number of rows, ()."""
        return self.x.n

    def add_(self, x: Tensor, y: Tensor, products: torch.dtype = torch.float64) -> GridSums:
        """Add paired rows in place: x (L_x, N, d_x), y (L_y, N, d_y); `products` as in `CrossSums.add_`."""
        self.cross.add_(self.x.add_(x), self.y.add_(y), products)
        return self

    def about(self, shift_x: Tensor, shift_y: Tensor) -> GridSums:
        """The same sums about other shifts, (L_x, d_x) and (L_y, d_y); these, if they are their own."""
        if shift_x is self.x.shift and shift_y is self.y.shift:
            return self
        x, y = self.x.move(shift_x), self.y.move(shift_y)
        return GridSums(self.x.moved(x), self.y.moved(y), self.cross.moved(x, y))

    def means(self) -> tuple[Tensor, Tensor]:
        """Means of X, (L_x, d_x), and of Y, (L_y, d_y); of no rows, the shift."""
        return self.x.mean(), self.y.mean()

    def moments(self) -> GridMoments:
        """The centred moments of all rows added."""
        return self.about(*self.means()).centred()

    def centred(self) -> GridMoments:
        """The moments, in the memory of these sums, if they are about the means already."""
        (x, y, cross), shapes = self, (*self.x.shift.shape, *self.y.shift.shape)
        xy = cross.xy.view(shapes).transpose(1, 2)
        return GridMoments(x.n, x.shift, y.shift, x.xx, y.xx, xy, x.quartic, y.quartic, cross.quartic_xy)

    def pair(self, i: int, j: int) -> GridSums:
        """The sums of one layer of X and one of Y, by index: a 1 x 1 grid, a view of this one."""
        return GridSums(self.x.of(slice(i, i + 1)), self.y.of(slice(j, j + 1)), self.cross.pair(i, j))

    def __add__(self, other: object) -> GridSums:
        """The sums of two disjoint sets of rows, about the shift of the first that has any."""
        if not isinstance(other, GridSums):
            return NotImplemented
        shifts = common_shift(self.x, other.x), common_shift(self.y, other.y)
        a, b = self.about(*shifts), other.about(*shifts)
        cross = CrossSums(*(one + two for one, two in zip(a.cross, b.cross, strict=True)))
        return GridSums(a.x + b.x, a.y + b.y, cross)


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


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """Every entry of a (L,) times all of b (M, ...) -> (L, M, ...)."""
    return torch.tensordot(a, b, dims=0)
