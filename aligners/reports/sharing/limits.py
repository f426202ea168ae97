"""What a card says against what it is about: what it was fitted and measured on, and what it is not good for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aligners.fitting.outcomes import what_did_not_train
from aligners.reports.names import held_out_name
from aligners.reports.report import Report, Row

__all__ = ["fitted_on", "limits", "measured_on"]

VALIDATION = {"fit"}  # kinds of reports that are about the texts by which the best steps were chosen
VOCABULARY = 2.0  # FVU on unseen types over that on seen ones from which a map is called partly a vocabulary
HASHES = (
    "The file holds hashes of these texts, so that `aligners` never measures it on them; in any other program that is "
    "up to you. It lists the types of its fitting rows, tokens or words, in plain text."
)
OF_KINDS = {
    "maps": [
        "A low FVU does not show that the models compute the same: where a task is easy, poor maps keep its accuracy "
        "too. Compare with the floors.",
        "The inverse of a map that was trained in one direction can be useless, however exact it is.",
    ],
    "universe": [
        "A map between two models of the space was not fitted for that pair alone: measure it beside one that was.",
        "Models that were not among those above need a fit of their own: `train.py join`.",
    ],
    "stitching": [
        "Stitching that works does not show that two models represent the same things: a trained layer can find "
        "whatever serves the task. Compare with a model stitched to itself, and with the floors.",
        "The layers were trained for this task alone.",
    ],
    "probes": [
        "What a probe finds is there to be read; the model need not use it.",
        "A score counts only above its controls: the untrained twin, the control task, the baseline.",
    ],
}


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


def limits(kind: str, report: Report | None) -> list[str]:
    """What it is not good for: of its kind, and as its numbers say."""
    found = ["Other models, other revisions, other sites, and states in another precision than those above."]
    found += OF_KINDS[kind]
    found.append("Texts of another kind, language or domain: nothing here says how it does on them.")
    if report is None:
        return found
    return found + _as_numbers_say(report.rows, report.meta)


def _as_numbers_say(rows: Sequence[Row], meta: Row) -> list[str]:
    """Name what failed, what is partly a vocabulary, and what could not be measured."""
    maps = [row for row in rows if row.get("role") == "method"]
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
