"""What a map does to paired rows: errors, the round trip, its stretches, and the floor that a covariance sets."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.datamodules.rows.read_rows import PairedBatch
from aligners.fitting.map_errors import Way, squared_distances, squared_errors
from aligners.similarity.algebra.moments import squares

AT_ONCE = 8192  # rows that are mapped at a time


class PairedRows(NamedTuple):
    """Paired rows: x (S, N, d_x), y (S, N, d_y), and which are of unseen types (N,), if rows have types."""

    x: Tensor
    y: Tensor
    unseen: Tensor | None

    def turned(self) -> Self:
        """Return the same rows from Y to X."""
        return self._replace(x=self.y, y=self.x)

    @classmethod
    def of(cls, batches: Iterable[PairedBatch], most: int) -> Self:
        """Collect the first `most` rows of batches, reading no more batches than that takes."""
        x = []
        y = []
        unseen = []
        left = most
        for batch in batches:
            x.append(batch.x[:, :left])
            y.append(batch.y[:, :left])
            if batch.rows.unseen is not None:
                unseen.append(batch.rows.unseen[:left])
            left -= batch.x.shape[1]
            if left <= 0:
                break
        marks = None
        if unseen:
            marks = torch.cat(unseen)
        rows_x = torch.cat(x, 1)
        rows_y = torch.cat(y, 1)
        return cls(rows_x, rows_y, marks)


@torch.no_grad()
def mapped_rows(way: Way, x: Tensor) -> Tensor:
    """Return g(x), some rows at a time: (S, N, d_x) -> (S, N, d_y)."""
    parts = [way(part) for part in x.split(AT_ONCE, 1)]
    return torch.cat(parts, 1)


@torch.no_grad()
def measure(
    way: Way,
    held: PairedRows,
    other: PairedRows | None,
    means: tuple[Tensor, Tensor],
    stretched: int,
) -> dict[str, Tensor]:
    """Measure a map: FVU, also by seen and unseen types; round trip ‖g⁻¹(g(x)) − x‖∞ / ‖x‖∞; quantiles of stretches.

    Args:
        way: the map.
        held: the held-out rows.
        other: rows of another source of text.
        means: (S, d_x) and (S, d_y) means of source and target on the fitting rows.
        stretched: number of held-out rows, evenly spread, at which the Jacobian is taken.

    Returns:
        Name -> (S,); not finite where there is nothing to measure, or the map overflows.
    """
    _, mean = means
    mean_y = mean[:, None]
    mapped = mapped_rows(way, held.x)
    squares = squared_errors(mapped, held.y)
    totals = squared_distances(held.y, mean_y)
    figures = {"fvu": squares.sum(1) / totals.sum(1)}
    figures |= _by_type(squares, totals, held.unseen)
    if other is not None:
        elsewhere = mapped_rows(way, other.x)
        errors = squared_errors(elsewhere, other.y)
        distances = squared_distances(other.y, mean_y)
        figures["fvu_other"] = errors.sum(1) / distances.sum(1)
    if way.invertible:
        figures["round_trip"] = _round_trip(way, held.x, mapped)
    if stretched:
        low, median, high = _stretches_on(way, held, means, totals, stretched)
        figures["stretch_low"] = low
        figures["stretch_median"] = median
        figures["stretch_high"] = high
    return figures


def _by_type(
    squares: Tensor, totals: Tensor, unseen: Tensor | None
) -> dict[str, Tensor]:
    """Return the FVU on rows of seen and of unseen types, (S,) each; NaN without such rows."""
    if unseen is None:
        rows = squares.shape[1]
        unseen = torch.zeros(rows, dtype=torch.bool, device=squares.device)
    figures = {}
    for column, chosen in (("fvu_seen", ~unseen), ("fvu_unseen", unseen)):
        errors = squares[:, chosen].sum(1)
        distances = totals[:, chosen].sum(1)
        figures[column] = errors / distances
    return figures


def _round_trip(way: Way, x: Tensor, mapped: Tensor) -> Tensor:
    """Return ‖g⁻¹(g(x)) − x‖∞ / ‖x‖∞ at each site, (S,)."""
    parts_x = x.split(AT_ONCE, 1)
    parts_y = mapped.split(AT_ONCE, 1)
    gaps = []
    for there, rows in zip(parts_y, parts_x, strict=True):
        gap = way.inverse(there) - rows
        gaps.append(gap.abs().amax((1, 2)))
    worst = torch.stack(gaps).nan_to_num(torch.inf)
    largest = x.abs().amax((1, 2))
    return worst.amax(0) / largest


def _stretches_on(
    way: Way,
    held: PairedRows,
    means: tuple[Tensor, Tensor],
    totals: Tensor,
    number: int,
) -> Tensor:
    """Return `stretches` on so many of the held-out rows, between spaces of unit variance: (3, S)."""
    x = held.x
    mean_x, _ = means
    every = max(1, x.shape[1] // number)
    spread = x[:, ::every]
    sample = spread[:, :number]
    centred = x.double() - mean_x[:, None]
    variance_x = centred.square().mean((1, 2))
    width = held.y.shape[-1]
    ratio = variance_x / totals.mean(1) * width
    return stretches(way.there, sample, ratio.sqrt())


def gelbrich(x: Tensor, y: Tensor) -> Tensor:
    """Return Gelbrich's lower bound on the squared Wasserstein distance, from means and covariances alone.

    ‖μ_x − μ_y‖² + tr(Σ_x + Σ_y − 2 (Σ_x^(1/2) Σ_y Σ_x^(1/2))^(1/2)), which Gaussians attain.

    Reference: Gelbrich 1990, "On a formula for the L2 Wasserstein metric between measures on Euclidean and Hilbert
    spaces", Math. Nachr. 147, theorem 2.1.

    Args:
        x: (S, N, d) sample of one law.
        y: (S, M, d) sample of the other.

    Returns:
        (S,) in float64.
    """
    mean_x, cov_x = _law(x)
    mean_y, cov_y = _law(y)
    root = _root(cov_x)
    both = _root(root @ cov_y @ root)
    rest = cov_x + cov_y - 2 * both
    trace = squares(rest).sum(-1)
    apart = mean_x - mean_y
    means = apart.square().sum(-1)
    return means + trace.clamp(min=0)


def floor(predicted: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    """Return the FVU of a prediction plus its distribution's distance from Y's, as a share of Y's variance: (S,).

    For a map h and p = E[Y | X], E‖h − Y‖² = E‖h − p‖² + E‖p − Y‖², and the first term is at least the squared
    Wasserstein distance between the laws of h and p. Where h has the covariance of Y, Gelbrich's bound limits it from
    below. `predicted` approximates p: a better prediction can only lower the floor.

    Reference: Freirich, Michaeli and Meir 2021, "A theory of the distortion-perception tradeoff in Wasserstein
    space", arXiv 2107.02555, theorem 1.

    Args:
        predicted: (S, N, d) what a free network predicts of the held-out rows.
        y: (S, N, d) these rows.
        mean: (S, d) mean of Y on the fitting rows.
    """
    y = y.double()
    predicted = predicted.double()
    away = y - mean[:, None]
    gap = predicted - y
    total = away.square().sum(-1)
    error = gap.square().sum(-1)
    least = error.mean(-1) + gelbrich(predicted, y)
    return least / total.mean(-1)


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ∂ output / ∂ input at each row, by one backward pass for each output.

    Args:
        function: (S, N, d_x) -> (S, N, d_y), each row by itself.
        x: (S, N, d_x).

    Returns:
        (S, N, d_y, d_x)
    """

    def summed(rows: Tensor) -> Tensor:
        return function(rows).sum((0, 1))

    found = torch.autograd.functional.jacobian(summed, x)
    return found.movedim(0, -2)


def stretches(function: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor) -> Tensor:
    """Return quantiles 5 %, 50 % and 95 % of the singular values over rows and directions: (3, S).

    NaN at a site where the map overflows.

    Args:
        function: the map.
        x: (S, N, d_x) a sample of rows.
        scale: (S,) X's root mean variance over Y's. Between spaces of unit variance a rotation has 1, 1, 1.
    """
    jacobians = jacobian(function, x).double()
    finite = jacobians.isfinite()
    finite = finite.flatten(1).all(1)
    known = jacobians.nan_to_num(0.0, 0.0, 0.0)
    values = torch.linalg.svdvals(known).flatten(1)
    levels = values.new_tensor([0.05, 0.5, 0.95])
    scaled = values * scale[:, None].double()
    quantiles = torch.quantile(scaled, levels, 1)
    return torch.where(finite, quantiles, torch.nan)


def _law(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.double()
    mean = rows.mean(1)
    centred = rows - mean[:, None]
    scatter = centred.mT @ centred
    return mean, scatter / rows.shape[1]


def _root(matrix: Tensor) -> Tensor:
    """Return the square root of a symmetric positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    roots = values.clamp(min=0).sqrt()
    scaled = vectors * roots[:, None]
    return scaled @ vectors.mT
