"""What the commands say of the options of a study's cells, before any cell runs."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from aligners.cli.options import FREE, check_trains, flat, options_of
from aligners.errors import UserError
from aligners.injection.methods import check_closed_forms
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.probing.evaluation import ProbeExperiment
from aligners.similarity.evaluation import SimilarityEvaluation
from aligners.studies.cells import KINDS, Cell, merged

CHECKS: dict[str, Callable[[Namespace], object]] = {
    **dict.fromkeys(("fit", "fit_pairs", "recover", "attention", "finetune", "stitch"), check_trains),
    "inject": lambda made: check_closed_forms(made.closed_form),
    "probe": lambda made: ProbeExperiment(**options_of(ProbeExperiment, made)),
    "similarity": lambda made: SimilarityEvaluation(**options_of(SimilarityEvaluation, made)),
    "identity": lambda made: StitchingEvaluation(None, **options_of(StitchingEvaluation, made)),
}


class CellOptions:
    """The options of every kind of cell, as its command's parser reads them."""

    def __init__(self) -> None:
        self._parsers: dict[str, ArgumentParser] = {}
        self._defaults: dict[str, Namespace] = {}

    def parser(self, kind: str) -> ArgumentParser:
        """The parser of a kind of cell."""
        if kind not in self._parsers:
            script, command = KINDS[kind].script, KINDS[kind].command
            self._parsers[kind] = import_module(f"aligners.cli.{script}.{command}").parser()
            self._parsers[kind].exit_on_error = False
            self._defaults[kind] = self._parsers[kind].get_defaults()
        return self._parsers[kind]

    def accepts(self, kind: str, option: str) -> bool:
        """Tell whether a command has an option, by its dotted name."""
        self.parser(kind)
        return option in self._defaults[kind]

    def parsed(self, kind: str, options: dict[str, Any]) -> Namespace:
        """All options of a cell.

        Raises:
            ValueError: the command does not take these options.
        """
        command = f"{KINDS[kind].script}.py {KINDS[kind].command}"
        try:
            return self.parser(kind).parse_object(deepcopy(options))  # it writes into what it is given
        except ArgumentError as error:
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
        return parsed, self.parser(cell.kind).instantiate(parsed)

    def resolve(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that decide a command's result, by their dotted names, defaults filled in.

        Raises:
            ValueError: the command does not take these options.
        """
        parsed = self.parsed(kind, options)
        try:
            made = self.parser(kind).instantiate(parsed)  # this reads no text and no model
            CHECKS.get(kind, lambda _: None)(made)
        except ValueError as error:
            raise UserError(f"`{kind}` of the study: {error}") from error
        written = flat(yaml.safe_load(self.parser(kind).dump(parsed)))
        return {name: value for name, value in written.items() if not name.startswith(FREE)}
