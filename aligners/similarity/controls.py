"""Controls of a similarity: rows paired across texts, and intervals over groups of texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.stats import t as student
from torch import Tensor

from aligners.errors import UserError


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
    kept = weights * (real[:, :, None] & real[:, None, :])
    total = kept.sum(-1, keepdim=True)
    return kept / total.where(total > 0, 1)


def jackknife_interval(estimate: Tensor, left_out: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
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
        raise UserError(f"An interval needs at least 2 groups of texts in `left_out`, but got {groups}.")
    error = ((groups - 1) * left_out.var(0, correction=0)).sqrt()
    half = float(student.ppf((1 + level) / 2, groups - 1)) * error
    return estimate - half, estimate + half


def matching_layers(layers_x: Sequence[int], layers_y: Sequence[int]) -> list[tuple[int, int]]:
    """Match each layer of X with the layer of Y at the same relative depth: the diagonal, also at unequal depths."""
    last_x, last_y = max(len(layers_x) - 1, 1), len(layers_y) - 1
    return [(layer, layers_y[math.floor(place * last_y / last_x + 0.5)]) for place, layer in enumerate(layers_x)]
