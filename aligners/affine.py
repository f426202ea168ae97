"""Stitching layers: affine maps with parameters, to be trained on the activations or through a frozen tail."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from aligners.base import Aligner, BankLinear, Scaling
from aligners.linear import Affine, deviations, least_squares, procrustes_rotation
from similarity.functional.moments import Moments

__all__ = ["AffineLayer", "LowRank", "Orthogonal", "Start", "low_rank"]

Start = Literal["identity", "linear", "procrustes", "random"]

# How far, in standard deviations, a start puts what its LayerNorm normalises from zero. At 0 the layer starts by giving
# every row one length, at 100 it can hardly learn to. States that are copied onto themselves lose at 0, 4 and 10 of
# their variance .4, .4 and .4 % where a LayerNorm made them, and 24, 3 and 1 % where the lengths of rows vary by half.
_LEVEL = 4.0
_SMALLEST_VARIANCE = 1e-6  # of a feature, as share of the mean
_ORTHOGONAL = 1e-4  # how far WᵀW may be from the identity: what single precision leaves, and no more


class _Started(Aligner):
    """What the stitching layers share: a linear start, and the FVU as their loss on activations.

    Without `fit` and `adopt` states are neither centred nor scaled, and a start that needs moments is the identity
    (with zeros added or left out at unequal widths).
    """

    starts: ClassVar[tuple[str, ...]] = get_args(Start)

    def __init__(self, sites: int, d_x: int, d_y: int, start: Start, ridge: float = 0.0) -> None:
        super().__init__(sites, d_x, d_y)
        name = type(self).__name__
        if start not in self.starts:
            raise ValueError(f"{name} expects `start` to be one of {', '.join(self.starts)}, but got {start!r}.")
        if start == "identity" and d_x != d_y:
            raise ValueError(
                f"{name} can start at the identity only between equal widths, but `d_x` is {d_x} and `d_y` is {d_y}. "
                'Set `start` to "linear", "procrustes" or "random".'
            )
        if ridge < 0:
            raise ValueError(f"Expected `ridge` to be zero or positive, but got {ridge:g}.")
        self.start, self.ridge = start, ridge
        self.scaling = Scaling(sites, d_x, d_y)

    @property
    def rows_needed(self) -> int:
        """For least squares, one more than there are unknowns for each output."""
        return self.d_x + 1 if self.start == "linear" else 2

    @abstractmethod
    def _mapped(self, x: Tensor) -> Tensor:
        """The map up to Y's centre and scale: (S, N, d_x) -> (S, N, d_y)."""

    @abstractmethod
    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments | None) -> None:
        """Make the map x ↦ (x − x̄) W + o, for W (S, d_x, d_y) and o (S, 1, d_y) in float64 and x̄ of the scaling."""

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        return self.scaling.unscale_target(self._mapped(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of the batch at each site, (S,)."""
        return (self._mapped(x) - self.scaling.scale_target(y)).square().mean((1, 2))

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Take centres and scales of the states, and the start from them.

        Raises:
            ValueError: the states of a site are constant or not finite, or least squares cannot be solved.
        """
        deviations(moments, constant_neurons=True)
        self.scaling.fit(moments)
        if self.start == "random":
            return
        offset = moments.mean_y
        if self.start == "identity":
            offset = moments.mean_x
            weight = torch.eye(self.d_x, dtype=torch.float64, device=offset.device).repeat(self.sites, 1, 1)
        elif self.start == "linear":
            weight = least_squares(moments, self.ridge)
        else:
            weight, _ = procrustes_rotation(moments)
        self._begin(weight, offset[:, None], moments)

    @torch.no_grad()
    def adopt(self, aligner: Aligner, moments: Moments | None = None) -> None:
        """Start at a map that is already fitted, in the place of `start`.

        Args:
            aligner: a fitted closed form of `aligners.linear`, `aligners.permutation` or `aligners.canonical`, of the
                same sites and widths.
            moments: of the rows that it was fitted on, from which centres and scales are taken. Without them states
                are centred as `aligner` does and not scaled. `LowRank`, and `AffineLayer` with `norm`, need them.

        Raises:
            ValueError: the aligner is no such map, or this layer cannot start at it.
        """
        sizes, others = (self.sites, self.d_x, self.d_y), (aligner.sites, aligner.d_x, aligner.d_y)
        if not isinstance(aligner, Affine) or sizes != others:
            raise ValueError(
                f"Expected `aligner` to be a closed form (x − x̄) W + ȳ with (sites, d_x, d_y) = {sizes}, such as "
                f"Linear, Procrustes or CCA, but got {type(aligner).__name__} with {others}. Train an aligner of "
                "another kind as it is, and set `start` for the identity."
            )
        mean_x, weight, offset = (part.double() for part in (aligner.mean_x, aligner.weight, aligner.mean_y))
        if moments is None:
            self.scaling.mean_x.copy_(mean_x)
            self.scaling.mean_y.copy_(offset)
        else:
            self.scaling.fit(moments)
            offset = offset + (moments.mean_x[:, None] - mean_x) @ weight
        self._begin(weight, offset, moments)

    def options(self) -> dict[str, Any]:
        """Start and ridge."""
        return {"start": self.start, "ridge": self.ridge}

    def _scaled(self, weight: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """W and o of `_begin` between centred and scaled states."""
        scaling = self.scaling
        scale_x, scale_y, mean_y = (part.double() for part in (scaling.scale_x, scaling.scale_y, scaling.mean_y))
        return weight * scale_x / scale_y, (offset - mean_y) / scale_y

    def _moments_for(self, moments: Moments | None, what: str) -> Moments:
        if moments is None:
            raise ValueError(f"{what} takes a map over by what it does to states: expected `moments`, but got none.")
        return moments


class AffineLayer(_Started):
    """y = h W + b, on request with a LayerNorm over the features of y behind it (Brown et al. 2023, §3 and C.1).

    W and b act between centred and scaled states (`Scaling`), which changes what a step of the optimiser does and not
    what can be learned.

    With `norm`, exactly those targets can be represented whose rows, after one shift and one gain per feature, have
    mean zero and one length: states that are themselves the output of a LayerNorm. A start gives the LayerNorm Y's
    deviations (times a common factor) as gain and, so that rows of other lengths pass too, moves what it normalises
    away from zero along the feature pattern in which Y varies least; of Y it then loses that direction and the
    mean over the standardised features, and a row of r times the usual length comes out wrong by about (r² − 1)/8.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        start: where training begins: "identity", x as it is (equal widths only); "linear", least squares;
            "procrustes", the (semi-)orthogonal map; "random", the draw of `torch.nn.Linear` between centred and
            scaled states, the same at every site.
        norm: whether a LayerNorm with gain and bias follows.
        ridge: λ of least squares, relative to the mean variance of X.

    Raises:
        ValueError: an unknown or an impossible start, or a negative ridge.
    """

    def __init__(
        self, sites: int, d_x: int, d_y: int, *, start: Start = "linear", norm: bool = False, ridge: float = 1e-6
    ) -> None:
        super().__init__(sites, d_x, d_y, start, ridge)
        self.affine = BankLinear(sites, d_x, d_y)
        if start != "random":
            _set(self.affine, torch.eye(d_x, d_y))
        self.norm = norm
        if norm:
            self.gain = nn.Parameter(torch.ones(sites, 1, d_y))
            self.shift = nn.Parameter(torch.zeros(sites, 1, d_y))

    def _mapped(self, x: Tensor) -> Tensor:
        y = self.affine(self.scaling.scale(x))
        return torch.addcmul(self.shift, nn.functional.layer_norm(y, (self.d_y,)), self.gain) if self.norm else y

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments | None) -> None:
        weight, offset = self._scaled(weight, offset)
        if self.norm:
            moments = self._moments_for(moments, "AffineLayer with `norm`")
            deviation, pattern = _pattern(moments)
            deviation = deviation / self.scaling.scale_y
            weight = weight / deviation
            spread = moments.xx / (moments.n * self.scaling.scale_x.double().square())
            # mean square of what is normalised, over rows and features, without the level
            square = (weight * (spread @ weight)).sum(1, keepdim=True).mean(-1, keepdim=True)
            level = _LEVEL * square.sqrt()
            self.gain.copy_(deviation * (level.square() + square).sqrt())
            self.shift.copy_(offset - level * deviation * pattern)
            offset = level * pattern
        _set(self.affine, weight, offset)

    def options(self) -> dict[str, Any]:
        """Start, ridge, and whether a LayerNorm follows."""
        return {**super().options(), "norm": self.norm}


class LowRank(_Started):
    """y = h U V + b with U (d_x, r) and V (r, d_y): of the centred states, r directions of X reach r of Y.

    A start is the map of rank r whose images of the fitting rows are nearest to those of the full one. For "linear"
    that is reduced-rank regression (Izenman 1975); "identity" projects on the r leading principal components of X.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        rank: r, at least 1 and at most the smaller width.
        start: as of `AffineLayer`, cut to rank r.
        ridge: λ of least squares, relative to the mean variance of X.

    Raises:
        ValueError: an impossible rank, an unknown or an impossible start, or a negative ridge.
    """

    def __init__(
        self, sites: int, d_x: int, d_y: int, *, rank: int, start: Start = "linear", ridge: float = 1e-6
    ) -> None:
        super().__init__(sites, d_x, d_y, start, ridge)
        if not 1 <= rank <= min(d_x, d_y):
            raise ValueError(
                f"Expected `rank` to be at least 1 and at most {min(d_x, d_y)}, the smaller width, but got {rank}. "
                "A map of full rank is an AffineLayer."
            )
        self.rank = rank
        self.down = BankLinear(sites, d_x, rank).weight
        self.up = BankLinear(sites, rank, d_y)
        if start != "random":
            with torch.no_grad():
                self.down.copy_(torch.eye(d_x, rank))
            _set(self.up, torch.eye(rank, d_y))

    def _mapped(self, x: Tensor) -> Tensor:
        return self.up(self.scaling.scale(x) @ self.down)

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments | None) -> None:
        weight, offset = self._scaled(weight, offset)
        down, up = low_rank(weight, self._moments_for(moments, "LowRank").xx, self.rank)
        self.down.copy_(down)
        _set(self.up, up, offset)

    def options(self) -> dict[str, Any]:
        """Rank, start and ridge."""
        return {**super().options(), "rank": self.rank}


class Orthogonal(_Started):
    """y = (x − x̄) R + b, with R orthogonal after every step: R = R₀ (I − A)⁻¹ (I + A) for A skew-symmetric.

    The d (d − 1)/2 entries of A below its diagonal are the parameters, zero at the start, where the map is R₀. A
    Cayley transform has determinant 1: the sign of det R is that of R₀, and turns by exactly 180° are its only
    limit. Lengths are kept, not scaled: X and Y are expected to have states of one size.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states, equal to `d_x`.
        start: R₀: "identity", "procrustes", or "random", drawn uniformly, the same at every site.

    Raises:
        ValueError: unequal widths or an unknown start.
    """

    bijective = invertible = True
    needs_equal_width = True
    starts = ("identity", "procrustes", "random")
    base: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int, *, start: Start = "procrustes") -> None:
        super().__init__(sites, d_x, d_y, start)
        base = torch.eye(d_x)
        if start == "random":
            q, r = torch.linalg.qr(torch.randn(d_x, d_x))
            base = q * r.diagonal().sign()  # without the signs the draw would not be uniform (Mezzadri 2007)
        self.register_buffer("base", base.repeat(sites, 1, 1))
        self.skew = nn.Parameter(torch.zeros(sites, d_x * (d_x - 1) // 2))
        self.bias = nn.Parameter(torch.zeros(sites, 1, d_y))

    def rotation(self) -> Tensor:
        """R, (S, d, d)."""
        i, j = torch.tril_indices(self.d_x, self.d_x, -1, device=self.skew.device)
        lower = torch.zeros_like(self.base)
        lower[:, i, j] = self.skew
        skew, one = lower - lower.mT, torch.eye(self.d_x, dtype=lower.dtype, device=lower.device)
        return self.base @ torch.linalg.solve(one - skew, one + skew)

    def _mapped(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, (x - self.scaling.mean_x) / self.scaling.scale_y, self.rotation())

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d), the exact inverse of `forward`."""
        centred = self.scaling.scale_target(y) - self.bias
        # R₀ is orthogonal up to rounding, so that Rᵀ would be R's inverse up to rounding, too
        return centred @ torch.linalg.inv(self.rotation()) * self.scaling.scale_y + self.scaling.mean_x

    def _begin(self, weight: Tensor, offset: Tensor, moments: Moments | None) -> None:
        gap = (weight.mT @ weight - torch.eye(self.d_x, dtype=weight.dtype, device=weight.device)).abs().amax()
        if not gap < _ORTHOGONAL:
            raise ValueError(
                "Orthogonal can only take over a map that keeps lengths, such as Procrustes without scale or "
                f"Permutation, but the `aligner`'s WᵀW differs from the identity by up to {float(gap):.2g}. Use an "
                "AffineLayer."
            )
        self.base.copy_(weight)
        self.skew.zero_()
        self.bias.copy_((offset - self.scaling.mean_y.double()) / self.scaling.scale_y)

    def options(self) -> dict[str, Any]:
        """The start."""
        return {"start": self.start}


def low_rank(weight: Tensor, scatter: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The map of rank r whose images of X are nearest to those of W: argmin ‖X W − X U V‖ (Izenman 1975).

    It is W, projected on the r leading principal components of its images.

    Args:
        weight: W, (S, d_x, d_y).
        scatter: XᵀX of centred rows, (S, d_x, d_x).
        rank: r.

    Returns:
        U (S, d_x, r), and V (S, r, d_y) with orthonormal rows.
    """
    components = torch.linalg.eigh(weight.mT @ scatter @ weight).eigenvectors[..., -rank:]
    return weight @ components, components.mT


def _pattern(moments: Moments) -> tuple[Tensor, Tensor]:
    """Deviations of Y's features, and the pattern over standardised ones in which they vary least.

    Returns:
        Deviations and pattern, each (S, 1, d_y); the pattern has mean zero and mean square one.
    """
    d = moments.yy.shape[-1]
    variance = moments.yy.diagonal(dim1=-2, dim2=-1) / moments.n
    # a feature that hardly varies must not be divided by its deviation
    deviation = variance.clamp(min=_SMALLEST_VARIANCE * variance.mean(-1, keepdim=True)).sqrt()[:, None]
    correlation = moments.yy / moments.n / (deviation * deviation.mT)
    mean = torch.full_like(correlation, 1 / d)
    apart = correlation - mean @ correlation
    apart = apart - apart @ mean
    # with the mean over features lifted above every other direction, the last one is orthogonal to it
    pattern = torch.linalg.eigh(apart + 2 * d * mean).eigenvectors[..., 0]
    sign = pattern.gather(-1, pattern.abs().argmax(-1, keepdim=True)).sign()
    return deviation, (pattern * sign * d**0.5)[:, None]


def _set(layer: BankLinear, weight: Tensor, bias: Tensor | None = None) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_() if bias is None else layer.bias.copy_(bias)
