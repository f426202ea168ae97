"""Labelled spans in JSON lines, in the form of jiant's edge probing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datamodules.text.annotated.sentence import Sentence, Target

__all__ = ["holds_spans", "read_spans"]


def holds_spans(path: Path) -> bool:
    """Tell whether the first line of a file of JSON lines has labelled spans."""
    with path.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return isinstance(row, dict) and isinstance(row.get("targets"), list) and "text" in row


def read_spans(path: Path, counts: Counter[str] | None = None) -> Iterator[Sentence]:
    """Read sentences with labelled spans, one a line; the task has the name of the file, up to its first dot.

    A line is {"text": "The cat sat", "targets": [{"span1": [0, 2], "span2": [2, 3], "label": "nsubj"}]}. Spans are over
    the words between white space, the second number one after the last word. `span2` may be missing; `label` may be a
    list. Other entries are left alone. (Tenney et al. 2019, "What do you learn from context?", arXiv 1905.06316)

    Args:
        path: the file.
        counts: filled with what was read.

    Raises:
        ValueError: a line is no JSON, lacks an entry, or a span is out of range; names file and line.
    """
    counts = Counter() if counts is None else counts
    task = path.name.split(".")[0]
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                    words = tuple(row["text"].split())
                    targets = tuple(_target(task, entry, len(words)) for entry in row["targets"])
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(
                        f"{path}:{number} cannot be read as a sentence with spans: {_said(error)}"
                    ) from error
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


def _span(span: list[int], name: str, words: int) -> tuple[int, int]:
    first, end = span
    if not 0 <= first < end <= words:
        raise ValueError(f"expected `{name}` to be within the {words} words, but got {span}.")
    return first, end


def _said(error: Exception) -> str:
    return f"there is no {error}." if isinstance(error, KeyError) else str(error)
