"""Runs one cell of a study, in whatever process."""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from aligners.cli.endings import ended_by_signals
from aligners.cli.folders import RANKS_SHARE, release
from aligners.cli.table import run_script
from aligners.files.whole import remove, write_text
from aligners.similarity.passes.saved import PASSES
from aligners.studies.cells import KINDS
from aligners.studies.folder import ERROR, LOG, RESULT, StudyFolder, locked

PACKAGES = ("torch", "lightning", "transformers", "numpy")
WRONG_OPTIONS = 2  # exit status of jsonargparse
UNFINISHED = ("run/last.ckpt", f"run/{PASSES}", "before")  # what a cell that was interrupted goes on from


def run_cell(study: str, number: str) -> str:
    """Run a cell, unless it is done or another process has it.

    Its result is written whole, at the end; its traceback, if it fails. What it prints goes to its log.

    Args:
        study: the study's folder.
        number: the cell's id.

    Returns:
        `done`, `failed`, or `busy`.
    """
    folder = StudyFolder(Path(study).resolve())
    cell, place = folder.described(number), folder.cell(number)
    with locked(place) as free:
        if not free:
            return "busy"
        if (place / RESULT).is_file():
            return "done"
        try:
            with ended_by_signals(), _logged(place / LOG):
                result = _run(folder, cell, place)
        except Exception:
            write_text(place / ERROR, traceback.format_exc())
            return "failed"
        except SystemExit as end:
            if end.code != WRONG_OPTIONS:  # it was stopped
                raise
            write_text(place / ERROR, "Its options were not accepted:\n\n" + (place / LOG).read_text(encoding="utf-8"))
            return "failed"
        write_text(place / RESULT, json.dumps(result, allow_nan=False))
        _tidy(place)
        return "done"


def _run(folder: StudyFolder, cell: dict[str, Any], place: Path) -> dict[str, Any]:
    kind, run = KINDS[cell["kind"]], place / "run"
    words = [kind.command, *_words(cell, place), "--run", str(run)]
    os.environ["WANDB_RUN_GROUP"] = folder.name
    began = time.perf_counter()
    try:
        run_script(kind.script, words)
    finally:
        end_run(run)
    rows = {} if kind.report is None else json.loads((run / kind.report).read_text(encoding="utf-8"))
    return {
        "cell": cell["id"],
        "kind": cell["kind"],
        "seconds": round(time.perf_counter() - began, 2),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in PACKAGES},
        **{"meta": {}, "rows": [], **rows},
    }


def _words(cell: dict[str, Any], place: Path) -> list[str]:
    """The command line, after what an earlier attempt has left was put aside."""
    options, run, before = place / "options.yaml", place / "run", place / "before"
    write_text(options, yaml.safe_dump(cell["options"], sort_keys=False, allow_unicode=True))
    words = ["--config", str(options)]
    if (place / ERROR).is_file():  # from its beginning
        _tidy(place)
        (place / ERROR).unlink()
    if cell["kind"] == "finetune" or (run / PASSES).is_dir():  # it goes on with what is missing
        return words
    if (run / "last.ckpt").is_file():
        remove(before)
        run.rename(before)
    remove(run)
    return [*words, "--ckpt_path", str(before / "last.ckpt")] if before.is_dir() else words


def end_run(run: Path) -> None:
    """Leave the process as it was, for the next cell."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()
    release(run)
    os.environ.pop(RANKS_SHARE, None)
    gc.collect()
    torch.cuda.empty_cache()  # of a device that was used


def _tidy(place: Path) -> None:
    """Remove what only an unfinished run needs."""
    for name in UNFINISHED:
        remove(place / name)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Within it, all that the process prints goes to a file."""
    with path.open("w", encoding="utf-8") as file, ExitStack() as stack:
        for number in (1, 2):
            saved = os.dup(number)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, number)
            os.dup2(file.fileno(), number)
        stack.callback(file.flush)
        with redirect_stdout(file), redirect_stderr(file):
            yield
