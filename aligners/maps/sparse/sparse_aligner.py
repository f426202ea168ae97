"""Sparse dictionaries as maps between the states of two models."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from aligners.errors import UserError, check_known
from aligners.maps.base import Aligner, Scaling
from aligners.maps.solvers import RIDGES, ridge_regression
from aligners.maps.sparse.crosscoder import Crosscoder
from aligners.maps.sparse.selection import Selection
from aligners.similarity.algebra.moments import Moments
from aligners.similarity.latents.dictionary import PairedDictionary

Of = Literal["both", "x"]
FULL_RATE_WIDTH = 64  # see `aligners.fitting.steps.make_optimizer`


class SparseAligner(Aligner):
    """A crosscoder of X and Y, or a sparse autoencoder of X: states as sums of few latents.

    `codes` gives the latents of paired states, `decode` the states of latents. As a map from X to Y, a crosscoder is
    given the states of X and, in place of those of Y, what least squares predicts of them; of a sparse autoencoder's
    reconstruction of X, least squares predicts Y.

    The criterion of validations is the error of the reconstruction, not that of the map.

    See `Crosscoder`.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
        of: "both" models, or "x" alone.
        latents: m. Default: 16 times the larger width.
        active: k, the mean number of active latents of a row under batch_topk.
        selection: "batch_topk" or "l1".
        penalty: coefficient of L1; default 0.03.
        own: share of the latents that each model has for itself, at most a half.
        auxiliary: weight of the loss that revives dead latents.
        dead_after: rows without firing after which a latent is dead. Default: 100 m / k.

    Raises:
        ValueError: an option is out of range, or of another selection.
    """

    reconstructs = True
    predicted: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        of: Of = "both",
        latents: int | None = None,
        active: int = 32,
        selection: Selection = "batch_topk",
        penalty: float | None = None,
        own: float = 0.0,
        auxiliary: float = 1 / 32,
        dead_after: int | None = None,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        check_known(get_args(Of), of=of)
        widths = [d_x, d_y] if of == "both" else [d_x]
        self.crosscoder = Crosscoder(
            sites,
            widths,
            latents,
            active=active,
            selection=selection,
            penalty=penalty,
            own=own,
            auxiliary=auxiliary,
            dead_after=dead_after,
        )
        self.of = of
        self.latents = self.crosscoder.latents
        self.active = active
        self.selection = selection
        self.penalty = penalty
        self.own = own
        self.auxiliary = auxiliary
        self.dead_after = self.crosscoder.dead_after
        self.scaling = Scaling(sites, d_x, d_y)
        self.register_buffer("predicted", torch.zeros(sites, d_x, d_y))

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Set the scaling, what least squares predicts, and directions drawn as the fitting rows are distributed."""
        self.scaling.fit(moments)
        weight, _ = ridge_regression(moments, RIDGES)
        scale_x = self.scaling.scale_x.double()
        scale_y = self.scaling.scale_y.double()
        self.predicted.copy_(weight * scale_x / scale_y)
        covariance = moments.xx / scale_x**2
        if self.of == "both":
            xy = moments.xy / (scale_x * scale_y)
            of_x = torch.cat([covariance, xy], 2)
            of_y = torch.cat([xy.mT, moments.yy / scale_y**2], 2)
            covariance = torch.cat([of_x, of_y], 1)
        self.crosscoder.start(covariance / moments.n)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_x) -> (S, N, d_y)."""
        x = self.scaling.scale(x)
        if self.of == "both":
            codes = self.crosscoder.codes([x, x @ self.predicted])
            _, y = self.crosscoder.decode(codes)
        else:
            codes = self.crosscoder.codes([x])
            (again,) = self.crosscoder.decode(codes)
            y = again @ self.predicted
        return self.scaling.unscale_target(y)

    def codes(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the latents of rows, each for itself.

        Args:
            x: (S, N, d_x).
            y: the same rows of Y, (S, N, d_y). Default: what least squares predicts of them.

        Returns:
            (S, N, m), at least 0.
        """
        return self.crosscoder.codes(self._scaled(x, y))

    def decode(self, codes: Tensor) -> list[Tensor]:
        """Return the states of X, and of Y if the dictionary is of both, from latents (S, N, m)."""
        states = self.crosscoder.decode(codes)
        unscaled = [self.scaling.unscale(states[0])]
        for y in states[1:]:
            unscaled.append(self.scaling.unscale_target(y))
        return unscaled

    @torch.no_grad()
    def paired(self) -> PairedDictionary:
        """Return the decoders of both models in the units of their states, to examine which latents they share.

        Raises:
            ValueError: the dictionary is of X alone.
        """
        if self.of != "both":
            raise UserError(
                "Expected a `SparseAligner` of both models, but got one of x alone. Train it with `of: both`."
            )
        scaling = self.scaling
        shift_x, shift_y = self.crosscoder.shifts
        bias_x = scaling.unscale(shift_x)
        bias_y = scaling.unscale_target(shift_y)
        decoder_x = self.crosscoder.decoder(0) * scaling.scale_x
        decoder_y = self.crosscoder.decoder(1) * scaling.scale_y
        return PairedDictionary.of(decoder_x, decoder_y, bias_x[:, 0], bias_y[:, 0])

    def variances(self) -> tuple[Tensor, Tensor]:
        """The total variances of X's and of Y's states on the fitting rows, (S,) each."""
        scaling = self.scaling
        variance_x = self.d_x * scaling.scale_x.double().square()
        variance_y = self.d_y * scaling.scale_y.double().square()
        return variance_x[:, 0, 0], variance_y[:, 0, 0]

    def _scaled(self, x: Tensor, y: Tensor | None) -> list[Tensor]:
        """Scaled states of the models of the dictionary."""
        x = self.scaling.scale(x)
        if self.of == "x":
            return [x]
        if y is None:
            return [x, x @ self.predicted]
        return [x, self.scaling.scale_target(y)]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the FVU of the reconstruction of X plus that of Y, and what `Crosscoder.loss` adds: (S,)."""
        return self.crosscoder.loss(self._scaled(x, y))

    def settle(self, x: Tensor, y: Tensor) -> None:
        """Measure the threshold with the weights as they are now."""
        self.crosscoder.settle(self._scaled(x, y))

    def reconstruction_errors(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what the reconstruction leaves of each row in units of FVU, the mean of the models: (S, N)."""
        states = self._scaled(x, y)
        codes = self.crosscoder.codes(states)
        errors = []
        for state, again in zip(states, self.crosscoder.decode(codes), strict=True):
            errors.append((state - again).double().square().mean(2))
        return torch.stack(errors).mean(0)

    def fan_in(self, name: str, parameter: Tensor) -> int:
        """√(64 d) for encoders and decoders alike, so that their rate goes with 1/√d.

        Both have rows of a length that does not depend on the width, so entries of the size 1/√d, whatever they sum
        over. d is the larger width. At width 384, 300 steps on planted features leave an FVU of .170, but .260 with a
        rate that goes with 1/d (`benchmarks/planted.py`, seed 0, --features 2 --expansion 4 --a_step 256 --rows 20000
        --auxiliary 0.25).
        """
        if ".encoders." in name or ".decoders." in name:
            width = max(self.crosscoder.widths)
            return round((FULL_RATE_WIDTH * width) ** 0.5)
        return super().fan_in(name, parameter)

    def kept_floats(self) -> int:
        """Numbers that a step keeps of each row and site for the gradient, about."""
        return 3 * self.latents + 2 * (self.d_x + self.d_y)

    def findings(self) -> dict[str, Any]:
        """Return the share of dead latents at each site."""
        dead = self.crosscoder.dead().double().mean(1)
        return {"dead_latents": dead.tolist()}
