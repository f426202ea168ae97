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
from aligners.reports.finished import FinishedRun
from aligners.reports.names import short_names
from aligners.reports.page.run import alt_text
from aligners.reports.sharing.limits import fitted_on, limits, measured_on, numbers_of
from aligners.reports.sharing.models import is_local

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
