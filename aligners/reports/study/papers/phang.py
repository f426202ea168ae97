"""Phang et al. 2021: CKA maps before and after fine-tuning and their clusters; models truncated and without spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from aligners.reports.report import Row
from aligners.reports.study.frames import (
    Cell,
    Figure,
    Frames,
    HeatPanel,
    LinePanel,
    Missing,
    Series,
    Table,
    by,
    kind_words,
    place_words,
)
from aligners.reports.study.papers.shared import figure, heat_panel, mean_line, similarities, table, without_copy

LEAST_LAYERS = 4  # of a map in which clusters mean something
MOST_BASES = 4  # of which each has maps of its own; of more, maps are means
AND = " and "
HEADS = {"untuned": "untuned", "tuned": "tuned", "tuned_orig": "tuned, original model"}
MAJORITY = "majority class"
Grid = NDArray[np.float64]
ORIG, FT, BOTH = frozenset(["pretrained"]), frozenset(["finetuned"]), frozenset(["pretrained", "finetuned"])


class Comparison(NamedTuple):
    """One of the paper's maps.

    Attributes:
        name: as the paper has it.
        stages: of the two models.
        models: "one and the same", or "of one base" (fine-tuned twice, or fine-tuned and not).
        up: whose layers go up.
        across: whose go across.
    """

    name: str
    stages: frozenset[str]
    models: str
    up: str
    across: str


class LayerMap(NamedTuple):
    """A map of CKA: what it compares, the mean of (L, L) layers, and of how many models it is."""

    comparison: Comparison
    panel: HeatPanel
    layers: list[int]
    models: int


COMPARISONS = (
    Comparison("ORIG–ORIG", ORIG, "one and the same", "ORIG", "ORIG"),
    Comparison("FT–ORIG", BOTH, "of one base", "FT", "ORIG"),
    Comparison("FT–FT", FT, "one and the same", "FT", "FT"),
    Comparison("FT[1]–FT[2]", FT, "of one base", "FT[1]", "FT[2]"),
)


def layer_maps(frames: Frames, name: str) -> Figure:
    """Figures 1, 2, 5 and 6: CKA of all layers, before and after fine-tuning, task by task."""
    maps = _maps(frames)
    values = [{**row, "models": each.models} for each in maps for row in _values(each.panel)]
    return figure(name, [each.panel for each in maps], values, _clusters_said(maps))


def between_bases(frames: Frames, name: str) -> Figure:
    """Figure 7: CKA of all layers of fine-tuned models of two bases, task by task."""
    frame = _ckas(frames)
    frame = frame[(frame["models"] == "of two bases") & (frame["stages"] == FT)]
    if frame.empty:
        raise Missing("no CKA between fine-tuned models of two bases")
    panels = []
    for (task, kind, pair), own in by(frame, "task", "rows", "base"):
        up, across = str(pair).split(AND) if AND in str(pair) else ["one", "another"]
        title = place_words(task, kind_words(kind), pair)
        panels.append(heat_panel(title, _means(own), f"layer, {up}", f"layer, {across}"))
    values = [row for panel in panels for row in _values(panel)]
    return figure(name, panels, values, models=len(set(frame["model_x"]) | set(frame["model_y"])))


def clusters(frames: Frames, name: str) -> Table:
    """§3: where the layers fall into two clusters, and how distinct these are."""
    maps = _maps(frames)
    rows: list[dict[str, Cell]] = [
        {"panel": each.panel.title, **_contrast(each), "models": each.models}
        for each in maps
        if each.comparison.stages != BOTH and len(each.layers) >= LEAST_LAYERS
    ]
    if not rows:
        raise Missing(f"no map of at least {LEAST_LAYERS} layers against themselves")
    return table(name, rows, _clusters_said(maps))


def truncation(frames: Frames, name: str) -> Figure:
    """Figure 3: the score of a head on the state of every layer, model by model and task by task."""
    panels, values = [], list[Row]()
    for title, own, place in _operated(frames, list(HEADS)):
        sites = sorted(int(site) for site in own["site"].unique())
        floor = 100 * float(own["majority_score"].iloc[0])
        series = [Series(MAJORITY, ("head", MAJORITY), [[floor]] * len(sites))]
        for kind, head in HEADS.items():
            line = own[own["condition"] == kind]
            if len(line):
                series.append(mean_line(head, ("head", head), line, ("site", sites), "score", 100))
                values += [{**place, "head": kind, "site": site, "score": value[0]}
                           for site, value in zip(sites, series[-1].values, strict=True)]  # fmt: skip
        panels.append(LinePanel(title, [str(site) for site in sites], series))
    return figure(name, panels, values)


def skipping(frames: Frames, name: str) -> Figure:
    """Figure 4: the score without each span of layers, model by model and task by task."""
    panels, values = [], list[Row]()
    for title, own, place in _operated(frames, ["skip", "native"]):
        spans = own[own["condition"] == "skip"].astype({"first": int, "last": int})
        blocks = range(1, spans["last"].max() + 1)
        means = 100 * spans.groupby(["first", "last"])["score"].mean()
        whole = 100 * own.loc[own["condition"] == "native", "score"].mean()
        ends = "first block skipped", "last block skipped"
        panels.append(heat_panel(f"{title} (whole: {whole:.1f})", means, *ends, (blocks, blocks)))
        values += [{**place, "first": i, "last": j, "score": value} for (i, j), value in means.items()]
    return figure(name, panels, values)


def _operated(frames: Frames, kinds: list[str]) -> Iterator[tuple[str, pd.DataFrame, Row]]:
    """Title, rows and place of each task and model, all of its fine-tunings together.

    Raises:
        Missing: there are no such rows.
    """
    frame = frames.of("surgery", "score", "condition")
    frame = frame[frame["condition"].isin(kinds) & frame["stage"].notna()]  # without means over models
    if frame.empty:
        raise Missing(f"the rows of kind `surgery` have none of {', '.join(kinds)}")
    for (task, base), own in by(frame.assign(base=without_copy(frame["model"])), "task", "base"):
        yield place_words(task, base), own, {"task": task, "model": base}


# ---------------------------------------------------------------------- CKA of all layers


def _ckas(frames: Frames) -> pd.DataFrame:
    """CKA of all layers, with the columns `stages`, `models` (see `Comparison`), and `base`: none, if many or equal."""
    frame = similarities(frames)
    frame = frame[frame["measure"] == "cka"]
    stages = [frozenset(ends) for ends in zip(frame["stage_x"], frame["stage_y"], strict=True)]
    bases = [without_copy(frame[f"model_{side}"]) for side in "xy"]
    crossed = np.array([ends == BOTH for ends in stages], dtype=bool)  # stages of one model are two of one base
    same = (frame["model_x"] == frame["model_y"]) & ~crossed
    models = np.where(bases[0] != bases[1], "of two bases", np.where(same, "one and the same", "of one base"))
    named = bases[0].where(bases[0] == bases[1], bases[0] + AND + bases[1])
    several = 1 < len(set(bases[0]) | set(bases[1])) <= MOST_BASES
    return frame.assign(stages=stages, models=models, base=named if several else None)


def _means(chosen: pd.DataFrame) -> pd.Series:
    """CKA by layer, mean over models or pairs; fine-tuned layers up where one of the two is the original."""
    turned = (chosen["stage_x"] == "pretrained") & (chosen["stage_y"] == "finetuned")
    up = chosen["layer_x"].where(~turned, chosen["layer_y"]).astype(int)
    across = chosen["layer_y"].where(~turned, chosen["layer_x"]).astype(int)
    return chosen["value"].groupby([up.rename("up"), across.rename("across")]).mean()


def _maps(frames: Frames) -> list[LayerMap]:
    """Every map that there is."""
    maps = []
    for (task, kind, base), own in by(_ckas(frames), "task", "rows", "base"):
        for comparison in COMPARISONS:
            chosen = own[(own["models"] == comparison.models) & (own["stages"] == comparison.stages)]
            layers = sorted({int(layer) for layer in set(chosen["layer_x"]) & set(chosen["layer_y"])})
            if layers:
                models = len(set(chosen["model_x"]) | set(chosen["model_y"]))
                title = place_words(task, kind_words(kind), base, comparison.name)
                ends = f"layer, {comparison.up}", f"layer, {comparison.across}"
                panel = heat_panel(title, _means(chosen), *ends, (layers, layers))
                if comparison.stages != BOTH:
                    panel = replace(panel, cuts=two_clusters(panel.values))
                maps.append(LayerMap(comparison, panel, layers, models))
    if not maps:
        raise Missing("no CKA of pretrained or fine-tuned models: the maps need cells of these stages")
    return maps


def _values(panel: HeatPanel) -> Iterator[Row]:
    for (i, j), value in np.ndenumerate(panel.values):
        layers = {"layer_up": int(panel.rows[i]), "layer_across": int(panel.columns[j])}
        yield {"panel": panel.title, **layers, "cka": float(value)}


def two_clusters(grid: Grid) -> list[int]:
    """Part layers into two clusters by average linkage of 1 − CKA.

    Args:
        grid: (L, L) CKA; it is made symmetric, as that of two models is not.

    Returns:
        The numbers of the layers at which another cluster begins; several, if a cluster is not of neighbours.
    """
    if len(grid) < LEAST_LAYERS or not np.isfinite(grid).all():
        return []
    return [int(place) for place in np.flatnonzero(np.diff(_labels(grid))) + 1]


def _labels(grid: Grid) -> NDArray[np.int64]:
    distance = 1 - np.clip((grid + grid.T) / 2, 0, 1)
    np.fill_diagonal(distance, 0)
    return np.asarray(fcluster(linkage(squareform(distance, checks=False), "average"), 2, "maxclust"))


def _contrast(found: LayerMap) -> dict[str, Cell]:
    """The clusters of a map, and CKA within and between them."""
    grid, labels = found.panel.values, _labels(found.panel.values)
    same = labels[:, None] == labels[None]
    within, between = grid[same & ~np.eye(len(grid), dtype=bool)].mean(), grid[~same].mean()
    parts = [np.array(found.layers)[labels == one].tolist() for one in dict.fromkeys(labels)]
    return {"clusters": " | ".join(map(_part, parts)), "within": float(within), "between": float(between),
            "contrast": float(within - between)}  # fmt: skip


def _part(layers: list[int]) -> str:
    """`0–2`, or `0, 2, 3` where they are not neighbours."""
    run = len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1
    return f"{layers[0]}–{layers[-1]}" if run else ", ".join(map(str, layers))


def _clusters_said(maps: list[LayerMap]) -> list[str]:
    sentence = "{0}: layers {clusters}, CKA {within:.2f} within the clusters and {between:.2f} between them."
    return [
        sentence.format(each.panel.title, **_contrast(each))
        for each in maps
        if each.comparison.name == "FT–FT" and len(each.layers) >= LEAST_LAYERS
    ]
