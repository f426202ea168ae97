"""Early stopping and the best-so-far snapshot, site by site."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from aligners.alignment import Alignment
from aligners.base import Aligner
from aligners.stitching import Stitching

__all__ = ["BestPerSite"]


class BestPerSite(pl.Callback):
    """Keeps, for every site of every trained aligner, the parameters of its best validation.

    A site that has not improved for `patience` validations is closed: nothing later counts for it, as if its
    training had ended there. The run stops when all sites are closed. The best parameters are put back at the
    end, so a bank gives each site what it would have got alone.

    The criterion is the validation FVU, plus that of the inverse for aligners trained both ways; of stitching layers
    it is the validation loss of the task.

    Args:
        patience: validations without improvement after which a site is closed; None: never.
        min_delta: smallest improvement that counts.
    """

    def __init__(self, patience: int | None = None, min_delta: float = 0.0) -> None:
        if patience is not None and patience < 1:
            raise ValueError(f"Expected `patience` to be at least 1 or null, but got {patience}.")
        self.patience, self.min_delta = patience, min_delta
        self._best: dict[str, Tensor] = {}
        self._waited: dict[str, Tensor] = {}
        self._kept: dict[str, dict[str, Tensor]] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare, keep, and stop the run when nothing is left to improve."""
        if trainer.state.fn != "fit" or not isinstance(pl_module, (Alignment, Stitching)):
            return
        banks, criteria = pl_module.banks(), pl_module.criteria()
        for key, criterion in criteria.items():
            self._compare(key, banks[key], criterion)
        if criteria and self.patience is not None:
            waited = torch.cat([self._waited[key] for key in criteria])
            if bool((waited >= self.patience).all()):
                trainer.should_stop = True

    @torch.no_grad()
    def _compare(self, key: str, bank: Aligner, criterion: Tensor) -> None:
        state = bank.state_dict()
        if key not in self._best:
            self._best[key] = torch.full_like(criterion, torch.inf)
            self._waited[key] = torch.zeros_like(criterion, dtype=torch.long)
            self._kept[key] = {name: value.clone() for name, value in state.items()}
        closed = self._waited[key] >= self.patience if self.patience is not None else torch.zeros_like(criterion).bool()
        better = (criterion < self._best[key] - self.min_delta) & ~closed
        self._best[key] = torch.where(better, criterion, self._best[key])
        self._waited[key] = torch.where(better, 0, self._waited[key] + (~closed).long())
        for name, value in state.items():
            self._kept[key][name][better] = value[better]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the best parameters of every site back."""
        if isinstance(pl_module, (Alignment, Stitching)):
            for key, bank in pl_module.banks().items():
                if key in self._kept:
                    bank.load_state_dict(self._kept[key])

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on comparing."""
        return {"best": self._best, "waited": self._waited, "kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._best, self._waited, self._kept = state_dict["best"], state_dict["waited"], state_dict["kept"]
