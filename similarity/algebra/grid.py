"""Moments of all pairs of a layer of X and a layer of Y, summed over batches and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from similarity.algebra.checks import check_rows
from similarity.algebra.moments import GridMoments

__all__ = ["GridSums", "grid_moments"]

SHIFT_ROWS = 64  # enough for a shift within a fraction of a deviation of the mean


class GridSums(NamedTuple):
    """Sums over rows about a fixed shift, x' = x − c, from which `GridMoments` follow exactly.

    About one shift they simply add, in place, over batches and over ranks; a shift near the mean keeps them
    from cancelling where a mean dwarfs its deviation. The cubic sums are there because a quartic sum about
    another shift needs them. Everything is float64.

    Attributes:
        n: ().
        shift_x: c of X, (L_x, d_x); shift_y: (L_y, d_y). Taken from the first rows that are added.
        sum_x: Σx', (L_x, d_x); sum_y: (L_y, d_y).
        xx: Σx'x'ᵀ, (L_x, d_x, d_x); yy: (L_y, d_y, d_y).
        xy: Σx'y'ᵀ of all pairs as one matrix, (L_x · d_x, L_y · d_y), so that a batch is one matrix product.
        c_xx: Σ‖x'‖²x', (L_x, d_x); c_yy: (L_y, d_y); c_xy: Σ‖x'‖²y', (L_x, L_y, d_y); c_yx: Σ‖y'‖²x', (L_y, L_x, d_x).
        q_xx: Σ‖x'‖⁴, (L_x,); q_yy: (L_y,); q_xy: Σ‖x'‖²‖y'‖², (L_x, L_y).
    """

    n: Tensor
    shift_x: Tensor
    shift_y: Tensor
    sum_x: Tensor
    sum_y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor
    c_xx: Tensor
    c_yy: Tensor
    c_xy: Tensor
    c_yx: Tensor
    q_xx: Tensor
    q_yy: Tensor
    q_xy: Tensor

    @classmethod
    def zeros(
        cls, layers_x: int, d_x: int, layers_y: int, d_y: int, device: torch.device | str | None = None
    ) -> GridSums:
        """The sums of no rows."""
        shapes: tuple[tuple[int, ...], ...] = (
            (),
            (layers_x, d_x),
            (layers_y, d_y),
            (layers_x, d_x),
            (layers_y, d_y),
            (layers_x, d_x, d_x),
            (layers_y, d_y, d_y),
            (layers_x * d_x, layers_y * d_y),
            (layers_x, d_x),
            (layers_y, d_y),
            (layers_x, layers_y, d_y),
            (layers_y, layers_x, d_x),
            (layers_x,),
            (layers_y,),
            (layers_x, layers_y),
        )
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add_(self, x: Tensor, y: Tensor, products: torch.dtype = torch.float64) -> GridSums:
        """Add paired rows in place, without a temporary of the grid's size: x (L_x, N, d_x), y (L_y, N, d_y).

        With `products` float32 the products of X with Y are taken in single precision, into a temporary.

        The first rows set the shift to the mean of a few of them, decided on the device: no number is read back.
        """
        rows = x.shape[1]
        if rows == 0:
            return self
        for shift, states in ((self.shift_x, x), (self.shift_y, y)):
            shift.copy_(torch.where(self.n == 0, states[:, :SHIFT_ROWS].mean(1, dtype=torch.float64), shift))
        x, y = _shifted(x, self.shift_x), _shifted(y, self.shift_y)
        flat_x, flat_y = x.flatten(1), y.flatten(1)
        norm_x, norm_y = torch.linalg.vecdot(x, x), torch.linalg.vecdot(y, y)
        self.n.add_(rows)
        self.sum_x.add_(x.sum(0))
        self.sum_y.add_(y.sum(0))
        self.xx.baddbmm_(x.permute(1, 2, 0), x.transpose(0, 1))
        self.yy.baddbmm_(y.permute(1, 2, 0), y.transpose(0, 1))
        if products == torch.float64:
            self.xy.addmm_(flat_x.T, flat_y)
        else:
            self.xy.add_(flat_x.to(products).T @ flat_y.to(products))
        self.c_xx.add_(torch.einsum("nl,nld->ld", norm_x, x))
        self.c_yy.add_(torch.einsum("nl,nld->ld", norm_y, y))
        self.c_xy.flatten(1).addmm_(norm_x.T, flat_y)
        self.c_yx.flatten(1).addmm_(norm_y.T, flat_x)
        self.q_xx.add_(norm_x.square().sum(0))
        self.q_yy.add_(norm_y.square().sum(0))
        self.q_xy.addmm_(norm_x.T, norm_y)
        return self

    def about(self, shift_x: Tensor, shift_y: Tensor, *, in_place: bool = False) -> GridSums:
        """The same sums about another shift, (L_x, d_x) and (L_y, d_y); exact but for rounding.

        With `in_place` in the memory of these, which then hold nothing of use.
        """
        (layers_x, d_x), (layers_y, d_y) = self.shift_x.shape, self.shift_y.shape
        n, sum_x, sum_y = self.n, self.sum_x, self.sum_y
        dx, dy = shift_x - self.shift_x, shift_y - self.shift_y
        # With x'' = x' − δ: ‖x''‖² = ‖x'‖² − 2 δ·x' + ‖δ‖²; every sum below is that, multiplied out.
        length_x, length_y = dx.square().sum(-1), dy.square().sum(-1)
        along_x, along_y = (dx * sum_x).sum(-1), (dy * sum_y).sum(-1)
        partly_x, partly_y = _trace(self.xx) - 2 * along_x, _trace(self.yy) - 2 * along_y
        total_x, total_y = partly_x + n * length_x, partly_y + n * length_y
        xx_dx, yy_dy = (self.xx @ dx[..., None])[..., 0], (self.yy @ dy[..., None])[..., 0]
        dx_xy = (dx[:, None] @ self.xy.view(layers_x, d_x, -1)).view(layers_x, layers_y, d_y)
        xy_dy = (self.xy.view(-1, layers_y, d_y).transpose(0, 1) @ dy[..., None]).view(layers_y, layers_x, d_x)
        rest_x, rest_y = sum_x - n * dx, sum_y - n * dy
        xx, yy, xy = (sums if in_place else sums.clone() for sums in (self.xx, self.yy, self.xy))
        return GridSums(
            n=n,
            shift_x=shift_x,
            shift_y=shift_y,
            sum_x=rest_x,
            sum_y=rest_y,
            xx=xx.sub_(_outer(dx, rest_x)).sub_(_outer(sum_x, dx)),
            yy=yy.sub_(_outer(dy, rest_y)).sub_(_outer(sum_y, dy)),
            xy=xy.addmm_(  # two rank-one corrections in one product
                torch.stack([dx.flatten(), sum_x.flatten()], 1),
                torch.stack([rest_y.flatten(), dy.flatten()]),
                alpha=-1,
            ),
            c_xx=self.c_xx - 2 * xx_dx + length_x[:, None] * sum_x - total_x[:, None] * dx,
            c_yy=self.c_yy - 2 * yy_dy + length_y[:, None] * sum_y - total_y[:, None] * dy,
            c_xy=self.c_xy - 2 * dx_xy + _pairs(length_x, sum_y) - _pairs(total_x, dy),
            c_yx=self.c_yx - 2 * xy_dy + _pairs(length_y, sum_x) - _pairs(total_y, dx),
            q_xx=self.q_xx + ((xx_dx - self.c_xx) * dx).sum(-1) * 4 + length_x * (partly_x + total_x),
            q_yy=self.q_yy + ((yy_dy - self.c_yy) * dy).sum(-1) * 4 + length_y * (partly_y + total_y),
            q_xy=self.q_xy
            + 2 * ((2 * dx_xy - self.c_xy) * dy).sum(-1)
            - 2 * (self.c_yx * dx).sum(-1).T
            + _pairs(partly_x, length_y)
            + _pairs(length_x, total_y),
        )

    def means(self) -> tuple[Tensor, Tensor]:
        """Means of X, (L_x, d_x), and of Y, (L_y, d_y); of no rows, the shift."""
        n = self.n.clamp(min=1)
        return self.shift_x + self.sum_x / n, self.shift_y + self.sum_y / n

    def moments(self, *, in_place: bool = False) -> GridMoments:
        """The centred moments of all rows added; with `in_place` in the memory of these sums, which they replace."""
        c = self.about(*self.means(), in_place=in_place)
        xy = c.xy.view(*c.shift_x.shape, *c.shift_y.shape).transpose(1, 2)
        return GridMoments(c.n, c.shift_x, c.shift_y, c.xx, c.yy, xy, c.q_xx, c.q_yy, c.q_xy)

    def pair(self, i: int, j: int) -> GridSums:
        """The sums of one layer of X and one of Y, by index: a 1 x 1 grid, a view of this one."""
        one, other, d_x, d_y = slice(i, i + 1), slice(j, j + 1), self.shift_x.shape[1], self.shift_y.shape[1]
        return GridSums(
            n=self.n,
            shift_x=self.shift_x[one],
            shift_y=self.shift_y[other],
            sum_x=self.sum_x[one],
            sum_y=self.sum_y[other],
            xx=self.xx[one],
            yy=self.yy[other],
            xy=self.xy[i * d_x : (i + 1) * d_x, j * d_y : (j + 1) * d_y],
            c_xx=self.c_xx[one],
            c_yy=self.c_yy[other],
            c_xy=self.c_xy[one, other],
            c_yx=self.c_yx[other, one],
            q_xx=self.q_xx[one],
            q_yy=self.q_yy[other],
            q_xy=self.q_xy[one, other],
        )

    def __add__(self, other: object) -> GridSums:
        """The sums of two disjoint sets of rows, about the shift of the first that has any."""
        if not isinstance(other, GridSums):
            return NotImplemented
        empty = self.n == 0
        shift_x = torch.where(empty, other.shift_x, self.shift_x)
        shift_y = torch.where(empty, other.shift_y, self.shift_y)
        a, b = self.about(shift_x, shift_y), other.about(shift_x, shift_y)
        summed = {name: getattr(a, name) + getattr(b, name) for name in self._fields if not name.startswith("shift")}
        return GridSums(**summed, shift_x=shift_x, shift_y=shift_y)


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


def _shifted(states: Tensor, shift: Tensor) -> Tensor:
    """(L, N, d) -> (N, L, d) in float64 less its shift, through a single buffer."""
    rows = torch.empty(states.shape[1], *shift.shape, dtype=torch.float64, device=states.device)
    return rows.copy_(states.transpose(0, 1)).sub_(shift)


def _trace(scatter: Tensor) -> Tensor:
    return scatter.diagonal(dim1=-2, dim2=-1).sum(-1)


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """Every entry of a (L,) times all of b (M, ...) -> (L, M, ...)."""
    return torch.tensordot(a, b, dims=0)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """abᵀ over the last axis: (..., d), (..., e) -> (..., d, e)."""
    return a[..., :, None] * b[..., None, :]
