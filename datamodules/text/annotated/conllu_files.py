"""Treebanks in CoNLL-U."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from datamodules.text.annotated.sentence import Sentence, Target, check_tree
from datamodules.text.lines import numbered_lines

__all__ = ["read_conllu"]

FIELDS = 10


def read_conllu(path: Path, counts: Counter[str] | None = None) -> Iterator[Sentence]:
    """Read a treebank, a sentence at a time.

    A sentence has the tasks `pos` (universal parts of speech), `morphology` (features such as Number=Sing, any number
    of a word) and `dependencies` (the relation of a word, span1, to its head, span2; a root has an arc to itself, as in
    jiant's conversion). Words with blanks inside get underscores for them. Multiword tokens and empty nodes are left
    out: their parts are words.

    Args:
        path: the file.
        counts: filled with what was read and left out.

    Raises:
        ValueError: a line is malformed or not UTF-8, a word has no form, or heads make no tree; names file and line.
    """
    counts = Counter() if counts is None else counts
    for blank, block in groupby(numbered_lines(path), key=lambda line: not line[1].strip()):
        if not blank:
            yield from _read_sentence(path, list(block), counts)


def _read_sentence(path: Path, block: list[tuple[int, str]], counts: Counter[str]) -> Iterator[Sentence]:
    block = [(number, line) for number, line in block if not line.startswith("#")]
    tokens = _tokens(path, block)
    words = [token for token in tokens if isinstance(token["id"], int)]
    if not words:
        return
    place = f"{path}:{block[0][0]}"
    if [word["id"] for word in words] != list(range(1, len(words) + 1)):
        raise ValueError(f"Expected the words of a sentence to be numbered 1, 2, ..., but those at {place} are not.")
    heads = tuple(word["head"] for word in words)
    known = None not in heads
    if known:
        try:
            check_tree(heads)
        except ValueError as error:
            raise ValueError(f"{error} That is the sentence at {place}.") from error
    parts = [token["id"][1] for token in tokens if not isinstance(token["id"], int)]
    counts.update({"sentences": 1, "words": len(words), "sentences without a tree": int(not known)})
    counts.update({"multiword tokens left out": parts.count("-"), "empty nodes left out": parts.count(".")})
    counts["words with blanks inside"] += sum(len(word["form"].split()) > 1 for word in words)
    forms = tuple("_".join(word["form"].split()) for word in words)
    yield Sentence(forms, heads if known else (), tuple(_targets(words)))


def _tokens(path: Path, block: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """The fields of each line of a sentence."""
    from conllu import parse
    from conllu.exceptions import ParseException

    for number, line in block:
        fields = line.split("\t")
        if len(fields) != FIELDS:
            raise ValueError(
                f"Expected {FIELDS} fields with tabs between them, but got {len(fields)}: {path}:{number}."
            )
        if not fields[1].strip():
            raise ValueError(f"Expected a word in the second field, FORM, but it is empty: {path}:{number}.")
    try:
        return [dict(token) for sentence in parse("\n".join(line for _, line in block)) for token in sentence]
    except ParseException as error:
        for number, line in block:  # the library does not say in which line
            try:
                parse(line)
            except ParseException:
                raise ValueError(f"Expected a line of CoNLL-U, but {path}:{number} cannot be read: {error}") from error
        raise


def _targets(words: list[dict[str, Any]]) -> Iterator[Target]:
    for place, word in enumerate(words):
        span = (place, place + 1)
        if word["upos"] not in (None, "_"):
            yield Target("pos", span, labels=(word["upos"],))
        yield Target(
            "morphology", span, labels=tuple(f"{name}={value}" for name, value in (word["feats"] or {}).items())
        )
        if word["head"] is not None and word["deprel"] not in (None, "_"):
            head = word["head"] - 1 if word["head"] else place
            yield Target("dependencies", span, (head, head + 1), (word["deprel"],))
