"""The report on probes: each score with its controls by layer, in sentences and tables, with figures of trees."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from textwrap import fill
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc

from aligners.reports import drawing
from aligners.reports.names import (
    WORDS,
    counted,
    in_words,
    with_interval,
    with_short_names,
)
from aligners.reports.report import (
    Report,
    Row,
    by_column,
    distinct,
    grouped,
    known,
    largest,
    values,
    where,
)
from aligners.reports.runs.probing.codelengths_report import (
    codes_figure,
    codes_in_words,
    codes_tables,
    sites_read,
    word_of_site,
)
from aligners.reports.screen import SiteTable

BASELINES = ("majority", "word order")
MEASURES = WORDS["probing"]  # probe -> column of its scores -> what it is called
MOST_ABREAST = 3
MOST_SCORES = 2  # in the first sentences
KINDS = ("trained", "untrained", "control task")
DASHES = ("-", "--", ":")  # of their lines
WIDTH, LETTERS = (
    0.62,
    9,
)  # inches a word takes, and letters of a note that this has room for
RIGHT = drawing.COLOURS[2]
WRONG = drawing.COLOURS[1]


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
    shown = with_short_names(rows)
    codes = with_short_names(codelengths)
    figures: dict[str, Callable[[], Figure]] = {
        "probing": partial(layers_figure, shown)
    }
    if trees:
        figures["probing_trees"] = partial(trees_figure, with_short_names(trees))
    if codelengths:
        figures["probing_codes"] = partial(
            codes_figure, codes, with_short_names(portions)
        )
    screen = [_table(line, model) for model, line in grouped(shown, "model").items()]
    findings = _what_was_read(meta) + unfinished(meta)
    best = _best_scores(shown)
    findings += best[MOST_SCORES:] + _mixes(shown) + _no_better(shown)
    return Report(
        "probing",
        meta,
        rows,
        {
            "mixes": mixes,
            "trees": trees,
            "codelengths": codelengths,
            "portions": portions,
        },
        figures=figures,
        screen=screen + codes_tables(codes),
        lead=lead(shown, best),
        sentences=findings + codes_in_words(codes, shown),
    )


# ---------------------------------------------------------------------- rows


def _of_states(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of probes, without the baselines."""
    return [row for row in rows if row["source"] not in BASELINES]


def _baseline(rows: Iterable[Row]) -> Row:
    return next(row for row in rows if row["source"] in BASELINES)


def _ranks(rows: Iterable[Row]) -> list[int | None]:
    """Return the ranks of structural probes, ascending; None stands for full rank."""
    return sorted(distinct(known(rows, "rank"), "rank")) or [None]


