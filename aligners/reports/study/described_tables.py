"""Tables and figures as described in `tables.yaml`, filled in, with the numbers that papers printed."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from jinja2 import Environment, StrictUndefined
from pandas import DataFrame

from aligners.errors import UserError, check_known
from aligners.files.yaml_tables import table_beside
from aligners.reports.names import counted, listed
from aligners.reports.report import Row
from aligners.reports.study.contents import Column, Figure, Panel, Table
from aligners.reports.study.frames import kind_words, place_words, stage_words
from aligners.reports.study.statistics import Estimate

# of each table and figure; `aligners.reports.study.registry` fills it
DESCRIBED: dict[str, dict[str, Any]] = {}
# name of a table or figure -> `metric`, `source`, `setting`, and `values`
NUMBERS: dict[str, dict[str, Any]] = {}
WORDS: dict[str, Any] = table_beside(
    __file__, "words.yaml"
)  # that any description may use
# fields of a description that say how it is made; the others are its texts
MADE = {"from", "like", "with"}
TEMPLATES = Environment(undefined=StrictUndefined)
TEMPLATES.globals |= {
    "place_words": place_words,
    "kind_words": kind_words,
    "counted": counted,
}
TEMPLATES.filters |= {"form": format, "listed": listed}


def table(name: str, rows: Sequence[Row], **words: Any) -> Table:
    """Make a table as it is described, with the columns that have a value in some row, and stages in words.

    Args:
        name: name of its description.
        rows: column's key -> cell.
        words: what the description's templates ask for, besides `rows` and `known`, the keys of the columns.
    """
    shown, known = [], set()
    for row in rows:
        if "stage" in row:
            row = row | {"stage": stage_words(row["stage"])}
        shown.append(row)
        for key, cell in row.items():
            if cell is not None:
                known.add(key)
    texts = _texts(name, {**words, "known": known, "rows": rows}, rows)
    columns = []
    for key, about in texts.pop("columns").items():
        if key not in known:
            continue
        if isinstance(about, str):
            about = [about]
        columns.append(Column(key, *about))
    return Table(name=name, columns=columns, rows=shown, **texts)


def figure(
    name: str, panels: Sequence[Panel], values: Sequence[Row] = (), **words: Any
) -> Figure:
    """Make a figure as it is described.

    Args:
        name: name of its description.
        panels: all of one kind.
        values: the values as rows of a table.
        words: what the description's templates ask for.
    """
    return Figure(
        name=name, panels=panels, values=values, **_texts(name, words, values)
    )


def _texts(name: str, words: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields of a description that are fields of tables and figures, filled in.

    There is a note if intervals are over pretrained models, or over the fine-tunings of one, and not over models.
    """
    numbers = NUMBERS.get(words.get("paper", name))
    note = ""
    if numbers:
        note = f"Paper: {numbers['source']}: {numbers['setting']}."
    words = {**WORDS, "paper_note": note, **words}
    own = dict(DESCRIBED[name])
    for made in MADE & set(own):
        del own[made]
    words["findings"] = _sentences(_filled(own.pop("findings", []), words))
    texts = {"notes": [], **_filled(own, words), "findings": words["findings"]}
    intervals = _intervals(rows)
    for interval, said in WORDS["units"].items():
        if interval in intervals:
            texts["notes"].append(said)
    return texts


def _filled(field: Any, words: Mapping[str, Any]) -> Any:
    """Render every template in a field; empty texts of a list are left out."""
    if isinstance(field, str):
        return TEMPLATES.from_string(field).render(words)
    if isinstance(field, dict):
        return {key: _filled(value, words) for key, value in field.items()}
    if isinstance(field, list):
        texts = [_filled(part, words) for part in field]
        return [text for text in texts if text != ""]
    return field


def _sentences(findings: Sequence[str]) -> list[str]:
    """Return each line that is not empty, without its template's spaces."""
    sentences = []
    for line in "\n".join(findings).splitlines():
        if line.strip():
            sentences.append(" ".join(line.split()))
    return sentences


def _intervals(rows: Sequence[Row]) -> set[str]:
    """Return what the intervals of rows cover."""
    intervals = set()
    for row in rows:
        intervals.add(str(row.get("interval")))
        for cell in row.values():
            if isinstance(cell, Estimate):
                intervals.add(cell.interval)
    return intervals


# ---------------------------------------------------------------------- printed numbers


def paper_value(
    table: str, quantity: str, present: Collection[str] = (), **where: str | None
) -> Estimate | None:
    """Return the printed number for the same thing, or None if there is none.

    Args:
        table: name of a table, which has numbers or not.
        quantity: `test`, `score`, ...
        present: the methods that the study has; of several that are the same thing, the closest gets the number.
        where: `task`, `method`, `variant`, ...; names of tasks agree if they differ in case and punctuation only.
    """
    for entry in NUMBERS.get(table, {}).get("values", ()):
        if not _is_of(entry, where, present):
            continue
        printed = entry.get(quantity)
        if printed is None:
            return None
        if isinstance(printed, list):
            return Estimate(*printed)
        return Estimate(printed)
    return None


def _is_of(
    entry: Row, where: Mapping[str, str | None], present: Collection[str]
) -> bool:
    """Tell whether printed numbers belong to a place; what they do not state matches anything."""
    stated = [key for key in where if key in entry]
    return all(_agrees(entry[key], where[key], present) for key in stated)


def _agrees(
    printed: str | list[str], ours: str | None, present: Collection[str]
) -> bool:
    """Tell whether a printed name, or the closest of several, means the same as ours."""
    if isinstance(printed, str):
        return ours is not None and plain(printed) == plain(ours)
    there = [name for name in printed if name in present]
    return bool(there) and ours == there[0]


def plain(name: str) -> str:
    """Return a name in lower case, letters and digits only: SST-2 and sst2 are one task."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def printed_metric(table: str, frame: DataFrame) -> list[str]:
    """Return the metric of the printed numbers, if rows have it besides another score; None if it is their score.

    Args:
        table: name of a table.
        frame: rows with `score_name` and a column for each metric.
    """
    metric = NUMBERS.get(table, {}).get("metric")
    if not metric or "score_name" not in frame:
        return []
    if set(frame["score_name"].dropna()) <= {metric}:
        return []
    return [metric]


# ---------------------------------------------------------------------- mistakes in descriptions


def check_described(name: str, own: Mapping[str, Any]) -> None:
    """Raise if a description has a field that no table and no figure has, or lacks what it needs.

    Args:
        name: name of the table or figure.
        own: its fields, those included of what it is like.

    Raises:
        ValueError: it has, or does.
    """
    known = set(MADE)
    for kind in (Table, Figure):
        known |= {field.name for field in fields(kind)}
    check_known(sorted(known), **{name: own})
    lacking = {"title", "caption"} - set(own)
    if lacking:
        raise UserError(
            f"Expected `{name}` to have {' and '.join(sorted(lacking))}, but it has {', '.join(own)} alone."
        )


def check_numbers(printed: Mapping[str, Any]) -> None:
    """Raise if printed numbers do not say where they are from.

    Args:
        printed: name of a table or figure -> its numbers.

    Raises:
        ValueError: some do not.
    """
    for name, about in printed.items():
        for key in ("source", "setting"):
            if key not in about:
                raise UserError(
                    f"Expected the numbers of `{name}` to have `{key}`, which stands below the table."
                )
