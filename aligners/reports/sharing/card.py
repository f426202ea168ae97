"""The card of a shared folder: what it is, what was measured and how, what it was fitted on, and limits of its use."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from aligners.files.shared_folder import LIBRARY
from aligners.files.yaml_tables import table_beside
from aligners.fitting.training_status import MARK, what_did_not_train
from aligners.reports.escaping import in_markdown
from aligners.reports.finished_runs import FinishedRun
from aligners.reports.names import (
    four_digits,
    held_out_name,
    short_names,
    site_name,
    with_short_names,
)
from aligners.reports.page.run_page import alt_text, cell_of
from aligners.reports.report import Row, is_known
from aligners.reports.runs.injection_words import memorised
from aligners.reports.sharing.public_names import is_local

HERE = Path(__file__).parent
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TAGS = {
    "maps": "model-alignment",
    "universe": "model-alignment",
    "stitching": "model-stitching",
    "probes": "probing",
}
PLACE = "FOLDER-OR-NAME"  # until it is uploaded
MOST_ROWS = 80
COLUMNS = table_beside(__file__, "card.yaml")
LABELS, VALUES = COLUMNS["labels"], COLUMNS["values"]


def card_text(
    about: Row,
    files: Mapping[str, bytes],
    run: FinishedRun | None = None,
    license: str | None = None,
) -> str:
    """Write a card with the Hub's metadata.

    Args:
        about: what config.json says of what is shared: its `kind`, such as `maps`; name, revision and fingerprint of
            each of its `models`, with the names that others find them by; the options of its `data` module.
        files: path within the folder -> content.
        run: with the report that its numbers come from; None: the card says that there are none.
        license: as the Hub names it; None: the card names none.
    """
    names = [str(model["name"]) for model in about["models"]]
    figures = {}
    for name, content in files.items():
        if name.endswith(".png"):
            figures[name] = alt_text(content)
    words = {
        **about,
        **_package(),
        "about": about,
        "names": json.dumps(names),
        "short": list(short_names(names).values()),
        "place": PLACE,
        "run": run,
        "read": about,
        "figures": figures,
    }
    if run is not None:
        rows = run.report.rows
        words |= {
            "read": {**run.report.meta, **about},
            **_numbers(rows),
            **_failures(rows),
        }
    body = _template().render(words)
    source = str(about["data"].get("text", {}).get("source", ""))
    header = ModelCardData(
        base_model=list(dict.fromkeys(filter(_on_hub, names))) or None,
        datasets=[source] if _on_hub(source) else None,
        library_name=LIBRARY,
        license=license,
        tags=[LIBRARY, "safetensors", "interpretability", TAGS[about["kind"]]],
    )
    return f"---\n{header.to_yaml()}\n---\n{body}"


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_in_markdown,
    )
    environment.filters |= {
        "form": format,
        "held_out_name": held_out_name,
        "on_hub": _on_hub,
    }
    return environment.get_template("card.md.j2")


def _in_markdown(value: Any) -> Any:
    return in_markdown(value) if isinstance(value, str) else value


def with_notice(card: str, notice: str) -> str:
    """Return a card with a notice below its title."""
    title = re.search("^# .*\n", card, re.MULTILINE)
    if title is None:
        return card
    return f"{card[: title.end()]}\n> **{notice}**\n{card[title.end() :]}"


def _package() -> dict[str, str | None]:
    """Return the installed version, and the address of the repository, if `pyproject.toml` has one."""
    about = metadata(LIBRARY)
    urls = dict(entry.split(", ", 1) for entry in about.get_all("Project-URL", []))
    return {"version": about["Version"], "repository": urls.get("Repository")}


def _on_hub(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not is_local(name)


def _failures(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Say what did not train, and which maps have memorised words or are at some site no better than the mean."""
    maps = [row for row in rows if row.get("role") == "method"]
    untrained = [line.removeprefix(f"{MARK} ") for line in what_did_not_train(maps)[1:]]
    vocabularies, poor = [], []
    for row in maps:
        seen, unseen = row.get("fvu_seen"), row.get("fvu_unseen")
        if seen and unseen and memorised(seen, unseen):
            vocabularies.append(row["method"])
        if (row.get("fvu") or 0) >= 1:
            poor.append(row["method"])
    return {
        "untrained": untrained,
        "vocabularies": list(dict.fromkeys(vocabularies)),
        "poor": list(dict.fromkeys(poor)),
    }


def _numbers(rows: Sequence[Row]) -> dict[str, Any]:
    """Make the table of numbers, in which floors and ceilings are marked by their role."""
    shown = with_short_names(rows)
    columns: dict[str, list[str]] = {}
    for name in LABELS:
        cells = [_label(row, name) for row in shown]
        alone = name == "route" and len(set(cells)) == 1  # a single route says nothing
        if any(cells) and not alone:
            columns[name] = cells
    scores = {row["score_name"] for row in shown if row.get("score_name")}
    intervals = False
    for name, heading in VALUES.items():
        if not is_known(shown, name):
            continue
        if name == "score" and len(scores) == 1:
            (heading,) = scores
        columns[heading] = [_value(row, name) for row in shown]
        intervals |= is_known(shown, f"{name}_low")
    return {
        "headings": list(columns),
        "rows": list(zip(*columns.values(), strict=True))[:MOST_ROWS],
        "left_out": max(0, len(shown) - MOST_ROWS),
        "intervals": intervals,
    }


def _value(row: Row, name: str) -> str:
    cell = cell_of(row, name)
    return f"{cell.value} {cell.interval}".strip()


def _label(row: Row, name: str) -> str:
    if name == "route":
        if "model_x" in row:
            return f"{row['model_x']} → {row['model_y']}"
        return str(row.get("model", ""))
    if name == "site" and row.get("site_x") is not None:
        return site_name((row["site_x"], row["site_y"]))
    return four_digits(row.get(name))
