"""Runs the command of a cell in several processes, one for each of its devices."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from aligners.cli.endings import INTERRUPTED, MENDABLE, TERMINATED
from aligners.errors import UserError
from aligners.studies.executors import THREADS, let_jobs_import

END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


def run_on_devices(script: str, words: Sequence[str], devices: int, log: Path) -> None:
    """Run a command in a process from which Lightning starts the further ones.

    Args:
        script: `train` or `evaluate`.
        words: of the command line.
        devices: number of processes.
        log: to which this process prints, and so the others.

    Raises:
        ValueError: the command has refused its options or files.
        RuntimeError: it has failed.
        SystemExit: it was stopped or killed.
    """
    let_jobs_import()
    threads = int(os.environ.get(THREADS) or len(os.sched_getaffinity(0)))
    # Under its own name in a job of SLURM, Lightning would expect SLURM to start the further processes.
    environment = {**os.environ, THREADS: str(max(1, threads // devices)), "SLURM_JOB_NAME": "bash"}
    command = [sys.executable, "-m", "aligners", script, *words, "--trainer.devices", str(devices)]
    process = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()  # it saves its state at the end of the step
        process.wait()
        raise
    if status < 0 or status in (INTERRUPTED, TERMINATED):
        raise SystemExit(status if status > 0 else 128 - status)
    if status:
        said = log.read_text(encoding="utf-8", errors="replace").strip()
        if status == MENDABLE:
            raise UserError(said.rpartition("error: ")[2])
        raise RuntimeError(f"The command has ended with status {status}:\n{said}")


def _end_with_parent() -> None:
    """In the new process: be killed once the process that started it is, so that no two work on one cell."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
