"""Warnings about maps that diverged or learned nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

if TYPE_CHECKING:
    from aligners.fitting.alignment import Alignment

logger = logging.getLogger(__name__)


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
