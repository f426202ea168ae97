"""The report on probes: one table and one figure by layer, each score beside its controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure

from aligners.reports.names import short_names, with_short_names
from aligners.reports.probing.codes import codes_figure, codes_in_words, codes_tables
from aligners.reports.probing.figures import layers_figure, ranks_figure, trees_figure
from aligners.reports.probing.limits import unfinished_in_words
from aligners.reports.probing.lines import BASELINES, MEASURES, Line, lines_of, ranks_of, sites_of, tasks_of
from aligners.reports.report import Report, Row
from aligners.reports.screen import TitledTable, site_table

__all__ = ["report"]


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
    shown = with_short_names(rows)
    names = short_names(row["model"] for row in rows)
    figures: dict[str, Callable[[], Figure]] = {"probing": partial(layers_figure, shown)}
    if len(ranks_of(shown)) > 1:
        figures["probing_ranks"] = partial(ranks_figure, shown)
    if trees:
        figures["probing_trees"] = partial(trees_figure, [row | {"model": names[row["model"]]} for row in trees])
    if codelengths:
        figures["probing_codes"] = partial(codes_figure, *map(with_short_names, (codelengths, portions)))
    models = list(dict.fromkeys(row["model"] for row in shown))
    return Report(
        "probing",
        meta,
        rows,
        tables={"mixes": mixes, "trees": trees, "codelengths": codelengths, "portions": portions},
        figures=figures,
        screen=[
            *(_table([row for row in shown if row["model"] == model], model) for model in models),
            *codes_tables(with_short_names(codelengths)),
        ],
        note="In hundredths, held-out sentences, ± half the 95 % interval over sentences. Site 0 is lexical: the "
        "embeddings alone. Untrained: the same probe on a twin with fresh weights. Control task: each word's label is "
        "drawn for it. Selectivity: what is left of the score without what the control task gets. Baseline: the most "
        "frequent label, or a chain of the words in their order.",
        sentences=[
            *_read(meta),
            *unfinished_in_words(meta),
            *(said for model in models for said in _found(shown, model, len(models) > 1)),
            *(said for model in models for said in _below(shown, model, len(models) > 1)),
            *codes_in_words(with_short_names(codelengths), shown),
        ],
    )


def _table(rows: Sequence[Row], model: str) -> TitledTable:
    """Make the table of a model: a line for each score and control, sites across."""
    sites = sites_of(rows)
    names = ["mix" if site is None else str(site) for site in sites]
    table = site_table(f"{model}: what probes find, by layer", ["task", "score"], ["baseline"], {"": names})
    for task, _ in tasks_of(rows):
        own = [row for row in rows if row["task"] == task]
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


def _read(meta: Row) -> list[str]:
    """Say what was read, and what was left out."""
    kept, dropped = (meta.get(name, {}) for name in ("sentences", "sentences_dropped"))
    said = []
    if kept:
        watched = f"stopped on {kept['validation']:,} validation sentences, " if "validation" in kept else ""
        asked = f"asked of {kept['test']:,} held-out ones"
        said.append(f"Probes were trained on {kept['fit']:,} sentences, {watched}and {asked}.")
    if sum(dropped.values()):
        said.append(
            f"{sum(dropped.values()):,} sentences were left out, because a model does not read all of their words."
        )
    read = meta.get("text", {}).get("annotated", [])
    return [*said, *(f"Read: {each}." for each in read if each)]


def _found(rows: Sequence[Row], model: str, several: bool) -> Iterator[str]:
    """Say where each task is read best, and how that compares with its controls."""
    begins = f"{model}: " if several else ""
    for task, probe in tasks_of(rows):
        own = [row for row in rows if (row["model"], row["task"]) == (model, task) and row["score"] is not None]
        read = [row for row in own if row["source"] == "model"]
        if read:
            best = max(read, key=lambda row: row["score"])
            yield f"{begins}{_best(best, own, task, next(iter(MEASURES[probe].values())))}"
    for row in rows:
        if row["model"] == model and row["centre_of_gravity"] is not None:
            centre = row["centre_of_gravity"]
            yield f"{begins}{row['task']}: the learned mix has its centre of gravity at layer {centre:.2f}."


def _below(rows: Sequence[Row], model: str, several: bool) -> Iterator[str]:
    """Name the probes that are no better than what is said without any state."""
    for task, probe in tasks_of(rows):
        own = [row for row in rows if (row["model"], row["task"]) == (model, task)]
        floor = next(row for row in own if row["source"] in BASELINES)
        read = [row for row in own if row["source"] == "model"]
        for column, measure in MEASURES[probe].items():
            least = floor[column] or 0.0
            low = [_place(row, column) for row in read if row[column] is not None and row[column] <= least]
            if low:
                said = f"{task}: no better than the baseline ({floor['source']}, {measure} {_hundredths(least)})"
                ends = "Of these states the probe has found out nothing."
                yield f"{f'{model}: ' if several else ''}{said}: {', '.join(low)}. {ends}"


def _place(row: Row, column: str) -> str:
    where = "the mix" if row["site"] is None else f"site {row['site']}"
    rank = "" if row["rank"] is None else f", rank {row['rank']},"
    return f"{where}{rank} with {_hundredths(row[column])}"


def _best(best: Row, own: Sequence[Row], task: str, measure: str) -> str:
    where = "in the mix" if best["site"] is None else f"at site {best['site']}"
    said = f"{task}: {measure} {_hundredths(best['score'])} {where}"
    lexical = [row["score"] for row in own if row["source"] == "model" and row["site"] == 0]
    twins = [row["score"] for row in own if row["source"] == "untrained"]
    beside = [f"{_hundredths(lexical[0])} at site 0"] if lexical else []
    beside += [f"at most {_hundredths(max(twins))} untrained"] if twins else []
    if best["selectivity"] is not None:
        beside.append(f"selectivity {_hundredths(best['selectivity'])}")
    return f"{said} ({', '.join(beside)})." if beside else f"{said}."


def _hundredths(value: float) -> str:
    return f"{100 * value:.1f}"
