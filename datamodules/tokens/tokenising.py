"""Tokenises texts through the cache of `datasets`, numbers their words, and compares tokenizers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from aligners.datamodules.text.annotated.sentence import CHOICE
from aligners.errors import UserError

if TYPE_CHECKING:
    import datasets
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

KEPT = {"id", "label", CHOICE}  # columns that are kept beside the tokens
AT_ONCE = 1000  # number of texts; tokenizers that differ mostly differ within these
PADDING_AND_CUTTING = (
    "padding_side",
    "truncation_side",
    "pad_token_id",
    "pad_token_type_id",
    "model_input_names",
)
_SPACES = list(filter(str.isspace, map(chr, range(0x3001))))  # U+3000 is the last one
WHITE_SPACE = np.array(list(map(ord, _SPACES)), dtype=np.uint32)

logger = logging.getLogger(__name__)


def tokenise(
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    words: bool = False,
    written: Sequence[int] = (),
) -> datasets.Dataset:
    """Tokenise a split, through the cache of `datasets`.

    Args:
        split: a split with the columns text and id and, if there are any, text_pair and label.
        tokenizer: tokenizer of the model.
        max_length: most tokens of a text; longer texts are cut. The log says once how many texts reach it.
        words: also number the words of each text; see `number_words`.
        written: numbers of the special tokens that a chat template wrote, if it did: the tokenizer then adds none.

    Returns:
        The columns input_ids, special_tokens_mask, length, id, token_type_ids and label where there are
        such, and, with `words`, words (of each token) and word_count, in the split's order.

    Raises:
        ValueError: `words` is set, but the tokenizer does not say where in the text its tokens lie.
    """
    from datasets.fingerprint import Hasher

    if words and not tokenizer.is_fast:
        raise UserError(
            f"Words are found through the places of tokens in the text, but the tokenizer of "
            f"{tokenizer.name_or_path!r}, a {type(tokenizer).__name__}, does not give these places. Use a fast "
            "tokenizer, or "
            "`rows` 'mean' or 'cls' without attention."
        )
    # Named by content: pickled tokenizers differ by what they were last used for.
    decides = [
        split._fingerprint,
        describe_tokenizer(tokenizer),
        type(tokenizer).__name__,
        max_length,
        words,
        *written,
    ]
    options = {"max_length": max_length, "words": words, "written": written}
    tokens = split.map(
        _tokens,
        batched=True,
        remove_columns=[name for name in split.column_names if name not in KEPT],
        fn_kwargs={"tokenizer": tokenizer, **options},
        new_fingerprint=Hasher.hash(decides),
        desc="Tokenising",
    )
    lengths = np.asarray(tokens["length"][:])
    cut = int((lengths >= max_length).sum())
    if cut:
        logger.warning(
            "%d of %d texts reach %d tokens; anything beyond is cut off.",
            cut,
            len(tokens),
            max_length,
        )
    return tokens


def _tokens(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    words: bool,
    written: Sequence[int],
) -> dict[str, list[Any]]:
    parts = _parts(batch)
    encoded = tokenizer(
        *parts,
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_special_tokens_mask=True,
        add_special_tokens=not written,
    )
    ids = encoded["input_ids"]
    columns = {**encoded, "length": list(map(len, ids))}
    if written:
        columns["special_tokens_mask"] = []
        for tokens in ids:
            special = [int(token in written) for token in tokens]
            columns["special_tokens_mask"].append(special)
    if words:
        kept = encoded.encodings
        full = [place for place, one in enumerate(kept) if len(one) >= max_length]
        whole = _not_cut(kept, full, parts, tokenizer, special=not written)
        texts = list(zip(*parts, strict=True))
        columns["words"], columns["word_count"] = number_words(texts, kept, whole)
    return columns


def _parts(batch: dict[str, list[Any]]) -> list[list[str]]:
    return [batch[name] for name in ("text", "text_pair") if name in batch]


def _not_cut(
    kept: list[Encoding],
    full: list[int],
    parts: list[list[str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    special: bool,
) -> list[Encoding]:
    """Tokenise the texts again, without cutting those that are `full`."""
    if not full:
        return kept
    texts = []
    for part in parts:
        texts.append([part[place] for place in full])
    again = tokenizer(
        *texts, truncation=False, verbose=False, add_special_tokens=special
    )
    whole = list(kept)
    for place, encoding in zip(full, again.encodings, strict=True):
        whole[place] = encoding
    return whole


# ---------------------------------------------------------------------- words


def number_words(
    texts: Sequence[Sequence[str]], kept: Sequence[Encoding], whole: Sequence[Encoding]
) -> tuple[list[list[int]], list[int]]:
    """Number the word that each piece belongs to, from the pieces' places in the text.

    A piece belongs to the word that contains its characters, white space before or after it aside. A piece belongs to
    no word if it is only white space, if it is a special token, or if it spans white space; in the last case the words
    that it touches are missing.

    Args:
        texts: B texts, each of one part, or of two for sentence pairs: words of the second part are numbered
            after those of the first.
        kept: the tokenizer's output for each text, cut to `max_length`.
        whole: the same, not cut; the same object if nothing was cut.

    Returns:
        For each text, the word of each kept piece, counted from 0; -1 for pieces without a word, and for missing words:
        those without pieces, or with a piece that was cut. Also the number of words of each text, missing or not.
    """
    words = _Words(texts)
    first, last = words.touched(kept)
    pieces = _pieces_per_word(first, last, words.total)
    complete = pieces > 0
    if whole is not kept:
        of_whole = _pieces_per_word(*words.touched(whole), words.total)
        complete &= pieces == of_whole
    inside = (first == last) & complete[first]

    sizes = list(map(len, kept))
    base = np.repeat(words.base, sizes)
    numbers = np.where(inside, first - base, -1)
    by_text = np.split(numbers, np.cumsum(sizes)[:-1])
    return [of_text.tolist() for of_text in by_text], words.counts.tolist()


class _Words:
    """Where words begin and end in B texts of P parts each. Texts are laid end to end and words numbered throughout.

    Attributes:
        base: (B,) number of each text's first word.
        counts: (B,) words of each text.
        total: words of all texts.
    """

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        parts = list(chain.from_iterable(texts))
        lengths = np.array(list(map(len, parts))) + 1
        start = np.cumsum(lengths) - lengths
        laid = " ".join([*parts, ""]).encode("utf-32-le", "surrogatepass")
        characters = np.frombuffer(laid, dtype=np.uint32)
        word = ~np.isin(characters, WHITE_SPACE)
        before = np.roll(word, 1)  # the last character is a space
        # At place i, between the characters i - 1 and i: words that begin before it, words that end by it.
        self._begun = np.concatenate([[0], np.cumsum(word & ~before)])
        self._over = np.cumsum(~word & before)
        self._start = start.reshape(len(texts), -1)
        self.base = self._begun[self._start[:, 0]]
        self.total = int(self._begun[-1])
        self.counts = np.diff(self.base, append=self.total)

    def touched(self, encodings: Sequence[Encoding]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and last word that each piece touches; -1 and -2 if it touches none."""
        offsets, part = _offsets_and_parts(encodings)
        in_text = ~np.isnan(part)
        part = np.where(in_text, part, -1).astype(np.int64)
        sizes = list(map(len, encodings))
        text = np.arange(len(sizes)).repeat(sizes)
        begin, end = self._start[text, part] + offsets.T

        first = self._over[begin]
        last = self._begun[end] - 1
        some = in_text & (begin < end) & (first <= last)
        return np.where(some, first, -1), np.where(some, last, -2)


