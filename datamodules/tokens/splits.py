"""Splits as the models of a run read them: tokenised once for all models with equal tokenizers, and packed if wanted.

Neither `datasets` nor `transformers` packs like this: the function in the example scripts of `transformers` puts
nothing between texts, and drops the remainder of every thousand texts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aligners.datamodules.text.conversations import written_tokens
from aligners.datamodules.text.texts import Texts
from aligners.datamodules.tokens.tokenised import TokenisedTexts, flatten_column
from aligners.datamodules.tokens.tokenising import describe_tokenizer, tokenise
from aligners.errors import UserError
from aligners.models.tokenizers import ended_texts

if TYPE_CHECKING:
    import datasets
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    from aligners.models.model import FrozenModel

logger = logging.getLogger(__name__)


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Find the token that ends a document, and its number: the tokenizer's eos token, or else its sep token.

    Raises:
        ValueError: the tokenizer has neither.
    """
    for kind in ("eos", "sep"):
        token = getattr(tokenizer, f"{kind}_token")
        number = getattr(tokenizer, f"{kind}_token_id")
        if token is not None and number is not None:
            return token, number
    raise UserError(
        f"`packed` puts an end-of-text token after each text, but the tokenizer of {tokenizer.name_or_path!r} has "
        "neither an eos nor a sep token. Set one of them, or leave `packed` out."
    )


def pack(
    split: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    name: str = "given",
) -> tuple[datasets.Dataset, dict[str, Any]]:
    """Lay the texts of a split end to end and cut them into sequences of `length` tokens.

    Texts are tokenised whole and without special tokens, through the cache of `datasets`. Each is followed by the
    end-of-text token. A sequence that does not begin with a new text continues one. Tokens that do not fill the last
    sequence are dropped, and the log says how many. Nothing is padded; labels are left out.

    Args:
        split: a split with the columns text and id; `label` is ignored.
        tokenizer: tokenizer of the models.
        length: number of tokens of a sequence.
        name: name of the split, for messages.

    Returns:
        The sequences, with the columns input_ids, special_tokens_mask (1 at end-of-text tokens), length and id (0, 1,
        ...), as `tokenise` gives them, in the order of the documents. For a report, also: number of `documents`,
        `tokens` of all documents with an end-of-text token after each, their `bytes` in UTF-8, tokens `dropped` at the
        end, and the `end_of_text` token.

    Raises:
        ValueError: there are sentence pairs, no end-of-text token, or too few tokens for one sequence.
    """
    if "text_pair" in split.column_names:
        raise UserError(
            "`packed` lays texts end to end, but these are sentence pairs. Name one column in `text_columns`, or leave "
            "`packed` out."
        )
    token, number = end_of_text(tokenizer)
    documents = _documents(split, tokenizer, number)
    sizes = np.asarray(documents["length"][:], dtype=np.int64)
    tokens = int(sizes.sum())
    count, dropped = divmod(tokens, length)
    if count == 0:
        raise UserError(
            f"Expected at least {length} tokens (`max_length`) in the {name} texts, one packed sequence, but their "
            f"{len(split)} texts have {tokens}. Use more text or a smaller `max_length`."
        )
    logger.warning(
        "The %d %s texts are packed, %r after each, into %d sequences of %d tokens; the last %d of %d tokens do not"
        " fill a sequence and are dropped.", len(split), name, token, count, length, dropped, tokens,
    )  # fmt: skip
    packed = {
        "sequences": count,
        "documents": len(split),
        "tokens": tokens,
        "bytes": int(np.sum(documents["bytes"][:], dtype=np.int64)),
        "dropped": dropped,
        "end_of_text": token,
    }
    return _sequences(documents, sizes, length), packed


