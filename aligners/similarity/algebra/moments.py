"""Moments of paired rows: all that a closed-form map or a linear measure needs; checks of them and of rows."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError

TILE = (
    2**22
)  # bytes of cross moments: small compared with most comparisons, large enough for a batch of decompositions


class Moments(NamedTuple):
    """Centred second moments of n paired rows at S site pairs, in float64.

    Attributes:
        n: number of rows, ().
        mean_x: (S, d_x), mean_y: (S, d_y).
        xx: Σ (x − x̄)(x − x̄)ᵀ, (S, d_x, d_x); yy: (S, d_y, d_y); xy: Σ (x − x̄)(y − ȳ)ᵀ, (S, d_x, d_y).
    """

    n: Tensor
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    @classmethod
    def zeros(cls, sites: int, d_x: int, d_y: int) -> Self:
        """The moments of no rows."""
        shapes: list[tuple[int, ...]] = [
            (),
            (d_x,),
            (d_y,),
            (d_x, d_x),
            (d_y, d_y),
            (d_x, d_y),
        ]
        return cls(
            *(
                torch.zeros((sites, *shape) if shape else (), dtype=torch.float64)
                for shape in shapes
            )
        )

    def swap(self) -> Self:
        """The moments of the pairs (y, x): what a map from Y to X is fitted on."""
        return type(self)(
            self.n, self.mean_y, self.mean_x, self.yy, self.xx, self.xy.mT
        )


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Moments of one batch of paired rows.

    Args:
        x: (S, N, d_x) states of X.
        y: (S, N, d_y) states of Y, row by row the partners of `x`.
    """
    x, y = x.double(), y.double()
    mean_x, mean_y = x.mean(1), y.mean(1)
    x, y = x - mean_x[:, None], y - mean_y[:, None]
    n = torch.tensor(float(x.shape[1]), dtype=torch.float64, device=x.device)
    return Moments(n, mean_x, mean_y, x.mT @ x, y.mT @ y, x.mT @ y)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two disjoint sets of rows.

    Centred moments are merged, not raw ones, so that a mean which dwarfs its deviation does not cancel
    (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance").
    """
    n = a.n + b.n
    share = b.n / n.clamp(min=1)
    dx, dy = b.mean_x - a.mean_x, b.mean_y - a.mean_y
    weight = a.n * share
    return Moments(
        n,
        a.mean_x + share * dx,
        a.mean_y + share * dy,
        a.xx + b.xx + weight * dx[:, :, None] * dx[:, None, :],
        a.yy + b.yy + weight * dy[:, :, None] * dy[:, None, :],
        a.xy + b.xy + weight * dx[:, :, None] * dy[:, None, :],
    )


class GridMoments(NamedTuple):
    """Centred moments of n paired rows for all L_x x L_y layer pairs of two models, in float64.

    Attributes:
        n: number of rows, ().
        mean_x: (L_x, d_x), mean_y: (L_y, d_y).
        xx: Σ (x − x̄)(x − x̄)ᵀ of each layer, (L_x, d_x, d_x); yy: (L_y, d_y, d_y).
        xy: Σ (x − x̄)(y − ȳ)ᵀ of each pair of layers, (L_x, L_y, d_x, d_y).
        q_xx: Σ ‖x − x̄‖⁴, (L_x,); q_yy: (L_y,); q_xy: Σ ‖x − x̄‖²‖y − ȳ‖², (L_x, L_y). What the diagonals of
            the Gram matrices add to an unbiased HSIC, and needed for nothing else.
    """

    n: Tensor
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor
    q_xx: Tensor
    q_yy: Tensor
    q_xy: Tensor

    def swap(self) -> Self:
        """The moments with X and Y in each other's place: all pairs (L_y, L_x)."""
        xy = self.xy.permute(1, 0, 3, 2)
        return type(self)(
            self.n,
            self.mean_y,
            self.mean_x,
            self.yy,
            self.xx,
            xy,
            self.q_yy,
            self.q_xx,
            self.q_xy.T,
        )


def squares(scatter: Tensor) -> Tensor:
    """The sum of squares of each feature, (..., d), of centred rows with this scatter, (..., d, d)."""
    return scatter.diagonal(dim1=-2, dim2=-1)


def by_tile(
    moments: GridMoments, compute: Callable[[int, slice, Tensor], Tensor]
) -> Tensor:
    """A function of layer pairs, for all of them.

    Args:
        moments: of the grid.
        compute: from the number i of a layer of X, some layers of Y, and the cross moments of these pairs
            (J, d_x, d_y), to (J, ...).

    Returns:
        (L_x, L_y, ...).
    """
    xy = moments.xy
    size = max(1, TILE // (xy.shape[2] * xy.shape[3] * xy.element_size()))
    tiles = [slice(j, j + size) for j in range(0, xy.shape[1], size)]
    rows = (
        torch.cat([compute(i, some, row[some].contiguous()) for some in tiles])
        for i, row in enumerate(xy)
    )
    return torch.stack([*rows])


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
            refuse_layers(
                ~states.isfinite().all(-1).all(-1),
                name,
                "finite states",
                "holds NaN or infinite values in",
            )


def check_moments(
    moments: GridMoments,
    measure: str,
    rows: int,
    *,
    x: Varying | None = None,
    y: Varying | None = None,
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
        raise UserError(
            f"{measure} expects at least {rows} rows, but `moments` hold {int(moments.n)}. Give more rows."
        )
    for name, varying, mean, scatter in (
        ("x", x, moments.mean_x, moments.xx),
        ("y", y, moments.mean_y, moments.yy),
    ):
        variance = squares(scatter) / moments.n
        finite = mean.isfinite() & variance.isfinite()
        refuse_layers(
            ~finite.all(-1),
            name,
            f"finite rows for {measure}",
            "had NaN or infinite values in",
        )
        constant = constant_features(variance, mean)
        if varying == "features":
            received = f"has {int(constant.sum())} constant ones in"
            refuse_layers(
                constant.any(-1), name, f"features that vary for {measure}", received
            )
        elif varying == "layers":
            refuse_layers(
                constant.all(-1),
                name,
                f"states that vary for {measure}",
                "has only constant features in",
            )


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
        if all(
            values.isfinite().all()
            for values in ([factors] if isinstance(factors, Tensor) else factors)
        ):
            return factors
    raise UserError(
        f"The {what} met or gave values that are not finite. Look for NaN, infinite or overflowing states."
    )


def refuse_layers(bad: Tensor, name: str, expected: str, received: str) -> None:
    """Raise if any layer is bad, (L,), of the rows called `name`: what was expected, and what was received in them."""
    if bad.any():
        layers = torch.nonzero(bad)[:, 0].tolist()
        raise UserError(
            f"Expected {expected}, but `{name}` {received} layers {layers} (positions along its first axis). "
            "Leave those layers out."
        )
