"""Figures in PNG files, which carry what there is to see in words."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

__all__ = ["alt_text", "save_figure", "size"]

ENTRY = "Description"  # of the PNG's text
MOST_NAMES = 8


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, with its description."""
    figure.savefig(path, dpi=130, format="png", metadata={ENTRY: _described(figure)})


def alt_text(image: bytes) -> str:
    """The description that an image carries; images of earlier versions carry none."""
    with Image.open(io.BytesIO(image)) as found:
        return str(found.info.get(ENTRY) or "A figure without a description: its values are in the tables.")


def size(image: bytes) -> tuple[int, int]:
    """Width and height of an image in pixels."""
    with Image.open(io.BytesIO(image)) as found:
        return found.size


def _described(figure: Figure) -> str:
    """Say what a figure shows: its panels, what its axes measure, and what is drawn."""
    panels = [axis for axis in figure.axes if axis.has_data() and axis.get_label() != "<colorbar>"]
    titles = list(dict.fromkeys(title for axis in panels if (title := axis.get_title().replace("\n", " "))))
    up, across = (_listed([figure_label(), *(label(axis) for axis in panels)]) for figure_label, label in (
        (figure.get_supylabel, Axes.get_ylabel), (figure.get_supxlabel, Axes.get_xlabel),
    ))  # fmt: skip
    drawn = _listed([text.get_text() for legend in _legends(figure) for text in legend])
    kind = "Heat map" if any(axis.images or (axis.collections and not axis.lines) for axis in panels) else "Chart"
    count = "" if len(panels) == 1 else f" of {len(panels)} panels"
    named = {"vertical axis": up, "horizontal axis": across, "drawn": drawn}
    said = [f"{kind}{count}{f' ({_listed(titles)})' if titles else ''}"]
    said += [f"{name}: {what}" for name, what in named.items() if what]
    return "; ".join(said) + "."


def _legends(figure: Figure) -> list[list[Text]]:
    found = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
    return [legend.get_texts() for legend in found if legend is not None]


def _listed(names: Sequence[str]) -> str:
    every = list(dict.fromkeys(name.replace("\n", " ") for name in names if name))
    more = len(every) - MOST_NAMES
    return ", ".join(every[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
