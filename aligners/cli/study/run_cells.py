"""The commands that run the cells of a study: `study.py run` and `study.py retry`."""

import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from aligners.cli.cells.cell_checks import check_cells, not_injected
from aligners.cli.cells.cell_options import (
    CellOptions,
    choose_banks,
    keep_rows,
    model_sizes,
)
from aligners.cli.cells.running import run_cell
from aligners.cli.command import Run, command, options_of
from aligners.cli.endings import goes_on_with
from aligners.cli.options import Imported, flat
from aligners.cli.study.study_results import (
    collect_and_report,
    failures,
    for_folder,
    status_table,
)
from aligners.cli.trusted import check_typed, trust_of
from aligners.errors import check_range
from aligners.files.atomic import let_write, write_text
from aligners.progress import tell
from aligners.reports.screen import SiteTable, screen
from aligners.reports.study.registry import check_report
from aligners.studies.cells import Cell
from aligners.studies.executors import in_groups, make_executor, visible_gpus
from aligners.studies.expansion import expand
from aligners.studies.rehearsal import NOTES, REHEARSAL, rehearsed
from aligners.studies.schedule import Schedule
from aligners.studies.spec import Study, read_study
from aligners.studies.study_folder import StudyFolder

FAILED = 1  # exit status where a cell has failed


@dataclass
class Running:
    """Where cells run.

    Args:
        executor: Where cells run: processes, slurm, ray. `slurm` needs the package submitit, `ray` the package ray.
        workers: Cells at a time. Default: as many as this machine has GPUs, or 1. Processes share its threads.
        executor_options: Options of submitit's AutoExecutor (timeout_min, slurm_partition, gpus_per_node, cluster:
            local), or of a Ray task (address, num_cpus, num_gpus); only on the command line, as some of them run
            commands.
        cell_devices: GPUs of a cell, or processes where there is no GPU: fits, injections and comparisons are divided
            among them. Jobs reserve as many GPUs, unless `executor_options` say how many.
        imports: Python files or modules with maps, measures, model families or tables of your own, which every cell
            imports. They are run: name only what you trust.
    """

    executor: str = "processes"
    workers: int | None = None
    executor_options: dict[str, Any] = field(default_factory=dict)
    cell_devices: int = 1
    imports: list[Imported] = field(default_factory=list)


@command(
    None,
    Study,
    Running,
    config="The study file; its name may also be the first word.",
    usage="STUDY.yaml [options]",
    flags={
        "rehearse": "Run it with tiny models and few texts and steps, in the folder `rehearsal` of its own."
    },
)
def run(
    run: Run, folder: Path | None = None, plan: bool = False, changed: bool = False
) -> None:
    """Run what is missing of a study: many models, tasks, pairs and maps from one file.

    The same command resumes a study that was stopped or has failed cells. Options of the study file can
    be given here, too.

    Example: `embedded --plan true`

    Args:
        run: of the command.
        folder: Folder of the study. Default: runs/NAME.
        plan: List the cells by kind, those that are done, and what will be left out, and end.
        changed: Resume with a study file that has changed, although some finished cells are no longer part of it.
    """
    written = yaml.safe_load(run.parser.dump(run.options, skip_none=False))
    plain = {name: written[name] for name in options_of(Study, run.options)}
    place = folder or Path("runs") / plain["name"]
    if run.options.get("rehearse"):
        place = place / REHEARSAL
        plain = _rehearse(plain, place)
    work = _Work(read_study(plain), place, run, guess=plan)
    if plan:
        work.show()
    else:
        work.run(changed=changed)


