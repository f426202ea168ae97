"""Phang et al. 2021: CKA maps before and after fine-tuning and their clusters; models truncated and without spans."""

from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from aligners.reports.report import Row
from aligners.reports.study.contents import (
    Figure,
    HeatPanel,
    Series,
    Table,
    heat_panel,
    model_lines,
)
from aligners.reports.study.described_tables import figure, table
from aligners.reports.study.frames import Frames, by, kind_words, place_words
from aligners.reports.study.registry import register
from aligners.reports.study.row_selection import models_in, present, similarities, without_copy

PLACE = ("task", "base")
LEAST_LAYERS = 4  # of a map in which clusters mean something
MOST_BASES = 4  # of which each has maps of its own; of more, maps are means
AND = " and "
HEADS = {"untuned": "untuned", "tuned": "tuned", "tuned_orig": "tuned, original model"}
MAJORITY = "majority class"
# The paper's comparisons, of models before (ORIG) and after fine-tuning (FT): layers of the first go up.
COMPARISONS = _, FT_ORIG, FT, _ = ("ORIG–ORIG", "FT–ORIG", "FT–FT", "FT[1]–FT[2]")
TWO_BASES = "FT of two bases"
Grid = NDArray[np.float64]


def layer_maps(frames: Frames, name: str) -> Figure:
    """Figures 1, 2, 5 and 6: CKA of all layers, before and after fine-tuning, task by task."""
    maps = _maps(frames)
    values = [{**row, "models": models} for _, panel, models in maps for row in _values(panel)]
    return figure(name, [panel for _, panel, _ in maps], values, clusters=_clusters(maps))


def between_bases(frames: Frames, name: str) -> Figure:
    """Figure 7: CKA of all layers of fine-tuned models of two bases, task by task."""
    frame = _ckas(frames)
    frame = present(
        frame[frame["comparison"] == TWO_BASES], "no CKA between fine-tuned models of two bases"
    )
    panels = []
    for place, part in by(frame, "task", "rows", "base"):
        up, _, across = (place["base"] or f"one{AND}another").partition(AND)
        title = place_words(place["task"], kind_words(place["rows"]), place["base"])
        panels.append(heat_panel(title, _means(part), f"layer, {up}", f"layer, {across}"))
    return figure(
        name, panels, [row for panel in panels for row in _values(panel)], models=models_in(frame)
    )


def clusters(frames: Frames, name: str) -> Table:
    """§3: where the layers fall into two clusters, and how distinct these are."""
    rows = present(
        _clusters(_maps(frames)), f"no map of at least {LEAST_LAYERS} layers against themselves"
    )
    return table(name, rows, clusters=rows)


def truncation(frames: Frames, name: str) -> Figure:
    """Figure 3: the score of a head on the state of every layer, model by model and task by task."""
    frame = _operated(frames, list(HEADS))
    frame = frame.sort_values(
        "condition", key=lambda heads: heads.map([*HEADS].index), kind="stable"
    )
    look = {head: (name, ("head", name)) for head, name in HEADS.items()}
    means, lines = model_lines(frame, PLACE, "condition", "site", "score", look.__getitem__, 100)
    panels = []
    for panel, (_, part) in zip(lines, by(frame, *PLACE), strict=True):
        floor = 100 * float(part["majority_score"].iloc[0])
        majority = Series(MAJORITY, ("head", MAJORITY), [[floor]] * len(panel.across))
        panels.append(replace(panel, series=[majority, *panel.series]))
    columns = {
        "task": "task",
        "base": "model",
        "condition": "head",
        "site": "site",
        "mean": "score",
    }
    return figure(name, panels, [{new: row[old] for old, new in columns.items()} for row in means])


def skipping(frames: Frames, name: str) -> Figure:
    """Figure 4: the score without each span of layers, model by model and task by task."""
    panels, values = [], list[Row]()
    for place, part in by(_operated(frames, ["skip", "native"]), *PLACE):
        spans = part[part["condition"] == "skip"].astype({"first": int, "last": int})
        blocks = range(1, spans["last"].max() + 1)
        means = 100 * spans.groupby(["first", "last"])["score"].mean()
        whole = 100 * part.loc[part["condition"] == "native", "score"].mean()
        title = f"{place_words(*place.values())} (whole: {whole:.1f})"
        panels.append(heat_panel(title, means, "first block skipped", "last block skipped", blocks))
        about = {"task": place["task"], "model": place["base"]}
        values += [
            {**about, "first": i, "last": j, "score": value} for (i, j), value in means.items()
        ]
    return figure(name, panels, values)


