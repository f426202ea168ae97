"""Saves a fine-tuned classifier with its figures, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.files.whole import whole_folder
from aligners.models.loading.saving import save_model
from datamodules.identity import refuse_other_run
from datamodules.text.fitted import FittedTexts

__all__ = ["FINISHED", "finished_row", "save_classifier"]

FINISHED = "finetuned.json"
ABOUT = "run"  # the one entry of the file that is not a figure


def save_classifier(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, Any],
    fitted: FittedTexts,
    about: dict[str, Any] | None = None,
) -> None:
    """Write a model folder that `load_frozen` reads, with the figures beside it.

    Args:
        folder: appears only once everything is in it.
        model: the classifier.
        tokenizer: its tokenizer.
        row: the figures, as plain values.
        fitted: the texts that it and its base were trained on.
        about: `datamodules.identity.identity` of its run.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as unfinished:
        save_model(unfinished, model, tokenizer)
        fitted.save(unfinished)
        figures = json.dumps({**row, ABOUT: about}, indent=1, allow_nan=False, default=str)
        (unfinished / FINISHED).write_text(figures, encoding="utf-8")


def finished_row(folder: Path, base_fingerprint: str, about: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the figures of a finished classifier, or None if the folder does not exist.

    Args:
        folder: the classifier's folder.
        base_fingerprint: the base model's fingerprint now.
        about: `datamodules.identity.identity` of the run now; None to skip the comparison.

    Raises:
        ValueError: the folder holds something else, or a classifier that was fine-tuned from other weights, on other
            texts, or with other options.
    """
    if not folder.exists():
        return None
    if not (folder / FINISHED).is_file():
        raise ValueError(f"Expected {folder} to hold a fine-tuned classifier with its {FINISHED}. Move it away.")
    try:
        row: dict[str, Any] = json.loads((folder / FINISHED).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"Expected JSON in {folder / FINISHED}, but it is damaged: {error}. Move {folder} away."
        ) from error
    if row["base_fingerprint"] != base_fingerprint:
        raise ValueError(
            f"The classifier in {folder} was fine-tuned from {row['base']} with the fingerprint "
            f"{row['base_fingerprint'][:12]}, but the base model's is {base_fingerprint[:12]} now. Name a new `--run`."
        )
    kept = row.pop(ABOUT, None)  # earlier versions wrote none
    if about is not None and kept is not None:
        refuse_other_run(kept, about, f"The classifier in {folder}")
    return row
