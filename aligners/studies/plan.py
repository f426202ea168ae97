"""What a study will cost, from the sizes of models, stated formulas and a stated rate."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from torch.utils.benchmark import Timer

from aligners.files.room import in_words
from aligners.models.architectures import architecture_of
from aligners.models.loading.files import read_config
from aligners.models.recipes import EMBEDDED, Recipe, embedded_recipe
from aligners.reports.screen import SiteTable
from aligners.studies.cells import Cell
from aligners.studies.spec import Assumed


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        layers: number of blocks, L.
        width: of the states, d.
        vocabulary: tokens that it knows.
        head: what its head answers: classification, masked, causal; None: it has none, or nothing is known.
        known: whether this was read, and not assumed.
        heads: attention heads of each block; None: not known.
    """

    layers: int
    width: int
    vocabulary: int
    head: str | None = None
    known: bool = True
    heads: int | None = None

    @property
    def weights(self) -> int:
        """Number of weights: 12 d² in a block, whose feed-forward layer is 4 d wide, and d for each known token."""
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width

    def reading(self, tokens: float) -> float:
        """FLOP of a forward pass over so many tokens."""
        return 2.0 * self.layers * 12 * self.width**2 * tokens

    @classmethod
    def assumed(cls, assumed: Assumed) -> Self:
        """The size that a study file gives models which cannot be reached."""
        return cls(assumed.layers, assumed.width, assumed.vocabulary, known=False)


def size_of(name: str, data: Mapping[str, Any]) -> Size:
    """The size of a model.

    Args:
        name: Hub id, folder, or embedded model.
        data: the study's data options.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    if name.startswith(EMBEDDED):
        _, recipe = embedded_recipe(name, Recipe(**data.get("recipe", {})))
        head_task = "classification" if isinstance(recipe, Recipe) else "causal" if "gpt" in name else "masked"
        return Size(recipe.layers, recipe.width, recipe.vocabulary, head_task, heads=recipe.heads)
    config = read_config(name, {"revision": None, "trust_remote_code": data.get("trust_remote_code", False)})
    architecture = architecture_of(config.model_type)
    tasks = (architecture.task(kind) for kind in config.architectures or ())
    sizes: Any = config.get_text_config()
    head = next((task for task in tasks if task is not None), None)
    return Size(sizes.num_hidden_layers, sizes.hidden_size, sizes.vocab_size, head, heads=sizes.num_attention_heads)


ESTIMATES = """\
A pass: one model reads the fitting or the held-out texts of one task once: 2 × 12 d² × L FLOP a token.
{kinds}
Time, an estimate: FLOP ÷ (rate × workers), and 5 s a cell to begin and to report; at least that of the longest
  chain of cells. The rate, unless `--rate` gives it, is what this machine reaches in a block of the widest model; the
  time that is left, said as cells finish, is measured."""
START = 5.0  # seconds
MEASURING, TEXTS = 0.8, 10  # seconds of measuring a rate; texts in a batch
WIDEST = 4096  # block that is measured: wider ones are as fast


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

    def table(self) -> SiteTable:
        """One line for each kind of cell, and one for all."""
        columns = ["passes", "FLOP", "on 1 worker", "left on disk", "memory"]
        table = SiteTable("What it will cost", ["cells"], ["number", *columns], {})
        for kind in (*dict.fromkeys(cell.kind for cell, _ in self.costs), "all"):
            costs = [cost for cell, cost in self.costs if kind in (cell.kind, "all")]
            flops, memory = sum(cost.flops for cost in costs), max((cost.memory for cost in costs), default=0)
            passes, disk = f"{sum(cost.passes for cost in costs):,.0f}", in_words(sum(cost.disk for cost in costs))
            time = duration(flops / self.rate + START * len(costs))
            line = [f"{len(costs):,}", passes, f"{flops:.1e}", time, disk, in_words(memory)]
            table.add_row(kind, *line, style="bold" if kind == "all" else None)
        return table

    def seconds(self, workers: int, *, stored: bool = False) -> float:
        """Time that all cells take, so many at a time.

        Args:
            workers: cells at a time.
            stored: whether states come from a store, which is written once.
        """
        total, until = (self.stored_flops / self.rate if stored else 0.0), {"": 0.0}
        for cell, cost in self.costs:
            alone = (cost.flops - (cost.reading if stored else 0.0)) / self.rate + START
            until[cell.id] = alone + max((until.get(need, 0.0) for need in cell.needs), default=0.0)
            total += alone
        return max(total / workers, *until.values())

    def words(self) -> list[str]:
        """The plan in sentences."""
        passes = sum(cost.passes for _, cost in self.costs)
        several = sorted({1, self.workers, 8})
        times, stored = (
            ", ".join(f"{duration(self.seconds(workers, stored=store))} on {workers}" for workers in several)
            for store in (False, True)
        )
        return [
            f"An estimate, at {self.rate:.1e} FLOP/s a worker ({self.rated}): {times} "
            f"worker{'s' if len(several) > 1 else ''}.",
            f"A store of all states that the cells read takes {in_words(self.store)} in float32 and needs "
            f"{self.stored_passes:,} passes in place of {passes:,.0f}; with it: {stored}.",
            *self.assumed,
        ]


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 0.05 else f"{seconds:.0e} s" if seconds else "0 s"


@cache
def measured_rate(width: int, tokens: int, workers: int, device: str) -> float:
    """FLOP a second of one worker, at the forward passes and training steps of a Transformer's block.

    Args:
        width: of the states.
        tokens: in a text.
        workers: at a time; on a CPU they share its threads.
        device: where they compute.
    """
    width = max(8, min(WIDEST, width) // 8 * 8)
    with torch.random.fork_rng():
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True).to(device)
        states = torch.randn(TEXTS, tokens, width, device=device)
    threads = min(max(1, len(os.sched_getaffinity(0)) // workers), torch.get_num_threads())
    step = {"step": _pass_and_step, "block": block, "states": states}
    timed = Timer("step(block, states)", globals=step, num_threads=threads).blocked_autorange(min_run_time=MEASURING)
    return 4 * 2.0 * 12 * width**2 * TEXTS * tokens / timed.mean


def _pass_and_step(block: nn.Module, states: torch.Tensor) -> None:
    """One pass as of a frozen model, and one with gradients, which takes three times as many operations."""
    with torch.inference_mode():
        block(states)
    block.zero_grad()
    loss = block(states).square().mean()
    loss.backward()
    loss.item()  # a GPU is waited for
