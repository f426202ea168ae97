"""Studies of nothing: cells that no command runs, and executors that run them at once."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from aligners.files.atomic import write_text
from aligners.studies.cells import Cell
from aligners.studies.expansion import expand
from aligners.studies.spec import Study, read_study
from aligners.studies.study_folder import RESULT, StudyFolder


class Inline(Executor):
    """Runs what is submitted in this process, at once, and keeps with what it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(args)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class NoCommands:
    """Commands that accept every data option but those called `wrong`."""

    def accepts(self, kind: str, option: str) -> bool:
        return option.startswith("data.") and "wrong" not in option

    def resolve(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"variants": ["none"], **{name: str(value) for name, value in options.items()}}


def study_of(**changes: Any) -> Study:
    """A small study; `changes` are keys of the study file."""
    usual = {"name": "small", "models": {"names": "m{seed}", "seeds": 3}, "tasks": {"t": {}}, "fit": {}, "inject": {}}
    return read_study({**usual, **changes})


def begun(path: Path, **changes: Any) -> tuple[StudyFolder, list[Cell]]:
    """A study's folder, and its cells."""
    study, folder = study_of(**changes), StudyFolder(path)
    path.mkdir(exist_ok=True)
    cells = expand(study, NoCommands())
    folder.begin(study, cells, changed=False)
    return folder, cells


def finish(study: str, number: str, content: str = '{"rows": []}') -> str:
    """What a finished cell leaves: its result, and all that others may need."""
    place = Path(study) / "cells" / number
    (place / "run" / "model").mkdir(parents=True, exist_ok=True)
    (place / "run" / "aligners.safetensors").touch()
    write_text(place / RESULT, content)
    return "done"
