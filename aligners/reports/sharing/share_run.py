"""Takes what a run has trained out of its folder, with a card from its report."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aligners.errors import UserError
from aligners.files.shared_folder import MODEL, fetch, is_shared, read_config
from aligners.reports.finished_runs import FinishedRun, finished_run, kinds_in
from aligners.reports.page.run_page import models_of
from aligners.reports.sharing.pretrained import FIGURES, KEPT, KINDS, REPORT, Shared, SharedMaps
from aligners.reports.sharing.public_names import last_parts, public_names, renamed


def shared_from_run(
    run: Path | str,
    report: Path | str | None = None,
    *,
    names: Sequence[str] | None = None,
    license: str | None = None,
) -> Shared:
    """What a run has trained, with the card that its report makes.

    Args:
        run: the folder of a finished run, or its file; or a shared folder, or its name on the Hub.
        report: the run whose report the numbers come from; default: `run`, where it has one.
        names: of the models, as others find them, in their order; default: as they were named.
        license: as the Hub names it, such as `mit`.

    Raises:
        ValueError: the run keeps nothing that can be shared, or the report is about other models.
    """
    path = Path(run)
    if (path / MODEL).is_file() or (is_shared(path) and not path.is_dir()):
        folder = fetch(path)
        return KINDS.get(read_config(folder).get("kind", ""), SharedMaps).from_pretrained(folder)
    file = _kept(path)
    shared: Shared = KEPT[file.name].of_run(file)
    folder = Path(report) if report is not None else path if path.is_dir() else path.parent
    finished = finished_run(folder) if report is not None or kinds_in(folder) else None
    public = last_parts(shared.data) | public_names(
        [str(model["name"]) for model in shared.models], names
    )
    if finished is not None:
        _refuse_report_on_others(shared, file, finished)
        content = json.dumps(renamed(finished.report.content, public), indent=1)
        images = {f"{FIGURES}/{path.name}": path.read_bytes() for path in finished.figures}
        shared.files = {REPORT: content.encode(), **images}
        parts = {
            name: renamed(getattr(finished.report, name), public)
            for name in ("meta", "rows", "sentences")
        }
        finished = finished._replace(report=replace(finished.report, **parts))
    shared.rename(public)
    shared.write_card(finished, license)
    return shared


def _kept(path: Path) -> Path:
    """The file that a run has kept, or this file.

    Raises:
        ValueError: there is none.
    """
    files = [
        file
        for file in ([path] if path.is_file() else [path / name for name in KEPT])
        if file.is_file()
    ]
    if not files or files[0].name not in KEPT:
        raise UserError(
            f"Expected `run` to hold something to share, one of {', '.join(list(KEPT)[: len(KINDS)])}, but {path} "
            f"{'holds none' if path.is_dir() else 'is no such file or folder'}. `train.py fit`, `universe`, `stitch` "
            "and `probe` leave one when they are finished, `fit_pairs` one in each folder of pairs/."
        )
    return files[0]


def _refuse_report_on_others(shared: Shared, file: Path, run: FinishedRun) -> None:
    """Raise unless a report is about the models of what is shared and, as far as is known, about its file.

    Raises:
        ValueError: it is not; says what it is about.
    """
    options = run.options
    named = [
        *(options.get("checkpoints") or ()),
        options.get("checkpoint"),
    ]  # of a training, the latter is no file
    there = [Path(name) for name in named if isinstance(name, str) and Path(name).is_file()]
    if there and not any(name.samefile(file) for name in there):
        raise UserError(
            f"Expected a `report` about {file}, but {run.folder} measured {', '.join(map(str, there))}."
        )
    present = models_of(run.report.meta)
    known = {model.get("fingerprint") for model in present}
    missing = [model["name"] for model in shared.models if model["fingerprint"] not in known]
    if missing:
        raise UserError(
            f"Expected `report` to be about the models that this belongs to, but {run.folder} is not about "
            f"{', '.join(map(str, missing))}: it is about {', '.join(str(model.get('name')) for model in present)}. "
            "Name a run that measured it."
        )
