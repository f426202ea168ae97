"""Results of cells, as lines of JSON that are read one by one: a comparison of many models has millions of rows."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MORE = ",\n"
ENCODER = json.JSONEncoder(allow_nan=False)


def as_lines(result: Mapping[str, Any]) -> str:
    """A result as JSON: all that is no table on the first line, then each row of a table on a line of its own."""
    tables = {name: rows for name, rows in result.items() if isinstance(rows, list) and name != "findings"}
    first = ENCODER.encode({name: value for name, value in result.items() if name not in tables})
    lists = (f'"{name}": [\n{MORE.join(map(ENCODER.encode, rows))}\n]' for name, rows in tables.items())
    return MORE.join([first.removesuffix("}"), *lists]) + "\n}\n"


def about(path: Path) -> dict[str, Any]:
    """What a result says beside its tables: the cell, how long it took, versions, `meta`, findings."""
    return json.loads(next(_lines(path)).rstrip(MORE) + "}")


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of all tables of a result, one by one, each with the name of its table."""
    name = ""
    for line in _lines(path):
        if line.startswith('"'):
            name = line.split('"')[1]
        elif name and line.startswith("{"):
            yield name, json.loads(line.rstrip(MORE))


def _lines(path: Path) -> Iterator[str]:
    """The lines of a result; one of an earlier version, which has no lines, is read as a whole."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
        if first.endswith(MORE):
            yield first
            yield from file
        else:
            yield from as_lines(json.loads(first + file.read())).splitlines(keepends=True)
