"""Moments within one model: sums over the rows of its layers, over batches and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Move", "SideSums", "common_shift", "squared_lengths"]

SHIFT_ROWS = 64  # enough for a shift within a fraction of a deviation of the mean


class Move(NamedTuple):
    """What a move of the shift by δ does to sums: with x'' = x' − δ, ‖x''‖² = ‖x'‖² − 2 δ·x' + ‖δ‖².

    Attributes:
        n: number of rows, ().
        to: the new shift, (L, d).
        by: δ, (L, d).
        before: Σx', (L, d); after: Σx'', (L, d).
        length: ‖δ‖², (L,).
        partly: Σ(‖x'‖² − 2 δ·x'), (L,); total: Σ‖x''‖², (L,).
    """

    n: Tensor
    to: Tensor
    by: Tensor
    before: Tensor
    after: Tensor
    length: Tensor
    partly: Tensor
    total: Tensor


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
    def zeros(cls, layers: int, d: int, device: torch.device | str | None = None) -> SideSums:
        """The sums of no rows."""
        shapes: tuple[tuple[int, ...], ...] = ((), (layers, d), (layers, d), (layers, d, d), (layers, d), (layers,))
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add_(self, states: Tensor) -> Tensor:
        """Add rows (L, N, d) in place, and return them about the shift, (N, L, d) float64.

        The first rows set the shift to the mean of a few of them, decided on the device: no number is read back.
        """
        if states.shape[1] == 0:
            return self.shifted(states)
        first = states[:, :SHIFT_ROWS].mean(1, dtype=torch.float64)
        self.shift.copy_(torch.where(self.n == 0, first, self.shift))
        rows = self.shifted(states)
        norms = squared_lengths(rows)
        self.n.add_(len(rows))
        self.sum.add_(rows.sum(0))
        self.xx.baddbmm_(rows.permute(1, 2, 0), rows.transpose(0, 1))
        self.cubic.add_(torch.einsum("nl,nld->ld", norms, rows))
        self.quartic.add_(norms.square().sum(0))
        return rows

    def shifted(self, states: Tensor) -> Tensor:
        """(L, N, d) -> (N, L, d) in float64 less the shift, through a single buffer."""
        rows = torch.empty(states.shape[1], *self.shift.shape, dtype=torch.float64, device=states.device)
        return rows.copy_(states.transpose(0, 1)).sub_(self.shift)

    def mean(self) -> Tensor:
        """The mean, (L, d); of no rows, the shift."""
        return self.shift + self.sum / self.n.clamp(min=1)

    def move(self, shift: Tensor) -> Move:
        """What it takes to express these sums about another shift, (L, d)."""
        by = shift - self.shift
        length, along = by.square().sum(-1), (by * self.sum).sum(-1)
        partly = self.xx.diagonal(dim1=-2, dim2=-1).sum(-1) - 2 * along
        return Move(self.n, shift, by, self.sum, self.sum - self.n * by, length, partly, partly + self.n * length)

    def moved(self, move: Move, *, in_place: bool = False) -> SideSums:
        """The same sums about another shift; exact but for rounding.

        Args:
            move: these sums' own.
            in_place: in the memory of these sums, which are lost.
        """
        by, before, after, length = move.by, move.before, move.after, move.length
        along = (self.xx @ by[..., None])[..., 0]
        cubic = self.cubic - 2 * along + length[:, None] * before - move.total[:, None] * by
        quartic = self.quartic + ((along - self.cubic) * by).sum(-1) * 4 + length * (move.partly + move.total)
        xx = self.xx if in_place else self.xx.clone()
        xx.baddbmm_(torch.stack([by, before], 2), torch.stack([after, by], 1), alpha=-1)  # two rank-one corrections
        return SideSums(move.n, move.to, after, xx, cubic, quartic)

    def of(self, layers: slice) -> SideSums:
        """The sums of some layers, a view of these."""
        return SideSums(self.n, *(each[layers] for each in self[1:]))

    def __add__(self, other: object) -> SideSums:
        """The sums of two disjoint sets of rows, about the shift of the first that has any."""
        if not isinstance(other, SideSums):
            return NotImplemented
        shift = common_shift(self, other)
        a, b = self.about(shift), other.about(shift)
        return SideSums(a.n + b.n, shift, *(one + two for one, two in zip(a[2:], b[2:], strict=True)))

    def about(self, shift: Tensor) -> SideSums:
        """The same sums about another shift; these, if it is their own."""
        return self if shift is self.shift else self.moved(self.move(shift))


def common_shift(a: SideSums, b: SideSums) -> Tensor:
    """The shift of the first that has rows; the very object where both have one and the same."""
    return a.shift if a.shift is b.shift else torch.where(a.n == 0, b.shift, a.shift)


def squared_lengths(rows: Tensor) -> Tensor:
    """Squared lengths of rows, (N, L, d) -> (N, L)."""
    return torch.linalg.vecdot(rows, rows)
