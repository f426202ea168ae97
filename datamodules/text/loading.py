"""Reads labelled or plain text, streamed or whole, and divides it into fit, validation and test by text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

from aligners.datamodules.text.annotated.sentence import (
    ANNOTATION,
    ANSWERS,
    CHOICE,
    QUESTION,
)
from aligners.datamodules.text.conversations import (
    Tokenizers,
    holds_conversations,
    rendered,
    template_of,
)
from aligners.datamodules.text.drawn_texts import drawn_once
from aligners.datamodules.text.labels import LabelColumn, is_mixed, read_labels
from aligners.datamodules.text.sources import (
    TextSource,
    fitting_split,
    held_out_split,
    known_source,
)
from aligners.datamodules.text.texts import Texts, plain_text
from aligners.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


def text_key(parts: Sequence[str | None], seed: int) -> int:
    """Hash a text to [0, 2^128), regardless of case and white space."""
    secret = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(
        blake2b(plain_text(parts), key=secret, digest_size=16).digest(), "big"
    )


def split_shares(source: TextSource, *, draw_test: bool) -> dict[str, float]:
    """The share of the texts for each split, without `test` where there is an official one."""
    test = {"test": source.test_share} if draw_test else {}
    fit = 1 - source.validation_share - sum(test.values())
    return {"fit": fit, "validation": source.validation_share, **test}


def split_of(key: int, shares: dict[str, float]) -> str:
    """The split of a text with this key."""
    place, test = key / 2**128, shares.get("test", 0.0)
    return (
        "test"
        if place < test
        else "validation"
        if place < test + shares["validation"]
        else "fit"
    )


PEEKED = 100  # rows that show which columns a stream has and what they hold


def _streamed(stream: IterableDataset, source: TextSource) -> Iterator[dict[str, Any]]:
    try:
        yield from stream
    except (
        ValueError,
        OSError,
    ) as error:  # what the readers of datasets raise for a damaged file
        raise UserError(
            f"`source` {source.source!r} cannot be read to where `max_texts` asks: {error}"
        ) from error


def _table(rows: list[dict[str, Any]], stream: IterableDataset) -> Dataset:
    from datasets import Dataset, Features

    if not rows:
        return Dataset.from_dict({})
    known = (
        stream.features
    )  # of Parquet and of most data sets on the Hub; not of CSV and JSON
    return Dataset.from_list(
        rows,
        None if known is None else Features({name: known[name] for name in rows[0]}),
    )


def load_texts(source: TextSource, tokenizers: Tokenizers | None = None) -> Texts:
    """Read the texts and divide them.

    Conversations are rendered by the chat template of `TextSource.chat_template`, or else that of `tokenizers`, which
    returns those of the models by their names.

    A text's split follows from a keyed hash of the text itself (case folded, white space collapsed), so it
    depends on neither the order nor the number of the other texts, and copies of a text end up in one split,
    where the first is kept. Texts of an official held-out split are removed from the others; both unless
    `TextSource.deduplicate` is false.

    A stream is read only as far as it must: see `TextSource.streaming`.

    Raises:
        ValueError: the source cannot be found or reached; a column is missing, empty or not of text; labels are neither
            names nor numbers; a split would be empty. A text without a label is no error: see `labels`.
    """
    tables, columns, label, origin = _read(source, tokenizers)
    return drawn_once(
        source, tables, lambda: _divide(source, tables, columns, label, origin)
    )


def _divide(
    source: TextSource,
    tables: list[Dataset],
    columns: list[str],
    label: str | None,
    origin: dict[str, Any],
) -> Texts:
    """Divide what `_read` has read."""
    for table in tables:
        _check_columns(table, columns, label, source)
    said = list(origin.get("cautions", ()))
    labels, official = (
        read_labels(tables, label, source.source, said.append),
        len(tables) == 2,
    )
    if said:
        origin["cautions"] = said
    keys = [_keys(table, columns, source.seed) for table in tables]
    shares = split_shares(source, draw_test=not official)
    kept = [_rows_where(table, source) for table in tables]
    asked = [_questions(table) for table in tables]
    firsts = [_first_of_each(*of) for of in zip(kept, keys, asked, strict=True)]
    once = firsts if source.deduplicate else kept
    held = {keys[1][row] for row in kept[1]} if official else set()
    free = [
        row for row in once[0] if keys[0][row] not in held or not source.deduplicate
    ]
    members = {
        name: [row for row in free if split_of(keys[0][row], shares) == name]
        for name in shares
    }
    if official:
        members["test"] = once[1]
    chosen, first = {}, origin.pop("filled", None)
    for name, rows in members.items():
        place = int(official and name == "test")
        further = first if place and first is not None else len(keys[place])
        rows = _some(
            name,
            rows,
            keys[place],
            asked[place],
            source,
            held if not place else set(),
            further,
        )
        if further < len(keys[place]):
            origin["filled"] = {
                "from": source.fill_from,
                "texts": sum(row >= further for row in rows),
            }
        chosen[name] = _normalised(tables[place].select(rows), columns, labels)
    origin |= {
        **(
            {"annotated": [table.info.description for table in tables]}
            if ANNOTATION in tables[0].column_names
            else {}
        ),
        "deduplicate": source.deduplicate,
        "rows_read": list(map(len, keys)),
        "copies": [
            len(of) - len(_first_of_each(range(len(of)), of, by))
            for of, by in zip(keys, asked, strict=True)
        ],
        "duplicates_dropped": sum(map(len, keys)) - sum(map(len, once)),
        "also_held_out": len(set(keys[0]) & held),
        "dropped_as_held_out": len(once[0]) - len(free),
        "hashes": {name: _hash(split) for name, split in chosen.items()},
    }
    names, usual = (
        labels.names if labels is not None else None,
        known_source(source).label_names,
    )
    return Texts(
        **chosen,
        label_names=list(usual) if names is None and usual else names,
        origin=origin,
    )


def _read(
    source: TextSource, tokenizers: Tokenizers | None = None
) -> tuple[list[Dataset], list[str], str | None, dict[str, Any]]:
    """Open the source, find its columns, and read as much of a stream as is needed.

    Returns:
        The rows that are divided and, where there is an official held-out split, its rows; the columns of the text, one
        or two, and of the labels, if there are any; and what a report says of all this.
    """
    from datasets import concatenate_datasets

    known = known_source(source)
    cautions: list[str] = []
    splits, held_out = known.open(source, cautions.append), source.official
    tables = [fitting_split(splits, source)]
    if held_out is not None:
        tables.append(held_out_split(splits, held_out, source, cautions.append))
    filled: dict[str, Any] = {}
    if (
        source.fill_from is not None
        and held_out is not None
        and len(tables[1]) < (source.most("test") or 0)
    ):
        filled = {"filled": len(tables[1])}
        further = held_out_split(splits, source.fill_from, source, cautions.append)
        tables[1] = concatenate_datasets([tables[1], further])
    begun = tables
    if source.streaming:
        begun = [
            _table(list(islice(_streamed(stream, source), PEEKED)), stream)
            for stream in tables
        ]
    for beginning, name in zip(begun, (source.source, held_out), strict=False):
        if len(beginning) == 0:
            raise UserError(
                f"Expected texts in {name!r} (`source` or `held_out`), but it has none."
            )
    usual = known.label_column or (
        "label" if "label" in begun[0].column_names else None
    )
    label = usual if source.label_column is None else source.label_column
    columns = _text_columns(begun[0], label, source)
    talks = [name for name in columns if holds_conversations(begun[0], name)]
    if talks:
        filled["chat_template"], renderer = template_of(
            source.chat_template, tokenizers
        )
        begun, tables = (
            [rendered(table, talks, renderer) for table in some]
            for some in (begun, tables)
        )
    drawn = held_out is None
    others = [
        name
        for name in begun[0].column_names
        if name not in (*columns, ANNOTATION, CHOICE, ANSWERS)
    ]
    origin: dict[str, Any] = {
        **{name: getattr(source, name) for name in ("source", "subset", "revision")},
        "text_columns": columns,
        "label_column": label,
        "split": "by a keyed hash of the text"
        if drawn
        else f"test: {held_out}; rest by hash",
        **({"where": source.where} if source.where else {}),
        **{name: getattr(source, name) for name in ("seed", "validation_share")},
        **({"test_share": source.test_share} if drawn else {}),
        **filled,
        **({"other_columns": others} if label is None and others else {}),
        **({"cautions": cautions} if cautions else {}),
    }
    if source.streaming:
        for beginning in begun:
            _check_columns(beginning, columns, label, source)
        tables, origin["streamed_rows_read"] = _read_streams(
            tables, columns, label, source
        )
    return tables, columns, label, origin


def _read_streams(
    streams: list[IterableDataset],
    columns: list[str],
    label: str | None,
    source: TextSource,
) -> tuple[list[Dataset], dict[str, int]]:
    """Read streams until each split has its texts: their rows, and how many were read for which split.

    A row that repeats a text that was taken, or one that is held out officially, counts for no split; it is kept to be
    counted later. Without `TextSource.deduplicate` it counts like any other.
    """
    held: list[Dataset] = []
    known, count = set[int](), dict[str, int]()

    def first_texts(
        stream: IterableDataset, left: dict[str, int], split: Callable[[int], str]
    ) -> tuple[Dataset, int]:
        """The rows, in the stream's order, until so many of each split are read, and how many of all were read."""
        taken, rows, read = set(known), [], 0
        for row in _streamed(stream, source):
            read += 1
            key = text_key([row[name] for name in columns], source.seed)
            if key not in taken or not source.deduplicate:
                name = split(key)
                if left[name] == 0:
                    continue
                left[name] -= 1
                taken.add(key)
            rows.append(
                {name: row[name] for name in (*columns, *([label] if label else []))}
            )
            if not any(left.values()):
                break
        return _table(rows, stream), read

    for stream in streams[1:]:
        table, count["test"] = first_texts(
            stream, {"test": source.most("test") or 0}, lambda key: "test"
        )
        held.append(table)
        known.update(_keys(table, columns, source.seed))
    shares = split_shares(source, draw_test=len(streams) == 1)
    most, largest = (
        source.max_texts or 0,
        max(shares.values()),
    )  # the others in proportion to the largest, rounded up
    wanted = {
        name: min(math.ceil(most * share / largest), source.most(name) or 0)
        for name, share in shares.items()
    }
    first, count["fit"] = first_texts(
        streams[0], wanted, lambda key: split_of(key, shares)
    )
    return [first, *held], count


