"""Splits as the models of a run read them: tokenised once for equal tokenizers, and packed if asked for.

Neither `datasets` nor `transformers` packs like this: the function in the latter's example scripts puts nothing between
texts and drops what is left over of every thousand.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aligners.datamodules.text.conversations import written_tokens
from aligners.datamodules.text.texts import Texts
from aligners.datamodules.tokens.tokenised import (
    TokenisedTexts,
    describe_tokenizer,
    flatten_column,
    same_tokenizer,
    tokenise,
)
from aligners.errors import UserError
from aligners.models.tokenizers import ended_texts

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from aligners.models.model import FrozenModel

logger = logging.getLogger(__name__)


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Find the token that ends a document, and its number: the tokenizer's eos token, or else its sep token.

    Raises:
        ValueError: the tokenizer has neither.
    """
    for kind in ("eos", "sep"):
        token, number = (
            getattr(tokenizer, f"{kind}_token"),
            getattr(tokenizer, f"{kind}_token_id"),
        )
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

    Texts are tokenised whole and without special tokens, through the cache of `datasets`. After each stands the
    end-of-text token, so that where a sequence does not begin with a new text, a text goes on. What does not fill the
    last sequence is dropped, and how much is said once, in the log. Nothing is padded; labels are left out.

    Args:
        split: the columns text and id; `label` is ignored.
        tokenizer: of the models.
        length: tokens of a sequence.
        name: of the split, for messages.

    Returns:
        The sequences, with the columns input_ids, special_tokens_mask (1 at end-of-text tokens), length and id (0, 1,
        ...), as `tokenise` gives them, in the order of the documents. And for a report what went into them:
        `documents`, `tokens` of all documents with an end-of-text token after each, their `bytes` in UTF-8, tokens
        `dropped` at the end, and the `end_of_text` token.

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
    tokens, size = int(sizes.sum()), int(np.sum(documents["bytes"][:], dtype=np.int64))
    count = tokens // length
    if count == 0:
        raise UserError(
            f"Expected at least {length} tokens (`max_length`) in the {name} texts, one packed sequence, but their "
            f"{len(split)} texts have {tokens}. Use more text or a smaller `max_length`."
        )
    dropped = tokens - count * length
    logger.warning(
        "The %d %s texts are packed, %r after each, into %d sequences of %d tokens; the last %d of %d tokens do not "
        "fill one and are dropped.", len(split), name, token, count, length, dropped, tokens,
    )  # fmt: skip
    numbers = {
        "sequences": count,
        "documents": len(split),
        "tokens": tokens,
        "bytes": size,
        "dropped": dropped,
    }
    return _sequences(documents, sizes, length), {**numbers, "end_of_text": token}


def _documents(
    split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, end: int
) -> datasets.Dataset:
    """Tokens of each text and the token that ends it, their number, and the text's bytes in UTF-8."""
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
    return {
        "input_ids": ids,
        "length": list(map(len, ids)),
        "bytes": [len(text.encode()) for text in batch["text"]],
    }


def _sequences(
    documents: datasets.Dataset, sizes: np.ndarray, length: int
) -> datasets.Dataset:
    """Cut documents of these sizes, laid end to end, into rows of `length` tokens."""
    import datasets

    count = int(sizes.sum()) // length
    ids = flatten_column(documents.with_format("arrow")[:].column("input_ids")).numpy()
    ends = np.zeros(len(ids), dtype=np.int8)
    ends[np.cumsum(sizes) - 1] = 1
    flat = {"input_ids": ids, "special_tokens_mask": ends}
    columns = {
        name: values[: count * length].reshape(count, length)
        for name, values in flat.items()
    }
    return datasets.Dataset.from_dict(
        columns | {"length": np.full(count, length), "id": np.arange(count)}
    )


Split = Literal[
    "fit", "validation", "test", "other"
]  # other: of another source, where an evaluation reads one


