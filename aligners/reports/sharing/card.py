"""The card of what is shared: what it is, what was measured and how, what it was fitted on, what it is not good for."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

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
from aligners.reports.report import Row, distinct, is_known
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
    environment = Environment(
        loader=FileSystemLoader(HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_in_markdown,
    )
    environment.filters |= {"form": format, "held_out_name": held_out_name, "on_hub": _on_hub}
    names = [str(model["name"]) for model in about["models"]]
    words = {
        "about": about,
        "read": {**(run.report.meta if run else {}), **about},
        "names": json.dumps(names),
        "short": list(short_names(names).values()),
        "place": PLACE,
        "run": run,
        "figures": {
            name: alt_text(image) for name, image in files.items() if name.endswith(".png")
        },
        **(_numbers(run.report.rows) | _failures(run.report.rows) if run else {}),
    }
    body = environment.get_template("card.md.j2").render({**about, **_package(), **words})
    source = str(about["data"].get("text", {}).get("source", ""))
    header = ModelCardData(
        base_model=list(dict.fromkeys(filter(_on_hub, names))) or None,
        datasets=[source] if _on_hub(source) else None,
        library_name=LIBRARY,
        license=license,
        tags=[LIBRARY, "safetensors", "interpretability", TAGS[about["kind"]]],
    )
    return f"---\n{header.to_yaml()}\n---\n{body}"


def with_notice(card: str, notice: str) -> str:
    """A card with a notice below its title."""
    return re.sub(
        r"^(# .*\n)",
        lambda found: f"{found[1]}\n> **{notice}**\n",
        card,
        count=1,
        flags=re.MULTILINE,
    )


def _in_markdown(value: Any) -> Any:
    return in_markdown(value) if isinstance(value, str) else value


def _package() -> dict[str, str | None]:
    """The installed version, and the address of the repository, where `pyproject.toml` has one."""
    about = metadata(LIBRARY)
    urls = dict(entry.split(", ", 1) for entry in about.get_all("Project-URL", []))
    return {"version": about["Version"], "repository": urls.get("Repository")}


def _on_hub(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not is_local(name)


def _failures(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What did not train, and which maps have partly memorised words or are at some site no better than the mean."""
    maps = [row for row in rows if row.get("role") == "method"]
    known = [row for row in maps if row.get("fvu_unseen") and row.get("fvu_seen")]
    return {
        "untrained": [line.removeprefix(f"{MARK} ") for line in what_did_not_train(maps)[1:]],
        "vocabularies": distinct(
            (r for r in known if memorised(r["fvu_seen"], r["fvu_unseen"])), "method"
        ),
        "poor": distinct((row for row in maps if (row.get("fvu") or 0) >= 1), "method"),
    }


def _numbers(rows: Sequence[Row]) -> dict[str, Any]:
    """The table: floors and ceilings stand among the methods, as their role says."""
    shown = with_short_names(rows)
    labels = {name: [_label(row, name) for row in shown] for name in LABELS}
    scores = list(dict.fromkeys(row["score_name"] for row in shown if row.get("score_name")))
    headings = VALUES | ({"score": scores[0]} if len(scores) == 1 else {})
    values = [name for name in VALUES if is_known(shown, name)]
    alone = len(set(labels["route"])) == 1  # a single route says nothing
    columns = {
        name: cells
        for name, cells in labels.items()
        if any(cells) and not (alone and name == "route")
    }
    for name in values:
        cells = (cell_of(row, name) for row in shown)
        columns[headings[name]] = [f"{cell.value} {cell.interval}".strip() for cell in cells]
    return {
        "headings": list(columns),
        "rows": list(zip(*columns.values(), strict=True))[:MOST_ROWS],
        "left_out": max(0, len(shown) - MOST_ROWS),
        "intervals": any(is_known(shown, f"{name}_low") for name in values),
    }


def _label(row: Row, name: str) -> str:
    if name == "route":
        return (
            f"{row['model_x']} → {row['model_y']}"
            if "model_x" in row
            else str(row.get("model", ""))
        )
    if name == "site" and row.get("site_x") is not None:
        return site_name((row["site_x"], row["site_y"]))
    return four_digits(row.get(name))
