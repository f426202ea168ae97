"""Labelled spans in JSON lines, in the form of jiant's edge probing."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datamodules.text.annotated.sentence import Sentence, Target
from datamodules.text.lines import numbered_lines

__all__ = ["holds_spans", "read_spans", "task_name"]

SPLIT = re.compile(r"(?:^|[-_.])(?:train|dev|valid|val|validation|test)(?:[-_]\d+(?:-of-\d+)?)?(?=[-_.]|$)")


def holds_spans(path: Path) -> bool:
    """Tell whether the first line of a file of JSON lines has labelled spans."""
    first = next((line for _, line in numbered_lines(path) if line.strip()), "")
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return isinstance(row, dict) and isinstance(row.get("targets"), list) and "text" in row


def task_name(path: Path) -> str:
    """The name of the task that a file is about: the same for the files of all splits.

    It is the file's name up to a dot, without train, dev, valid, val, validation or test and the number of a part, or
    what follows the dot where that leaves nothing, or else the name of the folder.

    Example:
        >>> [task_name(Path(f"tasks/spr/{name}.json")) for name in ("ner_en_train", "srl.test", "dev.edges", "train")]
        ['ner_en', 'srl', 'edges', 'spr']
    """
    parts = SPLIT.sub("", path.name.removesuffix(path.suffix)).split(".")
    found = (part.strip("-_") for part in parts)
    return next((part for part in found if re.search(r"[^\W\d]", part)), path.resolve().parent.name) or path.stem


def read_spans(path: Path, counts: Counter[str] | None = None, like: Path | None = None) -> Iterator[Sentence]:
    """Read sentences with labelled spans, one a line.

    A line is {"text": "The cat sat", "targets": [{"span1": [0, 2], "span2": [2, 3], "label": "nsubj"}]}. Spans are over
    the words between white space, the second number one after the last word. `span2` may be missing; `label` may be a
    list; `task`, beside `text`, names the task, which otherwise is the file's `task_name`. Other entries are left
    alone. (Tenney et al. 2019, "What do you learn from context?", arXiv 1905.06316)

    Args:
        path: the file.
        counts: filled with what was read.
        like: the file whose `task_name` is taken; default: `path`.

    Raises:
        ValueError: a line is no JSON or not UTF-8, lacks an entry or words, or a span is not within them; names file
            and line.
    """
    counts = Counter() if counts is None else counts
    name = task_name(like or path)
    for number, line in numbered_lines(path):
        if line.strip():
            try:
                row = json.loads(line)
                words, task = tuple(row["text"].split()), row.get("task", name)
                if not (words and isinstance(task, str) and task):
                    raise ValueError(f"expected words in `text` and a named `task`, but got {row['text']!r}, {task!r}.")
                targets = tuple(_target(task, entry, len(words)) for entry in row["targets"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}:{number} cannot be read as a sentence with spans: {_said(error)}") from error
            counts["sentences"] += 1
            counts["words"] += len(words)
            counts["spans"] += len(targets)
            yield Sentence(words, targets=targets)


def _target(task: str, entry: dict[str, Any], words: int) -> Target:
    label, second = entry["label"], entry.get("span2")
    labels = tuple(label) if isinstance(label, list) else (label,)
    if not all(isinstance(each, str) for each in labels):
        raise ValueError(f"expected `label` to be a string or a list of strings, but got {label!r}.")
    span1 = _span(entry["span1"], "span1", words)
    return Target(task, span1, () if second is None else _span(second, "span2", words), labels)


def _span(span: Any, name: str, words: int) -> tuple[int, int]:
    if not (isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)):
        raise ValueError(f"expected `{name}` to be two whole numbers, but got {span!r}.")
    first, end = span
    if not 0 <= first < end <= words:
        raise ValueError(f"expected `{name}` to be within the {words} words, but got {span}.")
    return first, end


def _said(error: Exception) -> str:
    return f"there is no {error}." if isinstance(error, KeyError) else str(error)
