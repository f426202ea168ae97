"""The commands that run the cells of a study: `study.py run` and `study.py retry`."""

import os
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from aligners.cli.cells.cell_options import (
    CellOptions,
    check_cells,
    model_sizes,
    not_injected,
    with_kept_rows,
)
from aligners.cli.cells.costs import Costs, choose_banks, formulas, plan_study
from aligners.cli.cells.running import run_cells
from aligners.cli.command import Run, command, options_of
from aligners.cli.endings import goes_on_with
from aligners.cli.options import Imported, flat
from aligners.cli.study.study_results import collect_and_report, failures, for_folder, status_table
from aligners.cli.trusted import check_typed, trust_of, typed_again
from aligners.errors import check_range
from aligners.progress import tell
from aligners.reports.screen import screen
from aligners.reports.study.registry import check_report
from aligners.studies.cells import expand
from aligners.studies.executors import in_groups, make_executor, visible_gpus
from aligners.studies.rehearsals import notes
from aligners.studies.schedule import Schedule
from aligners.studies.spec import Study, read_study
from aligners.studies.study_folder import StudyFolder

MINUTES_A_JOB = (0.0, 10.0)  # where processes stay, and where each job starts one
FAILED = 1  # exit status where a cell has failed


@dataclass
class Running:
    """Where cells run.

    Args:
        executor: Where cells run: processes, slurm, ray. `slurm` needs the package submitit, `ray` the package ray.
        workers: Cells at a time. Default: as many as this machine has GPUs, or 1. Processes share its threads.
        minutes_a_job: Cells run one after another in a job, as many as are expected to take so many minutes in all; 0:
            each is a job of its own. Default: 10 with slurm and ray, whose jobs start anew, 0 with processes.
        executor_options: Of submitit's AutoExecutor (timeout_min, slurm_partition, gpus_per_node, cluster: local), or
            of a task of Ray (address, num_cpus, num_gpus); on the command line alone, as some of them run commands.
        cell_devices: GPUs of a cell, or processes where there is no GPU: fits, injections and comparisons are divided
            among them. Jobs reserve as many GPUs, unless `executor_options` say how many.
        rate: FLOP a second of one worker, for the plan's times. Default: measured on this machine, in about a second.
        imports: Python files or modules with maps, measures, model families or tables of your own, which every cell
            imports. They are run: name only what you trust.
    """

    executor: str = "processes"
    workers: int | None = None
    minutes_a_job: float | None = None
    executor_options: dict[str, Any] = field(default_factory=dict)
    cell_devices: int = 1
    rate: float | None = None
    imports: list[Imported] = field(default_factory=list)


@command(
    None,
    Study,
    Running,
    config="The study file; its name may also be the first word.",
    usage="STUDY.yaml [options]",
    flags={
        "rehearse": "Run it with tiny models, generated texts and few steps, in the folder `rehearsal` of its own."
    },
)
def run(run: Run, folder: Path | None = None, plan: bool = False, changed: bool = False) -> None:
    """Run what is missing of a study: many models, tasks, pairs and maps from one file.

    It says first what it will cost. A study that was stopped, or some of whose cells failed, goes on by the same
    command. Options of the study file can be given here, too.

    Example: `embedded --plan true`

    Args:
        run: of the command.
        folder: Folder of the study. Default: runs/NAME.
        plan: Say what it would cost, by which formulas, and end.
        changed: Go on with a study file that has changed, although finished cells are no longer part of it.
    """
    options = run.options
    written = yaml.safe_load(run.parser.dump(options, skip_none=False))
    plain = {name: written[name] for name in options_of(Study, options)}
    study = read_study(plain)
    place = folder or Path("runs") / study.name
    if options.get("rehearse"):
        _rehearse(written, plain, place / notes.REHEARSAL)
    _plan_and_run(study, place, run, plan=plan, changed=changed)


