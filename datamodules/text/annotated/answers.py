"""Questions about passages in SQuAD's format, whose answers are spans of the passage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligners.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

ANSWERS = (
    "answers"  # column of a data set: `text`, the answers to a question, and `answer_start`, their first characters
)
QUESTION = ["question", "context"]  # columns of its texts, as SQuAD has them on the Hub
CHOICE = "answers_to"  # column of texts that answer a question: equal for all answers to it, which stand together
BEGINNING = 4096  # characters within which a file names its first passages


def holds_answers(path: Path) -> bool:
    """Tell whether a file is in SQuAD's format."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return path.suffix == ".json" and '"paragraphs"' in file.read(BEGINNING)


def open_answers(paths: Sequence[Path]) -> Dataset:
    """Read files in SQuAD's format into one data set; questions without an answer are left out.

    Raises:
        ValueError: a file is no JSON, or lacks an entry; names it.
    """
    from datasets import Dataset

    return Dataset.from_list([question for path in paths for question in _questions(path)])


def _questions(path: Path) -> list[dict[str, Any]]:
    try:
        articles = json.loads(path.read_text(encoding="utf-8-sig"))["data"]
        passages = [passage for article in articles for passage in article["paragraphs"]]
        return [
            {name: holder[name] for name, holder in zip(QUESTION, (asked, passage), strict=True)}
            | {ANSWERS: {name: [answer[name] for answer in asked["answers"]] for name in ("text", "answer_start")}}
            for passage in passages for asked in passage["qas"] if asked["answers"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} cannot be read as questions in SQuAD's format: {what}.") from error
