"""The outcome of training at each site, in words; maps that did not learn are labelled as such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["TRAINED_WELL", "no_better_than_the_mean", "outcomes", "what_did_not_train"]

TRAINED_WELL = "trained"


def outcomes(record: Mapping[str, Any] | None, sites: int) -> list[str | None]:
    """Say of each site: "trained", "untrained start (NAME)", or when it diverged and to what it was set back.

    Args:
        record: one entry of `Alignment.training_record`; None for a closed form, or if nothing was validated.
        sites: S, the number of site pairs.
    """
    if record is None:
        return [None] * sites
    found: list[str | None] = []
    for best, diverged, start in zip(record["best_step"], record["diverged_step"], record["start"], strict=True):
        kept = f"step {best}" if best else f"the untrained start ({start})"
        trained = TRAINED_WELL if best else f"untrained start ({start})"
        found.append(f"diverged at step {diverged}, set back to {kept}" if diverged else trained)
    return found


def what_did_not_train(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each method and outcome of a report's rows that is not "trained".

    Args:
        rows: rows with method, site_x, site_y and training.
    """
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        outcome = row.get("training")
        if outcome not in (None, TRAINED_WELL):
            i, j = row["site_x"], row["site_y"]
            places.setdefault((row["method"], outcome), []).append(str(i) if i == j else f"{i}→{j}")
    return [
        f"* {method} at {'site' if len(sites) == 1 else 'sites'} {', '.join(sites)}: {outcome}."
        for (method, outcome), sites in places.items()
    ]


def no_better_than_the_mean(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on the maps of a report's rows that leave all of the variance, or more, at some site; none if none do.

    Args:
        rows: rows with method, role and fvu.
    """
    worst: dict[str, float] = {}
    for row in rows:
        if row["role"] == "method" and row["fvu"] is not None and row["fvu"] >= 1:
            worst[row["method"]] = max(row["fvu"], worst.get(row["method"], 0.0))
    said = ", ".join(f"{name} {fvu:.3g}" for name, fvu in worst.items())
    return [f"No better than the mean of the target's states at some site, by its largest FVU: {said}."] if said else []
