"""Moments of paired rows, which closed-form maps and linear measures are computed from, and checks of both."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch import distributed as dist

from aligners.errors import UserError

# bytes of matrices that are decomposed at once: small beside most comparisons
TILE = 2**22
# on a GPU, which is fast at many of them: a dozen of width 768
GPU_TILE = 2**26
# device of new tensors; None: torch's default
Device = torch.device | str | None


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
        means = (sites, d_x), (sites, d_y)
        xx = (sites, d_x, d_x)
        yy = (sites, d_y, d_y)
        xy = (sites, d_x, d_y)
        shapes = [(), *means, xx, yy, xy]
        return cls(*zeros_of(shapes))

    def swap(self) -> Self:
        """Return the moments of the pairs (y, x), which a map from Y to X is fitted on."""
        n, mean_x, mean_y, xx, yy, xy = self
        return type(self)(n, mean_y, mean_x, yy, xx, xy.mT)

    def to(self, device: Device) -> Self:
        """Return the moments on a device."""
        parts = [part.to(device) for part in self]
        return type(self)(*parts)


def zeros_of(shapes: Sequence[tuple[int, ...]], device: Device = None) -> list[Tensor]:
    """Make a float64 tensor of zeros of each shape."""
    zeros = []
    for shape in shapes:
        zeros.append(torch.zeros(shape, dtype=torch.float64, device=device))
    return zeros


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Compute the moments of one batch of paired rows.

    Args:
        x: (S, N, d_x) states of X.
        y: (S, N, d_y) states of Y, row by row the partners of `x`.
    """
    x, y = x.double(), y.double()
    mean_x, mean_y = x.mean(1), y.mean(1)
    x = x - mean_x[:, None]
    y = y - mean_y[:, None]

    rows = float(x.shape[1])
    n = torch.tensor(rows, dtype=torch.float64, device=x.device)
    xx = x.mT @ x
    yy = y.mT @ y
    xy = x.mT @ y
    return Moments(n, mean_x, mean_y, xx, yy, xy)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Merge the moments of two disjoint sets of rows.

    Centred moments are merged, not raw ones, so that nothing cancels where a mean dwarfs its deviation
    (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance").
    """
    n = a.n + b.n
    share = b.n / n.clamp(min=1)
    dx = b.mean_x - a.mean_x
    dy = b.mean_y - a.mean_y

    weighted_x = a.n * share * dx
    weighted_y = a.n * share * dy
    return Moments(
        n,
        a.mean_x + share * dx,
        a.mean_y + share * dy,
        a.xx + b.xx + _outer(weighted_x, dx),
        a.yy + b.yy + _outer(weighted_y, dy),
        a.xy + b.xy + _outer(weighted_x, dy),
    )


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """(S, d), (S, e) -> (S, d, e)."""
    return a[:, :, None] * b[:, None, :]


class MomentsMetric:
    """Moments of all rows seen, over batches and ranks, in one pass.

    Each rank keeps centred moments, so no mean has to be known beforehand. They are gathered, not summed,
    and merged pairwise: the result is the same for any split of the rows to about 1e-12.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
    """

    def __init__(self, sites: int, d_x: int, d_y: int) -> None:
        self._moments = Moments.zeros(sites, d_x, d_y)

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Continue from the moments of earlier rows."""
        metric = cls(*moments.xy.shape)
        metric._moments = moments
        return metric

    def to(self, device: torch.device | str) -> Self:
        """Move to a device."""
        self._moments = self._moments.to(device)
        return self

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add paired rows: x (S, N, d_x), y (S, N, d_y)."""
        self.to(x.device)
        more = moments_of(x.detach(), y.detach())
        self._moments = merge_moments(self._moments, more)

    def compute(self) -> Moments:
        """Return the moments of everything seen on all ranks."""
        many = dist.is_available() and dist.is_initialized()
        if not many:
            return self._moments
        # torchmetrics takes a while to import, and this module is behind every map
        from torchmetrics.utilities.distributed import gather_all_tensors

        parts = map(gather_all_tensors, self._moments)
        first, *others = map(Moments, *parts)
        for moments in others:
            first = merge_moments(first, moments)
        return first

    def moments(self) -> Moments:
        """Return the moments of this rank's rows."""
        return self._moments


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
        """Return the moments of (Y, X): all pairs (L_y, L_x)."""
        return type(self)(
            self.n,
            self.mean_y,
            self.mean_x,
            self.yy,
            self.xx,
            self.xy.permute(1, 0, 3, 2),
            self.q_yy,
            self.q_xx,
            self.q_xy.T,
        )


def squares(scatter: Tensor) -> Tensor:
    """Return the sum of squares of each feature, (..., d), of centred rows with this scatter, (..., d, d)."""
    return scatter.diagonal(dim1=-2, dim2=-1)


def tile_of(device: Device) -> int:
    """Bytes of matrices that are decomposed at once on a device."""
    if torch.device(device or "cpu").type == "cpu":
        return TILE
    return GPU_TILE


def at_once(matrices: Tensor) -> int:
    """How many of some matrices (..., a, b) are decomposed at once, at least one."""
    rows, columns = matrices.shape[-2:]
    bytes_of_each = rows * columns * matrices.element_size()
    return max(1, tile_of(matrices.device) // bytes_of_each)


def by_tile(
    moments: GridMoments, compute: Callable[[int, slice, Tensor], Tensor]
) -> Tensor:
    """Compute a function of layer pairs for all of them, a few at a time.

    Args:
        moments: moments of the grid.
        compute: from the number i of a layer of X, some layers of Y, and the cross moments of these pairs
            (J, d_x, d_y), to (J, ...).

    Returns:
        (L_x, L_y, ...).
    """
    layers_y = moments.xy.shape[1]
    size = at_once(moments.xy)
    rows = []
    for i, row in enumerate(moments.xy):
        tiles = []
        for j in range(0, layers_y, size):
            some = slice(j, j + size)
            tiles.append(compute(i, some, row[some].contiguous()))
        rows.append(torch.cat(tiles))
    return torch.stack(rows)


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
    # A sum is finite only if every term is, and much cheaper than a look at each; but it may overflow.
    sums = [states.sum().isfinite() for states in (x, y)]
    if torch.stack(sums).all():  # the host waits once
        return
    for name, states in (("x", x), ("y", y)):
        finite = states.isfinite()
        bad = ~finite.all(-1).all(-1)
        refuse_layers(bad, name, "finite states", "holds NaN or infinite values in")


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
        moments: moments of the rows.
        measure: the measure's name, for error messages.
        rows: the fewest.
        x: what has to vary of X: `features`, each of them; `layers`, some feature of each; None: nothing.
        y: likewise of Y.

    Raises:
        ValueError: which, and in which layers.
    """
    sides = []
    flags = [moments.n < rows]
    for name, varying, mean, scatter in (
        ("x", x, moments.mean_x, moments.xx),
        ("y", y, moments.mean_y, moments.yy),
    ):
        variance = squares(scatter) / moments.n
        finite = mean.isfinite() & variance.isfinite()
        infinite = ~finite.all(-1)
        constant = constant_features(variance, mean)
        wrong = _wrongly_constant(constant, varying)
        sides.append((name, varying, infinite, constant, wrong))
        flags += [infinite.any(), wrong.any()]
    if not torch.stack(flags).any():  # the host waits once
        return

    if moments.n < rows:
        raise UserError(
            f"{measure} expects at least {rows} rows, but `moments` hold {int(moments.n)}. Give more rows."
        )
    for name, varying, infinite, constant, wrong in sides:
        expected = f"finite rows for {measure}"
        received = "had NaN or infinite values in"
        refuse_layers(infinite, name, expected, received)
        expected = f"states that vary for {measure}"
        received = "has only constant features in"
        if varying == "features":
            expected = f"features that vary for {measure}"
            received = f"has {int(constant.sum())} constant ones in"
        refuse_layers(wrong, name, expected, received)


def _wrongly_constant(constant: Tensor, varying: Varying | None) -> Tensor:
    """Which layers have features that do not vary, (L, d), and should, (L,)."""
    if varying == "features":
        return constant.any(-1)
    everywhere = constant.all(-1)
    if varying == "layers":
        return everywhere
    return torch.zeros_like(everywhere)


def constant_features(variance: Tensor, mean: Tensor) -> Tensor:
    """Return which features do not vary, a boolean (..., d), given the variance and mean (..., d) of each.

    A deviation of 1e-7 of the mean can be float32 rounding of a constant, and counts as zero.
    """
    return variance <= (1e-7 * mean).square()


def decomposed(what: str, decompose: Callable[..., Any], matrix: Tensor) -> Any:
    """Decompose a matrix of finite values.

    Args:
        what: decomposition and what it is for, for error messages.
        decompose: one of `torch.linalg`.
        matrix: (..., n, m).

    Raises:
        ValueError: it does not converge, or was given or gives values that are not finite.
    """
    check_finite(what, matrix)
    factors = converged(what, decompose, matrix)
    if isinstance(factors, Tensor):
        check_finite(what, factors)
    else:
        check_finite(what, *factors)
    return factors


def converged(what: str, decompose: Callable[..., Any], matrix: Tensor) -> Any:
    """Decompose a matrix, as `decomposed`, without looking whether values are finite.

    Raises:
        ValueError: it does not converge.
    """
    try:
        return decompose(matrix)
    except torch.linalg.LinAlgError as error:
        raise UserError(f"The {what} did not converge: {error}") from error


def check_finite(what: str, *tensors: Tensor) -> None:
    """Raise unless all values are finite; the host waits once for all of them.

    Raises:
        ValueError: they are not.
    """
    finite = [values.isfinite().all() for values in tensors]
    if not torch.stack(finite).all():
        raise UserError(
            f"The {what} met or gave values that are not finite. Look for NaN, infinite or overflowing states."
        )


def refuse_layers(bad: Tensor, name: str, expected: str, received: str) -> None:
    """Raise if any layer of `name` is bad, (L,), with what was expected and what was received."""
    if bad.any():
        layers = torch.nonzero(bad)[:, 0].tolist()
        raise UserError(
            f"Expected {expected}, but `{name}` {received} layers {layers} (positions along its first axis). "
            "Leave those layers out."
        )
