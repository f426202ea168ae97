"""The commands for a study's folder: how far it is, its results as tables, and its report."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aligners.cli.command import Run, command
from aligners.cli.options import Imported
from aligners.files.user_files import refusing
from aligners.progress import tell
from aligners.reports.screen import SiteTable, screen
from aligners.reports.study.study_report import report as write_report
from aligners.studies import collecting
from aligners.studies.rehearsal import MEANINGLESS, NOTES
from aligners.studies.schedule import Pace
from aligners.studies.study_folder import ERROR, STATES, StudyFolder

EDITED = "One was edited, or another version wrote it: remove it, and `study.py run` makes it again."
# Decorates a function to make it a command for a study's folder.
for_folder = partial(command, usage="FOLDER [options]")


@for_folder()
def status(_: Run, folder: Path) -> None:
    """Count a study's cells by kind and state, estimate the remaining time, and list the cells that failed.

    Example: `runs/embedded`

    Args:
        folder: Folder of the study, such as runs/NAME.
    """
    study = StudyFolder(folder)
    screen().print(status_table(study))
    for line in (*time_left(study), *failures(study)):
        tell(line)


@for_folder()
def collect(_: Run, folder: Path) -> None:
    """Write the results of all finished cells into one table of each kind, Parquet and CSV.

    Example: `runs/embedded`

    Args:
        folder: Folder of the study, such as runs/NAME.
    """
    study = StudyFolder(folder)
    with refusing(f"The results in {folder} cannot be collected", EDITED):
        paths = collecting.collect(study).values()
    for path in paths:
        tell(str(path))


@dataclass
class Reporting:
    """Input for a report.

    Args:
        imports: Python files or modules that register tables and figures. They are run: name only what you trust.
    """

    imports: list[Imported] = field(default_factory=list)


@for_folder(None, Reporting)
def report(_: Run, folder: Path) -> None:
    """Collect the results of a study's cells, and make its tables and figures.

    Example: `runs/embedded`

    Args:
        folder: Folder of the study, such as runs/NAME.
    """
    study = StudyFolder(folder)
    with refusing(f"The results in {folder} cannot be reported on", EDITED):
        collect_and_report(study)


def collect_and_report(folder: StudyFolder) -> None:
    """Collect the results, and make the report if there is anything to report on."""
    collected = collecting.tables(folder)
    if not collected:
        return
    done = [number for number in sorted(folder.cells) if folder.state(number) == "done"]
    results = [folder.about(number) for number in done]
    first = MEANINGLESS if (folder.path / NOTES).is_file() else None
    write_report(folder.path, collected, folder.study, results, folder.failed(), first)


def status_table(folder: StudyFolder) -> SiteTable:
    """Count the cells by kind and state."""
    counts = Counter[tuple[str, str]]()
    for number in folder.cells:
        counts[folder.described(number)["kind"], folder.state(number)] += 1
    title = f"{folder.study['name']}: {len(folder.cells)} cells in {folder.path}"
    table = SiteTable(title, ["cells"], list(STATES), {})
    for kind in dict.fromkeys(kind for kind, _ in counts):
        numbers = [counts[kind, state] for state in STATES]
        table.add_row(kind, *(str(number or "") for number in numbers))
    return table


def time_left(folder: StudyFolder) -> list[str]:
    """Return how long the rest takes, at the pace of the finished cells and with the present number of workers."""
    pace, rest, workers = Pace(), [], 0
    for number in folder.cells:
        kind, state = folder.described(number)["kind"], folder.state(number)
        workers += state == "running"
        if state == "done":
            pace.add(kind, folder.took(number))
        elif state != "failed":
            rest.append(kind)
    left = pace.left(rest, workers)
    if not rest or not left:
        return []
    on = f"{workers} workers" if workers > 1 else "1 worker"
    return [f"{left.capitalize()} on {on}."]


def failures(folder: StudyFolder) -> list[str]:
    """Return a line for each failed cell: what it is, the last line of its traceback, and where to read the rest."""
    lines = []
    for number, said in folder.failed().items():
        cell = folder.described(number)
        names = " – ".join(model["name"] for model in cell["models"][:4])
        place = folder.cell(number) / ERROR
        lines.append(f"{cell['kind']} {names}, {cell['task']}: {said}\n  {place}")
    return lines
