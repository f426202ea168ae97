"""Accumulators over batches and ranks: of moments, shared by closed-form maps and measures, and of sums in float64."""

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from types import SimpleNamespace
from typing import Self

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from aligners.similarity.algebra.moments import Moments, merge_moments, moments_of


class DoubleMetric(Metric):
    """A metric whose sums stay in float64, and whose answer keeps its shape.

    torchmetrics guards its states against `half()`, but not against `to(torch.float16)`; and it squeezes an answer of
    one element, such as that of a single pair of layers.
    """

    def _apply(
        self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ""
    ) -> nn.Module:
        """Follow `fn` to its device, and not to its dtype."""
        return super()._apply(
            lambda state: state.to(fn(state.new_empty(0)).device), exclude_state
        )

    def _wrap_compute(self, compute: Callable) -> Callable:
        """Keep the answer's shape, and do not copy it."""
        boxed = super()._wrap_compute(
            lambda: SimpleNamespace(value=compute())
        )  # torchmetrics looks into collections
        return wraps(compute)(lambda: boxed().value)


class MomentsMetric:
    """Moments of all rows seen, over batches and ranks, in one pass.

    Each rank keeps centred moments, so no mean has to be known beforehand. They are gathered, not summed,
    and merged pairwise: the result is the same for any split of the rows to about 1e-12.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
    """

    def __init__(self, sites: int, d_x: int, d_y: int) -> None:
        self._moments = Moments.zeros(sites, d_x, d_y)

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Go on from the moments of earlier rows."""
        metric = cls(*moments.xy.shape)
        metric._moments = moments
        return metric

    def to(self, device: torch.device | str) -> Self:
        """Move to a device."""
        self._moments = Moments(*(part.to(device) for part in self._moments))
        return self

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add paired rows: x (S, N, d_x), y (S, N, d_y)."""
        self._moments = merge_moments(
            self.to(x.device)._moments, moments_of(x.detach(), y.detach())
        )

    def compute(self) -> Moments:
        """Moments of everything seen on all ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return self._moments
        ranks = zip(*(gather_all_tensors(part) for part in self._moments), strict=True)
        return reduce(merge_moments, (Moments(*parts) for parts in ranks))

    def moments(self) -> Moments:
        """Moments of this rank's rows."""
        return self._moments
