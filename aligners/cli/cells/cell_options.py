"""Checks of a study's cells by their commands before any runs: options, refusals, and what will be left out."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser, Namespace

from aligners.cli.command import Command
from aligners.cli.options import FREE, flat
from aligners.cli.table import find
from aligners.datamodules.rows.policies import policy_of
from aligners.datamodules.rows.sites import parse_layers, route_sites
from aligners.errors import UserError
from aligners.fitting.fits import seeded
from aligners.injection.routes import route_numbers
from aligners.models.architectures import Component, first_site
from aligners.studies.cells import KINDS, Cell, merged
from aligners.studies.spec import Study
from aligners.studies.study_plan import Size, size_of, sizes_in


class CellOptions:
    """The options of every kind of cell, as its command's parser reads them."""

    def __init__(self) -> None:
        self._resolved: dict[str, dict[str, Any]] = {}

    def accepts(self, kind: str, option: str) -> bool:
        """Tell whether a command has an option, by its dotted name."""
        return option in _defaults(kind)

    def parsed(self, kind: str, options: dict[str, Any]) -> Namespace:
        """All options of a cell.

        Raises:
            ValueError: the command does not take these options.
        """
        command = f"{KINDS[kind].script}.py {KINDS[kind].command}"
        try:
            return _parser(kind).parse_object(deepcopy(options))  # it writes into what it is given
        except UserError as error:
            raise UserError(
                f"Expected `{kind}` and `data` of the study to hold options of `{command}`, which `{command} --help` "
                f"lists, but: {error}"
            ) from error

    def of(self, cell: Cell, data: Mapping[str, Any]) -> tuple[Namespace, Namespace]:
        """The options of a cell that name neither models nor cells, as plain values and instantiated.

        Args:
            cell: the cell.
            data: data options over which those of the cell take precedence; what its command does not have is left out.
        """
        shared = {
            name: value for name, value in data.items() if self.accepts(cell.kind, f"data.{name}")
        }
        parsed = self.parsed(
            cell.kind, merged({"data": shared}, KINDS[cell.kind].unnamed(cell.options))
        )
        return parsed, _parser(cell.kind).instantiate(parsed)

    def resolve(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that decide a command's result, by their dotted names, defaults filled in.

        Raises:
            ValueError: the command does not take these options.
        """
        key = json.dumps([kind, options], sort_keys=True, default=str)
        if key not in self._resolved:
            parsed = self.parsed(kind, options)
            try:
                _command(kind).check(
                    _parser(kind).instantiate(parsed)
                )  # this reads no text and no model
            except ValueError as error:
                raise UserError(f"`{kind}` of the study: {error}") from error
            written = flat(yaml.safe_load(_parser(kind).dump(parsed)))
            self._resolved[key] = {
                name: value for name, value in written.items() if not name.startswith(FREE)
            }
        return self._resolved[key]


def _command(kind: str) -> Command:
    """The command that cells of a kind call."""
    return find(KINDS[kind].script, KINDS[kind].command)


@cache
def _parser(kind: str) -> ArgumentParser:
    """Its parser."""
    parser = _command(kind).parser()
    parser.prog = f"{KINDS[kind].script}.py {KINDS[kind].command}"
    return parser


@cache
def _defaults(kind: str) -> Namespace:
    """All options of the command and their defaults."""
    return _parser(kind).get_defaults()


def with_kept_rows(cells: Sequence[Cell], options: CellOptions) -> list[Cell]:
    """Have cells keep one row a text, where no other cell of a store reads more of the same texts.

    A store of tokens serves all cells, and is the smallest that does where some read tokens or words. No id changes.
    `data.store_rows` of the study file comes first.

    Args:
        cells: of a study.
        options: what the commands say of their options.
    """
    by_id, of_texts, tokens = {cell.id: cell for cell in cells}, dict[str, str](), set[str]()
    for cell in cells:
        fit = (
            by_id[cell.needs[-1]] if cell.options.get("checkpoints") else cell
        )  # whose data options it has
        read = options.resolve(fit.kind, KINDS[fit.kind].unnamed(fit.options))
        # A store has neither attention weights nor states beside them.
        stored = cell.kind != "attention" and not read.get("data.attention")
        if stored and options.accepts(cell.kind, "data.store_rows"):
            of_texts[cell.id] = json.dumps(
                [read[name] for name in sorted(read) if name.startswith("data.text.")]
            )
            if policy_of(read.get("data.rows", "tokens")).types is not None:
                tokens.add(of_texts[cell.id])
    kept = {cell.id: merged({"data": {"store_rows": "texts"}}, cell.options) for cell in cells}
    whole = {None, *tokens}
    return [
        cell if of_texts.get(cell.id) in whole else replace(cell, options=kept[cell.id])
        for cell in cells
    ]


def model_sizes(study: Study, *, assume: bool) -> dict[str, Size]:
    """The size of each model of a study.

    Args:
        study: the study.
        assume: whether a model that cannot be reached has the size that the study file assumes.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    sizes = {}
    for name in study.models.listed():
        try:
            sizes[name] = size_of(name, study.data)
        except ValueError:
            if not assume:
                raise
            sizes[name] = Size(
                study.assume.layers, study.assume.width, study.assume.vocabulary, known=False
            )
    return sizes


class _Tried(NamedTuple):
    """A cell that is checked: its options as values and instantiated, its models, and which of them are paired."""

    parsed: Namespace
    made: Namespace
    names: list[str]
    sizes: list[Size]
    pairs: Sequence[tuple[int, int]]


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
        cell_sizes = sizes_in(cell, sizes)
        key = (cell.kind, cell.task, tuple(cell_sizes), str(cell.options["data"].get("pairs")))
        if cell.kind not in CHECKS or key in tried:
            continue
        tried.add(key)
        parsed, built = options.of(cell, {})
        pairs = cell.options["data"].get("pairs") or [(0, 1)]
        if cell.kind in ("stitch", "identity"):
            routes = built.model.wanted_routes if cell.kind == "stitch" else built.routes
            pairs = route_numbers(len(cell_sizes), routes or "all")
        this = _Tried(parsed, built, [model.name for model in cell.models], cell_sizes, pairs)
        try:
            for check in CHECKS[cell.kind]:
                check(this)
        except ValueError as error:
            raise UserError(
                f"Expected models that `{cell.kind.removesuffix('_pairs')}` of the study can take, but got "
                f"{cell.said()}: {error} Change its options, or leave such models out: `pairs.given` names "
                "the pairs to compare."
            ) from error


def not_injected(cells: Sequence[Cell], sizes: Mapping[str, Size]) -> list[str]:
    """Say which cells inject nothing because a model has no head; their errors are measured."""
    headless = Counter(
        model.name
        for cell in cells
        if cell.kind == "inject" and cell.stage != "finetuned"
        for model in cell.models[0 if cell.options.get("both_directions") else 1 :]
        if sizes[model.name].known and sizes[model.name].head is None
    )
    return [
        f"Nothing will be injected into {name}, which has no head: {count} cell{'s' if count > 1 else ''} with the "
        "errors of maps only."
        for name, count in headless.items()
    ]


# ---------------------------------------------------------------------- checks


def _one_width(cell: _Tried) -> None:
    widths = [size.width for size in cell.sizes]
    if len(set(widths)) > 1:
        raise UserError(
            f"`fit.pairs_at_once` puts several pairs into one bank, which needs models of equal widths, but theirs are "
            f"{', '.join(map(str, widths))}. Set it to 1."
        )


def _maps(cell: _Tried, *, of: str = "width") -> None:
    """Every map can be built between the widths of the models, or their numbers of heads, as far as they are known."""
    for x, y in {(getattr(cell.sizes[x], of), getattr(cell.sizes[y], of)) for x, y in cell.pairs}:
        if x is not None and y is not None:
            for factory in cell.made.model.factories.values():
                seeded(factory, 0, 1, x, y)


def _identity(cell: _Tried) -> None:
    for x, y in cell.pairs:
        if cell.sizes[x].width != cell.sizes[y].width:
            raise UserError(
                f"widths {cell.sizes[x].width} of {cell.names[x]} and {cell.sizes[y].width} of {cell.names[y]} differ, "
                "so the identity does not apply."
            )


def _sites(cell: _Tried, *, least: int = 0) -> None:
    data, depths = cell.parsed.data, [size.layers for size in cell.sizes]
    component: Component = data.get("component") or "residual"
    for x, y in cell.pairs:
        for pair in route_sites(data.sites, depths, x, y, component):
            for model, site in zip((x, y), pair, strict=True):
                _there("sites", site, cell, model, max(least, first_site(component)))


def _layers(cell: _Tried) -> None:
    data = cell.parsed.data
    component: Component = data.get("component") or "residual"
    for model, size in enumerate(cell.sizes):
        for layer in parse_layers(data.layers, size.layers, component):
            _there("layers", layer, cell, model, first_site(component))


def _there(option: str, site: int, cell: _Tried, model: int, least: int) -> None:
    """The model has this layer, if its size is known."""
    size = cell.sizes[model]
    if size.known and not least <= site <= size.layers:
        raise UserError(
            f"`{option}` names {site}, but {cell.names[model]} has L = {size.layers} blocks: from {least} to "
            f"{size.layers}."
        )


def _heads(cell: _Tried) -> None:
    """All models that are stitched into have heads, of one task."""
    targets = {cell.names[y]: cell.sizes[y].head for _, y in cell.pairs if cell.sizes[y].known}
    headless = [name for name, head in targets.items() if head is None]
    if headless:
        raise UserError(f"there is no head to stitch into in {', '.join(headless)}.")
    if len(set(targets.values())) > 1:
        heads = ", ".join(f"{name}: {head}" for name, head in targets.items())
        raise UserError(
            f"their heads are of different tasks, whose losses cannot be compared ({heads})."
        )


CHECKS: dict[str, Sequence[Callable[[_Tried], None]]] = {
    "fit": (_sites, _maps),
    "fit_pairs": (_one_width, _sites, _maps),
    "attention": (
        partial(_sites, least=1),
        partial(_maps, of="heads"),
    ),  # embeddings have no attention
    "compare": (_sites,),
    "stitch": (_sites, _heads, _maps),
    "identity": (_identity, _sites, _heads),
    "probe": (_layers,),
    "similarity": (_layers,),
}
