"""An annotated sentence, as every reader returns it, and the columns of annotated texts in a data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from aligners.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

ANNOTATION = "_annotation"  # column of a data set of sentences, beside `text`
# Columns of a data set of questions: the `text` of each answer, and `answer_start`, the place of its first character.
ANSWERS = "answers"
QUESTION = ["question", "context"]  # columns of its texts, as on the Hub's SQuAD
CHOICE = "answers_to"  # column of texts that answer a question: equal for all answers to it, which are adjacent


@dataclass(frozen=True)
class Target:
    """A labelled span of words, or a labelled pair of spans.

    Attributes:
        task: what the labels describe, such as `pos`.
        span1: (first word, word after the last), counted from 0.
        span2: the second span, likewise; empty where the task is about one span.
        labels: one label, or any number for a task of several labels.
    """

    task: str
    span1: tuple[int, int]
    span2: tuple[int, int] | tuple[()] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sentence:
    """A sentence as words, with their annotations.

    Attributes:
        words: words without white space inside.
        heads: for each word the number of its head, counted from 1; 0 for the root. Empty where there is no tree.
        targets: labelled spans.
        label: label of the whole sentence; empty where it has none.
    """

    words: tuple[str, ...]
    heads: tuple[int, ...] = ()
    targets: tuple[Target, ...] = field(default=())
    label: str = ""

    @property
    def text(self) -> str:
        """The words, separated by blanks."""
        return " ".join(self.words)

    def annotation(self) -> str:
        """Heads and targets, as JSON."""
        return json.dumps(
            [self.heads, [(t.task, t.span1, t.span2, t.labels) for t in self.targets]]
        )

    @classmethod
    def of(cls, text: str, annotation: str) -> Self:
        """Make a sentence from its `text` and `annotation`."""
        heads, targets = json.loads(annotation)
        parsed = (
            Target(task, tuple(span1), tuple(span2), tuple(labels))
            for task, span1, span2, labels in targets
        )
        return cls(tuple(text.split()), tuple(heads), tuple(parsed))

    def labels(self, task: str) -> dict[int, str]:
        """Map the first word of each span with a label of this task to the label."""
        return {
            target.span1[0]: target.labels[0]
            for target in self.targets
            if target.task == task
        }


def sentences_in(texts: Mapping[str, Any] | Dataset) -> list[Sentence]:
    """Return the sentences of a data set, or of a batch of its rows."""
    return [
        Sentence.of(*row) for row in zip(texts["text"], texts[ANNOTATION], strict=True)
    ]


def check_tree(heads: Sequence[int]) -> None:
    """Raise unless the heads make a tree with one root.

    Args:
        heads: see `Sentence`.

    Raises:
        ValueError: a head is out of range, there is not one root, or there is a cycle.
    """
    beyond = [head for head in heads if not 0 <= head <= len(heads)]
    if beyond:
        raise UserError(
            f"Expected heads between 0 and {len(heads)}, the number of words, but got {beyond[0]}."
        )
    roots = [word for word, head in enumerate(heads, start=1) if head == 0]
    if len(roots) != 1:
        raise UserError(
            f"Expected one root, a word with the head 0, but got {len(roots)}."
        )
    reached = {0}
    for word in range(1, len(heads) + 1):
        path: list[int] = []
        while word not in reached:
            if word in path:
                raise UserError(
                    f"Expected a tree, but the words {sorted(path[path.index(word) :])} are in a cycle."
                )
            path.append(word)
            word = heads[word - 1]
        reached.update(path)


def as_dataset(sentences: Iterable[Sentence]) -> Dataset:
    """Make a data set with the columns text, annotation (JSON: nested columns are slow to read), and label if any."""
    from datasets import Dataset

    rows = [
        (sentence.text, sentence.annotation(), sentence.label) for sentence in sentences
    ]
    texts, annotations, labels = zip(*rows, strict=True) if rows else ((), (), ())
    columns = {"text": list(texts), ANNOTATION: list(annotations)}
    return Dataset.from_dict(columns | ({"label": list(labels)} if any(labels) else {}))
