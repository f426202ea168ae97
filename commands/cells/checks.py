"""What can be said of a study's cells before any of them runs: refusals, and what will not be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aligners.fitting.fits import seeded
from commands.cells.options import CellOptions
from studies.cells import Cell
from studies.kinds import KINDS
from studies.sizes import Size, size_of
from studies.spec import Study

__all__ = ["check_maps", "model_sizes", "not_injected"]


def model_sizes(study: Study, *, assume: bool) -> dict[str, Size]:
    """The size of each model of a study.

    Args:
        study: the study.
        assume: whether a model that cannot be reached has the size that the study file assumes.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    found = {}
    for name in study.models.listed():
        try:
            found[name] = size_of(name, study.data)
        except ValueError:
            if not assume:
                raise
            found[name] = Size.assumed(study.assume)
    return found


def check_maps(cells: Sequence[Cell], options: CellOptions, sizes: Mapping[str, Size]) -> None:
    """Raise if a map cannot have the widths of some pair of models.

    Args:
        cells: of the study.
        options: what the commands say of their options.
        sizes: of the models.

    Raises:
        ValueError: names the pair.
    """
    tried = set()
    for cell in cells:
        if cell.kind not in ("fit", "fit_pairs", "stitch"):
            continue
        widths = [sizes[model.name.split("#")[0]].width for model in cell.models]
        if cell.kind == "fit_pairs" and len(set(widths)) > 1:
            raise ValueError(
                f"Expected models of equal widths where `fit.pairs_at_once` puts several pairs into one bank, but got "
                f"{', '.join(map(str, widths))} for {cell.said()}. Set it to 1, or give `pairs.given`."
            )
        x, y = widths[:2]
        if (cell.kind, cell.task, x, y) in tried:
            continue
        tried.add((cell.kind, cell.task, x, y))
        names = KINDS[cell.kind].names
        data = {name: value for name, value in cell.options.get("data", {}).items() if name not in names}
        made = options.parser(cell.kind).instantiate(options.parsed(cell.kind, {**cell.options, "data": data}))
        try:
            for factory in made.model.factories.values():
                seeded(factory, 0, 1, x, y)
        except ValueError as error:
            raise ValueError(
                f"Expected models of widths that every map of `{cell.kind}` can have, but got {cell.said()}: {error} "
                "Leave the map out, or give `pairs.given` without such pairs."
            ) from error


def not_injected(cells: Sequence[Cell], sizes: Mapping[str, Size]) -> list[str]:
    """Say of which cells the injection is left out, as a model has no head; their errors are measured."""
    headless: dict[str, int] = {}
    for cell in cells:
        if cell.kind == "inject" and cell.stage == "pretrained":
            for model in cell.models[1:] if not cell.options.get("both_directions") else cell.models:
                if sizes[model.name].known and sizes[model.name].head is None:
                    headless[model.name] = headless.get(model.name, 0) + 1
    return [
        f"Nothing will be injected into {name}, which has no head: {count} cell{'s' if count > 1 else ''} with errors "
        "alone."
        for name, count in headless.items()
    ]