def _documents(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, end: int
) -> datasets.Dataset:
    """Tokenise texts; return their tokens with the end-of-text token, the tokens' number, and the bytes in UTF-8."""
    from datasets import Features, List, Value
    from datasets.fingerprint import Hasher

    described = [describe_tokenizer(tokenizer), type(tokenizer).__name__]
    features = Features(
        {
            "input_ids": List(Value("int32")),
            "length": Value("int64"),
            "bytes": Value("int64"),
        }
    )
    return split.map(
        _whole_texts,
        batched=True,
        remove_columns=split.column_names,
        features=features,
        fn_kwargs={"tokenizer": tokenizer, "end": end},
        new_fingerprint=Hasher.hash(["whole", split._fingerprint, *described, end]),
        desc="Tokenising",
    )


def _whole_texts(
    batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, end: int
) -> dict[str, list[Any]]:
    ids = ended_texts(batch["text"], tokenizer, end)
    encoded = map(str.encode, batch["text"])
    return {
        "input_ids": ids,
        "length": list(map(len, ids)),
        "bytes": list(map(len, encoded)),
    }


def _sequences(
    documents: datasets.Dataset, sizes: np.ndarray, length: int
) -> datasets.Dataset:
    """Cut documents of these sizes, laid end to end, into rows of `length` tokens."""
    import datasets

    column = documents.with_format("arrow")[:].column("input_ids")
    ids = flatten_column(column).numpy()
    ends = np.zeros(len(ids), dtype=np.int8)
    ends[np.cumsum(sizes) - 1] = 1
    count = len(ids) // length
    kept = count * length
    columns = {
        "input_ids": ids[:kept].reshape(count, length),
        "special_tokens_mask": ends[:kept].reshape(count, length),
        "length": np.full(count, length),
        "id": np.arange(count),
    }
    return datasets.Dataset.from_dict(columns)


# other: of another source, where an evaluation reads one
Split = Literal["fit", "validation", "test", "other"]


