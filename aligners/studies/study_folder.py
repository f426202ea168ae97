"""A study's folder: what the study is, and one folder for each cell, with its result.

A result is JSON whose rows are read one by one: a comparison of many models has millions of them.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from aligners.datamodules.run_identity import differences
from aligners.errors import UserError, check_file_names
from aligners.files.atomic import check_folder, lock, remove_unfinished, write_text
from aligners.files.user_files import read_yaml, refusing
from aligners.studies.cells import FOLDER, KINDS, Cell
from aligners.studies.spec import Study

STUDY = "study.yaml"
PLAN = "plan.json"
CELL = "cell.json"
RESULT = "result.json"
ERROR = "error.txt"
LOG = "log.txt"
LOCK = "lock"
OPTIONS = "options.yaml"  # written as the command begins
# What a cell goes on from, below its folder: states of a training, passes and parts that are finished, classifiers.
GOES_ON_FROM = (
    "*/last.ckpt",
    "*/*/last.ckpt",
    "*/*/*.safetensors",
    "*/*/*/finetuned.json",
)
FREE = ("report", "store", "keep")  # parts of a study that no result depends on
State = Literal["done", "running", "waiting", "failed"]
STATES: tuple[State, ...] = get_args(State)
MORE = ",\n"
BEGIN_AGAIN = (
    "The folder is incomplete, or was edited. "
    "Remove that file: `study.py run` with the study's own writes it."
)
AGAIN = "Remove it: `study.py run` makes it again."
ENCODER = json.JSONEncoder(allow_nan=False)


class StudyFolder:
    """Where a study is written.

    `study.yaml` is the study as resolved, `plan.json` the ids of its cells, `cells/ID/` a folder for each of them:
    `cell.json` says what it is, `run/` is the folder of its command, and it is done once `result.json` is there.

    Args:
        path: path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def study(self) -> dict[str, Any]:
        """The study as plain values.

        Raises:
            ValueError: this is no study's folder.
        """
        file = self.path / STUDY
        if not file.is_file() or not (self.path / PLAN).is_file():
            raise UserError(
                f"Expected the folder of a study, with its {STUDY}, but got {self.path}."
            )
        study = read_yaml(file, "a study as it was begun", BEGIN_AGAIN)
        for name in ("name", "models", "tasks", "finetune"):
            if name not in study:
                raise UserError(
                    f"Expected {file} to be a study as it was begun, but it has no {name}. {BEGIN_AGAIN}"
                )
        study.pop("assume", None)  # of an earlier version, and what follows
        for name in ("stages", "tasks"):
            (study["finetune"] or {}).pop(name, None)
        return study

    # ------------------------------------------------------------------ cells

    @property
    def cells(self) -> list[str]:
        """The ids of its cells, each after those that it needs."""
        _ = self.study  # raises if this is no study's folder
        file = self.path / PLAN
        said = f"Expected {file} to list the cells of a study, but it cannot be read"
        with refusing(said, BEGIN_AGAIN):
            plan = json.loads(file.read_text(encoding="utf-8"))
            # A dictionary is of an earlier version, which wrote planned seconds, too.
            if not isinstance(plan, dict | list):
                raise TypeError("it holds something else")
            for number in plan:
                if not isinstance(number, str):
                    raise TypeError("it holds something else")
        for number in plan:
            check_file_names(**{f"{PLAN} of {self.path}": number})
        return list(plan)

    def cell(self, number: str) -> Path:
        """The folder of a cell."""
        return self.path / "cells" / number

    def described(self, number: str) -> dict[str, Any]:
        """Describe a cell by plain values, with this folder in the names of files."""
        file = self.cell(number) / CELL
        said = f"Expected {file} to describe a cell of the study, but it"
        if not file.is_file():
            raise UserError(f"{said} is not there. {BEGIN_AGAIN}")
        with refusing(f"{said} cannot be read", BEGIN_AGAIN):
            text = file.read_text(encoding="utf-8")
            here = json.dumps(str(self.path.resolve()))[1:-1]
            return asdict(Cell(**json.loads(text.replace(FOLDER, here))))

    def state(self, number: str) -> State:
        """How far a cell is."""
        place = self.cell(number)
        if not (place / RESULT).is_file() and (place / LOCK).is_file():
            with locked(place) as free:
                if not free:
                    return "running"
        return self.ended(number) or "waiting"

    def ended(self, number: str) -> State | None:
        """How a cell that was submitted has ended, by what it has left; None: it has not."""
        place = self.cell(number)
        if (place / RESULT).is_file():
            return "done"
        if (place / ERROR).is_file():
            return "failed"
        return None

    def took(self, number: str) -> float | None:
        """Seconds that a finished cell took from its last beginning; None: it is not finished."""
        begun, ended = self.cell(number) / OPTIONS, self.cell(number) / RESULT
        if begun.is_file() and ended.is_file():
            return ended.stat().st_mtime - begun.stat().st_mtime
        return None

    def about(self, number: str) -> dict[str, Any]:
        """What the result of a finished cell has beside its tables: how long it took, versions, `meta`, findings."""
        with self._refusing_result(number):
            first = next(_lines(self.cell(number) / RESULT))
            return json.loads(first.rstrip(MORE) + "}")

    def rows(self, number: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The rows that a finished cell has found, one by one, each with the name of its table."""
        table, lines = "", _lines(self.cell(number) / RESULT)
        while True:
            with self._refusing_result(number):
                line = next(lines, None)
                if line is None:
                    return
                row = None
                if table and line.startswith("{"):
                    row = json.loads(line.rstrip(MORE))
            if line.startswith('"'):
                table = line.split('"')[1]
            if row is not None:
                yield table, row

    def _refusing_result(self, number: str) -> AbstractContextManager[None]:
        file = self.cell(number) / RESULT
        return refusing(
            f"Expected {file} to be the result of a cell, but it cannot be read", AGAIN
        )

    def reached(self, number: str) -> list[tuple[int, int]]:
        """How far an unfinished cell is, to compare: the time and size of every file that it would go on from."""
        about = [file.stat() for file in self.goes_on_from(number)]
        return sorted((found.st_mtime_ns, found.st_size) for found in about)

    def goes_on_from(self, number: str) -> list[Path]:
        """Files that an unfinished cell goes on from."""
        files: list[Path] = []
        for pattern in GOES_ON_FROM:
            files += self.cell(number).glob(pattern)
        return files

    def failed(self) -> dict[str, str]:
        """The last line of the traceback of each cell that failed."""
        last = {}
        for number in self.cells:
            if self.state(number) == "failed":
                file = self.cell(number) / ERROR
                text = file.read_text(encoding="utf-8", errors="replace").strip()
                last[number] = text.rpartition("\n")[2].strip()
        return last

    def leaves(self, cell: Cell) -> bool:
        """Whether a cell is done, and what other cells need of it is there."""
        place = self.path / cell.folder
        left = place / KINDS[cell.kind].leaves
        names = left, left.with_suffix(".ckpt")  # as the version before called maps
        return (place / RESULT).is_file() and any(name.exists() for name in names)

    # ------------------------------------------------------------------ beginning

    def begin(self, study: Study, cells: Sequence[Cell], *, changed: bool) -> list[str]:
        """Write down what the study is; only under `only_one`.

        Args:
            study: the study.
            cells: its cells.
            changed: whether results of an earlier version of the study may be set aside.

        Returns:
            What has changed since the study was begun, in words.

        Raises:
            ValueError: finished cells would be set aside, and `changed` is not set; or the folder is of another study.
        """
        self._refuse_links()
        now = json.loads(json.dumps(asdict(study)))
        changes = []
        if (self.path / STUDY).is_file():
            changes = self._changes(now, cells, changed)
        for file in sorted((self.path / "cells").glob(f"*/{LOCK}")):
            with locked(file.parent) as free:
                if free:  # no job of an earlier command is at work there
                    remove_unfinished(file.parent)
        for cell in cells:
            self._describe(cell)
        plan = json.dumps([cell.id for cell in cells], indent=0)
        write_text(self.path / PLAN, plan)
        text = yaml.safe_dump(now, sort_keys=False, allow_unicode=True)
        write_text(self.path / STUDY, text)
        self.__dict__.pop("study", None)
        return changes

    def _describe(self, cell: Cell) -> None:
        """Write a cell's description, also where somebody has changed it."""
        file = self.path / cell.folder / CELL
        text = json.dumps(asdict(cell), indent=1)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)

    def _refuse_links(self) -> None:
        """Raise if a cell's folder, or something that it goes on from, is a link.

        Raises:
            ValueError: it is: what it leads to would be written over, or removed.
        """
        cells = self.path / "cells"
        for pattern in ("*", "*/*", "*/*/*"):
            for path in cells.glob(pattern):
                if path.is_symlink():
                    raise UserError(
                        f"Expected {self.path} to hold its own files, but {path} is a link to {path.resolve()}. Put "
                        "the file itself there, or remove the link."
                    )

    def _changes(
        self, now: dict[str, Any], cells: Sequence[Cell], changed: bool
    ) -> list[str]:
        """Say what differs from the study as it was begun, and which cells that touches."""
        then = self.study
        if then.get("name") != now["name"]:
            raise UserError(
                f"Expected {self.path} to hold the study {now['name']}, but it holds {then.get('name')}."
            )
        lines = []
        changes = differences(_of_results(then), _of_results(now), "")
        if changes:
            lines.append(f"The study has changed: {'; '.join(changes)}.")
        known, wanted = set(self.cells), {cell.id for cell in cells}
        gone = [number for number in self.cells if number not in wanted]
        lost = [number for number in gone if self.state(number) == "done"]
        if gone:
            kinds = [self.described(number)["kind"] for number in gone]
            lines.append(f"No longer part of it: {_counted(kinds)} ({len(lost)} done).")
        new = [cell.kind for cell in cells if cell.id not in known]
        if new:
            lines.append(f"New: {_counted(new)}.")
        if lost and not changed:
            raise UserError(
                f"{' '.join(lines)} To go on with the study as it is now, and leave these results out of its tables, "
                "give `--changed true`; or correct the study file, or name another `--folder`."
            )
        return lines

    @contextmanager
    def only_one(self) -> Iterator[None]:
        """Within it, no other process runs the study.

        Raises:
            ValueError: one does, or the folder cannot be written to.
        """
        check_folder(self.path, "folder")
        with locked(self.path) as free:
            if not free:
                raise UserError(
                    f"Expected no other command to run this study, but one is at work in {self.path}. Wait for it, or "
                    "end it: a study goes on from where it was."
                )
            yield


def _of_results(study: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a study that results depend on."""
    return {name: value for name, value in study.items() if name not in FREE}


def as_lines(result: Mapping[str, Any]) -> str:
    """A result as JSON: all that is no table on the first line, then each row of a table on a line of its own."""
    about, tables = dict[str, Any](), list[str]()
    for name, value in result.items():
        if isinstance(value, list) and name != "findings":
            rows = MORE.join(map(ENCODER.encode, value))
            tables.append(f'"{name}": [\n{rows}\n]')
        else:
            about[name] = value
    first = ENCODER.encode(about).removesuffix("}")
    return MORE.join([first, *tables]) + "\n}\n"


def _lines(path: Path) -> Iterator[str]:
    """The lines of a result; one of an earlier version, which has no lines, is read as a whole."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
        if first.endswith(MORE):
            yield first
            yield from file
        else:
            whole = json.loads(first + file.read())
            yield from as_lines(whole).splitlines(keepends=True)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder against other processes as long as it lasts; false if one has it."""
    file = lock(folder / LOCK)
    try:
        yield file is not None
    finally:
        if file is not None:
            os.close(file)


def _counted(kinds: Sequence[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
