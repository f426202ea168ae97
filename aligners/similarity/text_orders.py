"""Orders of the texts of a batch: the null of any measure pairs X's texts with Y's in another one."""

from itertools import pairwise
from math import factorial

import torch
from torch import Tensor

from aligners.datamodules.rows.token_pairs import row_keys
from aligners.errors import UserError

AS_PAIRED = 0  # number of the order in which every text meets itself
LEAST_TEXTS = 8  # of a window, if the batch has so many
ALIKE = 0.75  # least share that a window's shortest text has of its longest, beyond `LEAST_TEXTS`
_SEED = 0x5DEECE66D  # so that orders do not depend on samples of rows of the same seed


def permuted_rows(text: Tensor, order: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Choose rows of X and of Y to pair so that X's texts meet Y's in a random order: the null of any measure.

    Texts change places within windows of texts of nearly equal length. Each is cut to the rows of its window's
    shortest, so that they can be exchanged: rows of one text stay together, in order and at their place in the text,
    and the dependence within a text, which makes chance similarity larger than that of independent rows, is kept. All
    orders of a window are equally likely, the true one among them: a text meets itself as often as chance has it, once
    a window on average. That is what makes p exact; see `aligners.similarity.controls.calibrated`.

    Args:
        text: (N,) number of the text of each row; rows of a text are neighbours.
        order: 1, 2, ...: number of the permutation. `AS_PAIRED`: the same rows, each text with itself.
        seed: of all permutations.

    Returns:
        Row numbers of X and of Y, each (M,), M <= N, on the device of `text`. Those of X are the same for all orders,
        and those of Y the same rows.

    Raises:
        ValueError: fewer than two texts.
    """
    numbers = text.cpu()
    of_texts, counts = numbers.unique_consecutive(return_counts=True)
    if len(counts) < 2:
        raise UserError(
            "The null pairs rows of different texts of a batch: expected at least 2 texts in every batch, but got "
            f"{len(counts)}. Raise `batch_size`, or leave the controls off."
        )
    ends = counts.cumsum(0)
    starts = ends - counts
    partners = permuted_texts(counts, int(of_texts[0]), order, seed)
    place, partner, length = partners
    before = length.cumsum(0) - length
    row = torch.arange(int(length.sum())) - before.repeat_interleave(length)
    rows_x = starts[place].repeat_interleave(length) + row
    rows_y = starts[partner].repeat_interleave(length) + row
    return rows_x.to(text.device), rows_y.to(text.device)


def permuted_texts(
    lengths: Tensor, batch: int, order: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose for each text of a batch the one whose place it takes in an order.

    Args:
        lengths: (T,) of the texts.
        batch: what tells the batch from others, such as the number of its first text.
        order: as in `permuted_rows`.
        seed: as there.

    Returns:
        Places of the texts of X, those of their partners of Y, and the length to which both are cut, each (U,), U <= T.
    """
    places = torch.arange(len(lengths))
    keys = places
    if order != AS_PAIRED:
        keys = row_keys(seed ^ _SEED, torch.full_like(places, batch), places)
        keys = row_keys(order, keys, places)
    of_x = []
    of_y = []
    cut = []
    for window in windows(lengths.cpu()):
        drawn = keys[window].argsort()
        of_x.append(window)
        of_y.append(window[drawn])
        cut.append(lengths.cpu()[window].amin().expand(len(window)))
    place = torch.cat(of_x)
    by_place = place.argsort()
    return place[by_place], torch.cat(of_y)[by_place], torch.cat(cut)[by_place]


def windows(lengths: Tensor) -> list[Tensor]:
    """Divide texts of these lengths (T,) into windows of nearly equal ones: their places, each in order.

    A window has at least `LEAST_TEXTS` texts, of a small batch all, and the last one what is left; of one text alone
    there is no window.
    """
    longest_first = lengths.argsort(descending=True, stable=True)
    ordered = lengths[longest_first].tolist()
    starts = [0]
    for place, length in enumerate(ordered):
        start = starts[-1]
        if place - start >= LEAST_TEXTS and length < ALIKE * ordered[start]:
            starts.append(place)
    found = []
    for start, end in pairwise([*starts, len(ordered)]):
        if end - start > 1:
            found.append(longest_first[start:end].sort().values)
    return found


def sure_orders(texts: list[int]) -> int:
    """Return how many different orders batches of so many texts have at least, whatever the texts' lengths."""
    count = 1
    for number in texts:
        count *= factorial(min(number, LEAST_TEXTS))
    return count
