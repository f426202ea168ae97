"""Every map of a universe measured on held-out texts, beside maps fitted pair by pair."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from aligners.datamodules.module import stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.read_rows import PairedBatch, Place, Plan
from aligners.errors import UserError
from aligners.fitting.bank_training import BankTraining, stored_of
from aligners.fitting.heldout_retrieval import RETRIEVAL_COLUMNS, HeldOutRows
from aligners.fitting.map_errors import (
    FAR_COLUMNS,
    FarErrors,
    MapErrors,
    Way,
    error_rows,
)
from aligners.fitting.read_moments import moments_of_states
from aligners.fitting.saved_bank import BACKWARD, FORWARD, StoredBank, take_sites
from aligners.fitting.training_status import outcomes, worst_of
from aligners.fitting.universe.joint import (
    JointMoments,
    all_pairs,
    directions,
    paired_rows,
    shared_variance,
)
from aligners.fitting.universe.through import TwoLinear
from aligners.fitting.universe.type_errors import TypeErrors
from aligners.fitting.universe.universe import LINEAR, NETWORK, Universe
from aligners.fitting.universe.universe_files import sites_of, universes_of
from aligners.maps.base import Aligner
from aligners.models.model_identity import same_model
from aligners.similarity.algebra.moments import Moments
from aligners.similarity.moment_metrics import MomentsMetric

FIGURES = ("mse", "relative_error", "fvu", "fvu_unseen")
HELD = "held"  # errors of the states that the shared part holds
GROUPS = ("all", "some", "one")  # whose directions a model's variance lies in
POINTS = 24  # of the curve of shared directions
ROWS = 4  # for each dimension of all models, of which fewer make any states agree
Ends = tuple[int, int]  # numbers of the models that a map is from and to


class PairMap(NamedTuple):
    """A map that was fitted to two models alone, in one direction.

    Attributes:
        key: of its errors.
        method: its name in reports.
        maps: the bank that it is part of.
        training: its outcome at each site.
        ends: the models that it is from and to.
        way: what maps, on the models' own widths.
    """

    key: str
    method: str
    maps: Aligner
    training: list[str | None]
    ends: Ends
    way: Way


class UniverseEvaluation(pl.LightningModule):
    """Measures all k (k − 1) maps of a universe, of its closed forms, and of pairwise fits, on the same held-out rows.

    Attributes:
        rows: of the report, one for each map, ordered pair of models and site.
        meta: what holds for all of them.
        report_tables: the directions of the shared space; how much of each model's states it holds, and what the
            models share; and how much of them its first directions would hold.

    Args:
        stored: the universe: a trained `UniverseAlignment`, or a file's.
        against: maps of pairs of its models, of `train.py fit` or `fit_pairs`, at its sites among others.

    Raises:
        ValueError: as `between_members`.
    """

    def __init__(
        self, stored: StoredBank | BankTraining, against: Sequence[StoredBank] = ()
    ) -> None:
        super().__init__()
        self.stored = stored = stored_of(stored)
        self.members = [model["name"] for model in stored.data["models"]]
        self.models = len(self.members)
        self.spaces = universes_of(stored)
        self.universes = nn.ModuleDict(self.spaces)
        self.widths = self.spaces[NETWORK].widths
        self.sites = sites_of(stored)
        self.names = [_name(sites) for sites in self.sites]
        pairs = between_members(against, stored.data["models"], self.sites)
        self.pair_maps = list(_pair_maps(pairs))
        self.pair_banks = nn.ModuleList([pair.maps for pair in self.pair_maps])
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}
        self.report_tables: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}  # closed forms that were refused, and why

    def setup(self, stage: str) -> None:
        """Begin with no rows."""
        self.stream = stream_of(self.trainer, PairedActivations)
        self.stream.plan(Plan(measured=self.stored.seen))
        self.errors = nn.ModuleDict()
        self.far_errors = nn.ModuleDict()
        space = self.spaces[NETWORK]
        places = len(all_pairs(self.models)) * len(self.sites)
        self.embedded = MomentsMetric(places, space.d_y, space.d_y).to(self.device)
        self.drawn = HeldOutRows(
            space.sites, space.d_x, space.d_x, seed=0, device=self.device
        )
        self.by_type: TypeErrors | None = None
        types = self.stream.types("test")
        if types is not None:
            ids = self.stream.split("test").ids
            self.by_type = TypeErrors(len(self.sites), types, ids, self.device)

    def on_test_start(self) -> None:
        """Read the moments that the universe lacks after a model has joined it."""
        if self.stored.moments is None:
            moments = moments_of_states(
                self.stream, lambda batch: {"maps": paired_rows(batch.x, self.models)}
            )
            self.stored.moments = moments["maps"]
            self._refit()
        self.joint = JointMoments.of(self.stored.moments, self.models)
        self.means = self.joint.mean.to(self.device)
        self.variance = self.joint.variance.flatten().to(self.device)

    def _refit(self) -> None:
        """Solve the linear universe of all models, beside which a newcomer's maps show whether a refit would pay."""
        network = self.spaces[NETWORK]
        maps = TwoLinear(network.sites, network.d_x, network.d_x)
        linear = Universe(maps, self.models, self.widths).to(self.device)
        try:
            linear.fit(cast(Moments, self.stored.moments))
        except UserError as error:  # with too few rows
            self.left_out[LINEAR] = str(error)
            return
        self.spaces[LINEAR] = self.universes[LINEAR] = linear.requires_grad_(
            False
        ).eval()
        self.stored.maps[FORWARD][LINEAR] = maps

    # ------------------------------------------------------------------ the pass

    def test_step(self, batch: PairedBatch, batch_idx: int) -> None:
        """Add the errors of every map on one batch."""
        self.drawn.add(batch.x, batch.x, batch.text, batch.rows.place)
        for name, universe in self.spaces.items():
            self._add_universe(name, universe, batch)
        for pair in self.pair_maps:
            self._add_pair(pair, batch)
        if batch.counterpart is not None:
            self._add_beside(batch.counterpart)

    def _add_universe(self, name: str, universe: Universe, batch: PairedBatch) -> None:
        """Add the errors of all maps of a universe and of its trips, and what describes the trained space."""
        embedded = universe.embed(batch.x)
        for shift in range(1, self.models):
            mapped = universe.predicted(embedded, shift)
            self._add(f"{name}/{shift}", _known(mapped), batch.x, batch)
        if name == NETWORK:
            self._add_trips_of_network(universe, embedded, batch)
            self._add_to_space(universe, embedded, batch)
        elif universe.maps.bijective:  # in files of earlier versions
            self._add_trips(name, universe, batch.x, embedded, batch)

    def _add_pair(self, pair: PairMap, batch: PairedBatch) -> None:
        """Add the errors of a map between two models."""
        x, y, (mean_x, mean_y) = self._between(pair, batch)
        if pair.key not in self.errors:
            self.errors[pair.key] = MapErrors(mean_x, mean_y).to(self.device)
        cast(MapErrors, self.errors[pair.key]).update(pair.way, x, y, batch.rows.unseen)

    def _add(self, key: str, way: Way, x: Tensor, batch: PairedBatch) -> None:
        """Add the errors of what maps the states x of all models to themselves."""
        if key not in self.errors:
            means = self.means.flatten(0, 1)
            widths = torch.tensor(self.widths).repeat_interleave(len(self.sites))
            self.errors[key] = MapErrors(means, means, widths).to(self.device)
        cast(MapErrors, self.errors[key]).update(way, x, x, batch.rows.unseen)

    def _between(
        self, pair: PairMap, batch: PairedBatch
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """The rows x and y of the models of a map, on their own widths, and the means of both."""
        i, j = pair.ends
        by_model = batch.x.unflatten(0, (self.models, -1))
        x = by_model[i, ..., : self.widths[i]]
        y = by_model[j, ..., : self.widths[j]]
        means = (
            self.means[i, ..., : self.widths[i]],
            self.means[j, ..., : self.widths[j]],
        )
        return x, y, means

    def _add_trips_of_network(
        self, universe: Universe, embedded: Tensor, batch: PairedBatch
    ) -> None:
        """Add the trips of what the shared part holds, which comes back exactly, and how much that is."""
        x = batch.x
        if not universe.maps.bijective:
            x = universe.predicted(embedded, 0)
            self._add(HELD, _known(x), batch.x, batch)
            embedded = universe.embed(x)
        self._add_trips(NETWORK, universe, x, embedded, batch)

    def _add_trips(
        self,
        name: str,
        universe: Universe,
        x: Tensor,
        embedded: Tensor,
        batch: PairedBatch,
    ) -> None:
        """Add the trip into the space and back, and that from a model over two others back to it."""
        over = universe.predicted(embedded, 1)
        for shift in (1, self.models - 2):
            over = universe.predicted(universe.embed(over), shift)
        self._add(f"{name}/trip", _known(x, universe.predicted(embedded, 0)), x, batch)
        self._add(f"{name}/cycle", _known(x, over), x, batch)

    def _add_to_space(
        self, universe: Universe, embedded: Tensor, batch: PairedBatch
    ) -> None:
        """Add what the directions of the space, and the types that are shared least, are found from."""
        self.embedded.update(*paired_rows(embedded, self.models))
        if self.by_type is not None:
            errors = (universe.from_mean(embedded) - batch.x).square().mean(-1)
            relative = (
                (errors / self.variance[:, None])
                .unflatten(0, (self.models, -1))
                .mean(0)
            )
            self.by_type.update(relative, batch.text, batch.rows.place)

    def _add_beside(self, batch: PairedBatch) -> None:
        """Add the errors on the rows that stand beside those that count: with far rows, or without them."""
        for name, universe in self.spaces.items():
            embedded = universe.embed(batch.x)
            for shift in range(1, self.models):
                errors = self._far_errors(f"{name}/{shift}", self.means.flatten(0, 1))
                errors.update(universe.predicted(embedded, shift), batch.x)
        for pair in self.pair_maps:
            x, y, (_, mean_y) = self._between(pair, batch)
            self._far_errors(pair.key, mean_y).update(pair.way(x), y)

    def _far_errors(self, key: str, mean: Tensor) -> FarErrors:
        if key not in self.far_errors:
            self.far_errors[key] = FarErrors(mean).to(self.device)
        return cast(FarErrors, self.far_errors[key])

    # ------------------------------------------------------------------ what was found

    def on_test_epoch_end(self) -> None:
        """One row for each map, ordered pair and site; the directions of the space."""
        self.stream.reader.check.flush()
        self._retrieve()
        self.rows = list(self._rows())
        linear = None
        if self.joint.n > ROWS * sum(self.widths):
            linear = shared_variance(self.joint)
        self.report_tables = {
            "directions": list(self._directions()),
            "shared": list(self._shared(None if linear is None else linear[0])),
            "curve": [] if linear is None else list(self._curve(linear[1])),
            "types": [] if self.by_type is None else self.by_type.table(self.names),
        }
        self.meta = {**self.stream.describe(), "split": "test"}
        if self.left_out:
            self.meta["left_out"] = self.left_out

    def _retrieve(self) -> None:
        """Score every map by retrieval, on rows that were drawn from all ranks'."""
        x = self.drawn.end()
        self.retrieved: dict[str, dict[str, Tensor]] = {}
        for name, universe in self.spaces.items():
            embedded = universe.embed(x)
            for shift in range(1, self.models):
                mapped = universe.predicted(embedded, shift)
                self.retrieved[f"{name}/{shift}"] = self.drawn.columns(mapped)
        by_model = x.unflatten(0, (self.models, -1))
        count = len(self.sites)
        for pair in self.pair_maps:
            i, j = pair.ends
            mapped = pair.way(by_model[i, ..., : self.widths[i]])
            padded = pad(mapped, (0, x.shape[-1] - mapped.shape[-1]))
            places = slice(j * count, (j + 1) * count)
            self.retrieved[pair.key] = self.drawn.columns(padded, places)

    def _rows(self) -> Iterator[dict[str, Any]]:
        """A row for each map, ordered pair of models and site."""
        for name, universe in self.spaces.items():
            record = self.stored.training.get(f"{FORWARD}.{name}")
            trained = outcomes(record, universe.maps.sites)
            for shift in range(1, self.models):
                key = f"{name}/{shift}"
                ends = []
                for target in range(self.models):
                    ends.append(((target + shift) % self.models, target))
                yield from self._rows_of(key, name, universe.maps, trained, ends)
        for pair in self.pair_maps:
            yield from self._rows_of(
                pair.key, pair.method, pair.maps, pair.training, [pair.ends]
            )

    def _rows_of(
        self,
        key: str,
        method: str,
        maps: Aligner,
        trained: list[str | None],
        ends: Sequence[Ends],
    ) -> list[dict[str, Any]]:
        """The rows of maps between some models, at all sites of each.

        Args:
            key: of the errors.
            method: name of the maps.
            maps: of the pair alone, or of all models.
            trained: outcomes at its places.
            ends: source and target.
        """
        count = len(self.sites)
        places = []
        training = []
        for i, j in ends:
            for s, sites in enumerate(self.sites):
                about = {"site": self.names[s]}
                places.append(
                    Place(
                        "", self.members[i], self.members[j], sites[i], sites[j], about
                    )
                )
                outcome = trained[s]
                if method in self.spaces:  # of two maps, the worse
                    both = ({"training": trained[m * count + s]} for m in (i, j))
                    outcome = worst_of(both)["training"]
                training.append(outcome)
        return error_rows(
            places, method, maps, training, self._columns(key, method, len(places))
        )

    def _columns(self, key: str, method: str, places: int) -> dict[str, Any]:
        """The figures of a map at its places, by the column of the report."""
        errors = self._figures(key)
        columns: dict[str, Any] = {figure: errors[figure] for figure in FIGURES}
        if key in self.far_errors:
            beside = cast(FarErrors, self.far_errors[key]).compute()
            columns[FAR_COLUMNS[self.stream.far_rows]] = beside
        for column in RETRIEVAL_COLUMNS:
            columns[column] = self.retrieved[key][column]
        for column, trip in (("round_trip", "trip"), ("cycle", "cycle")):
            columns[column] = [None] * places
            if f"{method}/{trip}" in self.errors:
                columns[column] = self._figures(f"{method}/{trip}")["round_trip"]
        return columns

    def _figures(self, key: str) -> dict[str, Tensor]:
        return cast(MapErrors, self.errors[key]).compute()

    def _directions(self) -> Iterator[dict[str, Any]]:
        """For each site and direction of the space its variance, and what each model explains of it."""
        joint = JointMoments.of(self.embedded.compute(), self.models)
        variance, explained = directions(joint)
        for s, site in enumerate(self.names):
            for d in range(variance.shape[1]):
                row = {
                    "site": site,
                    "direction": d + 1,
                    "variance": float(variance[s, d]),
                }
                for m, model in enumerate(self.members):
                    row[model] = float(explained[m, s, d])
                yield row

    def _shared(self, groups: Tensor | None) -> Iterator[dict[str, Any]]:
        """For each model and site what the space holds of its states, and what the models share of them linearly."""
        space = self.spaces[NETWORK]
        held = torch.ones(self.models, len(self.sites))
        if HELD in self.errors:
            held = 1 - self._figures(HELD)["fvu"].unflatten(0, (self.models, -1))
        for s, site in enumerate(self.names):
            for m, model in enumerate(self.members):
                row = {
                    "site": site,
                    "model": model,
                    "width": self.widths[m],
                    "shared": space.d_y,
                }
                row["held"] = float(held[m, s])
                for g, name in enumerate(GROUPS):
                    row[name] = None if groups is None else float(groups[g, m, s])
                yield row

    def _curve(self, held: Tensor) -> Iterator[dict[str, Any]]:
        """The share of every model's variance in the directions that the models share most, for some numbers."""
        most = max(self.widths)
        numbers = {round(most ** (point / POINTS)) for point in range(POINTS + 1)}
        numbers.add(self.spaces[NETWORK].d_y)
        for s, site in enumerate(self.names):
            for number in sorted(numbers):
                row = {"site": site, "directions": number}
                for m, model in enumerate(self.members):
                    row[model] = float(held[m, s, number - 1])
                yield row


def _name(sites: Sequence[int]) -> Any:
    """What a report calls a site: its number, or those of all models."""
    if len(set(sites)) == 1:
        return sites[0]
    return ":".join(map(str, sites))


def _known(mapped: Tensor, back: Tensor | None = None) -> Way:
    """A map whose answer, and that of the map back, is known already."""
    if back is None:
        return Way(lambda _: mapped)
    return Way(lambda _: mapped, lambda _: back)


def _pair_maps(pairs: Sequence[tuple[Ends, StoredBank]]) -> Iterator[PairMap]:
    """Every map of banks between two models; one that is bijective in both directions."""
    for number, ((i, j), bank) in enumerate(pairs):
        for route, ends in ((FORWARD, (i, j)), (BACKWARD, (j, i))):
            for name, maps in bank.maps.get(route, {}).items():
                ways = {ends: Way(maps)}
                if route == FORWARD and maps.bijective:
                    ways[j, i] = Way(maps.inverse)
                training = outcomes(bank.training.get(f"{route}.{name}"), maps.sites)
                for (source, target), way in ways.items():
                    key = f"pair/{number}/{name}/{source}"
                    method = f"pairwise_{name}"
                    yield PairMap(key, method, maps, training, (source, target), way)


def between_members(
    against: Sequence[StoredBank],
    members: Sequence[Mapping[str, Any]],
    sites: Sequence[Sequence[int]],
) -> list[tuple[Ends, StoredBank]]:
    """Maps between two models of a universe, cut to its sites, with the numbers of their models.

    Args:
        against: of `train.py fit` or `fit_pairs`.
        members: the universe's models, as the `describe()` of its states has them.
        sites: of every model, for each place of the space.

    Raises:
        ValueError: one is of other models, or lacks a site.
    """
    banks = []
    for bank in against:
        models = bank.data["models"]
        if "x" in models:
            models = [models["x"], models["y"]]
        ends = []
        for model in models:
            ends += [n for n, member in enumerate(members) if same_model(model, member)]
        there = bank.pairs.get(FORWARD, [])
        wanted = [(of[ends[0]], of[ends[-1]]) for of in sites] if ends else []
        if len(ends) != 2 or not set(wanted) <= set(there):
            raise UserError(
                f"Expected `against` to name maps between two models of the universe at its sites {wanted}, but "
                f"{bank.path} is of {' and '.join(model['name'] for model in models)} at {there}."
            )
        places = [there.index(site) for site in wanted]
        banks.append(((ends[0], ends[1]), take_sites(bank, places)))
    return banks
