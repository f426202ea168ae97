"""Updates of a model: what has changed, and what becomes of artefacts that are carried over."""

import pandas as pd

from aligners.reports.report import Row
from aligners.reports.study.contents import Table
from aligners.reports.study.described_tables import table
from aligners.reports.study.frames import Frames, Missing, by

PAIR = ("task", "model_x", "model_y")
VERDICTS = {"leave as it is": "left", "carry": "to_carry", "do not use": "not_used"}


def updates(frames: Frames, name: str) -> Table:
    """A row for each model and its update."""
    rows: dict[tuple[str, ...], Row] = {}
    for kind, about in (("compare", _changed), ("carry", _carried)):
        try:
            frame = frames.of(kind)
        except Missing:
            continue
        for place, part in by(frame, *PAIR):
            rows.setdefault(tuple(place.values()), dict(place)).update(about(part))
    if not rows:
        raise Missing("the study has no rows of the kinds `compare` and `carry`")
    return table(name, list(rows.values()))


def _changed(rows: pd.DataFrame) -> Row:
    """The first site whose states have changed by more than rounding, and the errors of maps at the last one."""
    as_they_are, last = (
        rows[rows["method"] == "identity"],
        rows[rows["site_y"] == rows["site_y"].max()],
    )
    changed = as_they_are.loc[as_they_are["within"].eq(False), "site_y"]  # None: nothing is known
    errors = last.groupby("method")["fvu"].mean()
    found: Row = {"first": int(changed.min()) if len(changed) else None}
    return found | {
        f"fvu_{method}": errors.get(method) for method in ("identity", "rotation", "linear")
    }


def _carried(rows: pd.DataFrame) -> Row:
    """How many artefacts there are of each verdict, and how well those that are to be carried keep their answers."""
    found: Row = {
        short: int((rows["verdict"] == verdict).sum()) for verdict, short in VERDICTS.items()
    }
    carried = rows[rows["verdict"] == "carry"]
    for column in ("fidelity", "stale_fidelity") if len(carried) else ():
        found |= {column: carried[column].mean(), f"worst_{column}": carried[column].min()}
    return found
