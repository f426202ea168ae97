"""The loggers of a command's runs, and the record for W&B of what the runs used and left."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from aligners.cli.folders import rank
from aligners.cli.options import flat
from aligners.reports.tracking import (
    RunArtifact,
    described,
    log_inputs,
    log_outputs,
    start_run,
    states,
    turned_off,
)

logger = logging.getLogger(__name__)


def run_loggers(folder: Path, kind: str, number: str | None = None) -> list[Logger]:
    """Make the loggers, CSV and W&B, both inside the run's folder.

    W&B follows WANDB_MODE, but is online only for a user who is logged in; it never prompts. Only rank 0 starts a run.
    Where it is disabled, there is no logger for it, and it is not imported.

    Args:
        folder: folder of the run.
        kind: kind of job.
        number: number of the run at W&B; default: a new one.
    """
    csv = CSVLogger(folder.parent, name=folder.name, version="")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*exists and is not empty.*"
        )  # config.yaml is there
        _ = (
            csv.experiment
        )  # before W&B writes: this deletes what it finds of an older run
    if turned_off():
        return [csv]
    if rank() != 0:
        return [csv, WandbLogger(save_dir=folder, mode="disabled")]
    run = start_run(folder, folder.name, kind, number=number)
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return [csv, WandbLogger(save_dir=folder, experiment=run)]


def tell_wandb(run: Any, folder: Path, options: Namespace, made: Namespace) -> None:
    """Log what a run has used and left, in its artifacts.

    The run's files do not depend on this: if W&B rejects an artifact, there is only a warning.

    Args:
        run: the run at W&B.
        folder: where everything was written.
        options: the command's options as plain values.
        made: the same options, instantiated.
    """
    if run.disabled:
        return
    try:
        log_inputs(
            run,
            [*_files(options), *map(states, getattr(made.get("data"), "stored", []))],
        )
        log_outputs(run, folder, upload=bool(options.get("upload")))
    except Exception as error:  # of W&B's many kinds
        logger.warning(
            "W&B does not know what the run %s has used and left: %s", folder, error
        )


def _files(options: Namespace) -> Iterator[RunArtifact]:
    """Return files of maps, layers or probes, or shared folders with one, that any option names."""
    for value in flat(options.as_dict()).values():
        for name in value if isinstance(value, list) else [value]:
            artifact = described(Path(name)) if isinstance(name, str | Path) else None
            if artifact is not None:
                yield artifact
