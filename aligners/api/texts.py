"""Texts as batches of a model's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from aligners.models.model import FrozenModel
from datamodules.batches import TextBatch
from datamodules.tokens.tokenised import TokenisedTexts, tokenise

__all__ = ["batches"]


def batches(
    frozen: FrozenModel, texts: Sequence[str], labels: Sequence[int] | None, size: int, longest: int
) -> Iterator[TextBatch]:
    """The texts in their order, tokenised and padded, some at a time.

    Args:
        frozen: the model that reads them.
        texts: one or more.
        labels: the class of each, if known.
        size: texts of a batch.
        longest: most tokens of a text, or fewer where the model has fewer positions.

    Raises:
        ValueError: there are no texts or a string instead, no tokenizer, not one label for each, or `size` is 0.
    """
    tokenizer = _checked(frozen, texts, labels, size)
    columns: dict[str, list[Any]] = {"text": list(texts), "id": list(range(len(texts)))}
    columns |= {} if labels is None else {"label": [int(label) for label in labels]}
    with _no_bars():
        split = tokenise(datasets.Dataset.from_dict(columns), tokenizer, min(longest, frozen.max_length or longest))
    tokens = TokenisedTexts([split], [tokenizer])
    return (tokens[range(first, min(first + size, len(tokens)))] for first in range(0, len(tokens), size))


def _checked(
    frozen: FrozenModel, texts: Sequence[str], labels: Sequence[int] | None, size: int
) -> PreTrainedTokenizerBase:
    if isinstance(texts, str) or not len(texts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"Expected `texts` as a list of one or more strings, but got {_said(texts)}.")
    if labels is not None and len(labels) != len(texts):
        raise ValueError(f"Expected one of `labels` for each of {len(texts)} texts, but got {len(labels)}.")
    if size < 1:
        raise ValueError(f"Expected `batch_size` to be at least 1, but got {size}.")
    if frozen.tokenizer is None:
        raise ValueError(f"Expected a model with its tokenizer, but {frozen.name} has none. Give (model, tokenizer).")
    return frozen.tokenizer


def _said(texts: Sequence[str]) -> str:
    if isinstance(texts, str):
        return "a single string"
    other = next((type(text).__name__ for text in texts if not isinstance(text, str)), None)
    return "none" if other is None else f"one that holds a {other}"


@contextmanager
def _no_bars() -> Iterator[None]:
    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
