"""`train.py finetune`: any number of seeds of a classifier, with blocks frozen or left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, dict_to_namespace
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from aligners.scoring.scores import bootstrap_interval
from aligners.scoring.task_scores import choose_score, score_interval, task_score
from commands.options import add_data_and_trainer, command_parser, options_of
from commands.run import Run, instantiate, start
from datamodules.labelled import LabelledTexts
from datamodules.text.sources import Score
from finetuning.saving import FINISHED, finished_row, save_classifier
from finetuning.training import Finetuning, FinetuningRecipe
from finetuning.variants import Variant, parse_variants
from reports.kinds import make_report
from reports.names import file_names
from reports.publishing import environment, publish, write
from reports.report import Row

__all__ = ["Job", "parser", "plan", "run"]

# What changes nothing in the result, and may be different when an interrupted run goes on.
FREE = ("run", "config", "data.workers", "data.cache", "trainer.logger", "trainer.enable_progress_bar")


@dataclass(frozen=True)
class Job:
    """One classifier to train.

    Attributes:
        place: number of the base among the models of the data module.
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


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "finetune",
        "Fine-tune classifiers: every base model, seed and variant. Each ends as a model folder VARIANT/seed-SEED of "
        f"the run, written whole, with its figures in {FINISHED}. The same command with the same `--run`, after an "
        "interruption, goes on with what is missing.",
    )
    made.add_argument(
        "--seeds", type=int | list[int], default=1,
        help="How many (3: 0, 1, 2), or which ([5, 7]). A seed decides the head, the order of texts and dropout.",
    )  # fmt: skip
    made.add_argument(
        "--variants", type=list[str], default=["none"],
        help="Any of none, bottom:4 (the embeddings and the bottom 4 blocks frozen), top:4, layers:3 (only the bottom "
        "3 blocks are there); bottom:all, top:all, layers:all.",
    )  # fmt: skip
    made.add_class_arguments(FinetuningRecipe, None)
    add_data_and_trainer(
        made,
        LabelledTexts,
        skip={"bases", "dtype", "labels"},
        max_epochs=3,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        log_every_n_steps=20,
    )
    made.set_defaults({"data.batch_size": 8})
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Train what is missing, and report on all.

    Raises:
        ValueError: an option is out of its range, or the run's folder holds another run.
    """
    given = parser.parse_args(words)
    made = instantiate(parser, given)
    data: LabelledTexts = made.data
    recipe = FinetuningRecipe(**options_of(FinetuningRecipe, given))
    jobs = plan(data, _seeds(given.seeds), given.variants)
    data.setup("fit")
    begun = given.run is not None and (given.run / "config.yaml").is_file()
    if begun and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        _check_same(given.run, yaml.safe_load(parser.dump(given)))
        for job in jobs:
            finished_row(given.run / job.folder, data.frozen[job.place].fingerprint)
    run = start("finetune", parser, given, made, begun=begun)
    score = choose_score(data.text, regression=data.texts.regression, classes=data.classes)
    majority = float(task_score(score, data.constant_answers(), data.answers("test")))
    meta = {**data.describe(), **asdict(recipe), "score": score, "majority_score": majority}
    rows: list[Row] = []
    for job in jobs:
        row = finished_row(run.folder / job.folder, data.frozen[job.place].fingerprint)
        rows.append(_train(job, data, recipe, score, run) if row is None else row)
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            write(make_report("finetuning", meta, rows), run.folder)
    trainer = run.trainer()
    if trainer.is_global_zero:
        publish(make_report("finetuning", {**meta, **environment(trainer)}, rows), run.folder, trainer)


def plan(data: LabelledTexts, seeds: Sequence[int], written: Sequence[str]) -> list[Job]:
    """Every classifier that is asked for, variant by variant, each checked against its base.

    Raises:
        ValueError: a variant is none, a base does not have so many blocks or is quantised, or two bases would share a
            folder.
    """
    folders = file_names(data.models)
    if len(folders) < len(data.models):
        raise ValueError(f"Expected `data.models` of different names, each for a folder, but got {data.models}.")
    jobs = []
    for place, base in enumerate(data.models):
        model = data.frozen[place]
        if model.quantised is not None:
            raise ValueError(
                f"Expected weights that can train, but those of {base} are quantised ({model.quantised}). Name the "
                "model in full precision."
            )
        above = Path(folders[base]) if len(folders) > 1 else Path()
        for variant in parse_variants(written, model.depth):
            variant.check(model.model)
            jobs += [Job(place, base, variant, seed, above / variant.name / f"seed-{seed}") for seed in seeds]
    return jobs


def _train(job: Job, data: LabelledTexts, recipe: FinetuningRecipe, score: Score, run: Run) -> Row:
    """Train and test one classifier; rank 0 saves it."""
    data.reorder(job.seed)
    names, revision = data.texts.label_names, data.named()[job.place][1]
    model, tokenizer = data.classifier(job.base, data.classes, job.seed, label_names=names, revision=revision)
    module = Finetuning(job.variant.apply(model), recipe, name=job.name, place=job.place, seed=job.seed)
    trainer, folder = run.trainer(), run.folder / job.folder
    rank_zero_only(print)(f"Fine-tuning {job.base}, {job.variant.name}, seed {job.seed}: {folder}")
    began = time.perf_counter()
    trainer.fit(module, datamodule=data)
    if trainer.interrupted:
        raise KeyboardInterrupt
    seconds, steps = time.perf_counter() - began, trainer.global_step
    trainer.test(module, datamodule=data, verbose=False)
    weights = [(weight.numel(), weight.requires_grad) for weight in module.model.parameters()]
    row: Row = {
        "base": job.base,
        "variant": job.variant.name,
        "kind": job.variant.kind,
        "count": job.variant.count,
        "seed": job.seed,
        **_measured(module.scores, score, data),
        "validation_accuracy": module.validation_accuracy,
        "n_texts": len(module.scores["loss"]),
        "steps": steps,
        "seconds": round(seconds, 1),
        "layers": data.frozen[job.place].depth,
        "parameters": sum(size for size, _ in weights),
        "trained": sum(size for size, trains in weights if trains),
        "base_fingerprint": data.frozen[job.place].fingerprint,
        "folder": job.name,
    }
    if trainer.is_global_zero:
        save_classifier(folder, module.model, tokenizer, row)
    return row


def _measured(scores: dict[str, Tensor], score: Score, data: LabelledTexts) -> Row:
    """Accuracy, of classes, and the task's score, with intervals over the held-out texts."""
    labels, answers, correct = data.answers("test"), scores["answer"], scores["correct"]
    ends = bootstrap_interval(correct, seed=data.seed)
    found = {
        **dict(zip(("accuracy", "accuracy_low", "accuracy_high"), (correct.mean(), *ends), strict=True)),
        "score": task_score(score, answers, labels),
        **dict(
            zip(
                ("score_low", "score_high"),
                score_interval(score, answers, labels, seed=data.seed),
                strict=True,
            )
        ),
        "loss": scores["loss"].mean(),
    }
    return {"score_name": score, **{k: float(v) if bool(v.isfinite()) else None for k, v in found.items()}}


def _seeds(wanted: int | list[int]) -> list[int]:
    seeds = list(range(wanted)) if isinstance(wanted, int) else list(wanted)
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"Expected `seeds` to be a number above 0, or different seeds from 0 on, but got {wanted}.")
    return seeds


def _check_same(folder: Path, options: dict[str, Any]) -> None:
    written = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    begun, now = (vars(dict_to_namespace(each).as_flat()) for each in (written, options))
    names = [name for name in {**begun, **now} if not name.startswith(FREE)]
    differences = [name for name in names if begun.get(name) != now.get(name)]
    if differences:
        listed = "; ".join(f"{name} was {begun.get(name)!r} and is {now.get(name)!r}" for name in differences[:4])
        raise ValueError(
            f"Expected the options with which {folder} was begun, but got others: {listed}. Give the same options to "
            "go on, or name a new folder with `--run`."
        )
