"""The report on probes: each score beside its controls by layer, and how far probes compress labels."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from textwrap import fill
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc
from scipy.stats import spearmanr

from aligners.reports import drawing
from aligners.reports.names import WORDS, with_interval, with_short_names
from aligners.reports.report import Report, Row, distinct, grouped, mean, number, where
from aligners.reports.screen import SiteTable
from aligners.reports.templates import sentences

BASELINES = ("majority", "word order")
MEASURES = WORDS["probing"]  # probe -> column of its scores -> what it is called
CODES = WORDS["codes"]  # what is sent by a code -> source, and whether it is the control task
MOST_ABREAST = 3
WIDTH, LETTERS = 0.62, 9  # inches a word takes, and letters of a note that this has room for
RIGHT, WRONG = drawing.COLOURS[2], drawing.COLOURS[1]


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
        rows: the rows.
        mixes: the weight of each layer in a learned mix.
        trees: sentences with their edges and those that a distance probe finds.
        codelengths: bits of all labels, of each edge probe and control.
        portions: bits of a label in each portion, likewise.
    """
    shown, codes = with_short_names(rows), with_short_names(codelengths)
    figures: dict[str, Callable[[], Figure]] = {"probing": partial(layers_figure, shown)}
    if len(_ranks(shown)) > 1:
        figures["probing_ranks"] = partial(ranks_figure, shown)
    if trees:
        figures["probing_trees"] = partial(trees_figure, with_short_names(trees))
    if codelengths:
        figures["probing_codes"] = partial(codes_figure, codes, with_short_names(portions))
    findings = [*sentences("probing", meta=meta, rows=shown), *codes_in_words(codes, shown)]
    screen = [
        *(_table(part, model) for model, part in grouped(shown, "model").items()),
        *codes_tables(codes),
    ]
    tables = {"mixes": mixes, "trees": trees, "codelengths": codelengths, "portions": portions}
    return Report(
        "probing", meta, rows, tables=tables, figures=figures, screen=screen, sentences=findings
    )


# ---------------------------------------------------------------------- rows


def _word(site: int | None) -> str:
    """A layer for readers; None is a learned mix of all."""
    return "mix" if site is None else str(site)


def _of_states(rows: Iterable[Row]) -> list[Row]:
    """The rows of probes, without the baselines."""
    return [row for row in rows if row["source"] not in BASELINES]


def _baseline(rows: Iterable[Row]) -> Row:
    return next(row for row in rows if row["source"] in BASELINES)


def _sites(rows: Sequence[Row]) -> list[int | None]:
    """The layers that any probe reads, then None if there are mixes."""
    return sorted(distinct(_of_states(rows), "site"), key=lambda site: (site is None, site))


def _ranks(rows: Iterable[Row]) -> list[int | None]:
    """The ranks of structural probes, ascending; None stands for full rank."""
    return sorted((rank for rank in distinct(rows, "rank") if rank is not None), key=int) or [None]


