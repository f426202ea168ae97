"""The checks that every experiment with probes makes of its annotated sentences, and the tasks made from them."""

from collections.abc import Iterable, Sequence

import torch

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.policies import policy_of
from aligners.datamodules.text.annotated.sentence import (
    ANNOTATION,
    Sentence,
    sentences_in,
)
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError
from aligners.files.resources import free_memory, in_words
from aligners.probing.probe_bank import Variant, Words
from aligners.probing.probes import STRUCTURAL, EdgeTask, TreeTask
from aligners.probing.targets import Labels, tasks_of
from aligners.probing.trees import LEAST

SPLITS: dict[Split, str] = {
    "fit": "fitting",
    "validation": "validation",
    "test": "held-out",
}
USUAL = ("pos", "dependencies", *STRUCTURAL)
ADVICE = {
    "validation": ": `text.validation_share` says how many",
    "test": ": a `text.held_out` with the same tasks. In JSON lines, the entry `task` of a line names its task",
}


def check_annotated(
    data: LayerActivations | PairedActivations,
    tasks: Sequence[str] | None,
    processes: int = 1,
) -> dict[Split, list[Sentence]]:
    """Raise unless one process reads annotated sentences, and every split has targets or trees for every task.

    This needs no model.

    Args:
        data: the data module.
        tasks: tasks to probe; if empty, the `usual_tasks`.
        processes: number of processes of the run.

    Returns:
        The sentences of every split, in the order of its text numbers.

    Raises:
        ValueError: a condition is not met (the message names the task and the split), rows are not of words, or as
            `Labels.of` does.
    """
    if processes > 1:
        raise UserError(
            f"Probes are trained by one process, but `trainer.devices` starts {processes}. Set it to 1."
        )
    if ANNOTATION not in data.texts.fit.column_names:
        raise UserError(
            f"Expected annotated sentences, but `data.text.source` {data.text.source!r} has none. Name a CoNLL-U file "
            "(.conllu), JSON lines with labelled spans (.jsonl), or grammar."
        )
    if policy_of(data.rows).types != "words":
        raise UserError(
            f"Expected `data.rows` to be words or words_mean, for example, but got {data.rows!r}."
        )

    sentences = dict[Split, list[Sentence]]()
    for split in SPLITS:
        sentences[split] = sentences_in(getattr(data.texts, split))
    probed = tasks or usual_tasks(sentences["fit"])
    for split, texts in sentences.items():
        _check_split(split, texts, probed)
    return sentences


def _check_split(split: Split, texts: Sequence[Sentence], tasks: Sequence[str]) -> None:
    """Raise unless the sentences of a split have targets or trees for every task."""
    known = _known_tasks(texts)
    for task in tasks:
        if split == "fit" and task not in STRUCTURAL:
            Labels.of(task, texts)
        elif task not in known:
            raise UserError(
                f"Expected {SPLITS[split]} sentences with annotations for {task!r} of `tasks`, but none of "
                f"{len(texts):,} has any; they have: {', '.join(known) or 'nothing'}. Leave it out, or give "
                f"others{ADVICE.get(split, '')}."
            )


def usual_tasks(sentences: Sequence[Sentence]) -> list[str]:
    """Return the tasks to probe by default: those of `USUAL` that the sentences have, or else all that they have."""
    known = _known_tasks(sentences)
    usual = [task for task in USUAL if task in known]
    return usual or known or list(USUAL)


def _known_tasks(sentences: Sequence[Sentence]) -> list[str]:
    """Return the tasks that sentences have targets or trees for."""
    tasks = tasks_of(sentences)
    words = [len(sentence.heads) for sentence in sentences]
    if max(words, default=0) >= LEAST:
        tasks.extend(STRUCTURAL)
    return tasks


def check_room(
    sentences: Iterable[Sequence[Sentence]], numbers: int, device: torch.device
) -> None:
    """Raise if the states of all words, with the copy made when they are joined, may not fit in memory.

    Args:
        sentences: the sentences of each split that is kept.
        numbers: how many numbers are kept for each word: the sum over models of width times layers.
        device: device where they are kept.

    Raises:
        ValueError: they take more than half of what is free.
    """
    rows = 0
    for split in sentences:
        rows += sum(len(sentence.words) for sentence in split)
    size = 2 * 4 * rows * numbers
    half = free_memory(device) / 2
    if size > half:
        raise UserError(
            f"Expected the states of {rows:,} words to fit in half of the free memory, {in_words(half)}, but they "
            f"take {in_words(size)}. Take fewer layers or sites, or fewer texts."
        )


def make_task(
    name: str,
    words: Words,
    watched: Words,
    variants: Sequence[Variant],
    sizes: dict[str, int],
    seed: int,
) -> EdgeTask | TreeTask:
    """Make the task of this name; see `Task`."""
    kind = TreeTask if name in STRUCTURAL else EdgeTask
    return kind(name, words, watched, variants, seed, sizes)
