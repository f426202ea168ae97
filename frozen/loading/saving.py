"""Writes model folders completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from frozen.loading.files import without_bars

__all__ = ["save_model", "whole_folder"]


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` once everything is in it."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed; we hold the lock
    unfinished.mkdir()
    try:
        yield unfinished
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model and its tokenizer into a folder, as `load_frozen` reads them."""
    with without_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
