"""Trains and measures the classifiers of a run, in variants: blocks are frozen or left out."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.datamodules.model_texts import SPLITS, ModelTexts
from aligners.datamodules.run_identity import identity, refuse_other_run
from aligners.datamodules.text.sources import Score
from aligners.datamodules.text.texts import FittedTexts
from aligners.errors import UserError, finite
from aligners.files.atomic import remove, whole_folder
from aligners.files.sealed import check_sealed, read_sealed_json, sealed_json
from aligners.finetuning.classifier_training import (
    FINETUNING,
    Finetuning,
    FinetuningRecipe,
    measured_columns,
)
from aligners.finetuning.tokens import TokenTask, token_columns, token_task
from aligners.models.classifiers import KeptLayers, check_count, freeze, shortened
from aligners.models.loading.model_files import save_model
from aligners.models.model_identity import Identity, differing, listed_change

NONE = "none"


@dataclass(frozen=True)
class Variant:
    """One way to fine-tune.

    Attributes:
        kind: none: everything trains; bottom or top: `count` blocks are frozen, and with bottom also the embeddings;
            layers: only the bottom `count` blocks are kept.
        count: the number of blocks; 0 for none.
    """

    kind: KeptLayers | Literal["none"] = "none"
    count: int = 0

    @property
    def name(self) -> str:
        """`none`, `bottom-4`, `layers-3`: also the name of a folder."""
        if self.kind == NONE:
            return NONE
        return f"{self.kind}-{self.count}"

    def check(self, model: PreTrainedModel) -> None:
        """Raise what `apply` would raise, before anything changes.

        Raises:
            ValueError: the model has fewer blocks, or they are shared.
        """
        if self.kind != NONE:
            check_count(model, cast(KeptLayers, self.kind), self.count)

    def apply(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model to train: `model` itself with blocks frozen, or a smaller copy.

        Raises:
            ValueError: as in `check`, or the config of this family cannot describe a model with fewer blocks.
        """
        if self.kind == "layers":
            return shortened(model, self.count)
        if self.kind != NONE:
            freeze(model, cast(KeptLayers, self.kind), self.count)
        return model


def parse_variants(written: Sequence[str], depth: int) -> list[Variant]:
    """Parse variants; return each once, in the order in which they are written.

    Args:
        written: `none`, `bottom:4`, `top:4`, `layers:3`; or `bottom:all` for none and 0..L (Merchant et al., Figure 3),
            `top:all` for none and 1..L, `layers:all` for 1..L, where L is the whole model (Figure 4).
        depth: L.

    Raises:
        ValueError: nothing is written, or something else.
    """
    variants: list[Variant] = []
    for entry in written:
        kind, _, count = entry.strip().partition(":")
        is_count = count == "all" or count.isdigit()
        if entry.strip() == NONE:
            variants.append(Variant())
        elif kind in get_args(KeptLayers) and is_count:
            variants += _variants(cast(KeptLayers, kind), count, depth)
        else:
            raise UserError(
                f"Expected `variants` out of none, bottom:4, top:4, layers:3 with any number, or bottom:all, top:all, "
                f"layers:all, but got {entry!r}."
            )
    if not variants:
        raise UserError(
            "Expected at least one of `variants`, but got none. Write `none` to fine-tune everything."
        )
    return list(dict.fromkeys(variants))


def _variants(kind: KeptLayers, count: str, depth: int) -> list[Variant]:
    if count != "all":
        return [Variant(kind, int(count))]
    every = [Variant(kind, number) for number in range(1, depth + 1)]
    if kind == "bottom":
        every.insert(0, Variant(kind, 0))
    if kind != "layers":
        every.insert(0, Variant())
    return every


FINISHED = "finetuned.json"
LAST = "last.ckpt"
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

    def columns(self) -> Row:
        """Columns of a report that describe it."""
        return {
            "base": self.base,
            "variant": self.variant.name,
            "kind": self.variant.kind,
            "count": self.variant.count,
            "seed": self.seed,
        }


