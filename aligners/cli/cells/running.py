"""Runs one cell of a study, in any process, or in several, one for each of its devices."""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml

from aligners.cli.endings import INTERRUPTED, MENDABLE, TERMINATED, ended_by_signals
from aligners.cli.folders import RANKS_SHARE, goes_on_from, release
from aligners.cli.table import run_script
from aligners.cli.trusted import NOBODY, Trust
from aligners.errors import UserError
from aligners.files.atomic import open_own, remove, write_text
from aligners.similarity.passes.saved import PASSES
from aligners.studies.cells import KINDS, Kind
from aligners.studies.executors import THREADS, cpu_cores, let_jobs_import
from aligners.studies.study_folder import (
    ERROR,
    LOG,
    OPTIONS,
    RESULT,
    StudyFolder,
    as_lines,
    locked,
)

PACKAGES = ("torch", "lightning", "transformers", "numpy")
FINISHED = "finetuned.json"
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
# What an interrupted cell resumes from.
GOES_ON = ("run/last.ckpt", f"run/{PASSES}", "run/part-*", "before")


def run_cell(study: str, number: str, devices: int = 1, trust: Trust = NOBODY) -> str:
    """Run a cell, unless it is done or another process has it.

    At the end its result is written whole, or its traceback if it fails. Its output goes to its log.

    Args:
        study: folder of the study.
        number: id of the cell.
        devices: devices of the cell: one process for each computes, where the command can be divided without changing
            the result.
        trust: whose code may run, besides this package's.

    Returns:
        `done`, `failed`, or `busy`.

    Raises: SystemExit: the cell was stopped.
    """
    folder = StudyFolder(Path(study).resolve())
    place = folder.cell(number)
    with locked(place) as free:
        if not free:
            return "busy"
        if (place / RESULT).is_file():
            return "done"
        try:
            with ended_by_signals(), _logged(place / LOG):
                result = _run(folder, number, devices, trust)
        except Exception as error:
            write_text(place / ERROR, traceback.format_exc())
            if isinstance(error, UserError):
                _remove_refused(folder, number, str(error))
            return "failed"
        except SystemExit as end:
            if end.code != MENDABLE:  # the cell was stopped
                raise
            said = (place / LOG).read_text(encoding="utf-8")
            write_text(place / ERROR, f"Its options were not accepted:\n\n{said}")
            return "failed"
        write_text(place / RESULT, as_lines(result))
        for state in _states(place):
            remove(state)
        return "done"


def _remove_refused(folder: StudyFolder, number: str, said: str) -> None:
    """Remove the first file from which, according to its error, the command cannot resume."""
    files = []
    for file in folder.goes_on_from(number):
        files.append(file.parent if file.name == FINISHED else file)
    for path in (*files, *_states(folder.cell(number))):
        if str(path) in said:
            remove(path)
            return


def _run(
    folder: StudyFolder, number: str, devices: int, trust: Trust
) -> dict[str, Any]:
    """Run the command of a cell, and read its report."""
    cell, place = folder.described(number), folder.cell(number)
    kind, run = KINDS[cell["kind"]], place / "run"
    words = _command(cell, place, trust)
    os.environ["WANDB_RUN_GROUP"] = folder.study["name"]
    began = time.perf_counter()
    try:
        if devices == 1 or kind.alone or cell["options"].get("sites_at_once"):
            run_script(kind.script, words)
        else:
            _run_on_devices(kind.script, words, devices, place / LOG)
    finally:
        end_run(place)  # also what the run resumed from
    seconds = round(time.perf_counter() - began, 2)

    found = _report(kind, run)
    return {
        "cell": cell["id"],
        "kind": cell["kind"],
        "seconds": seconds,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in PACKAGES},
        **found,
    }


def _command(cell: dict[str, Any], place: Path, trust: Trust) -> list[str]:
    """Return the words of the command line that runs a cell in its folder."""
    options = [*trust.words(cell["options"]), *_words(cell, place)]
    return [KINDS[cell["kind"]].command, *options, "--run", str(place / "run")]


