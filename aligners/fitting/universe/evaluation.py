"""Every map of a universe measured on held-out texts, beside maps fitted pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor, nn

from aligners.fitting.errors import MapErrors
from aligners.fitting.moments import read_moments
from aligners.fitting.outcomes import outcomes, worst_of
from aligners.fitting.parts import take_sites
from aligners.fitting.storage.bank import BACKWARD, FORWARD, StoredBank
from aligners.fitting.universe.directions import directions
from aligners.fitting.universe.joint import JointMoments, all_pairs, paired_rows
from aligners.fitting.universe.storage import universes_of
from aligners.fitting.universe.universe import NETWORK, Universe
from aligners.maps.base import Aligner
from aligners.similarity.moments import MomentsMetric
from datamodules.batches import TextBatch
from datamodules.protocol import stream_of
from datamodules.resuming import limited
from datamodules.rows.reading import PairedBatch, Plan
from datamodules.universe import UniverseStates

__all__ = ["UniverseEvaluation", "between_members"]

FIGURES = ("mse", "relative_error", "fvu", "fvu_unseen")


@dataclass(frozen=True)
class _Way:
    """A way between models, as `MapErrors` takes it; with a way back, its round trip is measured."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.there(x)

    @property
    def invertible(self) -> bool:
        return self.back is not None

    def inverse(self, y: Tensor) -> Tensor:
        return cast(Callable[[Tensor], Tensor], self.back)(y)


class UniverseEvaluation(pl.LightningModule):
    """Measures all k (k − 1) maps of a universe, of its closed forms, and of pairwise fits, on the same held-out rows.

    Attributes:
        rows: of the report, one for each map, ordered pair of models and site.
        meta: what holds for all of them.
        report_tables: the directions of the shared space.

    Args:
        stored: the universe.
        against: maps of pairs of its models, of `train.py fit` or `fit_pairs`, at its sites among others.

    Raises:
        ValueError: as `between_members`.
    """

    def __init__(self, stored: StoredBank, against: Sequence[StoredBank] = ()) -> None:
        super().__init__()
        self.stored = stored
        self.universes = nn.ModuleDict(universes_of(stored))
        self.models = len(stored.data["models"])
        self.pairs = between_members(against, stored.data)
        self.pair_maps = nn.ModuleList(maps for _, bank in self.pairs for maps in _maps(bank))
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}
        self.report_tables: dict[str, Any] = {}

    @property
    def _data(self) -> UniverseStates:
        return stream_of(self.trainer, UniverseStates)

    def setup(self, stage: str) -> None:
        """Begin with no rows."""
        self._data.plan(Plan(measured=self.stored.seen))
        self.errors = nn.ModuleDict()
        self.embedded = MomentsMetric(
            len(all_pairs(self.models)) * len(self.stored.data["sites"]), *(next(iter(self._all())).d_x,) * 2
        )

    def on_test_start(self) -> None:
        """Read the moments that the universe lacks after a model has joined it."""
        if self.stored.moments is None:
            data, trainer = self._data, self.trainer
            loader = data.loader("fit")
            about = {"data": data.describe(), "config": data.config()}
            batches = limited(len(loader), trainer, "test")
            found = read_moments(trainer, loader, self._read, data.reader.check, batches, about=about)
            self.stored.moments = found["maps"]
        self.means = JointMoments.of(self.stored.moments, self.models).mean.to(self.device)

    def _read(self, texts: TextBatch) -> dict[str, tuple[Tensor, Tensor]]:
        batch = self.trainer.strategy.batch_to_device(self._data.on_before_batch_transfer(texts, 0))
        return {"maps": paired_rows(batch.x, self.models)}

    def _all(self) -> Iterator[Universe]:
        return cast(Iterator[Universe], iter(self.universes.values()))

    # ------------------------------------------------------------------ the pass

    def test_step(self, batch: PairedBatch, batch_idx: int) -> None:
        """Add the errors of every map on one batch."""
        means = self.means.flatten(0, 1)
        for name, universe in cast(Mapping[str, Universe], self.universes).items():
            embedded = universe.embed(batch.x)
            for shift in range(1, self.models):
                way = _Way(partial(_from_embedded, universe, embedded, shift))
                self._add(f"{name}/{shift}", way, (means, means), batch.x, batch.x, batch)
            if universe.maps.bijective:
                self._trips(name, universe, batch)
            if name == NETWORK:
                self.embedded.update(*paired_rows(embedded, self.models))
        self._against(batch)

    def _trips(self, name: str, universe: Universe, batch: PairedBatch) -> None:
        """Into the space and back, and from a model over two others back to it."""
        means, last = self.means.flatten(0, 1), self.models - 2

        def over_two(x: Tensor) -> Tensor:
            return universe.predicted(universe.embed(universe.predicted(universe.embed(x), 1)), 1)

        cycle = _Way(over_two, lambda y: universe.predicted(universe.embed(y), last))
        self._add(f"{name}/cycle", cycle, (means, means), batch.x, batch.x, batch)
        self._add(f"{name}/trip", _Way(universe.embed, universe.maps.inverse), (means, means), batch.x, batch.x, batch)

    def _against(self, batch: PairedBatch) -> None:
        states = batch.x.unflatten(0, (self.models, -1))
        for p, ((i, j), bank) in enumerate(self.pairs):
            for name, (source, target), way in _ways(bank, i, j):
                means = (self.means[source], self.means[target])
                self._add(f"pair/{p}/{name}/{source}", way, means, states[source], states[target], batch)

    def _add(self, key: str, way: _Way, means: tuple[Tensor, Tensor], x: Tensor, y: Tensor, batch: PairedBatch) -> None:
        key = key.replace(".", "_")
        if key not in self.errors:
            self.errors[key] = MapErrors(*means).to(self.device)
        cast(MapErrors, self.errors[key]).update(cast(Aligner, way), x, y, batch.rows.unseen)

    # ------------------------------------------------------------------ what was found

    def on_test_epoch_end(self) -> None:
        """One row for each map, ordered pair and site; the directions of the space."""
        self._data.reader.check.flush()
        self.rows = [*self._universe_rows(), *self._pair_rows()]
        found = directions(JointMoments.of(self.embedded.compute(), self.models))
        sites, models = self.stored.data["sites"], self.stored.data["models"]
        self.report_tables = {
            "directions": [
                {
                    "site": site,
                    "direction": d + 1,
                    "variance": float(found.variance[s, d]),
                    **{model["name"]: float(found.explained[m, s, d]) for m, model in enumerate(models)},
                }
                for s, (site, _) in enumerate(sites)
                for d in range(found.variance.shape[1])
            ]
        }
        self.meta = {**self._data.describe(), "split": "test"}

    def _universe_rows(self) -> Iterator[dict[str, Any]]:
        for name, universe in cast(Mapping[str, Universe], self.universes).items():
            record = self.stored.training.get(f"{FORWARD}.{name}")
            trained = outcomes(record, universe.maps.sites)
            trips = {
                column: self._figures(f"{name}/{key}")["round_trip"] if f"{name}/{key}" in self.errors else None
                for column, key in (("round_trip", "trip"), ("cycle", "cycle"))
            }
            for shift in range(1, self.models):
                found = self._figures(f"{name}/{shift}")
                for place in range(universe.maps.sites):
                    target, site = divmod(place, len(self.stored.data["sites"]))
                    pair = ((target + shift) % self.models, target)
                    worst = {column: None if each is None else each[place] for column, each in trips.items()}
                    ends = [trained[model * len(self.stored.data["sites"]) + site] for model in pair]
                    outcome = worst_of({"training": end} for end in ends)["training"]
                    yield self._row(name, pair, site, found, place, _size(universe.maps), outcome, **worst)

    def _pair_rows(self) -> Iterator[dict[str, Any]]:
        for p, ((i, j), bank) in enumerate(self.pairs):
            for name, (source, target), _ in _ways(bank, i, j):
                found = self._figures(f"pair/{p}/{name}/{source}")
                route = BACKWARD if source == j and name in bank.maps.get(BACKWARD, {}) else FORWARD
                maps = bank.maps[route][name]
                trained = outcomes(bank.training.get(f"{route}.{name}"), maps.sites)
                for site in range(maps.sites):
                    told = {"round_trip": None, "cycle": None}
                    yield self._row(
                        f"pairwise_{name}", (source, target), site, found, site, _size(maps), trained[site], **told
                    )

    def _figures(self, key: str) -> dict[str, list[float | None]]:
        computed = cast(MapErrors, self.errors[key.replace(".", "_")]).compute()
        return {name: [_number(float(v)) for v in values.reshape(-1)] for name, values in computed.items()}

    def _row(
        self,
        name: str,
        pair: tuple[int, int],
        site: int,
        found: Mapping[str, Sequence[float | None]],
        place: int,
        parameters: int,
        training: str | None,
        **worst: float | None,
    ) -> dict[str, Any]:
        models, (layer, _) = self.stored.data["models"], self.stored.data["sites"][site]
        return {
            "model_x": models[pair[0]]["name"],
            "model_y": models[pair[1]]["name"],
            "site_x": layer,
            "site_y": layer,
            "method": name,
            "role": "method",
            "parameters": parameters,
            "training": training,
            **{figure: found[figure][place] for figure in FIGURES},
            **worst,
        }


