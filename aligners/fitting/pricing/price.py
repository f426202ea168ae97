"""The experiment: every map at every size and number of steps, from several seeds, on the same rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.errors import check_range
from aligners.fitting.alignment import Alignment
from aligners.fitting.fits import fit_map, seeded
from aligners.fitting.in_memory import train_on_rows
from aligners.fitting.outcomes import TRAINED_WELL
from aligners.fitting.pricing.contestants import DEFAULT, FREE, check_names, factory, one_way, parameters_of
from aligners.fitting.pricing.measuring import Way, floor, measure
from aligners.fitting.pricing.rows import PairedRows
from aligners.fitting.training.optimisation import describe_optimizer
from aligners.maps.inn import INN
from aligners.progress import track
from aligners.similarity.algebra.moments import Moments, moments_of
from datamodules.rows.reading import Place
from datamodules.states import States
from datamodules.text.sources import TextSource

MEASURED = ("fvu", "fvu_seen", "fvu_unseen", "fvu_other", "round_trip", "stretch_low", "stretch_median", "stretch_high")


class Trained(NamedTuple):
    """A map after its training, in one direction.

    Attributes:
        name: of the map.
        turned: whether this is from Y to X.
        way: the map.
        about: its size in parameters, asked for and had, steps (0 for a closed form), and seed.
        diverged: (S,) steps at which sites diverged; 0 where none did.
    """

    name: str
    turned: bool
    way: Way
    about: dict[str, int]
    diverged: list[int]

    def outcome(self, site: int) -> str | None:
        """What came of the training at a site; None for a closed form."""
        diverged = self.diverged[site]
        return f"diverged at step {diverged}" if diverged else TRAINED_WELL if self.about["steps"] else None


class BijectionPrice:
    """Fits maps of equal size for equal numbers of steps, and measures them on the held-out texts in both directions.

    Each point of a learning curve is a training of its own, with the whole course of the learning rate. Each step draws
    its rows, with replacement, from fitting rows in memory. Schedule and clipping are those of `train.py fit`, and
    by default so is the optimiser.

    Attributes:
        rows: of the report, after `run`: one for each map, direction, size, number of steps, seed and site.
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
        check_names(maps)
        check_range(least=1, steps=steps, parameters=parameters or None, seeds=seeds, rows_a_step=rows_a_step)
        check_range(least=2, most_rows=most_rows)
        check_range(least=0, stretched_rows=stretched_rows)
        self.maps, self.steps, self.sizes = list(dict.fromkeys(maps)), sorted(set(steps)), parameters
        self.seeds, self.rows_a_step, self.most_rows = seeds, rows_a_step, most_rows
        self.stretched_rows, self.other_text = stretched_rows, other_text
        check_range(above=0, learning_rate=learning_rate)
        self.like = Alignment(optimizer=partial(torch.optim.AdamW, lr=learning_rate, weight_decay=0.0, fused=True))
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    def check_widths(self, d_x: int, d_y: int) -> None:
        """Raise if a map cannot have these widths, or one of the sizes at them.

        Raises:
            ValueError: as the maps do.
        """
        for name, size in product(self.maps, self._sizes(d_x, d_y)):
            factory(name, size)(1, d_x, d_y)

    def _sizes(self, d_x: int, d_y: int) -> list[int]:
        return self.sizes or [parameters_of(INN(1, d_x, d_y))]

    def run(self, data: States, held: Mapping[str, PairedRows], *, shown: bool = False) -> None:
        """Read the fitting rows, train every map on them, and measure it.

        Args:
            data: the data module.
            held: the rows of the held-out texts (`test`), and of those of another source (`other`).
            shown: whether a progress bar is shown.
        """
        fitting = PairedRows.of(data.paired("fit", shuffle=True), self.most_rows)
        data.reader.check.flush()
        moments, places = moments_of(fitting.x, fitting.y), data.reader.places()
        self.meta = {
            **data.describe(), **data.describe_other(), "split": "test", "n_rows": held["test"].x.shape[1],
            "rows_a_step": self.rows_a_step, "seeds": self.seeds,
            "optimizer": describe_optimizer(self.like.optimizer_factory),
        }  # fmt: skip
        self.rows = []
        planned = list(self._planned(fitting.x.shape[-1], fitting.y.shape[-1]))
        for each in track(planned, "Training", transient=True, disable=not shown):
            for trained in self._train(*each, fitting, moments):
                self.rows += self._rows(trained, moments, held, places)

    def _planned(self, d_x: int, d_y: int) -> Iterator[tuple[str, int, int, int]]:
        """Name, size, steps and seed of everything that is trained. Closed forms come once."""
        if "linear" in self.maps:
            yield "linear", 0, 0, 0
        trained = [name for name in self.maps if name != "linear"]
        for seed, size, steps, name in product(range(self.seeds), self._sizes(d_x, d_y), self.steps, trained):
            yield name, size, steps, seed

    def _train(
        self, name: str, size: int, steps: int, seed: int, fitting: PairedRows, moments: Moments
    ) -> Iterator[Trained]:
        """Fit and train a map, one for each direction if it has no way back."""
        for turned in (False, True)[: 1 + one_way(name)]:
            x, y, _ = fitting.turned() if turned else fitting
            aligner = seeded(factory(name, size), seed, len(x), x.shape[-1], y.shape[-1]).to(x.device)
            fit_map(name, aligner, moments.swap() if turned else moments)
            diverged = train_on_rows(aligner, x, y, steps, self.rows_a_step, seed, self.like).tolist()
            aligner.requires_grad_(False).eval()
            about = {"size": size, "parameters": parameters_of(aligner), "steps": steps, "seed": seed}
            if one_way(name):
                yield Trained(name, turned, Way(aligner, None), about, diverged)
            else:
                yield Trained(name, False, Way(aligner, aligner.inverse), about, diverged)
                yield Trained(name, True, Way(aligner.inverse, aligner), about, diverged)

    def _rows(
        self, trained: Trained, moments: Moments, held: Mapping[str, PairedRows], places: Sequence[Place]
    ) -> Iterator[dict[str, Any]]:
        """A row for each site of a map, and of the floor beside each free network."""
        if trained.turned:
            moments, held = moments.swap(), {split: rows.turned() for split, rows in held.items()}
        way, own = trained.way, held["test"]
        means = moments.mean_x, moments.mean_y
        found = {trained.name: measure(way, own, held.get("other"), means, self.stretched_rows)}
        if trained.name == FREE:
            found["floor"] = {"fvu": floor(way.mapped(own.x), own.y, moments.mean_y)}
        for method, figures in found.items():
            for s, place in enumerate(places):
                yield {
                    "model_x": place.model_x,
                    "model_y": place.model_y,
                    "site_x": place.site_x,
                    "site_y": place.site_y,
                    "method": method,
                    "direction": "Y to X" if trained.turned else "X to Y",
                    **trained.about,
                    "diverged_step": trained.diverged[s],
                    "training": trained.outcome(s),
                    **{column: _number(figures[column][s]) if column in figures else None for column in MEASURED},
                }


def _number(value: Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None
