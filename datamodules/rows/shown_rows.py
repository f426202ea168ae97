"""The rows of a split as strings, to show those around a row as a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.rows.row_types import RowTypes, types_of
from aligners.datamodules.tokens.tokenised import TokenisedTexts

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

BEFORE = "a"  # a token before each, which shows whether a space is between
LETTERS = 160  # of a text that is a row itself


@dataclass
class ShownRows:
    """What each row of a split reads.

    Attributes:
        strings: what each type of rows reads, with the space before it: those of a text, joined, are the text.
        types: the types of the rows; None: each text has a type of its own, which is what its rows are.
    """

    strings: list[str]
    types: RowTypes | None

    def __post_init__(self) -> None:
        self._by_text: Sequence[Tensor] = ()
        if self.types is not None:
            self._by_text = self.types.number.split(self.types.counts.tolist())

    def at(self, text: Tensor, place: Tensor) -> Tensor:
        """Return the types of rows, (N,), by the numbers of their texts and their places there."""
        if self.types is None:
            return text
        return self.types.at(text, place)

    def of(self, text: int) -> list[int]:
        """Return the types of a text's rows."""
        if self.types is None:
            return [text]
        return self._by_text[text].tolist()

    def around(self, text: int, place: int, most: int) -> str:
        """Return a row with at most so many rows of its text on each side."""
        first = max(0, place - most)
        last = place + most
        strings = []
        for row in self.of(text)[first : last + 1]:
            strings.append(self.strings[row])
        return "".join(strings).strip()


def shown_rows(
    kind: RowKind,
    data: TokenisedTexts,
    texts: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
) -> ShownRows:
    """Find what the rows of a split read.

    Args:
        kind: kind of the rows.
        data: as of `types_of`.
        texts: likewise.
        tokenizer: likewise.
    """
    types = types_of(kind, data, texts, tokenizer)
    if types is None:
        return _of_whole_texts(texts)
    if types.kind == "words":
        words = [f" {name}" for name in types.names]
        return ShownRows(words, types)
    strings = [""] * len(types.names)
    occurring = types.number.unique().tolist()
    for number in occurring:
        strings[number] = token_string(types.names[number], tokenizer)
    return ShownRows(strings, types)


def token_string(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what a token reads within a text, with the space before it if there is one.

    Bytes that are no whole character read as `�`.
    """
    joined = tokenizer.convert_tokens_to_string([BEFORE, name])
    if not joined.startswith(BEFORE):
        return name
    return joined[len(BEFORE) :]


def _of_whole_texts(texts: datasets.Dataset) -> ShownRows:
    """Give each text a type of its own, which reads its beginning; recorded states without texts have numbers."""
    if "text" in texts.column_names:
        strings = [_excerpt(text) for text in texts["text"][:]]
    else:
        strings = [f"row {number}" for number in range(len(texts))]
    return ShownRows(strings, None)


def _excerpt(text: str) -> str:
    whole = " ".join(text.split())
    if len(whole) <= LETTERS:
        return whole
    return f"{whole[: LETTERS - 1]}…"
