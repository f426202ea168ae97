"""What a pass keeps: of the layers of a model, once, whatever it is compared with; and of each pair of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.similarity.algebra.grid import CrossSums, Move, SideSums
from aligners.similarity.catalogue import ATTENTION, Family
from aligners.similarity.functional.attention import AttentionSums, attention_sums, word_pairs
from aligners.similarity.functional.cka import HSIC, unbiased_hsic
from aligners.similarity.passes.ranks import summed
from aligners.similarity.passes.streams import Shape, Stream
from aligners.similarity.sample import Draw

Matching = Sequence[tuple[int, int]]  # positions of matching layers within a tile
Moves = Mapping[Family, list[Move]]  # how the sums within a model get about the mean of the rows of all ranks


class SpanSums:
    """What is kept of some layers of a model in one stream, for all pairs that the model is in.

    Args:
        stream: which.
        shape: of the model; its layers are those of the span.
        groups: of texts that are told apart; 1: they are not.
        heads: keep sums of its attention heads too.
        device: where the rows are.

    Attributes:
        moments: of states (`moments`) and of attention weights (`head_moments`): of all texts, then of each group that
            is told apart.
        samples: rows by budget, (L, budget, d) float32.
    """

    def __init__(self, stream: Stream, shape: Shape, groups: int, heads: bool, device: torch.device) -> None:
        sizes: dict[Family, tuple[int, int]] = {"moments": (shape.layers, shape.width)}
        sizes |= {"head_moments": (shape.blocks, shape.heads)} if heads else {}
        self.moments: dict[Family, list[SideSums]] = {
            family: [SideSums.zeros(*size, device) for _ in range(1 + (groups if groups > 1 else 0))]
            for family, size in sizes.items()
            if family in stream.families
        }
        self.samples = {
            budget: torch.zeros(shape.layers, budget, shape.width, device=device) for budget in stream.budgets
        }

    def update_states(self, states: Tensor, group: int, admitted: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Add a batch of rows (L, N, d), whose texts belong to one group, and what `Draw.admit` says of them."""
        for budget, (places, rows) in admitted.items():
            self.samples[budget][:, places] = states[:, rows].float()
        for sums in self._of("moments", group):
            sums.add_(states)

    def update_heads(self, weights: Tensor, words: Tensor, group: int) -> None:
        """Add a batch of attention between words, (L, H, B, W, W)."""
        for sums in self._of("head_moments", group):
            sums.add_(word_pairs(weights, words))

    def _of(self, family: Family, group: int) -> list[SideSums]:
        """Those to which a batch of a group is added: of all texts, and of the group if it is told apart."""
        every = self.moments.get(family, [])
        return every[:1] + every[1 + group : 2 + group]

    def moves(self) -> Moves:
        """How its sums get about the mean of all texts over all ranks."""
        found: dict[Family, list[Move]] = {}
        for family, each in self.moments.items():
            whole = each[0]
            n, total = summed(whole.n.clone()), summed(whole.n * whole.shift + whole.sum)
            found[family] = [sums.move(total / n.clamp(min=1)) for sums in each]
        return found

    def end(self, moves: Moves, draws: Mapping[int, Draw]) -> None:
        """Make the sums those of all ranks, about the mean of all rows, and the samples those of all ranks."""
        for family, each in self.moments.items():
            for place, move in enumerate(moves[family]):
                n, shift, *rest = each[place].moved(move, in_place=True)
                each[place] = SideSums(summed(n), shift, *map(summed, rest))
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
        crosses: sums between the two models: of states, of all texts (place 0) and of the matching layers in each group
            that is told apart (places from 1 on); of attention weights, of all texts or of each group.
        added: of each group, HSICs of batches and sums over pairs of heads.
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
        self.families = stream.families if heads else stream.families - set(ATTENTION)
        self.groups, self.products = groups, products
        apart = list(range(1, groups + 1)) if groups > 1 else []
        blocks = x.blocks, x.heads, y.blocks, y.heads
        self.crosses: dict[tuple[Family, int, tuple[int, int] | None], CrossSums] = {}
        self.added: dict[Family, list[Any]] = {}
        if "moments" in self.families:
            self.crosses["moments", 0, None] = CrossSums.zeros(x.layers, x.width, y.layers, y.width, device)
            for place in apart:
                for pair in matching:
                    self.crosses["moments", place, pair] = CrossSums.zeros(1, x.width, 1, y.width, device)
        if "head_moments" in self.families:
            for place in apart or [0]:
                self.crosses["head_moments", place, None] = CrossSums.zeros(*blocks, device)
        if "batches" in self.families:
            self.added["batches"] = [HSIC.zeros(x.layers, y.layers, device) for _ in range(groups)]
        if "heads" in self.families:
            self.added["heads"] = [AttentionSums.zeros(*blocks, device) for _ in range(groups)]

    def update_states(self, x: SpanSums, y: SpanSums, rows_x: Tensor, rows_y: Tensor, group: int) -> None:
        """Add a batch of rows, (L_x, N, d_x) and (L_y, N, d_y), that the two sides have already."""
        if "batches" in self.families:
            self._add("batches", unbiased_hsic(rows_x, rows_y), group)
        self._cross("moments", x, y, rows_x, rows_y, group)

    def update_heads(self, x: SpanSums, y: SpanSums, a: Tensor, b: Tensor, words: Tensor, group: int) -> None:
        """Add a batch of attention between words, (L_x, H_x, B, W, W) and (L_y, H_y, B, W, W)."""
        if "heads" in self.families:
            self._add("heads", attention_sums(a, b, words), group)
        if "head_moments" in self.families:
            self._cross("head_moments", x, y, word_pairs(a, words), word_pairs(b, words), group)

    def _add(self, family: Family, more: HSIC | AttentionSums, group: int) -> None:
        place = group if self.groups > 1 else 0
        self.added[family][place] = self.added[family][place] + more

    def _cross(self, family: Family, x: SpanSums, y: SpanSums, rows_x: Tensor, rows_y: Tensor, group: int) -> None:
        for (of, place, pair), sums in self.crosses.items():
            if of == family and place in (0, 1 + group):
                a, b = _slices(pair)
                about_x, about_y = (side.moments[family][place] for side in (x, y))
                products = self.products if (family, place) == ("moments", 0) else torch.float64
                sums.add_(about_x.of(a).shifted(rows_x[a]), about_y.of(b).shifted(rows_y[b]), products)

    def end(self, x: Moves, y: Moves, owner: int) -> None:
        """Make the sums those of all ranks, about the means of all rows, on the rank that owns the tile."""
        for key, sums in self.crosses.items():
            family, place, pair = key
            moves = [moves[family][place].of(some) for moves, some in zip((x, y), _slices(pair), strict=True)]
            self.crosses[key] = CrossSums(*(summed(value, owner) for value in sums.moved(*moves, in_place=True)))
        for each in self.added.values():
            each[:] = [type(sums)(*(summed(value, owner) for value in sums)) for sums in each]


def _slices(pair: tuple[int, int] | None) -> tuple[slice, slice]:
    """Layers of X and of Y: one of each, or all."""
    return (slice(None), slice(None)) if pair is None else (slice(pair[0], pair[0] + 1), slice(pair[1], pair[1] + 1))