def train(
    job: Job,
    data: ModelTexts,
    recipe: FinetuningRecipe,
    score: str,
    trainer: pl.Trainer,
    folder: Path,
) -> Row:
    """Train and test one classifier; rank 0 saves it.

    Args:
        job: the classifier.
        data: the data module, shared by all classifiers.
        recipe: how it is trained.
        score: the task's score.
        trainer: a Trainer that only this classifier uses.
        folder: the run's folder; an interrupted training has left its last.ckpt here.

    Returns:
        Its figures, a row of the report.

    Raises:
        ValueError: last.ckpt is of this classifier, but of other weights, texts or options, or cannot be read.
    """
    data.order = job.seed  # of the training texts
    module, tokenizer = _module(job, data, recipe)
    model = module.model
    frozen = data.frozen[job.place]
    base = {"base": job.base, "base_fingerprint": frozen.fingerprint}
    about = {ABOUT: identity(data, **asdict(recipe))}
    module.about = base | about

    took = _fit_and_test(module, job, data, trainer, folder)
    row: Row = {
        **job.columns(),
        "score_name": score,
        **_measured(module, data, score),
        **took,
        "layers": frozen.depth,
        **_sizes(model),
        **base,
        "folder": job.name,
    }
    if trainer.is_global_zero:
        fitted = data.trained_on(job.base)
        save_classifier(folder / job.folder, model, tokenizer, row | about, fitted)
        remove(folder / LAST)
    trainer.strategy.barrier()
    return row


def _fit_and_test(
    module: Finetuning, job: Job, data: ModelTexts, trainer: pl.Trainer, folder: Path
) -> Row:
    """Train and test a classifier, and return its steps and seconds."""
    last = _resumed_from(folder / LAST, module)
    after = ""
    if last is not None:
        after = f", from {last}"
    rank_zero_only(print)(
        f"Fine-tuning {job.base}, {job.variant.name}, seed {job.seed}: {folder / job.folder}{after}"
    )
    began = time.perf_counter()
    trainer.fit(module, datamodule=data, ckpt_path=last, weights_only=True)
    seconds = time.perf_counter() - began
    steps = trainer.global_step
    trainer.test(module, datamodule=data, verbose=False)
    return {"steps": steps, "seconds": round(seconds, 1)}


def _sizes(model: PreTrainedModel) -> Row:
    """Return the number of the model's parameters, and of those that train."""
    parameters = trained = 0
    for weight in model.parameters():
        parameters += weight.numel()
        if weight.requires_grad:
            trained += weight.numel()
    return {"parameters": parameters, "trained": trained}


def _module(
    job: Job, data: ModelTexts, recipe: FinetuningRecipe
) -> tuple[Finetuning, PreTrainedTokenizerBase]:
    """Return the module that trains the classifier, and its tokenizer."""
    task = token_task(data, job.place)
    model, tokenizer = _classifier(job, data, task)
    module = Finetuning(
        model, recipe, name=job.name, place=job.place, seed=job.seed, task=task
    )
    return module, tokenizer


