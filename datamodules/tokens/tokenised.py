"""Texts as each model's tokens: laid end to end, padded batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.text.annotated.sentence import CHOICE
from aligners.datamodules.text.labels import MISSING
from aligners.errors import UserError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from aligners.datamodules.rows.policies import RowKind
    from aligners.models.model import FrozenModel


class _Tokens:
    """The tokenised texts of one model, laid end to end: a batch is then one gather per input."""

    def __init__(
        self, tokens: datasets.Dataset, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.left = tokenizer.padding_side == "left"
        self.lengths = _integers(tokens, "length")
        self.starts = self.lengths.cumsum(0) - self.lengths
        # Tokenizers of causal models often have no padding token. Any will do: the attention mask marks padding.
        padding = tokenizer.pad_token_id or 0
        values = {
            "input_ids": padding,
            "special_tokens_mask": 1,
            "words": -1,
            "token_type_ids": tokenizer.pad_token_type_id,
        }
        table = tokens.with_format("arrow")[:]
        self.padding: dict[str, int] = {}
        self.flat: dict[str, Tensor] = {}
        for name, value in values.items():
            if name in tokens.column_names:
                self.padding[name] = value
                self.flat[name] = flatten_column(table.column(name))

    def batch(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Pad some texts; return the model's inputs, a mask of special tokens and padding, and the words if any."""
        lengths = self.lengths[rows, None]
        longest = int(lengths.max())
        column = torch.arange(longest)
        if self.left:
            column = column - (longest - lengths)
        real = (column >= 0) & (column < lengths)
        starts = self.starts[rows, None]
        place = torch.where(real, starts + column, 0)
        padded = {}
        for name, flat in self.flat.items():
            values = torch.where(real, flat[place], self.padding[name])
            padded[name] = values.long()
        special = padded.pop("special_tokens_mask").bool()
        words = padded.pop("words", None)
        return {**padded, "attention_mask": real.long()}, special, words


def _integers(tokens: datasets.Dataset, column: str) -> Tensor:
    return torch.tensor(tokens[column][:], dtype=torch.int64)


def flatten_column(column: Any) -> Tensor:
    """Lay the lists of an Arrow column end to end, as int32, chunk by chunk: joint offsets could overflow."""
    parts = []
    for chunk in column.chunks:
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        parts.append(values.astype(np.int32))
    return torch.from_numpy(np.concatenate(parts))


@dataclass
class Marks:
    """Marks on some rows of a split.

    Attributes:
        flat: (R,) True for the rows that are marked, text by text.
        counts: (n,) rows of each text.
    """

    flat: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        self.ends = self.counts.cumsum(0)

    def of(self, texts: Tensor) -> Tensor:
        """Return the marks of the rows of the texts with these numbers: (B,) -> (N,)."""
        counts = self.counts[texts]
        shift = self.ends[texts] - counts.cumsum(0)
        total = int(counts.sum())
        rows = torch.arange(total)
        rows += shift.repeat_interleave(counts)
        return self.flat[rows]

    def texts_with_rows(self) -> Tensor:
        """Return the numbers of the texts that have a row without a mark."""
        sums = _sums_before(~self.flat)
        kept = sums[self.ends] - sums[self.ends - self.counts]
        return kept.nonzero()[:, 0]


def _sums_before(values: Tensor) -> Tensor:
    """Return the sum of the values before each place, and of all: (n,) -> (n + 1,)."""
    return pad(values.cumsum(0), (1, 0))


