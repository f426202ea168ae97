"""Tells W&B what the runs of a command used and left, once the command has ended well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_warn

from aligners.cli.options import flat
from aligners.reports.tracking import RunArtifact, complete, described, log_inputs, log_outputs, states

_begun: list[tuple[Any, Path, Namespace, Namespace]] = []  # the runs of this process's command


def note_begun(run: Any, folder: Path, options: Namespace, made: Namespace) -> None:
    """Remember a run that has begun.

    Args:
        run: at W&B.
        folder: where everything is written.
        options: the command's options as plain values.
        made: the same options, instantiated.
    """
    _begun.append((run, folder, options, made))


def end_runs() -> None:
    """Log what the runs of the command have used and left, and note that they are complete.

    Their files are there, whatever becomes of this: where W&B takes no artifact, a warning says so.
    """
    for run, folder, options, made in _begun:
        complete(folder)
        if run.disabled:
            continue
        try:
            log_inputs(run, [*_files(options), *_stores(made)])
            log_outputs(run, folder, upload=bool(options.get("upload")))
        except Exception as error:  # of W&B's many kinds
            rank_zero_warn(f"W&B was not told what the run {folder} has used and left: {error}")


def forget_runs() -> None:
    """The command has ended, in whatever way."""
    _begun.clear()


def _files(options: Namespace) -> Iterator[RunArtifact]:
    """Files of maps, layers or probes, or shared folders with one, that any option names."""
    for value in flat(options.as_dict()).values():
        for each in value if isinstance(value, list) else [value]:
            found = described(Path(each)) if isinstance(each, str | Path) else None
            if found is not None:
                yield found


def _stores(made: Namespace) -> list[RunArtifact]:
    """The stored states that were read."""
    return [states(folder) for folder in getattr(made.get("data"), "stored", [])]
