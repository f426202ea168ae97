"""The report of surgery: the score of every truncation and every skipped span."""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.finetuning.truncating import MEAN
from aligners.reports.drawing import (
    ABREAST,
    LOOKS,
    Look,
    heat_map,
    label,
    layer_grid,
    panels,
)
from aligners.reports.names import (
    blank,
    fixed,
    floor_words,
    plain_score,
    score_form,
    score_in_words,
    score_words,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    by_column,
    distinct,
    grouped,
    known,
    number,
    numbers,
    values,
    where,
)
from aligners.reports.screen import SiteTable

A_POINT = 0.01  # of the score
HEADS = {"untuned": "its own head", "tuned": "a head trained there"}
FLOOR: Look = {"color": "#D55E00", "linestyle": ":"}


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each model and condition."""
    shown = with_short_names(rows)
    majority = meta["majority_score"]
    figures = {
        "truncation": partial(truncation_figure, shown, majority),
        "skipping": partial(skipping_figure, shown, majority),
    }
    first = lead(shown, majority)
    screen = [surgery_table(shown, majority)]
    return Report("surgery", meta, rows, figures=figures, screen=screen, lead=first)


# ---------------------------------------------------------------------- what is said


def lead(rows: Sequence[Row], majority: float) -> str:
    """Say how well the whole model does, from which site on a truncated one keeps that, and which block costs most.

    Args:
        rows: rows of the report, with short names of models; the mean of several is the last.
        majority: score of always giving the same answer.
    """
    whole = where(rows, kind="native")[-1]
    if whole["score"] is None:
        return (
            "Models were truncated after a site, and spans of blocks were skipped. "
            "The whole model has no score that is a number."
        )
    said = _whole_in_words(rows, whole, majority)
    for kind, head in HEADS.items():
        cut = where(known(rows, "site"), kind=kind, model=whole["model"])
        cut = [row for row in known(cut, "score") if row["site"] < whole["site"]]
        if cut:
            said += f" Truncated, and read by {head}, {_kept(cut, whole['score'] - A_POINT)}."
    return said + _dearest_block(rows, whole)


def _whole_in_words(rows: Sequence[Row], whole: Row, majority: float) -> str:
    name = whole["model"]
    form = score_form(rows)
    own = score_in_words(whole)
    the = "the " if name == MEAN else ""
    said = f"With all blocks {the}{name} "
    if form == ".1%":
        said += f"classifies {own} of {whole['n_texts']:,} held-out texts correctly"
    else:
        said += f"has a {plain_score(rows)} of {own}"
    return f"{said}; always giving the same answer gives {fixed(majority, form)}."


def _dearest_block(rows: Sequence[Row], whole: Row) -> str:
    """Say which block costs the most when it alone is skipped; nothing where none was."""
    skipped = known(where(rows, kind="skip", model=whole["model"]), "score")
    single = [row for row in skipped if row["first"] == row["last"]]
    if not single:
        return ""
    worst = min(single, key=itemgetter("score"))
    if worst["score"] >= whole["score"]:
        return " No block is needed: without any one of them the score is no lower."
    without = score_in_words(worst)
    return f" Skipping one block costs the most at block {worst['first']}: {without} without it."


def _kept(cut: Sequence[Row], near: float) -> str:
    """Say after which sites a truncated model's score is within a point of the whole model's."""
    sites = [row["site"] for row in cut if row["score"] >= near]
    if not sites:
        best = score_in_words(max(cut, key=itemgetter("score")))
        return f"it is more than a point below that after every site but the last, {best} at best"
    if cut[-1]["score"] < near:
        return f"it is within a point of that after site {', '.join(map(str, sites))} alone"
    first = cut[-1]["site"]
    for row in reversed(cut):
        if row["score"] < near:
            break
        first = row["site"]
    return f"it stays within a point of that from site {first} on"


# ---------------------------------------------------------------------- table


def surgery_table(rows: Sequence[Row], majority: float) -> SiteTable:
    """Make a table of every truncation's score by site, for each model and for their mean."""
    cut = [row for row in known(rows, "site") if row["kind"] != "native"]
    words = score_words(rows)
    texts = f"on {rows[0]['n_texts']} held-out texts"
    floor = f"({floor_words(rows)}: {100 * majority:.1f})"
    title = f"{words[0].upper()}{words[1:]} of models truncated after a site, {texts} {floor}"
    sites = sorted(distinct(cut, "site"))
    table = SiteTable(title, ["model", "head"], [], {"": map(str, sites)})
    for (model, kind), line in grouped(cut, "model", "kind").items():
        here = by_column(line, "site")
        cells = []
        for site in sites:
            row = here.get(site, {"score": None})
            cells.append(blank(100 * number(row["score"]), ".1f"))
        style = "bold" if model == MEAN else None
        table.add_row(model, kind, *cells, style=style)
    return table


