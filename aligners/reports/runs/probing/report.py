"""The report on probes: each score beside its controls by layer, and how far probes compress labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from aligners.reports.drawing import ABREAST, MODEL_COLOURS, PANEL, dress, line_look, lines_by_site, panels
from aligners.reports.names import short_names, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, largest, mean, where
from aligners.reports.runs.probing.figures import (
    BASELINES,
    MEASURES,
    Line,
    layers_figure,
    lines_of,
    ranks_figure,
    ranks_of,
    site_word,
    sites_of,
    trees_figure,
)  # fmt: skip
from aligners.reports.screen import TitledTable, site_table
from aligners.reports.templates import sentences

KINDS: dict[str, tuple[str, bool]] = {  # what is said -> source, and whether it is asked the control task
    "model": ("model", False),
    "untrained": ("untrained", False),
    "control task": ("model", True),
}


def report(
    meta: Row,
    rows: Sequence[Row],
    mixes: Sequence[Row] = (),
    trees: Sequence[Row] = (),
    codelengths: Sequence[Row] = (),
    portions: Sequence[Row] = (),
) -> Report:
    """Make the report from one row for each model, task, source, site and rank.

    Args:
        meta: what holds for all rows.
        rows: of `ProbeExperiment`.
        mixes: the weight of each layer in each learned mix.
        trees: sentences with their edges and those that a distance probe finds.
        codelengths: bits of all labels, of each edge probe and control.
        portions: bits of a label in each portion, likewise.
    """
    shown, codes = with_short_names(rows), with_short_names(codelengths)
    names = short_names(row["model"] for row in rows)
    figures: dict[str, Callable[[], Figure]] = {"probing": partial(layers_figure, shown)}
    if len(ranks_of(shown)) > 1:
        figures["probing_ranks"] = partial(ranks_figure, shown)
    if trees:
        figures["probing_trees"] = partial(trees_figure, [row | {"model": names[row["model"]]} for row in trees])
    if codelengths:
        figures["probing_codes"] = partial(codes_figure, codes, with_short_names(portions))
    models = grouped(shown, "model")
    about = {"models": list(models), "best": list(_best(shown)), "uninformed": _uninformed(shown)}
    said = [*sentences("probing", meta=meta, rows=shown, **about), *codes_in_words(codes, shown)]
    screen = [*(_table(own, model) for model, own in models.items()), *codes_tables(codes)]
    tables = {"mixes": mixes, "trees": trees, "codelengths": codelengths, "portions": portions}
    return Report("probing", meta, rows, tables=tables, figures=figures, screen=screen, sentences=said)


def _table(rows: Sequence[Row], model: str) -> TitledTable:
    """Make the table of a model: a line for each score and control, sites across."""
    sites = sites_of(rows)
    names = [site_word(site) for site in sites]
    table = site_table(f"{model}: what probes find, by layer", ["task", "score"], ["baseline"], {"": names})
    for task, own in grouped(rows, "task").items():
        floor = next(row for row in own if row["source"] in BASELINES)
        ranks = ranks_of(own)
        for rank in ranks:
            here = [row for row in own if row["rank"] == rank and row["source"] not in BASELINES]
            for line in lines_of(here, sites):
                said = f"{line.said}, rank {rank}" if len(ranks) > 1 else line.said
                least = _cell(floor, line) if line.said in MEASURES[own[0]["probe"]].values() else ""
                table.add_row(task, said, least, *(_cell(row, line) for row in line.cells))
    return table


def _cell(row: Row | None, line: Line) -> str:
    if row is None or row[line.column] is None:
        return ""
    value = f"{100 * row[line.column]:.1f}"
    low, high = (row.get(f"{line.column}_{end}") for end in ("low", "high"))
    return value if not line.interval or low is None or high is None else f"{value} ±{50 * (high - low):.1f}"


# ---------------------------------------------------------------------- sentences


def _best(rows: Sequence[Row]) -> Iterator[Row]:
    """For each model and task: where it is read best, and how that compares with its controls."""
    for model, task, probe in distinct(rows, "model", "task", "probe"):
        own = [row for row in where(rows, model=model, task=task) if row["score"] is not None]
        if read := where(own, source="model"):
            yield {
                "model": model,
                "measure": next(iter(MEASURES[probe].values())),
                "best": max(read, key=lambda row: row["score"]),
                "lexical": next((row["score"] for row in where(read, site=0)), None),
                "untrained": largest(where(own, source="untrained"), "score"),
            }


def _uninformed(rows: Sequence[Row]) -> Iterator[Row]:
    """For each model, task and measure: the probes that are no better than what is said without any state."""
    for model, task, probe in distinct(rows, "model", "task", "probe"):
        own = where(rows, model=model, task=task)
        floor = next(row for row in own if row["source"] in BASELINES)
        for column, measure in MEASURES[probe].items():
            least = floor[column] or 0.0
            read = [row for row in where(own, source="model") if row[column] is not None and row[column] <= least]
            low = [{**row, "score": row[column]} for row in read]
            if low:
                yield {"model": model, "task": task, "measure": measure, "floor": floor, "least": least, "low": low}


def _of(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if (row["source"], row["control"]) == KINDS[kind]]


def codes_tables(rows: Sequence[Row]) -> Iterator[TitledTable]:
    """A table for each model: compression of each task, sites across."""
    for model, of_model in grouped(rows, "model").items():
        sites = sites_of(of_model)
        title = f"{model}: uniform code over codelength, by layer"
        table = site_table(title, ["task", "sent by"], ["by frequencies"], {"": [site_word(site) for site in sites]})
        for task, own in grouped(of_model, "task").items():
            for kind in KINDS:
                cells = {
                    row[
                        "site"
                    ]: f"{row['compression']:.2f} ±{(row['compression_high'] - row['compression_low']) / 2:.2f}"
                    for row in _of(own, kind)
                }
                if cells:
                    least = "" if kind == "control task" else f"{_by_frequencies(own):.2f}"
                    table.add_row(task, kind, least, *(cells.get(site, "") for site in sites))
        yield table


def codes_figure(rows: Sequence[Row], portions: Sequence[Row]) -> Figure:
    """Draw, for each model and task, compression by site, and below it bits a target by portion."""
    groups = list(grouped(rows, "model", "task").items())[:ABREAST]
    several = len({model for (model, _), _ in groups}) > 1
    figure, axes = panels(2 * len(groups), len(groups), PANEL, (2.2, 0.9))
    for place, ((model, task), own) in enumerate(groups):
        axes[place].set_title(f"{model}, {task}" if several else task, fontsize=10)
        _compressions(axes[place], own)
        sent = _of(where(portions, model=model, task=task), "model")
        _losses_by_portion(axes[len(groups) + place], sent)
    axes[0].set_ylabel("uniform code over codelength", fontsize=8)
    axes[len(groups)].set_ylabel("bits a target", fontsize=8)
    dress(figure, axes, "", "")
    return figure


def _compressions(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw compression by site: a line for the model, its untrained twin, and the control task."""
    sites = sites_of(rows)
    for number, kind in enumerate(KINDS):
        here = {row["site"]: row for row in _of(rows, kind)}
        look = line_look(number, number, ("-", "--", ":")[number], MODEL_COLOURS)
        lines_by_site(axis, [(kind, look, [here.get(site) for site in sites])], "compression")
    axis.axhline(_by_frequencies(rows), label="by frequencies", color="0.6", linestyle=":", zorder=0)
    axis.set_xticks(range(len(sites)), [site_word(site) for site in sites])
    axis.set_xlabel("site (layer)", fontsize=8)


