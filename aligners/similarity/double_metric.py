"""Metrics of torchmetrics whose sums stay in float64."""

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torchmetrics import Metric


class DoubleMetric(Metric):
    """A metric whose sums stay in float64, and whose result keeps its shape.

    torchmetrics guards its states against `half()`, but not against `to(torch.float16)`; and it squeezes a result of
    one element, such as that of a single pair of layers.
    """

    def _apply(
        self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ""
    ) -> nn.Module:
        """Apply `fn` to the device, but not to the data type."""

        def moved(state: Tensor) -> Tensor:
            device = fn(state.new_empty(0)).device
            return state.to(device)

        return super()._apply(moved, exclude_state)

    def free(self) -> None:
        """Let go of all sums, and of what was computed, once the metric is used up.

        torchmetrics wraps methods in functions that refer to the metric, so that `del` frees nothing until Python looks
        for cycles.
        """
        self._computed = None
        for name in self._defaults:
            nothing = torch.zeros(0)
            self._defaults[name] = nothing
            setattr(self, name, nothing)

    def _wrap_compute(self, compute: Callable) -> Callable:
        """Keep the result's shape, and do not copy it."""

        def boxed() -> SimpleNamespace:  # torchmetrics looks into collections
            return SimpleNamespace(value=compute())

        wrapped = super()._wrap_compute(boxed)
        return wraps(compute)(lambda: wrapped().value)
