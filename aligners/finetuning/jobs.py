"""Trains and measures one classifier of a run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from aligners.finetuning.saving import save_classifier
from aligners.finetuning.training import Finetuning, FinetuningRecipe
from aligners.finetuning.variants import Variant
from aligners.injection.scoring.scores import bootstrap_interval
from aligners.injection.scoring.task_scores import score_interval, task_score
from datamodules.identity import identity
from datamodules.model_texts import ModelTexts
from datamodules.text.sources import Score

__all__ = ["Job", "train"]

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
    row: Row = {
        **{"base": job.base, "variant": job.variant.name, "kind": job.variant.kind, "count": job.variant.count},
        "seed": job.seed,
        **_measured(module, score, data),
        "steps": steps,
        "seconds": seconds,
        **_sizes(job, data, module.model),
        "folder": job.name,
    }
    if trainer.is_global_zero:
        about = identity(data, **asdict(recipe))
        save_classifier(folder / job.folder, module.model, tokenizer, row, data.trained_on(job.base), about)
    return row


def _sizes(job: Job, data: ModelTexts, model: nn.Module) -> Row:
    """Return the size of a classifier, how much of it was trained, and from which weights."""
    weights = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return {
        "layers": data.frozen[job.place].depth,
        "parameters": sum(size for size, _ in weights),
        "trained": sum(size for size, trains in weights if trains),
        "base_fingerprint": data.frozen[job.place].fingerprint,
    }


def _measured(module: Finetuning, score: Score, data: ModelTexts) -> Row:
    """Return accuracy, where there are classes, and the task's score, with intervals over the held-out texts."""
    scores, labels = module.scores, data.answers("test")
    answers, correct = scores["answer"], scores["correct"]
    low, high = bootstrap_interval(correct, seed=data.seed)
    score_low, score_high = score_interval(score, answers, labels, seed=data.seed)
    found = {
        "accuracy": correct.mean(),
        "accuracy_low": low,
        "accuracy_high": high,
        "score": task_score(score, answers, labels),
        "score_low": score_low,
        "score_high": score_high,
        "loss": scores["loss"].mean(),
    }
    return {
        "score_name": score,
        **{name: float(value) if bool(value.isfinite()) else None for name, value in found.items()},
        "validation_accuracy": module.validation_accuracy,
        "n_texts": len(correct),
    }
