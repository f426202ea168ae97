"""Token or word types whose states the models of a universe share least."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aligners.datamodules.rows.row_types import RowTypes
from aligners.similarity.moment_metrics import DoubleMetric

LEAST_ROWS, TOP = 5, 50  # of a type in the table; types at a site


class TypeErrors(DoubleMetric):
    """Sums of the errors of rows by their types, over batches and ranks.

    Args:
        sites: S.
        types: of the rows of a split.
        ids: (n,) of its texts.
        device: where the errors are.
    """

    full_state_update = False
    sums: Tensor

    def __init__(
        self, sites: int, types: RowTypes, ids: Tensor, device: torch.device
    ) -> None:
        super().__init__()
        self.types = replace(
            types, number=types.number.to(device), counts=types.counts.to(device)
        )
        self.ids, self.texts = ids.to(device).sort()
        sums = torch.zeros(1 + sites, len(types.names), dtype=torch.float64)
        self.add_state("sums", sums, dist_reduce_fx="sum")
        self.to(device)

    def update(self, errors: Tensor, text: Tensor, place: Tensor) -> None:
        """Add the errors (S, N) of rows, of which (N,) say the id of the text and the place in it."""
        number = self.types.at(self.texts[torch.searchsorted(self.ids, text)], place)
        self.sums.index_add_(
            1, number, torch.cat([torch.ones_like(errors[:1]), errors]).double()
        )

    def compute(self) -> Tensor:
        """The number of rows of each type, and the sums of their errors at each site: (1 + S, types)."""
        return self.sums

    def table(self, sites: Sequence[Any]) -> list[dict[str, Any]]:
        """The types with the largest mean error at each site, and how many times the mean error of all rows it is."""
        rows, *sums = self.compute().cpu()
        found = []
        for site, errors in zip(sites, sums, strict=True):
            means = (errors / rows).where(rows >= LEAST_ROWS, -1.0)
            for n in means.argsort(descending=True, stable=True)[:TOP].tolist():
                if means[n] < 0:
                    continue
                row = {"site": site, "type": self.types.names[n], "rows": int(rows[n])}
                row |= {
                    "fvu": float(means[n]),
                    "times": float(means[n] * rows.sum() / errors.sum()),
                }
                found.append(row)
        return found
