"""Description lengths in the report on probes: how far each probe compresses labels, and how fast it learns them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from aligners.reports.drawing import ABREAST, MODEL_COLOURS, PANEL, Look, dress, line_look, lines_by_site, panels
from aligners.reports.report import Row
from aligners.reports.screen import TitledTable, site_table

__all__ = ["codes_figure", "codes_in_words", "codes_tables"]

KINDS: dict[str, tuple[str, bool]] = {  # what is said -> source, and whether it is asked the control task
    "model": ("model", False),
    "untrained": ("untrained", False),
    "control task": ("model", True),
}


def _of(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if (row["source"], row["control"]) == KINDS[kind]]


def _groups(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """Model, task, and the rows of both."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["task"]), []).append(row)
    return [(*key, own) for key, own in found.items()]


def _sites(rows: Sequence[Row]) -> list[int | None]:
    sites = {row["site"] for row in rows}
    return sorted(site for site in sites if site is not None) + ([None] if None in sites else [])


def _name(site: int | None) -> str:
    return "mix" if site is None else str(site)


def codes_tables(rows: Sequence[Row]) -> Iterator[TitledTable]:
    """A table for each model: compression of each task, sites across."""
    for model in dict.fromkeys(row["model"] for row in rows):
        sites = _sites([row for row in rows if row["model"] == model])
        title = f"{model}: uniform code over codelength, by layer"
        table = site_table(title, ["task", "sent by"], ["by frequencies"], {"": [_name(site) for site in sites]})
        for _, task, own in _groups([row for row in rows if row["model"] == model]):
            for kind in KINDS:
                here = {row["site"]: row for row in _of(own, kind)}
                if here:
                    least = "" if kind == "control task" else f"{_by_frequencies(own):.2f}"
                    table.add_row(task, kind, least, *(_cell(here.get(site)) for site in sites))
        yield table


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['compression']:.2f} ±{(row['compression_high'] - row['compression_low']) / 2:.2f}"


def codes_figure(rows: Sequence[Row], portions: Sequence[Row]) -> Figure:
    """Draw, for each model and task, compression by site, and below it bits a target by portion."""
    groups = _groups(rows)[:ABREAST]
    several = len({model for model, _, _ in groups}) > 1
    figure, axes = panels(2 * len(groups), len(groups), PANEL, (2.2, 0.9))
    for place, (model, task, own) in enumerate(groups):
        axes[place].set_title(f"{model}, {task}" if several else task, fontsize=10)
        _compressions(axes[place], own)
        sent = [row for row in portions if (row["model"], row["task"]) == (model, task)]
        _losses_by_portion(axes[len(groups) + place], _of(sent, "model"))
    axes[0].set_ylabel("uniform code over codelength", fontsize=8)
    axes[len(groups)].set_ylabel("bits a target", fontsize=8)
    dress(figure, axes, "", "")
    return figure


def _compressions(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw compression by site: a line for the model, its untrained twin, and the control task."""
    sites = _sites(rows)
    for number, kind in enumerate(KINDS):
        here = {row["site"]: row for row in _of(rows, kind)}
        look = line_look(number, number, ("-", "--", ":")[number], MODEL_COLOURS)
        lines_by_site(axis, [(kind, look, [here.get(site) for site in sites])], "compression")
    axis.axhline(_by_frequencies(rows), label="by frequencies", color="0.6", linestyle=":", zorder=0)
    axis.set_xticks(range(len(sites)), [_name(site) for site in sites])
    axis.set_xlabel("site (layer)", fontsize=8)


def _losses_by_portion(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw bits a target by portion, a line for each site."""
    for number, site in enumerate(_sites(rows)):
        shares, losses = _losses([row for row in rows if row["site"] == site])
        axis.plot(100 * shares, losses, label="mix" if site is None else f"site {site}", **_thin(number))
    axis.set_xscale("log")
    axis.set_xlabel("end of the portion, %", fontsize=8)


def _by_frequencies(rows: Sequence[Row]) -> float:
    """Compression of a code that knows the frequencies of a task's labels alone."""
    row = _of(rows, "model")[0]
    return row["uniform_bits"] / row["frequency_bits"]


def _thin(number: int) -> Look:
    return {**line_look(number, number + 3, "-", MODEL_COLOURS), "markersize": 3, "linewidth": 1}


def _losses(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the portions, and the bits of a target in each, mean over seeds."""
    shares = sorted({row["share"] for row in rows})
    losses = [np.mean([row["bits_a_target"] for row in rows if row["share"] == share]) for share in shares]
    return np.array(shares), np.array(losses)


def codes_in_words(rows: Sequence[Row], scores: Sequence[Row]) -> Iterator[str]:
    """Say which site has the shortest code, and whether codes order the sites as scores do.

    Args:
        rows: of codelengths.
        scores: the report's rows, with F1 on held-out sentences.
    """
    for model, task, own in _groups(rows):
        read = [row for row in _of(own, "model") if row["site"] is not None]
        best = max(read, key=lambda row: row["compression"])
        said = f"{task}: labels are compressed most at site {best['site']}, {best['compression']:.2f} times"
        control = [row["compression"] for row in _of(own, "control task") if row["site"] == best["site"]]
        if control:
            said += f" (control task {control[0]:.2f})"
        said += f"; a code that knows their frequencies alone has {_by_frequencies(own):.2f}."
        yield f"{model}: {said}" if len({row["model"] for row in rows}) > 1 else said
        yield from _ordering(task, read, [row for row in scores if (row["model"], row["task"]) == (model, task)])


def _ordering(task: str, read: Sequence[Row], scores: Sequence[Row]) -> Iterator[str]:
    """Compare the order of the sites by codelength with that by score."""
    known = {row["site"]: row["score"] for row in scores if row["source"] == "model" and row["score"] is not None}
    both = [(row["compression"], known[row["site"]]) for row in read if row["site"] in known]
    if len(both) < 3:
        return
    by_code, by_score = zip(*both, strict=True)
    orders = [np.argsort(np.negative(each)).tolist() for each in (by_code, by_score)]
    if orders[0] == orders[1]:
        yield f"{task}: codelengths order the sites as F1 does."
    else:
        named = [", ".join(str(read[place]["site"]) for place in order) for order in orders]
        rank = spearmanr(by_code, by_score).statistic
        said = f"{task}: sites from best to worst by codelength {named[0]}, by F1 {named[1]}"
        yield f"{said} (rank correlation {rank:.2f})."
