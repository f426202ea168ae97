"""What can be said of a study's cells before any of them runs: refusals, and what will not be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from jsonargparse import Namespace

from aligners.cli.cells.options import CellOptions
from aligners.fitting.fits import seeded
from aligners.injection.routes import Routes, route_numbers
from aligners.models.architectures import Component, first_site
from aligners.studies.cells import Cell
from aligners.studies.kinds import KINDS
from aligners.studies.sizes import Size, size_of
from aligners.studies.spec import Study
from datamodules.rows.sites import parse_layers, route_sites

__all__ = ["check_cells", "model_sizes", "not_injected"]


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


class _Asked(NamedTuple):
    """A cell that is checked: its options as values and instantiated, its models, and which of them are paired."""

    parsed: Namespace
    made: Namespace
    names: list[str]
    sizes: list[Size]
    pairs: list[tuple[int, int]]


def check_cells(cells: Sequence[Cell], options: CellOptions, sizes: Mapping[str, Size]) -> None:
    """Raise if a cell could not run with its models.

    Args:
        cells: of the study.
        options: what the commands say of their options.
        sizes: of the models.

    Raises:
        ValueError: a map or identity stitching that needs equal widths or numbers of heads, sites or layers that a
            model does not have, or nothing to stitch into; names the cell.
    """
    tried = set()
    for cell in cells:
        own = [_sized(model.stage, sizes[model.name.split("#")[0]]) for model in cell.models]
        key = (cell.kind, cell.task, tuple(own), str(cell.options["data"].get("pairs")))
        if cell.kind not in CHECKS or key in tried:
            continue
        tried.add(key)
        asked = _asked(cell, own, options)
        try:
            for check in CHECKS[cell.kind]:
                check(asked)
        except ValueError as error:
            raise ValueError(
                f"Expected models that `{cell.kind.removesuffix('_pairs')}` of the study can take, but got "
                f"{cell.said()}: {error} Change its options, or leave such models out: `pairs.given` names the pairs "
                "that are wanted."
            ) from error


def not_injected(cells: Sequence[Cell], sizes: Mapping[str, Size]) -> list[str]:
    """Say of which cells the injection is left out, as a model has no head; their errors are measured."""
    headless: dict[str, int] = {}
    for cell in cells:
        if cell.kind == "inject" and cell.stage != "finetuned":
            for model in cell.models[1:] if not cell.options.get("both_directions") else cell.models:
                if sizes[model.name].known and sizes[model.name].head is None:
                    headless[model.name] = headless.get(model.name, 0) + 1
    return [
        f"Nothing will be injected into {name}, which has no head: {count} cell{'s' if count > 1 else ''} with errors "
        "alone."
        for name, count in headless.items()
    ]


def _sized(stage: str, size: Size) -> Size:
    return replace(size, head="classification") if stage == "finetuned" else size


def _asked(cell: Cell, sizes: list[Size], options: CellOptions) -> _Asked:
    names = KINDS[cell.kind].names
    data = {name: value for name, value in cell.options["data"].items() if name not in names}
    parsed = options.parsed(cell.kind, {**cell.options, "data": data})
    made, pairs = options.parser(cell.kind).instantiate(parsed), [(0, 1)]
    if cell.kind == "fit_pairs":
        pairs = [(x, y) for x, y in cell.options["data"]["pairs"]]
    elif cell.kind in ("stitch", "identity"):
        wanted: Routes = made.model.wanted_routes if cell.kind == "stitch" else made.routes or "all"
        pairs = route_numbers(len(sizes), wanted)
    return _Asked(parsed, made, [model.name for model in cell.models], sizes, pairs)


# ---------------------------------------------------------------------- checks


def _one_width(asked: _Asked) -> None:
    widths = [size.width for size in asked.sizes]
    if len(set(widths)) > 1:
        raise ValueError(
            f"`fit.pairs_at_once` puts several pairs into one bank, which needs models of equal widths, but theirs are "
            f"{', '.join(map(str, widths))}. Set it to 1."
        )


def _maps(asked: _Asked) -> None:
    """Every map can be built between the widths of the models."""
    for x, y in _ends(asked):
        _build(asked, x.width, y.width)


def _maps_of_heads(asked: _Asked) -> None:
    """Every map can be built between the numbers of heads, as far as they are known."""
    for x, y in _ends(asked):
        if x.heads is not None and y.heads is not None:
            _build(asked, x.heads, y.heads)


def _build(asked: _Asked, d_x: int, d_y: int) -> None:
    for factory in asked.made.model.factories.values():
        seeded(factory, 0, 1, d_x, d_y)


def _identity(asked: _Asked) -> None:
    for x, y in asked.pairs:
        widths = asked.sizes[x].width, asked.sizes[y].width
        if widths[0] != widths[1]:
            raise ValueError(
                f"widths {widths[0]} of {asked.names[x]} and {widths[1]} of {asked.names[y]} differ, so the identity "
                "does not apply."
            )


def _sites(asked: _Asked, *, least: int = 0) -> None:
    """All sites are there, in models whose sizes are known."""
    data, depths = asked.parsed.data, [size.layers for size in asked.sizes]
    component: Component = data.get("component") or "residual"
    for x, y in asked.pairs:
        for pair in route_sites(data.sites, depths, x, y, component):
            for model, site in zip((x, y), pair, strict=True):
                _there("sites", site, asked, model, max(least, first_site(component)))


def _layers(asked: _Asked) -> None:
    data = asked.parsed.data
    component: Component = data.get("component") or "residual"
    for model, size in enumerate(asked.sizes):
        for layer in parse_layers(data.layers, size.layers, component):
            _there("layers", layer, asked, model, first_site(component))


def _there(option: str, site: int, asked: _Asked, model: int, least: int) -> None:
    size = asked.sizes[model]
    if size.known and not least <= site <= size.layers:
        raise ValueError(
            f"`{option}` names {site}, but {asked.names[model]} has L = {size.layers} blocks: from {least} to "
            f"{size.layers}."
        )


def _heads(asked: _Asked) -> None:
    """All models that are stitched into have heads, of one task."""
    targets = {asked.names[y]: asked.sizes[y].head for _, y in asked.pairs if asked.sizes[y].known}
    headless = [name for name, head in targets.items() if head is None]
    if headless:
        raise ValueError(f"there is no head to stitch into in {', '.join(headless)}.")
    if len(set(targets.values())) > 1:
        said = ", ".join(f"{name}: {head}" for name, head in targets.items())
        raise ValueError(f"their heads are of different tasks, whose losses cannot stand side by side ({said}).")


def _ends(asked: _Asked) -> set[tuple[Size, Size]]:
    """The sizes of the two models of each pair."""
    return {(asked.sizes[x], asked.sizes[y]) for x, y in asked.pairs}


CHECKS: dict[str, Sequence[Callable[[_Asked], None]]] = {
    "fit": (_sites, _maps),
    "fit_pairs": (_one_width, _sites, _maps),
    "attention": (partial(_sites, least=1), _maps_of_heads),  # embeddings have no attention
    "stitch": (_sites, _heads, _maps),
    "identity": (_identity, _sites, _heads),
    "probe": (_layers,),
    "similarity": (_layers,),
}
