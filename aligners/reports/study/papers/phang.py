"""The CKA maps of Phang et al. 2021: layer against layer before and after fine-tuning, and the clusters in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from aligners.reports.study.contents import Cell, Column, Figure, HeatPanel, Missing, Table
from aligners.reports.study.frames import Frames, by, kind_words, place_words
from aligners.reports.study.papers.choosing import known

__all__ = ["between_models", "clusters", "layer_maps", "two_clusters", "without_copy"]

LEAST_LAYERS = 4  # of a map in which clusters mean something
MOST_BASES = 4  # of which each has maps of its own; of more, maps are means
COPY = r"#\d+$"  # ends the name of a further fine-tuning of a model
AND = " and "
Grid = NDArray[np.float64]


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


ORIG, FT, BOTH = frozenset(["pretrained"]), frozenset(["finetuned"]), frozenset(["pretrained", "finetuned"])
COMPARISONS = (
    Comparison("ORIG–ORIG", ORIG, "one and the same", "ORIG", "ORIG"),
    Comparison("FT–ORIG", BOTH, "of one base", "FT", "ORIG"),
    Comparison("FT–FT", FT, "one and the same", "FT", "FT"),
    Comparison("FT[1]–FT[2]", FT, "of one base", "FT[1]", "FT[2]"),
)


def layer_maps(frames: Frames) -> Figure:
    """Phang et al., Figures 1, 2, 5 and 6: CKA of all layers, before and after fine-tuning, task by task."""
    panels, values = [], []
    for title, comparison, grid, layers, models in _grids(frames):
        names = [str(layer) for layer in layers]
        cuts = two_clusters(grid) if comparison.stages != BOTH else []
        panels.append(HeatPanel(title, grid, names, names, cuts=cuts, up=f"layer, {comparison.up}",
                                across=f"layer, {comparison.across}"))  # fmt: skip
        values += [{"panel": title, "layer_up": layers[i], "layer_across": layers[j], "cka": float(value),
                    "models": models} for (i, j), value in np.ndenumerate(grid)]  # fmt: skip
    return Figure(
        "phang_figure_1",
        "CKA of all layers before and after fine-tuning (Phang et al., Figures 1, 2, 5 and 6)",
        "Linear CKA between layers of models before (ORIG) and after fine-tuning (FT), and of two fine-tuned models "
        "(FT[1]–FT[2]), mean over models or pairs, on held-out texts. Lines part the layers into the two clusters of "
        "average linkage of 1 − CKA.",
        "Heat maps of CKA between all layers, one for each task and comparison. " + " ".join(_said(frames)),
        panels,
        "CKA",
        limits=(0.0, 1.0),
        values=values,
        findings=_said(frames),
    )


def between_models(frames: Frames) -> Figure:
    """Phang et al., Figure 7: CKA of all layers of fine-tuned models of two bases, task by task."""
    frame = _ckas(frames)
    frame = frame[(frame["models"] == "of two bases") & (frame["stages"] == FT)]
    if frame.empty:
        raise Missing("no CKA between fine-tuned models of two bases")
    panels, values = [], []
    for (task, kind, pair), own in by(frame, "task", "rows", "base"):
        up, across = (sorted({int(layer) for layer in own[f"layer_{side}"]}) for side in "xy")
        grid, title = _mean_grid(own, up, across), place_words(task, kind_words(kind), pair)
        ends = str(pair).split(AND) if AND in str(pair) else ["one", "another"]
        panels.append(HeatPanel(title, grid, [str(layer) for layer in up], [str(layer) for layer in across],
                                up=f"layer, {ends[0]}", across=f"layer, {ends[1]}"))  # fmt: skip
        values += [{"panel": title, "layer_up": up[i], "layer_across": across[j], "cka": float(value)}
                   for (i, j), value in np.ndenumerate(grid)]  # fmt: skip
    models = len(set(frame["model_x"]) | set(frame["model_y"]))
    return Figure(
        "phang_figure_7",
        "CKA between fine-tuned models of different bases (Phang et al., Figure 7)",
        f"Linear CKA of each layer of one fine-tuned model (up) to each of another (across), mean over the pairs of "
        f"{models} models that two bases have, on held-out texts.",
        "Heat maps of CKA between the layers of fine-tuned models, one for each task and pair of bases.",
        panels,
        "CKA",
        limits=(0.0, 1.0),
        values=values,
    )


def clusters(frames: Frames) -> Table:
    """Where the layers fall into two clusters, and how distinct these are."""
    rows: list[dict[str, Cell]] = []
    for title, comparison, grid, layers, models in _grids(frames):
        if comparison.stages != BOTH and len(layers) >= LEAST_LAYERS:
            rows.append({"panel": title, **_contrast(grid, layers), "models": models})
    if not rows:
        raise Missing(f"no map of at least {LEAST_LAYERS} layers against themselves")
    heading = {"panel": "map", "clusters": "clusters", "within": "CKA within", "between": "CKA between"}
    columns = [Column(key, said, ".3f") for key, said in {**heading, "contrast": "difference"}.items()]
    return Table(
        "phang_clusters",
        "Clusters of layers (Phang et al., §3)",
        "Two clusters by average linkage of 1 − CKA; CKA is the mean over pairs of different layers of one cluster, "
        "and of two. A block-diagonal map has a large difference.",
        known([*columns, Column("models", "models", "d")], rows),
        rows,
        notes=["Held out: CKA is on test texts, and nothing is fitted."],
        findings=_said(frames),
    )


def two_clusters(grid: Grid) -> list[int]:
    """Part layers into two clusters by average linkage of 1 − CKA.

    Args:
        grid: (L, L) CKA; it is made symmetric, as that of two models is not.

    Returns:
        The numbers of the layers at which another cluster begins; several, if a cluster is not of neighbours.
    """
    if len(grid) < LEAST_LAYERS or not np.isfinite(grid).all():
        return []
    labels = _labels(grid)
    return [place for place in range(1, len(labels)) if labels[place] != labels[place - 1]]


def _labels(grid: Grid) -> NDArray[np.int64]:
    distance = 1 - np.clip((grid + grid.T) / 2, 0, 1)
    np.fill_diagonal(distance, 0)
    return np.asarray(fcluster(linkage(squareform(distance, checks=False), "average"), 2, "maxclust"))


def _contrast(grid: Grid, layers: list[int]) -> dict[str, Cell]:
    labels = _labels(grid)
    off = ~np.eye(len(grid), dtype=bool)
    same = labels[:, None] == labels[None]
    within, between = grid[same & off].mean(), grid[~same].mean()
    parts = [
        [layer for layer, label in zip(layers, labels, strict=True) if label == one] for one in dict.fromkeys(labels)
    ]
    words = " | ".join(", ".join(map(str, part)) if not _runs(part) else f"{part[0]}–{part[-1]}" for part in parts)
    return {"clusters": words, "within": float(within), "between": float(between), "contrast": float(within - between)}


def _runs(layers: list[int]) -> bool:
    return len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1


def _grids(frames: Frames) -> list[tuple[str, Comparison, Grid, list[int], int]]:
    """Title, comparison, mean CKA (L, L), layers and number of models, of every map that there is."""
    frame, found = _ckas(frames), []
    for (task, kind, base), own in by(frame, "task", "rows", "base"):
        for comparison in COMPARISONS:
            chosen = own[(own["models"] == comparison.models) & (own["stages"] == comparison.stages)]
            layers = sorted({int(layer) for layer in set(chosen["layer_x"]) & set(chosen["layer_y"])})
            if layers:
                models = len(set(chosen["model_x"]) | set(chosen["model_y"]))
                title = place_words(task, kind_words(kind), base, comparison.name)
                found.append((title, comparison, _mean_grid(chosen, layers, layers), layers, models))
    if not found:
        raise Missing("no CKA of pretrained or fine-tuned models: the maps need cells of these stages")
    return found


def without_copy(models: pd.Series) -> pd.Series:
    """The models that these are fine-tunings of."""
    return models.str.replace(COPY, "", regex=True)


def _ckas(frames: Frames) -> pd.DataFrame:
    """CKA of all layers, with the columns of `_compared`."""
    frame = frames.of("similarity", "value")
    return _compared(frame[(frame["measure"] == "cka") & (frame["features"] == "raw")])


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with the columns `stages`, `models` (see `Comparison`), and `base`: none, if bases are many or equal."""
    stages = [frozenset([x, y]) for x, y in zip(frame["stage_x"], frame["stage_y"], strict=True)]
    bases = [without_copy(frame[f"model_{side}"]) for side in "xy"]
    same = frame["model_x"] == frame["model_y"]
    models = np.where(bases[0] != bases[1], "of two bases", np.where(same, "one and the same", "of one base"))
    crossed = np.array([own == BOTH for own in stages], dtype=bool)  # stages of one model are two models of one base
    models = np.where(crossed & (models == "one and the same"), "of one base", models)
    every = set(bases[0]) | set(bases[1])
    named = bases[0].where(bases[0] == bases[1], bases[0] + AND + bases[1])
    return frame.assign(stages=stages, models=models, base=named if 1 < len(every) <= MOST_BASES else None)


def _mean_grid(chosen: pd.DataFrame, rows: list[int], columns: list[int]) -> Grid:
    """Mean over models or pairs; fine-tuned layers up where one of the two is the original."""
    turned = (chosen["stage_x"] == "pretrained") & (chosen["stage_y"] == "finetuned")
    up = chosen["layer_x"].where(~turned, chosen["layer_y"])
    across = chosen["layer_y"].where(~turned, chosen["layer_x"])
    means = chosen["value"].groupby([up, across]).mean()
    return np.array([[means.get((a, b), np.nan) for b in columns] for a in rows], dtype=float)


def _said(frames: Frames) -> list[str]:
    said = []
    for title, comparison, grid, layers, _ in _grids(frames):
        if comparison.name == "FT–FT" and len(layers) >= LEAST_LAYERS:
            found = _contrast(grid, layers)
            said.append(
                f"{title}: layers {found['clusters']}, CKA {found['within']:.2f} within the clusters and "
                f"{found['between']:.2f} between them."
            )
    return said