def _measures(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Task, column and name of every score."""
    tasks = distinct(rows, "task", "probe")
    return [
        (task, column, name) for task, probe in tasks for column, name in MEASURES[probe].items()
    ]


class Line(NamedTuple):
    """A line of the table, or of a panel of the figure.

    Attributes:
        name: what it shows.
        column: of the rows, from which it is taken.
        cells: a row for each site, None where there is none.
    """

    name: str
    column: str
    cells: Sequence[Row | None]


def _lines(rows: Sequence[Row], sites: Sequence[int | None]) -> list[Line]:
    """The lines of one model, task and rank: what is read of the model, and the controls.

    Args:
        rows: of that model, task and rank.
        sites: across.
    """
    trained, untrained = (
        {row["site"]: row for row in where(rows, source=name)} for name in ("model", "untrained")
    )
    lines = []
    for column, name in MEASURES[rows[0]["probe"]].items():
        lines.append(Line(name, column, [trained.get(site) for site in sites]))
        if untrained:
            lines.append(
                Line(f"{name}, untrained", column, [untrained.get(site) for site in sites])
            )
    controls = [
        row if row and row["control"] is not None else None for row in map(trained.get, sites)
    ]
    if any(controls):
        lines += [
            Line("control task", "control", controls),
            Line("selectivity", "selectivity", controls),
        ]
    return lines


# ---------------------------------------------------------------------- tables


def _table(rows: Sequence[Row], model: str) -> SiteTable:
    """Make the table of a model: a line for each score and control, sites across."""
    sites = _sites(rows)
    table = SiteTable(
        f"{model}: what probes find, by layer",
        ["task", "score"],
        ["baseline"],
        {"": map(_word, sites)},
    )
    for task, task_rows in grouped(rows, "task").items():
        baseline, ranks = _baseline(task_rows), _ranks(task_rows)
        for rank in ranks:
            for name, column, cells in _lines(where(_of_states(task_rows), rank=rank), sites):
                least = (
                    _percent(baseline, column)
                    if name in MEASURES[baseline["probe"]].values()
                    else ""
                )
                heading = f"{name}, rank {rank}" if len(ranks) > 1 else name
                table.add_row(task, heading, least, *(_percent(row, column) for row in cells))
    return table


def _percent(row: Row | None, column: str) -> str:
    return "" if row is None else with_interval(row, column, ".1f", 100)


def codes_tables(rows: Sequence[Row]) -> Iterator[SiteTable]:
    """A table for each model: compression of each task, sites across."""
    for model, of_model in grouped(rows, "model").items():
        sites = _sites(of_model)
        title = f"{model}: uniform code over codelength, by layer"
        table = SiteTable(title, ["task", "sent by"], ["by frequencies"], {"": map(_word, sites)})
        for task, task_rows in grouped(of_model, "task").items():
            for name, kind in CODES.items():
                if cells := {
                    row["site"]: with_interval(row, "compression", ".2f")
                    for row in where(task_rows, **kind)
                }:
                    least = "" if kind["control"] else f"{_by_frequencies(task_rows):.2f}"
                    table.add_row(task, name, least, *(cells.get(site, "") for site in sites))
        yield table


# ---------------------------------------------------------------------- figures


def layers_figure(rows: Sequence[Row]) -> Figure:
    """Draw every score by layer with its controls, a panel for each task and measure."""
    shown = _measures(rows)
    figure, axes = drawing.panels(len(shown), MOST_ABREAST, drawing.PANEL, (2.2, 0.8))
    for axis, (task, column, name) in zip(axes, shown, strict=True):
        task_rows = where(rows, task=task)
        drawn = list(_drawn(task_rows, distinct(rows, "model"), column))
        for own in (column, "control"):  # which has no interval
            lines = [(label, look, line.cells) for label, look, line in drawn if line.column == own]
            drawing.lines_by_site(axis, lines, own, 100)
        _mark_level(axis, _baseline(task_rows)[column], "baseline", 100)
        drawing.name_sites(axis, f"{task}: {name}", map(_word, _sites(task_rows)))
    drawing.dress(figure, axes, "site (layer)", "score, in hundredths")
    return figure


def _drawn(
    rows: Sequence[Row], models: Sequence[str], column: str
) -> Iterator[tuple[str, drawing.Look, Line]]:
    """The lines of a panel: the colour says which model, the line what was read."""
    for m, model in enumerate(models):
        model_rows = where(_of_states(rows), model=model)
        for line in _lines(where(model_rows, rank=_ranks(model_rows)[-1]), _sites(rows)):
            if line.column == column or (line.column, column) == ("control", "score"):
                place = 2 if line.column == "control" else int(line.name.endswith("untrained"))
                kind = ("trained", "untrained", "control task")[place]
                colour, dashes = m if len(models) > 1 else place, ("-", "--", ":")[place]
                look = drawing.line_look(colour, place, dashes, drawing.MODEL_COLOURS)
                yield f"{model}, {kind}" if len(models) > 1 else kind, look, line


def _mark_level(axis: Axes, height: float | None, name: str, scale: float = 1) -> None:
    if height is not None:
        axis.axhline(scale * height, label=name, color="0.6", linestyle=":", zorder=0)


def ranks_figure(rows: Sequence[Row]) -> Figure:
    """Draw the scores of structural probes by rank, a line for each site of each model."""
    shown = _measures(row for row in rows if row["probe"] != "edge")
    figure, axes = drawing.panels(len(shown), MOST_ABREAST, drawing.PANEL, (2.2, 0.8))
    for axis, (task, column, name) in zip(axes, shown, strict=True):
        task_rows = where(rows, task=task, source="model")
        ranks = _ranks(task_rows)
        for place, ((model, site), line) in enumerate(grouped(task_rows, "model", "site").items()):
            scores = {row["rank"]: 100 * number(row[column]) for row in line}
            look = drawing.line_look(place, place, "-", drawing.MODEL_COLOURS)
            axis.plot(
                range(len(ranks)),
                [scores[rank] for rank in ranks],
                label=f"{model}, site {site}",
                **look,
            )
        axis.set_xticks(range(len(ranks)), map(str, ranks))
        axis.set_title(f"{task}: {name}", fontsize=10)
    drawing.dress(figure, axes, "rank of the probe", "score, in hundredths")
    return figure


def trees_figure(trees: Sequence[Row]) -> Figure:
    """Draw sentences with the edges of their trees above and those that a probe finds below."""
    longest = max(len(row["words"].split()) for row in trees)
    figure, axes = drawing.panels(len(trees), 1, (WIDTH * longest, 2.4), (0.4, 0.3))
    for axis, row in zip(axes, trees, strict=True):
        _tree(axis, row)
        axis.set_xlim(-0.7, longest - 0.3)
    note = "above: the tree, pale where punctuation does not count; below: what the probe finds, right edges green"
    figure.supxlabel(fill(note, max(30, LETTERS * longest)), fontsize=9)
    return figure


def _tree(axis: Axes, row: Row) -> None:
    every, counted, guess = (_edges(row[name]) for name in ("edges", "counted", "found"))
    for place, word in enumerate(row["words"].split()):
        axis.text(place, 0, word, ha="center", va="center", fontsize=8)
    for edges, side, colour in (
        (counted, 1, "0.3"), (every - counted, 1, "0.8"), (guess & counted, -1, RIGHT), (guess - counted, -1, WRONG),
    ):  # fmt: skip
        for first, last in edges:
            size = last - first, 1.1 * (last - first) ** 0.8
            ends = {"theta1": 0, "theta2": 180} if side > 0 else {"theta1": 180, "theta2": 360}
            axis.add_patch(Arc(((first + last) / 2, side * 0.35), *size, color=colour, **ends))
    tall = max(0.35 + 0.6 * (last - first) ** 0.8 for first, last in every | counted | guess)
    axis.set_ylim(-tall, tall)
    axis.set_title(
        f"{row['model']}, site {row['layer']}: {len(counted & guess)} of {len(counted)} edges",
        fontsize=9,
    )
    axis.set_axis_off()


def _edges(written: str) -> set[tuple[int, int]]:
    return {
        (int(first), int(last))
        for first, _, last in (edge.partition("-") for edge in written.split())
    }


def codes_figure(rows: Sequence[Row], portions: Sequence[Row]) -> Figure:
    """Draw, for each model and task, compression by site, and below it bits a target by portion."""
    groups = list(grouped(rows, "model", "task").items())[: drawing.ABREAST]
    several = len({model for (model, _), _ in groups}) > 1
    figure, axes = drawing.panels(2 * len(groups), len(groups), drawing.PANEL, (2.2, 0.9))
    for place, ((model, task), panel) in enumerate(groups):
        _compressions(axes[place], panel, f"{model}, {task}" if several else task)
        _losses_by_portion(
            axes[len(groups) + place], where(portions, model=model, task=task, **CODES["model"])
        )
    axes[0].set_ylabel("uniform code over codelength", fontsize=8)
    axes[len(groups)].set_ylabel("bits a target", fontsize=8)
    drawing.dress(figure, axes, "", "")
    return figure


def _compressions(axis: Axes, rows: Sequence[Row], title: str) -> None:
    """Draw compression by site: a line for the model, its untrained twin, and the control task."""
    for place, (name, kind) in enumerate(CODES.items()):
        here = {row["site"]: row for row in where(rows, **kind)}
        look = drawing.line_look(place, place, ("-", "--", ":")[place], drawing.MODEL_COLOURS)
        drawing.lines_by_site(
            axis, [(name, look, [here.get(site) for site in _sites(rows)])], "compression"
        )
    _mark_level(axis, _by_frequencies(rows), "by frequencies")
    drawing.name_sites(axis, title, map(_word, _sites(rows)))
    axis.set_xlabel("site (layer)", fontsize=8)


def _losses_by_portion(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw bits a target by portion, a line for each site."""
    sites = _sites(rows)
    for place, site in enumerate(sites):
        losses = {
            share: mean(own, "bits_a_target")
            for share, own in grouped(where(rows, site=site), "share").items()
        }
        shares = sorted(losses)
        deep = {
            "color": mpl.colormaps["viridis"](0.9 * place / len(sites))
        }  # the deeper, the brighter
        look = {**drawing.line_look(place, place + 3, "-"), **deep, "markersize": 3, "linewidth": 1}
        name = "mix" if site is None else f"site {site}"
        axis.plot(100 * np.array(shares), [losses[share] for share in shares], label=name, **look)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("end of the portion, %", fontsize=8)


def _by_frequencies(rows: Sequence[Row]) -> float:
    """Compression of a code that knows the frequencies of a task's labels alone."""
    row = where(rows, **CODES["model"])[0]
    return row["uniform_bits"] / row["frequency_bits"]


# ---------------------------------------------------------------------- sentences


def codes_in_words(rows: Sequence[Row], scores: Sequence[Row]) -> list[str]:
    """Say which site has the shortest code, and whether codes order the sites as scores do.

    Args:
        rows: of codelengths.
        scores: the report's rows, with F1 on held-out sentences.
    """
    tasks = []
    for (model, task), codes in grouped(rows, "model", "task").items():
        read = [row for row in where(codes, **CODES["model"]) if row["site"] is not None]
        best = max(read, key=lambda row: row["compression"])
        control = next(
            (
                row["compression"]
                for row in where(codes, **CODES["control task"], site=best["site"])
            ),
            None,
        )
        known = {
            row["site"]: row["score"]
            for row in where(scores, model=model, task=task, source="model")
        }
        both = [(row["site"], row["compression"], known[row["site"]]) for row in read
                if known.get(row["site"]) is not None]  # fmt: skip
        orders = [
            [site for site, *_ in sorted(both, key=lambda entry: -entry[place])] for place in (1, 2)
        ]
        rank = spearmanr(*list(zip(*both, strict=True))[1:]).statistic if len(both) > 2 else None
        tasks.append({"task": task, "best": best, "control": control, "by_frequencies": _by_frequencies(codes),
                      "orders": orders, "rank": rank})  # fmt: skip
    return sentences("codelengths", tasks=tasks, several=len(distinct(rows, "model")) > 1)
