"""Files of annotated texts: treebanks in CoNLL-U, labelled spans in JSON lines, and questions in SQuAD's format.

Spans are as in jiant's edge probing; the answers to a question are spans of a passage.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligners.datamodules.text.annotated.grammar import sentences
from aligners.datamodules.text.annotated.sentence import (
    ANSWERS,
    QUESTION,
    Sentence,
    Target,
    as_dataset,
    check_tree,
)
from aligners.errors import UserError, check_extra

if TYPE_CHECKING:
    from datasets import Dataset


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read a file line by line; yield each line's number, counted from 1, and the line without its ending.

    Raises:
        ValueError: a line is not UTF-8; the message names the file and the line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"Expected text in UTF-8, but {path}:{number} is not: {error.reason}, 0x{line[error.start]:02x}. "
                    "Save the file as UTF-8."
                ) from error
            yield number, text.rstrip("\r\n")


FIELDS = 10


def read_conllu(path: Path, counts: Counter[str]) -> Iterator[Sentence]:
    """Read a treebank, one sentence at a time.

    A sentence has the tasks `pos` (universal parts of speech), `morphology` (features such as Number=Sing, any number
    of them for a word) and `dependencies` (the relation of a word, span1, to its head, span2; a root has an arc to
    itself, as in jiant's conversion). Blanks inside words become underscores. Multiword tokens and empty
    nodes are left out: their parts are words.

    Args:
        path: the file.
        counts: filled with what was read and left out.

    Raises:
        ValueError: conllu is missing; a line is malformed or not UTF-8, a word has no form, or heads make no tree; the
            message names the file and the line.
    """
    check_extra("trees", "conllu", f"A treebank ({path})")
    for blank, block in groupby(
        numbered_lines(path), key=lambda line: not line[1].strip()
    ):
        if not blank:
            yield from _read_sentence(path, list(block), counts)


def _counted(
    tokens: list[dict[str, Any]], words: list[dict[str, Any]], *, known: bool
) -> dict[str, int]:
    """Count what was read of a sentence, and what was left out of it; `known` tells whether it has a tree."""
    parts = [token["id"][1] for token in tokens if not isinstance(token["id"], int)]
    blanks = sum(len(word["form"].split()) > 1 for word in words)
    return {
        "sentences": 1,
        "words": len(words),
        "sentences without a tree": int(not known),
        "multiword tokens left out": parts.count("-"),
        "empty nodes left out": parts.count("."),
        "words with blanks inside": blanks,
    }


def _check_heads(heads: tuple[Any, ...], place: str) -> None:
    """Raise unless the heads of the sentence at a place make a tree."""
    try:
        check_tree(heads)
    except ValueError as error:
        raise UserError(f"{error} That is the sentence at {place}.") from error


def _read_sentence(
    path: Path, block: list[tuple[int, str]], counts: Counter[str]
) -> Iterator[Sentence]:
    block = [(number, line) for number, line in block if not line.startswith("#")]
    tokens = _tokens(path, block)
    words = [token for token in tokens if isinstance(token["id"], int)]
    if not words:
        return
    place = f"{path}:{block[0][0]}"
    if [word["id"] for word in words] != list(range(1, len(words) + 1)):
        raise UserError(
            f"Expected the words of a sentence to be numbered 1, 2, ..., but those at {place} are not."
        )
    heads = tuple(word["head"] for word in words)
    known = None not in heads
    if known:
        _check_heads(heads, place)
    counts.update(_counted(tokens, words, known=known))
    forms = tuple("_".join(word["form"].split()) for word in words)
    yield Sentence(forms, heads if known else (), tuple(_targets(words)))


def _tokens(path: Path, block: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return the fields of each line of a sentence."""
    from conllu import parse
    from conllu.exceptions import ParseException

    for number, line in block:
        fields = line.split("\t")
        if len(fields) != FIELDS:
            raise UserError(
                f"Expected {FIELDS} fields with tabs between them, but got {len(fields)}: {path}:{number}."
            )
        if not fields[1].strip():
            raise UserError(
                f"Expected a word in the second field, FORM, but it is empty: {path}:{number}."
            )
    try:
        return [
            dict(token)
            for sentence in parse("\n".join(line for _, line in block))
            for token in sentence
        ]
    except ParseException as error:
        for number, line in block:  # the library does not say which line it is
            try:
                parse(line)
            except ParseException:
                raise UserError(
                    f"Expected a line of CoNLL-U, but {path}:{number} cannot be read: {error}"
                ) from error
        raise


def _targets(words: list[dict[str, Any]]) -> Iterator[Target]:
    for place, word in enumerate(words):
        span = (place, place + 1)
        if word["upos"] not in (None, "_"):
            yield Target("pos", span, labels=(word["upos"],))
        features = tuple(
            f"{name}={value}" for name, value in (word["feats"] or {}).items()
        )
        yield Target("morphology", span, labels=features)
        if word["head"] is not None and word["deprel"] not in (None, "_"):
            head = word["head"] - 1 if word["head"] else place
            yield Target("dependencies", span, (head, head + 1), (word["deprel"],))


SPLIT = re.compile(
    r"(?:^|[-_.])(?:train|dev|valid|val|validation|test)(?:[-_]\d+(?:-of-\d+)?)?(?=[-_.]|$)"
)


def holds_spans(path: Path) -> bool:
    """Tell whether the first line of a file of JSON lines has labelled spans."""
    first = next((line for _, line in numbered_lines(path) if line.strip()), "")
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return (
        isinstance(row, dict) and isinstance(row.get("targets"), list) and "text" in row
    )


def task_name(path: Path) -> str:
    """Return the name of the task in a file; it is the same for the files of all splits.

    It is the file's name up to a dot, without train, dev, valid, val, validation or test and without the number of a
    part. If that leaves nothing, it is what follows the dot, or else the name of the folder.

    Examples:
        >>> [task_name(Path(f"tasks/spr/{name}.json")) for name in ("ner_en_train", "srl.test", "dev.edges", "train")]
        ['ner_en', 'srl', 'edges', 'spr']
    """
    parts = SPLIT.sub("", path.name.removesuffix(path.suffix)).split(".")
    names = (part.strip("-_") for part in parts)
    return (
        next(
            (part for part in names if re.search(r"[^\W\d]", part)),
            path.resolve().parent.name,
        )
        or path.stem
    )


def read_spans(
    path: Path, counts: Counter[str], like: Path | None = None
) -> Iterator[Sentence]:
    """Read sentences with labelled spans, one per line.

    A line is {"text": "The cat sat", "targets": [{"span1": [0, 2], "span2": [2, 3], "label": "nsubj"}]}. Spans are over
    the words between white space, the second number one after the last word. `span2` may be missing; `label` may be a
    list; `task`, beside `text`, names the task, which otherwise is the file's `task_name`. Other entries are ignored.
    (Tenney et al. 2019, "What do you learn from context?", arXiv 1905.06316)

    Args:
        path: the file.
        counts: filled with what was read.
        like: the file whose `task_name` is used; default: `path`.

    Raises:
        ValueError: a line is no JSON or not UTF-8, lacks an entry or words, or has a span outside of them; the message
            names the file and the line.
    """
    name = task_name(like or path)
    for number, line in numbered_lines(path):
        if line.strip():
            try:
                row = json.loads(line)
                words, task = tuple(row["text"].split()), row.get("task", name)
                if not (words and isinstance(task, str) and task):
                    raise UserError(
                        f"expected words in `text` and a named `task`, but got {row['text']!r}, {task!r}."
                    )
                targets = tuple(
                    _target(task, entry, len(words)) for entry in row["targets"]
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"there is no {error}." if isinstance(error, KeyError) else error
                raise UserError(
                    f"{path}:{number} cannot be read as a sentence with spans: {what}"
                ) from error
            counts["sentences"] += 1
            counts["words"] += len(words)
            counts["spans"] += len(targets)
            yield Sentence(words, targets=targets)


def _target(task: str, entry: dict[str, Any], words: int) -> Target:
    label, second = entry["label"], entry.get("span2")
    labels = tuple(label) if isinstance(label, list) else (label,)
    if not all(isinstance(name, str) for name in labels):
        raise UserError(
            f"expected `label` to be a string or a list of strings, but got {label!r}."
        )
    span1 = _span(entry["span1"], "span1", words)
    return Target(
        task, span1, () if second is None else _span(second, "span2", words), labels
    )


def _span(span: Any, name: str, words: int) -> tuple[int, int]:
    if not (
        isinstance(span, list)
        and len(span) == 2
        and all(type(end) is int for end in span)
    ):
        raise UserError(f"expected `{name}` to be two whole numbers, but got {span!r}.")
    first, end = span
    if not 0 <= first < end <= words:
        raise UserError(
            f"expected `{name}` to be within the {words} words, but got {span}."
        )
    return first, end


TREEBANK = ".conllu"
OF_THE_GRAMMAR = 6_000  # sentences
Reader = Callable[[Path, Counter[str]], Iterator[Sentence]]


def annotated_reader(path: Path, like: Path | None = None) -> Reader | None:
    """Return the reader for a file of annotated sentences; None for any other file.

    Args:
        path: the file.
        like: the file that names the task of labelled spans; default: each file names its own.
    """
    if path.suffix == TREEBANK:
        return read_conllu
    return (
        partial(read_spans, like=like)
        if path.suffix in (".json", ".jsonl") and holds_spans(path)
        else None
    )


def open_annotated(reader: Reader, paths: Sequence[Path]) -> Dataset:
    """Read files into one data set, whose description counts what was read and left out.

    Raises:
        ValueError: a file cannot be read, or there is no sentence.
    """
    counts: Counter[str] = Counter()
    dataset = as_dataset(
        sentence for path in paths for sentence in reader(path, counts)
    )
    if not len(dataset):
        raise UserError(
            f"Expected sentences in {', '.join(map(str, paths))}, but found none."
        )
    dataset.info.description = ", ".join(
        f"{count:,} {what}" for what, count in counts.items() if count
    )
    return dataset


def grammar() -> Dataset:
    """Return sentences of the project's own grammar, always the same ones."""
    dataset = as_dataset(sentences(OF_THE_GRAMMAR))
    dataset.info.description = f"{len(dataset):,} sentences of the grammar"
    return dataset


# ---------------------------------------------------------------------- questions and answers

BEGINNING = 4096  # characters within which a file names its first passages


def holds_answers(path: Path) -> bool:
    """Tell whether a file is in SQuAD's format."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return path.suffix == ".json" and '"paragraphs"' in file.read(BEGINNING)


def open_answers(paths: Sequence[Path]) -> Dataset:
    """Read files in SQuAD's format into one data set; questions without an answer are left out.

    Raises:
        ValueError: a file is no JSON, or lacks an entry; the message names the file.
    """
    from datasets import Dataset

    return Dataset.from_list(
        [question for path in paths for question in _questions(path)]
    )


def _questions(path: Path) -> list[dict[str, Any]]:
    try:
        articles = json.loads(path.read_text(encoding="utf-8-sig"))["data"]
        passages = [
            passage for article in articles for passage in article["paragraphs"]
        ]
        return [
            {name: holder[name] for name, holder in zip(QUESTION, (asked, passage), strict=True)}
            | {ANSWERS: {name: [answer[name] for answer in asked["answers"]] for name in ("text", "answer_start")}}
            for passage in passages for asked in passage["qas"] if asked["answers"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path} cannot be read as questions in SQuAD's format: {what}."
        ) from error
