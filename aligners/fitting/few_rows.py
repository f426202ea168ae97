"""A warning about fits that had few rows."""

from __future__ import annotations

import logging

from lightning.pytorch.utilities import rank_zero_only

from aligners.similarity.algebra.moments import Moments
from aligners.similarity.functional.canonical import MOST_BY_CHANCE

logger = logging.getLogger(__name__)


def few_rows(*each: Moments) -> list[str]:
    """A caution for all moments of fitting rows that have fewer than ten rows a dimension."""
    found = {}
    for moments in each:
        rows, width = int(moments.n), max(moments.mean_x.shape[-1], moments.mean_y.shape[-1])
        chance = min(1.0, width / max(1, rows - 1))
        if chance > MOST_BY_CHANCE:
            found[rows] = (
                f"Caution: {rows:,} fitting rows for {width} dimensions, from which least squares would seem to "
                f"explain {chance:.0%} of the variance of independent data. On other rows the maps err more: trust "
                "errors on held-out texts alone, use `ridge` in the place of `linear`, or give "
                f"{round(width / MOST_BY_CHANCE) + 1:,} rows or more."
            )
    return list(found.values())


@rank_zero_only
def warn_of_few_rows(moments: Moments) -> None:
    """Warn of `few_rows`."""
    for caution in few_rows(moments):
        logger.warning(caution)
