"""Input checks of the measures: a number without meaning is an error with a reason, never a score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.similarity.algebra.moments import GridMoments

Varying = Literal["features", "layers"]


def check_rows(x: Tensor, y: Tensor) -> None:
    """Raise unless x (L_x, N, d_x) and y (L_y, N, d_y) are paired rows of finite states.

    Raises:
        ValueError: what is wrong with them.
    """
    for name, states in (("x", x), ("y", y)):
        if states.ndim != 3 or not states.is_floating_point():
            raise UserError(
                f"Expected `{name}` as floating-point states (layers, rows, width), "
                f"but got {states.dtype} of shape {tuple(states.shape)}. Give a single layer a leading axis of 1."
            )
    if x.shape[1] != y.shape[1] or x.shape[1] == 0:
        raise UserError(
            f"Expected `x` and `y` to hold the same rows, at least one, but got {x.shape[1]} and {y.shape[1]}. "
            "Row i of one must be the partner of row i of the other."
        )
    for name, states in (("x", x), ("y", y)):
        # A sum is finite only if every term is, and much cheaper than to look at each; it may overflow, though.
        if not states.sum().isfinite():
            _refuse_layers(~states.isfinite().all(-1).all(-1), name, "finite states", "holds NaN or infinite values in")


def check_moments(
    moments: GridMoments, measure: str, rows: int, *, x: Varying | None = None, y: Varying | None = None
) -> None:
    """Raise if moments hold fewer than `rows` rows, rows that were not finite, or something constant.

    Args:
        moments: of the rows.
        measure: the measure's name, for error messages.
        rows: the fewest.
        x: what has to vary of X: `features`, each of them; `layers`, some feature of each; None: nothing has to.
        y: likewise of Y.

    Raises:
        ValueError: which, and in which layers.
    """
    if moments.n < rows:
        raise UserError(f"{measure} expects at least {rows} rows, but `moments` hold {int(moments.n)}. Give more rows.")
    sides = (("x", x, moments.mean_x, moments.xx), ("y", y, moments.mean_y, moments.yy))
    for name, _, mean, scatter in sides:
        finite = mean.isfinite() & scatter.diagonal(dim1=-2, dim2=-1).isfinite()
        _refuse_layers(~finite.all(-1), name, f"finite rows for {measure}", "had NaN or infinite values in")
    for name, varying, mean, scatter in sides:
        constant = constant_features(scatter, mean, moments.n)
        if varying == "features":
            said = f"has {int(constant.sum())} constant ones in"
            _refuse_layers(constant.any(-1), name, f"features that vary for {measure}", said)
        elif varying == "layers":
            _refuse_layers(constant.all(-1), name, f"states that vary for {measure}", "has only constant features in")


def check_pair(fitted: GridMoments, held_out: GridMoments) -> None:
    """Raise if held-out moments have other layers or widths than those of the fitting rows.

    Raises:
        ValueError: the two shapes.
    """
    if fitted.xy.shape != held_out.xy.shape:
        raise UserError(
            "Expected `held_out` of the layers and widths that `fitted` has, (L_x, L_y, d_x, d_y) = "
            f"{tuple(fitted.xy.shape)}, but got {tuple(held_out.xy.shape)}."
        )


def check_share(share: float) -> None:
    """Raise if a share of the variance is outside (0, 1].

    Raises:
        ValueError: naming it.
    """
    check_range(above=0, most=1, share=share)


def constant_features(scatter: Tensor, mean: Tensor, n: Tensor) -> Tensor:
    """Which features do not vary, a boolean (..., d).

    A deviation of 1e-7 of the mean is what float32 leaves of a constant, and counts as none.

    Args:
        scatter: (..., d, d) centred.
        mean: (..., d).
        n: number of rows, ().
    """
    variance = scatter.diagonal(dim1=-2, dim2=-1) / n
    return variance <= (1e-7 * mean).square()


def converged(kind: str, behind: str, decompose: Callable[..., Any], matrix: Tensor) -> Any:
    """Run a decomposition.

    Args:
        kind: of decomposition, for error messages.
        behind: what it is for, likewise.
        decompose: one of `torch.linalg`.
        matrix: (..., n, m).

    Raises:
        ValueError: it does not converge.
    """
    try:
        return decompose(matrix)
    except torch.linalg.LinAlgError as error:
        raise UserError(f"The {kind} behind {behind} did not converge: {error}") from error


def _refuse_layers(bad: Tensor, name: str, expected: str, received: str) -> None:
    if bad.any():
        layers = torch.nonzero(bad)[:, 0].tolist()
        raise UserError(
            f"Expected {expected}, but `{name}` {received} layers {layers} (positions along its first axis). "
            "Leave those layers out."
        )
