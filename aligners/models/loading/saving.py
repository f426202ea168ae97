"""Writes a model as `load_frozen` reads it."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.models.loading.files import without_bars

__all__ = ["save_model"]


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model and its tokenizer into a folder, as `load_frozen` reads them."""
    with without_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
