"""Input checks of the measures: a number without meaning is an error with a reason, never a score."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.moments import GridMoments, squares

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
            refuse_layers(~states.isfinite().all(-1).all(-1), name, "finite states", "holds NaN or infinite values in")


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
    for name, varying, mean, scatter in (("x", x, moments.mean_x, moments.xx), ("y", y, moments.mean_y, moments.yy)):
        variance = squares(scatter) / moments.n
        finite = mean.isfinite() & variance.isfinite()
        refuse_layers(~finite.all(-1), name, f"finite rows for {measure}", "had NaN or infinite values in")
        constant = constant_features(variance, mean)
        if varying == "features":
            received = f"has {int(constant.sum())} constant ones in"
            refuse_layers(constant.any(-1), name, f"features that vary for {measure}", received)
        elif varying == "layers":
            refuse_layers(constant.all(-1), name, f"states that vary for {measure}", "has only constant features in")


def constant_features(variance: Tensor, mean: Tensor) -> Tensor:
    """Which features do not vary, a boolean (..., d), by the variance and mean (..., d) of each.

    A deviation of 1e-7 of the mean is what float32 leaves of a constant, and counts as none.
    """
    return variance <= (1e-7 * mean).square()


def decomposed(what: str, decompose: Callable[..., Any], matrix: Tensor) -> Any:
    """Run a decomposition of a matrix of finite values.

    Args:
        what: decomposition and what it is for, for error messages.
        decompose: one of `torch.linalg`.
        matrix: (..., n, m).

    Raises:
        ValueError: it does not converge, or met or gave values that are not finite.
    """
    if matrix.isfinite().all():
        try:
            factors = decompose(matrix)
        except torch.linalg.LinAlgError as error:
            raise UserError(f"The {what} did not converge: {error}") from error
        if all(values.isfinite().all() for values in ([factors] if isinstance(factors, Tensor) else factors)):
            return factors
    raise UserError(f"The {what} met or gave values that are not finite. Look for NaN, infinite or overflowing states.")


def refuse_layers(bad: Tensor, name: str, expected: str, received: str) -> None:
    """Raise if any layer is bad, (L,), of the rows called `name`: what was expected, and what was received in them."""
    if bad.any():
        layers = torch.nonzero(bad)[:, 0].tolist()
        raise UserError(
            f"Expected {expected}, but `{name}` {received} layers {layers} (positions along its first axis). "
            "Leave those layers out."
        )
