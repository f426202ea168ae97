"""What a pass keeps: of the layers of a model, once, whatever it is compared with; and of each pair of models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.similarity.algebra.folding import word_pairs
from aligners.similarity.algebra.grid import CrossSums
from aligners.similarity.algebra.sides import Move, SideSums
from aligners.similarity.functional.attention import AttentionSums, attention_sums
from aligners.similarity.functional.hsic import HSIC, unbiased_hsic
from aligners.similarity.passes.ranks import gathered, summed, this_rank
from aligners.similarity.passes.streams import Rows, Shape, Stream
from aligners.similarity.sample import FREE, admit_, row_keys, smallest

__all__ = ["Draw", "Matching", "Moves", "SpanSums", "TileSums"]

Matching = Sequence[tuple[int, int]]  # positions of matching layers within a tile


class Draw:
    """Which rows of a stream are in its sample: the same of all models, whatever the batches and the ranks.

    Args:
        budget: the most rows.
        seed: each seed gives another sample.
        device: where the rows are.
    """

    def __init__(self, budget: int, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.key = torch.full((budget,), FREE, device=device)
        self.text = torch.zeros(budget, dtype=torch.int64, device=device)
        self.order = torch.empty(0, dtype=torch.int64, device=device)

    def admit(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Places in the sample, and the rows of this batch that belong there: see `admit_`."""
        keys = row_keys(self.seed, rows.text, rows.token)
        return admit_(self.key, self.text, keys, rows.text)

    def end(self, groups: int) -> None:
        """Choose among the rows of all ranks, and put them in the order of groups of texts.

        `order` then has their places in the samples of all ranks laid end to end, and `text` their texts.
        """
        key, text = gathered(self.key).flatten(), gathered(self.text).flatten()
        _, order = smallest(key, len(self.key))
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


class Moves(NamedTuple):
    """How the sums within a model get about the mean of the rows of all ranks.

    Attributes:
        states: of all texts, then of each group that is told apart; heads: likewise.
    """

    states: list[Move]
    heads: list[Move]


