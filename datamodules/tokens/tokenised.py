"""Texts as each model's tokens: tokenised once, laid end to end, padded batch by batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain, groupby, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.text.annotated.sentence import CHOICE
from aligners.datamodules.text.labels import MISSING
from aligners.errors import UserError

if TYPE_CHECKING:
    import datasets
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    from aligners.datamodules.rows.policies import RowKind
    from aligners.models.model import FrozenModel

WHITE_SPACE = np.array(
    [code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32
)  # U+3000 is the last


def number_words(
    texts: Sequence[Sequence[str]], kept: Sequence[Encoding], whole: Sequence[Encoding]
) -> tuple[list[list[int]], list[int]]:
    """Number the word that each piece belongs to, from the pieces' places in the text.

    A piece belongs to the word that its characters lie in, with or without the white space before or after
    it. What lies in white space alone, in no text (special tokens) or reaches over white space belongs to none,
    and in the last case the words that it touches are missing.

    Args:
        texts: B texts, each of one part, or of two for sentence pairs: words of the second part are numbered
            after those of the first.
        kept: what the tokenizer made of each text, cut to the longest allowed.
        whole: the same, not cut; the very same object where there was nothing to cut.

    Returns:
        For each text the word of each kept piece, counted from 0, -1 for none and for words that are missing: that
        have no pieces, or of which a piece was cut. And the number of words of each text, missing or not.
    """
    table = _Table(texts)
    first, last = table.touched(kept)
    complete = _pieces_per_word(first, last, table.total)
    if any(a is not b for a, b in zip(kept, whole, strict=True)):
        complete *= complete == _pieces_per_word(*table.touched(whole), table.total)
    inside = (first == last) & (complete[first] > 0)
    owner = np.repeat(np.arange(len(kept)), [len(one) for one in kept])
    numbers = np.where(inside, first - table.base[owner], -1).tolist()
    ends = np.cumsum([0, *(len(one) for one in kept)]).tolist()
    return [numbers[a:b] for a, b in pairwise(ends)], table.counts.tolist()


class _Table:
    """Where words begin and end in B texts of P parts each. Texts are laid end to end and words numbered throughout.

    Attributes:
        base: (B,) number of each text's first word.
        counts: (B,) words of each text.
        total: words of all texts.
    """

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        parts = list(chain.from_iterable(texts))
        lengths = np.array([len(part) + 1 for part in parts])
        start = np.cumsum(lengths) - lengths
        flat = "".join(f"{part} " for part in parts).encode(
            "utf-32-le", "surrogatepass"
        )
        word = ~np.isin(np.frombuffer(flat, dtype=np.uint32), WHITE_SPACE)
        before = np.concatenate([[False], word[:-1]])
        # At place i, between the characters i - 1 and i: words that begin before it, words that are over by it.
        self._begun = np.concatenate([[0], np.cumsum(word & ~before)])
        self._over = np.cumsum(~word & before)
        self._start = start.reshape(len(texts), -1)
        self.base = self._begun[self._start[:, 0]]
        self.total = int(self._begun[-1])
        self.counts = np.diff(self.base, append=self.total)

    def touched(self, encodings: Sequence[Encoding]) -> tuple[np.ndarray, np.ndarray]:
        """The first and last word that each piece touches; -1 and -2 if it touches none."""
        owner = np.repeat(np.arange(len(encodings)), [len(one) for one in encodings])
        offsets = np.array(
            [pair for one in encodings for pair in one.offsets], dtype=np.int64
        ).reshape(-1, 2)
        part = np.array(
            [-1 if p is None else p for one in encodings for p in one.sequence_ids],
            dtype=np.int64,
        )
        begin, end = self._start[owner, part] + offsets.T
        first, last = self._over[begin], self._begun[end] - 1
        some = (part >= 0) & (begin < end) & (first <= last)
        return np.where(some, first, -1), np.where(some, last, -2)


def _pieces_per_word(first: np.ndarray, last: np.ndarray, total: int) -> np.ndarray:
    """Count the pieces in each word; 0 if a piece reaches out of it. One more entry, always 0, stands for no word."""
    counts = np.bincount(first[first == last], minlength=total + 1)
    for a, b in zip(first[first < last], last[first < last], strict=True):
        counts[a : b + 1] = 0
    return counts


logger = logging.getLogger(__name__)


def tokenise(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, *, words: bool = False,
    written: Sequence[int] = (),
) -> datasets.Dataset:  # fmt: skip
    """Tokenise a split, through the cache of `datasets`.

    Args:
        split: the columns text and id, and text_pair and label where there are such.
        tokenizer: of the model.
        max_length: tokens beyond this are cut. How many texts reach it is said once, in the log.
        words: also number the words of each text; see `aligners.datamodules.tokens.tokenised`.
        written: numbers of the special tokens, where a chat template wrote them: the tokenizer then adds none.

    Returns:
        The columns input_ids, special_tokens_mask, length, id, token_type_ids and label where there are
        such, and, with `words`, words (of each token) and word_count, in the split's order.

    Raises:
        ValueError: words are asked for of a tokenizer that does not say where in the text its tokens lie.
    """
    from datasets.fingerprint import Hasher

    if words and not tokenizer.is_fast:
        raise UserError(
            f"Words are found through the places of tokens in the text, but the tokenizer of "
            f"{tokenizer.name_or_path!r}, a {type(tokenizer).__name__}, does not know them. Use a fast tokenizer, or "
            "`rows` 'mean' or 'cls' without attention."
        )
    # Named by content: pickled tokenizers differ with what they were last used for.
    decides = [
        split._fingerprint,
        describe_tokenizer(tokenizer),
        type(tokenizer).__name__,
        max_length,
        words,
    ]
    tokens = split.map(
        _tokens,
        batched=True,
        remove_columns=[
            column
            for column in split.column_names
            if column not in ("id", "label", CHOICE)
        ],
        fn_kwargs={
            "tokenizer": tokenizer,
            "max_length": max_length,
            "words": words,
            "written": written,
        },
        new_fingerprint=Hasher.hash([*decides, *written]),
        desc="Tokenising",
    )
    cut = int((np.asarray(tokens["length"][:]) >= max_length).sum())
    if cut:
        logger.warning(
            "%d of %d texts reach %d tokens: the rest of these is cut off.",
            cut,
            len(tokens),
            max_length,
        )
    return tokens


def _tokens(
    batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, max_length: int, words: bool,
    written: Sequence[int],
) -> dict[str, list[Any]]:  # fmt: skip
    parts = [batch[name] for name in ("text", "text_pair") if name in batch]
    options = {
        "return_attention_mask": False,
        "return_special_tokens_mask": True,
        "add_special_tokens": not written,
    }
    encoded = tokenizer(*parts, truncation=True, max_length=max_length, **options)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    columns = {**encoded, "length": lengths}
    if written:
        columns["special_tokens_mask"] = [
            [int(token in written) for token in ids] for ids in encoded["input_ids"]
        ]
    if words:
        cut, whole = encoded.encodings, list(encoded.encodings)
        full = [i for i, length in enumerate(lengths) if length >= max_length]
        if full:
            texts = ([part[i] for i in full] for part in parts)
            again = tokenizer(
                *texts, truncation=False, verbose=False, add_special_tokens=not written
            )
            for i, encoding in zip(full, again.encodings, strict=True):
                whole[i] = encoding
        columns["words"], columns["word_count"] = number_words(
            list(zip(*parts, strict=True)), cut, whole
        )
    return columns


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers turn every text into the same inputs."""
    return a is b or describe_tokenizer(a) == describe_tokenizer(b)


