"""What a study will cost, from stated formulas and a stated rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from aligners.reports.screen import site_table
from aligners.studies.cells import Cell

__all__ = ["Cost", "Plan", "amount", "duration"]

FORMULAS = """\
A pass: one model reads the fitting or the held-out texts of one task once: 2 × 12 d² × L FLOP a token.
fit: both models read the texts once for moments, then for every row trained on; 6 FLOP for each trained weight, row and
  site, 12 where both directions are trained.
attention: reading alone. recover: as a fit, of one model. identity: half of Y for each pair, at every block.
inject: both models read the held-out texts; on average half of Y runs again for each method and site.
similarity: each model reads the held-out texts; 2 × d_x × d_y FLOP a row, pair of models and pair of layers; with
  controls its untrained twin does too, and each the fitting texts, and there are five times the products.
fit and similarity: 30 d³ for each closed form and site, and for each fitted measure and pair of layers.
probe: a model and its untrained twin read both splits; 6 FLOP for each weight of a probe, word and epoch, a
  third of `training.max_epochs`.
stitch: fronts, then forward and backward through half of Y, for each route, layer and site.
finetune: 3 passes an epoch. surgery: a pass an epoch of the heads, and (L² - 1) / 6 for all spans that are skipped.
Time, an estimate: FLOP ÷ (rate × workers), and 5 s a cell to begin and to report; at least that of the longest
  chain of cells. The rate, unless `--rate` gives it, is what this machine reaches in a block of the widest model; the
  time that is left, said as cells finish, is measured."""
START = 5.0  # seconds


@dataclass(frozen=True)
class Cost:
    """What one cell costs.

    Attributes:
        passes: passes over a model, with nothing stored.
        flops: floating-point operations.
        reading: those among them that a store saves.
        disk: bytes of what it leaves: maps, models.
        memory: bytes at its peak: models, maps, and what training them needs.
    """

    passes: float = 0.0
    flops: float = 0.0
    reading: float = 0.0
    disk: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The costs of cells.

    Attributes:
        costs: each cell with its cost.
        rate: FLOP a second of one worker.
        workers: cells at a time.
        store: bytes that a store of all states that the cells read takes.
        stored_passes: passes over a model with such a store: each model once for each set of texts.
        stored_flops: what these take.
        assumed: what was assumed, in words.
        rated: where the rate is from.
    """

    costs: Sequence[tuple[Cell, Cost]]
    rate: float
    workers: int
    store: float
    stored_passes: int
    stored_flops: float
    assumed: Sequence[str]
    rated: str = "`--rate`"

    def table(self) -> Table:
        """One line for each kind of cell, and one for all."""
        columns = ["passes", "FLOP", "on 1 worker", "left on disk", "memory"]
        table = site_table("What it will cost", ["cells"], ["number", *columns], {})
        for kind in dict.fromkeys(cell.kind for cell, _ in self.costs):
            table.add_row(kind, *self._line([cost for cell, cost in self.costs if cell.kind == kind]))
        table.add_row("all", *self._line([cost for _, cost in self.costs]), style="bold")
        return table

    def _line(self, costs: Sequence[Cost]) -> list[str]:
        flops = sum(cost.flops for cost in costs)
        return [
            f"{len(costs):,}",
            f"{sum(cost.passes for cost in costs):,.0f}",
            f"{flops:.1e}",
            duration(flops / self.rate + START * len(costs)),
            amount(sum(cost.disk for cost in costs)),
            amount(max((cost.memory for cost in costs), default=0)),
        ]

    def seconds(self, workers: int, *, stored: bool = False) -> float:
        """Time that all cells take, so many at a time.

        Args:
            workers: cells at a time.
            stored: whether states come from a store, which is written once.
        """
        left = {cell.id: cost.flops - (cost.reading if stored else 0.0) for cell, cost in self.costs}
        each = {cell: flops / self.rate + START for cell, flops in left.items()}
        total = sum(each.values()) + (self.stored_flops / self.rate if stored else 0.0)
        return max(total / workers, self._longest(each))

    def _longest(self, each: Mapping[str, float]) -> float:
        until: dict[str, float] = {}
        for cell, _ in self.costs:
            until[cell.id] = each[cell.id] + max((until.get(need, 0.0) for need in cell.needs), default=0.0)
        return max(until.values(), default=0.0)

    def words(self) -> list[str]:
        """The plan in sentences."""
        passes = sum(cost.passes for _, cost in self.costs)
        several = sorted({1, self.workers, 8})
        times, stored = (
            ", ".join(f"{duration(self.seconds(each, stored=store))} on {each}" for each in several)
            for store in (False, True)
        )
        return [
            f"An estimate, at {self.rate:.1e} FLOP/s a worker ({self.rated}): {times} "
            f"worker{'s' if len(several) > 1 else ''}.",
            f"A store of all states that the cells read takes {amount(self.store)} in float32 and needs "
            f"{self.stored_passes:,} passes in place of {passes:,.0f}; with it: {stored}.",
            *self.assumed,
        ]


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 0.05 else f"{seconds:.0e} s" if seconds else "0 s"


def amount(size: float) -> str:
    """A number of bytes in the unit that suits it."""
    for name, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= 0.95 * length:
            return f"{size / length:.1f} {name}"
    return f"{size / 1e3:.0f} kB" if size else "0"