def _some(
    name: str,
    rows: list[int],
    keys: list[int],
    asked: Sequence[Any],
    source: TextSource,
    held: set[int],
    further: int,
) -> list[int]:
    """Keep as many rows of a split as are wanted, chosen by their keys; those from `further` on where others are few.

    Of a question that would not be whole, none is kept.

    Raises:
        ValueError: there is none, though some are wanted.
    """
    most, ordered = (
        source.most(name),
        sorted(rows, key=lambda row: (row >= further, keys[row])),
    )
    cut = set() if most is None else {asked[row] for row in ordered[most:]}
    chosen = [row for row in rows if asked[row] not in cut]
    if not chosen and (name != "validation" or source.validation_share):
        copies, taken = len(keys) - len(set(keys)), len(set(keys) & held)
        raise UserError(
            f"The split {name!r} of `source` {source.source!r} has no texts: {len(set(keys) - held)} in all are too "
            f"few for `validation_share` {source.validation_share} and `test_share` {source.test_share}. Of "
            f"{len(keys)} rows {copies} are copies, whatever their case and white space, and {taken} are held-out "
            "texts too."
        )
    return chosen


def _text_columns(table: Dataset, label: str | None, source: TextSource) -> list[str]:
    """Find the columns of text: as the user says, as is known, or the only one that holds text."""
    columns = source.text_columns or known_source(source).text_columns
    if columns is not None:
        return list(columns)
    if ANSWERS in table.column_names and set(QUESTION) <= set(table.column_names):
        return list(QUESTION)
    others = [name for name in table.column_names if name not in (label, ANNOTATION)]
    names = [
        name
        for name in others
        if _is_text(table, name) or holds_conversations(table, name)
    ]
    if len(names) != 1:
        held = [
            name if _is_text(table, name) else f"{name} ({_held(table, name)})"
            for name in table.column_names
        ]
        raise UserError(
            f"Expected one column of text in `source` {source.source!r}, but {len(names)} of its columns "
            f"hold text. Name one, or two for sentence pairs, in `text_columns`: it has {', '.join(held)}."
        )
    return names


