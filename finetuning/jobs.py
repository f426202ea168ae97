"""One classifier of a run: how it is trained and measured."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from aligners.scoring.scores import bootstrap_interval
from aligners.scoring.task_scores import score_interval, task_score
from datamodules.identity import identity
from datamodules.labelled import LabelledTexts
from datamodules.text.sources import Score
from finetuning.saving import save_classifier
from finetuning.training import Finetuning, FinetuningRecipe
from finetuning.variants import Variant

__all__ = ["Job", "train"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One classifier to train.

    Attributes:
        place: index of the base model in the data module.
        base: its name.
        variant: what is frozen or left out.
        seed: of the head, the order of the texts and dropout.
        folder: where it goes, below the run's.
    """

    place: int
    base: str
    variant: Variant
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """For logs: the path below the run's folder."""
        return self.folder.as_posix()


def train(
    job: Job, data: LabelledTexts, recipe: FinetuningRecipe, score: Score, trainer: pl.Trainer, folder: Path
) -> Row:
    """Train and test one classifier; rank 0 saves it.

    Args:
        job: which.
        data: of all classifiers.
        recipe: how it is trained.
        score: by what the task is measured.
        trainer: of its own.
        folder: of the run.

    Returns:
        What was measured of it: a row of the report.
    """
    data.reorder(job.seed)
    names, revision = data.texts.label_names, data.named()[job.place][1]
    model, tokenizer = data.classifier(job.base, data.classes, job.seed, label_names=names, revision=revision)
    module = Finetuning(job.variant.apply(model), recipe, name=job.name, place=job.place, seed=job.seed)
    rank_zero_only(print)(f"Fine-tuning {job.base}, {job.variant.name}, seed {job.seed}: {folder / job.folder}")
    began = time.perf_counter()
    trainer.fit(module, datamodule=data)
    if trainer.interrupted:
        raise KeyboardInterrupt
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


def _sizes(job: Job, data: LabelledTexts, model: nn.Module) -> Row:
    """The size of a classifier and how much of it was trained, and from which weights."""
    weights = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return {
        "layers": data.frozen[job.place].depth,
        "parameters": sum(size for size, _ in weights),
        "trained": sum(size for size, trains in weights if trains),
        "base_fingerprint": data.frozen[job.place].fingerprint,
    }


def _measured(module: Finetuning, score: Score, data: LabelledTexts) -> Row:
    """Accuracy, of classes, and the task's score, with intervals over the held-out texts."""
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
