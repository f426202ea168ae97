"""Which files hold annotated sentences, and how they are opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.text.annotated.conllu_files import read_conllu
from datamodules.text.annotated.grammar import sentences
from datamodules.text.annotated.sentence import Sentence, as_dataset
from datamodules.text.annotated.span_files import holds_spans, read_spans

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["TREEBANK", "annotated_reader", "grammar", "open_annotated"]

TREEBANK = ".conllu"
OF_THE_GRAMMAR = 6_000  # sentences
Reader = Callable[[Path, Counter[str]], Iterator[Sentence]]


def annotated_reader(path: Path, like: Path | None = None) -> Reader | None:
    """Return what reads a file of annotated sentences; None for any other file.

    Args:
        path: the file.
        like: the file that names the task of labelled spans; default: each file its own.
    """
    if path.suffix == TREEBANK:
        return read_conllu
    return partial(read_spans, like=like) if path.suffix in (".json", ".jsonl") and holds_spans(path) else None


def open_annotated(reader: Reader, paths: Sequence[Path]) -> Dataset:
    """Read files into one data set, whose description counts what was read and left out.

    Raises:
        ValueError: a file cannot be read, or there is no sentence.
    """
    counts: Counter[str] = Counter()
    found = as_dataset(sentence for path in paths for sentence in reader(path, counts))
    if not len(found):
        raise ValueError(f"Expected sentences in {', '.join(map(str, paths))}, but there is none.")
    found.info.description = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return found


def grammar() -> Dataset:
    """Sentences of the project's own grammar, always the same."""
    found = as_dataset(sentences(OF_THE_GRAMMAR))
    found.info.description = f"{len(found):,} sentences of the grammar"
    return found
