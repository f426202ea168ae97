"""What is measured of a map on held-out rows: errors, round trips, how it stretches space, and a floor of the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.fitting.pricing.rows import PairedRows

AT_ONCE = 8192  # rows that are mapped together


class Way(NamedTuple):
    """A map, and the map back that belongs to it, if there is one."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor] | None

    @torch.no_grad()
    def mapped(self, x: Tensor) -> Tensor:
        """g(x), some rows at a time: (S, N, d_x) -> (S, N, d_y)."""
        return torch.cat([self.there(part) for part in x.split(AT_ONCE, 1)], 1)


@torch.no_grad()
def measure(
    way: Way, held: PairedRows, other: PairedRows | None, means: tuple[Tensor, Tensor], stretched: int
) -> dict[str, Tensor]:
    """Measure a map: FVU, also by seen and unseen types; round trip ‖g⁻¹(g(x)) − x‖∞ / ‖x‖∞; quantiles of stretches.

    Args:
        way: the map.
        held: the held-out rows.
        other: rows of another source of text.
        means: (S, d_x) and (S, d_y), of source and target on the fitting rows.
        stretched: how many of the held-out rows, evenly spread, the Jacobian is taken at.

    Returns:
        Name -> (S,); not finite where there is nothing to measure, or the map overflows.
    """
    (mean_x, mean_y), x = means, held.x
    mapped = way.mapped(x)
    squares, totals = _squares(mapped, held.y, mean_y)
    unseen = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device) if held.unseen is None else held.unseen
    found = {"fvu": squares.sum(1) / totals.sum(1)}
    for name, part in (("fvu_seen", ~unseen), ("fvu_unseen", unseen)):
        found[name] = squares[:, part].sum(1) / totals[:, part].sum(1)  # 0/0 without such rows
    if other is not None:
        elsewhere, whole = _squares(way.mapped(other.x), other.y, mean_y)
        found["fvu_other"] = elsewhere.sum(1) / whole.sum(1)
    if way.back is not None:
        gaps = [
            (way.back(there) - own).abs().amax((1, 2))
            for there, own in zip(mapped.split(AT_ONCE, 1), x.split(AT_ONCE, 1), strict=True)
        ]
        found["round_trip"] = torch.stack(gaps).nan_to_num(torch.inf).amax(0) / x.abs().amax((1, 2))
    if stretched:
        sample = x[:, :: max(1, x.shape[1] // stretched)][:, :stretched]
        spread = ((x.double() - mean_x[:, None]).square().mean((1, 2)) / totals.mean(1) * held.y.shape[-1]).sqrt()
        quantiles = stretches(way.there, sample, spread)
        found |= dict(zip(("stretch_low", "stretch_median", "stretch_high"), quantiles, strict=True))
    return found


def _squares(mapped: Tensor, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The squared error of each row, and its squared distance from the mean, both (S, N) in float64."""
    return (mapped - y).double().square().sum(-1), (y.double() - mean[:, None]).square().sum(-1)


def gelbrich(x: Tensor, y: Tensor) -> Tensor:
    """Gelbrich's lower bound of the squared Wasserstein distance, from means and covariances alone.

    ‖μ_x − μ_y‖² + tr(Σ_x + Σ_y − 2 (Σ_x^(1/2) Σ_y Σ_x^(1/2))^(1/2)), which Gaussians attain.

    Reference: Gelbrich 1990, "On a formula for the L2 Wasserstein metric between measures on Euclidean and Hilbert
    spaces", Math. Nachr. 147, theorem 2.1.

    Args:
        x: (S, N, d) sample of one law.
        y: (S, M, d) sample of the other.

    Returns:
        (S,) in float64.
    """
    (mean_x, cov_x), (mean_y, cov_y) = (_law(rows) for rows in (x, y))
    root = _root(cov_x)
    cross = _root(root @ cov_y @ root)
    trace = (cov_x + cov_y - 2 * cross).diagonal(dim1=-2, dim2=-1).sum(-1)
    return (mean_x - mean_y).square().sum(-1) + trace.clamp(min=0)


def floor(predicted: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    """FVU of a prediction plus the distance from its law to that of Y, as a share of Y's variance: (S,).

    For a map h and p = E[Y | X], E‖h − Y‖² = E‖h − p‖² + E‖p − Y‖², and the first term is at least the squared
    Wasserstein distance between the laws of h and p. Where h has the covariance of Y, Gelbrich's bound limits it from
    below. `predicted` stands for p: a better prediction can only lower the floor.

    Reference: Freirich, Michaeli and Meir 2021, "A theory of the distortion-perception tradeoff in Wasserstein
    space", arXiv 2107.02555, theorem 1.

    Args:
        predicted: (S, N, d) what a free network says of the held-out rows.
        y: (S, N, d) what they are.
        mean: (S, d) mean of Y on the fitting rows.
    """
    y, predicted = y.double(), predicted.double()
    total = (y - mean[:, None]).square().sum(-1).mean(-1)
    return ((predicted - y).square().sum(-1).mean(-1) + gelbrich(predicted, y)) / total


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂ output / ∂ input at each row, by one backward pass for each output.

    Args:
        function: (S, N, d_x) -> (S, N, d_y), each row by itself.
        x: (S, N, d_x).

    Returns:
        (S, N, d_y, d_x)
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x)
        rows = [torch.autograd.grad(y[..., k].sum(), x, retain_graph=True)[0] for k in range(y.shape[-1])]
    return torch.stack(rows, -2)


def stretches(function: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor) -> Tensor:
    """Quantiles 5 %, 50 % and 95 % of the singular values over rows and directions: (3, S).

    NaN at a site where the map overflows.

    Args:
        function: the map.
        x: (S, N, d_x) a sample of rows.
        scale: (S,) X's root mean variance over Y's. Between spaces of unit variance a rotation has 1, 1, 1.
    """
    found = jacobian(function, x).double()
    finite = found.isfinite().flatten(1).all(1)
    values = torch.linalg.svdvals(found.nan_to_num(0.0, 0.0, 0.0)).flatten(1) * scale[:, None].double()
    quantiles = torch.quantile(values, torch.tensor([0.05, 0.5, 0.95], dtype=values.dtype, device=values.device), 1)
    return torch.where(finite, quantiles, torch.nan)


def _law(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.double()
    mean = rows.mean(1)
    centred = rows - mean[:, None]
    return mean, centred.mT @ centred / rows.shape[1]


def _root(matrix: Tensor) -> Tensor:
    """The square root of a symmetric positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT
