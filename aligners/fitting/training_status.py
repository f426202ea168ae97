"""Which sites diverge while they train; what became of each, in words; cautions about few rows and nothing learned."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.similarity.algebra.moments import Moments
from aligners.similarity.functional.canonical_correlations import MOST_BY_CHANCE

TRAINED_WELL = "trained"
# How a map was fitted, in the column `fit` of reports.
CLOSED, TRAINED, BOTH_WAYS = "closed form", "trained", "trained both ways"
INVERSE_OF_ONE_WAY = "inverse of a map trained one way"
MARK = "*"
MEANING = f"{MARK}: a map that kept its untrained start, or diverged and was set back."
# A loss this many times that of the first step does not come back.
FACTOR = 10.0
# In units of FVU: below this a site is no worse than the mean, wherever it started.
HARMLESS = 2.0
MOST_ROUTES = 3  # number of items that are named; beyond it, only their number is given


class Divergence:
    """Which sites of some banks have diverged, and when.

    A site diverges where its loss or its gradient is not finite, or where its loss exceeds both 2 and ten times that of
    its first step (a map that answers the mean has 1, or 2 both ways). From then on its gradient is zero; nothing else
    is done to it here. Every rank has to see the same losses and gradients.

    Attributes:
        step: bank -> (S,) the step, counted from 1, at which a site diverged; 0 while it has not.
    """

    def __init__(self) -> None:
        self.step: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    def watch(self, bank: str, loss: Tensor, norms: Tensor, step: int) -> Tensor:
        """Check the losses and gradients of a step.

        Args:
            bank: its name.
            loss: (S,) of all ranks.
            norms: (S,) of the gradients.
            step: number of the step, from 1.

        Returns:
            (S,) True where a site goes on training.
        """
        loss = loss.detach()
        if bank not in self.step:
            self.step[bank] = torch.zeros_like(loss, dtype=torch.long)
            self._first[bank] = loss.nan_to_num(0.0, 0.0)
        known = self.step[bank]
        limit = (FACTOR * self._first[bank]).clamp(min=HARMLESS)
        bad = ~(loss <= limit) | ~norms.isfinite()
        self.step[bank] = torch.where(bad & (known == 0), step, known)
        return self.step[bank] == 0

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {"step": self.step, "first": self._first}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state from a checkpoint."""
        for bank, step in state["step"].items():
            self.step[bank] = step.to(device)
            self._first[bank] = state["first"][bank].to(device)


def outcomes(record: Mapping[str, Any] | None, sites: int) -> list[str | None]:
    """Return for each site "trained", "untrained start (NAME)", or when it diverged and what it was set back to.

    A start that is already exact, because two models differ only in coordinates, counts as trained.

    Args:
        record: one entry of `Alignment.training_record`; None for a closed form, or if nothing was validated.
        sites: S, the number of site pairs.
    """
    if record is None:
        return [None] * sites
    words: list[str | None] = []
    exact = record.get("exact", [False] * sites)  # older records do not say
    for s, start in enumerate(record["start"]):
        best = record["best_step"][s]
        diverged = record["diverged_step"][s]
        if diverged:
            fallback = f"the untrained start ({start})"
            if best:
                fallback = f"step {best}"
            words.append(f"diverged at step {diverged}, set back to {fallback}")
        elif best or exact[s]:
            words.append(TRAINED_WELL)
        else:
            words.append(f"untrained start ({start})")
    return words


def how_fitted(aligner: Any, *, turned: bool = False) -> str:
    """Say how a map was fitted, in the words of the column `fit`; `turned`: it is the inverse of what was fitted."""
    if aligner.closed_form:
        return CLOSED
    if aligner.both_ways:
        return BOTH_WAYS
    return INVERSE_OF_ONE_WAY if turned else TRAINED


def is_trained(row: Mapping[str, Any]) -> bool:
    """Tell whether the map of a row is a result of training, rather than its start or what it was set back to."""
    outcome = row.get("training")
    missing = not isinstance(outcome, str)  # None, or NaN in a table
    return missing or outcome == TRAINED_WELL


def mark(text: str, row: Mapping[str, Any]) -> str:
    """Mark a number of a row whose map is not trained; None stays None. See `what_did_not_train`."""
    if is_trained(row) or not text:
        return text
    return text + MARK


def worst_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one of the rows: one that is not trained, if there is any."""
    return min((dict(row) for row in rows), key=is_trained)


def trained_methods(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the methods whose maps are trained in all of their rows, which a report may compare."""
    by_method: dict[str, bool] = {}
    for row in rows:
        by_method[row["method"]] = by_method.get(row["method"], True) and is_trained(
            row
        )
    return [method for method, trained in by_method.items() if trained]


def what_did_not_train(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the mark's meaning and a sentence for each method, outcome and set of sites; empty if all are trained.

    Args:
        rows: rows with method, model_x, model_y, site_x, site_y and training.
    """
    routes = list(dict.fromkeys(_route(row) for row in rows))
    # method and outcome -> route -> its sites
    places: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        if is_trained(row):
            continue
        by_route = places.setdefault((row["method"], row["training"]), {})
        sites = by_route.setdefault(_route(row), [])
        site = _site(row)
        if site not in sites:
            sites.append(site)

    lines = []
    for (method, outcome), by_route in places.items():
        for named, where in _alike(by_route).items():
            site = "sites" if len(named) > 1 else "site"
            place = f"{site} {', '.join(named)}{_among(where, routes)}"
            lines.append(f"{MARK} {method} at {place}: {outcome}.")
    if lines:
        lines.insert(0, MEANING)
    return lines


def _alike(by_route: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], list[str]]:
    """Group routes by their sites: sites -> routes."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for route, sites in by_route.items():
        alike.setdefault(tuple(sites), []).append(route)
    return alike


def _site(row: Mapping[str, Any]) -> str:
    i = row["site_x"]
    j = row["site_y"]
    if i == j:
        return str(i)
    return f"{i}→{j}"


def _among(where: Sequence[str], routes: Sequence[str]) -> str:
    """Say, in words, which of all routes are meant."""
    if where == routes:
        return ""
    if len(where) <= MOST_ROUTES:
        return f", {'; '.join(where)}"
    return f", {len(where)} of {len(routes)} pairs"


def _route(row: Mapping[str, Any]) -> str:
    return f"{row.get('model_x')} → {row.get('model_y')}"


def no_better_than_the_mean(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on the maps that leave all of the variance, or more, at some site; empty if none do.

    Args:
        rows: rows with method, role and fvu.
    """
    worst: dict[str, float] = {}
    for row in rows:
        if row["role"] == "method" and row["fvu"] is not None and row["fvu"] >= 1:
            worst[row["method"]] = max(row["fvu"], worst.get(row["method"], 0.0))
    if not worst:
        return []
    text = ", ".join(f"{name} {fvu:.3g}" for name, fvu in worst.items())
    return [
        f"No better than the mean of the target's states at some site, by its largest FVU: {text}."
    ]


def beside_far_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on the FVU of maps with rows far from all others, or without them; empty if unknown.

    Args:
        rows: rows with method, role if they have several, and the columns of `aligners.fitting.map_errors.FAR_COLUMNS`,
            where these are known.
    """
    sentences = []
    for column, which in {"fvu_with_far": "with", "fvu_without_far": "without"}.items():
        found: dict[str, list[float]] = {}
        for row in rows:
            if row.get("role", "method") == "method" and row.get(column) is not None:
                found.setdefault(row["method"], []).append(row[column])
        if found:
            each = ", ".join(
                f"{name} {_span(values)}" for name, values in found.items()
            )
            sentences.append(
                f"FVU {which} the rows that are far from all others: {each}."
            )
    return sentences


def _span(values: Sequence[float]) -> str:
    least = f"{min(values):.3f}"
    most = f"{max(values):.3f}"
    if least == most:
        return least
    return f"{least} to {most}"


def few_rows(*each: Moments) -> list[str]:
    """Return a caution for each set of moments with fewer than ten fitting rows per dimension."""
    cautions = {}
    for moments in each:
        rows = int(moments.n)
        width = max(moments.mean_x.shape[-1], moments.mean_y.shape[-1])
        chance = min(1.0, width / max(1, rows - 1))
        if chance > MOST_BY_CHANCE:
            cautions[rows] = (
                f"Caution: {rows:,} fitting rows for {width} dimensions, from which least "
                f"squares would explain {chance:.0%} of the variance of independent data. On other rows the errors are "
                "larger: trust only errors on held-out texts, use `ridge` in place of `linear`, or give "
                f"{round(width / MOST_BY_CHANCE) + 1:,} rows or more."
            )
    return list(cautions.values())
