"""What a study's cells can do with their models: what is refused, or will be left out, before any of them runs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from jsonargparse import Namespace

from aligners.cli.cells.cell_options import CellOptions
from aligners.datamodules.rows.sites import parse_layers, route_sites
from aligners.errors import UserError
from aligners.fitting.fits import seeded
from aligners.injection.routes import route_numbers
from aligners.models.architectures import Component, first_site
from aligners.studies.cells import Cell, Size, sizes_in


class Tried(NamedTuple):
    """A cell to check: its options as values and instantiated, its models, and which of them are paired."""

    parsed: Namespace
    made: Namespace
    names: list[str]
    sizes: list[Size]
    pairs: Sequence[tuple[int, int]]

    @property
    def component(self) -> Component:
        """The component whose states the cell reads."""
        return self.parsed.data.get("component") or "residual"


def check_cells(
    cells: Sequence[Cell], options: CellOptions, sizes: Mapping[str, Size]
) -> None:
    """Raise if a cell could not run with its models.

    Args:
        cells: cells of the study.
        options: options of every kind of cell.
        sizes: sizes of the models.

    Raises:
        ValueError: a map or identity stitching that needs equal widths or numbers of heads, sites or layers that a
            model does not have, or nothing to stitch into; names the cell.
    """
    checked = set()
    for cell in cells:
        of_models = sizes_in(cell, sizes)
        key = (cell.kind, cell.task, *of_models, str(cell.options["data"].get("pairs")))
        if cell.kind not in CHECKS or key in checked:
            continue
        checked.add(key)
        tried = _tried(cell, options, of_models)
        try:
            for check in CHECKS[cell.kind]:
                check(tried)
        except ValueError as error:
            raise UserError(
                f"Expected models that `{cell.kind.removesuffix('_pairs')}` of the study can take, but got "
                f"{cell.said()}: {error} Change its options, or leave such models out: `pairs.given` names "
                "the pairs to compare."
            ) from error


def _tried(cell: Cell, options: CellOptions, sizes: list[Size]) -> Tried:
    parsed, made = options.of(cell)
    pairs = cell.options["data"].get("pairs") or [(0, 1)]
    if cell.kind == "stitch":
        pairs = route_numbers(len(sizes), made.model.wanted_routes or "all")
    elif cell.kind == "identity":
        pairs = route_numbers(len(sizes), made.routes or "all")
    return Tried(parsed, made, [model.name for model in cell.models], sizes, pairs)


def not_injected(cells: Sequence[Cell], sizes: Mapping[str, Size]) -> list[str]:
    """Report which cells inject nothing because a model has no head; only their errors are measured."""
    headless = Counter[str]()
    for cell in cells:
        if cell.kind != "inject" or cell.stage == "finetuned":
            continue
        targets = (
            cell.models if cell.options.get("both_directions") else cell.models[1:]
        )
        for model in targets:
            if sizes[model.name].known and sizes[model.name].head is None:
                headless[model.name] += 1
    lines = []
    for name, count in headless.items():
        of_cells = (
            f"{count} cell{'s' if count > 1 else ''} with the errors of maps only."
        )
        lines.append(
            f"Nothing will be injected into {name}, which has no head: {of_cells}"
        )
    return lines


def _one_width(cell: Tried) -> None:
    widths = [size.width for size in cell.sizes]
    if len(set(widths)) > 1:
        raise UserError(
            f"`fit.pairs_at_once` puts several pairs into one bank, which needs models of equal widths, but theirs are "
            f"{', '.join(map(str, widths))}. Set it to 1."
        )


def _maps(cell: Tried, *, of: str = "width") -> None:
    """Check that every map can be built for the models' widths, or numbers of heads, as far as these are known."""
    for x, y in cell.pairs:
        d_x, d_y = getattr(cell.sizes[x], of), getattr(cell.sizes[y], of)
        if d_x is not None and d_y is not None:
            for factory in cell.made.model.factories.values():
                seeded(factory, 0, 1, d_x, d_y)


def _equal_widths(cell: Tried) -> None:
    for x, y in cell.pairs:
        if cell.sizes[x].width != cell.sizes[y].width:
            raise UserError(
                f"widths {cell.sizes[x].width} of {cell.names[x]} and {cell.sizes[y].width} of {cell.names[y]} differ, "
                "so the identity does not apply."
            )


def _sites(cell: Tried, *, least: int = 0) -> None:
    depths = [size.layers for size in cell.sizes]
    least = max(least, first_site(cell.component))
    for x, y in cell.pairs:
        for site_x, site_y in route_sites(
            cell.parsed.data.sites, depths, x, y, cell.component
        ):
            _has("sites", site_x, cell, x, least)
            _has("sites", site_y, cell, y, least)


def _layers(cell: Tried) -> None:
    for model, size in enumerate(cell.sizes):
        for layer in parse_layers(cell.parsed.data.layers, size.layers, cell.component):
            _has("layers", layer, cell, model, first_site(cell.component))


def _has(option: str, site: int, cell: Tried, model: int, least: int) -> None:
    """Raise unless the model has this layer, if its size is known."""
    size = cell.sizes[model]
    last = size.layers + size.normed
    if size.known and not least <= site <= last:
        norm = "no final norm"
        if size.normed:
            norm = "a final norm"
        raise UserError(
            f"`{option}` names {site}, but {cell.names[model]} has L = {size.layers} blocks and {norm}: from {least} "
            f"to {last}."
        )


def _heads(cell: Tried) -> None:
    """Check that all models that are stitched into have heads, of one task."""
    targets = {
        cell.names[y]: cell.sizes[y].head for _, y in cell.pairs if cell.sizes[y].known
    }
    headless = [name for name, head in targets.items() if head is None]
    if headless:
        raise UserError(f"there is no head to stitch into in {', '.join(headless)}.")
    if len(set(targets.values())) > 1:
        heads = ", ".join(f"{name}: {head}" for name, head in targets.items())
        raise UserError(
            f"their heads are of different tasks, whose losses cannot be compared ({heads})."
        )


CHECKS: dict[str, Sequence[Callable[[Tried], None]]] = {
    "fit": (_sites, _maps),
    "fit_pairs": (_one_width, _sites, _maps),
    "attention": (
        partial(_sites, least=1),
        partial(_maps, of="heads"),
    ),  # none in embeddings
    "compare": (_sites,),
    "stitch": (_sites, _heads, _maps),
    "identity": (_equal_widths, _sites, _heads),
    "probe": (_layers,),
    "similarity": (_layers,),
}
