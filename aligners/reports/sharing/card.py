"""The card of what is shared: what it is, what was measured and how, what it was fitted on, what it is not good for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from aligners.files.shared import LIBRARY
from aligners.fitting.outcomes import what_did_not_train
from aligners.reports.finished import FinishedRun
from aligners.reports.names import held_out_name, short_names, site_name, with_short_names
from aligners.reports.page.run import alt_text
from aligners.reports.report import Report, Row
from aligners.reports.sharing.models import is_local

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


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


TAGS = {"maps": "model-alignment", "universe": "model-alignment", "stitching": "model-stitching", "probes": "probing"}


PLACE = "FOLDER-OR-NAME"  # until it is uploaded


class Subject(NamedTuple):
    """What a card is of.

    Attributes:
        kind: such as `maps`.
        models: name, revision and fingerprint of each, with the names that others find them by.
        about: what config.json says of it.
        data: options of the data module.
        files: path within the folder -> content.
    """

    kind: str
    models: Sequence[Mapping[str, Any]]
    about: Mapping[str, Any]
    data: Mapping[str, Any]
    files: Mapping[str, bytes]


def card_text(shared: Subject, run: FinishedRun | None = None, license: str | None = None) -> str:
    """Write a card with the Hub's metadata.

    Args:
        shared: what it is of.
        run: with the report that its numbers come from; None: the card says that there are none.
        license: as the Hub names it; None: the card names none.
    """
    names = [str(model["name"]) for model in shared.models]
    said = short_names(names)
    place = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True)
    body = place.get_template("card.md.j2").render(
        kind=shared.kind,
        first=said[names[0]],
        last=said[names[-1]],
        all=", ".join(said.values()),
        models=_models(shared),
        place=PLACE,
        names=json.dumps(names),
        holds=_holds(shared),
        fitted=fitted_on(shared.data, {**(run.report.meta if run else {}), **shared.about}),
        limits=[] if run is None else limits(run.report),
        **_measured(shared, run),
    )
    return f"---\n{_metadata(shared, license)}---\n{body}"


def with_notice(card: str, notice: str) -> str:
    """A card with a notice below its title."""
    return re.sub(r"^(# .*\n)", lambda found: f"{found[1]}\n> **{notice}**\n", card, count=1, flags=re.MULTILINE)


def _metadata(shared: Subject, license: str | None) -> str:
    """What the Hub reads: library, tags, and the models and data that it knows, too."""
    known = [str(model["name"]) for model in shared.models if _on_hub(str(model["name"]))]
    source = str(shared.data.get("text", {}).get("source", ""))
    entries = {
        "library_name": LIBRARY, "tags": [LIBRARY, "safetensors", "interpretability", TAGS[shared.kind]],
        "license": license, "base_model": list(dict.fromkeys(known)), "datasets": [source] if _on_hub(source) else [],
    }  # fmt: skip
    return yaml.safe_dump({name: value for name, value in entries.items() if value}, sort_keys=False)


def _on_hub(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not is_local(name)


def _models(shared: Subject) -> list[dict[str, Any]]:
    sides = ["X", "Y"] if shared.kind == "maps" else [str(number) for number in range(len(shared.models))]
    return [{**model, "side": side, "said": _said(str(model["name"]))}
            for side, model in zip(sides, shared.models, strict=True)]  # fmt: skip


def _said(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})" if _on_hub(name) else f"`{name}`"


def _holds(shared: Subject) -> list[str]:
    """What is in the file of weights, a line each."""
    about = shared.about
    if "banks" in about:
        return [f"{name}: {bank['kind']}" for name, bank in about["banks"].items()]
    lines = []
    for route, maps in about["maps"].items():
        if maps:
            a, b = (shared.models[int(place)]["name"] for place in route.split("_"))
            listed = ", ".join(f"`{name}` ({kind})" for name, kind in maps.items())
            whole = shared.kind == "universe"
            sites = ", ".join(f"{i}:{j}" for i, j in dict.fromkeys(map(tuple, about["pairs"][route])))
            lines.append(f"{'All models' if whole else f'{a} → {b}'}, site pairs {sites}: {listed}")
    return [*lines, f"Component: {about.get('component', 'residual')}. Rows: {about.get('rows', 'tokens')}."]


def _measured(shared: Subject, run: FinishedRun | None) -> dict[str, Any]:
    """The parts of the card that come from a report."""
    if run is None:
        return {"measured": "", "findings": [], "figures": [], "headings": [], "rows": [], "below": "", "versions": ""}
    report, numbers = run.report, numbers_of(run.report)
    below = ["An interval in brackets is of 95 %."] if numbers.intervals else ["These numbers have no intervals."]
    below += [f"{numbers.left_out:,} further rows are in `report.json`."] if numbers.left_out else []
    versions: Mapping[str, str] = report.meta.get("versions", {})
    return {
        "measured": measured_on(run.kind, report.meta),
        "findings": list(report.sentences),
        "figures": _figures(shared.files),
        "headings": numbers.headings,
        "rows": numbers.rows,
        "below": " ".join([*below, "Floors and ceilings are rows of this table, by their role."]
                          if "role" in numbers.headings else below),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }  # fmt: skip


def _figures(files: Mapping[str, bytes]) -> Sequence[dict[str, str]]:
    """The figures of a folder, each with the words that its image carries for those who cannot see it."""
    return [{"path": name, "alt": alt_text(image)} for name, image in files.items() if name.endswith(".png")]
