"""What every experiment with probes needs of its texts: annotations of all words, whose states fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from datamodules.module import TextModule
from datamodules.text.annotated.sentence import ANNOTATION, Sentence
from datamodules.tokens.splits import Split
from probing.edges.targets import tasks_of
from probing.trees.task import STRUCTURAL
from storage.room import free_memory, in_words

__all__ = ["check_annotated", "check_room", "sentences_of"]


def check_annotated(data: TextModule, tasks: Sequence[str], processes: int = 1) -> None:
    """Raise unless the texts are annotated sentences, held-out ones for the same tasks, read by one process.

    No model is needed for that.

    Args:
        data: the data module.
        tasks: that are probed.
        processes: of the run.

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
    fitting, held = (_asked(sentences_of(data, split)) for split in ("fit", "test"))
    unscored = [task for task in tasks if task in fitting and task not in held]
    if unscored:
        raise ValueError(
            f"Expected held-out sentences with targets of every task, but they have none of {', '.join(unscored)}; "
            f"they have: {', '.join(held) or 'none'}. Name a `text.held_out` with the same `tasks`; in JSON lines, the "
            "entry `task` of a line names its task."
        )


def _asked(sentences: Sequence[Sentence]) -> list[str]:
    """The tasks that can be asked of sentences."""
    return [*tasks_of(sentences), *(STRUCTURAL if any(sentence.heads for sentence in sentences) else ())]


def sentences_of(data: TextModule, split: Split) -> list[Sentence]:
    """The annotated sentences of a split, in the order of its text numbers."""
    texts = getattr(data.texts, split)
    return [Sentence.of(text, made) for text, made in zip(texts["text"], texts[ANNOTATION], strict=True)]


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
