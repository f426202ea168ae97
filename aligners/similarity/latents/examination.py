"""The examination of a dictionary of two models: fitted on half of the texts in memory, measured on the others."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from aligners.errors import UserError, check_known
from aligners.similarity.controls import rolled_rows
from aligners.similarity.latents.dictionary import (
    PairedDictionary,
    check_rows_of,
    relative_norms,
)
from aligners.similarity.latents.readings import FittedReadings, decoder_readings
from aligners.similarity.latents.unit_sums import LatentSums, Parts

Spaces = Literal["one", "apart"]
SPACES: tuple[Spaces, ...] = ("one", "apart")
ROWS = 4096  # read at a time
FAR = 0.4  # share of the texts by which rows are rolled for the null


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


def examine(
    dictionary: PairedDictionary,
    codes: Tensor,
    x: Tensor,
    y: Tensor,
    text: Tensor,
    spaces: Spaces = "apart",
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

    Raises:
        ValueError: fewer than 4 texts, or as `LatentSums.update` does.
    """
    check_known(SPACES, spaces=spaces)
    number = text.unique_consecutive(return_inverse=True)[1]
    texts = int(number[-1]) + 1 if len(number) else 0
    if texts < 4:
        raise UserError(
            f"Expected at least 4 texts, two to fit on and two held out, but got {texts}."
        )
    rows = torch.arange(len(number), device=number.device)
    fitting = rows[number % 2 == 0]
    held_out = rows[number % 2 == 1]
    check_rows_of(dictionary, codes, x, y)
    variance_x = x.double().var(1, correction=0).sum(1)
    variance_y = y.double().var(1, correction=0).sum(1)
    fitted = FittedReadings(dictionary, variance_x, variance_y)
    for some in fitting.split(ROWS):
        fitted.update(codes[:, some], x[:, some], y[:, some])
    readings = fitted.compute()
    if spaces == "one":
        readings = decoder_readings(dictionary, readings)

    sums = LatentSums(dictionary, readings, texts // 2)
    null = LatentSums(dictionary, readings, texts // 2)
    unit = number // 2
    for some in _whole_texts(held_out, number):
        given = codes[:, some], x[:, some], y[:, some], unit[some]
        sums.update(*given)
        null.update(*given, rolled_rows(unit[some], FAR))
    norm = relative_norms(dictionary, variance_x, variance_y)
    owner = (norm > 0.5).long()
    return Examination(norm, sums.parts(owner), sums.parts(owner, null))


def _whole_texts(rows: Tensor, number: Tensor) -> list[Tensor]:
    """Divide rows into batches of about `ROWS` that end with a text, and of two texts at least."""
    batches = []
    start = 0
    of_text = number[rows].unique_consecutive(return_counts=True)[1]
    ends = of_text.cumsum(0).tolist()
    texts = 0
    for place, end in enumerate(ends):
        texts += 1
        last = place == len(ends) - 1
        two_left = len(ends) - place - 1 != 1
        if last or (end - start >= ROWS and texts > 1 and two_left):
            batches.append(rows[start:end])
            start = end
            texts = 0
    return batches
