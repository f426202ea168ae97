"""What the commands say of the options of a study's cells, before any cell runs."""

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from aligners.cli.options import FREE, flat
from aligners.cli.run import Command
from aligners.cli.table import find
from aligners.errors import UserError
from aligners.studies.cells import KINDS, Cell, merged


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
        shared = {name: value for name, value in data.items() if self.accepts(cell.kind, f"data.{name}")}
        parsed = self.parsed(cell.kind, merged({"data": shared}, KINDS[cell.kind].unnamed(cell.options)))
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
                _command(kind).check(_parser(kind).instantiate(parsed))  # this reads no text and no model
            except ValueError as error:
                raise UserError(f"`{kind}` of the study: {error}") from error
            written = flat(yaml.safe_load(_parser(kind).dump(parsed)))
            self._resolved[key] = {name: value for name, value in written.items() if not name.startswith(FREE)}
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
