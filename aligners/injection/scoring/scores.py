"""Scores of each method, kept text by text so that any interval can be taken later."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from aligners.errors import finite
from aligners.similarity.moments import DoubleMetric
from datamodules.asking import Targets
from datamodules.rows.policies import Rows

RESAMPLES = 1000
LEVEL = 0.95
Sums = dict[str, Tensor]  # quantity -> its sum over each text
Row = dict[str, Any]  # of a report
Figures = tuple[Tensor, Tensor, Tensor]  # a figure, and the lower and the upper end of its interval


class TextScores(Metric):
    """A table of sums (quantities, methods, sites, texts), each text written by the one rank that saw it.

    Ranks fill disjoint columns, so adding their tables is exact for any number of ranks.

    Args:
        quantities: names of what is scored.
        methods: number of methods.
        sites: number of site pairs.
        texts: number of held-out texts.
    """

    full_state_update = False
    table: Tensor
    seen: Tensor

    def __init__(self, quantities: list[str], methods: int, sites: int, texts: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.quantities = quantities
        shape = (len(quantities), methods, sites, texts)
        self.add_state("table", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(texts, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, text: Tensor, scores: Sums) -> None:
        """Write the scores of a batch.

        Args:
            text: (B,) numbers of the texts.
            scores: quantity -> (methods, sites, B).
        """
        self.seen[text] += 1
        for place, quantity in enumerate(self.quantities):
            self.table[place][:, :, text] = scores[quantity].double()

    def compute(self) -> Sums:
        """Quantity -> (methods, sites, texts), on the CPU.

        Raises:
            RuntimeError: a text was counted twice or not at all.
        """
        if not bool((self.seen == 1).all()):
            twice, never = int((self.seen > 1).sum()), int((self.seen == 0).sum())
            raise RuntimeError(f"Every held-out text must count once, but {twice} counted twice and {never} never.")
        return dict(zip(self.quantities, self.table.cpu(), strict=True))


class UnitMeans(DoubleMetric):
    """Means over all units (texts, or predicted tokens) of several quantities, exact over batches and ranks.

    Args:
        quantities: S, their number.
    """

    sums: Tensor
    units: Tensor

    def __init__(self, quantities: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(quantities, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("units", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add the units of a batch, (S, U)."""
        self.sums += values.double().sum(-1)
        self.units += values.shape[-1]

    def compute(self) -> Tensor:
        """Return the means, (S,), also for S = 1."""
        return self.sums / self.units


def resampled(n: int, seed: int) -> Tensor:
    """The numbers of n texts, then of as many that are drawn from them with replacement, each time: (1 + R, n).

    R is `RESAMPLES`. Equal seeds draw equal texts.
    """
    drawn = torch.randint(n, (RESAMPLES, n), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.arange(n)[None], drawn])


def resampled_counts(n: int, seed: int) -> Tensor:
    """How often each of n texts counts: once, then as often as it is drawn in each resample, (1 + R, n) float64."""
    drawn = resampled(n, seed)
    return torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(drawn.shape).double())


def with_interval(values: Tensor) -> Figures:
    """A figure and the ends of its 95 % percentile interval, each (...), from it and its resamples, (..., 1 + R)."""
    tail = (1 - LEVEL) / 2
    low, high = torch.nanquantile(values[..., 1:], torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=-1)
    return values[..., 0], low, high


def named(name: str, figures: Iterable[Any]) -> dict[str, Any]:
    """A report's columns of a figure and of the ends of its interval: `name`, `name_low` and `name_high`."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), figures, strict=True))


def per_text_sums(values: Tensor, rows: Rows | Targets) -> Tensor:
    """Sum over the rows or units of each text of a batch: (..., N) -> (..., B); zero for a text without any."""
    return values.new_zeros(*values.shape[:-1], rows.texts).index_add_(-1, rows.owner, values)


def of_unseen(values: Tensor, rows: Rows) -> Tensor:
    """Set values of rows (..., N) to zero except for rows of unseen types; all NaN where types are not known."""
    return torch.full_like(values, torch.nan) if rows.unseen is None else values.where(rows.unseen, 0)


def interval(values: Tensor, weights: Tensor | None = None, *, seed: int) -> Figures:
    """A mean over texts, or a ratio of sums, with the ends of its 95 % percentile interval over resampled texts.

    Args:
        values: (..., n) one number for each text.
        weights: (..., n) denominators; default: 1 for each text.
        seed: the seed of the resampling; equal seeds draw equal texts, so intervals of methods can be compared.

    Returns:
        The mean, and the lower and upper end, each (...); the ends are NaN where values are not finite. Resamples with
        a zero denominator do not count.
    """
    counts = resampled_counts(values.shape[-1], seed)
    denominator = counts.sum(1) if weights is None else weights.double() @ counts.T
    mean, *ends = with_interval(values.double() @ counts.T / denominator)
    low, high = (end.where(values.isfinite().all(-1), torch.nan) for end in ends)
    return mean, low, high


def resampled_columns(figures: Mapping[str, Tensor]) -> Row:
    """A report's columns of figures, from each and its resamples, (1 + R,): see `named`."""
    row: Row = {}
    for name, values in figures.items():
        row |= named(name, map(finite, with_interval(values)))
    return row


def mean_columns(name: str, values: Tensor, weights: Tensor, seed: int) -> Row:
    """A report's columns of a ratio of sums (n,) over texts, and of its interval: see `named`."""
    return named(name, map(finite, interval(values.double().cpu(), weights.double().cpu(), seed=seed)))
