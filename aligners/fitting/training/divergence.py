"""Detects sites whose training diverges, on the device and without a synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A loss this many times that of the first step does not come back.
FACTOR = 10.0
# In units of FVU: below this a site is no worse than the mean, wherever it started.
HARMLESS = 2.0


class Divergence:
    """Which sites of some banks have diverged, and when.

    A site diverges where its loss or its gradient is not finite, or its loss exceeds both ten times that of its first
    step and 2 (a map that answers the mean has 1, or 2 both ways). From then on its gradient is zero; nothing
    else is done to it here. Every rank has to see the same losses and gradients.

    Attributes:
        step: bank -> (S,) the step, counted from 1, at which a site diverged; 0 while it has not.
    """

    def __init__(self) -> None:
        self.step: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    def watch(self, bank: str, loss: Tensor, step: int) -> None:
        """Check the losses of a step.

        Args:
            bank: its name.
            loss: (S,) of all ranks.
            step: number of the step, from 1.
        """
        loss = loss.detach()
        if bank not in self.step:
            self.step[bank] = torch.zeros_like(loss, dtype=torch.long)
            self._first[bank] = loss.nan_to_num(0.0, 0.0)
        self._mark(bank, ~(loss <= (FACTOR * self._first[bank]).clamp(min=HARMLESS)), step)

    def watch_gradient(self, bank: str, norms: Tensor, step: int) -> Tensor:
        """Check the gradient norms (S,) of a step; returns (S,), True where a site goes on training."""
        self._mark(bank, ~norms.isfinite(), step)
        return self.step[bank] == 0

    def _mark(self, bank: str, bad: Tensor, step: int) -> None:
        known = self.step[bank]
        self.step[bank] = torch.where(bad & (known == 0), step, known)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {"step": self.step, "first": self._first}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state from a checkpoint."""
        self.step, self._first = (
            {bank: value.to(device) for bank, value in state[name].items()} for name in ("step", "first")
        )
