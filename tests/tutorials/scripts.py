"""Tutorials as scripts and as notebooks: their cells, their words, and the numbers that the notebooks show."""

import json
import re
from typing import Any, NamedTuple

from tests.processes import ROOT

TUTORIALS = sorted(path.stem for path in (ROOT / "tutorials").glob("*.py"))
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Cell(NamedTuple):
    """A cell: its kind, its tags, its source without what comments it out."""

    kind: str
    tags: tuple[str, ...]
    source: str


def cells(name: str) -> list[Cell]:
    """The cells of a script in the percent format."""
    script = (ROOT / "tutorials" / f"{name}.py").read_text(encoding="utf-8")
    _, *parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)
    return [_cell(marker, source.strip("\n")) for marker, source in zip(parts[::2], parts[1::2], strict=True)]


def notebook(name: str) -> dict[str, Any]:
    """The notebook with the outputs."""
    return json.loads((ROOT / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8"))


def outputs(name: str) -> list[dict[str, Any]]:
    """What the notebook shows, cell by cell."""
    return [output for cell in notebook(name)["cells"] for output in cell.get("outputs", [])]


def printed(name: str) -> dict[str, list[float]]:
    """The numbers of each printed line, by what stands before the first of them; of a number alone, by that."""
    lines = "".join("".join(output["text"]) for output in outputs(name) if "text" in output).splitlines()
    rows: dict[str, list[float]] = {}
    for line in lines:
        values = [float(value.replace(",", "")) for value in NUMBER.findall(line)]
        label = " ".join(NUMBER.split(line)[0].strip(" :[").split()) or (NUMBER.findall(line) or [""])[0]
        rows.setdefault(label, []).extend(values)
    return rows


def words(name: str, heading: str) -> list[str]:
    """The sentences of the section below a heading."""
    text = "\n\n".join(cell.source for cell in cells(name) if cell.kind == "markdown")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    plain = re.sub(r"\s+", " ", re.sub(r"^\* ", "", section, flags=re.MULTILINE)).strip()
    return re.split(r"(?<=[.:?]) (?=[A-Z*`])", plain)


def _cell(marker: str, source: str) -> Cell:
    tags = re.search(r"tags=(\[.*?\])", marker)
    kind = "markdown" if "[markdown]" in marker else "code"
    if kind == "markdown":
        source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
    return Cell(kind, tuple(json.loads(tags[1])) if tags else (), source)
