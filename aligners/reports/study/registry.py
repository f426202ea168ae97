"""Every table and figure of a study's report by name, and how any module can add its own."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from aligners.errors import UserError, check_known, did_you_mean
from aligners.reports.study import blocks, map_tables, update_tables  # noqa: F401  (tables.yaml names them)
from aligners.reports.study.contents import Content, Figure, Table
from aligners.reports.study.described_tables import (
    DESCRIBED,
    NUMBERS,
    check_described,
    check_numbers,
)
from aligners.reports.study.frames import Frames, Missing

TABLES, PRINTED = (
    "tables.yaml",
    "numbers.yaml",
)  # beside a module that registers its own
HINT = "Those of a paper, or of your own, need the file that registers them, as `--imports FILE.py`."

# Name -> the function that makes a table or a figure of what was collected, or raises `Missing`.
CONTENTS: dict[str, Callable[[Frames], Table | Figure]] = {}
# name -> what makes it, given also the name and `with`
_functions: dict[str, Callable[..., Table | Figure]] = {}


def register(module: str) -> None:
    """Add the tables and figures that `tables.yaml` beside a module describes; `numbers.yaml` has printed numbers.

    An entry's function, `from`, is the module's. An entry `like` another one has that one's function and fields, as
    far as it does not state its own, and stands in its place in a report. An entry with neither is a description that
    a function asks for. What is registered twice is as it was the last time.

    Args:
        module: its `__name__`.

    Raises:
        ValueError: an entry is like one that there is not, has an unknown field, or lacks one.
        AttributeError: the module lacks a function.
    """
    home = sys.modules[module]
    folder = Path(str(home.__file__)).parent
    if (folder / PRINTED).is_file():
        numbers = _read(folder / PRINTED)
        check_numbers(numbers)
        NUMBERS.update(numbers)
    for name, own in _read(folder / TABLES).items():
        _add(name, own, home)


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content


def _add(name: str, own: Mapping[str, Any], home: Any) -> None:
    """Add an entry with these fields, whose function is in `home`."""
    fields = dict(own)
    if "like" in own:
        check_known(CONTENTS, like=own["like"])
        fields = DESCRIBED[own["like"]] | fields
        _functions[name] = _functions[own["like"]]
    if "from" in own:
        _functions[name] = attrgetter(own["from"])(home)
    check_described(name, fields)
    DESCRIBED[name] = fields
    if name in _functions:
        CONTENTS[name] = partial(_functions[name], name=name, **fields.get("with", {}))


register(str(__package__))
_OWN = tuple(CONTENTS)


def check_report(names: Sequence[str] | None) -> None:
    """Raise if a study's report is to have what there is not.

    Args:
        names: names of tables and figures; None for all.

    Raises:
        ValueError: a name is unknown.
    """
    try:
        check_known(CONTENTS, report=names)
    except UserError as error:
        raise UserError(f"{error} {HINT}") from None


def usual() -> list[str]:
    """Return the default names of a report: what was registered, then our own that nothing replaces."""
    replaced = {fields.get("like") for fields in DESCRIBED.values()}
    added = [name for name in CONTENTS if name not in _OWN]
    return added + [name for name in _OWN if name not in replaced]


class ReportContents(NamedTuple):
    """What a study's report consists of.

    Attributes:
        tables: in the order of the registry.
        figures: likewise.
        missing: name -> why it could not be made.
    """

    tables: list[Table]
    figures: list[Figure]
    missing: dict[str, str]

    def findings(self) -> list[Content]:
        """Return the tables and figures with findings, each with the sentences that no earlier one has."""
        before, contents = set[str](), list[Content]()
        for item in (*self.tables, *self.figures):
            sentences = [
                sentence for sentence in item.findings if sentence not in before
            ]
            before.update(sentences)
            if sentences:
                contents.append(replace(item, findings=sentences))
        return contents


def make(frames: Frames, names: Sequence[str] | None = None) -> ReportContents:
    """Make tables and figures. One that nobody has registered is missing.

    Args:
        frames: frames of the study.
        names: which; default: all that can be made.
    """
    made = ReportContents([], [], {})
    for name in names or usual():
        if name not in CONTENTS:
            meant = did_you_mean([name], CONTENTS)
            made.missing[name] = (
                f"there is no table and no figure of this name.{meant} {HINT}"
            )
            continue
        try:
            item = CONTENTS[name](frames)
        except Missing as reason:
            made.missing[name] = str(reason)
            continue
        if isinstance(item, Table):
            made.tables.append(item)
        else:
            made.figures.append(item)
    return made
