"""The token or word types of rows: which are held out of fitting, and which rows have unseen types."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from aligners.datamodules.rows.policies import Kind, RowKind
from aligners.datamodules.tokens.tokenised import Marks, TokenisedTexts

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


def is_held_out(name: str, share: float, seed: int) -> bool:
    """Tell whether fitting leaves out a type: a keyed hash of its name selects a `share` of all types."""
    secret = seed.to_bytes(8, "little", signed=True)
    content = name.encode("utf-8", "surrogatepass")
    keyed = blake2b(content, key=secret, person=b"type", digest_size=8)
    number = int.from_bytes(keyed.digest(), "big")
    return number / 2**64 < share


@dataclass(frozen=True)
class SeenTypes:
    """The row types that a map was fitted on.

    Attributes:
        kind: `tokens`: entries of the vocabulary, as it writes them; `words`: case-folded words; None: the rows had no
            types.
        names: names of the types.
    """

    kind: Kind | None
    names: frozenset[str]

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"kind": self.kind, "names": sorted(self.names)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Restore what `state` returned."""
        return cls(state["kind"], frozenset(state["names"]))


@dataclass
class RowTypes:
    """The type of each row of a split.

    Attributes:
        kind: kind of the types.
        names: names of the types, by number.
        number: (R,) int type of each row, text by text, in the order of the rows.
        counts: (n,) rows of each text.
        always: types that are never held out: special tokens.
    """

    kind: Kind
    names: list[str]
    number: Tensor
    counts: Tensor
    always: Collection[str] = ()

    def seen(self, share: float, seed: int) -> SeenTypes:
        """Return the types that occur in the split and are not held out."""
        kept = set()
        occurring = self.number.unique().tolist()
        for number in occurring:
            name = self.names[number]
            if name in self.always or not is_held_out(name, share, seed):
                kept.add(name)
        return SeenTypes(self.kind, frozenset(kept))

    def at(self, text: Tensor, place: Tensor) -> Tensor:
        """Return the type numbers of rows, (N,), given their text's place in the split and their own in the text."""
        first = self.counts.cumsum(0) - self.counts
        row = first[text] + place
        return self.number[row].long()

    def unseen(self, seen: SeenTypes) -> Marks:
        """Mark the rows whose types are not among those seen."""
        unseen = [name not in seen.names for name in self.names]
        of_rows = torch.tensor(unseen)[self.number]
        return Marks(of_rows, self.counts)


def types_of(
    kind: RowKind,
    data: TokenisedTexts,
    texts: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
) -> RowTypes | None:
    """Find the types of a split's rows, with words case folded; None if rows of this kind have no types.

    Args:
        kind: kind of the rows.
        data: a split, tokenised with its words if the rows are words.
        texts: the same split as text.
        tokenizer: tokenizer of the first model.
    """
    if kind.types in (None, "states"):
        return None
    if kind.types == "words":
        return _word_types(data, texts)
    return _token_types(kind, data, tokenizer)


def _word_types(data: TokenisedTexts, texts: datasets.Dataset) -> RowTypes:
    """Number the words that all models have in full by their first appearance."""
    number_of: dict[str, int] = {}
    numbers = []
    for word in _words(texts):
        number = number_of.setdefault(word, len(number_of))
        numbers.append(number)
    every = torch.tensor(numbers, dtype=torch.int64)
    common = every[cast(Tensor, data.words_in_common)]
    counts = cast(Tensor, data.word_counts)
    return RowTypes("words", list(number_of), common, counts)


def _words(texts: datasets.Dataset) -> Iterator[str]:
    """Return all words, case folded, text by text."""
    columns = [texts["text"][:]]
    if "text_pair" in texts.column_names:
        columns.append(texts["text_pair"][:])
    for parts in zip(*columns, strict=True):
        for part in parts:
            yield from part.casefold().split()


def _token_types(
    kind: RowKind, data: TokenisedTexts, tokenizer: PreTrainedTokenizerBase
) -> RowTypes:
    """Number the tokens that are rows as the vocabulary does."""
    vocabulary = tokenizer.get_vocab()
    names = [""] * (max(vocabulary.values()) + 1)
    for name, number in vocabulary.items():
        names[number] = name
    ids, special, lengths = data.tokens_of(0)
    rows = ~special
    if kind.special_tokens:
        rows = torch.ones_like(special)
    by_text = rows.split(lengths.tolist())
    counts = torch.stack([of_text.sum() for of_text in by_text])
    always = tokenizer.convert_ids_to_tokens(tokenizer.all_special_ids)
    return RowTypes("tokens", names, ids[rows], counts, set(map(str, always)))
