"""Splits as the models of a run read them: tokenised once for equal tokenizers, and packed if asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from aligners.errors import UserError
from datamodules.text.texts import Texts
from datamodules.tokens.packing import Packed, pack
from datamodules.tokens.tokenised import TokenisedTexts, flatten_column, same_tokenizer, tokenise

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Split = Literal["fit", "validation", "test", "other"]  # other: of another source, where an evaluation reads one


class TokenisedSplits:
    """Three splits, each tokenised when it is first asked for.

    Args:
        texts: the splits as text.
        tokenizers: of each model.
        max_length: longest text in tokens, or the length of all packed sequences.
        words: whether the word of each token is needed.
        packed: whether texts are laid end to end.
    """

    def __init__(
        self,
        texts: Texts,
        tokenizers: Sequence[PreTrainedTokenizerBase],
        max_length: int,
        *,
        words: bool = False,
        packed: bool = False,
    ) -> None:
        self.texts, self.tokenizers, self.max_length = texts, list(tokenizers), max_length
        self.words, self.packed = words, packed
        self._made: dict[Split, TokenisedTexts] = {}
        self._packed: dict[Split, Packed] = {}

    def __getitem__(self, name: Split) -> TokenisedTexts:
        if name not in self._made:
            # Equal tokenizers share one table, and thereby all that is made of it.
            first = [next(i for i, b in enumerate(self.tokenizers) if same_tokenizer(a, b)) for a in self.tokenizers]
            tables = {i: self._table(name, self.tokenizers[i]) for i in sorted(set(first))}
            data = TokenisedTexts([tables[i] for i in first], self.tokenizers)
            if data.words is not None and data.words_used != data.words:
                logger.warning(
                    "%s of %d words of the %s texts are there in full for every model; the others are no rows.",
                    data.words_used, data.words, name,
                )  # fmt: skip
            self._made[name] = data
        return self._made[name]

    def _table(self, name: Split, tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
        texts = getattr(self.texts, name)
        if not len(texts):
            raise UserError(
                "Expected validation texts, on which training is watched and by which its best step is chosen, but "
                "`text.validation_share` is 0. Set it above 0: 0 is for commands that fit no map."
            )
        if not self.packed:
            return tokenise(texts, tokenizer, self.max_length, words=self.words)
        self._packed[name] = pack(texts, tokenizer, self.max_length, name=name)
        return self._packed[name].sequences

    def describe(self) -> dict[str, Any]:
        """Describe the splits read so far: how many words all models have in full, and what was packed."""
        coverage = {
            name: {"words": data.words, "used": data.words_used}
            for name, data in self._made.items()
            if data.words is not None and data.words_used is not None
        }
        return {
            **({"words": coverage} if self.words else {}),
            **({"packed": {name: made.describe() for name, made in self._packed.items()}} if self.packed else {}),
        }

    def bytes_per_token(self, name: Split) -> float:
        """Bytes of UTF-8 per token of a split: bits per byte are nats per token / ln 2 / bytes per token.

        See Gao et al. 2020, The Pile, section 3.1. Packed, these are the bytes of all texts over all their tokens, the
        end-of-text token after each counted as one; otherwise those of what was not cut over the tokens that are not
        special, as the last model's tokenizer makes them.
        """
        data = self[name]
        if self.packed:
            return self._packed[name].bytes_per_token
        return bytes_per_token(getattr(self.texts, name), data.tables[-1], self.tokenizers[-1], self.max_length)


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
        raise UserError(
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
