"""Bytes per token of texts, which turn nats per token into bits per byte (Gao et al. 2020, The Pile, section 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from datamodules.tokens.tokenised import flatten_column

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

__all__ = ["bytes_per_token"]


def bytes_per_token(
    split: datasets.Dataset, tokens: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> float:
    """Bytes per token of texts that are not packed, counting only what was not cut.

    Special tokens count neither as tokens nor as bytes. A text that reaches `max_length` counts the bytes from its
    first kept token's first character to its last one's last; white space at either end is then left out.

    Args:
        split: the columns text and text_pair where there is such.
        tokens: what `tokenise` made of it.
        tokenizer: of the model.
        max_length: that `tokenise` was given.

    Raises:
        ValueError: texts were cut, and the tokenizer does not say where in a text its tokens lie.
    """
    parts = [split[name][:] for name in ("text", "text_pair") if name in split.column_names]
    count = int((flatten_column(tokens.with_format("arrow")[:].column("special_tokens_mask")) == 0).sum())
    full = np.flatnonzero(np.asarray(tokens["length"][:]) >= max_length)
    if len(full) and not tokenizer.is_fast:
        raise ValueError(
            f"Bytes per token need to know where {len(full)} texts were cut, but the tokenizer of "
            f"{tokenizer.name_or_path!r}, a {type(tokenizer).__name__}, does not say. Use a fast tokenizer, `packed`, "
            "or a larger `max_length`."
        )
    size = sum(len(text.encode()) for part in parts for text in part)
    for row in full:
        texts = [part[row] for part in parts]
        size -= sum(len(text.encode()) for text in texts)
        [encoding] = tokenizer(*([text] for text in texts), truncation=True, max_length=max_length).encodings
        for number, text in enumerate(texts):
            spans = [s for s, of in zip(encoding.offsets, encoding.sequence_ids, strict=True) if of == number]
            if spans:
                size += len(text[min(a for a, _ in spans) : max(b for _, b in spans)].encode())
    return size / count
