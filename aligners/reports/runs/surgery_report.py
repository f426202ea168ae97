"""The report of surgery: the score of every truncation and every skipped span."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aligners.finetuning.truncating import MEAN
from aligners.reports.drawing import ABREAST, LOOKS, Look, heat_map, label, layer_grid, panels
from aligners.reports.names import floor_words, score_words, with_short_names
from aligners.reports.report import Report, Row, grouped, where
from aligners.reports.screen import SiteTable


def report(meta: Row, rows: Sequence[Row]) -> Report:
    """Make the report from one row for each model and condition."""
    shown, majority = with_short_names(rows), meta["majority_score"]
    draw = {"truncation": truncation_figure, "skipping": skipping_figure}
    figures = {name: partial(figure, shown, majority) for name, figure in draw.items()}
    return Report("surgery", meta, rows, figures=figures, screen=[surgery_table(shown, majority)])


def surgery_table(rows: Sequence[Row], majority: float) -> SiteTable:
    """Make a table of every truncation's score by site, for each model and for their mean."""
    cut = [row for row in rows if row["site"] is not None and row["kind"] != "native"]
    words = score_words(rows)
    title = (
        f"{words[0].upper()}{words[1:]} of models truncated after a site, on {rows[0]['n_texts']} held-out texts "
        f"({floor_words(rows)}: {100 * majority:.1f})"
    )
    sites = sorted({row["site"] for row in cut})
    table = SiteTable(title, ["model", "head"], [], {"": [str(site) for site in sites]})
    for (model, kind), line in grouped(cut, "model", "kind").items():
        scores = {
            row["site"]: f"{100 * row['score']:.1f}" for row in line if row["score"] is not None
        }
        table.add_row(
            model,
            kind,
            *(scores.get(site, "") for site in sites),
            style="bold" if model == MEAN else None,
        )
    return table


def truncation_figure(rows: Sequence[Row], majority: float) -> Figure:
    """Draw the score against the site whose state the head reads, as in Phang et al. 2021, Figure 3.

    Each model is a thin line. The mean of several models, or the only model, is thick, with its interval over texts.
    """
    figure, (axis,) = panels(1, 1, (7.6, 3.9), (0, 0))
    for kind, style in LOOKS["heads"].items():
        models = grouped(where(rows, kind=kind), "model")
        for model, model_rows in models.items():
            main = model == MEAN or len(models) == 1
            line = [row for row in model_rows if row["score"] is not None]
            _line(axis, line, style, main=main)
            if line and not main and MEAN not in models:  # models of different depths have no mean
                axis.annotate(model, (line[-1]["site"], 100 * line[-1]["score"]), fontsize=6)
        if models and MEAN not in models and len(models) > 1:
            axis.plot([], [], linewidth=0.8, markersize=4, **style)
    axis.axhline(
        100 * majority,
        color="#D55E00",
        linestyle=":",
        linewidth=1.3,
        label=floor_words(rows),
        zorder=0,
    )
    axis.set_xticks(sorted({row["site"] for row in rows if row["site"] is not None}))
    axis.set_xlabel("site after which the model is truncated; the last is the whole model")
    axis.set_ylabel(f"held-out texts: {score_words(rows)}")
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8
    )
    return figure


def _line(axis: Axes, line: Sequence[Row], style: Look, *, main: bool) -> None:
    sites = [row["site"] for row in line]
    heights = [100 * row["score"] for row in line]
    if not main:
        axis.plot(sites, heights, color=style["color"], linewidth=0.7, alpha=0.5, zorder=1)
        return
    low, high = ([100 * row[f"score_{end}"] for row in line] for end in ("low", "high"))
    axis.fill_between(sites, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.plot(sites, heights, linewidth=1.7, markersize=4.5, **style)


def skipping_figure(rows: Sequence[Row], majority: float) -> Figure:
    """Draw the score without each span of blocks, as in Phang et al. 2021, Figure 4: first block up, last block across.

    Each model has a panel; the mean of several has the first.
    """
    spans = where(rows, kind="skip")
    models = sorted(grouped(spans, "model").items(), key=lambda item: item[0] != MEAN)
    native = {row["model"]: row["score"] for row in where(rows, kind="native")}
    values = [row["score"] for row in spans if row["score"] is not None]
    ends = [
        min([*values, majority]),
        max([*values, *(v for v in native.values() if v is not None)]),
    ]
    size = max(2.4, 0.42 * max(row["last"] for row in spans))
    figure, axes = panels(
        len(models), ABREAST, (size + 0.5, size + 0.7), (1.2, 0.4), boxed=True, font=8
    )
    for axis, (model, model_rows) in zip(axes, models, strict=True):
        blocks = range(1, max(row["last"] for row in model_rows) + 1)
        grid = layer_grid(model_rows, ("first", "last", "score"), blocks, blocks)
        image = heat_map(axis, grid, blocks, blocks, *ends)
        whole = "" if native[model] is None else f"\nwhole: {native[model]:.3f}"
        axis.set_title(f"{model}{whole}", fontsize=8)
    bar = figure.colorbar(
        image, ax=axes, shrink=0.7, pad=0.02, label=f"held-out texts: {rows[0]['score_name']}"
    )
    bar.ax.axhline(majority, color="#D55E00", linestyle=":", linewidth=1.5)
    label(
        figure,
        f"last block skipped (dotted on the scale: {floor_words(rows)})",
        "first block skipped",
    )
    return figure