def _report(kind: Kind, run: Path) -> dict[str, Any]:
    """Read what the command of a cell has reported in its run folder, if it reports anything."""
    found: dict[str, Any] = {"meta": {}, "rows": []}
    if kind.report is not None:
        found |= json.loads((run / kind.report).read_text(encoding="utf-8"))
    return found


def _environment(devices: int) -> dict[str, str]:
    """Return the environment of one of several processes, which share the threads."""
    threads = int(os.environ.get(THREADS) or cpu_cores())
    # Under its own name in a job of SLURM, Lightning would expect SLURM to start the further processes.
    return {
        **os.environ,
        THREADS: str(max(1, threads // devices)),
        "SLURM_JOB_NAME": "bash",
    }


def _run_on_devices(script: str, words: Sequence[str], devices: int, log: Path) -> None:
    """Run a command in a process from which Lightning starts the other ranks.

    Args:
        script: `train` or `evaluate`.
        words: words of the command line.
        devices: number of processes.
        log: file that this process prints to, and thereby the others.

    Raises:
        ValueError: the command refused its options or files.
        RuntimeError: the command failed.
        SystemExit: the command was stopped or killed.
    """
    let_jobs_import()
    environment = _environment(devices)
    command = [
        sys.executable,
        "-m",
        "aligners",
        script,
        *words,
        "--trainer.devices",
        str(devices),
    ]
    process = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()  # the process saves its state at the end of the step
        process.wait()
        raise
    if status < 0:
        raise SystemExit(128 - status)
    if status in (INTERRUPTED, TERMINATED):
        raise SystemExit(status)
    if status:
        said = log.read_text(encoding="utf-8", errors="replace").strip()
        if status == MENDABLE:
            raise UserError(said.rpartition("error: ")[2])
        raise RuntimeError(f"The command has ended with status {status}:\n{said}")


def _end_with_parent() -> None:
    """Have the new process killed when the process that started it ends, so that no two work on one cell."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)


def _words(cell: dict[str, Any], place: Path) -> list[str]:
    """Return the command line, after moving aside the remains of an earlier attempt so that they can be resumed."""
    options, run, before = place / OPTIONS, place / "run", place / "before"
    write_text(
        options, yaml.safe_dump(cell["options"], sort_keys=False, allow_unicode=True)
    )
    words = ["--config", str(options)]
    (place / ERROR).unlink(missing_ok=True)
    if (
        cell["kind"] == "finetune" or (run / PASSES).is_dir()
    ):  # it computes what is missing
        return words
    if goes_on_from(run):
        remove(before)
        run.rename(before)
    remove(run)
    last = goes_on_from(before)
    return words if last is None else [*words, "--ckpt_path", str(last)]


def end_run(folder: Path) -> None:
    """Restore the process to its state before the runs in a folder, for the next cell."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()
    release(folder)
    os.environ.pop(RANKS_SHARE, None)
    gc.collect()
    torch.cuda.empty_cache()  # of a device that was used


def _states(place: Path) -> list[Path]:
    """The files and folders that only an unfinished run needs."""
    states: list[Path] = []
    for name in GOES_ON:
        states += place.glob(name)
    return states


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Context in which everything that the process prints goes to a file."""
    with open_own(path, "w") as file, ExitStack() as stack:
        for number, redirect in ((1, redirect_stdout), (2, redirect_stderr)):
            saved = os.dup(number)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, number)
            os.dup2(file.fileno(), number)
            stream = _stream(number)
            stack.callback(stream.flush)
            stack.enter_context(redirect(stream))
        yield


@cache
def _stream(number: int) -> TextIO:
    """Return this process's only stream to a descriptor, which is never closed: loggers keep it between cells."""
    return open(number, "w", encoding="utf-8", buffering=1, closefd=False)
