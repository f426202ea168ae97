"""The options of a study's cells, as the parsers of their commands read them, before any cell runs."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from aligners.cli.command import Command
from aligners.cli.options import FREE, flat
from aligners.cli.table import find
from aligners.datamodules.rows.policies import most_rows, policy_of
from aligners.datamodules.rows.sites import parse_sites
from aligners.errors import UserError
from aligners.files.resources import in_words
from aligners.fitting.parts import bytes_a_site, pairs_within
from aligners.studies.cells import GUESS, KINDS, Cell, Size, size_of, sizes_in
from aligners.studies.expansion import expand, with_kept_rows
from aligners.studies.spec import Study

WEIGHT = 4  # bytes


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
            return _parser(kind).parse_object(
                deepcopy(options)
            )  # parsing writes into its argument
        except UserError as error:
            raise UserError(
                f"Expected `{kind}` and `data` of the study to hold options of `{command}`, which `{command} --help` "
                f"lists, but: {error}"
            ) from error

    def of(self, cell: Cell) -> tuple[Namespace, Namespace]:
        """The options of a cell that name neither models nor cells, as plain values and instantiated."""
        parsed = self.parsed(cell.kind, KINDS[cell.kind].unnamed(cell.options))
        return parsed, _parser(cell.kind).instantiate(parsed)

    def resolve(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that decide a command's result, by their dotted names, defaults filled in.

        Raises:
            ValueError: the command does not take these options.
        """
        key = json.dumps([kind, options], sort_keys=True, default=str)
        if key not in self._resolved:
            parsed, parser = self.parsed(kind, options), _parser(kind)
            try:
                _command(kind).check(
                    parser.instantiate(parsed)
                )  # this reads no text and no model
            except ValueError as error:
                raise UserError(f"`{kind}` of the study: {error}") from error
            written = flat(yaml.safe_load(parser.dump(parsed)))
            self._resolved[key] = {
                name: value
                for name, value in written.items()
                if not name.startswith(FREE)
            }
        return self._resolved[key]


def _command(kind: str) -> Command:
    """Return the command that cells of a kind call."""
    return find(KINDS[kind].script, KINDS[kind].command)


@cache
def _parser(kind: str) -> ArgumentParser:
    """Return its parser."""
    parser = _command(kind).parser()
    parser.prog = f"{KINDS[kind].script}.py {KINDS[kind].command}"
    return parser


@cache
def _defaults(kind: str) -> Namespace:
    """Return all options of the command and their defaults."""
    return _parser(kind).get_defaults()


def model_sizes(study: Study, *, guess: bool) -> dict[str, Size]:
    """The size of each model of a study.

    Args:
        study: the study.
        guess: whether to guess the size of a model that cannot be reached.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    sizes = {}
    for name in study.models.listed():
        try:
            sizes[name] = size_of(name, study.data)
        except ValueError:
            if not guess:
                raise
            sizes[name] = GUESS
    return sizes


def keep_rows(cells: Sequence[Cell], options: CellOptions) -> list[Cell]:
    """Let cells keep one row per text, where no other cell of a store reads more of the same texts.

    A store of tokens serves all cells, and is needed if some of them read tokens or words. Ids of cells do not change.
    `data.store_rows` of the study file takes precedence.

    Args:
        cells: cells of a study.
        options: options of every kind of cell.
    """
    by_id = {cell.id: cell for cell in cells}
    texts_of: dict[str, str] = {}  # a cell that reads a store -> its texts
    read_whole: set[str] = set()  # texts of which some cell reads tokens or words
    for cell in cells:
        source = cell
        if cell.options.get("checkpoints"):
            source = by_id[cell.needs[-1]]  # the fit, whose data options the cell has
        unnamed = KINDS[source.kind].unnamed(source.options)
        read = options.resolve(source.kind, unnamed)
        if not _reads_store(cell, read, options):
            continue
        texts_of[cell.id] = _texts_in(read)
        if policy_of(read.get("data.rows", "tokens")).types is not None:
            read_whole.add(texts_of[cell.id])

    kept = []
    for cell in cells:
        texts = texts_of.get(cell.id)
        if texts is not None and texts not in read_whole:
            cell = with_kept_rows(cell)
        kept.append(cell)
    return kept


def _texts_in(read: Mapping[str, Any]) -> str:
    """Return, as one string, what the options of a cell say of its texts."""
    values = []
    for name in sorted(read):
        if name.startswith("data.text."):
            values.append(read[name])
    return json.dumps(values)


def _reads_store(cell: Cell, read: Mapping[str, Any], options: CellOptions) -> bool:
    """Tell whether a cell takes states from a store, which holds neither attention weights nor sub-layers' states."""
    if cell.kind == "attention" or read.get("data.attention"):
        return False
    return options.accepts(cell.kind, "data.store_rows")


def choose_banks(
    study: Study, options: CellOptions, sizes: Mapping[str, Size]
) -> tuple[Study, list[str]]:
    """Choose `fit.pairs_at_once`, the number of pairs that share a bank, where a study file leaves it out.

    It depends only on widths, sites, maps and `fit.memory`, so that cells have the same ids on any machine.

    Args:
        study: the study.
        options: options of every kind of cell.
        sizes: sizes of the models.

    Returns:
        The study with the number filled in, and a sentence on how it was chosen.
    """
    if study.fit is None or study.fit.pairs_at_once is not None:
        return study, []
    single = replace(study, fit=replace(study.fit, pairs_at_once=1))
    fits: dict[
        object, Cell
    ] = {}  # one cell for each task and combination of model sizes
    widths: set[int] = set()
    for cell in expand(single, options):
        if cell.kind == "fit":
            x, y = sizes_in(cell, sizes)
            fits[cell.task, x, y] = cell
            widths |= {x.width, y.width}
    if not fits:
        return single, []
    if len(widths) > 1:
        said = "Each pair of models is fitted by itself, because their widths differ."
        return single, [said]

    limit = study.fit.memory * 1e9
    needs = [_memory(cell, options, sizes) for cell in fits.values()]
    fewest = min(pairs_within(limit, *need) for need in needs)
    most = max(1, fewest)
    sites, a_site, model = max(needs, key=lambda need: need[0] * need[1])
    pairs = "1 pair" if most == 1 else f"{most} pairs"
    note = (
        f"A bank holds {pairs} of models within {in_words(limit)} (`fit.memory`): {sites} "
        f"sites of {in_words(a_site)}, and two models of {in_words(model)}. `fit.pairs_at_once` sets another number."
    )
    return replace(study, fit=replace(study.fit, pairs_at_once=most)), [note]


def _memory(
    cell: Cell, options: CellOptions, sizes: Mapping[str, Size]
) -> tuple[int, int, int]:
    """Return the number of sites of a fit, the bytes to train one of them, and the bytes of a model."""
    parsed, made = options.of(cell)
    x, y = sizes_in(cell, sizes)
    rows = most_rows(parsed.data.rows, parsed.data.batch_size, parsed.data.max_length)
    sites = len(parse_sites(parsed.data.sites, x.layers, y.layers))
    a_site = bytes_a_site(made.model, x.width, y.width, rows)
    return sites, a_site, WEIGHT * max(x.weights, y.weights)
