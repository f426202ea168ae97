"""The examination of a dictionary of two models: fitted on half of the texts, measured on the others."""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError, check_known
from aligners.similarity.latents.dictionary import (
    Pair,
    PairedDictionary,
    check_rows_of,
    relative_norms,
)
from aligners.similarity.latents.other_texts import drawn_order, groups_of, other_rows
from aligners.similarity.latents.readings import (
    FittedReadings,
    Readings,
    decoder_readings,
)
from aligners.similarity.latents.unit_sums import LatentSums, Parts
from aligners.similarity.passes.ranks import summed

Spaces = Literal["one", "apart"]
SPACES: tuple[Spaces, ...] = ("one", "apart")
ROWS = 4096  # fitted on at a time
FEWEST = 4  # texts


class Examination(NamedTuple):
    """What two models have of each latent, see `verdicts`.

    Attributes:
        norm: (S, m) share of Y in the decoder norms.
        parts: of both models, on the held-out texts.
        permuted: the same, the other model's part from other texts.
    """

    norm: Tensor
    parts: Parts
    permuted: Parts


class Measured(NamedTuple):
    """Sums over the held-out texts, of the pairs as they are, and of codes that meet the states of other texts."""

    sums: LatentSums
    null: LatentSums

    @classmethod
    def empty(
        cls, dictionary: PairedDictionary, readings: Readings, units: int
    ) -> Self:
        """Begin without rows; see `LatentSums`."""
        sums, null = (
            LatentSums(dictionary, readings, units, sync_on_compute=False)
            for _ in range(2)
        )
        return cls(sums, null)

    def gather(self) -> None:
        """Add the sums of all ranks, in place, once."""
        for metric in self:
            for name in ("fired", "total", "square", "along"):
                summed(getattr(metric, name))

    def update(
        self, codes: Tensor, x: Tensor, y: Tensor, unit: Tensor, text: Tensor
    ) -> None:
        """Add the rows of one group of texts; see `LatentSums.update`, and `other_rows` for `text`."""
        self.sums.update(codes, x, y, unit)
        pairs = other_rows(text)
        if len(pairs[0]):
            self.null.update(codes, x, y, unit, pairs)

    def examined(self, norm: Tensor) -> Examination:
        """Return what the sums say, given the share of Y in the decoder norms."""
        owner = (norm > 0.5).long()
        parts = self.sums.parts(owner)
        return Examination(norm, parts, self.sums.parts(owner, self.null))


def examine(
    dictionary: PairedDictionary,
    codes: Tensor,
    x: Tensor,
    y: Tensor,
    text: Tensor,
    spaces: Spaces = "apart",
    variances: Pair | None = None,
) -> Examination:
    """Examine a dictionary on paired rows.

    Every second text is fitted on, the others are held out, and are the units of intervals and tests.

    Args:
        dictionary: of both models.
        codes: (S, N, m) its codes, at least 0.
        x: (S, N, d_x) states.
        y: (S, N, d_y) states of the same rows.
        text: (N,) numbers of the texts; rows of a text are neighbours.
        spaces: "one" reads both models along the decoder of a latent's owner, centred, as for a model and its
            fine-tuning; "apart" along directions that are fitted for each.
        variances: (S,) total variance of X's states and of Y's. Default: those of these rows.

    Raises:
        ValueError: fewer than 4 texts, or as `LatentSums.update` does.
    """
    check_known(SPACES, spaces=spaces)
    number = text.unique_consecutive(return_inverse=True)[1]
    texts = int(number[-1]) + 1 if len(number) else 0
    check_texts(texts)
    check_rows_of(dictionary, codes, x, y)
    if variances is None:
        variances = total_variance(x), total_variance(y)
    fitted = FittedReadings(dictionary, *variances)
    fitting = (number % 2 == 0).nonzero()[:, 0]
    for some in fitting.split(ROWS):
        fitted.update(codes[:, some], x[:, some], y[:, some])
    measured = Measured.empty(dictionary, readings_of(fitted, spaces), units=texts // 2)
    rows, place = held_out_rows(number)
    for group in groups_of(place):
        some = rows[group]
        unit = number[some] // 2
        measured.update(codes[:, some], x[:, some], y[:, some], unit, unit)
    return measured.examined(relative_norms(dictionary, *variances))


def check_texts(texts: int) -> None:
    """Raise unless there are texts enough to fit on some and measure on others.

    Raises:
        ValueError: fewer than 4.
    """
    if texts < FEWEST:
        raise UserError(
            f"Expected at least {FEWEST} texts, two to fit on and two held out, but got {texts}."
        )


def readings_of(fitted: FittedReadings, spaces: Spaces) -> Readings:
    """Return how both models are read, from what was fitted on half of the texts."""
    readings = fitted.compute()
    if spaces == "one":
        return decoder_readings(fitted.dictionary, readings)
    return readings


def total_variance(states: Tensor) -> Tensor:
    """The mean of ‖x − x̄‖² over rows: (S, N, d) → (S,)."""
    return states.double().var(1, correction=0).sum(1)


def held_out_rows(number: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of every second text, the longest texts first, and the place of each row's text among these.

    Args:
        number: (N,) numbers of the rows' texts, 0, 1, ...: rows of a text are neighbours.
    """
    lengths = number.bincount()
    starts = lengths.cumsum(0) - lengths
    order = drawn_order(torch.arange(1, len(lengths), 2, device=number.device))
    order = order[lengths[order].argsort(descending=True, stable=True)]
    rows, places = [], []
    for place, text in enumerate(order.tolist()):
        length = int(lengths[text])
        start = int(starts[text])
        rows.append(torch.arange(start, start + length, device=number.device))
        places.append(number.new_full((length,), place))
    return torch.cat(rows), torch.cat(places)