def _is_text(table: Dataset, name: str) -> bool:
    return getattr(table.features[name], "dtype", None) in (
        "string",
        "large_string",
        "string_view",
    )


def _held(table: Dataset, name: str) -> str:
    """What a column without texts holds, in a word or two for messages."""
    kind = table.features[name]
    return (
        "values of several kinds"
        if is_mixed(kind)
        else str(getattr(kind, "dtype", None) or type(kind).__name__)
    )


def _check_columns(
    table: Dataset, columns: list[str], label: str | None, source: TextSource
) -> None:
    """Raise unless every column exists and every row has a text."""
    missing = [
        name
        for name in [*columns, label]
        if name is not None and name not in table.column_names
    ]
    if missing:
        raise UserError(
            f"`text_columns` or `label_column` name {', '.join(missing)}, but `source` {source.source!r} has "
            f"the columns {', '.join(table.column_names)}."
        )
    for name in columns:
        if not _is_text(table, name):
            raise UserError(
                f"Expected text in column {name!r} (`text_columns`) of {source.source!r}, but it holds "
                f"{_held(table, name)}."
            )
    empty = [
        row
        for row, text in enumerate(_rows(table, columns))
        if not any(t and t.strip() for t in text)
    ]
    if empty:
        raise UserError(
            f"{len(empty)} of {len(table)} rows of `source` {source.source!r} have an empty text in "
            f"{', '.join(columns)}, first row {empty[0]} (counting from 0). Remove them from the data."
        )