AT_ONCE = 1000  # texts; of other tokenizers the first have other tokens


def same_tokens(
    a: PreTrainedTokenizerBase,
    b: PreTrainedTokenizerBase,
    splits: Sequence[datasets.Dataset],
    max_length: int,
) -> bool:
    """Whether two tokenizers make the same tokens of these texts, and mask them alike, however they pad.

    Args:
        a: the one.
        b: the other.
        splits: with the columns text and, of pairs, text_pair.
        max_length: longest text in tokens.
    """
    if same_tokenizer(a, b):
        return True
    if (
        a.mask_token_id != b.mask_token_id
        or a.truncation_side != b.truncation_side
        or a.is_fast != b.is_fast
    ):
        return False
    for split in splits:
        names = [name for name in ("text", "text_pair") if name in split.column_names]
        for first in range(0, len(split), AT_ONCE):
            batch = split[first : first + AT_ONCE]
            parts = [batch[name] for name in names]
            if _ids_of(a, parts, max_length) != _ids_of(b, parts, max_length):
                return False
    return True


def _ids_of(
    tokenizer: PreTrainedTokenizerBase, parts: list[list[str]], max_length: int
) -> list[Any]:
    """Tokens of some texts, which of them are special, and their types, which are 0 where there are none."""
    cut = {"truncation": True, "max_length": max_length}
    encoded = tokenizer(
        *parts, **cut, return_special_tokens_mask=True, return_attention_mask=False
    )
    ids = encoded["input_ids"]
    types = encoded.get("token_type_ids", [[0] * len(one) for one in ids])
    return [ids, encoded["special_tokens_mask"], types]


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe everything that decides what a tokenizer makes of a text."""
    if tokenizer.is_fast:
        inner = json.loads(tokenizer.backend_tokenizer.to_str())
        # How the last call padded and cut, not a property of the tokenizer.
        del inner["padding"], inner["truncation"]
    else:
        inner = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    names = (
        "padding_side",
        "truncation_side",
        "pad_token_id",
        "pad_token_type_id",
        "model_input_names",
    )
    return json.dumps(
        [inner, {name: getattr(tokenizer, name) for name in names}], sort_keys=True
    )


class _Tokens:
    """The tokenised texts of one model, laid end to end: a batch is then one gather per input."""

    def __init__(
        self, tokens: datasets.Dataset, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        # Tokenizers of causal models often have none. The attention mask says what is padding: any token will do.
        padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.left = tokenizer.padding_side == "left"
        self.lengths = torch.as_tensor(np.asarray(tokens["length"][:], dtype=np.int64))
        self.starts = self.lengths.cumsum(0) - self.lengths
        table = tokens.with_format("arrow")[:]
        values = {"input_ids": padding, "special_tokens_mask": 1, "words": -1}
        values["token_type_ids"] = tokenizer.pad_token_type_id
        self.padding = {
            name: value for name, value in values.items() if name in tokens.column_names
        }
        self.flat = {name: flatten_column(table.column(name)) for name in self.padding}

    def batch(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Pad some texts: the model's inputs, where special tokens and padding are, and the words if there are any."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        column = torch.arange(longest)[None]
        if self.left:
            column = column - (longest - lengths)[:, None]
        real = (column >= 0) & (column < lengths[:, None])
        place = torch.where(real, self.starts[rows][:, None] + column, 0)
        padded = {
            name: torch.where(real, flat[place], self.padding[name]).long()
            for name, flat in self.flat.items()
        }
        special = padded.pop("special_tokens_mask").bool()
        words = padded.pop("words", None)
        return {**padded, "attention_mask": real.long()}, special, words


def flatten_column(column: Any) -> Tensor:
    """Lay all lists of an Arrow column end to end, as int32, chunk by chunk: the offsets of all could overflow."""
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


@dataclass
class Marks:
    """A mark on some rows of a split.

    Attributes:
        flat: (R,) True for the rows that are marked, text by text.
        counts: (n,) rows of each text.
    """

    flat: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        self.ends = self.counts.cumsum(0)

    def of(self, texts: Tensor) -> Tensor:
        """The marks of the rows of the texts with these numbers: (B,) -> (N,)."""
        counts = self.counts[texts]
        shift = self.ends[texts] - counts.cumsum(0)
        return self.flat[
            torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)
        ]

    def texts_with_rows(self) -> Tensor:
        """The numbers of the texts that have a row without a mark."""
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), (~self.flat).cumsum(0)])
        return (sums[self.ends] > sums[self.ends - self.counts]).nonzero()[:, 0]


class TokenisedTexts(Dataset):
    """A split, tokenised for each of M models. Indexing it with row numbers gives a `TextBatch`.

    Args:
        tokens: what `tokenise` made for each model; one and the same object for models of equal tokenizers.
        tokenizers: of each model: they say how to pad.

    Attributes:
        tables: `tokens`.
        words: number of words of all texts, counted in each model's tokens; None where `tokenise` was not asked
            for them.
        words_used: number of those that every model has in full.
        words_in_common: (words,) which words those are, text by text; None likewise.
        word_counts: (n,) how many each text has; None likewise.
        marks: kind of rows -> which are of unseen types, once that is known; every batch then says so in `unseen`.
        leave_out: whether these are texts to fit on, without the rows that are marked.
        far: kind of rows -> which are far from all others; every batch then says so in `far`.
        members: numbers of the texts that answer each question, where rows are those of questions; None: of texts.
    """

    members: list[list[int]] | None = None

    def __init__(
        self,
        tokens: Sequence[datasets.Dataset],
        tokenizers: Sequence[PreTrainedTokenizerBase],
    ) -> None:
        first = [
            next(i for i, other in enumerate(tokens) if other is table)
            for table in tokens
        ]
        # What models share is laid out, and later padded, once.
        self.tables = list(tokens)
        self.marks: Mapping[RowKind, Marks] = {}
        self.far: Mapping[RowKind, Marks] = {}
        self.leave_out = False
        self._laid = {i: _Tokens(tokens[i], tokenizers[i]) for i in sorted(set(first))}
        self._models = first
        self.words = self.words_used = self.word_counts = self.words_in_common = None
        if all("words" in table.column_names for table in tokens):
            every = torch.as_tensor(tokens[0]["word_count"][:], dtype=torch.int64)
            self.word_counts, self.words_in_common = _number_common_words(
                list(self._laid.values()), every
            )
            self.words, self.words_used = int(every.sum()), int(self.word_counts.sum())
        self.lengths = torch.stack([laid.lengths for laid in self._laid.values()]).amax(
            0
        )
        self.ids = torch.as_tensor(tokens[0]["id"][:], dtype=torch.int64)
        self.labels: Tensor | None = None
        if "label" in tokens[0].column_names:  # classes, or numbers to predict
            dtype = (
                torch.int64
                if tokens[0].features["label"].dtype == "int64"
                else torch.float32
            )
            self.labels = torch.as_tensor(tokens[0]["label"][:], dtype=dtype)

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.ids)

    def first_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of the first model end to end, (T,), which of them are special, and how many each text has."""
        return self.tokens_of(0)

    def first_with(self, model: int) -> int:
        """The number of the first model that has the very tokens of a model."""
        return self._models[model]

    def tokens_of(self, model: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `first_tokens`, of the model with a number."""
        laid = self._laid[self._models[model]]
        return (
            laid.flat["input_ids"],
            laid.flat["special_tokens_mask"].bool(),
            laid.lengths,
        )

    def lengths_of(self, model: int) -> Tensor:
        """How many tokens each text has for a model, (n,)."""
        return self._laid[self._models[model]].lengths

    def digest(self, model: int, *, special: bool = False) -> str:
        """A hash of everything that a model is given of the texts, whatever the batches.

        Args:
            model: its number.
            special: whether it also says which tokens are special.
        """
        laid = self._laid[self._models[model]]
        digest = blake2b(laid.lengths.numpy().tobytes(), digest_size=16)
        for name in (
            "input_ids",
            "token_type_ids",
            *(["special_tokens_mask"] if special else []),
        ):
            if name in laid.flat:
                digest.update(name.encode() + laid.flat[name].numpy().tobytes())
        return digest.hexdigest()

    @property
    def alike(self) -> bool:
        """Whether the tokens of all models are the same."""
        return len(self._laid) == 1

    def check_vocabulary(self, models: Sequence[FrozenModel], split: str) -> None:
        """Raise if a text has a token that a model does not know: its tokenizer may have been given more.

        Args:
            models: in the order of the tables; bases, which may come after them, are of no concern.
            split: name of the texts, for the message.

        Raises:
            ValueError: naming the model, the text and the token.
        """
        for place, model in zip(self._models, models, strict=False):
            laid = self._laid[place]
            beyond = (laid.flat["input_ids"] >= model.vocabulary).nonzero()
            if not len(beyond):
                continue
            where = int(beyond[0])
            text = int(torch.searchsorted(laid.starts, where, right=True)) - 1
            token = int(laid.flat["input_ids"][where])
            written = (
                model.tokenizer.convert_ids_to_tokens(token)
                if model.tokenizer is not None
                else token
            )
            raise UserError(
                f"Expected texts of the {model.vocabulary} tokens that {model.name} has embeddings for, but text "
                f"number {text + 1} of the {split} texts holds {written!r}, number {token}, which only its tokenizer "
                "knows. Leave such texts out, or save the model's own tokenizer beside it."
            )

    def texts_with_rows(self) -> np.ndarray | None:
        """The numbers of the texts that keep a row, where marked rows are left out; None if all do."""
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
        """The same with a row a question: as long as its longest answer, its label the place of the right one."""
        asked, same = self.tables[0][CHOICE][:], copy(self)
        same.members = members = [
            list(texts) for _, texts in groupby(range(len(asked)), asked.__getitem__)
        ]
        same.ids = torch.arange(len(members))
        same.lengths = torch.stack([self.lengths[texts].amax() for texts in members])
        right = [cast(Tensor, self.labels)[texts].tolist() for texts in members]
        same.labels = torch.tensor(
            [labels.index(1) if 1 in labels else MISSING for labels in right]
        )
        return same

    def __getitem__(self, rows: Sequence[int]) -> TextBatch:
        """Make a batch of the texts, or of all answers to the questions, with these row numbers."""
        row = index = torch.as_tensor(rows)
        answers = None
        if self.members is not None:
            parts = [self.members[question] for question in rows]
            index = torch.tensor(list(chain.from_iterable(parts)))
            places = torch.arange(len(index)).split([len(texts) for texts in parts])
            answers = pad_sequence(places, batch_first=True, padding_value=-1)
        batches = {i: laid.batch(index) for i, laid in self._laid.items()}
        inputs, special, words = zip(*(batches[i] for i in self._models), strict=True)
        about: dict[str, Any] = {
            "leave_out": self.leave_out,
            "number": getattr(rows, "number", 0),
            "answers": answers,
        }
        if self.labels is not None:
            about["labels"] = self.labels[row]
        if self.word_counts is not None:
            about |= {"words": words, "word_count": self.word_counts[index]}
        unseen = {kind: marks.of(index) for kind, marks in self.marks.items()}
        far = {kind: marks.of(index) for kind, marks in self.far.items()}
        return TextBatch(
            inputs, special, self.ids[row], unseen=unseen, far=far, **about
        )


def _number_common_words(
    laid: Sequence[_Tokens], counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Renumber the words of each text in place: 0, 1, ... for those that all models have, -1 elsewhere.

    Args:
        laid: the tokens of each model.
        counts: (n,) words of each text.

    Returns:
        (n,) words of each text that all models have, and (W,) which of all words these are.
    """
    base = counts.cumsum(0) - counts
    total = int(counts.sum())
    common, places = torch.ones(total, dtype=torch.bool), []
    for one in laid:
        words = one.flat["words"].long()
        place = torch.where(
            words < 0, total, words + base.repeat_interleave(one.lengths)
        )
        has = torch.zeros(total + 1, dtype=torch.bool)
        has[place] = True
        common &= has[:-1]
        places.append(place)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), common.cumsum(0)])
    common = torch.cat([common, torch.zeros(1, dtype=torch.bool)])
    for one, place in zip(laid, places, strict=True):
        number = before[place] - before[base].repeat_interleave(one.lengths)
        one.flat["words"] = torch.where(common[place], number, -1).int()
    return before[base + counts] - before[base], common[:-1]