def _offsets_and_parts(encodings: Sequence[Encoding]) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters where each piece begins and ends, (N, 2), and its part of the text, (N,), NaN for none."""
    places: list[tuple[int, int]] = []
    parts: list[int | None] = []
    for encoding in encodings:
        places += encoding.offsets
        parts += encoding.sequence_ids
    offsets = np.array(places, dtype=np.int64).reshape(-1, 2)
    return offsets, np.array(parts, dtype=float)


def _pieces_per_word(first: np.ndarray, last: np.ndarray, total: int) -> np.ndarray:
    """Count the pieces of each word; 0 if a piece extends beyond it. A last entry, always 0, is for no word."""
    counts = np.bincount(first[first == last], minlength=total + 1)
    over = first < last
    for begin, end in zip(first[over], last[over], strict=True):
        counts[begin : end + 1] = 0
    return counts


# ---------------------------------------------------------------------- what tokenizers have in common


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe everything that decides how a tokenizer treats a text."""
    if tokenizer.is_fast:
        inner = _without_last_call(tokenizer.backend_tokenizer.to_str())
    else:
        words = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
        inner = json.dumps(words, sort_keys=True)
    outer = {name: getattr(tokenizer, name) for name in PADDING_AND_CUTTING}
    return f"[{inner}, {json.dumps(outer, sort_keys=True)}]"


@lru_cache(maxsize=8)  # a run asks some ten times about two tokenizers
def _without_last_call(written: str) -> str:
    """Leave out of a written tokenizer how its last call padded and cut, which is no property of it."""
    inner = json.loads(written)
    del inner["padding"], inner["truncation"]
    return json.dumps(inner, sort_keys=True)


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Tell whether two tokenizers turn every text into the same inputs."""
    return a is b or describe_tokenizer(a) == describe_tokenizer(b)


def same_tokens(
    a: PreTrainedTokenizerBase,
    b: PreTrainedTokenizerBase,
    splits: Sequence[datasets.Dataset],
    max_length: int,
) -> bool:
    """Tell whether two tokenizers give the same tokens and masks for these texts, whatever padding they use.

    Args:
        a: the first tokenizer.
        b: the second tokenizer.
        splits: splits with the columns text and, for pairs, text_pair.
        max_length: most tokens of a text.
    """
    if same_tokenizer(a, b):
        return True
    for name in ("mask_token_id", "truncation_side", "is_fast"):
        if getattr(a, name) != getattr(b, name):
            return False
    for split in splits:
        for batch in split.iter(AT_ONCE):
            parts = _parts(batch)
            if _ids_of(a, parts, max_length) != _ids_of(b, parts, max_length):
                return False
    return True


def _ids_of(
    tokenizer: PreTrainedTokenizerBase, parts: list[list[str]], max_length: int
) -> list[Any]:
    """Return the tokens of some texts, which are special, and their types, which are 0 where there are none."""
    encoded = tokenizer(
        *parts,
        truncation=True,
        max_length=max_length,
        return_special_tokens_mask=True,
        return_attention_mask=False,
    )
    ids = encoded["input_ids"]
    types = encoded.get("token_type_ids", [[0] * len(one) for one in ids])
    return [ids, encoded["special_tokens_mask"], types]
