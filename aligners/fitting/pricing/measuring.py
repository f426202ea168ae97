"""What is measured of a map on held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.fitting.pricing.memory import Held
from aligners.fitting.pricing.stretch import stretches

__all__ = ["Way", "mapped_by", "measure", "squares_of"]

AT_ONCE = 8192  # rows that are mapped together


class Way(NamedTuple):
    """A map, and the map back that belongs to it, if there is one."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor] | None


def measure(way: Way, held: Held, mean_x: Tensor, mean_y: Tensor, stretched: int) -> dict[str, Tensor]:
    """Measure a map: FVU, also by seen and unseen types; round trip ‖g⁻¹(g(x)) − x‖∞ / ‖x‖∞; quantiles of stretches.

    Args:
        way: the map.
        held: the rows.
        mean_x: (S, d_x) mean of the source on the fitting rows.
        mean_y: (S, d_y) mean of the target there.
        stretched: how many of the rows, evenly spread, the Jacobian is taken at.

    Returns:
        Name -> (S,); not finite where there is nothing to measure, or the map overflows.
    """
    x = held.x
    mapped, squares, totals = squares_of(way, held, mean_y)
    unseen = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device) if held.unseen is None else held.unseen
    found = {"fvu": squares.sum(1) / totals.sum(1)}
    for name, part in (("fvu_seen", ~unseen), ("fvu_unseen", unseen)):
        found[name] = squares[:, part].sum(1) / totals[:, part].sum(1)  # 0/0 without such rows
    if way.back is not None:
        gaps = [
            (way.back(there) - own).abs().amax((1, 2))
            for there, own in zip(mapped.split(AT_ONCE, 1), x.split(AT_ONCE, 1), strict=True)
        ]
        found["round_trip"] = torch.stack(gaps).nan_to_num(torch.inf).amax(0) / x.abs().amax((1, 2))
    if stretched:
        sample = x[:, :: max(1, x.shape[1] // stretched)][:, :stretched]
        spread = ((x.double() - mean_x[:, None]).square().mean((1, 2)) / totals.mean(1) * held.y.shape[-1]).sqrt()
        low, median, high = stretches(way.there, sample, spread)
        found |= {"stretch_low": low, "stretch_median": median, "stretch_high": high}
    return found


def squares_of(way: Way, held: Held, mean_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Map rows.

    Args:
        way: the map.
        held: the rows.
        mean_y: (S, d_y) mean of the target on the fitting rows.

    Returns:
        g(x) (S, N, d_y); the squared error of each row, and its squared distance from the mean, both (S, N) in float64.
    """
    mapped = mapped_by(way, held.x)
    squares = (mapped - held.y).double().square().sum(-1)
    return mapped, squares, (held.y.double() - mean_y[:, None]).square().sum(-1)


def mapped_by(way: Way, x: Tensor) -> Tensor:
    """g(x), some rows at a time: (S, N, d_x) -> (S, N, d_y)."""
    return torch.cat([way.there(part) for part in x.split(AT_ONCE, 1)], 1)
