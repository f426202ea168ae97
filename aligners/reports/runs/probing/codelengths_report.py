"""How far probes compress labels: tables, a figure, and sentences."""

from collections.abc import Iterable, Sequence
from operator import itemgetter

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from aligners.reports import drawing
from aligners.reports.names import WORDS, with_interval
from aligners.reports.report import (
    Row,
    by_column,
    distinct,
    grouped,
    known,
    mean,
    values,
    where,
)
from aligners.reports.screen import SiteTable

CODES = WORDS[
    "codes"
]  # what is sent by a code -> source, and whether it is the control task
FEWEST_RANKED = 3  # sites, of which a rank correlation is said


def word_of_site(site: int | None) -> str:
    """Name a layer for readers; None is a learned mix of all."""
    return "mix" if site is None else str(site)


def sites_read(rows: Iterable[Row]) -> list[int | None]:
    """Return the layers that any probe reads, then None if there are mixes."""
    return sorted(distinct(rows, "site"), key=lambda site: (site is None, site))


def _by_frequencies(rows: Sequence[Row]) -> float:
    """Return the compression by a code that only knows the frequencies of a task's labels."""
    row = where(rows, **CODES["model"])[0]
    return row["uniform_bits"] / row["frequency_bits"]


def codes_in_words(rows: Sequence[Row], scores: Sequence[Row]) -> list[str]:
    """Say which site has the shortest code, and whether codes order the sites as scores do.

    Args:
        rows: rows of codelengths.
        scores: the report's rows, with F1 on held-out sentences.
    """
    said = []
    several = len(distinct(rows, "model")) > 1
    for (model, task), codes in grouped(rows, "model", "task").items():
        read = known(where(codes, **CODES["model"]), "site")
        best = max(read, key=itemgetter("compression"))
        text = f"{model}: {task}" if several else task
        text += f": labels are compressed most at site {best['site']}, {best['compression']:.2f} times"
        for row in where(codes, **CODES["control task"], site=best["site"]):
            text += f" (control task {row['compression']:.2f})"
        knowing = f"a code that knows only their frequencies compresses {_by_frequencies(codes):.2f} times"
        said.append(f"{text}; {knowing}.")
        said += _orders(
            read, where(scores, model=model, task=task, source="model"), task
        )
    return said


def _orders(codes: Sequence[Row], scores: Sequence[Row], task: str) -> list[str]:
    """Say whether codelengths order the sites as scores do; nothing of fewer than three sites."""
    scored = {row["site"]: row["score"] for row in known(scores, "score")}
    both = [row for row in codes if row["site"] in scored]
    if len(both) < FEWEST_RANKED:
        return []
    by_code = values(sorted(both, key=lambda row: -row["compression"]), "site")
    by_score = values(sorted(both, key=lambda row: -scored[row["site"]]), "site")
    right = [scored[row["site"]] for row in both]
    rank = spearmanr(values(both, "compression"), right).statistic
    if rank != rank:
        return []
    if by_code == by_score:
        return [f"{task}: codelengths order the sites as F1 does."]
    first = ", ".join(map(str, by_code))
    second = ", ".join(map(str, by_score))
    order = f"sites from best to worst by codelength {first}, by F1 {second}"
    return [f"{task}: {order} (rank correlation {rank:z.2f})."]


def codes_tables(rows: Sequence[Row]) -> list[SiteTable]:
    """Make a table for each model: compression of each task, with sites across."""
    tables = []
    for model, of_model in grouped(rows, "model").items():
        sites = sites_read(of_model)
        title = f"{model}: uniform code over codelength, by layer"
        across = map(word_of_site, sites)
        table = SiteTable(title, ["task", "sent by"], ["by frequencies"], {"": across})
        for task, line in grouped(of_model, "task").items():
            for name, kind in CODES.items():
                cells = {}
                for row in where(line, **kind):
                    cells[row["site"]] = with_interval(row, "compression", ".2f")
                least = "" if kind["control"] else f"{_by_frequencies(line):.2f}"
                if cells:
                    texts = [cells.get(site, "") for site in sites]
                    table.add_row(task, name, least, *texts)
        tables.append(table)
    return tables


def codes_figure(rows: Sequence[Row], portions: Sequence[Row]) -> Figure:
    """Draw, for each model and task, compression by site, and below it bits per target by portion."""
    groups = list(grouped(rows, "model", "task").items())[: drawing.ABREAST]
    count = len(groups)
    several = len(distinct(rows, "model")) > 1
    figure, axes = drawing.panels(2 * count, count, drawing.PANEL, (2.2, 0.9))
    for place, ((model, task), panel) in enumerate(groups):
        _compressions(axes[place], panel, f"{model}, {task}" if several else task)
        sent = where(portions, model=model, task=task, **CODES["model"])
        _losses_by_portion(axes[count + place], sent)
    axes[0].set_ylabel("uniform code over codelength", fontsize=8)
    axes[count].set_ylabel("bits a target", fontsize=8)
    drawing.dress(figure, axes, "", "")
    return figure


def _compressions(axis: Axes, rows: Sequence[Row], title: str) -> None:
    """Draw compression by site: a line for the model, its untrained twin, and the control task."""
    sites = sites_read(rows)
    for place, (name, kind) in enumerate(CODES.items()):
        here = by_column(where(rows, **kind), "site")
        look = drawing.line_look(
            place, place, ("-", "--", ":")[place], drawing.MODEL_COLOURS
        )
        line = (name, look, list(map(here.get, sites)))
        drawing.lines_by_site(axis, [line], "compression")
    look = {"label": "by frequencies", "color": "0.6", "linestyle": ":", "zorder": 0}
    axis.axhline(_by_frequencies(rows), **look)
    drawing.name_sites(axis, title, map(word_of_site, sites))
    axis.set_xlabel("site (layer)", fontsize=8)


def _losses_by_portion(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw bits a target by portion, a line for each site."""
    sites = sites_read(rows)
    for place, site in enumerate(sites):
        shares = sorted(grouped(where(rows, site=site), "share").items())
        across = []
        losses = []
        for share, line in shares:
            across.append(100 * share)
            losses.append(mean(line, "bits_a_target"))
        look = drawing.line_look(place, place + 3, "-") | {
            "markersize": 3,
            "linewidth": 1,
        }
        look["color"] = mpl.colormaps["viridis"](
            0.9 * place / len(sites)
        )  # brighter when deeper
        name = "mix" if site is None else f"site {site}"
        axis.plot(across, losses, label=name, **look)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("end of the portion, %", fontsize=8)
