"""One meaning for a colour in all figures of a report, and colours that the colour-blind can tell apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from aligners.reports.drawing import COLOURS
from aligners.reports.study.contents import BoxPanel, Figure, LinePanel, Meaning

__all__ = ["Look", "Palette"]

BLUE, VERMILION, *OTHERS = COLOURS  # Okabe and Ito's
STAGES = {"random": "#7F7F7F", "pretrained": BLUE, "finetuned": VERMILION, "None": BLUE}
MARKERS = (("o", "circle"), ("s", "square"), ("D", "diamond"), ("^", "triangle-up"), ("X", "x"))
DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))


class Look(NamedTuple):
    """How a series is drawn.

    Attributes:
        colour: as `#RRGGBB`.
        marker: as matplotlib and as plotly name it.
        dash: likewise.
    """

    colour: str
    marker: tuple[str, str]
    dash: tuple[str, str]


class Palette:
    """Gives each meaning a look of its own: stages always the same, everything else in the order of the report.

    Where there are more meanings than colours, colours come again with another marker and dash.

    Args:
        figures: of the whole report.
    """

    def __init__(self, figures: Iterable[Figure]) -> None:
        self._looks: dict[Meaning, Look] = {}
        for figure in figures:
            for panel in figure.panels:
                for series in panel.series if isinstance(panel, (BoxPanel, LinePanel)) else ():
                    self._add(series.meaning)

    def look(self, meaning: Meaning, number: int = 0) -> Look:
        """How to draw what has this meaning: of several, the first as it is, others with another marker and dash."""
        look = self._looks[meaning]
        if number == 0:
            return look
        marker, dash = MARKERS.index(look.marker) + number, DASHES.index(look.dash) + number
        return look._replace(marker=MARKERS[marker % len(MARKERS)], dash=DASHES[dash % len(DASHES)])

    def _add(self, meaning: Meaning) -> None:
        if meaning in self._looks:
            return
        kind, name = meaning
        if kind == "stage" and name in STAGES:
            place = list(STAGES).index(name) % len(MARKERS)
            self._looks[meaning] = Look(STAGES[name], MARKERS[place], DASHES[0])
            return
        place = sum(kind != "stage" for kind, _ in self._looks)
        again = place // len(OTHERS)
        look = Look(OTHERS[place % len(OTHERS)], MARKERS[(place + again) % len(MARKERS)], DASHES[again % len(DASHES)])
        self._looks[meaning] = look
