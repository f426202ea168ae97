"""Phang et al. 2021: CKA maps before and after fine-tuning and their clusters; models truncated and without spans."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from aligners.reports.report import Row
from aligners.reports.study.contents import (
    Figure,
    HeatPanel,
    Meaning,
    Series,
    Table,
    heat_panel,
    model_lines,
)
from aligners.reports.study.described_tables import figure, table
from aligners.reports.study.frames import Frames, by, kind_words, place_words
from aligners.reports.study.registry import register
from aligners.reports.study.row_selection import (
    models_in,
    present,
    similarities,
    without_copy,
)

PLACE = ("task", "base")
LEAST_LAYERS = 4  # of a map in which clusters mean something
MOST_BASES = 4  # of which each has maps of its own; of more, maps are means
AND = " and "
HEADS = {"untuned": "untuned", "tuned": "tuned", "tuned_orig": "tuned, original model"}
MAJORITY = "majority class"
# The paper's comparisons, of models before (ORIG) and after fine-tuning (FT): layers of the first go up.
ORIG, FT_ORIG, FT, FT_FT = "ORIG–ORIG", "FT–ORIG", "FT–FT", "FT[1]–FT[2]"
COMPARISONS = (ORIG, FT_ORIG, FT, FT_FT)
TWO_BASES = "FT of two bases"
Grid = NDArray[np.float64]

# ---------------------------------------------------------------------- CKA of all layers


class Map(NamedTuple):
    """CKA of all layers.

    Attributes:
        comparison: which models it compares, of `COMPARISONS`.
        panel: with the values.
        models: number of models.
    """

    comparison: str
    panel: HeatPanel
    models: int


def layer_maps(frames: Frames, name: str) -> Figure:
    """Figures 1, 2, 5 and 6: CKA of all layers, before and after fine-tuning, task by task."""
    maps = _maps(frames)
    values = list[Row]()
    for each in maps:
        for row in _values(each.panel):
            values.append({**row, "models": each.models})
    panels = [each.panel for each in maps]
    return figure(name, panels, values, clusters=_clusters(maps))


def between_bases(frames: Frames, name: str) -> Figure:
    """Figure 7: CKA of all layers of fine-tuned models of two bases, task by task."""
    frame = _ckas(frames)
    frame = frame[frame["comparison"] == TWO_BASES]
    present(frame, "no CKA between fine-tuned models of two bases")
    panels, values = [], list[Row]()
    for place, part in by(frame, "task", "rows", "base"):
        base = place["base"] or f"one{AND}another"
        up, across = base.split(AND)
        title = _title(place)
        means = _means(part)
        panel = heat_panel(title, means, f"layer, {up}", f"layer, {across}")
        panels.append(panel)
        values += _values(panel)
    return figure(name, panels, values, models=models_in(frame))


def clusters(frames: Frames, name: str) -> Table:
    """§3: where the layers fall into two clusters, and how distinct these are."""
    rows = _clusters(_maps(frames))
    present(rows, f"no map of at least {LEAST_LAYERS} layers against themselves")
    return table(name, rows, clusters=rows)


def _maps(frames: Frames) -> list[Map]:
    """Every map that there is."""
    maps = []
    for place, part in by(_ckas(frames), "task", "rows", "base"):
        title = _title(place)
        for comparison in COMPARISONS:
            chosen = part[part["comparison"] == comparison]
            both = set(chosen["layer_x"]) & set(chosen["layer_y"])
            if not both:
                continue
            layers = sorted(map(int, both))
            up, across = comparison.split("–")
            named = comparison
            if title:
                named = f"{title}, {comparison}"
            means = _means(chosen)
            panel = heat_panel(named, means, f"layer, {up}", f"layer, {across}", layers)
            if comparison != FT_ORIG:
                cuts = two_clusters(panel.values)
                panel = replace(panel, cuts=cuts)
            maps.append(Map(comparison, panel, models_in(chosen)))
    lacking = (
        "no CKA of pretrained or fine-tuned models: the maps need cells of these stages"
    )
    return present(maps, lacking)


def _title(place: Row) -> str:
    """What a panel is of: the task, the kind of rows and the base."""
    rows = kind_words(place["rows"])
    return place_words(place["task"], rows, place["base"])


def _ckas(frames: Frames) -> DataFrame:
    """CKA of all layers, with the columns `comparison`, see `COMPARISONS`, and `base`: none, if many or equal."""
    frame = similarities(frames)
    frame = frame[frame["measure"] == "cka"]
    x = without_copy(frame["model_x"])
    y = without_copy(frame["model_y"])
    same = x == y
    count = len({*x, *y})
    base = None
    if 1 < count <= MOST_BASES:
        base = x.where(same, x + AND + y)
    comparison = _comparisons(frame, same)
    return frame.assign(comparison=comparison, base=base)


def _comparisons(frame: DataFrame, one_base: pd.Series) -> NDArray[np.str_]:
    """Which comparison each row belongs to; empty: none."""
    stages = frame[["stage_x", "stage_y"]]
    before = (stages == "pretrained").all(axis=1)
    after = (stages == "finetuned").all(axis=1)
    trained = stages.isin(("pretrained", "finetuned")).all(axis=1)
    same = frame["model_x"] == frame["model_y"]
    cases = {
        ORIG: before & same,
        FT_ORIG: trained & ~before & ~after & one_base,
        FT: after & same,
        FT_FT: after & one_base,
        TWO_BASES: after,
    }
    where = list(cases.values())
    return np.select(where, list(cases), "")


def _means(chosen: DataFrame) -> pd.Series:
    """CKA by layer, mean over models or pairs; fine-tuned layers up where one of the two is the original."""
    x = chosen["layer_x"].astype(int)
    y = chosen["layer_y"].astype(int)
    original_x = chosen["stage_x"] == "pretrained"
    tuned_y = chosen["stage_y"] == "finetuned"
    turned = original_x & tuned_y
    up = x.where(~turned, y).rename("up")
    across = y.where(~turned, x).rename("across")
    return chosen["value"].groupby([up, across]).mean()


def _values(panel: HeatPanel) -> list[Row]:
    values = list[Row]()
    for (i, j), cka in np.ndenumerate(panel.values):
        row: Row = {"panel": panel.title}
        row["layer_up"] = int(panel.rows[i])
        row["layer_across"] = int(panel.columns[j])
        row["cka"] = float(cka)
        values.append(row)
    return values


def two_clusters(grid: Grid) -> list[int]:
    """Part layers into two clusters by average linkage of 1 − CKA.

    Args:
        grid: (L, L) CKA; made symmetric, since CKA between two models is not.

    Returns:
        The numbers of the layers at which another cluster begins; several, if a cluster is not of neighbours.
    """
    if len(grid) < LEAST_LAYERS or not np.isfinite(grid).all():
        return []
    changes = np.diff(_labels(grid))
    return (np.flatnonzero(changes) + 1).tolist()


def _labels(grid: Grid) -> NDArray[np.int64]:
    """The cluster of each layer."""
    symmetric = (grid + grid.T) / 2
    distance = 1 - np.clip(symmetric, 0, 1)
    np.fill_diagonal(distance, 0)
    condensed = squareform(distance, checks=False)
    tree = linkage(condensed, "average")
    return np.asarray(fcluster(tree, 2, "maxclust"))


def _clusters(maps: Sequence[Map]) -> list[Row]:
    """The clusters of each map of layers against themselves, and CKA within and between them."""
    rows = list[Row]()
    for comparison, panel, models in maps:
        if comparison == FT_ORIG or len(panel.rows) < LEAST_LAYERS:
            continue
        grid = panel.values
        labels = _labels(grid)
        layers = np.array(panel.rows, dtype=int)
        same = labels[:, None] == labels[None]
        itself = np.eye(len(grid), dtype=bool)
        within = float(grid[same & ~itself].mean())
        between = float(grid[~same].mean())
        rows.append(
            {
                "panel": panel.title,
                "clusters": _parts(labels, layers),
                "within": within,
                "between": between,
                "contrast": within - between,
                "models": models,
                "tuned": comparison == FT,
            }
        )
    return rows


def _parts(labels: NDArray[np.int64], layers: NDArray[np.int64]) -> str:
    """`0–2 | 3–5`; `0, 2, 3` of layers that are not neighbours."""
    parts = []
    for label in dict.fromkeys(labels):
        own = layers[labels == label].tolist()
        first, last = own[0], own[-1]
        steps = len(own) - 1
        if steps and last - first == steps:
            parts.append(f"{first}–{last}")
        else:
            parts.append(", ".join(map(str, own)))
    return " | ".join(parts)


# ---------------------------------------------------------------------- surgery


def truncation(frames: Frames, name: str) -> Figure:
    """Figure 3: the score of a head on the state of every layer, model by model and task by task."""
    heads = list(HEADS)
    frame = _operated(frames, heads)
    order = frame["condition"].map(heads.index)
    order = order.sort_values(kind="stable")
    frame = frame.loc[order.index]
    means, lines = model_lines(
        frame, PLACE, "condition", "site", "score", _head, scale=100
    )
    parts = by(frame, *PLACE)
    panels = []
    for panel, (_, part) in zip(lines, parts, strict=True):
        floor = _floor(part, len(panel.across))
        panels.append(replace(panel, series=[floor, *panel.series]))
    values = []
    for row in means:
        value = {
            "task": row["task"],
            "model": row["base"],
            "head": row["condition"],
            "site": row["site"],
            "score": row["mean"],
        }
        values.append(value)
    return figure(name, panels, values)


def _floor(part: DataFrame, sites: int) -> Series:
    """The score of always answering the majority class, as a level line over the sites."""
    score = 100 * float(part["majority_score"].iloc[0])
    return Series(MAJORITY, ("head", MAJORITY), [[score]] * sites)


def _head(condition: str) -> tuple[str, Meaning]:
    """Name and meaning of the line of a head."""
    return HEADS[condition], ("head", HEADS[condition])


def skipping(frames: Frames, name: str) -> Figure:
    """Figure 4: the score without each span of layers, model by model and task by task."""
    frame = _operated(frames, ["skip", "native"])
    panels, values = [], list[Row]()
    for place, part in by(frame, *PLACE):
        native = part["condition"] == "native"
        whole = 100 * part.loc[native, "score"].mean()
        title = f"{place_words(*place.values())} (whole: {whole:.1f})"
        spans = part[part["condition"] == "skip"]
        spans = spans.astype({"first": int, "last": int})
        means = 100 * spans.groupby(["first", "last"])["score"].mean()
        blocks = range(1, spans["last"].max() + 1)
        panel = heat_panel(
            title, means, "first block skipped", "last block skipped", blocks
        )
        panels.append(panel)
        about = {"task": place["task"], "model": place["base"]}
        for (first, last), score in means.items():
            row = {"first": first, "last": last, "score": score}
            values.append(about | row)
    return figure(name, panels, values)


def _operated(frames: Frames, conditions: list[str]) -> DataFrame:
    """Rows of surgery of some kinds, with the column `base`: all fine-tunings of a model together.

    Raises:
        Missing: there are no such rows.
    """
    frame = frames.of("surgery", "score", "condition")
    frame = frame[frame["condition"].isin(conditions)]
    frame = frame[frame["stage"].notna()]  # without means over models
    present(frame, f"the rows of kind `surgery` have none of {', '.join(conditions)}")
    return frame.assign(base=without_copy(frame["model"]))


register(__name__)