@dataclass(eq=False)
class TokenisedSplits:
    """Three splits, each tokenised when it is first asked for.

    Args:
        texts: the splits as text.
        tokenizers: of each model.
        max_length: longest text in tokens, or the length of all packed sequences.
        words: whether the word of each token is needed.
        packed: whether texts are laid end to end.
        models: which must know all tokens of the texts.
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
            # Equal tokenizers share one table, and thereby all that is made of it.
            first = [
                next(i for i, b in enumerate(self.tokenizers) if same_tokenizer(a, b))
                for a in self.tokenizers
            ]
            tables = {
                i: self._table(name, self.tokenizers[i]) for i in sorted(set(first))
            }
            data = TokenisedTexts([tables[i] for i in first], self.tokenizers)
            data.check_vocabulary(self.models, name)
            if data.words is not None and data.words_used != data.words:
                logger.warning(
                    "%s of %d words of the %s texts are there in full for every model; the others are left out.",
                    data.words_used, data.words, name,
                )  # fmt: skip
            self._made[name] = data
        return self._made[name]

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
        with_words = (
            (name, data) for name, data in self._made.items() if data.words is not None
        )
        coverage = {
            name: {"words": data.words, "used": data.words_used}
            for name, data in with_words
        }
        return ({"words": coverage} if self.words else {}) | (
            {"packed": dict(self._packed)} if self.packed else {}
        )

    def bytes_per_token(self, name: Split) -> float:
        """Bytes of UTF-8 per token of a split: bits per byte are nats per token / ln 2 / bytes per token.

        See Gao et al. 2020, The Pile, section 3.1. Packed, these are the bytes of all texts over all their tokens, the
        end-of-text token after each counted as one; otherwise those of what was not cut over the tokens that are not
        special, as the last model's tokenizer makes them.
        """
        data = self[name]
        if self.packed:
            return self._packed[name]["bytes"] / self._packed[name]["tokens"]
        split, tokenizer = getattr(self.texts, name), self.tokenizers[-1]
        return bytes_per_token(
            split,
            data.tables[-1],
            tokenizer,
            self.max_length,
            self._written(name, tokenizer),
        )

    def _written(self, name: Split, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The special tokens of a tokenizer, where a chat template wrote them into the texts."""
        return (
            written_tokens(getattr(self.texts, name), tokenizer)
            if "chat_template" in self.texts.origin
            else []
        )


def bytes_per_token(
    split: datasets.Dataset, tokens: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int,
    written: Sequence[int] = (),
) -> float:  # fmt: skip
    """Bytes per token of texts that are not packed, counting only what was not cut.

    Special tokens count neither as tokens nor as bytes, unless they are part of the texts. A text that reaches
    `max_length` counts the bytes from its first kept token's first character to its last one's last; white space at
    either end is then left out.

    Args:
        split: the columns text and text_pair where there is such.
        tokens: what `tokenise` made of it.
        tokenizer: of the model.
        max_length: that `tokenise` was given.
        written: that `tokenise` was given.

    Raises:
        ValueError: texts were cut, and the tokenizer does not say where in a text its tokens lie.
    """
    parts = [
        split[name][:] for name in ("text", "text_pair") if name in split.column_names
    ]
    special = flatten_column(
        tokens.with_format("arrow")[:].column("special_tokens_mask")
    )
    count = len(special) if written else int((special == 0).sum())
    full = np.flatnonzero(np.asarray(tokens["length"][:]) >= max_length)
    if len(full) and not tokenizer.is_fast:
        raise UserError(
            f"Bytes per token need to know where {len(full)} texts were cut, but the tokenizer of "
            f"{tokenizer.name_or_path!r}, a {type(tokenizer).__name__}, does not say. Use a fast tokenizer, `packed`, "
            "or a larger `max_length`."
        )
    size = sum(len(text.encode()) for part in parts for text in part)
    for row in full:
        texts = [part[row] for part in parts]
        size -= sum(len(text.encode()) for text in texts)
        options = {
            "truncation": True,
            "max_length": max_length,
            "add_special_tokens": not written,
        }
        [encoding] = tokenizer(*([text] for text in texts), **options).encodings
        for number, text in enumerate(texts):
            spans = [
                s
                for s, of in zip(encoding.offsets, encoding.sequence_ids, strict=True)
                if of == number
            ]
            if spans:
                size += len(
                    text[min(a for a, _ in spans) : max(b for _, b in spans)].encode()
                )
    return size / count
