"""Reads annotated sentences with models, for every experiment with probes: the states of all words, kept in memory."""

from collections.abc import Iterable, Sequence

import torch

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.policies import policy_of
from aligners.datamodules.text.annotated.sentence import ANNOTATION, Sentence, sentences_in
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError
from aligners.files.resources import free_memory, in_words
from aligners.probing.probe_bank import Arm, Words
from aligners.probing.probes import STRUCTURAL, EdgeTask, TreeTask
from aligners.probing.targets import Labels, tasks_of
from aligners.probing.trees import LEAST

SPLITS: dict[Split, str] = {"fit": "fitting", "validation": "validation", "test": "held-out"}
USUAL = ("pos", "dependencies", *STRUCTURAL)
MENDING = {
    "validation": ": `text.validation_share` says how many",
    "test": ": a `text.held_out` with the same tasks. In JSON lines, the entry `task` of a line names its task",
}


def check_annotated(
    data: LayerActivations | PairedActivations, tasks: Sequence[str] | None, processes: int = 1
) -> dict[Split, list[Sentence]]:
    """Raise unless the texts are annotated sentences, those of every split for every task, read by one process.

    No model is needed for that.

    Args:
        data: the data module.
        tasks: that are probed; None: the `usual_tasks`.
        processes: of the run.

    Returns:
        The sentences of every split, in the order of its text numbers.

    Raises:
        ValueError: saying which is not so, naming task and split; rows are not of words; or as `Labels.of`.
    """
    if processes > 1:
        raise UserError(
            f"Probes are trained by one process, but `trainer.devices` makes {processes}. Set it to 1."
        )
    if ANNOTATION not in data.texts.fit.column_names:
        raise UserError(
            f"Expected annotated sentences, but `data.text.source` {data.text.source!r} has none. Name a CoNLL-U file "
            "(.conllu), JSON lines with labelled spans (.jsonl), or grammar."
        )
    if policy_of(data.rows).types != "words":
        raise UserError(
            f"Expected `data.rows` to be of words, such as words or words_mean, but got {data.rows!r}."
        )
    sentences = {split: sentences_in(getattr(data.texts, split)) for split in SPLITS}
    for split, texts in sentences.items():
        there = _tasks_there(texts)
        for task in tasks or usual_tasks(sentences["fit"]):
            if split == "fit" and task not in STRUCTURAL:
                Labels.of(task, texts)
            elif task not in there:
                raise UserError(
                    f"Expected {SPLITS[split]} sentences to have what {task!r} of `tasks` asks for, but none of "
                    f"{len(texts):,} has; they have: {', '.join(there) or 'nothing'}. Leave it out, or give "
                    f"others{MENDING.get(split, '')}."
                )
    return sentences


def usual_tasks(sentences: Sequence[Sentence]) -> list[str]:
    """What is probed unless `tasks` says so: those of `USUAL` that the sentences have, or else all that they have."""
    there = _tasks_there(sentences)
    return [task for task in USUAL if task in there] or there or list(USUAL)


def _tasks_there(sentences: Sequence[Sentence]) -> list[str]:
    trees = any(len(sentence.heads) >= LEAST for sentence in sentences)
    return [*tasks_of(sentences), *(STRUCTURAL if trees else ())]


def check_room(sentences: Iterable[Sequence[Sentence]], numbers: int, device: torch.device) -> None:
    """Raise if the states of all words, and the copy that joining them takes, may not fit in memory.

    Args:
        sentences: of each split that is kept.
        numbers: that are kept of each word: widths of all models, times their layers.
        device: where they are kept.

    Raises:
        ValueError: they take more than half of what is free.
    """
    rows = sum(len(sentence.words) for split in sentences for sentence in split)
    size, free = 2 * 4 * rows * numbers, free_memory(device)
    if size > free / 2:
        raise UserError(
            f"Expected the states of {rows:,} words to fit in half of the free memory, {in_words(free / 2)}, but they "
            f"take {in_words(size)}. Take fewer layers or sites, or fewer texts."
        )


def make_task(
    name: str, words: Words, watched: Words, arms: Sequence[Arm], sizes: dict[str, int], seed: int
) -> EdgeTask | TreeTask:
    """The task of this name: see `Task`."""
    kind = TreeTask if name in STRUCTURAL else EdgeTask
    return kind(name, words, watched, arms, seed, sizes)