class SpanSums:
    """What is kept of some layers of a model in one stream, for all pairs that the model is in.

    Args:
        stream: which.
        shape: of the model; its layers are those of the span.
        groups: of texts that are told apart; 1: they are not.
        heads: keep sums of its attention heads too.
        device: where the rows are.

    Attributes:
        states: moments of all texts, then of each group that is told apart.
        heads: moments of attention weights, likewise.
        samples: rows by budget, (L, budget, d) float32.
    """

    def __init__(self, stream: Stream, shape: Shape, groups: int, heads: bool, device: torch.device) -> None:
        families, count = stream.families, 1 + (groups if groups > 1 else 0)
        self.states: list[SideSums] = []
        self.heads: list[SideSums] = []
        if "moments" in families:
            self.states = [SideSums.zeros(shape.layers, shape.width, device) for _ in range(count)]
        if heads and "head_moments" in families:
            self.heads = [SideSums.zeros(shape.blocks, shape.heads, device) for _ in range(count)]
        self.samples = {
            budget: torch.zeros(shape.layers, budget, shape.width, device=device) for budget in stream.budgets
        }

    def update_states(self, states: Tensor, group: int, admitted: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Add a batch of rows (L, N, d), whose texts belong to one group, and what `Draw.admit` says of them."""
        for budget, (places, rows) in admitted.items():
            self.samples[budget][:, places] = states[:, rows].float()
        for sums in _of_group(self.states, group):
            sums.add_(states)

    def update_heads(self, weights: Tensor, words: Tensor, group: int) -> None:
        """Add a batch of attention between words, (L, H, B, W, W)."""
        for sums in _of_group(self.heads, group):
            sums.add_(word_pairs(weights, words))

    def moves(self) -> Moves:
        """How its sums get about the mean over all ranks."""
        return Moves(_moves(self.states), _moves(self.heads))

    def end(self, moves: Moves, draws: Mapping[int, Draw]) -> None:
        """Make the sums those of all ranks, about the mean of all rows, and the samples those of all ranks."""
        for sums, each in ((self.states, moves.states), (self.heads, moves.heads)):
            for place, move in enumerate(each):
                n, shift, *rest = sums[place].moved(move, in_place=True)
                sums[place] = SideSums(summed(n), shift, *map(summed, rest))
        for budget, rows in self.samples.items():
            self.samples[budget] = draws[budget].collect(rows)


class TileSums:
    """What is kept of the layer pairs of a tile in one stream.

    Args:
        stream: which.
        x: sizes of X, of the layers of the tile; y: of Y.
        matching: positions of the matching layers, for which groups are told apart in moments.
        groups: of texts that are told apart; 1: they are not.
        heads: keep what belongs to the pair's attention too.
        products: precision of the products of X with Y, see `CrossSums.add_`.
        device: where the rows are.

    Attributes:
        states: moments of all texts.
        matching: of each group, of the matching layers alone.
        batches: sums over batches, of each group; heads, attention: sums over attention weights, of each group.
    """

    def __init__(
        self,
        stream: Stream,
        x: Shape,
        y: Shape,
        matching: Matching,
        groups: int,
        heads: bool,
        products: torch.dtype,
        device: torch.device,
    ) -> None:
        families, self.products, self.groups = stream.families, products, groups
        blocks = x.blocks, x.heads, y.blocks, y.heads
        self.states: CrossSums | None = None
        self.matching: dict[tuple[int, int], list[CrossSums]] = {}
        self.batches: list[HSIC] = []
        self.heads: list[CrossSums] = []
        self.attention: list[AttentionSums] = []
        if "moments" in families:
            self.states = CrossSums.zeros(x.layers, x.width, y.layers, y.width, device)
        if "moments" in families and groups > 1:
            self.matching = {
                pair: [CrossSums.zeros(1, x.width, 1, y.width, device) for _ in range(groups)] for pair in matching
            }
        if "batches" in families:
            self.batches = [HSIC.zeros(x.layers, y.layers, device) for _ in range(groups)]
        if heads and "head_moments" in families:
            self.heads = [CrossSums.zeros(*blocks, device) for _ in range(groups)]
        if heads and "heads" in families:
            self.attention = [AttentionSums.zeros(*blocks, device) for _ in range(groups)]

    def update_states(self, x: SpanSums, y: SpanSums, rows_x: Tensor, rows_y: Tensor, group: int) -> None:
        """Add a batch of rows, (L_x, N, d_x) and (L_y, N, d_y), that the two sides have already."""
        place = group if self.groups > 1 else 0
        if self.batches:
            self.batches[place] = HSIC(*_added(self.batches[place], unbiased_hsic(rows_x, rows_y)))
        if self.states is not None:
            self.states.add_(x.states[0].shifted(rows_x), y.states[0].shifted(rows_y), self.products)
        for (a, b), crosses in self.matching.items():
            one, other = slice(a, a + 1), slice(b, b + 1)
            side_x, side_y = x.states[1 + group].of(one), y.states[1 + group].of(other)
            crosses[group].add_(side_x.shifted(rows_x[one]), side_y.shifted(rows_y[other]))

    def update_heads(self, x: SpanSums, y: SpanSums, a: Tensor, b: Tensor, words: Tensor, group: int) -> None:
        """Add a batch of attention between words, (L_x, H_x, B, W, W) and (L_y, H_y, B, W, W)."""
        place = group if self.groups > 1 else 0
        if self.attention:
            self.attention[place] = AttentionSums(*_added(self.attention[place], attention_sums(a, b, words)))
        if self.heads:
            side_x, side_y = (side.heads[1 + group if self.groups > 1 else 0] for side in (x, y))
            rows_x, rows_y = word_pairs(a, words), word_pairs(b, words)
            self.heads[place].add_(side_x.shifted(rows_x), side_y.shifted(rows_y))

    def end(self, x: Moves, y: Moves, owner: int) -> None:
        """Make the sums those of all ranks, about the means of all rows, on the rank that owns the tile."""
        if self.states is not None:
            self.states = _ended(self.states, x.states[0], y.states[0], owner)
        for (a, b), crosses in self.matching.items():
            for group, cross in enumerate(crosses):
                moves = _of_layer(x.states[1 + group], a), _of_layer(y.states[1 + group], b)
                crosses[group] = _ended(cross, *moves, owner)
        for group, cross in enumerate(self.heads):
            place = 1 + group if self.groups > 1 else 0
            self.heads[group] = _ended(cross, x.heads[place], y.heads[place], owner)
        self.batches = [HSIC(*(summed(value, owner) for value in sums)) for sums in self.batches]
        self.attention = [AttentionSums(*(summed(value, owner) for value in sums)) for sums in self.attention]


def _of_group(sums: list[SideSums], group: int) -> list[SideSums]:
    """Those to which a batch of a group is added: of all texts, and of the group if it is told apart."""
    return sums[:1] + sums[1 + group : 2 + group]


def _moves(each: list[SideSums]) -> list[Move]:
    """The moves of sums to the mean of all texts, which come first, over all ranks."""
    if not each:
        return []
    whole = each[0]
    n, total = summed(whole.n.clone()), summed(whole.n * whole.shift + whole.sum)
    mean = total / n.clamp(min=1)
    return [sums.move(mean) for sums in each]


def _ended(cross: CrossSums, x: Move, y: Move, owner: int) -> CrossSums:
    return CrossSums(*(summed(value, owner) for value in cross.moved(x, y, in_place=True)))


def _of_layer(move: Move, layer: int) -> Move:
    one = slice(layer, layer + 1)
    return Move(move.n, *(value[one] for value in move[1:]))


def _added(a: Iterable[Tensor], b: Iterable[Tensor]) -> Iterator[Tensor]:
    return (one + two for one, two in zip(a, b, strict=True))
