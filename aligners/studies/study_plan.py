"""What a study will cost, from sizes of models and texts, formulas and a stated rate; how long the rest takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.benchmark import Timer

from aligners.datamodules.text.loading import split_shares
from aligners.datamodules.text.sources import (
    TextSource,
    fitting_split,
    held_out_split,
    known_source,
)
from aligners.datamodules.text.text_files import is_local
from aligners.files.resources import in_words
from aligners.files.yaml_tables import table_beside
from aligners.models.architectures import architecture_of
from aligners.models.loading.model_files import read_config
from aligners.models.recipes import EMBEDDED, Recipe, embedded_recipe
from aligners.reports.screen import SiteTable
from aligners.similarity.passes.work import SINGULAR
from aligners.studies.cells import Cell
from aligners.studies.executors import cpu_cores
from aligners.studies.spec import Assumed


class TextSizes(NamedTuple):
    """Texts of a task, up to copies.

    Attributes:
        fit: to fit on; validation: on which training is watched; test: held out.
        known: whether they were known or counted, and not assumed.
    """

    fit: int
    validation: int
    test: int
    known: bool = True


def text_sizes(source: TextSource, assumed: Assumed) -> TextSizes:
    """The sizes of the splits of a source.

    Args:
        source: of the texts.
        assumed: sizes of one that is neither known nor at hand.
    """
    shares = split_shares(source, draw_test=source.official is None)
    try:
        rows = _counted(source)
    except (OSError, ValueError):  # it cannot be found, reached or read; a cell will say so
        rows = None
    if rows is None:
        sizes = {"fit": assumed.texts, "test": assumed.held_out}
        sizes["validation"] = round(assumed.texts * shares["validation"] / shares["fit"])
    else:
        train, *official = rows
        sizes = {name: round(train * share) for name, share in shares.items()}
        sizes |= {"test": sum(official)} if official else {}
    limited = {
        name: size if (most := source.most(name)) is None else min(size, most)
        for name, size in sizes.items()
    }
    return TextSizes(**limited, known=rows is not None)


def _counted(source: TextSource) -> list[int] | None:
    """Rows to fit on, then of the official held-out splits that are read; None where nobody says how many."""
    splits = None if source.streaming else _splits(source.source, source.subset, source.revision)
    if not splits:
        return None
    rows, most = [fitting_split(splits, source)], source.most("test")
    for name in (source.official, source.fill_from):
        if name is not None and source.official and (len(rows) == 1 or rows[1] < (most or 0)):
            further = held_out_split(splits, name, source, _said_by_cells)
            rows.append(further if isinstance(further, int) else len(further))
    return rows


def _said_by_cells(caution: str) -> None:
    """Leave a caution on texts to the cells that read them."""


@cache
def _splits(name: str, subset: str | None, revision: str | None) -> dict[str, Any]:
    """Rows of each split: as known, counted in files, or as the Hub says; nothing is downloaded."""
    known = table_beside(__file__, "sizes.yaml")
    if name in known:
        return known[name]
    if is_local(name):
        source = TextSource(name)
        splits = known_source(source).open(source, _said_by_cells)
        return {split: len(rows) for split, rows in splits.items()}
    from datasets import load_dataset_builder

    about = load_dataset_builder(name, subset, revision=revision).info.splits or {}
    return {split: rows.num_examples for split, rows in about.items()}


class Pace:
    """What cells take: their planned times, times what those of their kind have taken so far for each planned second.

    A kind of which none is done yet is corrected by all others.

    Args:
        planned: seconds of each cell, by its id.
    """

    def __init__(self, planned: Mapping[str, float]) -> None:
        self._planned = planned
        self._sums: dict[str, tuple[float, float]] = {}  # of a kind: seconds planned, and taken

    def add(self, cell: Cell, seconds: float | None) -> None:
        """Take into account what a cell has taken, where that is known."""
        planned = self._planned.get(cell.id)
        if planned and seconds is not None:
            before, taken = self._sums.get(cell.kind, (0.0, 0.0))
            self._sums[cell.kind] = before + planned, taken + seconds

    def expected(self, cell: Cell) -> float:
        """Seconds that a cell will take."""
        known = [self._sums[cell.kind]] if cell.kind in self._sums else self._sums.values()
        planned, taken = (sum(sums) for sums in zip(*known, strict=True)) if known else (1.0, 1.0)
        return self._planned.get(cell.id, 0.0) * taken / planned

    def left(self, cells: Iterable[Cell], workers: int, besides: float = 0.0) -> float:
        """Seconds that cells will take, so many at a time: at least those of the longest chain of them.

        Args:
            cells: each after those that it needs.
            workers: cells at a time.
            besides: seconds of other work, which can be shared out.
        """
        total, until = besides, {"": 0.0}
        for cell in cells:
            alone = self.expected(cell)
            until[cell.id] = alone + max((until.get(need, 0.0) for need in cell.needs), default=0.0)
            total += alone
        return max(total / max(1, workers), *until.values())


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


def size_of(name: str, data: Mapping[str, Any]) -> Size:
    """The size of a model.

    Args:
        name: Hub id, folder, or embedded model.
        data: the study's data options.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    if name.startswith(EMBEDDED):
        _, recipe = embedded_recipe(name)
        head_task = (
            "classification"
            if isinstance(recipe, Recipe)
            else "causal"
            if "gpt" in name
            else "masked"
        )
        return Size(recipe.layers, recipe.width, recipe.vocabulary, head_task, heads=recipe.heads)
    config = read_config(
        name, {"revision": None, "trust_remote_code": data.get("trust_remote_code", False)}
    )
    architecture = architecture_of(config.model_type)
    tasks = (architecture.task(kind, config) for kind in config.architectures or ())
    sizes: Any = config.get_text_config()
    head = next((task for task in tasks if task is not None), None)
    return Size(
        sizes.num_hidden_layers,
        sizes.hidden_size,
        sizes.vocab_size,
        head,
        heads=sizes.num_attention_heads,
    )