def _classifier(
    job: Job, data: ModelTexts, task: TokenTask | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model to train, with a new head, and its tokenizer."""
    _, revision = data.named()[job.place]
    make = partial(data.classifier, job.base, seed=job.seed, revision=revision)
    if task is not None:
        model, tokenizer = make(task.outputs, loader=task.loader)
        return task.finish(job.variant.apply(model)), tokenizer
    names = None
    if data.classes > 1:
        names = data.texts.label_names
    model, tokenizer = make(data.classes, label_names=names)
    return job.variant.apply(model), tokenizer


def _measured(module: Finetuning, data: ModelTexts, score: str) -> Row:
    """Return the figures of a test, the loss last, and the numbers of texts."""
    if module.task is None:
        answers = data.answers("test")
        known = cast(Score, score)
        columns = measured_columns(known, module.scores, answers, data.seed)
    else:
        columns = token_columns(module.scores, data.seed)
    measured: Row = {name: finite(value[0]) for name, value in columns.items()}
    measured["loss"] = measured.pop("loss")
    measured["validation_accuracy"] = module.validation_accuracy
    for split in SPLITS[:2]:
        measured[f"n_{split}"] = len(data.split(split))
    measured["n_texts"] = module.scores["correct"].shape[-1]
    return measured


def _resumed_from(last: Path, module: Finetuning) -> Path | None:
    """Return the checkpoint of an interrupted training of this classifier, if there is one."""
    if not last.is_file():
        return None
    try:
        check_sealed(last)
        content = torch.load(last, map_location="meta", weights_only=True, mmap=True)
        kept = content[FINETUNING]
    except Exception as error:  # reading any other file can raise anything
        raise UserError(
            f"{last} is not a fine-tuning checkpoint, or is damaged. Remove it."
        ) from error
    if kept["name"] != module.name:
        return None
    fingerprint = module.about["base_fingerprint"]
    run = module.about[ABOUT]
    _refuse_other(f"The classifier in {last}", kept["about"], fingerprint, run)
    return last


def save_classifier(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    fitted: FittedTexts,
) -> None:
    """Write a model folder that `load_frozen` reads, with the figures beside it.

    Args:
        folder: appears only once everything is in it.
        model: the classifier.
        tokenizer: its tokenizer.
        row: the figures, as plain values, and under `ABOUT` what `datamodules.run_identity.identity` says of its run.
        fitted: the texts that it and its base were trained on.
    """
    with whole_folder(folder) as unfinished:
        save_model(unfinished, model, tokenizer)
        fitted.save(unfinished)
        plain = json.loads(json.dumps(row, allow_nan=False, default=str))
        (unfinished / FINISHED).write_text(sealed_json(plain), encoding="utf-8")


def finished_row(
    folder: Path, base_fingerprint: str, about: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the figures of a finished classifier, or None if the folder does not exist.

    Args:
        folder: the classifier's folder.
        base_fingerprint: the base model's fingerprint now.
        about: `aligners.datamodules.run_identity.identity` of the run now; None to skip the comparison.

    Raises:
        ValueError: the folder holds something else, or a classifier that was fine-tuned from other weights, on other
            texts, or with other options.
    """
    if not folder.exists():
        return None
    if not (folder / FINISHED).is_file():
        raise UserError(
            f"Expected {folder} to hold a fine-tuned classifier with its {FINISHED}. Move it away."
        )
    try:
        row = read_sealed_json((folder / FINISHED).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{folder / FINISHED} is damaged: {error}. Move {folder} away."
        ) from error
    _refuse_other(f"The classifier in {folder}", row, base_fingerprint, about)
    row.pop(ABOUT, None)
    return row


def _refuse_other(
    what: str, kept: dict[str, Any], base_fingerprint: str, about: dict[str, Any] | None
) -> None:
    """Raise if a classifier was fine-tuned from other weights, on other texts, or with other options."""
    if kept["base_fingerprint"] != base_fingerprint:
        raise UserError(
            f"{what} was fine-tuned from {kept['base']} with the fingerprint {kept['base_fingerprint'][:12]}, but the "
            f"base model's is {base_fingerprint[:12]} now. Name a new `--run`."
        )
    stored = kept.get(ABOUT)  # earlier versions wrote none
    if about is None or stored is None:
        return
    then = _named(stored["data"]["models"], kept["base"])
    now = _named(about["data"]["models"], kept["base"])
    if then is not None and now is not None and differing(then, now):
        raise UserError(
            f"{what} was fine-tuned from {listed_change(then, now)}. Name a new `--run`."
        )
    refuse_other_run(stored, about, what)


def _named(models: Sequence[Identity], name: str) -> Identity | None:
    """Return the model of this name; None if there is none."""
    for model in models:
        if model["name"] == name:
            return model
    return None