def _measures(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Return task, column and name of every score."""
    measures = []
    for task, probe in distinct(rows, "task", "probe"):
        for column, name in MEASURES[probe].items():
            measures.append((task, column, name))
    return measures


class Line(NamedTuple):
    """A line of the table, or of a panel of the figure.

    Attributes:
        name: what it shows.
        kind: place in `KINDS`; of selectivity -1.
        column: column of the rows, from which it is taken.
        cells: a row for each site, None where there is none.
    """

    name: str
    kind: int
    column: str
    cells: Sequence[Row | None]


def _lines(rows: Sequence[Row], sites: Sequence[int | None]) -> list[Line]:
    """Return the lines of one model, task and rank: the model's own score, and the controls.

    Args:
        rows: rows of that model, task and rank.
        sites: across.
    """
    trained = by_column(where(rows, source="model"), "site")
    untrained = by_column(where(rows, source="untrained"), "site")
    lines = []
    for column, name in MEASURES[rows[0]["probe"]].items():
        lines.append(Line(name, 0, column, list(map(trained.get, sites))))
        if untrained:
            twins = list(map(untrained.get, sites))
            lines.append(Line(f"{name}, untrained", 1, column, twins))
    controlled = by_column(known(trained.values(), "control"), "site")
    if controlled:
        cells = list(map(controlled.get, sites))
        lines.append(Line("control task", 2, "control", cells))
        lines.append(Line("selectivity", -1, "selectivity", cells))
    return lines


# ---------------------------------------------------------------------- what is said


def _score(value: float) -> str:
    return f"{100 * value:z.1f}"


def _at(row: Row) -> str:
    return "in the mix" if row["site"] is None else f"at site {row['site']}"


def lead(rows: Sequence[Row], best: Sequence[str]) -> str:
    """Say how many tasks were probed, and the first of the best scores.

    Args:
        rows: rows of the report, with short names of models.
        best: the sentences on the best scores.
    """
    models = distinct(rows, "model")
    tasks = counted(len(distinct(rows, "task")), "task")
    who = models[0] if len(models) == 1 else f"{len(models)} models"
    sentences = f"{largest(rows, 'n_sentences'):,} held-out sentences"
    said = f"Probes of {tasks} were trained on the states of {who} and scored on {sentences}."
    if not best:
        best = ["None of them has a score that is a number."]
    return " ".join([said, *best[:MOST_SCORES]])


def _what_was_read(meta: Row) -> list[str]:
    """Say how many sentences were read and left out, and from where."""
    said = []
    read = meta.get("sentences")
    if read:
        stopped = ""
        if "validation" in read:
            stopped = f" stopped on {read['validation']:,} validation sentences,"
        said.append(
            f"Probes were trained on {read['fit']:,} sentences,{stopped} and scored on {read['test']:,} held-out ones."
        )
    dropped = sum(meta.get("sentences_dropped", {}).values())
    if dropped:
        said.append(
            f"{dropped:,} sentences were left out, because a model does not read all of their words."
        )
    for source in filter(None, meta.get("text", {}).get("annotated", ())):
        said.append(f"Read: {source}.")
    return said


def unfinished(meta: Row) -> list[str]:
    """Say how many probes were still learning when they were stopped."""
    found = meta.get("unfinished", {})
    if not found.get("probes"):
        return []
    return [
        f"{found['probes']:,} of {found['of']:,} probes were still learning after "
        f"{meta.get('training', {}).get('max_epochs')} epochs, the limit of `training.max_epochs`: with a higher one "
        "they may read more."
    ]


def _of(rows: Sequence[Row], row: Row) -> str:
    """Name the task of a row, with its model if there are several."""
    several = len(distinct(rows, "model")) > 1
    return f"{row['model']}: {row['task']}" if several else str(row["task"])


def _best_scores(rows: Sequence[Row]) -> list[str]:
    """State the best score of each model and task, that at site 0, that of the untrained twin, and the selectivity."""
    said = []
    for line in grouped(known(rows, "score"), "model", "task", "probe").values():
        read = where(line, source="model")
        twins = where(line, source="untrained")
        if not read:
            continue
        row = max(read, key=itemgetter("score"))
        beside = []
        for lexical in where(read, site=0)[:1]:
            beside.append(f"{_score(lexical['score'])} at site 0")
        if twins:
            twin = largest(twins, "score")
            verdict = "" if row["score"] > twin else ", no worse"
            beside.append(f"at most {_score(twin)} untrained{verdict}")
        if row["selectivity"] is not None:
            beside.append(f"selectivity {_score(row['selectivity'])}")
        measure = next(iter(MEASURES[row["probe"]].values()))
        score = f"{measure} {in_words(row, 'score', '.1f', 100)} {_at(row)}"
        controls = f" ({', '.join(beside)})" if beside else ""
        said.append(f"{_of(rows, row)}: {score}{controls}.")
    return said


def _mixes(rows: Sequence[Row]) -> list[str]:
    """State the centre of gravity of the learned mixes of layers."""
    said = []
    for row in known(rows, "centre_of_gravity"):
        centre = f"its centre of gravity at layer {row['centre_of_gravity']:.2f}"
        said.append(f"{_of(rows, row)}: the learned mix has {centre}.")
    return said


def _no_better(rows: Sequence[Row]) -> list[str]:
    """Say where a probe reads no more than the baseline does."""
    said = []
    for line in grouped(rows, "model", "task", "probe").values():
        baseline = _baseline(line)
        read = where(line, source="model")
        for column, measure in MEASURES[baseline["probe"]].items():
            least = baseline[column] or 0.0
            below = []
            for row in known(read, column):
                if row[column] <= least:
                    site = "the mix" if row["site"] is None else f"site {row['site']}"
                    rank = "" if row["rank"] is None else f", rank {row['rank']},"
                    below.append(f"{site}{rank} with {_score(row[column])}")
            if below:
                floor = f"({baseline['source']}, {measure} {_score(least)})"
                said.append(
                    f"{_of(rows, baseline)}: no better than the baseline {floor}: {', '.join(below)}. The probe reads "
                    "nothing of it from these states."
                )
    return said


# ---------------------------------------------------------------------- table


def _table(rows: Sequence[Row], model: str) -> SiteTable:
    """Make the table of a model: a line for each score and control, sites across."""
    sites = sites_read(_of_states(rows))
    title = f"{model}: what probes find, by layer"
    across = {"": map(word_of_site, sites)}
    table = SiteTable(title, ["task", "score"], ["baseline"], across)
    for task, line in grouped(rows, "task").items():
        baseline = _baseline(line)
        ranks = _ranks(line)
        for rank in ranks:
            for name, kind, column, cells in _lines(
                where(_of_states(line), rank=rank), sites
            ):
                heading = f"{name}, rank {rank}" if len(ranks) > 1 else name
                texts = [_percent(baseline, column) if kind == 0 else ""]
                texts += [_percent(row, column) for row in cells]
                table.add_row(task, heading, *texts)
    return table


def _percent(row: Row | None, column: str) -> str:
    return "" if row is None else with_interval(row, column, ".1f", 100)


# ---------------------------------------------------------------------- figures


def layers_figure(rows: Sequence[Row]) -> Figure:
    """Draw every score by layer with its controls, a panel for each task and measure."""
    shown = _measures(rows)
    figure, axes = drawing.panels(len(shown), MOST_ABREAST, drawing.PANEL, (2.2, 0.8))
    for axis, (task, column, name) in zip(axes, shown, strict=True):
        line = where(rows, task=task)
        for drawn in (column, "control") if column == "score" else (column,):
            drawing.lines_by_site(
                axis, _drawn(line, distinct(rows, "model"), drawn), drawn, 100
            )
        least = _baseline(line)[column]
        if least is not None:
            axis.axhline(
                100 * least, label="baseline", color="0.6", linestyle=":", zorder=0
            )
        sites = sites_read(_of_states(line))
        drawing.name_sites(axis, f"{task}: {name}", map(word_of_site, sites))
    drawing.dress(figure, axes, "site (layer)", "score, in hundredths")
    return figure


def _drawn(
    rows: Sequence[Row], models: Sequence[str], column: str
) -> list[tuple[str, drawing.Look, Sequence[Row | None]]]:
    """Return the lines of a column in a panel: colours stand for models, dashes for what was read."""
    drawn = []
    read = _of_states(rows)
    sites = sites_read(read)
    for place, model in enumerate(models):
        own = where(read, model=model)
        for line in _lines(where(own, rank=_ranks(own)[-1]), sites):
            if line.column != column:
                continue
            name = KINDS[line.kind]
            colour = line.kind
            if len(models) > 1:
                name, colour = f"{model}, {name}", place
            look = drawing.line_look(
                colour, line.kind, DASHES[line.kind], drawing.MODEL_COLOURS
            )
            drawn.append((name, look, line.cells))
    return drawn


def trees_figure(trees: Sequence[Row]) -> Figure:
    """Draw sentences with the edges of their trees above and those that a probe finds below."""
    longest = max(len(words.split()) for words in values(trees, "words"))
    figure, axes = drawing.panels(len(trees), 1, (WIDTH * longest, 2.4), (0.4, 0.3))
    for axis, row in zip(axes, trees, strict=True):
        _tree(axis, row)
        axis.set_xlim(-0.7, longest - 0.3)
    note = "above: the tree, pale where punctuation does not count; below: what the probe finds, right edges green"
    figure.supxlabel(fill(note, max(30, LETTERS * longest)), fontsize=9)
    return figure


def _tree(axis: Axes, row: Row) -> None:
    every = _edges(row["edges"])
    counting = _edges(row["counted"])
    found = _edges(row["found"])
    for place, word in enumerate(row["words"].split()):
        axis.text(place, 0, word, ha="center", va="center", fontsize=8)
    above = {"theta1": 0, "theta2": 180}
    below = {"theta1": 180, "theta2": 360}
    _arcs(axis, counting, 0.35, color="0.3", **above)
    _arcs(axis, every - counting, 0.35, color="0.8", **above)
    _arcs(axis, found & counting, -0.35, color=RIGHT, **below)
    _arcs(axis, found - counting, -0.35, color=WRONG, **below)
    longest = max(last - first for first, last in every | counting | found)
    tall = 0.35 + 0.6 * longest**0.8
    axis.set_ylim(-tall, tall)
    right = f"{len(counting & found)} of {len(counting)} edges"
    axis.set_title(f"{row['model']}, site {row['layer']}: {right}", fontsize=9)
    axis.set_axis_off()


def _arcs(
    axis: Axes, edges: Iterable[tuple[int, int]], height: float, **look: object
) -> None:
    """Draw edges between words as arcs."""
    options: drawing.Look = dict(look)
    for first, last in edges:
        far = last - first
        axis.add_patch(
            Arc(((first + last) / 2, height), far, 1.1 * far**0.8, **options)
        )


def _edges(written: str) -> set[tuple[int, int]]:
    """Parse the edges of `0-2 1-2`."""
    edges = set()
    for edge in written.split():
        first, _, last = edge.partition("-")
        edges.add((int(first), int(last)))
    return edges
