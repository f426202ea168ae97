"""Metrics of torchmetrics whose sums stay in float64."""

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace

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

    def _wrap_compute(self, compute: Callable) -> Callable:
        """Keep the result's shape, and do not copy it."""

        def boxed() -> SimpleNamespace:  # torchmetrics looks into collections
            return SimpleNamespace(value=compute())

        wrapped = super()._wrap_compute(boxed)
        return wraps(compute)(lambda: wrapped().value)
