"""Controls of a similarity: rows paired across texts, intervals over groups of texts, and a sample of rows."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.datamodules.rows.token_pairs import FREE, row_keys
from aligners.errors import UserError
from aligners.similarity.passes.ranks import collected, summed, this_rank


def permuted_rows(text: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Choose rows of X and of Y to pair so that no row meets its own text: the null of any measure.

    Y's rows are rolled by whole texts. Rows of one text stay together and in order, so the dependence within a
    text, which makes chance similarity larger than that of independent rows, is kept. A row that would still
    meet its own text (a text longer than the roll) is left out.

    Args:
        text: (N,) number of the text of each row; rows of a text are neighbours.
        share: how far to roll, as a share of the texts, in (0, 1).

    Returns:
        Row numbers of X and of Y, each (M,), M <= N, on the device of `text`.

    Raises:
        ValueError: fewer than two texts.
    """
    numbers = text.cpu()
    _, counts = torch.unique_consecutive(numbers, return_counts=True)
    if len(counts) < 2:
        raise UserError(
            "The null pairs rows of different texts of a batch: expected at least 2 texts in every batch, but got "
            f"{len(counts)}. Raise `batch_size`, or leave the controls off."
        )
    texts = min(max(round(share * len(counts)), 1), len(counts) - 1)
    rows = torch.arange(len(numbers))
    partners = (rows + int(counts[:texts].sum())) % len(numbers)
    apart = numbers[rows] != numbers[partners]
    return rows[apart].to(text.device), partners[apart].to(text.device)


def cropped(weights: Tensor, words: Tensor) -> Tensor:
    """Attention between the first `words` (B,) words of each text, rows again distributions: (L, H, B, W, W).

    Matrices of different texts can then be compared: the null of attention.
    """
    real = torch.arange(weights.shape[-1], device=words.device) < words[:, None]
    masked = weights * (real[:, :, None] & real[:, None, :])
    total = masked.sum(-1, keepdim=True)
    return masked / total.where(total > 0, 1)


def jackknife_interval(
    estimate: Tensor, left_out: Tensor, level: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return the interval from estimates that each leave out one group of texts: estimate ± t · standard error.

    A bootstrap is not used: texts that are drawn twice add similarity that is not there, so that its intervals lie
    beside the truth (measured in `benchmarks/intervals.py`).

    Args:
        estimate: (...) from all texts.
        left_out: (G, ...) from all texts but those of one group; NaN gives NaN.
        level: coverage.

    Returns:
        Lower and upper end, each (...).

    Raises:
        ValueError: fewer than two groups.

    References:
        Efron and Stein 1981, "The jackknife estimate of variance"; Student's t with G - 1 degrees of freedom.
    """
    groups = len(left_out)
    if groups < 2:
        raise UserError(
            f"An interval needs at least 2 groups of texts in `left_out`, but got {groups}."
        )
    from scipy.stats import t as student

    error = ((groups - 1) * left_out.var(0, correction=0)).sqrt()
    half = float(student.ppf((1 + level) / 2, groups - 1)) * error
    return estimate - half, estimate + half


def matching_layers(
    layers_x: Sequence[int], layers_y: Sequence[int]
) -> list[tuple[int, int]]:
    """Match each layer of X with the layer of Y at the same relative depth: the diagonal, also at unequal depths."""
    last_x, last_y = max(len(layers_x) - 1, 1), len(layers_y) - 1
    return [
        (layer, layers_y[math.floor(place * last_y / last_x + 0.5)])
        for place, layer in enumerate(layers_x)
    ]


class Sample(NamedTuple):
    """k paired rows, in the order of their keys.

    Attributes:
        x: (L_x, k, d_x); y: (L_y, k, d_y).
        text: id of the text of each row, (k,) int64.
    """

    x: Tensor
    y: Tensor
    text: Tensor

    def __add__(self, other: object) -> Self:
        """The rows of both."""
        if not isinstance(other, Sample):
            return NotImplemented
        x, y = torch.cat([self.x, other.x], 1), torch.cat([self.y, other.y], 1)
        return type(self)(x, y, torch.cat([self.text, other.text]))

    def pair(self, i: int, j: int) -> Self:
        """The rows of one layer of X and one of Y, by index."""
        return type(self)(self.x[i : i + 1], self.y[j : j + 1], self.text)


class Draw:
    """Which rows of a stream are in its sample: the same of all models, whatever the batches and the ranks.

    Args:
        budget: the most rows.
        seed: each seed gives another sample.
        device: where the rows are.

    Attributes:
        key: of the rows in the sample, (budget,), `FREE` where a place is free.
        text: ids of their texts, likewise.
    """

    def __init__(
        self, budget: int, seed: int, device: torch.device | None = None
    ) -> None:
        self.seed = seed
        self.key = torch.full((budget,), FREE, device=device)
        self.text = torch.zeros(budget, dtype=torch.int64, device=device)

    def admit(self, text: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Let rows with the smallest keys into the sample, in the places of those with the largest.

        Args:
            text: (N,) ids of the texts of a batch's rows.
            token: (N,) places of the rows in their texts.

        Returns:
            Places of the sample and numbers of the rows that belong there, (K,) each.
        """
        budget, offered = len(self.key), row_keys(self.seed, text, token)
        order = _smallest(torch.cat([self.key, offered]), budget)
        rows = order[order >= budget] - budget
        free = torch.ones_like(self.key, dtype=torch.bool)
        free[order[order < budget]] = False
        places = free.nonzero()[: len(rows), 0]
        self.key[places], self.text[places] = offered[rows], text[rows]
        return places, rows

    def end(self, groups: int) -> None:
        """Choose among the rows of all ranks, and put them in the order of groups of texts.

        `order` then has their places in the samples of all ranks laid end to end, and `text` their texts.
        """
        every = collected((self.key.cpu(), self.text.cpu()))
        key, text = (
            torch.cat(parts).to(self.key.device) for parts in zip(*every, strict=True)
        )
        order = _smallest(key, len(self.key))
        self.order = order[(text[order] % groups).argsort(stable=True)]
        self.text = text[self.order]

    def collect(self, rows: Tensor) -> Tensor:
        """The rows of all ranks in that order, (L, k, d), in the memory of this rank's rows (L, budget, d)."""
        budget = len(self.key)
        here = (self.order // budget == this_rank()).nonzero()[:, 0]
        for layer in rows:  # one at a time, for the memory
            chosen = layer.new_zeros(len(self.order), layer.shape[1])
            chosen[here] = layer[self.order[here] % budget]
            layer[: len(chosen)] = summed(chosen)
        return rows[:, : len(self.order)]


def _smallest(key: Tensor, budget: int) -> Tensor:
    """The places of the `budget` smallest keys, each once, in order; fewer where fewer are taken."""
    key, order = key.sort(stable=True)
    first = key < FREE
    first[1:] &= (
        key[1:] != key[:-1]
    )  # a row may come twice, from two ranks or from a sampler that evens them out
    return order[first][:budget]
