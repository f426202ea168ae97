"""Every kind of report, as `kinds.yaml` lists them, and a finished run read back: its report, options and figures."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from aligners.datamodules.text.texts import words_on
from aligners.errors import UserError
from aligners.files.shared_folder import own_file
from aligners.files.user_files import read_json, read_yaml, refusing
from aligners.files.yaml_tables import table_beside
from aligners.reports.page.run_page import CONFIG
from aligners.reports.report import Report, Row

KINDS: dict[str, Row] = table_beside(__file__, "kinds.yaml")
SHOWN = (
    "title",
    "note",
    "columns",
    "captions",
    "files",
)  # of a kind, whatever its rows are


def file_name(kind: str) -> str:
    """Return the name of the files of a kind of report, which is the `name` of its Report."""
    return str(KINDS[kind].get("name", kind))


def maker(kind: str) -> Callable[..., Report]:
    """Return the function that makes a kind of report, importing its module."""
    module = import_module(f".runs.{KINDS[kind]['module']}", __package__)
    make: Callable[..., Report] = module.report
    return make


def make_report(kind: str, meta: Row, rows: Sequence[Row], **more: Any) -> Report:
    """Turn what was measured into a report.

    Args:
        kind: one of `KINDS`.
        meta: what holds for all rows.
        rows: one for each thing that was measured, all with the same keys.
        more: further tables and options of this kind of report.
    """
    about = KINDS[kind]
    report = maker(kind)(meta, rows, **about.get("options", {}), **more)
    first = list(
        dict.fromkeys(meta.get("data_cautions", ()))
    )  # nothing is to be read without them
    cautions = [
        said for said in dict.fromkeys(meta.get("cautions", ())) if said not in first
    ]
    texts = []
    for name in ("text", "other_text"):
        texts += words_on(meta.get(name, {}), "filled", "copies", "left_out")
    return replace(
        report,
        name=file_name(kind),
        lead=" ".join(filter(None, [*first, report.lead])),
        sentences=[*cautions, *report.sentences, *texts],
        **{name: about[name] for name in SHOWN if name in about},
    )


PARTS = ("meta", "findings", "rows")
AGAIN = "Run its command again."
EDITED = f"It was edited, or another version wrote it. {AGAIN}"


class FinishedRun(NamedTuple):
    """A run and its report.

    Attributes:
        folder: folder of the run.
        kind: kind of report, from `aligners.reports.finished_runs.KINDS`.
        report: as it was written, its sentences included.
        config: the run's options as they were resolved, as YAML; empty where there are none.
    """

    folder: Path
    kind: str
    report: Report
    config: str

    @property
    def options(self) -> dict[str, Any]:
        """The run's options; empty where there is no `config`."""
        return yaml.safe_load(self.config) or {}

    @property
    def figures(self) -> list[Path]:
        """The existing images of the report's figures."""
        found = []
        for name in self.report.figures:
            path = own_file(self.folder, f"{name}.png")
            if path is not None:
                found.append(path)
        return found


def kinds_in(folder: Path) -> list[str]:
    """Return the kinds of report that a run's folder holds."""
    return [kind for kind in KINDS if (folder / f"{file_name(kind)}.json").is_file()]


def finished_run(folder: Path) -> FinishedRun:
    """Read the report of a run's folder.

    Raises:
        ValueError: it is no folder of a finished run: says what it is, or what it lacks; or a file of it is a link
            that leads out of it.
    """
    kinds = kinds_in(folder)
    if not kinds:
        raise UserError(
            f"Expected `run` to be the folder of a finished run, but {folder} {_what_it_is(folder)}"
        )
    name = f"{file_name(kinds[0])}.json"
    place = own_file(folder, name) or folder / name
    content = _read(place)
    config = own_file(folder, CONFIG)
    options, written = {}, ""
    if config is not None:
        options = read_yaml(config, "the options of a run", EDITED)
        written = config.read_text(encoding="utf-8")
    with refusing_report(place):
        report = _report(kinds[0], content, options)
        said = [sentence for sentence in content["findings"] if sentence != report.lead]
    return FinishedRun(folder, kinds[0], replace(report, sentences=said), written)


def refusing_report(place: Path) -> AbstractContextManager[None]:
    """Context in which any error from a report's content becomes one that names the report.

    Args:
        place: its file, or the folder of its run.
    """
    return refusing(
        f"Expected {place} to be a report as this version writes it, but it cannot be shown",
        EDITED,
    )


def _what_it_is(folder: Path) -> str:
    """Say what a folder without a report holds instead, and what to do."""
    if not folder.is_dir():
        return "is not a folder."
    if (folder / "study.yaml").is_file():
        return f"is that of a study: `study.py status {folder}` shows how far it is, report/report.html what it found."
    runs = sorted(
        path.parent for path in folder.glob(f"*/{CONFIG}") if kinds_in(path.parent)
    )
    if runs:
        return f"holds several: name one of {', '.join(map(str, runs))}."
    if not (folder / CONFIG).is_file():
        return f"holds no {CONFIG}, which every run begins with."
    if (folder / "last.ckpt").is_file():
        return (
            f"holds no report yet: the run is at work, or was stopped. The same command with `--ckpt_path "
            f"{folder / 'last.ckpt'}` goes on from where it was saved."
        )
    return f"holds {CONFIG} and no report: the run is at work, was stopped, or failed. Run its command again."


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path, "a report", AGAIN)
    if not set(PARTS) <= set(content):
        raise UserError(
            f"Expected {path} to be a report with {', '.join(PARTS)}, but it is something else."
        )
    return content


def _report(kind: str, content: Row, options: Row) -> Report:
    """Make a report again, from its rows and further tables, and those of the run's options that are about reports."""
    takes = signature(maker(kind)).parameters
    further = {}
    for name, value in {**options, **content}.items():
        if name in takes and name not in PARTS:
            further[name] = value
    try:
        return make_report(kind, content["meta"], content["rows"], **further)
    except KeyError as error:
        raise UserError(
            f"Expected a {kind} report as this version writes them, but its rows have no {error}: another "
            "version wrote it. Its own files are unchanged; run its command again to write a new one."
        ) from error
