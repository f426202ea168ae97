"""`study.py run`: the cells of a study, those that are missing, then its tables and its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from aligners.cli.cells.banks import choose_banks
from aligners.cli.cells.checks import check_cells, model_sizes, not_injected
from aligners.cli.cells.costs import Costs, plan_study
from aligners.cli.cells.options import CellOptions
from aligners.cli.cells.running import run_cell
from aligners.cli.endings import goes_on_with
from aligners.cli.options import add_traceback, options_of
from aligners.cli.study.report import report_if_possible
from aligners.reports.screen import screen
from aligners.reports.study.registry import check_names
from aligners.studies.cells import Cell, expand
from aligners.studies.collecting import collect
from aligners.studies.executors import EXECUTORS, make_executor
from aligners.studies.folder import StudyFolder
from aligners.studies.plan import FORMULAS
from aligners.studies.schedule import Schedule
from aligners.studies.spec import Study, check_keys, read_study
from aligners.studies.status import failures, status_table

__all__ = ["add_running", "go", "parser", "run"]

FAILED = 1  # exit status where a cell has failed


def parser() -> ArgumentParser:
    """The options."""
    made = ArgumentParser(
        usage="%(prog)s STUDY.yaml [options]",
        description="Run what is missing of a study: many models, tasks, pairs and maps from one file. It says first "
        "what it will cost. A study that was stopped, or some of whose cells failed, goes on by the same command. "
        "Options of the study file can be given here, too.",
    )
    made.add_argument("-c", "--config", action="config", help="The study file; its name may also be the first word.")
    made.add_class_arguments(Study, None)
    made.add_argument("--folder", type=Path | None, default=None, help="Of the study. Default: runs/NAME.")
    made.add_argument("--plan", type=bool, default=False, help="Say what it would cost, by which formulas, and end.")
    made.add_argument(
        "--changed", type=bool, default=False,
        help="Go on with a study file that has changed, although finished cells are no longer part of it.",
    )  # fmt: skip
    add_running(made)
    add_traceback(made)
    return made


def add_running(parser: ArgumentParser) -> None:
    """Add the options that say where cells run."""
    parser.add_argument(
        "--executor", type=str, default="processes",
        help=f"Where cells run: {', '.join(EXECUTORS)}. `slurm` needs the package submitit, `ray` the package ray.",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int | None, default=None,
        help="Cells at a time. Default: as many as this machine has GPUs, or 1. Processes share its threads.",
    )  # fmt: skip
    parser.add_argument(
        "--executor_options", type=dict[str, Any], default={},
        help="Of submitit's AutoExecutor (timeout_min, slurm_partition, gpus_per_node, cluster: local), or of a task "
        "of Ray (address, num_cpus, num_gpus).",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=float | None, default=None,
        help="FLOP a second of one worker, for the plan's times. Default: measured on this machine, in about a second.",
    )  # fmt: skip


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Plan, run and report.

    Raises:
        ValueError: the study file or an option is wrong, or another command runs the study.
    """
    words = list(words)
    if words and not words[0].startswith("-"):
        words.insert(0, "--config")
    _check_files(words)
    options = parser.parse_args(words)
    written = yaml.safe_load(parser.dump(options, skip_none=False))
    study = read_study({name: written[name] for name in options_of(Study, options)})
    go(study, options.folder or Path("runs") / study.name, options, plan=options.plan, changed=options.changed)


def go(
    study: Study, path: Path, options: Namespace, *, plan: bool = False, changed: bool = False, again: bool = False
) -> None:
    """Plan and run a study.

    Args:
        study: the study.
        path: its folder.
        options: those of `add_running`.
        plan: whether to end after the plan.
        changed: whether results of an earlier version of the study may be set aside.
        again: whether cells that failed are run again.

    Raises:
        ValueError: an option is out of its range, or `report` names what there is not.
    """
    check_names(study.report or [])
    gpus = torch.cuda.device_count() if options.executor == "processes" else 0
    workers = options.workers or max(1, gpus)
    if workers < 1 or (options.rate is not None and options.rate <= 0):
        raise ValueError(
            f"Expected `workers` of at least 1 and `rate` above 0, but got {options.workers} and {options.rate}."
        )
    commands, sizes = CellOptions(), model_sizes(study, assume=plan)
    check_cells(expand(study, commands), commands, sizes)
    study, banks = choose_banks(study, commands, sizes)
    cells = expand(study, commands)
    console = screen()
    for line in not_injected(cells, sizes):
        print(line)
    planned = plan_study(Costs(study, commands, sizes), cells, options.rate, workers)
    console.print(planned.table())
    print("\n".join([*planned.words(), *banks, *(["", FORMULAS] if plan else [])]), flush=True)
    if not plan:
        _run(study, StudyFolder(path), cells, options, workers, gpus, changed, again)


def _run(
    study: Study, folder: StudyFolder, cells: list[Cell], options: Namespace, workers: int, gpus: int, changed: bool,
    again: bool,
) -> None:  # fmt: skip
    with folder.only_one():
        for line in folder.begin(study, cells, changed=changed):
            print(line)
        schedule = Schedule(folder, cells, run_cell, lambda line: print(line, flush=True))
        schedule.forget()
        print(f"\n{len(cells) - len(schedule.todo)} of {len(cells)} cells are done, in {folder.path}.", flush=True)
        if schedule.todo:
            with goes_on_with(""):
                executor = make_executor(options.executor, workers, gpus, folder.path, dict(options.executor_options))
                finished = False
                try:
                    schedule.run(executor, workers, again=again)
                    finished = True
                finally:
                    executor.shutdown(wait=True, cancel_futures=not finished)
        collect(folder)
        report_if_possible(folder)
    _end(folder)


def _end(folder: StudyFolder) -> None:
    """Say how far the study is; the exit status says whether a cell has failed."""
    screen().print(status_table(folder))
    failed = failures(folder)
    if failed:
        print("\n".join(failed))
        print(f"`study.py retry {folder.path}` runs them once more.")
    written = folder.path / "report" / "report.html"
    if written.is_file():
        print(f"Report: {written}")
    if failed:
        sys.exit(FAILED)


def _check_files(words: Sequence[str]) -> None:
    """Raise if a study file cannot be read, or has a key that there is not."""
    own = ("folder", "plan", "changed", "executor", "workers", "executor_options", "rate")
    for flag, name in pairwise(words):
        if flag not in ("-c", "--config"):
            continue
        if not os.path.isfile(name):
            raise ValueError(f"Expected a study file, but there is no such file: {name}.")
        with open(name, encoding="utf-8") as file:
            try:
                read = yaml.safe_load(file)
            except yaml.YAMLError as error:
                raise ValueError(f"Expected {name} to be a study file in YAML, but: {error}") from error
        if not isinstance(read, dict):
            raise ValueError(f"Expected {name} to be a study file, but it holds no keys.")
        check_keys({key: value for key, value in read.items() if key not in own})
