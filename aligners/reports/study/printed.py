"""The papers' own definitions where they differ from ours, and which of ours each is compared with."""

from collections.abc import Mapping
from typing import Any

from pandas import DataFrame

from aligners.files.yaml_tables import table_beside
from aligners.fitting.training_status import is_trained

DEFINITIONS: dict[str, Any] = table_beside(__file__, "as_printed.yaml")
# of maps, that reports show in a column beside ours
QUANTITIES = ("mse", "mse_fit", "score", "accuracy", "accuracy_source_pooler")
PLACE = ("cell", "task", "stage", "model_x", "model_y", "rows", "site_x", "site_y")
RECOVERY = (
    "strength",
    "target_seed",
    "direction",
)  # what tells the rows of one map apart there


def with_definitions(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `as_printed` adds to the options of a kind of cell: the papers' definitions of all that they name.

    Args:
        kind: kind of the cell.
        options: options of its command.
    """
    added = dict(DEFINITIONS["options"].get(kind, {}))
    maps = options.get("model", {}).get("aligners") or {}
    further = {}
    for name, about in DEFINITIONS["maps"].items():
        if about["beside"] in maps:
            further[name] = about["map"]
    if further:
        added["model"] = {"aligners": {**maps, **further}}
    measures = options.get("measures")
    if isinstance(measures, list):
        added["measures"] = list(measures)
        for name, about in DEFINITIONS["measures"].items():
            if (
                about["beside"] in measures
                and about.get("with", about["beside"]) in measures
            ):
                added["measures"].append(name)
    return added


def beside(frame: DataFrame) -> DataFrame:
    """Add the errors and scores of the papers' own definitions to rows of our maps, in columns NAME_printed.

    A map that kept its untrained start or diverged has none.

    Args:
        frame: rows of maps, with `method` and `training`.
    """
    ours = {name: about["beside"] for name, about in DEFINITIONS["maps"].items()}
    printed = frame["method"].map(ours)
    if printed.isna().all():
        return frame.reset_index(drop=True)
    keys = frame.columns.intersection([*PLACE, *RECOVERY, "method"]).tolist()
    quantities = frame.columns.intersection(QUANTITIES)
    columns = dict(zip(quantities, quantities + "_printed", strict=True))
    theirs = frame.assign(method=printed)[printed.notna()]
    trained = [is_trained({"training": outcome}) for outcome in theirs["training"]]
    theirs = theirs.loc[trained, [*keys, *columns]].rename(columns=columns)
    return frame[printed.isna()].merge(theirs, how="left", on=keys)
