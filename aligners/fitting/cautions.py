"""Warnings about maps that had few rows, diverged or learned nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from similarity.algebra.moments import Moments
from similarity.functional.chance import MOST_BY_CHANCE

if TYPE_CHECKING:
    from aligners.fitting.alignment import Alignment

__all__ = ["few_rows", "warn_of_divergence", "warn_of_few_rows", "warn_of_untrained"]

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


@rank_zero_only
def warn_of_divergence(module: Alignment, key: str, sites: Tensor, best: Tensor) -> None:
    """Warn that some sites of a bank diverged and were reset.

    Args:
        module: the run.
        key: of the bank.
        sites: (S,) bool, True where the bank diverged.
        best: (S,) the step to which each site was reset.
    """
    direction, name = key.split(".")
    step = module.divergence.step[key]
    found = [
        f"{site} at step {int(step[s])} (set back to step {int(best[s])})"
        for s, site in enumerate(module.site_names())
        if bool(sites[s])
    ]
    logger.warning(
        "%s (%s) diverged at site pair %s. It is frozen there, the others go on. %s",
        name, direction, ", ".join(found), _advice(module),
    )  # fmt: skip


@rank_zero_only
def warn_of_untrained(module: Alignment) -> None:
    """Warn about the sites at which no step improved on the start."""
    for key, record in module.training_record.items():
        sites = [s for s, best in enumerate(record["best_step"]) if best == 0]
        if not sites or record["steps"] == 0:
            continue
        direction, name = key.split(".")
        logger.warning(
            "%s (%s) learned nothing at site pair %s: no step did better on the validation texts than the "
            "untrained start (%s), which is what is kept. %s",
            name, direction, ", ".join(module.site_names()[s] for s in sites),
            ", ".join(dict.fromkeys(record["start"][s] for s in sites)), _advice(module),
        )  # fmt: skip


def _advice(module: Alignment) -> str:
    rate = max(group["initial_lr"] for group in module.trainer.optimizers[0].param_groups)
    return f"The learning rate is {rate:g}: try another, or more `rows`."
