"""What a map on arrays achieves on held-out rows: errors with intervals, retrieval, the way back, and the floors."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligners.api.groups import Groups, numbered
from aligners.errors import UserError, finite
from aligners.fitting.heldout_retrieval import HeldOutRows
from aligners.fitting.map_errors import (
    MapErrors,
    Row,
    Way,
    squared_distances,
    squared_errors,
)
from aligners.maps.base import Aligner
from aligners.similarity.controls import jackknife_interval

__all__ = ["MapReport"]

# columns of a report in print, with their digits
SHOWN = {
    "fvu": 4,
    "r2": 4,
    "cosine": 3,
    "top1": 3,
    "top10": 3,
    "mrr": 3,
    "fvu_inverse": 4,
    "round_trip": 1,
}
WITH_INTERVALS = ("fvu", "top1")
# our columns -> those of `HeldOutRows`, whose candidates are all rows or a draw of them
OF_RETRIEVAL = {
    "top1": "top1_all",
    "top1_low": "top1_all_low",
    "top1_high": "top1_all_high",
    "top10": "top10_all",
    "mrr": "mrr_all",
    "top1_centred": "top1_all_centred",
    "queries": "queries",
    "candidates": "candidates_all",
}


@dataclass(frozen=True)
class MapReport:
    """Figures of a map on held-out rows, and of its floors on the same rows.

    `rows()` gives a plain dictionary for each site and method: the map, `mean` (the mean of Y's fitting rows whatever x
    is) and, at equal widths, `identity` (x as it is). Figures that do not exist are None.

    | key | what it is |
    |---|---|
    | `site`, `method`, `role` | key of the site, None for a single one; the map or floor; `method` or `floor` |
    | `n`, `groups` | number of rows, and of the texts that they are of |
    | `fvu`, `fvu_low`, `fvu_high` | squared error by that of the mean of the fitting rows; 95 % interval |
    | `r2` | 1 − FVU |
    | `mse`, `cosine` | mean squared error over rows and dimensions; mean cosine of mapped and true row |
    | `top1`, `top10`, `mrr` | how well mapped rows find their partners, as `retrieval` has it; of `top1` an interval |
    | `top1_centred` | the same with the mean of the candidates subtracted |
    | `queries`, `candidates` | rows that look for partners, at most 1,000, and rows that may be, at most 10,000 |
    | `fvu_inverse`, `round_trip` | of the inverse: FVU from Y to X; largest error there and back by the largest value |

    Intervals are those of a jackknife over groups; with one group there are none. The rows of retrieval are drawn by a
    hash of group and place, so that equal calls give equal reports.
    """

    figures: tuple[Row, ...]

    def rows(self) -> list[Row]:
        """Return the figures as plain dictionaries, one for each site and method."""
        return [dict(row) for row in self.figures]

    def __repr__(self) -> str:
        first = self.figures[0]
        lines = [["site", "method", *SHOWN]]
        lines += [_shown(row) for row in self.figures]
        kept = []
        for column in zip(*lines, strict=True):
            if any(column[1:]):  # not one of empty cells
                kept.append(_aligned(column))
        head = f"{first['n']} held-out rows in {first['groups']} groups, 95 % intervals"
        table = ["  ".join(cells).rstrip() for cells in zip(*kept, strict=True)]
        return "\n".join([head, *table])


def _shown(row: Row) -> list[str]:
    """The cells of a line in print."""
    site = "" if row["site"] is None else str(row["site"])
    cells = [site, row["method"]]
    for name, digits in SHOWN.items():
        value = row[name]
        if value is None:
            cells.append("")
            continue
        kind = "e" if name == "round_trip" else "f"
        cell = f"{value:.{digits}{kind}}"
        if name in WITH_INTERVALS and row[f"{name}_low"] is not None:
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            cell += f" [{low:.{digits}f}, {high:.{digits}f}]"
        cells.append(cell)
    return cells


def _aligned(column: tuple[str, ...]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]


@torch.no_grad()
def report_of(
    name: str, bank: Aligner, held_out: "HeldOut", sites: Sequence[Hashable] | None
) -> MapReport:
    """Measure a fitted bank and its floors.

    Args:
        name: of the map, in the report.
        bank: the bank.
        held_out: the rows, on the bank's device and in its precision.
        sites: the keys of its sites; None: it has one, without a key.
    """
    inverse = bank.inverse if bank.invertible else None
    ways = [(name, "method", Way(bank, inverse))]
    ways.append(("mean", "floor", Way(held_out.mean)))
    if bank.d_x == bank.d_y:
        ways.append(("identity", "floor", Way(_same, _same)))
    by_method = []
    for method, role, way in ways:
        about = {"method": method, "role": role}
        by_method.append(held_out.rows(sites or [None], about, way))
    figures: list[Row] = []
    for of_site in zip(*by_method, strict=True):
        figures += of_site
    return MapReport(tuple(figures))


def _same(rows: Tensor) -> Tensor:
    return rows


class HeldOut:
    """Held-out rows on which a map and its floors are measured.

    Args:
        x: (S, N, d_x).
        y: (S, N, d_y).
        means: of X's and Y's fitting rows, (S, d_x) and (S, d_y); that of X may be unknown.
        groups: as for `ArrayMap.report`.

    Raises:
        ValueError: `groups` is not one entry for each row, or all rows of Y equal the mean.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        means: tuple[Tensor | None, Tensor],
        groups: Groups | None,
    ) -> None:
        sites, self.n, d_x = x.shape
        self.x, self.y = x, y
        mean_x, self.mean_y = means
        if mean_x is None:
            mean_x = x.new_full((sites, d_x), torch.nan)
        self.mean_x = mean_x
        self.totals = squared_distances(y, self.mean_y[:, None].double())
        if not (self.totals.sum(-1) > 0).all():
            raise UserError(
                "Expected rows in `y` that differ from the mean of the fitting rows, but all of them equal it."
            )
        every = torch.arange(self.n)
        group = numbered(groups, self.n)
        self.group = every.to(x.device) if group is None else group.to(x.device)
        self.groups = int(self.group.max()) + 1

        self.retrieval = HeldOutRows(sites, d_x, y.shape[-1], 0, x.device)
        self.retrieval.add(x, y, self.group, every.to(x.device))
        self.queries = self.retrieval.end().to(x.dtype)

    def mean(self, x: Tensor) -> Tensor:
        """Give the mean of Y's fitting rows for every row: (S, N, d_x) -> (S, N, d_y)."""
        mean = self.mean_y.to(x.dtype)
        return mean[:, None].expand(-1, x.shape[1], -1)

    def rows(self, sites: Sequence[Hashable], about: Row, way: Way) -> list[Row]:
        """Measure a map: a row for each of its sites."""
        mapped = way(self.x)
        # the errors below take the rows that are mapped already
        errors = MapErrors(self.mean_x, self.mean_y).to(self.x.device)
        errors.update(Way(lambda x: mapped, way.back), self.x, self.y)
        figures = errors.compute()
        figures["r2"] = 1 - figures["fvu"]
        low, high = self._interval(squared_errors(mapped, self.y))
        figures["fvu_low"], figures["fvu_high"] = low, high
        found = self.retrieval.columns(way(self.queries))
        for name, column in OF_RETRIEVAL.items():
            figures[name] = found[column]

        rows = []
        for place, site in enumerate(sites):
            row: dict[str, Any] = {"site": site, **about}
            row |= {"n": self.n, "groups": self.groups}
            for name in _ORDER:
                row[name] = finite(figures[name][place])
            row["queries"] = int(row["queries"])
            row["candidates"] = int(row["candidates"])
            rows.append(row)
        return rows

    def _interval(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of the FVU over groups, from the squared errors of rows (S, N): two ends (S,)."""
        if self.groups < 2:
            nothing = squares.new_full((len(squares),), torch.nan)
            return nothing, nothing
        errors = self._without_each(squares)
        totals = self._without_each(self.totals)
        fvu = squares.sum(-1) / self.totals.sum(-1)
        low, high = jackknife_interval(fvu, errors / totals)
        return low.clamp(min=0), high

    def _without_each(self, values: Tensor) -> Tensor:
        """Sums of (S, N) over the rows of all groups but one, (G, S)."""
        sums = values.new_zeros(self.groups, len(values))
        sums.index_add_(0, self.group, values.T)
        return sums.sum(0) - sums


_ORDER = (
    *("fvu", "fvu_low", "fvu_high", "r2", "mse", "cosine"),
    *OF_RETRIEVAL,
    *("fvu_inverse", "round_trip"),
)
