"""`train.py finetune`: classifiers of every base model, seed and variant."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aligners.callbacks.checkpoint import SaveFinetuning
from aligners.cli.command import Run, command, of_trainer
from aligners.cli.endings import goes_on_with
from aligners.cli.folders import is_begun, rank, try_run_folder
from aligners.cli.options import check_trains
from aligners.datamodules.model_texts import ModelTexts, labelled_texts
from aligners.datamodules.run_identity import identity
from aligners.errors import UserError
from aligners.finetuning.classifier_training import (
    EPOCHS,
    LARGEST_GRADIENT,
    FinetuningRecipe,
)
from aligners.finetuning.jobs import Job, finished_row, parse_variants, train
from aligners.finetuning.tokens import token_task
from aligners.injection.scoring.scores import choose_score, task_score
from aligners.reports.finished_runs import make_report
from aligners.reports.names import file_names
from aligners.reports.publishing import environment, publish, write
from aligners.reports.report import Row


@command(
    "finetune",
    FinetuningRecipe,
    parts={"checkpoint": SaveFinetuning},
    data=labelled_texts,
    skip={"bases", "dtype", "labels"},
    defaults={
        "data.batch_size": 8,
        **of_trainer(
            max_epochs=EPOCHS,
            gradient_clip_val=LARGEST_GRADIENT,
            num_sanity_val_steps=0,
            enable_model_summary=False,
        ),
        **of_trainer(log_every_n_steps=20),
    },
    check=check_trains,
)
def finetune(
    run: Run,
    seeds: int | list[int] = 1,
    variants: list[str] = ["none"],  # noqa: B006  (never changed)
) -> None:
    """Fine-tune classifiers: every base model, seed and variant.

    For texts without labels, the target is what they have instead: the trees of a treebank in CoNLL-U by a biaffine
    parser (LAS; as accuracy UAS), questions in SQuAD's format by the span that answers them (F1; as accuracy exact
    match). Of `hellaswag` and `cosmos_qa` a logit for each answer is learned, by cross-entropy over the answers to a
    question.

    Each classifier becomes a model folder VARIANT/seed-SEED of the run, written whole, with its figures in
    finetuned.json. After an interruption, the same command with the same `--run` resumes.

    Example: `--data.models embedded:0 --seeds 3 --variants none bottom:2 --run runs/tuned`

    Args:
        run: of the command.
        seeds: How many (3: 0, 1, 2), or which ([5, 7]). A seed decides the head, the order of texts and dropout.
        variants: Any of none, bottom:4 (the embeddings and the bottom 4 blocks frozen), top:4, layers:3 (only the
            bottom 3 blocks are kept); bottom:all, top:all, layers:all.
    """
    try_run_folder(run.options.run)
    data: ModelTexts = run.made.data
    recipe = run.build(FinetuningRecipe)
    jobs = plan(data, _chosen(seeds), variants)
    data.setup("fit")
    score, majority_score = _score(data)
    begun = is_begun(run.options.run)
    if begun and rank() == 0:
        run.check_begun()
        for job in jobs:
            _finished(job, data, recipe, run.options.run)  # refuses those of others
    run.start(begun=begun)

    meta = {**data.describe(), **asdict(recipe)}
    meta |= {"score": score, "majority_score": majority_score}
    rows: list[Row] = []
    for job in jobs:
        with goes_on_with(lambda: {"run": run.folder}):
            row = _finished(job, data, recipe, run.folder)
            if row is None:
                saving = run.made.checkpoint.inside(run.folder)  # of one classifier
                trainer = run.trainer(saving)
                row = train(job, data, recipe, score, trainer, run.folder)
            rows.append(row)
        if rank() == 0:
            write(make_report("finetuning", meta, rows), run.folder)

    trainer = run.trainer()
    if trainer.is_global_zero:
        report = make_report("finetuning", {**meta, **environment(trainer)}, rows)
        publish(report, run.folder, trainer)


def _chosen(seeds: int | list[int]) -> list[int]:
    """Return the seeds themselves, given their number or a list.

    Raises:
        ValueError: there is no seed, a seed is given twice, or is below 0.
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else seeds
    if not chosen or min(chosen) < 0 or len(set(chosen)) < len(chosen):
        raise UserError(
            f"Expected `seeds` to be a number above 0, or different seeds from 0 on, but got {seeds}."
        )
    return chosen


def _score(data: ModelTexts) -> tuple[Any, float | None]:
    """Choose the score of the answers, and compute that of a constant answer, if there is one."""
    task = token_task(data, 0)
    if task:
        return task.score, None
    regression = data.texts.regression
    score: Any = choose_score(data.text, regression=regression, classes=data.classes)
    constant = task_score(score, data.constant_answers(), data.answers("test"))
    return score, float(constant)


def _finished(
    job: Job, data: ModelTexts, recipe: FinetuningRecipe, folder: Path
) -> Row | None:
    """Return the figures of a classifier that is finished already."""
    return finished_row(
        folder / job.folder,
        data.frozen[job.place].fingerprint,
        identity(data, **asdict(recipe)),
    )


def plan(data: ModelTexts, seeds: Sequence[int], written: Sequence[str]) -> list[Job]:
    """List the classifiers to train, variant by variant, each checked against its base.

    Raises:
        ValueError: a variant is unknown, a base has too few blocks or is quantised, or two bases would share a folder.
    """
    folders = file_names(data.models)
    if len(folders) < len(data.models):
        raise UserError(
            f"Expected `data.models` of different names, each for a folder, but got {data.models}."
        )
    jobs = []
    for place, base in enumerate(data.models):
        model = data.frozen[place]
        if model.quantised is not None:
            raise UserError(
                f"Expected weights that can train, but those of {base} are quantised ({model.quantised}). Name the "
                "model in full precision."
            )
        above = Path(folders[base]) if len(folders) > 1 else Path()
        for variant in parse_variants(written, model.depth):
            variant.check(model.model)
            for seed in seeds:
                folder = above / variant.name / f"seed-{seed}"
                jobs.append(Job(place, base, variant, seed, folder))
    return jobs
