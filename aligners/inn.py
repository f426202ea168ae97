"""The invertible network: the bijection hypothesis as a map."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from similarity.functional.moments import Moments

from .base import Aligner, Scaling
from .couplings import AffineCoupling

__all__ = ["INN"]

_MIXINGS = ("none", "linear")
_STARTS = ("identity", "procrustes", "linear")


class INN(Aligner):
    """Affine couplings on alternating halves, with or without an invertible linear layer around each.

    g(x) = M_K ∘ C_K ∘ ... ∘ M_1 ∘ C_1 ∘ M_0 (x), with couplings C_k and, under mixing "linear", learned
    d × d matrices M_k. Their explicit inverses are formed once per call, so `inverse` costs what `forward`
    does. Before training, g is the closed-form map `start`.

    The paper's form is `mixing="none", start="identity", both_ways=False`.

    References: Dinh, Sohl-Dickstein and Bengio 2016, arXiv 1605.08803; Ren et al. eq. 11-12; learned linear
    layers between couplings: Kingma and Dhariwal 2018, "Glow", arXiv 1807.03039.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states; odd widths are split unevenly.
        d_y: width of Y's states, equal to `d_x`.
        couplings: K, the number of couplings.
        hidden: width of the conditioners' hidden layers.
        depth: number of the conditioners' hidden layers.
        mixing: "none", halves alternate and nothing else; "linear", learned invertible matrices.
        start: the map before training: "identity" (of the centred, scaled states), "procrustes" or
            "linear" (least squares, kept invertible). All but "identity" need `mixing="linear"`.
        both_ways: the loss is FVU(g) + FVU(g⁻¹), not FVU(g) alone.

    Raises:
        ValueError: unequal widths, a width under 2, or an unknown or impossible option.
    """

    bijective = True
    invertible = True
    needs_equal_width = True

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        couplings: int = 8,
        hidden: int = 64,
        depth: int = 1,
        mixing: str = "linear",
        start: str = "procrustes",
        both_ways: bool = True,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        _check(d_x, couplings, mixing, start)
        self.mixing, self.start, self.both_ways = mixing, start, both_ways
        self.hidden, self.depth = hidden, depth
        self.scaling = Scaling(sites, d_x, d_y)
        self.split = d_x // 2
        halves = [(self.split, d_x - self.split)]
        halves.append(halves[0][::-1])
        self.couplings = nn.ModuleList(AffineCoupling(sites, *halves[k % 2], hidden, depth) for k in range(couplings))
        if mixing == "linear":
            # orthogonal draws, the same for every site, whose product is the identity
            draws = torch.linalg.qr(torch.randn(couplings, d_x, d_x)).Q
            around = [draws[0], *(draws[:-1].mT @ draws[1:]), draws[-1].mT]
            self.matrices = nn.Parameter(torch.stack(around).repeat(sites, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        with torch.autocast(x.device.type, enabled=False):
            return self.scaling.unscale_target(self._map(self.scaling.scale(_at_least_float32(x))))

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d), the exact inverse of `forward`."""
        with torch.autocast(y.device.type, enabled=False):
            return self.scaling.unscale(self._map_back(self.scaling.scale_target(_at_least_float32(y))))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """FVU of g, plus that of g⁻¹ under `both_ways`: (S,)."""
        with torch.autocast(x.device.type, enabled=False):
            x, y = self.scaling.scale(_at_least_float32(x)), self.scaling.scale_target(_at_least_float32(y))
            loss = (self._map(x) - y).square().mean((1, 2))
            if self.both_ways:
                loss = loss + (self._map_back(y) - x).square().mean((1, 2))
            return loss

    def log_det(self, x: Tensor) -> Tensor:
        """Log |det ∂g/∂x| at each row, (S, N)."""
        log_scale = (self.scaling.scale_y / self.scaling.scale_x).log()[..., 0]
        total = self.d_x * log_scale.expand(-1, x.shape[1])
        if self.mixing == "linear":
            total = total + torch.linalg.slogdet(self.matrices).logabsdet.sum(1)[:, None]
        x_a, x_b = self._first(self.scaling.scale(x))
        for k in range(len(self.couplings)):
            coupling = cast(AffineCoupling, self.couplings[k])
            total = total + coupling.log_scale(x_a if k % 2 == 0 else x_b).sum(-1)
            x_a, x_b = self._step(k, x_a, x_b)
        return total

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Set the scaling and the starting point."""
        self.scaling.fit(moments)
        if self.start == "identity":
            return
        scale_x, scale_y = self.scaling.scale_x.double(), self.scaling.scale_y.double()
        xx, xy = moments.xx / scale_x**2 / moments.n, moments.xy / scale_x / scale_y / moments.n
        u, s, vt = torch.linalg.svd(xy)
        matrix = u @ vt
        if self.start == "linear":
            u, s, vt = torch.linalg.svd(torch.linalg.solve(xx + 1e-4 * torch.eye(self.d_x).to(xx), xy))
            matrix = u * s.clamp(min=0.03 * s[:, :1])[:, None] @ vt
        current = self._product(self.matrices.double())
        self.matrices[:, 0] = matrix @ torch.linalg.inv(current) @ self.matrices[:, 0].double()

    def options(self) -> dict[str, Any]:
        """The constructor's keyword options."""
        return {
            "couplings": len(self.couplings),
            "hidden": self.hidden,
            "depth": self.depth,
            "mixing": self.mixing,
            "start": self.start,
            "both_ways": self.both_ways,
        }

    def _product(self, matrices: Tensor) -> Tensor:
        product, *rest = matrices.unbind(1)
        for matrix in rest:
            product = product @ matrix
        return product

    def _first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.mixing == "linear":
            x = x @ self.matrices[:, 0]
        return x[..., : self.split], x[..., self.split :]

    def _step(self, k: int, x_a: Tensor, x_b: Tensor) -> tuple[Tensor, Tensor]:
        """Coupling k, and the linear layer behind it."""
        coupling = cast(AffineCoupling, self.couplings[k])
        if k % 2 == 0:
            x_b = coupling(x_a, x_b)
        else:
            x_a = coupling(x_b, x_a)
        return self._mix(x_a, x_b, self.matrices[:, k + 1]) if self.mixing == "linear" else (x_a, x_b)

    def _mix(self, x_a: Tensor, x_b: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.baddbmm(x_a @ matrix[:, : self.split], x_b, matrix[:, self.split :])
        return x[..., : self.split], x[..., self.split :]

    def _map(self, x: Tensor) -> Tensor:
        x_a, x_b = self._first(x)
        for k in range(len(self.couplings)):
            x_a, x_b = self._step(k, x_a, x_b)
        return torch.cat((x_a, x_b), -1)

    def _map_back(self, y: Tensor) -> Tensor:
        mixed = self.mixing == "linear"
        y_a, y_b = y[..., : self.split], y[..., self.split :]
        inverses = torch.linalg.inv(self.matrices) if mixed else None
        for k in reversed(range(len(self.couplings))):
            if inverses is not None:
                y_a, y_b = self._mix(y_a, y_b, inverses[:, k + 1])
            coupling = cast(AffineCoupling, self.couplings[k])
            if k % 2 == 0:
                y_b = coupling.inverse(y_a, y_b)
            else:
                y_a = coupling.inverse(y_b, y_a)
        y = torch.cat((y_a, y_b), -1)
        return y @ inverses[:, 0] if inverses is not None else y


def _check(width: int, couplings: int, mixing: str, start: str) -> None:
    """Refuse options that make no network."""
    if width < 2:
        raise ValueError(f"INN expects a width of at least 2 to split in halves, but `d_x` is {width}.")
    if couplings < 1:
        raise ValueError(f"INN expects at least one coupling, but `couplings` is {couplings}.")
    if mixing not in _MIXINGS:
        raise ValueError(f"INN expects `mixing` to be one of {_MIXINGS}, but received {mixing!r}.")
    if start not in _STARTS:
        raise ValueError(f"INN expects `start` to be one of {_STARTS}, but received {start!r}.")
    if mixing == "none" and start != "identity":
        raise ValueError(
            f"INN without linear layers starts at the identity, but `start` is {start!r}. "
            'Use mixing="linear", or start="identity".'
        )


def _at_least_float32(x: Tensor) -> Tensor:
    """Half precision is too coarse for an exact inverse."""
    return x.float() if x.dtype.itemsize < 4 else x