def _from_embedded(universe: Universe, embedded: Tensor, shift: int, _: Tensor) -> Tensor:
    return universe.predicted(embedded, shift)


def between_members(
    against: Sequence[StoredBank], described: Mapping[str, Any]
) -> list[tuple[tuple[int, int], StoredBank]]:
    """Maps between two models of a universe, cut to its sites, with the numbers of their models.

    Args:
        against: of `train.py fit` or `fit_pairs`.
        described: `UniverseStates.describe()`.

    Raises:
        ValueError: one is of other models, or lacks a site.
    """
    own = [model["fingerprint"] for model in described["models"]]
    sites, found = [tuple(site) for site in described["sites"]], []
    for bank in against:
        there = bank.pairs.get(FORWARD, [])
        models = [bank.data["models"][side] for side in "xy"] if "x" in bank.data["models"] else bank.data["models"]
        if not {model["fingerprint"] for model in models} <= set(own) or not set(sites) <= set(there):
            raise ValueError(
                f"Expected `against` to name maps between two models of the universe at its sites {sites}, but "
                f"{bank.path} is of {' and '.join(model['name'] for model in models)} at {there}."
            )
        i, j = (own.index(model["fingerprint"]) for model in models)
        found.append(((i, j), take_sites(bank, [there.index(site) for site in sites])))
    return found


def _maps(bank: StoredBank) -> Iterator[Aligner]:
    for maps in bank.maps.values():
        yield from maps.values()


def _ways(bank: StoredBank, i: int, j: int) -> Iterator[tuple[str, tuple[int, int], _Way]]:
    """Every map of a pair's bank: its name, the numbers of its models, and what maps."""
    for name, aligner in bank.maps[FORWARD].items():
        yield name, (i, j), _Way(aligner)
        if aligner.bijective:
            yield name, (j, i), _Way(aligner.inverse)
    for name, aligner in bank.maps.get(BACKWARD, {}).items():
        yield name, (j, i), _Way(aligner)


def _size(maps: Aligner) -> int:
    return sum(weight[0].numel() for weight in maps.parameters())


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
