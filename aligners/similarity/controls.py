"""Controls of a similarity: what a value is worth, intervals over groups of texts, and a sample of rows."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.datamodules.rows.token_pairs import FREE, row_keys
from aligners.errors import UserError
from aligners.similarity.algebra.permuted_pairs import OfPairs
from aligners.similarity.functional.neighbours import Neighbours, neighbours_of
from aligners.similarity.passes.ranks import collected, summed, this_rank

EQUAL = 1e-9  # values of a measure that differ by less are equal but for rounding


def cropped(weights: Tensor, words: Tensor) -> Tensor:
    """Return attention between the first `words` (B,) words of each text, rows normalised again: (L, H, B, W, W).

    Matrices of different texts can then be compared: the null of attention.
    """
    width = weights.shape[-1]
    places = torch.arange(width, device=words.device)
    real = places < words[:, None]
    rows = weights * real[:, :, None]
    masked = rows * real[:, None]
    total = masked.sum(-1, keepdim=True)
    some = total > 0
    total = total.where(some, 1)
    return masked / total


def jackknife_interval(
    estimate: Tensor, left_out: Tensor, level: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return the interval from estimates that each leave out one group of texts: estimate ± t · standard error.

    A bootstrap is not used: texts that are drawn twice add spurious similarity, so its intervals miss the true value
    (measured in `benchmarks/intervals.py`).

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

    freedom = groups - 1
    variance = freedom * left_out.var(0, correction=0)
    error = variance.sqrt()
    upper = (1 + level) / 2
    quantile = float(student.ppf(upper, freedom))
    half = quantile * error
    return estimate - half, estimate + half


class Calibration(NamedTuple):
    """What the values of a measure are worth beside those under permutations, (...) each.

    Attributes:
        null: mean under the permutations; high: largest.
        effect: (value − null) / (1 − null): 0 at the null, 1 at 1. NaN where the null is 1.
        p: the share of the permutations, the one that was observed among them, in which the value is as high.
        p_family: the same of the largest effect of all layer pairs.
    """

    null: Tensor
    high: Tensor
    effect: Tensor
    p: Tensor
    p_family: Tensor


def calibrated(
    value: Tensor, nulls: Tensor, as_paired: Tensor | None = None
) -> Calibration:
    """Set values of a measure at all layer pairs against those under R permutations.

    p is (1 + #{null ≥ value}) / (1 + R), at least 1 / (1 + R): exact if all permutations were equally likely, the true
    pairing among them (Phipson and Smyth 2010, "Permutation p-values should never be zero"). `p_family` is p of the
    largest effect over the layer pairs (Westfall and Young 1993, single-step maxT): the chance that any pair of
    unrelated models comes so high. As each permutation is one of all pairs, it is exact however strongly these depend
    on each other, as layers do; and its least value is 1 / (1 + R) for any number of pairs, where Holm's is that times
    their number. Effects in it are over the mean of the value and its nulls, which treats all permutations alike.

    Args:
        value: (L_x, L_y); NaN where there is none.
        nulls: (R, L_x, L_y).
        as_paired: (L_x, L_y) value of the rows that were permuted, which stands for `value` where these are not all.
    """
    draws = len(nulls)
    if as_paired is None:
        as_paired = value
    null = nulls.mean(0)
    above = 1 - null
    effect = (as_paired - null) / above.where(above > EQUAL, torch.nan)
    as_high = nulls >= as_paired - EQUAL
    p = (1 + as_high.sum(0)).double() / (1 + draws)

    every = torch.cat([as_paired[None], nulls])
    middle = every.mean(0)
    room = (1 - middle).clamp(min=EQUAL)
    effects = (every - middle) / room
    largest = effects.nan_to_num(nan=-torch.inf).flatten(1).amax(1)
    observed = effects[0]
    exceeding = largest[1:, None, None] >= observed - EQUAL
    p_family = (1 + exceeding.sum(0)).double() / (1 + draws)
    missing = value.isnan()
    return Calibration(
        null,
        nulls.amax(0),
        effect,
        p.masked_fill(missing, torch.nan),
        p_family.masked_fill(missing, torch.nan),
    )


def matching_layers(
    layers_x: Sequence[int], layers_y: Sequence[int]
) -> list[tuple[int, int]]:
    """Match each layer of X with the layer of Y at the same relative depth: the diagonal, also at unequal depths."""
    last_x = len(layers_x) - 1
    last_y = len(layers_y) - 1
    last_x = max(last_x, 1)
    pairs = []
    for place, layer in enumerate(layers_x):
        partner = place * last_y / last_x
        nearest = math.floor(partner + 0.5)
        pairs.append((layer, layers_y[nearest]))
    return pairs


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
        x = torch.cat([self.x, other.x], 1)
        y = torch.cat([self.y, other.y], 1)
        text = torch.cat([self.text, other.text])
        return type(self)(x, y, text)

    def swap(self) -> Self:
        """Swap X and Y."""
        return type(self)(self.y, self.x, self.text)

    def near(self) -> tuple[list[Neighbours], list[Neighbours]]:
        """Find the neighbours of the rows of each layer of X, and of Y, those of a row's own text left out."""
        of_x = neighbours_of(self.x, "x", groups=self.text)
        of_y = neighbours_of(self.y, "y", groups=self.text)
        return of_x, of_y

    def of_pairs(self, made_of: Callable[..., OfPairs]) -> Tensor:
        """Compute a measure that is made of sums over pairs of rows, (L_x, L_y)."""
        return made_of(self.x, self.y).value()

    def pair(self, i: int, j: int) -> Self:
        """Return the rows of one layer of X and one of Y, by index."""
        x = self.x[i : i + 1]
        y = self.y[j : j + 1]
        return type(self)(x, y, self.text)


class Draw:
    """The rows of a stream that are in its sample: the same for all models, batches and numbers of ranks.

    Args:
        budget: largest number of rows.
        seed: each seed gives another sample.
        device: device of the rows.

    Attributes:
        key: key of the rows in the sample, (budget,), `FREE` where a place is free.
        text: ids of their texts, likewise.
    """

    def __init__(
        self, budget: int, seed: int, device: torch.device | None = None
    ) -> None:
        self.seed = seed
        self.key = torch.full((budget,), FREE, device=device)
        self.text = torch.zeros_like(self.key)

    def admit(self, text: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Let rows with the smallest keys into the sample, in the places of those with the largest.

        Args:
            text: (N,) ids of the texts of a batch's rows.
            token: (N,) places of the rows in their texts.

        Returns:
            Places of the sample and numbers of the rows that belong there, (K,) each.
        """
        budget = len(self.key)
        offered = row_keys(self.seed, text, token)
        both = torch.cat([self.key, offered])
        order = _smallest(both, budget)
        is_new = order >= budget
        rows = order[is_new] - budget
        stays = order[~is_new]
        free = torch.ones_like(self.key, dtype=torch.bool)
        free[stays] = False
        places = free.nonzero()[:, 0]
        places = places[: len(rows)]
        self.key[places] = offered[rows]
        self.text[places] = text[rows]
        return places, rows

    def end(self, groups: int) -> None:
        """Choose among the rows of all ranks, and put them in the order of groups of texts.

        `order` then has their places in the samples of all ranks laid end to end, and `text` their texts.
        """
        device = self.key.device
        mine = (self.key.cpu(), self.text.cpu())
        of_ranks = collected(mine)
        keys, texts = zip(*of_ranks, strict=True)
        key = torch.cat(keys).to(device)
        text = torch.cat(texts).to(device)
        order = _smallest(key, len(self.key))
        group = text[order] % groups
        by_group = group.argsort(stable=True)
        self.order = order[by_group]
        self.text = text[self.order]

    def collect(self, rows: Tensor) -> Tensor:
        """Collect the rows of all ranks in that order, (L, k, d), in the memory of this rank's rows (L, budget, d)."""
        budget = len(self.key)
        count = len(self.order)
        rank = self.order // budget
        here = rank == this_rank()
        places = self.order[here] % budget
        for layer in rows:  # one at a time, for the memory
            chosen = layer.new_zeros(count, layer.shape[1])
            chosen[here] = layer[places]
            layer[:count] = summed(chosen)
        return rows[:, :count]


def _smallest(key: Tensor, budget: int) -> Tensor:
    """Return the places of the `budget` smallest keys, each once, in order; fewer if there are fewer."""
    key, order = key.sort(stable=True)
    first = key < FREE
    # a row may come twice, from two ranks or from a sampler that evens them out
    following = key[1:]
    first[1:] &= following != key[:-1]
    kept = order[first]
    return kept[:budget]
