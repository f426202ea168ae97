"""The figures of a comparison, from what was added up text by text: with intervals, floors and tolerances."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aligners.injection.comparing.reading import Asked
from aligners.injection.comparing.verdict import LEAST, TIMES
from aligners.injection.scoring.scores import Row, Sums, mean_columns

EXACT = 1e-13  # nats, or a squared difference of cosines: what float64 makes of equal answers


def site_rows(sums: Sums, floors: Mapping[str, Sequence[float]], places: Sequence[Row], seed: int) -> list[Row]:
    """A row for each map and site pair: its FVU, the floor and the tolerance, and what OLD's states in NEW cost.

    Args:
        sums: of the held-out texts.
        floors: map -> its floor at each site pair.
        places: columns of each site pair.
        seed: of the resampling of texts.
    """
    rows, total = [], sums["total"]
    for number, (name, floor) in enumerate(floors.items()):
        for s, place in enumerate(places):
            row = {**place, "method": name, **mean_columns("fvu", sums[name][s], total[s], seed), "floor": floor[s]}
            row["tolerance"] = TIMES * max(floor[s], LEAST)
            row["within"] = row["fvu"] is not None and row["fvu"] <= row["tolerance"]
            costs = sums["costs"][:, number, s] if "costs" in sums else torch.full((2, 1), torch.nan)
            units = sums["units"][: costs.shape[1]] if "costs" in sums else torch.ones(1)
            rows.append(
                row | mean_columns("kl", costs[0], units, seed) | mean_columns("penalty", costs[1], units, seed)
            )
    return rows


def function_of(sums: Sums, asked: Asked, variants: Mapping[str, bool], seed: int) -> list[Row]:
    """Whether two models answer alike: what differs, with its interval, beside the floor; nothing if not compared.

    Args:
        sums: of the held-out texts.
        asked: what the models answer.
        variants: of OLD -> whether it counts for other coordinates alone.
        seed: of the resampling of texts.
    """
    if asked.what is None:
        return []
    if "units" in sums:
        units, measure = sums["units"], "KL(old ‖ new), nats"
        quantities = {"difference": sums["kl"], "agreement": sums["agree"]}
        if asked.scored:
            quantities |= {name: sums[name] for name in ("loss_old", "loss_new")}
            quantities["loss_change"] = sums["loss_new"] - sums["loss_old"]
        floors = {name: float(sums[f"answers of {name}"].sum() / units.sum()) for name in variants}
    else:
        own, new = _cosines(sums["old"]), _cosines(sums["new"])
        units, measure = torch.ones(len(own)), "mean squared difference of cosines"
        nearest = (new.argmax(-1) == own.argmax(-1)).double()
        quantities = {"difference": (new - own).square().mean(-1), "agreement": nearest}
        floors = {name: float((_cosines(sums[f"answers of {name}"]) - own).square().mean()) for name in variants}
    row: Row = {"what": asked.what, "measure": measure, "units": int(units.sum()), "floors": floors}
    for name, values in quantities.items():
        row |= mean_columns(name, values, units, seed)
    for suffix in ("", "_elsewhere"):
        floor = max(EXACT, *(value for name, value in floors.items() if suffix or not variants[name]))
        same = row["difference"] is not None and row["difference"] <= TIMES * floor
        row |= {f"floor{suffix}": floor, f"tolerance{suffix}": TIMES * floor, f"same{suffix}": same}
    return [row]


def _cosines(texts: Tensor) -> Tensor:
    """Cosines between texts (d, n) of unit length, none with itself: (n, n)."""
    return (texts.T @ texts).fill_diagonal_(-1)