def _rows(table: Dataset, columns: list[str]) -> list[tuple[str | None, ...]]:
    return list(zip(*(table[name][:] for name in columns), strict=True))


def _questions(table: Dataset) -> Sequence[Any]:
    """What is equal for all answers to a question; of other texts, the number of each row."""
    return table[CHOICE][:] if CHOICE in table.column_names else range(len(table))


def _keys(table: Dataset, columns: list[str], seed: int) -> list[int]:
    """The key of each row's text; of an answer, that of its question with all answers."""
    whole, asked = dict[Any, list[str | None]](), _questions(table)
    for question, text in zip(asked, _rows(table, columns), strict=True):
        whole.setdefault(question, []).extend(text)
    keys = {question: text_key(parts, seed) for question, parts in whole.items()}
    return [keys[question] for question in asked]


def _rows_where(table: Dataset, source: TextSource) -> list[int]:
    """The numbers of the rows that `TextSource.where` asks for."""
    missing = [name for name in source.where or {} if name not in table.column_names]
    if missing:
        raise UserError(
            f"Expected the columns of `where` out of {', '.join(table.column_names)} in `source` {source.source!r}, "
            f"but got {', '.join(missing)}."
        )
    rows = set(range(len(table)))
    for name, wanted in (source.where or {}).items():
        written = getattr(
            table.features[name], "int2str", str
        )  # of classes on the Hub, which are stored as numbers
        values = {wanted} if isinstance(wanted, str) else set(wanted)
        rows &= {
            row for row, value in enumerate(table[name][:]) if written(value) in values
        }
    return sorted(rows)


def _first_of_each(
    rows: Sequence[int], keys: list[int], asked: Sequence[Any]
) -> list[int]:
    """The rows of the first text, or of the first question, that has each key."""
    first = {keys[row]: asked[row] for row in reversed(rows)}
    return [row for row in rows if asked[row] == first[keys[row]]]


def _normalised(
    table: Dataset, columns: list[str], labels: LabelColumn | None
) -> Dataset:
    """Rename the columns to those of `Texts`, and convert the labels."""
    from datasets import Dataset, Features, Value

    features = {"text": Value("string"), "id": Value("int64")}
    if len(columns) == 2:
        features["text_pair"] = Value("string")
    answered = [ANSWERS] if columns == QUESTION else []
    extra = [
        name for name in (ANNOTATION, CHOICE, *answered) if name in table.column_names
    ]
    features |= {name: table.features[name] for name in extra}
    if len(table):
        renamed = table.map(
            _rename,
            batched=True,
            with_indices=True,
            remove_columns=[name for name in table.column_names if name not in extra],
            features=Features(features),
            fn_kwargs={"columns": columns},
            desc="Reading texts",
        )
    else:  # of which `map` makes no columns
        renamed = Dataset.from_dict({name: [] for name in features}, Features(features))
    if labels is None:
        return renamed
    return renamed.add_column(
        "label", labels.labels(table[labels.column][:]), feature=Value(labels.dtype)
    )


def _hash(split: Dataset) -> str:
    """A hash of the texts and labels of a split in their order."""
    digest = blake2b(digest_size=8)
    for first in range(0, len(split), 1000):
        digest.update(json.dumps(split[first : first + 1000], sort_keys=True).encode())
    return digest.hexdigest()


def _rename(
    batch: dict[str, list[Any]], rows: list[int], columns: list[str]
) -> dict[str, list[Any]]:
    texts = [[text or "" for text in batch[column]] for column in columns]
    return {**dict(zip(("text", "text_pair"), texts, strict=False)), "id": rows}