def _rehearse(plain: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write small stand-ins for a study's models; return the study of the rehearsal, and what was replaced."""
    os.environ["WANDB_MODE"] = "disabled"
    let_write(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plain, lines = rehearsed(plain, folder)
    write_text(folder / NOTES, "\n".join(lines))
    tell(f"A rehearsal, in {folder}.")
    return plain


@for_folder(None, Running)
def retry(run: Run, folder: Path) -> None:
    """Run a study's failed cells again, from their last intact state, and the cells that need them.

    Example: `runs/embedded`

    Args:
        run: of the command.
        folder: Folder of the study, such as runs/NAME.
    """
    plain = StudyFolder(folder).study
    check_typed(flat(plain), run.words)
    _Work(read_study(plain), folder, run).run(again=True)


class _Work:
    """The cells of a study, checked, and the place where they run.

    Args:
        study: the study.
        path: its folder.
        run: of the command, with the options of `Running`.
        guess: whether models that cannot be reached have a size that is a guess.

    Raises:
        ValueError: an option is out of its range, `report` names an unknown table or figure, or a cell cannot run.
    """

    def __init__(
        self, study: Study, path: Path, run: Run, *, guess: bool = False
    ) -> None:
        check_report(study.report)
        self.options = run.options
        self.devices: int = self.options.cell_devices
        check_range(
            least=1, cell_devices=self.devices, workers=self.options.workers or None
        )
        visible = []
        if self.options.executor == "processes":
            visible = visible_gpus(torch.cuda.device_count())
        self.gpus = in_groups(visible, self.devices)
        self.workers = self.options.workers or max(1, len(self.gpus))
        self.folder = StudyFolder(path)
        commands, sizes = CellOptions(), model_sizes(study, guess=guess)
        check_cells(expand(study, commands), commands, sizes)
        self.study, self.said = choose_banks(study, commands, sizes)
        self.cells = keep_rows(expand(self.study, commands), commands)
        self.said += not_injected(self.cells, sizes)

    def show(self) -> None:
        """Show the cells by kind and how many are done, and say what will be left out."""
        screen().print(self._table())
        for line in self.said:
            tell(line)

    def _table(self) -> SiteTable:
        kinds = Counter(cell.kind for cell in self.cells)
        done = Counter(cell.kind for cell in self.cells if self._is_done(cell))
        table = SiteTable(
            f"{self.study.name}: {len(self.cells)} cells",
            ["cells"],
            ["number", "done"],
            {},
        )
        for kind, number in kinds.items():
            table.add_row(kind, f"{number:,}", f"{done[kind]:,}")
        return table

    def _is_done(self, cell: Cell) -> bool:
        return self.folder.ended(cell.id) == "done"

    def run(self, *, changed: bool = False, again: bool = False) -> None:
        """Run what is missing, collect the results, and report.

        Args:
            changed: whether results of an earlier version of the study may be set aside.
            again: whether cells that failed are run again.
        """
        self.show()
        folder = self.folder
        with folder.only_one():
            for line in folder.begin(self.study, self.cells, changed=changed):
                tell(line)
            trust = trust_of(
                {**flat(asdict(self.study)), "imports": self.options.imports}
            )
            run_one = partial(run_cell, devices=self.devices, trust=trust)
            schedule = Schedule(folder, self.cells, run_one, tell)
            schedule.forget()
            done = len(self.cells) - len(schedule.todo)
            tell(f"\n{done} of {len(self.cells)} cells are done, in {folder.path}.")
            if schedule.todo:
                with goes_on_with(lambda: {}):
                    self._run_cells(schedule, again=again)
            collect_and_report(folder)
        _end(folder)

    def _run_cells(self, schedule: Schedule, *, again: bool) -> None:
        name, given = self.options.executor, dict(self.options.executor_options)
        executor = make_executor(
            name, self.workers, self.gpus, self.folder.path, given, self.devices
        )
        try:
            schedule.run(executor, self.workers, again=again)
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
        executor.shutdown()


def _end(folder: StudyFolder) -> None:
    """Report how far the study is; the exit status tells whether a cell has failed."""
    screen().print(status_table(folder))
    failed = failures(folder)
    if failed:
        tell(*failed, f"`study.py retry {folder.path}` runs them once more.")
    notes = folder.path / NOTES  # of a rehearsal
    if notes.is_file():
        tell(notes.read_text(encoding="utf-8"))
    written = folder.path / "report" / "report.html"
    if written.is_file():
        tell(f"Report: {written}")
    if failed:
        sys.exit(FAILED)
