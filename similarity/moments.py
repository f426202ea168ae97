"""Accumulators of moments, shared by closed-form maps and measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from similarity.algebra.grid import CrossSums, GridSums
from similarity.algebra.moments import GridMoments, Moments, merge_moments, moments_of
from similarity.algebra.sides import SideSums

__all__ = ["DoubleMetric", "GridMomentsMetric", "MomentsMetric"]


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


class GridMomentsMetric(DoubleMetric):
    """Moments of all rows seen at all layer pairs of two models, over batches and ranks, in one pass.

    The state is `GridSums`: sums about a shift, added to in place, so that a batch costs its matrix products and
    no copy of the grid. Before ranks are summed they agree on the mean of all rows as their shift, to which each
    re-expresses its sums exactly; a rank without rows has no say in it. The result is the same for any split of
    the rows to about 1e-12. Everything is float64, whatever precision the module around it is cast to.

    The shift is a state like any other, so that the metrics of a `MetricCollection` which accumulate the same
    rows share one set of sums.

    Args:
        layers_x: L_x.
        d_x: width of X's states.
        layers_y: L_y.
        d_y: width of Y's states.
        products: in which precision a batch's products of X with Y are taken; float64 by default. torch.float32 takes
            half the time for them, and far less on a GPU that is slow in double precision; what it costs is some parts
            in 10⁷ of each covariance. Sums, and products within a model, which decide on ranks, stay in float64.
    """

    full_state_update = True  # a batch alone has another shift than all rows: it is not merged by adding states
    is_differentiable = False
    xy: Tensor

    def __init__(
        self,
        layers_x: int,
        d_x: int,
        layers_y: int,
        d_y: int,
        *,
        products: torch.dtype = torch.float64,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if products not in (torch.float32, torch.float64):
            raise ValueError(f"Expected `products` torch.float64 or torch.float32, but got {products}.")
        self.products = products
        self.shape_x, self.shape_y = (layers_x, d_x), (layers_y, d_y)
        for name, zeros in _named(GridSums.zeros(layers_x, d_x, layers_y, d_y)).items():
            self.add_state(name, zeros, dist_reduce_fx=_first if name.startswith("shift") else "sum")

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add paired rows: x (L_x, N, d_x), y (L_y, N, d_y).

        Raises:
            ValueError: other layers or widths than the metric was built for, or unpaired rows.
        """
        for name, rows, shape in (("x", x, self.shape_x), ("y", y, self.shape_y)):
            if rows.ndim != 3 or rows.shape[::2] != shape or rows.shape[1] != x.shape[1]:
                raise ValueError(
                    f"Expected `{name}` of shape ({shape[0]}, N, {shape[1]}) with the same N for `x` and `y`, but got "
                    f"x {tuple(x.shape)} and y {tuple(y.shape)}."
                )
        if self.xy.is_inference() and not torch.is_inference_mode_enabled():
            for name, value in _named(self.sums()).items():
                setattr(self, name, value.clone())  # such tensors cannot be added to in place
        self.sums().add_(x.detach(), y.detach(), self.products)

    def compute(self) -> Any:
        """Moments of everything seen on all ranks."""
        return self.moments()

    def moments(self) -> GridMoments:
        """Moments of the sums as they stand: of this rank's rows, or within `compute` of all ranks'."""
        return self.sums().moments()

    def sums(self) -> GridSums:
        """The state, not a copy: sums of this rank's rows, which add to those of other rows with `+`."""
        x, y = (SideSums(*(getattr(self, f"{name}_{side}") for name in SideSums._fields)) for side in ("x", "y"))
        return GridSums(x, y, CrossSums(*(getattr(self, name) for name in CrossSums._fields)))

    def sync(
        self,
        dist_sync_fn: Callable | None = None,
        process_group: Any | None = None,
        should_sync: bool = True,
        distributed_available: Callable | None = None,
    ) -> None:
        """Re-express the sums of every rank about one shift, then sum them as torchmetrics does."""
        available = distributed_available or self.distributed_available_fn
        if should_sync and not self._is_synced and available is not None and available():
            gather = dist_sync_fn or gather_all_tensors
            sums = self.sums()
            mean_x, mean_y = sums.means()
            group = process_group or self.process_group
            n, mean_x, mean_y = (torch.stack(gather(local, group)) for local in (sums.n, mean_x, mean_y))
            weight = n / n.sum().clamp(min=1)
            about = sums.about(torch.tensordot(weight, mean_x, 1), torch.tensordot(weight, mean_y, 1))
            for name, value in _named(about).items():
                setattr(self, name, value)
        super().sync(dist_sync_fn, process_group, should_sync, distributed_available)


def _named(sums: GridSums) -> dict[str, Tensor]:
    """The parts of a grid's sums by the names of a metric's states."""
    sides = {f"{name}_{side}": getattr(getattr(sums, side), name) for side in ("x", "y") for name in SideSums._fields}
    return {**sides, **sums.cross._asdict()}


def _first(shifts: Tensor) -> Tensor:
    """The shift, which is the same on all ranks."""
    return shifts[0]