class TokenisedTexts(Dataset):
    """A split, tokenised for each of M models. Indexing it with row numbers gives a `TextBatch`.

    Args:
        tokens: what `tokenise` made for each model; one and the same object for models of equal tokenizers.
        tokenizers: tokenizer of each model, which says how to pad.

    Attributes:
        tables: `tokens`.
        words: number of words of all texts, counted once for each table of tokens; None where `tokenise` did not number
            them.
        words_used: number of those that every model has in full.
        words_in_common: (words,) which words every model has in full, text by text; None in the same case.
        word_counts: (n,) number of such words in each text; None in the same case.
        marks: kind of rows -> which rows are of unseen types, once that is known; every batch then says so in `unseen`.
        leave_out: whether marked rows are left out, as in texts to fit on.
        far: kind of rows -> which rows are far from all others; every batch then says so in `far`.
        members: numbers of the texts that answer each question, if items are questions; None: items are texts.
    """

    words: int | None = None
    words_used: int | None = None
    words_in_common: Tensor | None = None
    word_counts: Tensor | None = None
    marks: Mapping[RowKind, Marks] = MappingProxyType({})
    leave_out: bool = False
    far: Mapping[RowKind, Marks] = MappingProxyType({})
    members: list[list[int]] | None = None

    def __init__(
        self,
        tokens: Sequence[datasets.Dataset],
        tokenizers: Sequence[PreTrainedTokenizerBase],
    ) -> None:
        self.tables = list(tokens)
        # What models share is laid out once, and later padded once.
        objects = list(map(id, tokens))
        self._models = list(map(objects.index, objects))
        self._laid: dict[int, _Tokens] = {}
        for place in sorted(set(self._models)):
            self._laid[place] = _Tokens(tokens[place], tokenizers[place])
        lengths = [laid.lengths for laid in self._laid.values()]
        self.lengths = torch.stack(lengths).amax(0)

        first = tokens[0]
        self.ids = _integers(first, "id")
        self.labels = _labels(first)
        if "words" in first.column_names:
            self._number_words(_integers(first, "word_count"))

    def _number_words(self, counts: Tensor) -> None:
        """Number the words that all models have; `counts` (n,) is the number of words of each text."""
        laid = list(self._laid.values())
        used, in_common = _number_common_words(laid, counts)
        self.words = int(counts.sum())
        self.words_used = int(used.sum())
        self.word_counts = used
        self.words_in_common = in_common

    def _tokens_of(self, model: int) -> _Tokens:
        return self._laid[self._models[model]]

    def __len__(self) -> int:
        """The number of texts, or of questions."""
        return len(self.ids)

    def first_with(self, model: int) -> int:
        """Return the number of the first model that has the same tokens as a model."""
        return self._models[model]

    def tokens_of(self, model: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens of a model end to end, (T,), which of them are special, and how many each text has."""
        laid = self._tokens_of(model)
        special = laid.flat["special_tokens_mask"].bool()
        return laid.flat["input_ids"], special, laid.lengths

    def lengths_of(self, model: int) -> Tensor:
        """Return the number of tokens that each text has for a model, (n,)."""
        return self._tokens_of(model).lengths

    def digest(self, model: int, *, special: bool = False) -> str:
        """Hash all inputs that a model gets from the texts, independently of the batches.

        Args:
            model: number of the model.
            special: whether the hash also covers which tokens are special.
        """
        laid = self._tokens_of(model)
        digest = blake2b(digest_size=16)
        digest.update(laid.lengths.numpy().tobytes())
        names = ["input_ids", "token_type_ids"]
        if special:
            names.append("special_tokens_mask")
        for name in names:
            values = laid.flat.get(name)
            if values is not None:
                digest.update(name.encode())
                digest.update(values.numpy().tobytes())
        return digest.hexdigest()

    @property
    def alike(self) -> bool:
        """Tell whether all models have the same tokens."""
        return len(self._laid) == 1

    def check_vocabulary(self, models: Sequence[FrozenModel], split: str) -> None:
        """Raise if a text has a token that a model does not know: tokens may have been added to its tokenizer.

        Args:
            models: models in the order of the tables; bases, which may follow them, are ignored.
            split: name of the texts, for the message.

        Raises:
            ValueError: naming the model, the text and the token.
        """
        for place, model in zip(self._models, models, strict=False):
            laid = self._laid[place]
            ids = laid.flat["input_ids"]
            beyond = (ids >= model.vocabulary).nonzero()
            if not len(beyond):
                continue
            first = int(beyond[0])
            text = int(torch.searchsorted(laid.starts, first, right=True))
            token = int(ids[first])
            written: Any = token
            if model.tokenizer is not None:
                written = model.tokenizer.convert_ids_to_tokens(token)
            raise UserError(
                f"Expected texts of the {model.vocabulary} tokens that {model.name} has embeddings for, but text "
                f"number {text} of the {split} texts holds {written!r}, number {token}, which only the tokenizer "
                "knows. Leave such texts out, or save the model's own tokenizer beside it."
            )

    def texts_with_rows(self) -> np.ndarray | None:
        """Return the numbers of the texts that keep a row where marked rows are left out; None if all do."""
        if not (self.leave_out and self.marks):
            return None
        (marks,) = self.marks.values()
        return marks.texts_with_rows().numpy()

    def marked(
        self,
        marks: Mapping[RowKind, Marks],
        *,
        leave_out: bool,
        far: Mapping[RowKind, Marks] = MappingProxyType({}),
    ) -> TokenisedTexts:
        """Return the same texts with other `marks`, `leave_out` and `far`, without copying them."""
        same = copy(self)
        same.marks, same.leave_out, same.far = marks, leave_out, far
        return same

    @cached_property
    def by_question(self) -> TokenisedTexts:
        """Return the texts as questions, each as long as its longest answer and labelled by the right one's place."""
        asked = self.tables[0][CHOICE][:]
        every_label = cast(Tensor, self.labels)
        members, lengths, places = [], [], []
        for _, group in groupby(range(len(asked)), asked.__getitem__):
            texts = list(group)
            labels = every_label[texts].tolist()
            members.append(texts)
            lengths.append(self.lengths[texts].amax())
            places.append(labels.index(1) if 1 in labels else MISSING)
        same = copy(self)
        same.members = members
        same.ids = torch.arange(len(members))
        same.lengths = torch.stack(lengths)
        same.labels = torch.tensor(places)
        return same

    def __getitem__(self, rows: Sequence[int]) -> TextBatch:
        """Make a batch of the texts, or of all answers to the questions, with these row numbers."""
        row = texts = torch.as_tensor(rows)
        about: dict[str, Any] = {
            "leave_out": self.leave_out,
            "number": getattr(rows, "number", 0),
        }
        if self.members is not None:
            texts, about["answers"] = _answers(self.members, rows)
        if self.labels is not None:
            about["labels"] = self.labels[row]

        padded = {}
        for place, laid in self._laid.items():
            padded[place] = laid.batch(texts)
        of_models = map(padded.__getitem__, self._models)
        inputs, special, words = zip(*of_models, strict=True)
        if self.word_counts is not None:
            about["words"] = words
            about["word_count"] = self.word_counts[texts]
        about["unseen"] = _marks_of(self.marks, texts)
        about["far"] = _marks_of(self.far, texts)
        return TextBatch(inputs, special, self.ids[row], **about)


def _answers(
    members: list[list[int]], questions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the numbers of all answers to some questions, (A,), and each question's places among them, (B, most)."""
    numbers: list[int] = []
    places = []
    for question in questions:
        texts = members[question]
        first = len(numbers)
        places.append(torch.arange(first, first + len(texts)))
        numbers += texts
    padded = pad_sequence(places, batch_first=True, padding_value=-1)
    return torch.tensor(numbers), padded


def _marks_of(marks: Mapping[RowKind, Marks], texts: Tensor) -> dict[RowKind, Tensor]:
    chosen = {}
    for kind, of_kind in marks.items():
        chosen[kind] = of_kind.of(texts)
    return chosen


def _labels(tokens: datasets.Dataset) -> Tensor | None:
    """Return the classes of the texts, or the numbers to predict, (n,); None: they have none."""
    if "label" not in tokens.column_names:
        return None
    if tokens.features["label"].dtype == "int64":
        return _integers(tokens, "label")
    return torch.tensor(tokens["label"][:], dtype=torch.float32)


def _number_common_words(
    laid: Sequence[_Tokens], counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Renumber the words of each text in place: 0, 1, ... for those that all models have, -1 for others.

    Args:
        laid: the tokens of each model.
        counts: (n,) words of each text.

    Returns:
        (n,) number of words of each text that all models have, and (W,) which of all words these are.
    """
    base = counts.cumsum(0) - counts
    total = int(counts.sum())
    common = torch.ones(total + 1, dtype=torch.bool)
    common[total] = False  # an entry for tokens that belong to no word
    for one in laid:
        has = torch.zeros_like(common)
        has[_word_places(one, base, total)] = True
        common &= has

    before = _sums_before(common[:-1])
    for one in laid:
        place = _word_places(one, base, total)
        first = before[base].repeat_interleave(one.lengths)
        words = torch.where(common[place], before[place] - first, -1)
        one.flat["words"] = words.int()
    return before[base + counts] - before[base], common[:-1]


def _word_places(one: _Tokens, base: Tensor, total: int) -> Tensor:
    """Return the number of each token's word among the words of all texts, (T,); `total` for tokens without a word."""
    words = one.flat["words"].long()
    first = base.repeat_interleave(one.lengths)
    return torch.where(words < 0, total, first + words)
