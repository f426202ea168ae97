"""The experiment: every map at every size and number of steps, from several seeds, on the same rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from aligners.fitting.alignment import Alignment
from aligners.fitting.fits import Fit, fit_map, seeded
from aligners.fitting.in_memory import train_on_rows
from aligners.fitting.outcomes import TRAINED_WELL
from aligners.fitting.pricing.contestants import DEFAULT, FREE, check_names, factory, one_way, parameters_of
from aligners.fitting.pricing.floor import floor
from aligners.fitting.pricing.measuring import Way, mapped_by, measure, squares_of
from aligners.fitting.pricing.memory import Held, check_room, gathered
from aligners.fitting.training.optimisation import describe_optimizer
from aligners.maps.inn import INN
from aligners.progress import track
from aligners.similarity.algebra.moments import Moments, moments_of
from datamodules.module import stream_of
from datamodules.rows.reading import PairedBatch, Plan
from datamodules.states import States
from datamodules.text.sources import TextSource

__all__ = ["BijectionPrice"]

FORWARD, BACKWARD = "X to Y", "Y to X"


class Trained(NamedTuple):
    """A map after its training.

    Attributes:
        fit: its name, direction and bank.
        parameters: asked for.
        steps: that it was trained for; 0 for a closed form.
        seed: of its weights and of the rows that it saw.
        diverged: (S,) steps at which sites diverged; 0 where none did.
    """

    fit: Fit
    parameters: int
    steps: int
    seed: int
    diverged: Tensor

    def outcome(self, site: int) -> str | None:
        """What came of the training at a site; None for a closed form."""
        diverged = int(self.diverged[site])
        return f"diverged at step {diverged}" if diverged else TRAINED_WELL if self.steps else None


class BijectionPrice(pl.LightningModule):
    """Fits maps of equal size for equal numbers of steps, and measures them on the held-out texts in both directions.

    Each point of a learning curve is a training of its own, with the whole course of the learning rate. Each step draws
    its rows, with replacement, from fitting rows in memory. Schedule and clipping are those of `train.py fit`, and
    by default so is the optimiser.

    Attributes:
        rows: of the report, after the evaluation: one for each map, direction, size, number of steps, seed and site.
        meta: what holds for all of them.

    Args:
        maps: from linear; inn_paper: couplings only, trained from X to Y, as in Ren et al.; inn_one_way: ours, trained
            from X to Y; inn: ours, trained both ways; mlp, one for each direction; free_form: two MLPs, each half the
            size, that are trained to be inverses.
        steps: the points of the learning curve.
        parameters: sizes of the maps, in parameters of a site. Default: that of the invertible network as it is.
        seeds: trainings of each map, from seeds 0, 1, ...
        rows_a_step: paired rows in a step.
        learning_rate: of all maps, for matrices of up to 64 inputs as in `train.py fit`.
        most_rows: of the fitting rows, and of the held-out rows, that are kept in memory.
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
        check_names(maps)
        for name, values, least in (
            ("steps", steps, 1), ("parameters", parameters or [1], 1), ("seeds", [seeds], 1),
            ("rows_a_step", [rows_a_step], 1), ("most_rows", [most_rows], 2), ("stretched_rows", [stretched_rows], 0),
        ):  # fmt: skip
            if not values or min(values) < least:
                raise ValueError(f"Expected `{name}` to be at least {least}, but got {values}.")
        self.maps, self.steps, self.sizes = list(dict.fromkeys(maps)), sorted(set(steps)), parameters
        self.seeds, self.rows_a_step, self.most_rows = seeds, rows_a_step, most_rows
        self.stretched_rows, self.other_text = stretched_rows, other_text
        if learning_rate <= 0:
            raise ValueError(f"Expected `learning_rate` to be above 0, but got {learning_rate}.")
        self.like = Alignment(optimizer=partial(torch.optim.AdamW, lr=learning_rate, weight_decay=0.0, fused=True))
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}
        self._trained: list[Trained] = []
        self._held: dict[str, list[Held]] = {}

    def check_widths(self, d_x: int, d_y: int) -> None:
        """Raise if a map cannot have these widths, or one of the sizes at them.

        Raises:
            ValueError: as the maps do.
        """
        for name, size in product(self.maps, self._sizes(d_x, d_y)):
            factory(name, size)(1, d_x, d_y)

    def _sizes(self, d_x: int, d_y: int) -> list[int]:
        return self.sizes or [parameters_of(INN(1, d_x, d_y))]

    @property
    def _data(self) -> States:
        return stream_of(self.trainer, States)

    def setup(self, stage: str) -> None:
        """Check that the rows fit in memory, and that there is one process; choose the splits to read."""
        if self.trainer.world_size > 1:
            raise ValueError(
                f"The price of bijectivity is measured by one process, but `trainer.devices` makes "
                f"{self.trainer.world_size}. Set it to 1."
            )
        reader = self._data.reader
        self._data.plan(Plan(other=self.other_text))
        check_room(self.most_rows, len(reader.sites), sum(reader.widths), self.trainer.strategy.root_device)

    def on_test_start(self) -> None:
        """Read the fitting rows and train every map on them."""
        x, y, _ = gathered(self._data.paired("fit", shuffle=True), self.most_rows)
        moments = moments_of(x, y)
        self._means = moments.mean_x, moments.mean_y
        planned = list(self._planned(x.shape[-1], y.shape[-1]))
        for name, size, steps, seed in track(planned, "Training", transient=True, disable=not self._shown):
            with torch.enable_grad():
                self._trained += self._train(name, size, steps, seed, x, y, moments)

    @property
    def _shown(self) -> bool:
        return self.trainer.progress_bar_callback is not None

    def _planned(self, d_x: int, d_y: int) -> Iterator[tuple[str, int, int, int]]:
        """Name, size, steps and seed of everything that is trained. Closed forms come once."""
        if "linear" in self.maps:
            yield "linear", 0, 0, 0
        trained = [name for name in self.maps if name != "linear"]
        for seed, size, steps, name in product(range(self.seeds), self._sizes(d_x, d_y), self.steps, trained):
            yield name, size, steps, seed

    def _train(
        self, name: str, size: int, steps: int, seed: int, x: Tensor, y: Tensor, moments: Moments
    ) -> Iterator[Trained]:
        """Fit and train a map, one for each direction if it has no way back."""
        sides = [("forward", x, y, moments), ("backward", y, x, moments.swap())]
        for direction, source, target, known in sides[: 1 + one_way(name)]:
            widths = source.shape[-1], target.shape[-1]
            aligner = seeded(factory(name, size), seed, len(source), *widths).to(source.device)
            fit_map(name, aligner, known)
            diverged = train_on_rows(aligner, source, target, steps, self.rows_a_step, seed, self.like)
            fit = Fit(name, cast(Any, direction), aligner.requires_grad_(False).eval())
            yield Trained(fit, size, steps, seed, diverged)

    def test_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the held-out rows of a batch."""
        kept = self._held.setdefault(self._data.splits[dataloader_idx], [])
        if sum(held.x.shape[1] for held in kept) < self.most_rows:
            kept.append(Held(batch.x, batch.y, batch.rows.unseen))

    def on_test_epoch_end(self) -> None:
        """Measure every map in both directions, and the floor."""
        data = self._data
        data.reader.check.flush()
        texts = {split: gathered(parts, self.most_rows) for split, parts in self._held.items()}
        held = texts["test"]
        self.meta = {
            **data.describe(), **data.describe_other(), "split": "test", "n_rows": held.x.shape[1],
            "rows_a_step": self.rows_a_step, "seeds": self.seeds,
            "optimizer": describe_optimizer(self.like.optimizer_factory),
        }  # fmt: skip
        self.rows = [row for trained in self._trained for row in self._rows(trained, held, texts.get("other"))]

    def _rows(self, trained: Trained, held: Held, other: Held | None) -> Iterator[dict[str, Any]]:
        """Rows of a map in the directions that it has, and of the floor beside each free network."""
        for direction, way in _ways(trained.fit):
            back = direction == BACKWARD
            (mean_x, mean_y), own = self._means[:: -1 if back else 1], held.turned() if back else held
            found = measure(way, own, mean_x, mean_y, self.stretched_rows)
            if other is not None:
                _, squares, totals = squares_of(way, other.turned() if back else other, mean_y)
                found["fvu_other"] = squares.sum(1) / totals.sum(1)
            yield from self._by_site(trained, direction, trained.fit.name, found)
            if trained.fit.name == FREE:
                least = {"fvu": floor(mapped_by(way, own.x), own.y, mean_y)}
                yield from self._by_site(trained, direction, "floor", least)

    def _by_site(
        self, trained: Trained, direction: str, method: str, found: dict[str, Tensor]
    ) -> Iterator[dict[str, Any]]:
        for s, place in enumerate(self._data.reader.places()):
            yield {
                "model_x": place.model_x,
                "model_y": place.model_y,
                "site_x": place.site_x,
                "site_y": place.site_y,
                "method": method,
                "direction": direction,
                "size": trained.parameters,
                "parameters": parameters_of(trained.fit.aligner),
                "steps": trained.steps,
                "seed": trained.seed,
                "diverged_step": int(trained.diverged[s]),
                "training": trained.outcome(s),
                **{name: _number(found[name][s]) if name in found else None for name in MEASURED},
            }


MEASURED = ("fvu", "fvu_seen", "fvu_unseen", "fvu_other", "round_trip", "stretch_low", "stretch_median", "stretch_high")


def _ways(fit: Fit) -> Iterator[tuple[str, Way]]:
    """The directions in which a bank maps, each with the way back if there is one."""
    aligner = fit.aligner
    if one_way(fit.name):
        yield FORWARD if fit.direction == "forward" else BACKWARD, Way(aligner, None)
        return
    yield FORWARD, Way(aligner, aligner.inverse)
    yield BACKWARD, Way(aligner.inverse, aligner)


def _number(value: Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None
