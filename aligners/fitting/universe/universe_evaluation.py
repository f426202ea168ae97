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
    Row,
    TypeErrors,
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
from aligners.fitting.universe.universe import (
    LINEAR,
    NETWORK,
    Universe,
    sites_of,
    universes_of,
)
from aligners.maps.base import Aligner
from aligners.models.model_identity import same_model
from aligners.similarity.algebra.moments import Moments, MomentsMetric

FIGURES = ("mse", "relative_error", "fvu", "fvu_unseen")
HELD = "held"  # key of the errors of what the shared part holds of the states
# By which models a direction is shared in which a part of a model's variance lies.
GROUPS = ("all", "some", "one")
POINTS = 24  # of the curve of shared directions
# Fewest rows for each dimension of all models together: with fewer, any states agree.
ROWS = 4
Ends = tuple[int, int]  # numbers of the models that a map leads from and to


class PairMap(NamedTuple):
    """A map that was fitted to two models alone, in one direction.

    Attributes:
        key: key of its errors.
        method: its name in reports.
        maps: the bank that it is part of.
        training: its outcome at each site.
        ends: the models that it leads from and to.
        way: the map itself, on the models' own widths.
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
        rows: rows of the report, one for each map, ordered pair of models and site.
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
        described = stored.data["models"]
        self.members = [model["name"] for model in described]
        self.models = len(self.members)
        self.spaces = universes_of(stored)
        self.universes = nn.ModuleDict(self.spaces)
        self.widths = self.spaces[NETWORK].widths
        self.sites = sites_of(stored)
        self.names = list(map(_name, self.sites))
        pairs = between_members(against, described, self.sites)
        self.pair_maps = list(_pair_maps(pairs))
        self.pair_banks = nn.ModuleList(pair.maps for pair in self.pair_maps)
        self.rows: list[Row] = []
        self.meta: Row = {}
        self.report_tables: Row = {}
        self.left_out: dict[str, str] = {}  # closed forms that were refused, and why

    def setup(self, stage: str) -> None:
        """Begin with no rows."""
        self.stream = stream_of(self.trainer, PairedActivations)
        self.stream.plan(Plan(measured=self.stored.seen))
        self.errors = nn.ModuleDict()
        self.far_errors = nn.ModuleDict()
        space = self.spaces[NETWORK]
        width = space.d_x
        sites = len(self.sites)
        places = len(all_pairs(self.models)) * sites
        embedded = MomentsMetric(places, space.d_y, space.d_y)
        self.embedded = embedded.to(self.device)
        self.drawn = HeldOutRows(space.sites, width, width, seed=0, device=self.device)
        self.by_type: TypeErrors | None = None
        types = self.stream.types("test")
        if types is not None:
            ids = self.stream.split("test").ids
            self.by_type = TypeErrors(sites, types, ids, self.device)

    def on_test_start(self) -> None:
        """Prepare the sums; read the moments, too, if a model has joined the universe, which then lacks them."""
        if self.stored.moments is None:
            moments = moments_of_states(self.stream, self._paired)
            self.stored.moments = moments["maps"]
            self._refit()
        self.joint = joint = JointMoments.of(self.stored.moments, self.models)
        self.means = joint.mean.to(self.device)
        self.variance = joint.variance.flatten().to(self.device)
        self._prepare_errors()

    def _prepare_errors(self) -> None:
        """Sums of the errors of every map, by its key."""
        for name, universe in self.spaces.items():
            for shift in range(1, self.models):
                self.errors[f"{name}/{shift}"] = self._errors_of_all()
            # closed forms that are bijective come from files of earlier versions
            if name == NETWORK or universe.maps.bijective:
                self.errors[f"{name}/trip"] = self._errors_of_all()
                self.errors[f"{name}/cycle"] = self._errors_of_all()
        if not self.spaces[NETWORK].maps.bijective:
            self.errors[HELD] = self._errors_of_all()
        for pair in self.pair_maps:
            source, target = self._between(pair, self.means)
            self.errors[pair.key] = MapErrors(source, target)
        self.errors.to(self.device)

    def _paired(self, batch: PairedBatch) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"maps": paired_rows(batch.x, self.models)}

    def _errors_of_all(self) -> MapErrors:
        """Errors of maps from the states of all models to those of all models."""
        means = self.means.flatten(0, 1)
        by_model = torch.tensor(self.widths)
        widths = by_model.repeat_interleave(len(self.sites))
        return MapErrors(means, means, widths)

    def _between(self, pair: PairMap, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of values (k, ..., d), those of the two models of a map, on their own widths."""
        i, j = pair.ends
        width_x = self.widths[i]
        width_y = self.widths[j]
        source = values[i, ..., :width_x]
        target = values[j, ..., :width_y]
        return source, target

    def _refit(self) -> None:
        """Solve the linear universe of all models, beside which a newcomer's maps show whether a refit would pay."""
        network = self.spaces[NETWORK]
        width = network.d_x
        maps = TwoLinear(network.sites, width, width)
        linear = Universe(maps, self.models, self.widths)
        linear.to(self.device)
        moments = cast(Moments, self.stored.moments)
        try:
            linear.fit(moments)
        except UserError as error:  # with too few rows
            self.left_out[LINEAR] = str(error)
            return
        linear.requires_grad_(False).eval()
        self.spaces[LINEAR] = linear
        self.universes[LINEAR] = linear
        self.stored.maps[FORWARD][LINEAR] = maps

    # ------------------------------------------------------------------ the pass

    def test_step(self, batch: PairedBatch, batch_idx: int) -> None:
        """Add the errors of every map on one batch."""
        states = batch.x
        rows = batch.rows
        self.drawn.add(states, states, batch.text, rows.place)
        for key, way, x, y in self._maps_on(states):
            errors = self._errors(key)
            errors.update(way, x, y, rows.unseen)
        for name, universe in self.spaces.items():
            if f"{name}/trip" in self.errors:
                self._add_trips(name, universe, states)
        self._add_to_space(batch)
        if batch.counterpart is not None:
            self._add_beside(batch.counterpart)

    def _maps_on(self, states: Tensor) -> Iterator[tuple[str, Way, Tensor, Tensor]]:
        """For every map its key, itself, and what it maps and should reach of states (k · S, N, d) of all models."""
        for name, universe in self.spaces.items():
            embedded = universe.embed(states)
            for shift in range(1, self.models):
                mapped = universe.predicted(embedded, shift)
                yield f"{name}/{shift}", _known(mapped), states, states
        by_model = states.unflatten(0, (self.models, -1))
        for pair in self.pair_maps:
            x, y = self._between(pair, by_model)
            yield pair.key, pair.way, x, y

    def _errors(self, key: str) -> MapErrors:
        return cast(MapErrors, self.errors[key])

    def _add_trips(self, name: str, universe: Universe, x: Tensor) -> None:
        """Add the trip into the space and back, and that from a model over two others back to it.

        Where the models share a part of their coordinates, what this part holds of the states makes the trips: it comes
        back exactly.
        """
        embedded = universe.embed(x)
        if name == NETWORK and HELD in self.errors:
            held = universe.predicted(embedded, 0)
            self._errors(HELD).update(_known(held), x, x)
            x = held
            embedded = universe.embed(x)
        back = universe.predicted(embedded, 0)
        over = universe.predicted(embedded, 1)
        for shift in (1, self.models - 2):
            embedded = universe.embed(over)
            over = universe.predicted(embedded, shift)
        trip = self._errors(f"{name}/trip")
        trip.update(_known(x, back), x, x)
        cycle = self._errors(f"{name}/cycle")
        cycle.update(_known(x, over), x, x)

    def _add_to_space(self, batch: PairedBatch) -> None:
        """Add what the directions of the space, and the types that are shared least, are found from."""
        universe = self.spaces[NETWORK]
        embedded = universe.embed(batch.x)
        x, y = paired_rows(embedded, self.models)
        self.embedded.update(x, y)
        if self.by_type is None:
            return
        gap = universe.from_mean(embedded) - batch.x
        errors = gap.square().mean(-1)
        relative = errors / self.variance[:, None]
        by_model = relative.unflatten(0, (self.models, -1))
        mean = by_model.mean(0)
        self.by_type.update(mean, batch.text, batch.rows.place)

    def _add_beside(self, batch: PairedBatch) -> None:
        """Add the errors on the rows that stand beside those that count: with far rows, or without them."""
        for key, way, x, y in self._maps_on(batch.x):
            if key not in self.far_errors:
                mean = self._errors(key).mean_y.squeeze(1)
                errors = FarErrors(mean)
                self.far_errors[key] = errors.to(self.device)
            mapped = way(x)
            self._far_errors(key).update(mapped, y)

    def _far_errors(self, key: str) -> FarErrors:
        return cast(FarErrors, self.far_errors[key])

    # ------------------------------------------------------------------ what was found

    def on_test_epoch_end(self) -> None:
        """Make a row for each map, ordered pair and site, and the tables on the space."""
        self.stream.reader.check.flush()
        self._retrieve()
        self.rows = list(self._rows())
        groups = held = None
        enough = ROWS * sum(self.widths)
        if self.joint.n > enough:
            groups, held = shared_variance(self.joint)
        types = []
        if self.by_type is not None:
            types = self.by_type.table(self.names)
        self.report_tables = {
            "directions": list(self._directions()),
            "shared": list(self._shared(groups)),
            "curve": list(self._curve(held)),
            "types": types,
        }
        self.meta = self.stream.describe() | {"split": "test"}
        if self.left_out:
            self.meta["left_out"] = self.left_out

    def _retrieve(self) -> None:
        """Score every map by retrieval, on rows that were drawn from all ranks'."""
        count = len(self.sites)
        targets = {}
        for pair in self.pair_maps:
            _, j = pair.ends
            start = j * count
            targets[pair.key] = slice(start, start + count)
        drawn = self.drawn.end()
        width = drawn.shape[-1]
        everywhere = slice(None)
        self.retrieved: dict[str, dict[str, Tensor]] = {}
        for key, way, x, _ in self._maps_on(drawn):
            mapped = way(x)
            missing = width - mapped.shape[-1]
            mapped = pad(mapped, (0, missing))
            places = targets.get(key, everywhere)
            self.retrieved[key] = self.drawn.columns(mapped, places)

    def _rows(self) -> Iterator[Row]:
        """A row for each map, ordered pair of models and site."""
        for name, universe in self.spaces.items():
            for shift in range(1, self.models):
                ends = []
                for target in range(self.models):
                    source = (target + shift) % self.models
                    ends.append((source, target))
                training = self._outcomes(name, universe, ends)
                key = f"{name}/{shift}"
                yield from self._rows_of(key, name, universe.maps, ends, training)
        for pair in self.pair_maps:
            ends = [pair.ends]
            yield from self._rows_of(
                pair.key, pair.method, pair.maps, ends, pair.training
            )

    def _outcomes(
        self, name: str, universe: Universe, ends: Sequence[Ends]
    ) -> list[str | None]:
        """The outcomes of training of maps between some models of a universe: of two at a site, the worse."""
        record = self.stored.training.get(f"{FORWARD}.{name}")
        trained = outcomes(record, universe.maps.sites)
        count = len(self.sites)
        found = []
        for i, j in ends:
            for s in range(count):
                into = {"training": trained[i * count + s]}
                out_of = {"training": trained[j * count + s]}
                worse = worst_of([into, out_of])
                found.append(worse["training"])
        return found

    def _rows_of(
        self,
        key: str,
        method: str,
        maps: Aligner,
        ends: Sequence[Ends],
        training: Sequence[str | None],
    ) -> list[Row]:
        """The rows of maps between some models, at all sites of each."""
        places = []
        for i, j in ends:
            for name, sites in zip(self.names, self.sites, strict=True):
                place = Place(
                    name="",
                    model_x=self.members[i],
                    model_y=self.members[j],
                    site_x=sites[i],
                    site_y=sites[j],
                    about={"site": name},
                )
                places.append(place)
        columns = self._columns(key, method, len(places))
        return error_rows(places, method, maps, training, columns)

    def _columns(self, key: str, method: str, places: int) -> Row:
        """The figures of a map at its places, by the column of the report."""
        errors = self._errors(key).compute()
        columns: Row = {figure: errors[figure] for figure in FIGURES}
        if key in self.far_errors:
            column = FAR_COLUMNS[self.stream.far_rows]
            columns[column] = self._far_errors(key).compute()
        for column in RETRIEVAL_COLUMNS:
            columns[column] = self.retrieved[key][column]
        for column, trip in (("round_trip", "trip"), ("cycle", "cycle")):
            columns[column] = [None] * places
            trip = f"{method}/{trip}"
            if trip in self.errors:
                columns[column] = self._errors(trip).compute()["round_trip"]
        return columns

    def _directions(self) -> Iterator[Row]:
        """For each site and direction of the space its variance, and what each model explains of it."""
        moments = self.embedded.compute()
        joint = JointMoments.of(moments, self.models)
        variance, explained = directions(joint)
        for s, site in enumerate(self.names):
            shares = explained[:, s].T.tolist()
            for d, of_models in enumerate(shares):
                row = {"site": site, "direction": d + 1}
                row["variance"] = float(variance[s, d])
                row |= dict(zip(self.members, of_models, strict=True))
                yield row

    def _shared(self, groups: Tensor | None) -> Iterator[Row]:
        """For each model and site what the space holds of its states, and what the models share of them linearly."""
        space = self.spaces[NETWORK]
        held = torch.ones(self.models, len(self.sites))
        if HELD in self.errors:
            fvu = self._errors(HELD).compute()["fvu"]
            held = 1 - fvu.unflatten(0, (self.models, -1))
        for s, site in enumerate(self.names):
            for m, model in enumerate(self.members):
                row = {"site": site, "model": model}
                row["width"] = self.widths[m]
                row["shared"] = space.d_y
                row["held"] = float(held[m, s])
                row |= dict.fromkeys(GROUPS)
                if groups is not None:
                    shares = groups[:, m, s].tolist()
                    row |= dict(zip(GROUPS, shares, strict=True))
                yield row

    def _curve(self, held: Tensor | None) -> Iterator[Row]:
        """The share of every model's variance in the directions that the models share most, for some numbers."""
        if held is None:
            return
        most = max(self.widths)
        numbers = {self.spaces[NETWORK].d_y}
        for point in range(POINTS + 1):
            spaced = most ** (point / POINTS)
            numbers.add(round(spaced))
        for s, site in enumerate(self.names):
            for number in sorted(numbers):
                shares = held[:, s, number - 1].tolist()
                row = {"site": site, "directions": number}
                row |= dict(zip(self.members, shares, strict=True))
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
    for number, (ends, bank) in enumerate(pairs):
        i, j = ends
        back = j, i
        ends_of = {FORWARD: ends, BACKWARD: back}
        for route, ends in ends_of.items():
            banks = bank.maps.get(route, {})
            for name, maps in banks.items():
                record = bank.training.get(f"{route}.{name}")
                training = outcomes(record, maps.sites)
                ways = {ends: Way(maps)}
                if route == FORWARD and maps.bijective:
                    ways[back] = Way(maps.inverse)
                method = f"pairwise_{name}"
                for of_way, way in ways.items():
                    key = f"pair/{number}/{name}/{of_way[0]}"
                    yield PairMap(key, method, maps, training, of_way, way)


def between_members(
    against: Sequence[StoredBank],
    members: Sequence[Mapping[str, Any]],
    sites: Sequence[Sequence[int]],
) -> list[tuple[Ends, StoredBank]]:
    """Maps between two models of a universe, cut to its sites, with the numbers of their models.

    Args:
        against: of `train.py fit` or `fit_pairs`.
        members: the universe's models, as the `describe()` of its states has them.
        sites: sites of every model, for each place of the space.

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
            for n, member in enumerate(members):
                if same_model(model, member):
                    ends.append(n)

        there = bank.pairs.get(FORWARD, [])
        wanted = []
        if ends:
            i, j = ends[0], ends[-1]
            wanted = [(of[i], of[j]) for of in sites]
        if len(ends) != 2 or not set(wanted) <= set(there):
            raise UserError(
                f"Expected `against` to name maps between two models of the universe at its sites {wanted}, but "
                f"{bank.path} is of {' and '.join(model['name'] for model in models)} at {there}."
            )
        places = [there.index(site) for site in wanted]
        taken = take_sites(bank, places)
        banks.append(((i, j), taken))
    return banks
