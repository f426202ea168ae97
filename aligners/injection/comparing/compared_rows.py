"""Rows of a comparison of two models: figures from sums over texts, with intervals, floors and tolerances."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aligners.injection.comparing.read_answers import Asked
from aligners.injection.comparing.verdict import LEAST, TIMES
from aligners.injection.scoring.scores import Row, Sums, mean_columns

EXACT = 1e-13  # nats, or a squared difference of cosines: the float64 rounding error of equal answers

# units, quantities, floors
Answered = tuple[Tensor, dict[str, Tensor], dict[str, float]]


def site_rows(
    sums: Sums, floors: Mapping[str, Sequence[float]], places: Sequence[Row], seed: int
) -> list[Row]:
    """Make a row for each map and site pair: FVU, its floor and tolerance, and the cost of OLD's states in NEW.

    Args:
        sums: sums over the held-out texts.
        floors: map -> its floor at each site pair.
        places: columns that describe each site pair.
        seed: seed of the resampling of texts.
    """
    rows, total = [], sums["total"]
    for number, (name, floor) in enumerate(floors.items()):
        for s, place in enumerate(places):
            row = {
                **place,
                "method": name,
                **mean_columns("fvu", sums[name][s], total[s], seed),
            }
            row["floor"] = floor[s]
            row["tolerance"] = TIMES * max(floor[s], LEAST)
            row["within"] = row["fvu"] is not None and row["fvu"] <= row["tolerance"]
            row |= _cost_columns(sums, number, s, seed)
            rows.append(row)
    return rows


def _cost_columns(sums: Sums, number: int, place: int, seed: int) -> Row:
    """Return the cost of OLD's states in NEW, by the map and at the site pair of these numbers."""
    costs, units = torch.full((2, 1), torch.nan), torch.ones(1)
    if "costs" in sums:
        costs = sums["costs"][:, number, place]
        units = sums["units"][: costs.shape[1]]
    divergence = mean_columns("kl", costs[0], units, seed)
    return divergence | mean_columns("penalty", costs[1], units, seed)


def function_of(
    sums: Sums, asked: Asked, variants: Mapping[str, bool], seed: int
) -> list[Row]:
    """Compare the answers of two models: each difference with its interval and floor; empty if nothing is compared.

    Args:
        sums: sums over the held-out texts.
        asked: the question to both models.
        variants: variant of OLD -> whether it counts only for other coordinates.
        seed: seed of the resampling of texts.
    """
    if asked.what is None:
        return []
    if "units" in sums:
        measure = "KL(old ‖ new), nats"
        units, quantities, floors = _answers_compared(sums, asked, list(variants))
    else:
        measure = "mean squared difference of cosines"
        units, quantities, floors = _cosines_compared(sums, list(variants))
    row: Row = {
        "what": asked.what,
        "measure": measure,
        "units": int(units.sum()),
        "floors": floors,
    }
    for name, values in quantities.items():
        row |= mean_columns(name, values, units, seed)
    strict = [value for name, value in floors.items() if not variants[name]]
    row |= _against(row["difference"], strict)
    every = _against(row["difference"], list(floors.values()))
    for name, value in every.items():
        row[f"{name}_elsewhere"] = value
    return [row]


def _against(difference: float | None, floors: Sequence[float]) -> Row:
    """Return the largest floor, the tolerance, and whether a difference of answers stays within it."""
    floor = max(EXACT, *floors)
    tolerance = TIMES * floor
    same = difference is not None and difference <= tolerance
    return {"floor": floor, "tolerance": tolerance, "same": same}


def _answers_compared(sums: Sums, asked: Asked, variants: Sequence[str]) -> Answered:
    """Compare the answers of models with heads, unit by unit."""
    units = sums["units"]
    quantities = {"difference": sums["kl"], "agreement": sums["agree"]}
    if asked.scored:
        quantities["loss_old"] = sums["loss_old"]
        quantities["loss_new"] = sums["loss_new"]
        quantities["loss_change"] = sums["loss_new"] - sums["loss_old"]
    floors = {
        name: float(sums[f"answers of {name}"].sum() / units.sum()) for name in variants
    }
    return units, quantities, floors


def _cosines_compared(sums: Sums, variants: Sequence[str]) -> Answered:
    """Compare the cosines between texts, for models without a head."""
    own, new = _cosines(sums["old"]), _cosines(sums["new"])
    nearest = (new.argmax(-1) == own.argmax(-1)).double()
    quantities = {"difference": (new - own).square().mean(-1), "agreement": nearest}
    floors = {}
    for name in variants:
        again = _cosines(sums[f"answers of {name}"])
        floors[name] = float((again - own).square().mean())
    return torch.ones(len(own)), quantities, floors


def _cosines(texts: Tensor) -> Tensor:
    """Return the cosines between texts (d, n) of unit length, without those of a text with itself: (n, n)."""
    return (texts.T @ texts).fill_diagonal_(-1)