def sizes_in(cell: Cell, sizes: Mapping[str, Size]) -> list[Size]:
    """The sizes of a cell's models, which have a head once they are fine-tuned, of those in the study file."""
    staged = [(model.stage, sizes[model.name.split("#")[0]]) for model in cell.models]
    return [
        replace(size, head="classification") if stage == "finetuned" else size
        for stage, size in staged
    ]


START, CALL = 5.0, 1e-3  # seconds
SOLVING = 2e10  # FLOP a second of decompositions in float64, where they are not measured: of a core, and of a GPU
MEASURING, TEXTS = 0.8, 10  # seconds of measuring a rate; texts in a batch
WIDEST, WIDEST_SOLVED = 4096, 512  # widths that are measured: wider ones are as fast


@dataclass(frozen=True)
class Cost:
    """What one cell costs.

    Attributes:
        passes: passes over a model, with nothing stored.
        flops: floating-point operations of matrix products.
        solved: of decompositions, in float64.
        calls: of a block with a batch, each of which takes a while however small it is.
        reading: those among `flops` that a store saves.
        disk: bytes of what it leaves: maps, models.
        saved: bytes of one checkpoint, `last.ckpt`, each of which replaces the one before.
        saves: how often it is written besides every so many minutes.
        minutes: how many.
        memory: bytes at its peak: models, maps, and what training them needs.
        texts: of the cell; None: its kind has no formula.
    """

    passes: float = 0.0
    flops: float = 0.0
    solved: float = 0.0
    calls: float = 0.0
    reading: float = 0.0
    disk: float = 0.0
    saved: float = 0.0
    saves: float = 0.0
    minutes: float = 10.0
    memory: float = 0.0
    texts: TextSizes | None = None


