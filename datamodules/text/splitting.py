"""Divides texts into fit, validation and test by a hash of each text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from aligners.datamodules.text.annotated.sentence import (
    ANNOTATION,
    ANSWERS,
    CHOICE,
    QUESTION,
)
from aligners.datamodules.text.labels import LabelColumn, read_labels
from aligners.datamodules.text.sources import TextSource, known_source
from aligners.datamodules.text.texts import Texts, plain_text
from aligners.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from pandas import DataFrame

HASHED = 1000  # rows at a time


def text_key(parts: Sequence[str | None], seed: int) -> int:
    """Hash a text to [0, 2^128), regardless of case and white space."""
    secret = seed.to_bytes(8, "little", signed=True)
    digest = blake2b(plain_text(parts), key=secret, digest_size=16).digest()
    return int.from_bytes(digest, "big")


def split_shares(source: TextSource, *, draw_test: bool) -> dict[str, float]:
    """Return the share of the texts for each split, without `test` where there is an official one."""
    validation = source.validation_share
    if not draw_test:
        return {"fit": 1 - validation, "validation": validation}
    fit = 1 - validation - source.test_share
    return {"fit": fit, "validation": validation, "test": source.test_share}


def split_of(key: int, shares: dict[str, float]) -> str:
    """Return the split of a text with this key."""
    place = key / 2**128
    test = shares.get("test", 0.0)
    if place < test:
        return "test"
    if place < test + shares["validation"]:
        return "validation"
    return "fit"


@dataclass
class RawTexts:
    """The rows of a source, not yet divided.

    Attributes:
        tables: the rows to divide and, where there is an official held-out split, its rows.
        columns: columns of the text: one, or two for sentence pairs.
        label: the column of the labels; None: there is none.
        origin: what a report says of the source.
        cautions: cautions about what was read.
        added: number of the held-out rows, at their end, that come from `TextSource.fill_from`.
    """

    tables: list[Dataset]
    columns: list[str]
    label: str | None
    origin: dict[str, Any]
    cautions: list[str]
    added: int = 0


def divide(source: TextSource, raw: RawTexts) -> Texts:
    """Divide the rows of a source.

    Args:
        source: options of the source.
        raw: rows of the source.

    Raises:
        ValueError: a row has no text, labels are neither names nor numbers, or a split would be empty.
    """
    cautions = list(raw.cautions)
    labels = read_labels(raw.tables, raw.label, source.source, cautions.append)
    tables = _tables(source, raw)
    members = _members(tables, source)

    origin = {**raw.origin, **_counts(tables, members)}
    splits = {}
    for name, candidates in members.items():
        of = tables[-1] if name == "test" else tables[0]
        rows = of.draw(name, candidates)
        drawn = of.table.select(rows.index)
        splits[name] = _texts(drawn, raw.columns, labels)
        n_added = int(rows["added"].sum())
        if n_added:
            origin["filled"] = {"from": source.fill_from, "texts": n_added}
    origin["hashes"] = {name: _hash(split) for name, split in splits.items()}
    if cautions:
        origin["cautions"] = cautions
    return Texts(**splits, label_names=_class_names(labels, source), origin=origin)


def _tables(source: TextSource, raw: RawTexts) -> list[_Table]:
    """The rows to divide and, where there is an official held-out split, its rows."""
    tables = [_Table(raw.tables[0], raw.columns, source)]
    for held in raw.tables[1:]:
        tables.append(_Table(held, raw.columns, source, raw.added))
        tables[0].held_keys = set(tables[1].chosen["key"])
    return tables


class _Table:
    """A table, and which of its rows are used.

    Attributes:
        table: the rows.
        every: for each row its `question`, equal for all answers to one; the `key` of its text, or of its question with
            all answers; and whether it was `added` from `TextSource.fill_from`.
        chosen: the rows that match `TextSource.where`.
        used: the chosen rows that are no copies, or all of them if copies are kept.
        held_keys: keys of the texts that are held out officially.
    """

    def __init__(
        self, table: Dataset, columns: list[str], source: TextSource, added: int = 0
    ) -> None:
        from pandas import DataFrame

        self.table = table
        self.source = source
        questions: Sequence[Any] = range(len(table))
        if CHOICE in table.column_names:
            questions = table[CHOICE][:]
        every = DataFrame({"question": questions})
        every["key"] = every["question"].map(_keys(table, columns, questions, source))
        every["added"] = every.index >= len(table) - added
        self.every = every
        self.chosen = every[_rows_where(table, source)]
        self.used = self.chosen
        if source.deduplicate:
            self.used = _without_copies(self.chosen)
        self.held_keys: set[int] = set()

    def draw(self, name: str, rows: DataFrame) -> DataFrame:
        """Keep as many rows as a split may have, drawn by their keys; rows of `TextSource.fill_from` come last.

        A question is left out if one of its answers would be missing.

        Raises:
            ValueError: no row is left, although the split should have some.
        """
        source = self.source
        most = source.most(name)
        if most is not None:
            ordered = rows.sort_values(["added", "key"], kind="stable")
            cut = ordered["question"].iloc[most:]
            rows = rows[~rows["question"].isin(cut)]
        unwanted = name == "validation" and source.validation_share == 0
        if len(rows) or unwanted:
            return rows

        n_rows, different = len(self.every), set(self.every["key"])
        taken = different & self.held_keys
        raise UserError(
            f"The split {name!r} of `source` {source.source!r} has no texts: {len(different) - len(taken)} in all are "
            f"too few for `validation_share` {source.validation_share} and `test_share` {source.test_share}. Of "
            f"{n_rows} rows, {n_rows - len(different)} are copies, up to case and white space, and {len(taken)} are "
            "also held-out texts."
        )


def _keys(
    table: Dataset, columns: list[str], questions: Sequence[Any], source: TextSource
) -> dict[Any, int]:
    """Return the key of each text, or of each question with all its answers.

    Raises:
        ValueError: a row has no text.
    """
    wholes: dict[Any, list[str]] = {}
    empty = []
    values = [table[name][:] for name in columns]
    for row, (question, *parts) in enumerate(zip(questions, *values, strict=True)):
        parts = [part or "" for part in parts]
        if not "".join(parts).strip():
            empty.append(row)
        wholes.setdefault(question, []).extend(parts)
    if empty:
        raise UserError(
            f"{len(empty)} of {len(table)} rows of `source` {source.source!r} have an empty text in "
            f"{', '.join(columns)}, first row {empty[0]} (counting from 0). Remove them from the data."
        )
    return {
        question: text_key(parts, source.seed) for question, parts in wholes.items()
    }


def _rows_where(table: Dataset, source: TextSource) -> np.ndarray:
    """Return which rows match `TextSource.where`, (n,) bool."""
    where = source.where or {}
    missing = [name for name in where if name not in table.column_names]
    if missing:
        raise UserError(
            f"Expected the columns of `where` out of {', '.join(table.column_names)} in `source` {source.source!r}, "
            f"but got {', '.join(missing)}."
        )
    chosen = np.ones(len(table), dtype=bool)
    for name, wanted in where.items():
        # Classes on the Hub are stored as numbers.
        as_written = getattr(table.features[name], "int2str", str)
        written = list(map(as_written, table[name][:]))
        chosen &= np.isin(written, wanted)
    return chosen


def _without_copies(rows: DataFrame) -> DataFrame:
    """Return the row of the first text, or the rows of the first question, for each key."""
    first = rows.drop_duplicates("key")
    return rows[rows["question"].isin(first["question"])]


def _members(tables: list[_Table], source: TextSource) -> dict[str, DataFrame]:
    """Return the rows of each split, from which some may be drawn."""
    first, *official = tables
    free = first.used
    if source.deduplicate:
        free = free[~free["key"].isin(first.held_keys)]
    shares = split_shares(source, draw_test=not official)
    splits = np.array([split_of(key, shares) for key in free["key"]])
    members = {name: free[splits == name] for name in shares}
    for held in official:
        members["test"] = held.used
    return members


def _counts(tables: list[_Table], members: dict[str, DataFrame]) -> dict[str, Any]:
    """Count the rows that were read, and those that are copies or also held out."""
    first, *official = tables
    read, copies, used = [], [], 0
    for table in tables:
        n_rows = len(table.every)
        read.append(n_rows)
        copies.append(n_rows - len(_without_copies(table.every)))
        used += len(table.used)
    free = sum(map(len, members.values()))
    for held in official:
        free -= len(held.used)
    return {
        "deduplicate": first.source.deduplicate,
        "rows_read": read,
        "copies": copies,
        "duplicates_dropped": sum(read) - used,
        "also_held_out": len(first.held_keys & set(first.every["key"])),
        "dropped_as_held_out": len(first.used) - free,
    }


def _class_names(labels: LabelColumn | None, source: TextSource) -> list[str] | None:
    """Return the names of the classes, from their column or from what is known of the source."""
    if labels is not None and labels.names is not None:
        return labels.names
    usual = known_source(source).label_names
    return None if usual is None else list(usual)


def _renamed(
    table: Dataset, columns: list[str], removed: list[str], features: Features
) -> Dataset:
    """Give a table these features, its text out of `columns`, without the columns to be removed."""
    from datasets import Dataset

    if not len(table):  # `map` would make no columns
        return Dataset.from_dict({name: [] for name in features}, features)
    return table.map(
        _rename,
        batched=True,
        with_indices=True,
        remove_columns=removed,
        features=features,
        fn_kwargs={"columns": columns},
        desc="Reading texts",
    )


def _texts(table: Dataset, columns: list[str], labels: LabelColumn | None) -> Dataset:
    """Make a table with the columns of `Texts`."""
    from datasets import Features, Value

    extra = {ANNOTATION, CHOICE}
    if columns == QUESTION:
        extra.add(ANSWERS)
    features = {"text": Value("string"), "id": Value("int64")}
    if len(columns) == 2:
        features["text_pair"] = Value("string")
    removed = []
    for name, feature in table.features.items():
        if name in extra:
            features[name] = feature
        else:
            removed.append(name)

    renamed = _renamed(table, columns, removed, Features(features))
    if labels is None:
        return renamed
    numbers = labels.labels(table[labels.column][:])
    return renamed.add_column("label", numbers, feature=Value(labels.dtype))


def _rename(
    batch: dict[str, list[Any]], rows: list[int], columns: list[str]
) -> dict[str, list[Any]]:
    renamed: dict[str, list[Any]] = {}
    for name, column in zip(("text", "text_pair"), columns, strict=False):
        renamed[name] = [text or "" for text in batch[column]]
    renamed["id"] = rows
    return renamed


def _hash(split: Dataset) -> str:
    """Hash the texts and labels of a split in their order."""
    digest = blake2b(digest_size=8)
    for first in range(0, len(split), HASHED):
        rows = split[first : first + HASHED]
        digest.update(json.dumps(rows, sort_keys=True).encode())
    return digest.hexdigest()
