"""Directions along which each model is read for what it has of a latent: decoders, or fitted to other texts."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.double_metric import DoubleMetric
from aligners.similarity.latents.dictionary import (
    Pair,
    PairedDictionary,
    check_one_space,
    check_rows_of,
    firing,
    relative_norms,
    targets_of,
)

KINDS = ("error", "rebuilt")  # of targets
ONE_SIDED = 1 / 3  # relative norm below which a latent is mostly X's


class Readings(NamedTuple):
    """How both models are read for each latent, of O owners: 2, or 1 where directions do not depend on the owner.

    The reading of a model's target t is Σ f_j u_j·(t − t̄), with a target of each kind: the error of the dictionary, and
    what its latents rebuild, or some of them. To a target without the latent's own part f_j d_j this is added.

    Attributes:
        directions: u by owner (X, Y) and kind (error, rebuilt): one pair (S, m, d_x), (S, m, d_y) for each.
        centres: t̄ by kind: pairs (S, d_x), (S, d_y), of the targets without what is put back.
        mean_code: (S, m) mean of the codes, which centres what is put back; 0 where nothing is centred.
        variances: (S,) of X and of Y, that readings are divided by; 1 where both models have the same units.
        counting: (S, m) latents that count in what is rebuilt of X, and of Y.
        squared: whether a reading is a squared length, so that the ratio of two needs a root.
    """

    directions: tuple[tuple[Pair, Pair], ...]
    centres: tuple[Pair, Pair]
    mean_code: Tensor
    variances: Pair
    counting: Pair
    squared: bool

    def to(self, device: torch.device) -> Self:
        """Return the readings on a device."""

        def moved(part: Any) -> Any:
            if isinstance(part, tuple):
                return tuple(moved(each) for each in part)
            return part.to(device) if isinstance(part, Tensor) else part

        return type(self)(*moved(tuple(self)))


def decoder_readings(
    dictionary: PairedDictionary, centred: Readings | None = None
) -> Readings:
    """Read both models along the decoder of the latent's owner, for models that share a space (2504.02922, §3).

    β_j = argmin Σ ‖β f_j d_j − t‖² = Σ f_j d_j·t / Σ f_j²‖d_j‖², so the ratio of two readings is that of the two β.

    Args:
        dictionary: of both models.
        centred: fitted readings, whose means are subtracted from the targets: β then has an intercept. Without, as in
            the paper, a latent whose decoder points to the mean of what is rebuilt looks shared, also with rows of
            other texts.

    Raises:
        ValueError: the widths differ.
    """
    check_one_space(dictionary)
    sites, latents, width = dictionary.decoder_x.shape
    ones = dictionary.decoder_x.new_ones(sites)
    mean_code = ones.new_zeros(sites, latents)
    errors = ones.new_zeros(sites, width), ones.new_zeros(sites, width)
    if centred is not None:
        mean_code = centred.mean_code
        errors = centred.centres[0]
    rebuilt = []
    directions = []
    for decoder in dictionary.decoders:
        mean = mean_code[:, None] @ decoder
        rebuilt.append(mean[:, 0])
        in_both = decoder, decoder
        directions.append((in_both, in_both))
    every = torch.ones_like(mean_code, dtype=torch.bool)
    return Readings(
        directions=tuple(directions),
        centres=(errors, (rebuilt[0], rebuilt[1])),
        mean_code=mean_code,
        variances=(ones, ones),
        counting=(every, every),
        squared=False,
    )


class FittedReadings(DoubleMetric):
    """Read each model along the direction that its own target has with the latent, fitted on texts of its own.

    Where the spaces differ (two seeds, two widths, a rotation), a decoder of Y says nothing about directions of X. The
    target t of each model is then regressed on the code alone, with an intercept: u_j = Σ f_j (t − t̄) / Σ (f_j − f̄_j)².
    On held-out texts, Σ f_j u_j·(t − t̄) / Σ f_j² estimates ‖u_j‖² without the bias of a length that is fitted and
    measured on the same rows: its mean is 0 where the target does not depend on the code. Divided by the model's total
    variance, it does not depend on rotations, translations or one scale of either model's coordinates.

    A code also predicts what merely occurs in the same texts. What is rebuilt therefore counts only latents that are at
    least twice as strong in the model, among which the other half of a split latent is: of all latents, those that both
    models have would make each of Y's own that comes with them look shared. This version of latent scaling is ours.

    Args:
        dictionary: of both models.
        variance_x: (S,) total variance of X's states, the mean of ‖x − x̄‖².
        variance_y: (S,) of Y's.
    """

    full_state_update = False
    n: Tensor
    total: Tensor
    square: Tensor

    def __init__(
        self,
        dictionary: PairedDictionary,
        variance_x: Tensor,
        variance_y: Tensor,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dictionary = dictionary
        self.variances = variance_x.double(), variance_y.double()
        norm = relative_norms(dictionary, variance_x, variance_y)
        self.counting = norm < ONE_SIDED, norm > 1 - ONE_SIDED
        sites, latents, _ = dictionary.decoder_x.shape
        device = dictionary.decoder_x.device
        shapes: dict[str, tuple[int, ...]] = {
            "n": (),
            "total": (sites, latents),
            "square": (sites, latents),
        }
        for side, decoder in zip("xy", dictionary.decoders, strict=True):
            width = decoder.shape[2]
            for kind in KINDS:
                shapes[f"{kind}_{side}"] = (sites, width)
                shapes[f"with_{kind}_{side}"] = (sites, latents, width)
        for name, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=torch.float64, device=device)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, codes: Tensor, x: Tensor, y: Tensor) -> None:
        """Add rows: codes (S, N, m), x (S, N, d_x), y (S, N, d_y).

        Raises:
            ValueError: see `check_rows_of`.
        """
        check_rows_of(self.dictionary, codes, x, y)
        self.n += codes.shape[1]
        latents = codes.shape[2]
        for site in range(len(codes)):
            entries = firing(codes[site])
            states = x[site], y[site]
            self.total[site].index_add_(0, entries.latent, entries.value)
            self.square[site].index_add_(0, entries.latent, entries.value**2)
            targets = targets_of(self.dictionary, site, entries, states, self.counting)
            for place, side in enumerate("xy"):
                for kind, pair in zip(KINDS, targets, strict=True):
                    target = pair[place]
                    self._add(f"{kind}_{side}", site, target.sum(0))
                    products = entries.weighted(target, latents)
                    self._add(f"with_{kind}_{side}", site, products)

    def _add(self, name: str, site: int, value: Tensor) -> None:
        getattr(self, name)[site] += value

    def compute(self) -> Readings:
        """Return the fitted readings; a latent that never fired has directions of 0.

        Raises:
            ValueError: fewer than 2 rows, or no row on which a latent fires.
        """
        check_fired(self.total)
        if self.n < 2:
            raise UserError(
                f"Directions are fitted on at least 2 rows, but got {int(self.n)}."
            )
        mean_code = self.total / self.n
        spread = self.square - self.n * mean_code**2
        spread = spread.where(spread > 0, torch.inf)[..., None]
        directions, centres = [], []
        for kind in KINDS:
            of_kind, means = [], []
            for place, side in enumerate("xy"):
                decoder = self.dictionary.decoders[place]
                mean = getattr(self, f"{kind}_{side}") / self.n
                products = getattr(self, f"with_{kind}_{side}")
                centred = products - self.total[..., None] * mean[:, None]
                direction = centred / spread
                # the slope of f_j d_j, where the target is without it, is d_j
                without = spread.isfinite()
                if kind == "rebuilt":
                    without = without & ~self.counting[place][..., None]
                direction = direction + decoder * without
                of_kind.append(direction)
                means.append(mean)
            directions.append((of_kind[0], of_kind[1]))
            centres.append((means[0], means[1]))
        return Readings(
            directions=((directions[0], directions[1]),),
            centres=(centres[0], centres[1]),
            mean_code=mean_code,
            variances=self.variances,
            counting=self.counting,
            squared=True,
        )


def check_fired(total: Tensor) -> None:
    """Raise unless a latent fires somewhere at every site, given sums of codes (S, m).

    Raises:
        ValueError: names the sites at which none does.
    """
    silent = (total.sum(1) == 0).nonzero()[:, 0].tolist()
    if silent:
        raise UserError(
            f"Expected `codes` above 0 on some rows of every site, but no latent fires at site {silent[0]} "
            f"({len(silent)} of {len(total)} sites). Is the dictionary trained, and its threshold that of its training?"
        )
