"""Lays texts end to end and cuts them into sequences of one length, on which language models are trained.

Neither `datasets` nor `transformers` does this: the function in the latter's example scripts puts nothing between texts
and drops what is left over of every thousand.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aligners.errors import UserError
from aligners.models.embedded.tokenizers import ended_texts
from datamodules.tokens.tokenised import describe_tokenizer, flatten_column

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packed:
    """A split in sequences of one length, and what went into them.

    Attributes:
        sequences: the columns input_ids, special_tokens_mask (1 at end-of-text tokens), length and id (0, 1, ...), as
            `tokenise` gives them, in the order of the documents.
        documents: number of texts.
        tokens: of all documents, an end-of-text token after each counted.
        bytes: of all documents in UTF-8.
        dropped: tokens at the end that do not fill a sequence.
        end_of_text: the token after each document.
    """

    sequences: datasets.Dataset
    documents: int
    tokens: int
    bytes: int
    dropped: int
    end_of_text: str

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the documents per token, with end-of-text tokens and dropped tokens counted."""
        return self.bytes / self.tokens

    def describe(self) -> dict[str, Any]:
        """Describe the packing for a report, as plain values."""
        numbers = {name: getattr(self, name) for name in ("documents", "tokens", "bytes", "dropped", "end_of_text")}
        return {"sequences": len(self.sequences), **numbers}


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Find the token that ends a document, and its number: the tokenizer's eos token, or else its sep token.

    Raises:
        ValueError: the tokenizer has neither.
    """
    for token, number in (
        (tokenizer.eos_token, tokenizer.eos_token_id),
        (tokenizer.sep_token, tokenizer.sep_token_id),
    ):
        if token is not None and number is not None:
            return token, number
    raise UserError(
        f"`packed` puts an end-of-text token after each text, but the tokenizer of {tokenizer.name_or_path!r} has "
        "neither an eos nor a sep token. Set one of them, or leave `packed` out."
    )


def pack(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int, *, name: str = "given") -> Packed:
    """Lay the texts of a split end to end and cut them into sequences of `length` tokens.

    Texts are tokenised whole and without special tokens, through the cache of `datasets`. After each stands the
    end-of-text token, so that where a sequence does not begin with a new text, a text goes on. What does not fill the
    last sequence is dropped, and how much is said once, in the log. Nothing is padded; labels are left out.

    Args:
        split: the columns text and id; `label` is ignored.
        tokenizer: of the models.
        length: tokens of a sequence.
        name: of the split, for messages.

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
    return Packed(_sequences(documents, sizes, length), len(split), tokens, size, dropped, token)


def _documents(split: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, end: int) -> datasets.Dataset:
    """Tokens of each text and the token that ends it, their number, and the text's bytes in UTF-8."""
    from datasets import Features, List, Value
    from datasets.fingerprint import Hasher

    described = [describe_tokenizer(tokenizer), type(tokenizer).__name__]
    kept = Features({"input_ids": List(Value("int32")), "length": Value("int64"), "bytes": Value("int64")})
    return split.map(
        _whole_texts,
        batched=True,
        remove_columns=split.column_names,
        features=kept,
        fn_kwargs={"tokenizer": tokenizer, "end": end},
        new_fingerprint=Hasher.hash(["whole", split._fingerprint, *described, end]),
        desc="Tokenising",
    )


def _whole_texts(batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, end: int) -> dict[str, list[Any]]:
    ids = ended_texts(batch["text"], tokenizer, end)
    return {
        "input_ids": ids,
        "length": [len(one) for one in ids],
        "bytes": [len(text.encode()) for text in batch["text"]],
    }


def _sequences(documents: datasets.Dataset, sizes: np.ndarray, length: int) -> datasets.Dataset:
    """Cut documents of these sizes, laid end to end, into rows of `length` tokens."""
    import datasets

    count = int(sizes.sum()) // length
    ids = flatten_column(documents.with_format("arrow")[:].column("input_ids")).numpy()
    ends = np.zeros(len(ids), dtype=np.int8)
    ends[np.cumsum(sizes) - 1] = 1
    return datasets.Dataset.from_dict(
        {
            "input_ids": ids[: count * length].reshape(count, length),
            "special_tokens_mask": ends[: count * length].reshape(count, length),
            "length": np.full(count, length),
            "id": np.arange(count),
        }
    )
