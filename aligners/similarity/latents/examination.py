"""The examination of a dictionary of two models: fitted on half of the texts, measured on the others."""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError, check_known
from aligners.files.resources import free_memory, in_words
from aligners.similarity.latents.dictionary import (
    Pair,
    PairedDictionary,
    check_rows_of,
    relative_norms,
)
from aligners.similarity.latents.other_texts import drawn_order, groups_of, other_rows
from aligners.similarity.latents.ratios import LEAST_UNITS
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
DOUBLE = 8  # bytes
KEPT = 2  # torchmetrics keeps a copy of every sum, to begin again from


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


class Memory(NamedTuple):
    """The bytes that an examination takes at most, beside the dictionary.

    Attributes:
        fitting: while directions are fitted.
        directions: the fitted ones, while sums are made.
        a_unit: sums, for each unit of text.
        units: G.
    """

    fitting: int
    directions: int
    a_unit: int
    units: int

    @classmethod
    def of(cls, dictionary: PairedDictionary, units: int, spaces: Spaces) -> Self:
        """Count what `FittedReadings` and `Measured` hold, and what they return, in float64."""
        sites, latents, d_x = dictionary.decoder_x.shape
        d_y = dictionary.decoder_y.shape[2]
        a_number = DOUBLE * sites * latents  # of each latent
        targets = 2 * (d_x + d_y)
        at_work = 3 * max(d_x, d_y)
        fitting = KEPT * targets + targets + at_work
        owners = 2 if spaces == "one" else 1
        readings = 4 * owners
        # of pairs and of the null: sums, what is read of them, and six of the parts of both models
        sums = KEPT * (3 + readings) + readings + 6
        directions = targets if spaces == "apart" else 0
        return cls(
            fitting=a_number * fitting,
            directions=a_number * directions,
            a_unit=2 * a_number * sums,
            units=units,
        )

    @property
    def most(self) -> int:
        """Bytes at most."""
        summing = self.directions + self.a_unit * self.units
        return max(self.fitting, summing)


def check_memory(dictionary: PairedDictionary, units: int, spaces: Spaces) -> int:
    """Return the bytes that an examination takes at most, on the device of its dictionary.

    Args:
        dictionary: of both models.
        units: of text, over which tests are made.
        spaces: see `examine`.

    Raises:
        ValueError: there is no memory for it: says which option to change.
    """
    memory = Memory.of(dictionary, units, spaces)
    device = dictionary.decoder_x.device
    free = free_memory(device)
    if memory.most <= free:
        return memory.most
    sites, latents, _ = dictionary.decoder_x.shape
    enough = (free - memory.directions) // memory.a_unit
    change = "Train a dictionary of fewer `latents` or of fewer `data.sites`"
    if memory.fitting <= free and enough >= LEAST_UNITS:
        change = f"Set `units` to {enough} or less"
    elif device.type != "cpu":
        change = f"Set `trainer.accelerator` to cpu, or {change[0].lower()}{change[1:]}"
    raise UserError(
        f"Expected memory to examine {latents:,} latents at each of {sites} sites in {units} `units` of text, but that "
        f"takes about {in_words(memory.most)} and {in_words(free)} are free. {change}."
    )


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
        ValueError: fewer than 4 texts, no memory for the sums, or as `LatentSums.update` does.
    """
    check_known(SPACES, spaces=spaces)
    number = text.unique_consecutive(return_inverse=True)[1]
    texts = int(number[-1]) + 1 if len(number) else 0
    check_texts(texts)
    check_rows_of(dictionary, codes, x, y)
    if variances is None:
        variances = total_variance(x), total_variance(y)
    check_memory(dictionary, texts // 2, spaces)
    fitted = FittedReadings(dictionary, *variances)
    fitting = (number % 2 == 0).nonzero()[:, 0]
    for some in fitting.split(ROWS):
        fitted.update(codes[:, some], x[:, some], y[:, some])
    readings = readings_of(fitted, spaces)
    fitted.free()
    measured = Measured.empty(dictionary, readings, units=texts // 2)
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