# ---------------------------------------------------------------------- figures


def truncation_figure(rows: Sequence[Row], majority: float) -> Figure:
    """Draw the score against the site whose state the head reads, as in Phang et al. 2021, Figure 3.

    Each model is a thin line. The mean of several models, or the only model, is thick, with its interval over texts.
    """
    figure, (axis,) = panels(1, 1, (7.6, 3.9), (0, 0))
    for kind, style in LOOKS["heads"].items():
        _draw_head(axis, where(rows, kind=kind), style)
    axis.axhline(
        100 * majority, linewidth=1.3, label=floor_words(rows), zorder=0, **FLOOR
    )
    axis.set_xticks(sorted(distinct(known(rows, "site"), "site")))
    axis.set_xlabel(
        "site after which the model is truncated; the last is the whole model"
    )
    axis.set_ylabel(f"held-out texts: {score_words(rows)}")
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _draw_head(axis: Axes, rows: Sequence[Row], style: Look) -> None:
    """Draw all models as one head reads them."""
    models = grouped(rows, "model")
    averaged = MEAN in models  # models of different depths have no mean
    for model, model_rows in models.items():
        line = known(model_rows, "score")
        if model == MEAN or len(models) == 1:
            _thick(axis, line, style)
        elif line:
            _thin(axis, line, style, "" if averaged else model)
    if not averaged and len(models) > 1:
        axis.plot([], [], linewidth=0.8, markersize=4, **style)


def _thin(axis: Axes, line: Sequence[Row], style: Look, name: str) -> None:
    """Draw one of several models, with its name at the end if it has one."""
    sites = values(line, "site")
    scores = numbers(line, "score", 100)
    axis.plot(sites, scores, color=style["color"], linewidth=0.7, alpha=0.5, zorder=1)
    if name:
        axis.annotate(name, (sites[-1], scores[-1]), fontsize=6)


def _thick(axis: Axes, line: Sequence[Row], style: Look) -> None:
    sites = values(line, "site")
    low = numbers(line, "score_low", 100)
    high = numbers(line, "score_high", 100)
    axis.fill_between(sites, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.plot(
        sites, numbers(line, "score", 100), linewidth=1.7, markersize=4.5, **style
    )


def skipping_figure(rows: Sequence[Row], majority: float) -> Figure:
    """Draw the score without each span of blocks, as in Phang et al. 2021, Figure 4: first block up, last block across.

    Each model has a panel; the mean of several has the first.
    """
    spans = where(rows, kind="skip")
    models = sorted(grouped(spans, "model").items(), key=lambda item: item[0] != MEAN)
    whole = by_column(where(rows, kind="native"), "model")
    ends = _ends_of_scale(rows, majority)
    figure, axes = _span_panels(len(models), max(values(spans, "last")))
    for axis, (model, line) in zip(axes, models, strict=True):
        image = _span_map(axis, line, ends)
        axis.set_title(_with_own_score(whole[model]), fontsize=8)

    words = f"held-out texts: {rows[0]['score_name']}"
    bar = figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, label=words)
    bar.ax.axhline(majority, linewidth=1.5, **FLOOR)
    across = f"last block skipped (dotted on the scale: {floor_words(rows)})"
    label(figure, across, "first block skipped")
    return figure


def _ends_of_scale(rows: Sequence[Row], majority: float) -> tuple[float, float]:
    """Return the least score of a span, or the majority's, and the largest of all."""
    scores = values(known(where(rows, kind="skip"), "score"), "score")
    own = values(known(where(rows, kind="native"), "score"), "score")
    return min([*scores, majority]), max(scores + own)


def _span_panels(count: int, blocks: int) -> tuple[Figure, list[Axes]]:
    """Make square panels with room for so many blocks."""
    size = max(2.4, 0.42 * blocks)
    shape = (size + 0.5, size + 0.7)
    return panels(count, ABREAST, shape, (1.2, 0.4), boxed=True, font=8)


def _with_own_score(whole: Row) -> str:
    """Name a model above its panel, with the score that it has with all blocks."""
    title: str = whole["model"]
    if whole["score"] is not None:
        title += f"\nwhole: {whole['score']:.3f}"
    return title


def _span_map(axis: Axes, line: Sequence[Row], ends: tuple[float, float]) -> Any:
    """Draw a model's score without each span of blocks, on a scale with these ends."""
    blocks = range(1, max(values(line, "last")) + 1)
    grid = layer_grid(line, ("first", "last", "score"), blocks, blocks)
    return heat_map(axis, grid, blocks, blocks, *ends)