def _rehearse(options: dict[str, Any], study: dict[str, Any], folder: Path) -> NoReturn:
    """Become the command that runs the rehearsal of a study.

    Args:
        options: as plain values.
        study: those of them that are the study file's.
        folder: of the rehearsal.

    Raises:
        ValueError: a command does not take the study's options, or the folder holds something else.
    """
    from aligners.studies.rehearsals.rehearsal import environment, prepare

    expand(read_study(study), CellOptions())  # with every option as it is written
    file = prepare(options, study, folder)
    tell(f"A rehearsal, in {folder}.")
    words = ["run", str(file), "--folder", str(folder), *typed_again(flat(options))]
    program = [sys.argv[0]] if sys.argv[0].endswith(".py") else [sys.argv[0], "study"]
    os.execve(
        sys.executable, [sys.executable, *program, *words], {**os.environ, **environment(folder)}
    )


@for_folder(None, Running)
def retry(run: Run, folder: Path) -> None:
    """Run the failed cells of a study once more, from their last state that is whole, and what needs them.

    Example: `runs/embedded`

    Args:
        run: of the command.
        folder: Folder of the study, such as runs/NAME.
    """
    plain = StudyFolder(folder).study
    check_typed(flat(plain), run.words)
    _plan_and_run(read_study(plain), folder, run, again=True)


def _plan_and_run(
    study: Study,
    path: Path,
    run: Run,
    *,
    plan: bool = False,
    changed: bool = False,
    again: bool = False,
) -> None:
    """Plan and run a study.

    Args:
        study: the study.
        path: its folder.
        run: of the command, with the options of `Running`.
        plan: whether to end after the plan.
        changed: whether results of an earlier version of the study may be set aside.
        again: whether cells that failed are run again.

    Raises:
        ValueError: an option is out of its range, or `report` names an unknown table or figure.
    """
    check_report(study.report)
    options = run.options
    devices: int = options.cell_devices
    check_range(least=1, cell_devices=devices, workers=options.workers or None)
    visible = visible_gpus(torch.cuda.device_count()) if options.executor == "processes" else []
    gpus = in_groups(visible, devices)
    workers = options.workers or max(1, len(gpus))
    check_range(least=0, minutes_a_job=options.minutes_a_job)
    check_range(above=0, rate=options.rate)
    commands, sizes = CellOptions(), model_sizes(study, assume=plan)
    check_cells(expand(study, commands), commands, sizes)
    study, banks = choose_banks(study, commands, sizes)
    cells = with_kept_rows(expand(study, commands), commands)
    for line in not_injected(cells, sizes):
        tell(line)
    planned = plan_study(Costs(study, commands, sizes), cells, options.rate, workers)
    screen().print(planned.table())
    tell(*planned.words(), *banks, *(["", formulas()] if plan else []))
    if plan:
        return
    folder = StudyFolder(path)
    with folder.only_one():
        times = planned.each(stored=study.store is not None)
        for line in folder.begin(study, cells, changed=changed, planned=times):
            tell(line)
        minutes = options.minutes_a_job
        minutes = MINUTES_A_JOB[options.executor != "processes"] if minutes is None else minutes
        trust = trust_of({**flat(asdict(study)), "imports": options.imports})
        run_all = partial(run_cells, devices=devices, trust=trust)
        schedule = Schedule(folder, cells, run_all, tell, times, minutes)
        schedule.forget()
        tell(
            f"\n{len(cells) - len(schedule.todo)} of {len(cells)} cells are done, in {folder.path}."
        )
        if schedule.todo:
            with goes_on_with(lambda: {}):
                executor_options = dict(options.executor_options)
                executor = make_executor(
                    options.executor, workers, gpus, folder.path, executor_options, devices
                )
                try:
                    schedule.run(executor, workers, again=again)
                except BaseException:
                    executor.shutdown(cancel_futures=True)
                    raise
                executor.shutdown()
        collect_and_report(folder)
    _end(folder)


def _end(folder: StudyFolder) -> None:
    """Say how far the study is; the exit status says whether a cell has failed."""
    screen().print(status_table(folder))
    failed, written = failures(folder), folder.path / "report" / "report.html"
    again = [f"`study.py retry {folder.path}` runs them once more."] if failed else []
    report = [f"Report: {written}"] if written.is_file() else []
    for line in (*failed, *again, *notes.words(folder.path), *report):
        tell(line)
    if failed:
        sys.exit(FAILED)
