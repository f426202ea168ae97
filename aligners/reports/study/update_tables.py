"""Updates of a model: what has changed, and the fate of carried artefacts."""

from pandas import DataFrame

from aligners.reports.report import Row
from aligners.reports.study.contents import Table
from aligners.reports.study.described_tables import table
from aligners.reports.study.frames import Frames, Missing, by

PAIR = ("task", "model_x", "model_y")
VERDICTS = {"leave as it is": "left", "carry": "to_carry", "do not use": "not_used"}
MAPS = ("identity", "rotation", "linear")


def updates(frames: Frames, name: str) -> Table:
    """Make a row for each model and its update."""
    rows: dict[tuple[str, ...], Row] = {}
    for kind, about in (("compare", _changed), ("carry", _carried)):
        try:
            frame = frames.of(kind)
        except Missing:
            continue
        for place, part in by(frame, *PAIR):
            row = rows.setdefault(tuple(place.values()), place)
            row.update(about(part))
    if not rows:
        raise Missing("the study has no rows of the kinds `compare` and `carry`")
    return table(name, list(rows.values()))


def _changed(rows: DataFrame) -> Row:
    """Return the first site whose states have changed by more than rounding, and the errors of maps at the last one."""
    as_they_are = rows[rows["method"] == "identity"]
    changed = as_they_are.loc[
        as_they_are["within"].eq(False), "site_y"
    ]  # None: nothing is known
    found: Row = {"first": int(changed.min()) if len(changed) else None}
    last = rows[rows["site_y"] == rows["site_y"].max()]
    errors = last.groupby("method")["fvu"].mean()
    for method in MAPS:
        found[f"fvu_{method}"] = errors.get(method)
    return found


def _carried(rows: DataFrame) -> Row:
    """Return how many artefacts have each verdict, and how well those to be carried keep their answers."""
    found = Row()
    for verdict, short in VERDICTS.items():
        found[short] = int(rows["verdict"].eq(verdict).sum())
    carried = rows[rows["verdict"] == "carry"]
    if len(carried):
        for column in ("fidelity", "stale_fidelity"):
            found[column] = carried[column].mean()
            found[f"worst_{column}"] = carried[column].min()
    return found
