"""Reads labelled or plain text, whole or as a stream, divides it into splits, and caches these."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

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
from aligners.datamodules.text.labels import Say, is_mixed
from aligners.datamodules.text.sources import (
    TextSource,
    fitting_split,
    held_out_split,
    known_source,
)
from aligners.datamodules.text.splitting import (
    RawTexts,
    divide,
    split_of,
    split_shares,
    text_key,
)
from aligners.datamodules.text.texts import Texts
from aligners.errors import UserError
from aligners.files.atomic import check_folder, whole_folder, write_text
from aligners.models.embedded import cache_folder

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

PEEKED = 100  # rows that show which columns a stream has, and their types
SPLITS, ABOUT = ("fit", "validation", "test"), "about.json"
TEXT_TYPES = ("string", "large_string", "string_view")


def load_texts(source: TextSource, tokenizers: Tokenizers | None = None) -> Texts:
    """Read the texts and divide them.

    Conversations are rendered by the chat template of `TextSource.chat_template`, or else by that of the models.
    `tokenizers` is a function that returns the models' tokenizers by name.

    A text's split follows from a keyed hash of the text itself (case folded, white space collapsed). It does not depend
    on the other texts. Copies of a text therefore share a split, and only the first copy is kept. Texts of an official
    held-out split are removed from the other splits. With `TextSource.deduplicate` false, copies and such texts stay.

    A stream is read only as far as it must: see `TextSource.streaming`.

    The splits are kept in the folder `texts` of the cache, so that the cells of a study divide the same texts once.

    Raises:
        ValueError: the source cannot be found or reached; a column is missing, empty or not of text; labels are neither
            names nor numbers; a split would be empty. A text without a label is no error: see `labels`.
    """
    raw = read_source(source, tokenizers)
    place = _place_in_cache(source, raw.tables)
    if place is None:
        return divide(source, raw)
    with FileLock(
        place.with_suffix(".lock")
    ):  # one process divides the texts while the others wait
        if not place.is_dir():
            _write(divide(source, raw), place)
    return _read(place)


# ---------------------------------------------------------------------- the cache of splits


def _place_in_cache(source: TextSource, tables: Sequence[Dataset]) -> Path | None:
    """Return the folder of these tables' splits; None if the tables are in memory, or the cache cannot be written to.

    It is named by a hash of the source's options, of the code in this folder, and of the fingerprints by which
    `datasets` tells tables apart, which change with a file or a revision.
    """
    folder = cache_folder() / "texts"
    decides: list[Any] = [asdict(source), _code()]
    for table in tables:
        if not table.cache_files:
            return None
        decides.append([table._fingerprint, str(table.features)])
    try:
        check_folder(folder, "ALIGNERS_CACHE")
    except ValueError:
        return None
    written = json.dumps(decides, sort_keys=True)
    return folder / blake2b(written.encode(), digest_size=16).hexdigest()


def _write(texts: Texts, place: Path) -> None:
    with whole_folder(place) as unfinished:
        for name in SPLITS:
            split = getattr(texts, name)
            if len(split):  # `datasets` writes none without rows
                split.save_to_disk(unfinished / name)
        about = json.dumps([texts.label_names, texts.origin])
        write_text(unfinished / ABOUT, about)


def _read(place: Path) -> Texts:
    from datasets import load_from_disk

    names, origin = json.loads((place / ABOUT).read_text(encoding="utf-8"))
    fit = load_from_disk(str(place / "fit"))  # which is never empty
    splits = {"fit": fit, "validation": fit.select([]), "test": fit.select([])}
    for name in ("validation", "test"):
        if (place / name).is_dir():
            splits[name] = load_from_disk(str(place / name))
    return Texts(**splits, label_names=names, origin=origin)


@cache
def _code() -> str:
    """A hash of the code that divides, and of the version of `datasets`."""
    import datasets

    digest = blake2b(datasets.__version__.encode(), digest_size=16)
    for file in sorted(Path(__file__).parent.rglob("*")):
        if file.suffix in (".py", ".yaml"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- from a source to rows


def read_source(source: TextSource, tokenizers: Tokenizers | None = None) -> RawTexts:
    """Open a source, find its columns, and read as much of a stream as is needed.

    Args:
        source: the user's options.
        tokenizers: tokenizers of the models, by their names.
    """
    cautions: list[str] = []
    tables, added = _open(source, cautions.append)
    begun = _beginnings(tables, source)
    first = begun[0]
    label = _label_column(first, source)
    columns = _text_columns(first, label, source)
    needed = [*columns, label] if label else columns
    conversations = [name for name in columns if holds_conversations(first, name)]
    plain = [name for name in columns if name not in conversations]
    for beginning in begun:
        _check_columns(beginning, needed, plain, source)

    origin = _origin(source, columns, label, begun)
    if conversations:
        name, renderer = template_of(source.chat_template, tokenizers)
        origin["chat_template"] = name
        tables = [rendered(table, conversations, renderer) for table in tables]
    if source.streaming:
        reader = _StreamReader(columns, needed, source)
        tables, origin["streamed_rows_read"] = reader.read(tables)
    return RawTexts(tables, columns, label, origin, cautions, added)


def _open(source: TextSource, say: Say) -> tuple[list[Any], int]:
    """Return the rows to divide, those of an official held-out split, and how many of these `fill_from` added."""
    from datasets import concatenate_datasets

    splits = known_source(source).open(source, say)
    first = fitting_split(splits, source)
    if source.official is None:
        return [first], 0
    held = held_out_split(splits, source.official, source, say)
    wanted = source.most("test") or 0
    if source.fill_from is None or len(held) >= wanted:
        return [first, held], 0
    further = held_out_split(splits, source.fill_from, source, say)
    return [first, concatenate_datasets([held, further])], len(further)


def _beginnings(tables: list[Any], source: TextSource) -> list[Dataset]:
    """Read the first rows of each stream; take any other table whole.

    Raises:
        ValueError: a table has no rows.
    """
    begun = tables
    if source.streaming:
        begun = [_beginning(stream, source) for stream in tables]
    for table, name in zip(begun, (source.source, source.official), strict=False):
        if len(table) == 0:
            raise UserError(
                f"Expected texts in {name!r} (`source` or `held_out`), but it is empty."
            )
    return begun


def _beginning(stream: IterableDataset, source: TextSource) -> Dataset:
    rows = islice(_rows(stream, source), PEEKED)
    return _as_table(list(rows), stream)


def _rows(stream: IterableDataset, source: TextSource) -> Iterator[dict[str, Any]]:
    try:
        yield from stream
    except (ValueError, OSError) as error:  # as readers raise for a damaged file
        raise UserError(
            f"`source` {source.source!r} cannot be read as far as `max_texts` requires: {error}"
        ) from error


def _as_table(rows: list[dict[str, Any]], stream: IterableDataset) -> Dataset:
    from datasets import Dataset, Features

    if not rows:
        return Dataset.from_dict({})
    known = (
        stream.features
    )  # true of Parquet and of most data sets on the Hub, not of CSV
    if known is None:
        return Dataset.from_list(rows)
    features = Features({name: known[name] for name in rows[0]})
    return Dataset.from_list(rows, features)


def _label_column(table: Dataset, source: TextSource) -> str | None:
    """Choose the column of the labels: the user's, the known source's, or `label`."""
    named = source.label_column or known_source(source).label_column
    if named is None and "label" in table.column_names:
        return "label"
    return named


def _text_columns(table: Dataset, label: str | None, source: TextSource) -> list[str]:
    """Choose the columns of the text: the user's, the known source's, or the only one that holds text."""
    named = source.text_columns or known_source(source).text_columns
    if named is not None:
        return list(named)
    if {ANSWERS, *QUESTION} <= set(table.column_names):
        return list(QUESTION)
    found, described = [], []
    for name in table.column_names:
        is_text = _is_text(table, name)
        described.append(name if is_text else f"{name} ({_held(table, name)})")
        if name in (label, ANNOTATION):
            continue
        if is_text or holds_conversations(table, name):
            found.append(name)
    if len(found) != 1:
        raise UserError(
            f"Expected one column of text in `source` {source.source!r}, but {len(found)} of its columns "
            f"hold text. Name one, or two for sentence pairs, in `text_columns`: it has {', '.join(described)}."
        )
    return found


def _is_text(table: Dataset, name: str) -> bool:
    return getattr(table.features[name], "dtype", None) in TEXT_TYPES


def _held(table: Dataset, name: str) -> str:
    """Describe what a column without texts holds, in a word or two for messages."""
    kind = table.features[name]
    if is_mixed(kind):
        return "values of several kinds"
    return str(getattr(kind, "dtype", None) or type(kind).__name__)


def _check_columns(
    table: Dataset, needed: list[str], texts: list[str], source: TextSource
) -> None:
    """Raise unless all needed columns are there, and those of texts hold text."""
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise UserError(
            f"`text_columns` or `label_column` name {', '.join(missing)}, but `source` {source.source!r} has "
            f"the columns {', '.join(table.column_names)}."
        )
    for name in texts:
        if not _is_text(table, name):
            raise UserError(
                f"Expected text in column {name!r} (`text_columns`) of {source.source!r}, but it holds "
                f"{_held(table, name)}."
            )


def _origin(
    source: TextSource, columns: list[str], label: str | None, tables: list[Dataset]
) -> dict[str, Any]:
    """Return what a report says of a source."""
    official = source.official
    origin: dict[str, Any] = {
        "source": source.source,
        "subset": source.subset,
        "revision": source.revision,
        "text_columns": columns,
        "label_column": label,
        "split": "by a keyed hash of the text",
        "seed": source.seed,
        "validation_share": source.validation_share,
    }
    if official is None:
        origin["test_share"] = source.test_share
    else:
        origin["split"] = f"test: {official}; rest by hash"
    if source.where:
        origin["where"] = source.where
    every = tables[0].column_names
    if ANNOTATION in every:
        origin["annotated"] = [table.info.description for table in tables]
    known = {*columns, ANNOTATION, CHOICE, ANSWERS}
    others = [name for name in every if name not in known]
    if label is None and others:
        origin["other_columns"] = others
    return origin


class _StreamReader:
    """Reads streams until each split has its texts.

    A row that repeats a text already taken, or an officially held-out text, fills no split; it is kept, to be counted
    later. Without `TextSource.deduplicate` it counts like any other row.

    Args:
        columns: columns of the text.
        kept: these columns, and that of the labels.
        source: the user's options.
    """

    def __init__(self, columns: list[str], kept: list[str], source: TextSource) -> None:
        self.columns = columns
        self.kept = kept
        self.source = source
        self.taken: set[int] = set()  # keys of texts

    def read(
        self, streams: Sequence[IterableDataset]
    ) -> tuple[list[Dataset], dict[str, int]]:
        """Read the streams; return the rows, and how many of them each split got."""
        first, *official = streams
        held, count = [], {}
        for stream in official:
            quota = {"test": self.source.most("test") or 0}
            table, count["test"] = self._read_one(stream, quota, None)
            held.append(table)
        shares = split_shares(self.source, draw_test=not official)
        table, count["fit"] = self._read_one(first, self._quotas(shares), shares)
        return [table, *held], count

    def _quotas(self, shares: dict[str, float]) -> dict[str, int]:
        """Return how many texts each split takes: the largest `max_texts`, the others in proportion, rounded up."""
        largest = max(shares.values())
        quotas = {}
        for name, share in shares.items():
            proportional = math.ceil((self.source.max_texts or 0) * share / largest)
            quotas[name] = min(proportional, self.source.most(name) or 0)
        return quotas

    def _read_one(
        self,
        stream: IterableDataset,
        quotas: dict[str, int],
        shares: dict[str, float] | None,
    ) -> tuple[Dataset, int]:
        """Read the rows of one stream in order, and count them; without `shares` all texts are for `test`."""
        rows, read = [], 0
        left = dict(quotas)
        for row in _rows(stream, self.source):
            read += 1
            parts = [row[name] for name in self.columns]
            key = text_key(parts, self.source.seed)
            repeated = self.source.deduplicate and key in self.taken
            if not repeated:
                split = "test" if shares is None else split_of(key, shares)
                if left[split] == 0:
                    continue
                left[split] -= 1
                self.taken.add(key)
            rows.append({name: row[name] for name in self.kept})
            if not any(left.values()):
                break
        return _as_table(rows, stream), read
