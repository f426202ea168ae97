"""Save a view of all runs of a W&B project: errors of maps, stitching penalties, figures, tables.

They are grouped by study and kind of job. It needs a network and `wandb login`, and sends nothing but the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jsonargparse import ArgumentParser

from aligners.cli.options import bare_parser
from aligners.errors import UserError
from aligners.reports.tracking import CURVES, PROJECT, logged_in, workspace


@dataclass
class Options:
    """Whose runs.

    Args:
        entity: User or team at W&B.
        project: In which the runs are.
    """

    entity: str
    project: str = PROJECT


def parser() -> ArgumentParser:
    """The options."""
    return bare_parser(__doc__, "ENTITY [options]", Options)


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Describe the view and save it.

    Raises:
        ValueError: wandb-workspaces is not installed, or nobody is logged in.
    """
    options = parser.parse_args(words)
    view = workspace(options.entity, options.project)
    if not logged_in():
        raise UserError(
            "Expected a user who is logged in at W&B, but there is no key. Run `wandb login`, or set WANDB_API_KEY."
        )
    view.save()
    print(f"Saved the view {view.name!r} with {', '.join(CURVES)}, figures and tables: {view.url}")
