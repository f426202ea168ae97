"""Figures of finished passes, kept in files until the comparison has ended, so that another run can go on from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligners.files.whole import write_text
from aligners.similarity.outcome import TileFigures
from aligners.similarity.passes.plan import Span, Tile
from datamodules.identity import differences
from datamodules.store.results import load_tensors, save_tensors

__all__ = ["PASSES", "PassFigures", "SavedPasses"]

PASSES = "passes"  # the folder, in that of a run, until all of the report is there
PLAN = "plan.json"


@dataclass
class PassFigures:
    """All that is left of a pass.

    Attributes:
        tiles: the figures of its tiles, from all ranks.
        norms: nuclear norms (L,) of the layers of each span, by model and first position.
        rows: number of rows that were read.
    """

    tiles: list[TileFigures]
    norms: dict[tuple[int, int], Tensor]
    rows: int


class SavedPasses:
    """Where the figures of finished passes are kept. One process writes; the others ask it.

    Args:
        folder: of its own, which is removed at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, about: Mapping[str, Any], limit: int, given: bool) -> int:
        """Begin a comparison, or go on with one that was begun.

        Args:
            about: what it is about, in plain values.
            limit: bytes that it may take.
            given: whether the user said so.

        Returns:
            The bytes for which its passes are planned: those of the first run, so that they are the same passes.

        Raises:
            ValueError: the comparison that was begun there is another one.
        """
        plan, now = self._folder / PLAN, json.loads(json.dumps({**about, "memory": limit}, default=str))
        if not plan.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_text(plan, json.dumps(now, indent=1) + "\n")
            return limit
        try:
            then = json.loads(plan.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{plan} is damaged: it is not what was written. Name a new `run`.") from error
        found = differences(then, now if given else {**now, "memory": then.get("memory")}, "")
        if found:
            raise ValueError(
                f"Expected the comparison whose finished passes are in {self._folder}, but this is another: "
                f"{'; '.join(found[:4])}. To go on, give the same; for anything else, name a new `run`."
            )
        return int(then["memory"])

    def load(self, number: int) -> PassFigures | None:
        """The figures of a pass, if it was finished.

        Raises:
            ValueError: its file is damaged.
        """
        path = self._path(number)
        if not path.exists():
            return None
        tensors = load_tensors(path)
        about = json.loads(tensors.pop("about").numpy().tobytes())
        tiles = [_tile(said, {k: v for k, v in tensors.items() if k.startswith(f"{n}/")}) for n, said in about["tiles"]]
        norms = {(model, first): tensors[f"norms/{model}/{first}"] for model, first in about["norms"]}
        return PassFigures(tiles, norms, about["rows"])

    def save(self, number: int, figures: PassFigures) -> None:
        """Keep the figures of a pass that is finished.

        Raises:
            OSError: they cannot be written.
        """
        tensors = {f"norms/{model}/{first}": norms for (model, first), norms in figures.norms.items()}
        tiles = []
        for n, each in enumerate(figures.tiles):
            tiles.append((n, _said(each)))
            for (measure, figure), grids in each.grids.items():
                tensors |= {f"{n}/{measure}/{figure}/{direction}": grid for direction, grid in grids.items()}
        about = json.dumps({"tiles": tiles, "norms": list(figures.norms), "rows": figures.rows}).encode()
        save_tensors(self._path(number), {**tensors, "about": torch.tensor(list(about), dtype=torch.uint8)})

    def remove(self) -> None:
        """Remove all of them: the comparison has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.safetensors"


def _said(figures: TileFigures) -> dict[str, Any]:
    """Everything about a tile but its grids; of these, which there are."""
    tile = figures.tile
    spans = [[span.model, span.first, span.end] for span in (tile.x, tile.y)]
    refused = [[*key, why] for key, why in figures.refused.items()]
    grids = [[*key, list(grids)] for key, grids in figures.grids.items()]
    return {
        "tile": [*spans, tile.leads, tile.whole], "rows": figures.rows, "refused": refused, "grids": grids,
    }  # fmt: skip


def _tile(said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TileFigures:
    x, y, leads, whole = said["tile"]
    by_name = {name.partition("/")[2]: grid for name, grid in tensors.items()}
    found = {
        (measure, figure): {direction: by_name[f"{measure}/{figure}/{direction}"] for direction in directions}
        for measure, figure, directions in said["grids"]
    }
    return TileFigures(
        Tile(Span(*x), Span(*y), leads, whole),
        found,
        {(measure, figure): why for measure, figure, why in said["refused"]},
        said["rows"],
    )
