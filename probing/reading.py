"""What every experiment with probes needs of its texts: annotations of all words, whose states fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from datamodules.module import TextModule
from datamodules.text.annotated.sentence import ANNOTATION, Sentence
from datamodules.tokens.splits import Split
from probing.edges.targets import Labels, tasks_of
from probing.trees.asked import LEAST
from probing.trees.task import STRUCTURAL
from storage.room import free_memory, in_words

__all__ = ["check_annotated", "check_room", "check_tasks", "sentences_of"]


SAID: dict[Split, str] = {"fit": "fitting", "validation": "validation", "test": "held-out"}


def check_annotated(data: TextModule, processes: int) -> None:
    """Raise unless the texts are annotated sentences, read by one process.

    Raises:
        ValueError: saying which is not so.
    """
    if processes > 1:
        raise ValueError(f"Probes are trained by one process, but `trainer.devices` makes {processes}. Set it to 1.")
    if ANNOTATION not in data.texts.fit.column_names:
        raise ValueError(
            f"Expected annotated sentences, but `data.text.source` {data.text.source!r} has none. Name a CoNLL-U file "
            "(.conllu), JSON lines with labelled spans (.jsonl), or grammar."
        )


def sentences_of(data: TextModule, split: Split) -> list[Sentence]:
    """The annotated sentences of a split, in the order of its text numbers."""
    texts = getattr(data.texts, split)
    return [Sentence.of(text, made) for text, made in zip(texts["text"], texts[ANNOTATION], strict=True)]


def check_tasks(tasks: Iterable[str], sentences: Mapping[Split, Sequence[Sentence]]) -> None:
    """Raise unless the sentences of every split say something of each task.

    Raises:
        ValueError: naming task and split; or as `Labels.of`.
    """
    for split, own in sentences.items():
        there = {*tasks_of(own), *(STRUCTURAL if any(len(each.heads) >= LEAST for each in own) else ())}
        for task in tasks:
            if split == "fit" and task not in STRUCTURAL:
                Labels.of(task, own)
            elif task not in there:
                raise ValueError(
                    f"Expected {SAID[split]} sentences to have what {task!r} of `tasks` asks for, but none of "
                    f"{len(own):,} has. Leave it out, or give more sentences."
                )


def check_room(sentences: Iterable[Sequence[Sentence]], numbers: int, device: torch.device) -> None:
    """Raise if the states of all words, and the copy that joining them takes, may not fit in memory.

    Args:
        sentences: of each split that is kept.
        numbers: that are kept of each word: widths of all models, times their layers.
        device: where they are kept.

    Raises:
        ValueError: they take more than half of what is free.
    """
    rows = sum(len(sentence.words) for own in sentences for sentence in own)
    size, free = 2 * 4 * rows * numbers, free_memory(device)
    if size > free / 2:
        raise ValueError(
            f"Expected the states of {rows:,} words to fit in half of the free memory, {in_words(free / 2)}, but they "
            f"take {in_words(size)}. Take fewer layers or sites, or fewer texts."
        )
