"""Trains and measures one classifier of a run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.errors import UserError
from aligners.files.whole import whole_folder
from aligners.finetuning.training import Finetuning, FinetuningRecipe, finite, measured_columns
from aligners.finetuning.variants import Variant
from aligners.models.loading.files import save_model
from datamodules.identity import identity, refuse_other_run
from datamodules.model_texts import ModelTexts
from datamodules.text.fitted import FittedTexts
from datamodules.text.sources import Score

FINISHED = "finetuned.json"
ABOUT = "run"  # the one entry of the file that is not a figure
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One classifier to train.

    Attributes:
        place: index of the base model in the data module.
        base: its name.
        variant: what is frozen or left out.
        seed: for the head, the order of the texts and dropout.
        folder: its folder, relative to the run's.
    """

    place: int
    base: str
    variant: Variant
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """Name for logs: the path below the run's folder."""
        return self.folder.as_posix()


def train(job: Job, data: ModelTexts, recipe: FinetuningRecipe, score: Score, trainer: pl.Trainer, folder: Path) -> Row:
    """Train and test one classifier; rank 0 saves it.

    Args:
        job: the classifier.
        data: the data module, shared by all classifiers.
        recipe: how it is trained.
        score: the task's score.
        trainer: a Trainer that only this classifier uses.
        folder: the run's folder.

    Returns:
        Its figures, a row of the report.
    """
    data.reorder(job.seed)
    names, revision = data.texts.label_names, data.named()[job.place][1]
    model, tokenizer = data.classifier(job.base, data.classes, job.seed, label_names=names, revision=revision)
    module = Finetuning(job.variant.apply(model), recipe, name=job.name, place=job.place, seed=job.seed)
    rank_zero_only(print)(f"Fine-tuning {job.base}, {job.variant.name}, seed {job.seed}: {folder / job.folder}")
    began = time.perf_counter()
    trainer.fit(module, datamodule=data)
    seconds, steps = round(time.perf_counter() - began, 1), trainer.global_step
    trainer.test(module, datamodule=data, verbose=False)
    columns = measured_columns(score, module.scores, data.answers("test"), data.seed)
    measured = {name: finite(value[0]) for name, value in columns.items()}
    measured["loss"] = measured.pop("loss")  # the last column of these
    row: Row = {
        **{"base": job.base, "variant": job.variant.name, "kind": job.variant.kind, "count": job.variant.count},
        "seed": job.seed,
        "score_name": score,
        **measured,
        "validation_accuracy": module.validation_accuracy,
        "n_texts": module.scores["correct"].shape[-1],
        "steps": steps,
        "seconds": seconds,
        "layers": data.frozen[job.place].depth,
        "parameters": sum(weight.numel() for weight in module.model.parameters()),
        "trained": sum(weight.numel() for weight in module.model.parameters() if weight.requires_grad),
        "base_fingerprint": data.frozen[job.place].fingerprint,
        "folder": job.name,
    }
    if trainer.is_global_zero:
        about = identity(data, **asdict(recipe))
        save_classifier(folder / job.folder, module.model, tokenizer, row, data.trained_on(job.base), about)
    return row


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
        raise UserError(f"Expected {folder} to hold a fine-tuned classifier with its {FINISHED}. Move it away.")
    try:
        row: dict[str, Any] = json.loads((folder / FINISHED).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"Expected JSON in {folder / FINISHED}, but it is damaged: {error}. Move {folder} away."
        ) from error
    if row["base_fingerprint"] != base_fingerprint:
        raise UserError(
            f"The classifier in {folder} was fine-tuned from {row['base']} with the fingerprint "
            f"{row['base_fingerprint'][:12]}, but the base model's is {base_fingerprint[:12]} now. Name a new `--run`."
        )
    kept = row.pop(ABOUT, None)  # earlier versions wrote none
    if about is not None and kept is not None:
        refuse_other_run(kept, about, f"The classifier in {folder}")
    return row
