"""How texts are divided into splits, and how far a stream is read for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from aligners.errors import UserError
from datamodules.text.sources import TextSource

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


def plain_text(parts: Sequence[str | None]) -> bytes:
    """Join a text of one or two parts, regardless of case and white space."""
    return "\x1f".join(" ".join((part or "").casefold().split()) for part in parts).encode()


def text_key(parts: Sequence[str | None], seed: int) -> int:
    """Hash a text to [0, 2^128), regardless of case and white space."""
    secret = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(blake2b(plain_text(parts), key=secret, digest_size=16).digest(), "big")


def split_shares(source: TextSource, *, draw_test: bool) -> dict[str, float]:
    """The share of the texts for each split, without `test` where there is an official one."""
    test = {"test": source.test_share} if draw_test else {}
    fit = 1 - source.validation_share - sum(test.values())
    return {"fit": fit, "validation": source.validation_share, **test}


def split_of(key: int, shares: dict[str, float]) -> str:
    """The split of a text with this key."""
    place, test = key / 2**128, shares.get("test", 0.0)
    return "test" if place < test else "validation" if place < test + shares["validation"] else "fit"


PEEKED = 100  # rows that show which columns there are and what they hold


def first_rows(stream: IterableDataset, source: TextSource) -> Dataset:
    """Read a few rows from the beginning of a stream, with all columns."""
    return _table([row for _, row in zip(range(PEEKED), _rows(stream, source), strict=False)], stream)


def wanted_texts(source: TextSource, *, draw_test: bool) -> dict[str, int]:
    """The number of texts for each split: `max_texts` for the largest, the others in proportion, rounded up."""
    shares = split_shares(source, draw_test=draw_test)
    largest = max(shares.values())
    return {
        name: min(math.ceil((source.max_texts or 0) * share / largest), source.most(name) or 0)
        for name, share in shares.items()
    }


def first_texts(
    stream: IterableDataset,
    texts: list[str],
    label: str | None,
    source: TextSource,
    *,
    held: set[int] | None,
    official: bool = False,
) -> tuple[Dataset, int]:
    """Read a stream until each split has its texts.

    A row that repeats a text that was taken, or one of `held`, counts for no split; it is kept to be counted later.
    Without `TextSource.deduplicate` it counts like any other.

    Args:
        stream: rows with these columns, and others, which are dropped.
        texts: columns of the text, one or two.
        label: column of the class, if any.
        source: number and shares of the texts.
        held: keys of the official held-out texts; None where test texts are drawn.
        official: whether this stream is the official held-out split: all that is taken is test text.

    Returns:
        The rows, in the stream's order, and how many were read.
    """
    shares = split_shares(source, draw_test=held is None)
    wanted = {"test": source.most("test") or 0} if official else wanted_texts(source, draw_test=held is None)
    columns, taken, rows, read = [*texts, *([label] if label else [])], set(held or ()), [], 0
    for row in _rows(stream, source):
        read += 1
        key = text_key([row[name] for name in texts], source.seed)
        if key not in taken or not source.deduplicate:
            name = "test" if official else split_of(key, shares)
            if wanted[name] == 0:
                continue
            wanted[name] -= 1
            taken.add(key)
        rows.append({name: row[name] for name in columns})
        if not any(wanted.values()):
            break
    return _table(rows, stream), read


def _rows(stream: IterableDataset, source: TextSource) -> Iterator[dict[str, Any]]:
    try:
        yield from stream
    except (ValueError, OSError) as error:  # what the readers of datasets raise for a damaged file
        raise UserError(f"`source` {source.source!r} cannot be read to where `max_texts` asks: {error}") from error


def _table(rows: list[dict[str, Any]], stream: IterableDataset) -> Dataset:
    from datasets import Dataset, Features

    if not rows:
        return Dataset.from_dict({})
    known = stream.features  # of Parquet and of most data sets on the Hub; not of CSV and JSON
    return Dataset.from_list(rows, None if known is None else Features({name: known[name] for name in rows[0]}))
