"""What the cells of a study will cost: formulas over sizes of models, options and assumed lengths of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from jsonargparse import Namespace

from aligners.cli.cells.options import CellOptions
from aligners.fitting.parts import bytes_a_site
from aligners.maps.base import Aligner
from aligners.probing.trees.task import USUAL_RANK
from aligners.similarity.catalogue import catalogue
from aligners.studies.cells import Cell, merged
from aligners.studies.kinds import KINDS
from aligners.studies.plan import Cost, Plan
from aligners.studies.sizes import Size
from aligners.studies.spec import Study
from aligners.studies.speed import measured_rate
from datamodules.rows.policies import most_rows
from datamodules.rows.sites import parse_layers, parse_sites

__all__ = ["Costs", "plan_study"]

FLOOR_METHODS = 3  # mean, identity, random_embedding
DECOMPOSED = 30.0  # × d³: FLOP of a singular value decomposition and what goes with it
CONTROLS = 5  # times the products of a comparison alone
FLOAT, DOUBLE = 4, 8


class Maps(NamedTuple):
    """The maps of a bank, of one site."""

    trained: int  # weights, those that train in both directions twice
    stored: int  # bytes
    memory: int  # bytes
    closed: int  # closed forms


@dataclass
class Costs:
    """Estimates the cost of cells.

    Args:
        study: the study.
        options: what the commands say of their options.
        sizes: of the models, by their names in the study file.
    """

    study: Study
    options: CellOptions
    sizes: Mapping[str, Size]

    def __post_init__(self) -> None:
        self._made: dict[str, tuple[Namespace, Namespace]] = {}
        self._maps: dict[tuple[str, int, int], Maps] = {}

    def of(self, cell: Cell) -> Cost:
        """The cost of a cell."""
        parsed, made = self._options(cell)
        kinds = {"fit": self._fit, "fit_pairs": self._fit, "recover": self._fit}
        kinds |= {"attention": self._attention}
        kinds |= {"inject": self._inject, "similarity": self._similarity}
        kinds |= {"stitch": self._stitch, "identity": self._identity, "finetune": self._finetune}
        kinds |= {"surgery": self._surgery, "probe": self._probe}
        return kinds[cell.kind](cell, parsed, made) if cell.kind in kinds else Cost()

    # ------------------------------------------------------------------ what there is

    def size(self, cell: Cell) -> list[Size]:
        """The sizes of a cell's models."""
        return [self.sizes[model.name.split("#")[0]] for model in cell.models]

    def texts(self, cell: Cell) -> tuple[int, int]:
        """Fitting and held-out texts of a cell's task."""
        text = {**self.study.data, **self.study.tasks.get(cell.task or "", {})}.get("text", {})
        most, held_out = text.get("max_texts"), text.get("max_held_out")
        fitting = most or self.study.assume.texts
        return fitting, min(each for each in (held_out or self.study.assume.held_out, most) if each)

    def rows(self, data: Namespace, texts: int) -> int:
        """Rows of so many texts."""
        return most_rows(data.get("rows") or "tokens", texts, self.study.assume.tokens)

    def _options(self, cell: Cell) -> tuple[Namespace, Namespace]:
        """The options of a cell, as values and instantiated; the same for all cells of its kind and task."""
        key = f"{cell.kind} {cell.task}"
        if key not in self._made:
            names = KINDS[cell.kind].names
            data = {name: value for name, value in cell.options.get("data", {}).items() if name not in names}
            own = {name: value for name, value in cell.options.items() if name not in KINDS[cell.kind].apart}
            shared = {**self.study.data, **self.study.tasks.get(cell.task or "", {})} if cell.kind == "inject" else {}
            known = {n: v for n, v in shared.items() if self.options.accepts(cell.kind, f"data.{n}")}
            parsed = self.options.parsed(cell.kind, {**own, "data": merged(known, data)})
            self._made[key] = parsed, self.options.parser(cell.kind).instantiate(parsed)
        return self._made[key]

    def _pass(self, size: Size, texts: int) -> float:
        return 2.0 * size.layers * size.block * texts * self.study.assume.tokens

    # ------------------------------------------------------------------ kinds

    def _fit(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        sizes = self.size(cell)
        x, y = (sizes * 2)[:2]
        texts, _ = self.texts(cell)
        read, step = self.rows(parsed.data, texts), self.rows(parsed.data, parsed.data.batch_size)
        trained = trained_rows(parsed, read, step)
        places = len(parse_sites(parsed.data.get("sites", "all"), x.layers, y.layers))
        places *= len(cell.options["data"].get("pairs", [0]))
        places *= len(parsed.data.get("strengths", [0])) * parsed.data.get("targets", 1)
        maps = self.maps(made, x, y, step)
        passes = 1 + (trained / read if maps.trained else 0.0)
        reading = passes * sum(self._pass(size, texts) for size in sizes)
        return Cost(
            passes=len(sizes) * passes,
            flops=reading + places * (6.0 * maps.trained * trained + maps.closed * _decomposed(x, y)),
            reading=reading,
            disk=0.0 if self.study.keep == "results" else places * maps.stored,
            memory=FLOAT * sum(size.weights for size in sizes) + places * maps.memory,
        )

    def pair(self, cell: Cell) -> tuple[int, int, int]:
        """Sites of a fit, bytes that training one of them takes, and bytes of a model."""
        parsed, made = self._options(cell)
        x, y = self.size(cell)[:2]
        data = parsed.data
        rows = most_rows(data.rows, data.batch_size, data.max_length)
        sites = len(parse_sites(data.sites, x.layers, y.layers))
        return sites, bytes_a_site(made.model, x.width, y.width, rows), FLOAT * max(x.weights, y.weights)

    def _attention(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        """Reading alone: maps between a dozen heads cost next to nothing."""
        sizes = self.size(cell)
        texts, held_out = self.texts(cell)
        a_text = self.study.assume.tokens**2 * parsed.data.share
        trained = trained_rows(parsed, round(texts * a_text), round(parsed.data.batch_size * a_text))
        passes = 1 + trained / (texts * a_text) + held_out / texts
        reading = passes * sum(self._pass(size, texts) for size in sizes)
        return Cost(2 * passes, reading, memory=FLOAT * sum(size.weights for size in sizes))

    def maps(self, made: Namespace, x: Size, y: Size, rows: int) -> Maps:
        """The maps of a fit between two widths, of one site; built once."""
        key = (str(sorted(made.model.factories)), x.width, y.width)
        if key not in self._maps:
            aligners = [fit.aligner for fit in made.model.made(1, x.width, y.width)]
            moments = DOUBLE * (x.width**2 + y.width**2 + x.width * y.width)
            self._maps[key] = Maps(
                sum(_weights(each) * (2 if each.both_ways else 1) for each in aligners if not each.closed_form),
                moments + sum(_bytes(each) for each in aligners),
                bytes_a_site(made.model, x.width, y.width, rows),
                sum(each.closed_form for each in aligners),
            )
        return self._maps[key]

    def _inject(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        x, y = self.size(cell)
        _, held_out = self.texts(cell)
        sites = len(parse_sites(parsed.data.sites, x.layers, y.layers))
        work = self.study.fit
        fitted = {} if work is None else work.options.get("model", {}).get("aligners", {})
        methods = len({*fitted, *parsed.closed_form}) + FLOOR_METHODS
        targets = [y, x] if parsed.both_directions else [y]
        tails = sum(self._pass(target, held_out) for target in targets) * methods * sites / 2
        times = 2 if parsed.fitting_errors else 1  # as many fitting texts as are held out
        fronts = times * (self._pass(x, held_out) + self._pass(y, held_out))
        return Cost(passes=2 * times, flops=fronts + tails, reading=fronts, memory=FLOAT * (x.weights + y.weights))

    def _similarity(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        sizes = self.size(cell)
        texts, held_out = self.texts(cell)
        depths = [len(parse_layers(parsed.data.layers, size.layers)) for size in sizes]
        layers = [depth * size.width for depth, size in zip(depths, sizes, strict=True)]
        products = sum(a * b for i, a in enumerate(layers) for b in layers[i:])
        rows = self.rows(parsed.data, held_out)
        names = [parsed.measures] if isinstance(parsed.measures, str) else parsed.measures
        fitted = sum(each.chance is not None for each in catalogue().values() if {each.name, "all"} & set(names))
        pairs = list(combinations(range(len(sizes)), 2))
        solved = fitted * sum(depths[i] * depths[j] * _decomposed(sizes[i], sizes[j]) for i, j in pairs)
        times, read = (CONTROLS, 2 * held_out + texts) if parsed.controls else (1, held_out)
        reading = sum(self._pass(size, read) for size in sizes)
        limit = parsed.get("memory")
        return Cost(
            passes=len(sizes) * (3 if parsed.controls else 1),
            flops=reading + times * (2.0 * rows * products + solved),
            reading=reading,
            memory=min(DOUBLE * products, DOUBLE * products if limit is None else limit * 1e9),
        )

    def _probe(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        """Every probe trains for a third of its limit, with about a matrix of weights; codes double that."""
        (size,) = self.size(cell)
        texts, held_out = self.texts(cell)
        rows = self.rows(parsed.data, texts)
        sources = 2 if parsed.controls else 1  # the model, and its untrained twin
        layers = len(parse_layers(parsed.data.layers, size.layers))
        probes = layers * (sources + int(parsed.controls)) * len(parsed.tasks) * parsed.seeds
        weights = size.width * max(parsed.projection, parsed.hidden, *(parsed.ranks or [min(USUAL_RANK, size.width)]))
        trained = 6.0 * rows * parsed.training.max_epochs / 3 * probes * weights * (2 if parsed.portions else 1)
        reading = sources * self._pass(size, texts + held_out)
        memory = FLOAT * (size.weights + 2 * rows * layers * sources * size.width)
        return Cost(passes=sources, flops=reading + trained, reading=reading, memory=memory)

    def _stitch(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        x, y = self.size(cell)
        steps, sites = max(0, parsed.trainer.max_steps), min(x.layers, y.layers)
        tokens = steps * parsed.data.batch_size * self.study.assume.tokens
        ways = [2.0 * size.layers * size.block * tokens for size in (x, y)]
        layers = len(made.model.factories)
        read = steps * parsed.data.batch_size / max(1, self.texts(cell)[0])
        flops = sum(ways) + 2 * 3 * sum(ways) / 2 * sites * layers  # each model is the target of two routes
        return Cost(passes=2 * read, flops=flops, disk=0.0, memory=FLOAT * 2 * (x.weights + y.weights))

    def _identity(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        sizes = self.size(cell)
        _, held_out = self.texts(cell)
        one = sum(self._pass(size, held_out) for size in sizes)
        tails = one * len(sizes) * sizes[0].layers / 2
        return Cost(passes=len(sizes), flops=one + tails, memory=FLOAT * sum(size.weights for size in sizes))

    def _finetune(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        (size,) = self.size(cell)
        texts, held_out = self.texts(cell)
        epochs = parsed.trainer.max_epochs or 1
        if epochs < 0:
            epochs = parsed.trainer.max_steps * parsed.data.batch_size / texts
        flops = 3 * epochs * self._pass(size, texts) + self._pass(size, held_out)
        variants = len(parsed.variants)
        return Cost(
            passes=variants * (epochs + 1),
            flops=variants * flops,
            disk=variants * FLOAT * size.weights,
            memory=4 * FLOAT * size.weights,  # weights, gradients, two moments
        )

    def _surgery(self, cell: Cell, parsed: Namespace, made: Namespace) -> Cost:
        """Heads train on what a front reads; a span i..j leaves L - j blocks to run, (L² - 1) / 6 passes for all."""
        sizes = self.size(cell)
        texts, held_out = self.texts(cell)
        epochs = max(0, parsed.trainer.max_epochs or 0)
        reading = sum(epochs * self._pass(size, texts) + self._pass(size, held_out) for size in sizes)
        spans = sum(self._pass(size, held_out) * (size.layers**2 - 1) / 6 for size in sizes)
        weights = FLOAT * sum(size.weights for size in sizes)
        return Cost(passes=len(sizes) * (epochs + 1), flops=reading + spans, memory=weights)


def plan_study(costs: Costs, cells: Sequence[Cell], rate: float | None, workers: int) -> Plan:
    """Plan the cells of a study.

    Args:
        costs: estimates them.
        cells: of the study.
        rate: FLOP a second of one worker; None: measured on this machine, at the widest model.
        workers: cells at a time.
    """
    rated = "`--rate`"
    if rate is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        width = max(size.width for size in costs.sizes.values())
        rate, rated = (
            measured_rate(width, costs.study.assume.tokens, workers, device),
            f"measured here, {device}; `--rate`",
        )
    assume, unknown = costs.study.assume, [name for name, size in costs.sizes.items() if not size.known]
    said = [f"Texts without a limit in the study file are taken to be {assume.texts:,} to fit on and "
            f"{assume.held_out:,} held out; a text has {assume.tokens} tokens (`assume`)."]  # fmt: skip
    if unknown:
        said.append(
            f"{len(unknown)} of {len(costs.sizes)} models cannot be reached and are taken to have {assume.layers} "
            f"blocks of width {assume.width} (`assume`)."
        )
    texts: dict[tuple[str, str | None], tuple[Size, int]] = {}
    each = [(cell, costs.of(cell)) for cell in cells]
    for cell, cost in each:
        if cost.reading:  # of states: attention weights are not stored
            for model, size in zip(cell.models, costs.size(cell), strict=True):
                texts[model.path, cell.task] = size, sum(costs.texts(cell))
    store = sum(FLOAT * (size.layers + 1) * size.width * n * assume.tokens for size, n in texts.values())
    once = sum(2.0 * size.layers * size.block * n * assume.tokens for size, n in texts.values())
    passes = 2 * len(texts) + sum(cost.passes for _, cost in each if not cost.reading)
    return Plan(each, rate, workers, float(store), round(passes), once, said, rated)


def trained_rows(parsed: Namespace, read: int, a_step: int) -> float:
    """Rows that a fit trains on.

    Args:
        parsed: the options of the fit.
        read: rows of all fitting texts.
        a_step: rows of a step.
    """
    trainer: Any = parsed.trainer
    limit = trainer.limit_train_batches
    epoch = read if limit is None else min(read, limit * a_step) if isinstance(limit, int) else limit * read
    if trainer.max_epochs not in (None, -1):
        return float(trainer.max_epochs * epoch)
    if trainer.max_steps not in (None, -1):
        return float(trainer.max_steps * a_step)
    return float(min(parsed.model.rows, parsed.model.most_steps * a_step))


def _decomposed(x: Size, y: Size) -> float:
    """FLOP of what is solved between two widths."""
    return DECOMPOSED * max(x.width, y.width) ** 3


def _weights(aligner: Aligner) -> int:
    return sum(weight.numel() for weight in aligner.parameters())


def _bytes(aligner: Aligner) -> int:
    return sum(value.numel() * value.element_size() for value in aligner.state_dict().values())
