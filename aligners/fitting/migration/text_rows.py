"""Texts with ids and domains, and queries with what is relevant to them, from files."""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligners.errors import UserError
from aligners.files.user_files import refusing
from aligners.fitting.migration.vector_files import check_unique

QRELS = ("qrels.tsv", "qrels/test.tsv", "qrels/dev.tsv")


@dataclass(frozen=True)
class TextRows:
    """Texts, with an id and a domain each where the file has any.

    Attributes:
        texts: without prompts.
        ids: None: rows are known by their order.
        domains: None: the file has no such column.
    """

    texts: list[str]
    ids: list[str] | None = None
    domains: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Judged:
    """Queries, the documents among which they search, and which of these are relevant.

    Attributes:
        queries: what is asked.
        corpus: the documents.
        relevant: for each query, place of a document -> its gain.
    """

    queries: TextRows
    corpus: TextRows
    relevant: list[dict[int, float]]


def read_texts(path: Path, column: str = "domain") -> TextRows:
    """Read texts: one a line (.txt); `text`, `title`, `_id` or `id` and a domain (.jsonl, .csv, .tsv).

    Args:
        path: the file.
        column: name of the column of domains, which need not be there.

    Raises:
        ValueError: there is no such file, it cannot be read, has no texts, or an id twice.
    """
    if not path.is_file():
        raise UserError(
            f"Expected a file of texts at {path}, but there is no such file."
        )
    with refusing(
        f"The texts in {path} cannot be read",
        "Expected JSON lines, CSV, TSV or plain text.",
    ):
        rows = list(_rows(path))
        texts = []
        for row in rows:
            parts = [row.get("title"), row["text"]]
            texts.append(" ".join(part for part in parts if part))
    if not texts:
        raise UserError(f"Expected texts in {path}, but got none.")
    ids = _column(rows, "_id") or _column(rows, "id")
    if ids is not None:
        check_unique(ids, str(path))
    return TextRows(texts, ids, _column(rows, column))


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".txt":
            for line in file:
                if line.strip():
                    yield {"text": line.strip()}
        elif path.suffix in (".csv", ".tsv"):
            separator = "\t" if path.suffix == ".tsv" else ","
            yield from csv.DictReader(file, delimiter=separator)
        else:
            for line in file:
                if line.strip():
                    yield json.loads(line)


def _column(rows: list[Mapping[str, Any]], name: str) -> list[str] | None:
    """Return a column as texts; None unless every row has it."""
    values = []
    for row in rows:
        if row.get(name) is None:
            return None
        values.append(str(row[name]))
    return values


def read_judged(folder: Path, column: str = "domain") -> Judged:
    """Read queries and judgements as BEIR has them: queries.jsonl, corpus.jsonl, and qrels.tsv or qrels/test.tsv.

    Queries without a relevant document are left out.

    Raises:
        ValueError: a file is missing or cannot be read, names an id that there is not, or no query is judged.
    """
    queries = read_texts(folder / "queries.jsonl", column)
    corpus = read_texts(folder / "corpus.jsonl", column)
    if queries.ids is None or corpus.ids is None:
        raise UserError(
            f"Expected an `_id` in every row of {folder}, but some have none."
        )
    gains = _read_qrels(folder)
    places = {name: place for place, name in enumerate(corpus.ids)}
    kept = []
    relevant = []
    for place, name in enumerate(queries.ids):
        found = {}
        for document, gain in gains.get(name, {}).items():
            if document not in places:
                raise UserError(
                    f"Expected the documents of qrels.tsv in corpus.jsonl, but {document!r} is not there."
                )
            found[places[document]] = gain
        if found:
            kept.append(place)
            relevant.append(found)
    if not kept:
        raise UserError(
            f"Expected judged queries in {folder}, but no query has a relevant document."
        )
    domains = queries.domains and [queries.domains[place] for place in kept]
    asked = TextRows(
        [queries.texts[place] for place in kept],
        [queries.ids[place] for place in kept],
        domains,
    )
    return Judged(asked, corpus, relevant)


def _read_qrels(folder: Path) -> dict[str, dict[str, float]]:
    """Return query -> document -> gain, above 0."""
    path = next((folder / name for name in QRELS if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"Expected {QRELS[0]} or {QRELS[1]} in {folder}, but there is neither."
        )
    gains: dict[str, dict[str, float]] = {}
    with refusing(
        f"{path} cannot be read",
        "Expected query, document and score, with tabs between them.",
    ):
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            query, document, gain = line.split("\t")
            if float(gain) > 0:
                gains.setdefault(query, {})[document] = float(gain)
    return gains
