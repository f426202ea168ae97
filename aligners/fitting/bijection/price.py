"""The price of being a bijection: invertible networks against free ones of equal size and training, and a floor."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from aligners.datamodules.module import stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.read_rows import PairedBatch, Plan
from aligners.datamodules.text.sources import TextSource
from aligners.errors import UserError, check_known, check_range, finite
from aligners.files.resources import free_memory, in_words
from aligners.fitting.alignment import Alignment
from aligners.fitting.bijection.map_measures import (
    PairedRows,
    floor,
    mapped_rows,
    measure,
)
from aligners.fitting.fits import AlignerFactory, fit_map, seeded
from aligners.fitting.map_errors import (
    FAR_COLUMNS,
    FarErrors,
    Row,
    Way,
    columns_of,
    parameters_of,
)
from aligners.fitting.steps import describe_optimizer
from aligners.fitting.training_status import TRAINED_WELL
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP, FreeForm
from aligners.progress import hidden, track
from aligners.similarity.algebra.moments import moments_of

FREE = "mlp"
NAMES = ("linear", "inn_paper", "inn_one_way", "inn", FREE, "free_form")
DEFAULT = ("linear", "inn_one_way", "inn", FREE, "free_form")
# Maps without an inverse: another map must be fitted from Y to X.
ONE_WAY = ("linear", FREE)
BESIDE = "beside"  # the held-out rows with far rows, or without
# Columns of the report that are measured.
MEASURED = (
    *("fvu", *FAR_COLUMNS.values()),
    *("fvu_seen", "fvu_unseen", "fvu_other", "round_trip"),
    *("stretch_low", "stretch_median", "stretch_high"),
)


class Training(NamedTuple):
    """What is trained; a closed form has no size, steps or seed: 0."""

    name: str
    size: int
    steps: int
    seed: int


class Trained(NamedTuple):
    """A trained map, and the step at which each site diverged; 0 where none did."""

    aligner: Aligner
    diverged: list[int]


def factory(name: str, parameters: int) -> AlignerFactory:
    """Make a map of a size.

    Args:
        name: one of `NAMES`.
        parameters: number of parameters of a site, matched as nearly as the map's widths allow. Closed forms have none.
    """
    factories: dict[str, AlignerFactory] = {
        "linear": Linear,
        "inn_paper": partial(_inn, parameters, mixing="none", both_ways=False),
        "inn_one_way": partial(_inn, parameters, both_ways=False),
        "inn": partial(_inn, parameters),
        FREE: partial(MLP, parameters=parameters),
        "free_form": partial(FreeForm, parameters=parameters),
    }
    return factories[name]


def _inn(parameters: int, sites: int, d_x: int, d_y: int, **options: Any) -> INN:
    """Make an INN of about so many parameters per site; they are linear in the width of its hidden layers."""
    with torch.device("meta"):
        least = INN(1, d_x, d_y, hidden=1, **options)
        next_larger = INN(1, d_x, d_y, hidden=2, **options)
    one = parameters_of(least)
    each = parameters_of(next_larger) - one
    hidden = 1 + round((parameters - one) / each)
    if hidden < 1:
        raise UserError(
            f"Expected `parameters` to be at least {one} for an INN of width {d_x}, got {parameters}."
        )
    return INN(sites, d_x, d_y, hidden=hidden, **options)


def _adamw(learning_rate: float) -> OptimizerCallable:
    return partial(torch.optim.AdamW, lr=learning_rate, weight_decay=0.0, fused=True)


class BijectionPrice(pl.LightningModule):
    """Fits maps of equal size for equal numbers of steps, and measures them on the held-out texts in both directions.

    Its test keeps the rows of these texts, and of those of another source, in memory; `run` then fits and measures.

    Each point of a learning curve is a separate training, with the whole course of the learning rate. Each step draws
    its rows, with replacement, from fitting rows in memory. Schedule and clipping are those of `train.py fit`, and
    by default so is the optimiser.

    Attributes:
        rows: rows of the report, after `run`: one for each map, direction, size, number of steps, seed and site.
        meta: what holds for all of them.

    Args:
        maps: from linear; inn_paper: couplings only, trained from X to Y, as in Ren et al.; inn_one_way: ours, trained
            from X to Y; inn: ours, trained both ways; mlp, one for each direction; free_form: two MLPs, each half the
            size, that are trained to be inverses.
        steps: the points of the learning curve.
        parameters: sizes of the maps, in parameters of a site. Default: that of the default invertible network.
        seeds: trainings of each map, from seeds 0, 1, ...
        rows_a_step: paired rows in a step.
        learning_rate: learning rate of all maps, for matrices of up to 64 inputs as in `train.py fit`.
        most_rows: most fitting rows, and most held-out rows, to keep in memory.
        stretched_rows: held-out rows at which the singular values of the Jacobians are taken; 0: none.
        other_text: another source, on whose held-out texts FVU is measured too.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        maps: Sequence[str] = DEFAULT,
        steps: list[int] = [100, 300, 1000],  # noqa: B006  (copied)
        parameters: list[int] | None = None,
        seeds: int = 2,
        rows_a_step: int = 380,
        learning_rate: float = 1e-2,
        most_rows: int = 200_000,
        stretched_rows: int = 64,
        other_text: TextSource | None = None,
    ) -> None:
        super().__init__()
        check_known(NAMES, maps=maps)
        if FREE not in maps:
            raise UserError(
                f"Expected `maps` to include {FREE!r}, to whose FVU the others are compared."
            )
        check_range(least=1, steps=steps, parameters=parameters or None)
        check_range(least=1, seeds=seeds, rows_a_step=rows_a_step)
        check_range(least=2, most_rows=most_rows)
        check_range(least=0, stretched_rows=stretched_rows)
        check_range(above=0, learning_rate=learning_rate)
        self.maps = list(dict.fromkeys(maps))
        self.steps = sorted(set(steps))
        self.sizes = parameters
        self.seeds = seeds
        self.rows_a_step = rows_a_step
        self.most_rows = most_rows
        self.stretched_rows = stretched_rows
        self.other_text = other_text
        self.like = Alignment(optimizer=_adamw(learning_rate))
        self.rows: list[Row] = []
        self.meta: Row = {}
        self._batches: dict[str, list[PairedBatch]] = {}

    def check_widths(self, d_x: int, d_y: int) -> None:
        """Raise if a map cannot have these widths, or one of the sizes at them.

        Raises:
            ValueError: as the maps do.
        """
        sizes = self._sizes(d_x, d_y)
        for name, size in product(self.maps, sizes):
            make = factory(name, size)
            make(1, d_x, d_y)

    def _sizes(self, d_x: int, d_y: int) -> list[int]:
        if self.sizes:
            return self.sizes
        default = INN(1, d_x, d_y)
        return [parameters_of(default)]

    # ------------------------------------------------------------------ the held-out rows

    def setup(self, stage: str) -> None:
        """Check that the rows fit in memory, and that there is one process; choose the splits to read."""
        if self.trainer.world_size > 1:
            raise UserError(
                f"The price of bijectivity is measured by one process, but `trainer.devices` makes "
                f"{self.trainer.world_size}. Set it to 1."
            )
        self.stream = stream_of(self.trainer, PairedActivations)
        self.stream.plan(Plan(other=self.other_text))
        sites = len(self.stream.reader.sites)
        widths = sum(self.stream.reader.widths)
        free = free_memory(self.trainer.strategy.root_device)
        # fitting rows, held-out rows, and the copy that joining takes
        size = 3 * 4 * self.most_rows * sites * widths
        if size > free / 2:
            raise UserError(
                f"Expected `most_rows` rows at {sites} site pairs to fit in half of the free memory, "
                f"{in_words(free / 2)}, but {self.most_rows:,} take {in_words(size)}. Give fewer, or fewer "
                "`data.sites`."
            )

    def test_step(
        self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the rows of a batch."""
        split = self.stream.splits[dataloader_idx]
        self._keep(split, batch)
        if split == "test" and batch.counterpart is not None:
            self._keep(BESIDE, batch.counterpart)

    def _keep(self, name: str, batch: PairedBatch) -> None:
        batches = self._batches.setdefault(name, [])
        rows = [kept.x.shape[1] for kept in batches]
        if sum(rows) < self.most_rows:
            batches.append(batch)

    def on_test_epoch_end(self) -> None:
        """Check the states of the last batch as well, and join what was kept."""
        self.stream.reader.check.flush()
        self.held = {}
        for name, batches in self._batches.items():
            self.held[name] = PairedRows.of(batches, self.most_rows)
        self._batches = {}

    # ------------------------------------------------------------------ the fits

    def run(self) -> None:
        """Read the fitting rows, train every map on them, and measure it."""
        data = self.stream
        batches = data.paired("fit", shuffle=True)
        self.fitting = PairedRows.of(batches, self.most_rows)
        data.reader.check.flush()
        self.moments = moments_of(self.fitting.x, self.fitting.y)
        self.meta = {
            **data.describe(),
            **data.describe_other(),
            "split": "test",
            "n_rows": self.held["test"].x.shape[1],
            "rows_a_step": self.rows_a_step,
            "seeds": self.seeds,
            "optimizer": describe_optimizer(self.like.optimizer_factory),
        }
        self.rows = []
        planned = list(self._planned())
        quiet = hidden(self.trainer)
        for training in track(planned, "Training", disable=quiet):
            self.rows += self._fitted(training)

    def _planned(self) -> Iterator[Training]:
        """Yield every training; closed forms come once."""
        if "linear" in self.maps:
            yield Training("linear", 0, 0, 0)
        trained = [name for name in self.maps if name != "linear"]
        x, y, _ = self.fitting
        sizes = self._sizes(x.shape[-1], y.shape[-1])
        seeds = range(self.seeds)
        each = product(seeds, sizes, self.steps, trained)
        for seed, size, steps, name in each:
            yield Training(name, size, steps, seed)

    def _fitted(self, training: Training) -> Iterator[Row]:
        """Yield the report's rows of a map in both directions; a map without an inverse is fitted once for each."""
        there = back = self._trained(training, turned=False)
        forward = there.aligner
        if training.name in ONE_WAY:
            back = self._trained(training, turned=True)
            way = Way(forward)
            way_back = Way(back.aligner)
        else:
            backward = forward.inverse
            way = Way(forward, backward)
            way_back = Way(backward, forward)
        yield from self._rows(training, False, way, there)
        yield from self._rows(training, True, way_back, back)

    def _trained(self, training: Training, turned: bool) -> Trained:
        """Fit and train a map from X to Y, or from Y to X if `turned`."""
        moments = self.moments
        x, y, _ = self.fitting
        if turned:
            moments = moments.swap()
            x, y = y, x
        name, size, steps, seed = training
        sites, _, d_x = x.shape
        d_y = y.shape[-1]
        make = factory(name, size)
        aligner = seeded(make, seed, sites, d_x, d_y)
        aligner.to(x.device)
        fit_map(name, aligner, moments)
        a_step = self.rows_a_step
        diverged = self.like.train_on_rows(aligner, x, y, steps, a_step, seed)
        aligner.requires_grad_(False).eval()
        return Trained(aligner, diverged.tolist())

    def _rows(
        self, training: Training, turned: bool, way: Way, trained: Trained
    ) -> Iterator[Row]:
        """Make a row for each site of a map, from Y to X if `turned`, and for the floor next to each free network."""
        direction = "X to Y"
        if turned:
            direction = "Y to X"
        about = {
            "direction": direction,
            "size": training.size,
            "parameters": parameters_of(trained.aligner),
            "steps": training.steps,
            "seed": training.seed,
        }
        places = self.stream.reader.places()
        measured = self._measured(training.name, turned, way)
        for method, figures in measured.items():
            for s, place in enumerate(places):
                step = trained.diverged[s]
                outcome = None
                if step:
                    outcome = f"diverged at step {step}"
                elif training.steps:
                    outcome = TRAINED_WELL
                row = columns_of(place)
                row["method"] = method
                row |= about
                row["diverged_step"] = step
                row["training"] = outcome
                for column in MEASURED:
                    row[column] = None
                    if column in figures:
                        row[column] = finite(figures[column][s])
                yield row

    def _measured(
        self, name: str, turned: bool, way: Way
    ) -> dict[str, dict[str, Tensor]]:
        """Return the figures of a map, (S,) each, and those of the floor next to a free network, by method."""
        moments = self.moments
        held = self.held
        if turned:
            moments = moments.swap()
            held = {}
            for split, rows in self.held.items():
                held[split] = rows.turned()
        test = held["test"]
        other = held.get("other")
        mean_y = moments.mean_y
        means = (moments.mean_x, mean_y)
        figures = measure(way, test, other, means, self.stretched_rows)
        if BESIDE in held:
            column = FAR_COLUMNS[self.stream.far_rows]
            figures[column] = _fvu_beside(way, held[BESIDE], mean_y)
        measured = {name: figures}
        if name == FREE:
            predicted = mapped_rows(way, test.x)
            bound = floor(predicted, test.y, mean_y)
            measured["floor"] = {"fvu": bound}
        return measured


def _fvu_beside(way: Way, rows: PairedRows, mean_y: Tensor) -> Tensor:
    """Return the FVU of a map on the counterpart of the rows that count, with far rows or without, (S,)."""
    errors = FarErrors(mean_y).to(rows.y.device)
    mapped = mapped_rows(way, rows.x)
    errors.update(mapped, rows.y)
    return errors.compute()
