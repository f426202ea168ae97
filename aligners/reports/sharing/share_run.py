"""Collects what a run has trained from its folder, with a card made from its report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from aligners.errors import UserError
from aligners.files.shared_folder import MODEL, fetch, is_shared, read_config
from aligners.reports.finished_runs import FinishedRun, finished_run, kinds_in
from aligners.reports.page.run_page import models_of
from aligners.reports.sharing.pretrained import (
    FIGURES,
    KEPT,
    KINDS,
    REPORT,
    Shared,
    SharedMaps,
)
from aligners.reports.sharing.public_names import last_parts, public_names, renamed


def shared_from_run(
    run: Path | str,
    report: Path | str | None = None,
    *,
    names: Sequence[str] | None = None,
    license: str | None = None,
) -> Shared:
    """Return what a run has trained, with the card that its report makes.

    Args:
        run: the folder of a finished run, or its file; or a shared folder, or its name on the Hub.
        report: the run whose report the numbers come from; default: `run`, where it has one.
        names: names of the models, as others find them, in their order; default: as they were named.
        license: as the Hub names it, such as `mit`.

    Raises:
        ValueError: the run keeps nothing that can be shared, or the report is about other models.
    """
    path = Path(run)
    if (path / MODEL).is_file() or (is_shared(path) and not path.is_dir()):
        folder = fetch(path)
        kind = KINDS.get(read_config(folder).get("kind", ""), SharedMaps)
        return kind.from_pretrained(folder)
    file = _kept(path)
    shared: Shared = KEPT[file.name].of_run(file)
    models = [str(model["name"]) for model in shared.models]
    public = last_parts(shared.data) | public_names(models, names)
    finished = None
    if report is not None:
        finished = finished_run(Path(report))
    elif kinds_in(file.parent):
        finished = finished_run(file.parent)
    if finished is not None:
        _refuse_report_on_others(shared, file, finished)
        finished = _for_others(finished, public)
        content = json.dumps(finished.report.content, indent=1)
        shared.files[REPORT] = content.encode()
        for figure in finished.figures:
            shared.files[f"{FIGURES}/{figure.name}"] = figure.read_bytes()
    shared.rename(public)
    shared.write_card(finished, license)
    return shared


def _for_others(run: FinishedRun, names: Mapping[str, str]) -> FinishedRun:
    """Return a run whose report has the names that others know."""
    parts = {}
    for part in ("meta", "rows", "tables", "lead", "sentences"):
        parts[part] = renamed(getattr(run.report, part), names)
    return run._replace(report=replace(run.report, **parts))


def _kept(path: Path) -> Path:
    """Return the file that a run has kept, or this file.

    Raises:
        ValueError: there is none.
    """
    for file in (path, *(path / name for name in KEPT)):
        if file.is_file() and file.name in KEPT:
            return file
    known = ", ".join(list(KEPT)[: len(KINDS)])
    found = "is no such file or folder"
    if path.is_dir():
        found = "holds none"
    raise UserError(
        f"Expected `run` to hold something to share, one of {known}, but {path} {found}. `train.py fit`, `universe`, "
        "`stitch` and `probe` leave one when they are finished, `fit_pairs` one in each folder of pairs/."
    )


def _refuse_report_on_others(shared: Shared, file: Path, run: FinishedRun) -> None:
    """Raise unless a report is about the models of what is shared and, as far as is known, about its file.

    Raises:
        ValueError: it is not; says what it is about.
    """
    # of a training, `checkpoint` is no file
    named = [*(run.options.get("checkpoints") or ()), run.options.get("checkpoint")]
    measured = []
    for name in named:
        if isinstance(name, str) and Path(name).is_file():
            measured.append(Path(name).resolve())
    if measured and file.resolve() not in measured:
        raise UserError(
            f"Expected a `report` about {file}, but {run.folder} measured {', '.join(map(str, measured))}."
        )
    present = models_of(run.report.meta)
    known = {model.get("fingerprint") for model in present}
    missing = []
    for model in shared.models:
        if model["fingerprint"] not in known:
            missing.append(str(model["name"]))
    if missing:
        names = ", ".join(str(model.get("name")) for model in present)
        raise UserError(
            f"Expected `report` to be about the models that this belongs to, but {run.folder} is not about "
            f"{', '.join(missing)}: it is about {names}. Name a run that measured it."
        )
