"""Figures of finished passes, kept in files until the comparison has ended, so that another run can go on from them."""

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from aligners.datamodules.run_identity import differences, kept_alike
from aligners.datamodules.store.keeping import load_tensors, save_tensors
from aligners.errors import UserError
from aligners.files.atomic import write_text
from aligners.files.sealed import read_sealed_json, sealed_json
from aligners.similarity.outcome import TileFigures
from aligners.similarity.passes.pass_plan import Pass, Span, Tile

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

    def are_of(self, this: Pass) -> bool:
        """Whether they are of this pass: another version of the package may divide pairs of models otherwise."""
        return {figures.tile for figures in self.tiles} == set(this.tiles)


class SavedPasses:
    """Where the figures of finished passes are kept. One process writes; the others ask it.

    Args:
        folder: folder of its own, which is removed at the end.
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
        plan = self._folder / PLAN
        plain = json.dumps({**about, "memory": limit}, default=str)
        now = json.loads(plain)
        if not plan.exists():
            write_text(plan, sealed_json(now))
            return limit
        try:
            then = read_sealed_json(plan.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(
                f"{plan} is damaged: it is not what was written. Name a new `run`."
            ) from error
        if not given:
            now["memory"] = then.get("memory")
        changes = differences(then, kept_alike(then, now), "")
        if changes:
            raise UserError(
                f"Expected the comparison whose finished passes are in {self._folder}, but this is another: "
                f"{'; '.join(changes[:4])}. To go on, give the same; for anything else, name a new `run`."
            )
        return int(then["memory"])

    def load(self, number: int, this: Pass) -> PassFigures | None:
        """The figures of a pass, if it was finished, by this version of the package.

        Raises:
            ValueError: its file is damaged.
        """
        path = self._path(number)
        if not path.exists():
            return None
        content = load_tensors(path).get("figures")
        if content is None:  # a version before wrote it: the pass is made again
            return None
        written = io.BytesIO(content.numpy().tobytes())
        with safe_globals([PassFigures, TileFigures, Tile, Span]):
            figures: PassFigures = torch.load(written, weights_only=True)
        return figures if figures.are_of(this) else None

    def save(self, number: int, figures: PassFigures) -> None:
        """Keep the figures of a pass that is finished.

        Raises:
            OSError: they cannot be written.
        """
        written = io.BytesIO()
        torch.save(figures, written)
        content = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
        save_tensors(self._path(number), {"figures": content})

    def remove(self) -> None:
        """Remove all of them: the comparison has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.safetensors"
