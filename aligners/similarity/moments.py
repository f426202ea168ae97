"""Accumulators of moments, shared by closed-form maps and measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import Any, Self

from torch import Tensor, nn
from torchmetrics import Metric

from aligners.similarity.algebra.moments import Moments, merge_moments, moments_of


class _Box:
    """Hides a value from torchmetrics, which would look into it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class DoubleMetric(Metric):
    """A metric whose sums stay in float64, and whose answer keeps its shape.

    torchmetrics guards its states against `half()`, but not against `to(torch.float16)`; and it squeezes an answer of
    one element, such as that of a single pair of layers. It also keeps a copy of every state to reset it to: here, as
    each state begins with one number throughout, that number.
    """

    def add_state(self, name: str, default: Any, *args: Any, **kwargs: Any) -> None:
        """Add a state whose entries all begin with the same number."""
        first = default.flatten()[0]
        super().add_state(name, first.clone(), *args, **kwargs)
        setattr(self, name, default)
        self._defaults[name] = first.clone().expand(default.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        """Follow `fn` to its device, and not to its dtype."""

        def moved(state: Tensor) -> Tensor:
            device = fn(state.new_empty(0)).device
            if any(state.stride()):
                return state.to(device)
            return state[(0,) * state.ndim].to(device).expand(state.shape)  # a default: one number

        return super()._apply(moved, exclude_state)

    def _wrap_compute(self, compute: Callable) -> Callable:
        """Keep the answer's shape, and do not copy it."""
        boxed = super()._wrap_compute(lambda: _Box(compute()))

        @wraps(compute)
        def unboxed() -> Any:
            return boxed().value

        return unboxed


class MomentsMetric(DoubleMetric):
    """Moments of all rows seen, over batches and ranks, in one pass.

    Each rank keeps centred moments, so no mean has to be known beforehand. They are gathered, not summed,
    and merged pairwise: the result is the same for any split of the rows to about 1e-12.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states.
        d_y: width of Y's states.
    """

    full_state_update = False
    is_differentiable = False
    n: Tensor

    def __init__(self, sites: int, d_x: int, d_y: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, zeros in Moments.zeros(sites, d_x, d_y)._asdict().items():
            self.add_state(name, zeros, dist_reduce_fx=None)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add paired rows: x (S, N, d_x), y (S, N, d_y)."""
        self._set(merge_moments(self.moments(), moments_of(x, y)))

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Go on from the moments of earlier rows."""
        metric = cls(*moments.xy.shape)
        metric._set(moments)
        return metric

    def compute(self) -> Moments:
        """Moments of everything seen on all ranks."""
        if self.n.ndim == 0:
            return self.moments()
        ranks = [Moments(*(getattr(self, name)[rank] for name in Moments._fields)) for rank in range(len(self.n))]
        return reduce(merge_moments, ranks)

    def moments(self) -> Moments:
        """Moments of this rank's rows."""
        return Moments(*(getattr(self, name) for name in Moments._fields))

    def _set(self, moments: Moments) -> None:
        for name, value in moments._asdict().items():
            setattr(self, name, value)
