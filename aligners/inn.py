"""The invertible network: the bijection hypothesis as a map."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from aligners.base import Aligner, Scaling
from aligners.couplings import AffineCoupling
from aligners.linear import least_squares, procrustes_rotation
from similarity.functional.moments import Moments

__all__ = ["INN"]

Mixing = Literal["none", "linear"]
Start = Literal["identity", "procrustes", "linear"]

_RIDGE = 1e-4
# Least squares shrinks what it cannot predict, in the limit to nothing; the start must have a sane inverse.
_SMALLEST_SINGULAR_VALUE = 0.03


class INN(Aligner):
    """Affine couplings on alternating halves, by themselves or between learned invertible linear layers.

    g(x) = (M_0 C_1 M_1 C_2 ... C_K M_K)(x), read from left to right: C_k are couplings and, under mixing
    "linear", M_k learned d × d matrices (else the identity). Their explicit inverses are formed once per call,
    so that `inverse` costs what `forward` does: no system is solved row by row.

    The paper's network is `mixing="none", start="identity", both_ways=False`. Training in
    one direction leaves an inverse that is exact and, as a map from Y to X, of no use; so both directions is the
    default.

    References: Dinh, Sohl-Dickstein and Bengio 2016, "Density estimation using Real NVP", arXiv 1605.08803;
    Ren et al., eq. 11 and 12; linear layers between couplings: Kingma and Dhariwal 2018, "Glow", arXiv 1807.03039.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states, at least 2; an odd width is split unevenly.
        d_y: width of Y's states, equal to `d_x`.
        couplings: K, the number of couplings; from 2 on every dimension is changed.
        hidden: width of the hidden layers of a coupling's network; 3/2 · d_x where not given.
        depth: number of those hidden layers.
        mixing: "none", where halves alternate and nothing else, or "linear".
        start: the map before training, on centred and scaled states: "identity", "procrustes", or "linear", least
            squares with its smallest singular values raised to 3 % of the largest. Mixing "none" can only start
            at the identity.
        both_ways: train g as a map from X to Y and g⁻¹ as a map from Y to X, not g alone.

    Raises:
        ValueError: unequal widths, a width under 2, an unknown or an impossible option.
    """

    bijective = invertible = True
    needs_equal_width = True
    matrices: nn.Parameter | None

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        couplings: int = 8,
        hidden: int | None = None,
        depth: int = 1,
        mixing: Mixing = "linear",
        start: Start = "procrustes",
        both_ways: bool = True,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        hidden = 3 * d_x // 2 if hidden is None else hidden
        _check_sizes(d_x=d_x, couplings=couplings, hidden=hidden, depth=depth)
        _check_start(mixing, start)
        self.hidden, self.depth, self.mixing, self.start, self.both_ways = hidden, depth, mixing, start, both_ways
        self.scaling = Scaling(sites, d_x, d_y)
        self.widths = (d_x // 2, d_x - d_x // 2)
        self.couplings = nn.ModuleList(
            AffineCoupling(sites, self.widths[k % 2], self.widths[1 - k % 2], hidden, depth) for k in range(couplings)
        )
        matrices = _telescope(couplings, d_x).repeat(sites, 1, 1, 1) if mixing == "linear" else None
        self.matrices = None if matrices is None else nn.Parameter(matrices)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        with torch.autocast(x.device.type, enabled=False):
            return self.scaling.unscale_target(self._map(self.scaling.scale(_precise(x))))

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d), the exact inverse of `forward`."""
        with torch.autocast(y.device.type, enabled=False):
            return self.scaling.unscale(self._map_back(self.scaling.scale_target(_precise(y))))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of g on the batch, plus that of g⁻¹ under `both_ways`: (S,)."""
        with torch.autocast(x.device.type, enabled=False):
            x, y = self.scaling.scale(_precise(x)), self.scaling.scale_target(_precise(y))
            loss = (self._map(x) - y).square().mean((1, 2))
            return loss + (self._map_back(y) - x).square().mean((1, 2)) if self.both_ways else loss

    def log_det(self, x: Tensor) -> Tensor:
        """The logarithm of |det ∂g/∂x| at each row: (S, N, d) -> (S, N)."""
        with torch.autocast(x.device.type, enabled=False):
            constant = self.d_x * (self.scaling.scale_y / self.scaling.scale_x).log().squeeze(-1)
            if self.matrices is not None:
                constant = constant + torch.linalg.slogdet(self.matrices).logabsdet.sum(1, keepdim=True)
            log_scales: list[Tensor] = []
            self._map(self.scaling.scale(_precise(x)), log_scales)
            return constant + torch.stack(log_scales).sum(0)

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Set the scaling, and the linear layers so that their product is the starting map."""
        self.scaling.fit(moments)
        if self.matrices is None or self.start == "identity":
            return
        if self.start == "procrustes":
            start, _ = procrustes_rotation(moments)
        else:
            u, s, vh = torch.linalg.svd(least_squares(moments, _RIDGE))
            s = (
                s.clamp(min=_SMALLEST_SINGULAR_VALUE * s[:, :1])
                * self.scaling.scale_x[:, 0]
                / self.scaling.scale_y[:, 0]
            )
            start = u * s[:, None] @ vh
        first, *rest = self.matrices.double().unbind(1)
        for matrix in rest:
            first = first @ matrix
        # the draws' product, the identity until now, could have been moved by an earlier fit
        self.matrices[:, -1] = self.matrices[:, -1].double() @ torch.linalg.solve(first, start)

    def options(self) -> dict[str, Any]:
        """Everything that shapes the network and its loss."""
        return {
            "couplings": len(self.couplings),
            "hidden": self.hidden,
            "depth": self.depth,
            "mixing": self.mixing,
            "start": self.start,
            "both_ways": self.both_ways,
        }

    def _coupling(self, k: int) -> AffineCoupling:
        return cast(AffineCoupling, self.couplings[k])

    def _map(self, x: Tensor, log_scales: list[Tensor] | None = None) -> Tensor:
        """Apply g to scaled states; appends each coupling's log-determinant (S, N) to `log_scales`.

        The halves stay apart from coupling to coupling: joining them each time would cost as much as the
        couplings' own arithmetic.
        """
        matrices = None if self.matrices is None else self.matrices.unbind(1)
        x_a, x_b = self._halves(x if matrices is None else x @ matrices[0])
        for k in range(len(self.couplings)):
            coupling = self._coupling(k)
            if log_scales is not None:
                log_scales.append(coupling.log_scale(x_b if k % 2 else x_a).sum(-1))
            if k % 2:
                x_a = coupling(x_b, x_a)
            else:
                x_b = coupling(x_a, x_b)
            if matrices is not None:
                x_a, x_b = self._mix(x_a, x_b, matrices[k + 1])
        return torch.cat((x_a, x_b), -1)

    def _map_back(self, y: Tensor) -> Tensor:
        """Apply g⁻¹ to scaled states."""
        matrices = None if self.matrices is None else torch.linalg.inv(self.matrices).unbind(1)
        y_a, y_b = self._halves(y)
        for k in reversed(range(len(self.couplings))):
            if matrices is not None:
                y_a, y_b = self._mix(y_a, y_b, matrices[k + 1])
            if k % 2:
                y_a = self._coupling(k).inverse(y_b, y_a)
            else:
                y_b = self._coupling(k).inverse(y_a, y_b)
        y = torch.cat((y_a, y_b), -1)
        return y if matrices is None else y @ matrices[0]

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_a, x_b = x.split(self.widths, dim=-1)
        return x_a, x_b

    def _mix(self, x_a: Tensor, x_b: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        top, bottom = matrix.split(self.widths, dim=-2)
        return self._halves(torch.baddbmm(x_a @ top, x_b, bottom))


def _telescope(couplings: int, width: int) -> Tensor:
    """Orthogonal matrices Q_1, Q_1ᵀQ_2, ..., Q_Kᵀ: each coupling sees other halves, and the product is the identity.

    Returns:
        (couplings + 1, width, width)
    """
    draws = torch.linalg.qr(torch.randn(couplings, width, width)).Q
    return torch.cat((draws[:1], draws[:-1].mT @ draws[1:], draws[-1:].mT))


def _precise(x: Tensor) -> Tensor:
    """Float32 at least: in half precision no inverse is exact."""
    return x.float() if x.dtype.itemsize < 4 else x


def _check_sizes(d_x: int, **sizes: int) -> None:
    if d_x < 2:
        raise ValueError(f"INN expects states that can be split in two halves, but `d_x` is {d_x}. Use Linear or MLP.")
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"INN expects `{name}` to be at least 1, but got {size}.")


def _check_start(mixing: str, start: str) -> None:
    for name, value, known in (("mixing", mixing, get_args(Mixing)), ("start", start, get_args(Start))):
        if value not in known:
            raise ValueError(f"INN expects `{name}` to be one of {', '.join(known)}, but got {value!r}.")
    if mixing == "none" and start != "identity":
        raise ValueError(
            f"INN without linear layers can only start at the identity, but `start` is {start!r} and `mixing` is "
            '"none". Set `start` to "identity" or `mixing` to "linear".'
        )
