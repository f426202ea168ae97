"""Linear predictivity: how much of X a linear regression on Y explains on rows of texts that it was not fitted to."""

from collections.abc import Sequence
from itertools import accumulate
from operator import add

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.similarity.algebra.grid import GridSums
from aligners.similarity.algebra.moments import (
    GridMoments,
    check_rows,
    decomposed,
    squares,
)

FOLDS = 5
CUT = 1e-10  # share of the largest eigenvalue below which a direction of Y is left out


def linear_predictivity(
    x: Tensor,
    y: Tensor,
    groups: Tensor | None = None,
    folds: int = FOLDS,
    ridge: float = 0.0,
) -> Tensor:
    """Cross-validated R² of regressing X on Y, for all layer pairs.

    1 − Σ ‖x − g(y)‖² / Σ ‖x − x̄‖² over all rows, each when it is held out, g and the mean x̄ from the others. A fold
    has whole groups of rows. At most 1; 0 is no better than the mean, and it may be negative. Not symmetric. Invariant
    to translation, rotation and isotropic scaling of X, and of Y; without `ridge` to any invertible affine map of Y.

    Route: moments of each fold, and of the others together, which are their sums: rows are read once. Where the rows
    are fewer than Y's features g is the regression of least norm.

    Args:
        x: (L_x, N, d_x) rows of X.
        y: (L_y, N, d_y) rows of Y, row by row the partners of `x`.
        groups: (N,) numbers of the rows' texts; None: each row is one of its own. Groups in order of their numbers
            make up the folds, each a run of them.
        folds: number of folds.
        ridge: λ of the penalty λ ‖W‖², as a share of the mean eigenvalue of YᵀY. 0: least squares.

    Returns:
        (L_x, L_y).

    Raises:
        ValueError: fewer groups than folds, rows that are not paired or not finite, a layer of X in which nothing
            varies.

    References:
        Yamins et al. 2014, "Performance-optimized hierarchical models"; Schrimpf et al. 2018, "Brain-Score".
    """
    check_rows(x, y)
    check_range(least=2, folds=folds)
    check_range(least=0, ridge=ridge)
    sums = _sums_of_folds(x, y, fold_of(groups, x.shape[1], folds))
    residuals = []
    totals = []
    for held_out, fitted in zip(sums, all_but_one(sums), strict=True):
        residual, total = _errors(fitted.moments(), held_out.moments(), ridge)
        residuals.append(residual)
        totals.append(total)
    total = torch.stack(totals).sum(0)
    if not (total > 0).all():
        raise UserError(
            "Linear predictivity expects rows of X that vary, but a layer of `x` is constant. Leave it out."
        )
    return 1 - torch.stack(residuals).sum(0) / total


def _sums_of_folds(x: Tensor, y: Tensor, fold: Tensor) -> list[GridSums]:
    """The sums of the rows of each fold."""
    sizes = len(x), x.shape[2], len(y), y.shape[2]
    sums = []
    for number in range(1 + int(fold.max())):
        rows = (fold == number).nonzero()[:, 0].to(x.device)
        empty = GridSums.zeros(*sizes, x.device)
        sums.append(empty.add_(x[:, rows], y[:, rows]))
    return sums


def fold_of(groups: Tensor | None, n: int, folds: int) -> Tensor:
    """Return the fold of each row, (n,): runs of whole groups, of about as many groups each.

    Raises:
        ValueError: fewer groups than folds.
    """
    place = torch.arange(n)
    if groups is not None:
        _, place = groups.cpu().unique(return_inverse=True)
    count = 1 + int(place.max())
    if count < folds:
        what = "rows" if groups is None else "groups of rows"
        raise UserError(
            f"Expected at least as many {what} as `folds`, but got {count} and {folds}. Give more, or lower `folds`."
        )
    return place * folds // count


def all_but_one(sums: Sequence[GridSums]) -> list[GridSums]:
    """Return the sums of all but each of them, in twice as many additions as there are sums."""
    before = list(accumulate(sums, add))
    after = list(accumulate(reversed(sums), add))
    after.reverse()
    between = map(add, before, after[2:])
    return [after[1], *between, before[-2]]


def _errors(
    fitted: GridMoments, held_out: GridMoments, ridge: float
) -> tuple[Tensor, Tensor]:
    """Σ ‖x − g(y)‖², (L_x, L_y), and Σ ‖x − x̄‖², (L_x, 1), of held-out rows."""
    n = held_out.n
    shift_x = held_out.mean_x - fitted.mean_x
    shift_y = held_out.mean_y - fitted.mean_y
    total = squares(held_out.xx).sum(-1) + n * shift_x.square().sum(-1)
    inverse = _inverse(fitted.yy, ridge)
    scatter = held_out.yy + n * shift_y[:, :, None] * shift_y[:, None]
    errors = torch.empty(
        len(shift_x), len(shift_y), dtype=torch.float64, device=total.device
    )
    for i, of_x in enumerate(shift_x):
        for j, of_y in enumerate(shift_y):
            weight = inverse[j] @ fitted.xy[i, j].mT
            cross = held_out.xy[i, j].mT + n * torch.outer(of_y, of_x)
            change = weight * (scatter[j] @ weight - 2 * cross)
            errors[i, j] = total[i] + change.sum()
    return errors, total[:, None]


def _inverse(scatter: Tensor, ridge: float) -> Tensor:
    """(YᵀY + λ)⁻¹ of each layer, (L, d, d), without the directions in which Y does not vary."""
    values, vectors = decomposed(
        "eigendecomposition for linear predictivity", torch.linalg.eigh, scatter
    )
    mean = values.mean(-1, keepdim=True)
    kept = values > CUT * values[:, -1:]
    scales = kept / (values + ridge * mean).where(kept, 1)
    return (vectors * scales[:, None]) @ vectors.mT