@dataclass(frozen=True)
class Plan:
    """The costs of cells.

    Attributes:
        costs: each cell with its cost.
        rate: FLOP a second of one worker.
        solving: the same of decompositions.
        workers: cells at a time.
        store: bytes that a store of the rows that the cells read takes.
        stored_passes: passes over a model with such a store: each model once for each set of texts.
        stored_flops: what these take.
        assumed: what was assumed, in words.
        rated: where the rate is from.
    """

    costs: Sequence[tuple[Cell, Cost]]
    rate: float
    solving: float
    workers: int
    store: float
    stored_passes: int
    stored_flops: float
    assumed: Sequence[str]
    rated: str = "`--rate`"

    def table(self) -> SiteTable:
        """One line for each kind of cell, and one for all."""
        columns = [
            "passes",
            "FLOP",
            "of SVDs",
            "on 1 worker",
            "left on disk",
            "checkpoints",
            "memory",
        ]
        table = SiteTable("What it will cost", ["cells"], ["number", *columns], {})
        for kind in (*dict.fromkeys(cell.kind for cell, _ in self.costs), "all"):
            costs = [cost for cell, cost in self.costs if kind in (cell.kind, "all")]
            passes = f"{sum(cost.passes for cost in costs):,.0f}"
            operations = (
                f"{sum(getattr(cost, name) for cost in costs):.1e}" for name in ("flops", "solved")
            )
            time, memory = (
                duration(sum(map(self.alone, costs))),
                max((cost.memory for cost in costs), default=0),
            )
            sizes = sum(cost.disk for cost in costs), sum(map(self.written, costs)), memory
            line = [f"{len(costs):,}", passes, *operations, time, *map(in_words, sizes)]
            table.add_row(kind, *line, style="bold" if kind == "all" else None)
        return table

    def alone(self, cost: Cost, *, stored: bool = False) -> float:
        """Seconds that a cell takes; `stored`: with states from a store."""
        flops = cost.flops - (cost.reading if stored else 0.0)
        return flops / self.rate + cost.solved / self.solving + CALL * cost.calls + START

    def written(self, cost: Cost) -> float:
        """Bytes of all checkpoints that a cell writes."""
        return cost.saved * (cost.saves + self.alone(cost) // (60 * cost.minutes))

    def seconds(self, workers: int, *, stored: bool = False) -> float:
        """Time that all cells take, so many at a time.

        Args:
            workers: cells at a time.
            stored: whether states come from a store, which is written once.
        """
        pace = Pace(self.each(stored=stored))
        once = self.stored_flops / self.rate if stored else 0.0
        return pace.left((cell for cell, _ in self.costs), workers, once)

    def each(self, *, stored: bool = False) -> dict[str, float]:
        """Seconds of each cell, by its id; `stored`: with states from a store."""
        return {cell.id: self.alone(cost, stored=stored) for cell, cost in self.costs}

    def words(self) -> list[str]:
        """The plan in sentences."""
        passes = sum(cost.passes for _, cost in self.costs)
        several = sorted({1, self.workers, 8})
        times, stored = (
            ", ".join(
                f"{duration(self.seconds(workers, stored=store))} on {workers}"
                for workers in several
            )
            for store in (False, True)
        )
        return [
            f"An estimate, at {self.rate:.1e} FLOP/s a worker ({self.rated}) and {self.solving:.1e} FLOP/s in "
            f"decompositions: {times} worker{'s' if len(several) > 1 else ''}.",
            f"A store of the rows that the cells read takes {in_words(self.store)} in float32 and needs "
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
def measured_rates(width: int, tokens: int, workers: int, device: str) -> tuple[float, float]:
    """FLOP a second of one worker: at the passes and training steps of a Transformer's block, and in an SVD in float64.

    Args:
        width: of the states.
        tokens: in a text.
        workers: at a time; on a CPU they share its threads.
        device: where they compute.
    """
    width = max(8, min(WIDEST, width) // 8 * 8)
    with torch.random.fork_rng():
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True).to(
            device
        )
        states = torch.randn(TEXTS, tokens, width, device=device)
        matrix = torch.randn(2 * [min(WIDEST_SOLVED, width)], device=device, dtype=torch.float64)
    threads = min(max(1, cpu_cores() // workers), torch.get_num_threads())
    names = {
        "step": _pass_and_step,
        "block": block,
        "states": states,
        "svd": _solved,
        "matrix": matrix,
    }
    step, svd = (
        Timer(statement, globals=names, num_threads=threads)
        .blocked_autorange(min_run_time=MEASURING)
        .mean
        for statement in ("step(block, states)", "svd(matrix)")
    )
    return 4 * 2.0 * 12 * width**2 * TEXTS * tokens / step, SINGULAR * len(matrix) ** 3 / svd


def _solved(matrix: torch.Tensor) -> None:
    """One decomposition, and one number of it, for which a GPU is waited."""
    torch.linalg.svd(matrix)[1][0].item()


def _pass_and_step(block: nn.Module, states: torch.Tensor) -> None:
    """One pass as of a frozen model, and one with gradients, which takes three times as many operations."""
    with torch.inference_mode():
        block(states)
    block.zero_grad()
    loss = block(states).square().mean()
    loss.backward()
    loss.item()  # a GPU is waited for