def _operated(frames: Frames, kinds: list[str]) -> pd.DataFrame:
    """Rows of surgery of some kinds, with the column `base`: all fine-tunings of a model together.

    Raises:
        Missing: there are no such rows.
    """
    frame = frames.of("surgery", "score", "condition")
    frame = frame[
        frame["condition"].isin(kinds) & frame["stage"].notna()
    ]  # without means over models
    present(frame, f"the rows of kind `surgery` have none of {', '.join(kinds)}")
    return frame.assign(base=without_copy(frame["model"]))


# ---------------------------------------------------------------------- CKA of all layers


def _ckas(frames: Frames) -> pd.DataFrame:
    """CKA of all layers, with the columns `comparison`, see `COMPARISONS`, and `base`: none, if many or equal."""
    frame = similarities(frames)
    frame = frame[frame["measure"] == "cka"]
    stages, bases = (
        frame[["stage_x", "stage_y"]],
        [without_copy(frame[f"model_{side}"]) for side in "xy"],
    )
    before, after = ((stages == stage).all(axis=1) for stage in ("pretrained", "finetuned"))
    both = stages.isin(("pretrained", "finetuned")).all(axis=1) & ~before & ~after
    same, of_one_base = frame["model_x"] == frame["model_y"], bases[0] == bases[1]
    held = [before & same, both & of_one_base, after & same, after & of_one_base, after]
    comparison = np.select(held, [*COMPARISONS, TWO_BASES], "")
    several = 1 < len(set(bases[0]) | set(bases[1])) <= MOST_BASES
    named = bases[0].where(of_one_base, bases[0] + AND + bases[1])
    return frame.assign(comparison=comparison, base=named if several else None)


def _means(chosen: pd.DataFrame) -> pd.Series:
    """CKA by layer, mean over models or pairs; fine-tuned layers up where one of the two is the original."""
    turned = (chosen["stage_x"] == "pretrained") & (chosen["stage_y"] == "finetuned")
    up = chosen["layer_x"].where(~turned, chosen["layer_y"]).astype(int)
    across = chosen["layer_y"].where(~turned, chosen["layer_x"]).astype(int)
    return chosen["value"].groupby([up.rename("up"), across.rename("across")]).mean()


def _maps(frames: Frames) -> list[tuple[str, HeatPanel, int]]:
    """Every map that there is: which comparison it shows, its panel, and of how many models it is."""
    maps = []
    for place, part in by(_ckas(frames), "task", "rows", "base"):
        for comparison in COMPARISONS:
            chosen = part[part["comparison"] == comparison]
            layers = sorted(int(layer) for layer in set(chosen["layer_x"]) & set(chosen["layer_y"]))
            if layers:
                title = place_words(
                    place["task"], kind_words(place["rows"]), place["base"], comparison
                )
                up, across = (f"layer, {models}" for models in comparison.split("–"))
                panel = heat_panel(title, _means(chosen), up, across, layers)
                if comparison != FT_ORIG:
                    panel = replace(panel, cuts=two_clusters(panel.values))
                maps.append((comparison, panel, models_in(chosen)))
    return present(
        maps, "no CKA of pretrained or fine-tuned models: the maps need cells of these stages"
    )


def _values(panel: HeatPanel) -> list[Row]:
    return [
        {
            "panel": panel.title,
            "layer_up": int(up),
            "layer_across": int(across),
            "cka": float(panel.values[i, j]),
        }
        for i, up in enumerate(panel.rows)
        for j, across in enumerate(panel.columns)
    ]


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
    return np.asarray(
        fcluster(linkage(squareform(distance, checks=False), "average"), 2, "maxclust")
    )


def _clusters(maps: list[tuple[str, HeatPanel, int]]) -> list[Row]:
    """The clusters of each map of layers against themselves, and CKA within and between them."""
    rows = []
    for comparison, panel, models in maps:
        if comparison != FT_ORIG and len(panel.rows) >= LEAST_LAYERS:
            grid, labels = panel.values, _labels(panel.values)
            same = labels[:, None] == labels[None]
            within, between = (
                float(grid[same & ~np.eye(len(grid), dtype=bool)].mean()),
                float(grid[~same].mean()),
            )
            layers = np.array(panel.rows, dtype=int)
            parts = " | ".join(
                _part(layers[labels == label].tolist()) for label in dict.fromkeys(labels)
            )
            means = {"within": within, "between": between, "contrast": within - between}
            tuned = comparison == FT
            rows.append(
                {"panel": panel.title, "clusters": parts, **means, "models": models, "tuned": tuned}
            )
    return rows


def _part(layers: list[int]) -> str:
    """`0–2`, or `0, 2, 3` where they are not neighbours."""
    run = len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1
    return f"{layers[0]}–{layers[-1]}" if run else ", ".join(map(str, layers))


register(__name__)
