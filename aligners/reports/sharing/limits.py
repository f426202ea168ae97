"""What a card says against what it is about: what it was fitted and measured on, and what it is not good for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aligners.fitting.outcomes import what_did_not_train
from aligners.reports.names import held_out_name, site_name, with_short_names
from aligners.reports.report import Report, Row

VALIDATION = {"fit"}  # kinds of reports that are about the texts by which the best steps were chosen
VOCABULARY = 2.0  # FVU on unseen types over that on seen ones from which a map is called partly a vocabulary
HASHES = (
    "The file holds hashes of these texts, so that `aligners` never measures it on them; in any other program that is "
    "up to you. It lists the types of its fitting rows, tokens or words, in plain text."
)


def fitted_on(data: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """What the texts were, a line each.

    Args:
        data: options of the data module.
        about: what is known of the states and texts that were read.
    """
    options, text = data.get("text", {}), about.get("text", {})
    source = text.get("source") or options.get("source") or "not known"
    counts = text.get("n_texts", {})
    said = f"Texts: `{source}`"
    if counts:
        said += f", {counts.get('fit', 0):,} to fit on and {counts.get('validation', 0):,} to choose the best step by"
    lines = [f"{said}; split {text.get('split', 'by a keyed hash of the text')}, seed {options.get('seed', 0)}."]
    if "maps" in about:  # probes are kept without
        lines.append(HASHES)
    if data.get("held_out_types"):
        lines.append(f"The rows of {100 * data['held_out_types']:g} % of the types were left out of fitting.")
    length, dtype = data.get("max_length"), data.get("dtype", "float32")
    return [*lines, f"At most {length} tokens a text, models in {dtype}." if length else f"Models in {dtype}."]


def measured_on(kind: str, meta: Row) -> str:
    """On which texts the numbers were measured, and whether these were held out."""
    text = meta.get("text", {})
    source, counts, held_out = text.get("source"), text.get("n_texts", {}), held_out_name(text)
    if kind in VALIDATION:
        return (
            "**Not held out:** on the validation texts, by which the best step of each trained map was chosen. Measure "
            "it on held-out texts before you rely on it (`evaluate.py inject`)."
        )
    count = f"{counts['test']:,} held-out texts" if counts.get("test") else "held-out texts"
    dropped = text.get("left_out", {}).get("texts") or 0
    dropped_said = f" Another {dropped:,} were dropped because something here was fitted on them." if dropped else ""
    where = f"`{held_out}`, beside `{source}`" if held_out else f"`{source}`"
    return f"On {count} of {where}, none of which was fitted on.{dropped_said}"


def limits(report: Report) -> list[str]:
    """What it is not good for, as its numbers say: what failed, is partly a vocabulary, or could not be measured."""
    maps, meta = [row for row in report.rows if row.get("role") == "method"], report.meta
    said = [f"Did not train: {line.removeprefix('* ')}" for line in what_did_not_train(maps)[1:]]
    said += [f"{name}: partly a vocabulary: on words that it has not seen its error is at least "
             f"{VOCABULARY:g} times as high." for name in _vocabularies(maps)]  # fmt: skip
    worse = dict.fromkeys(row["method"] for row in maps if (row.get("fvu") or 0) >= 1)
    said += [f"{name}: at some site no better than the mean of Y's states (FVU of 1 or more)." for name in worse]
    said += [f"Not injected, {where}: {why}." for where, why in (meta.get("not_injected") or {}).items() if why]
    return said + [f"Left out, {name}: {why}" for name, why in (meta.get("refusals") or {}).items()]


def _vocabularies(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(row["method"] for row in rows)
    return [name for name in names if _ratio([row for row in rows if row["method"] == name]) >= VOCABULARY]


def _ratio(rows: Sequence[Row]) -> float:
    """The largest FVU on unseen over that on seen types; 0 where they are not told apart."""
    pairs = [(row.get("fvu_unseen"), row.get("fvu_seen")) for row in rows]
    return max((unseen / seen for unseen, seen in pairs if unseen and seen), default=0.0)


MOST_ROWS = 80
LABELS = ("route", "task", "method", "role", "source", "site", "rank")
VALUES = {
    "parameters": "parameters",
    "fvu": "FVU",
    "fvu_seen": "FVU, seen types",
    "fvu_unseen": "FVU, unseen types",
    "fvu_inverse": "FVU of the inverse",
    "penalty": "penalty, nats",
    "score": "score",
    "control": "control task",
    "selectivity": "selectivity",
    "uuas": "UUAS",
    "cycle": "cycle error",
}


class Numbers(NamedTuple):
    """A table of numbers as text.

    Attributes:
        headings: of its columns.
        rows: cells, a number with its 95 % interval where it has one.
        left_out: rows that are not shown.
        intervals: whether any number has an interval.
    """

    headings: list[str]
    rows: list[list[str]]
    left_out: int
    intervals: bool


def numbers_of(report: Report) -> Numbers:
    """The table: floors and ceilings stand among the methods, as their role says."""
    shown = with_short_names(report.rows)
    labels = [name for name in LABELS if _told_apart(shown, name)]
    values = [name for name in VALUES if any(row.get(name) is not None for row in shown)]
    scores = list(dict.fromkeys(row["score_name"] for row in shown if row.get("score_name")))
    headings = labels + [scores[0] if name == "score" and len(scores) == 1 else VALUES[name] for name in values]
    rows = [[*(_label(row, name) for name in labels), *(_value(row, name) for name in values)] for row in shown]
    bounds = any(row.get(f"{name}_low") is not None for row in shown for name in values)
    return Numbers(headings, rows[:MOST_ROWS], max(0, len(rows) - MOST_ROWS), bounds)


def _told_apart(rows: Sequence[Row], name: str) -> bool:
    """Whether a label is there; of one route alone, it says nothing."""
    found = {_label(row, name) for row in rows}
    return found != {""} and (name != "route" or len(found) > 1)


def _label(row: Row, name: str) -> str:
    if name == "route":
        return f"{row['model_x']} → {row['model_y']}" if "model_x" in row else str(row.get("model", ""))
    if name == "site" and row.get("site_x") is not None:
        return site_name((row["site_x"], row["site_y"]))
    value = row.get(name)
    return "" if value is None else str(value)


def _value(row: Row, name: str) -> str:
    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    return _short(value) if low is None or high is None else f"{_short(value)} [{_short(low)}, {_short(high)}]"


def _short(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 100 else f"{value:.1e}"
