"""The data module that streams paired attention weights: what the heads of two blocks give to the same two tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.models.model import FrozenModel
from datamodules.batches import TextBatch
from datamodules.keys import row_keys
from datamodules.paired import PairedActivations
from datamodules.rows.policies import RowKind, Rows, rows_of_each
from datamodules.rows.reading import PairedBatch, PairReader, Prepared

__all__ = ["AttentionReader", "PairedAttention"]

FURTHEST, LARGEST = 2**31, torch.iinfo(torch.int64).max


class AttentionReader(PairReader):
    """Reads the attention weights of two models: a row for a token and one that it looks at, a column for each head.

    Args:
        model_x: X.
        model_y: Y.
        sites: pairs of blocks.
        share: of the rows that are taken.
        seed: of the draw of rows, which does not depend on the batch.
        options: of `PairReader`, from `rows` on.
    """

    def __init__(
        self,
        model_x: FrozenModel,
        model_y: FrozenModel,
        sites: Sequence[tuple[int, int]],
        *options: Any,
        share: float,
        seed: int,
    ) -> None:
        super().__init__(model_x, model_y, sites, *options)
        self.share, self.seed = share, seed
        self.causal = model_x.causal and model_y.causal

    @property
    def widths(self) -> tuple[int, int]:
        """The numbers of heads of X and of Y."""
        return self.model_x.heads, self.model_y.heads

    def prepare(
        self, texts: TextBatch, others: Sequence[RowKind] = (), asking: Callable[[TextBatch], Any] | None = None
    ) -> Prepared:
        """Choose the pairs of tokens, on the CPU."""
        tokens = rows_of_each(texts, self.kind)[0]
        length, counts = texts.inputs_x["input_ids"].shape[1], torch.tensor(tokens.counts)
        owner, query, key = self._pairs(counts)
        taken = row_keys(self.seed, texts.text[owner], query * FURTHEST + key) <= min(
            int(self.share * LARGEST), LARGEST
        )
        owner, query, key = owner[taken], query[taken], key[taken]
        first, at = (counts.cumsum(0) - counts)[owner], tokens.index % length  # where each token stands in its text
        index = (owner * length + at[first + query]) * length + at[first + key]
        return Prepared(texts, (Rows(index, owner, len(counts)),))

    def _pairs(self, counts: Tensor) -> tuple[Tensor, ...]:
        """Text of the batch, number of the token, and number of the one that it looks at, of all rows, each (N,)."""
        place = torch.arange(int(counts.max()))
        real = place[None] < counts[:, None]
        pairs = real[:, :, None] & real[:, None]
        if self.causal:
            pairs = pairs & (place[:, None] >= place[None])
        return pairs.nonzero(as_tuple=True)

    def read(self, prepared: Prepared) -> PairedBatch:
        """Run both models, and gather the weights of the pairs of tokens."""
        texts, rows = prepared.texts, prepared.rows[0]
        each = ((self.model_x, texts.inputs_x, 0), (self.model_y, texts.inputs_y, 1))
        x, y = (self._weights(model, inputs, [pair[end] for pair in self.sites], rows) for model, inputs, end in each)
        self._read += 1
        return PairedBatch(x, y, rows, texts)

    def _weights(self, model: FrozenModel, inputs: dict[str, Tensor], blocks: list[int], rows: Rows) -> Tensor:
        """(S, N, H) float32."""
        with torch.no_grad():
            weights, _ = model.attention(inputs)
            found = torch.stack([weights[block - 1].movedim(1, -1).flatten(0, 2)[rows.index] for block in blocks])
        names = [f"block {block} of {model.name}" for block in blocks]
        self.check.watch(found, names, "attention weights", self._read)
        return found.float()


class PairedAttention(PairedActivations):
    """Turns text into paired attention weights of two models that read the same tokens (Ren et al. 2023, Fig. 4).

    A row is a token and one that it looks at, in a text; its vector is the weight that each head of a block gives.
    A batch has x (S, N, H_x) and y (S, N, H_y). Padding and, in causal models, what lies ahead are no rows.

    Args:
        sites: pairs of blocks, as in `PairedActivations`.
        share: of all rows that are read; which ones does not depend on the batches.
        options: of `PairedActivations`, by their names. `special_tokens` says whether [CLS] and the like look and are
            looked at.

    Raises:
        ValueError: an option is out of its range.
    """

    fixed = ("rows", "labels", "component", "held_out_types")

    def __init__(self, sites: str | list[str | int] = "blocks", share: float = 0.1, **options: Any) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"Expected `share` of the rows in (0, 1], but got {share}.")
        options["attn_implementation"] = "eager"  # the others never form the weights
        super().__init__(
            sites=sites, rows="tokens", labels=None, component="residual", held_out_types=0.0, **options
        )  # by name, so that the command line does not offer what is set here
        self.share = share
        self._attention: AttentionReader | None = None

    def reads(self) -> None:
        """No states: the weights do not come from a store."""

    @property
    def reader(self) -> AttentionReader:
        """The two models and the pairs of blocks, loaded on first use."""
        if self._attention is None:
            plain = super().reader
            if any(0 in pair for pair in plain.sites):
                raise ValueError("Expected `sites` of blocks, from 1 on: the embeddings, site 0, have no attention.")
            given = plain.model_x, plain.model_y, plain.sites, self.rows, self.special_tokens, self.component
            self._attention = AttentionReader(*given, share=self.share, seed=self.pipeline.seed)
        return self._attention

    def describe(self) -> dict[str, Any]:
        """Describe texts, models and rows for a report, as plain values."""
        return {**super().describe(), "rows": "attention weights of pairs of tokens", "share": self.share}