def _losses_by_portion(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw bits a target by portion, a line for each site."""
    for number, site in enumerate(sites_of(rows)):
        sent = grouped(where(rows, site=site), "share")
        losses = [mean(sent[share], "bits_a_target") for share in sorted(sent)]
        look = {**line_look(number, number + 3, "-", MODEL_COLOURS), "markersize": 3, "linewidth": 1}
        axis.plot(100 * np.array(sorted(sent)), losses, label="mix" if site is None else f"site {site}", **look)
    axis.set_xscale("log")
    axis.set_xlabel("end of the portion, %", fontsize=8)


def _by_frequencies(rows: Sequence[Row]) -> float:
    """Compression of a code that knows the frequencies of a task's labels alone."""
    row = _of(rows, "model")[0]
    return row["uniform_bits"] / row["frequency_bits"]


def codes_in_words(rows: Sequence[Row], scores: Sequence[Row]) -> list[str]:
    """Say which site has the shortest code, and whether codes order the sites as scores do.

    Args:
        rows: of codelengths.
        scores: the report's rows, with F1 on held-out sentences.
    """
    tasks = []
    for (model, task), own in grouped(rows, "model", "task").items():
        read = [row for row in _of(own, "model") if row["site"] is not None]
        best = max(read, key=lambda row: row["compression"])
        control = next((row["compression"] for row in _of(own, "control task") if row["site"] == best["site"]), None)
        known = {row["site"]: row["score"] for row in where(scores, model=model, task=task, source="model")}
        both = [(row["site"], row["compression"], known[row["site"]]) for row in read
                if known.get(row["site"]) is not None]  # fmt: skip
        orders = [[site for site, *_ in sorted(both, key=lambda entry: -entry[place])] for place in (1, 2)]
        rank = spearmanr(*list(zip(*both, strict=True))[1:]).statistic if len(both) > 2 else None
        tasks.append({"task": task, "best": best, "control": control, "by_frequencies": _by_frequencies(own),
                      "orders": orders, "rank": rank})  # fmt: skip
    return sentences("codelengths", tasks=tasks, several=len(distinct(rows, "model")) > 1)