@dataclass(eq=False)
class TokenisedSplits:
    """Three splits, each tokenised on first use.

    Args:
        texts: the splits as text.
        tokenizers: tokenizer of each model.
        max_length: longest text in tokens, or the length of all packed sequences.
        words: whether the word of each token is needed.
        packed: whether texts are laid end to end.
        models: models that must know all tokens of the texts.
    """

    texts: Texts
    tokenizers: Sequence[PreTrainedTokenizerBase]
    max_length: int
    words: bool = False
    packed: bool = False
    models: Sequence[FrozenModel] = ()

    def __post_init__(self) -> None:
        self._made: dict[Split, TokenisedTexts] = {}
        self._packed: dict[Split, dict[str, Any]] = {}

    def __getitem__(self, name: Split) -> TokenisedTexts:
        if name not in self._made:
            self._made[name] = self._tokenise(name)
        return self._made[name]

    def _tokenise(self, name: Split) -> TokenisedTexts:
        data = TokenisedTexts(self._tables(name), self.tokenizers)
        data.check_vocabulary(self.models, name)
        if data.words_used != data.words:
            logger.warning(
                "%s of %d words of the %s texts are complete in every model's tokens; the others are left out.",
                data.words_used, data.words, name,
            )  # fmt: skip
        return data

    def _tables(self, name: Split) -> list[datasets.Dataset]:
        """Return the tokens for each model; equal tokenizers share one table and everything derived from it."""
        described = list(map(describe_tokenizer, self.tokenizers))
        tables: dict[str, datasets.Dataset] = {}
        for description, tokenizer in zip(described, self.tokenizers, strict=True):
            if description not in tables:
                tables[description] = self._table(name, tokenizer)
        return list(map(tables.__getitem__, described))

    def _table(
        self, name: Split, tokenizer: PreTrainedTokenizerBase
    ) -> datasets.Dataset:
        texts = getattr(self.texts, name)
        if not len(texts):
            raise UserError(
                "Expected validation texts, on which training is watched and by which its best step is chosen, but "
                "`text.validation_share` is 0. Set it above 0: 0 is for commands that fit no map."
            )
        if not self.packed:
            return tokenise(
                texts,
                tokenizer,
                self.max_length,
                words=self.words,
                written=self._written(name, tokenizer),
            )
        sequences, self._packed[name] = pack(
            texts, tokenizer, self.max_length, name=name
        )
        return sequences

    def describe(self) -> dict[str, Any]:
        """Describe the splits read so far: how many words all models have in full, and what was packed."""
        described: dict[str, Any] = {}
        if self.words:
            described["words"] = {}
        for name, data in self._made.items():
            if data.words is not None:
                counts = {"words": data.words, "used": data.words_used}
                described["words"][name] = counts
        if self.packed:
            described["packed"] = dict(self._packed)
        return described

    def bytes_per_token(self, name: Split) -> float:
        """Return a split's bytes of UTF-8 per token: bits per byte are nats per token / ln 2 / bytes per token.

        See Gao et al. 2020, The Pile, section 3.1. If packed, the bytes of all texts are divided by the number of their
        tokens, end-of-text tokens included. Otherwise the bytes that were not cut are divided by the number of the last
        model's tokens that are not special.
        """
        data = self[name]
        if self.packed:
            packed = self._packed[name]
            return packed["bytes"] / packed["tokens"]
        split, tokenizer = getattr(self.texts, name), self.tokenizers[-1]
        written = self._written(name, tokenizer)
        return bytes_per_token(
            split, data.tables[-1], tokenizer, self.max_length, written
        )

    def _written(self, name: Split, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the special tokens of a tokenizer, if a chat template wrote them into the texts."""
        if "chat_template" not in self.texts.origin:
            return []
        return written_tokens(getattr(self.texts, name), tokenizer)


def bytes_per_token(
    split: datasets.Dataset,
    tokens: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    written: Sequence[int] = (),
) -> float:
    """Bytes per token of texts that are not packed, counting only what was not cut.

    Special tokens count neither as tokens nor as bytes, unless they are part of the texts. A text that reaches
    `max_length` counts the bytes from the first character of its first kept token to the last character of its last
    one, without white space at either end.

    Args:
        split: a split with the columns text and, for sentence pairs, text_pair.
        tokens: the split after `tokenise`.
        tokenizer: tokenizer of the model.
        max_length: the value given to `tokenise`.
        written: the value given to `tokenise`.

    Raises:
        ValueError: texts were cut, and the tokenizer does not say where in a text its tokens lie.
    """
    column = tokens.with_format("arrow")[:].column("special_tokens_mask")
    special = flatten_column(column)
    count = len(special)
    if not written:
        count -= int(special.sum())
    lengths = np.asarray(tokens["length"][:])
    full = set(np.flatnonzero(lengths >= max_length).tolist())
    if full and not tokenizer.is_fast:
        raise UserError(
            f"Counting bytes per token requires to know where {len(full)} texts were cut, but the tokenizer of "
            f"{tokenizer.name_or_path!r}, a {type(tokenizer).__name__}, does not say. Use a fast tokenizer, `packed`, "
            "or a larger `max_length`."
        )

    options = {"truncation": True, "max_length": max_length}
    options["add_special_tokens"] = not written
    size = 0
    for row, texts in enumerate(zip(*_columns(split), strict=True)):
        kept = list(texts)
        if row in full:
            encoded = tokenizer(*([text] for text in texts), **options)
            kept = _kept(texts, encoded.encodings[0])
        size += len("".join(kept).encode())
    return size / count


def _columns(split: datasets.Dataset) -> list[list[str]]:
    """Return the texts of a split and, for sentence pairs, their second sentences."""
    names = [name for name in ("text", "text_pair") if name in split.column_names]
    return [split[name][:] for name in names]


def _kept(texts: Sequence[str], encoding: Encoding) -> list[str]:
    """Return the kept part of a text, or of both parts of a sentence pair: from the first kept token to the last."""
    kept = []
    for number, text in enumerate(texts):
        begins, ends = [], []
        for offsets, part in zip(encoding.offsets, encoding.sequence_ids, strict=True):
            if part == number:
                begins.append(offsets[0])
                ends.append(offsets[1])
        if begins:
            kept.append(text[min(begins) : max(ends)])
    return kept
