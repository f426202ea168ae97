"""Every map of a universe measured on held-out texts, beside maps fitted pair by pair."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from aligners.datamodules.module import stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.read_rows import PairedBatch, Place, Plan
from aligners.errors import UserError
from aligners.fitting.bank_training import BankTraining, stored_of
from aligners.fitting.heldout_retrieval import RETRIEVAL_COLUMNS, HeldOutRows
from aligners.fitting.map_errors import FAR_COLUMNS, FarErrors, MapErrors, Way, error_rows
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
from aligners.fitting.universe.type_errors import TypeErrors
from aligners.fitting.universe.universe import CLOSED_UNIVERSES, NETWORK, Universe
from aligners.fitting.universe.universe_files import sites_of, universes_of
from aligners.maps.base import Aligner
from aligners.models.model_identity import same_model
from aligners.similarity.algebra.moments import Moments
from aligners.similarity.moment_metrics import MomentsMetric

FIGURES = ("mse", "relative_error", "fvu", "fvu_unseen")
HELD = "held"  # errors of the states that the shared part holds
GROUPS = ("all", "some", "one")  # whose directions a model's variance lies in
POINTS, ROWS = (
    24,
    4,
)  # of the curve; rows for each dimension of all models, of which fewer make any states agree
Ends = tuple[int, int]  # numbers of the models that a map is from and to


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
        self.spaces = universes_of(stored)
        self.universes = nn.ModuleDict(self.spaces)
        self.models, self.widths = (
            len(stored.data["models"]),
            next(iter(self.spaces.values())).widths,
        )
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}
        self.report_tables: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}  # closed forms that were refused, and why
        self.sites = sites_of(stored)
        self.pairs = between_members(against, stored.data["models"], self.sites)
        self.pair_maps = nn.ModuleList(
            a for _, b in self.pairs for maps in b.maps.values() for a in maps.values()
        )
        self.names = [
            sites[0] if len(set(sites)) == 1 else ":".join(map(str, sites)) for sites in self.sites
        ]

    def setup(self, stage: str) -> None:
        """Begin with no rows."""
        self.stream = stream_of(self.trainer, PairedActivations)
        self.stream.plan(Plan(measured=self.stored.seen))
        self.errors, self.far_errors = nn.ModuleDict(), nn.ModuleDict()
        width, shared = self.spaces[NETWORK].d_x, self.spaces[NETWORK].d_y
        places = len(all_pairs(self.models)) * len(self.sites)
        self.embedded = MomentsMetric(places, shared, shared).to(self.device)
        self.drawn = HeldOutRows(
            len(self.stream.reader.places()), width, width, seed=0, device=self.device
        )
        types, ids = self.stream.types("test"), self.stream.split("test").ids
        self.by_type = (
            None if types is None else TypeErrors(len(self.sites), types, ids, self.device)
        )

    def on_test_start(self) -> None:
        """Read the moments that the universe lacks after a model has joined it."""
        if self.stored.moments is None:
            moments = moments_of_states(
                self.stream, lambda batch: {"maps": paired_rows(batch.x, self.models)}
            )
            self.stored.moments = moments["maps"]
            self._refit()
        self.joint = JointMoments.of(self.stored.moments, self.models)
        self.means, self.variance = (
            part.to(self.device) for part in (self.joint.mean, self.joint.variance.flatten())
        )

    def _refit(self) -> None:
        """Solve the closed forms of all models, beside which a newcomer's maps show whether a refit would pay."""
        for name, (made, fit_maps) in CLOSED_UNIVERSES.items():
            places, width = self.spaces[NETWORK].sites, self.spaces[NETWORK].d_x
            space = Universe(made(places, width, width), self.models, fit_maps, self.widths)
            try:
                space.to(self.device).fit(cast(Moments, self.stored.moments))
            except UserError as error:  # with too few rows
                self.left_out[name] = str(error)
                continue
            self.spaces[name] = self.universes[name] = space.requires_grad_(False).eval()
            self.stored.maps[FORWARD][name] = space.maps

    # ------------------------------------------------------------------ the pass

    def test_step(self, batch: PairedBatch, batch_idx: int) -> None:
        """Add the errors of every map on one batch."""
        self.drawn.add(batch.x, batch.x, batch.text, batch.rows.place)
        for name, universe in self.spaces.items():
            embedded = universe.embed(batch.x)
            for shift in range(1, self.models):
                self._add(
                    f"{name}/{shift}",
                    Way(partial(_given, universe.predicted(embedded, shift))),
                    batch,
                )
            x, into = batch.x, embedded
            if (
                name == NETWORK and not universe.maps.bijective
            ):  # what the shared part holds comes back exactly
                x = universe.predicted(embedded, 0)
                self._add(HELD, Way(partial(_given, x)), batch)
                into = universe.embed(x)
            if name == NETWORK or universe.maps.bijective:
                self._trips(name, universe, batch, x, into)
            if name == NETWORK:
                self.embedded.update(*paired_rows(embedded, self.models))
                if self.by_type is not None:
                    left = (universe.from_mean(embedded) - batch.x).square().mean(
                        -1
                    ) / self.variance[:, None]
                    self.by_type.update(
                        left.unflatten(0, (self.models, -1)).mean(0), batch.text, batch.rows.place
                    )
        for key, _, ends, way in self._pair_ways():
            self._add(key, way, batch, ends=ends)
        if batch.counterpart is not None:
            self._add_beside(batch.counterpart)

    def _add_beside(self, batch: PairedBatch) -> None:
        """Add the errors on the rows that stand beside those that count: with far rows, or without them."""
        for name, universe in self.spaces.items():
            embedded = universe.embed(batch.x)
            for shift in range(1, self.models):
                mapped = universe.predicted(embedded, shift)
                self._far_errors(f"{name}/{shift}", self.means.flatten(0, 1)).update(
                    mapped, batch.x
                )
        by_model = batch.x.unflatten(0, (self.models, -1))
        for key, _, (i, j), way in self._pair_ways():
            x, y = by_model[i, ..., : self.widths[i]], by_model[j, ..., : self.widths[j]]
            self._far_errors(key, self.means[j, :, : self.widths[j]]).update(way(x), y)

    def _far_errors(self, key: str, mean: Tensor) -> FarErrors:
        if key not in self.far_errors:
            self.far_errors[key] = FarErrors(mean).to(self.device)
        return cast(FarErrors, self.far_errors[key])

    def _trips(
        self, name: str, universe: Universe, batch: PairedBatch, x: Tensor, embedded: Tensor
    ) -> None:
        """Into the space and back, and from a model over two others back to it."""
        over = universe.predicted(embedded, 1)
        for shift in (1, self.models - 2):
            over = universe.predicted(universe.embed(over), shift)
        for trip, end in (("trip", universe.predicted(embedded, 0)), ("cycle", over)):
            self._add(f"{name}/{trip}", Way(partial(_given, x), partial(_given, end)), batch, x)

    def _pair_ways(self) -> Iterator[tuple[str, tuple[str, str, StoredBank], Ends, Way]]:
        """Every map of the pairs' banks: its key; route, name and bank; the numbers of its models; and what maps."""
        for p, ((i, j), bank) in enumerate(self.pairs):
            for route, ends in ((FORWARD, (i, j)), (BACKWARD, (j, i))):
                for name, aligner in bank.maps.get(route, {}).items():
                    yield f"pair/{p}/{name}/{ends[0]}", (route, name, bank), ends, Way(aligner)
                    if route == FORWARD and aligner.bijective:
                        yield (
                            f"pair/{p}/{name}/{j}",
                            (route, name, bank),
                            (j, i),
                            Way(aligner.inverse),
                        )

    def _add(
        self,
        key: str,
        way: Way,
        batch: PairedBatch,
        x: Tensor | None = None,
        ends: Ends | None = None,
    ) -> None:
        """Add the errors of a map of all models' states, by default those of the batch, to themselves; or of two."""
        x = y = batch.x if x is None else x
        mean_x = mean_y = self.means.flatten(0, 1)
        widths = (
            torch.tensor(self.widths).repeat_interleave(len(self.sites)) if ends is None else None
        )
        if ends is not None:
            by_model, own = (
                batch.x.unflatten(0, (self.models, -1)),
                [(m, ..., slice(self.widths[m])) for m in ends],
            )
            (x, y), (mean_x, mean_y) = (
                [states[part] for part in own] for states in (by_model, self.means)
            )
        if key not in self.errors:
            self.errors[key] = MapErrors(mean_x, mean_y, widths).to(self.device)
        cast(MapErrors, self.errors[key]).update(way, x, y, batch.rows.unseen)

    # ------------------------------------------------------------------ what was found

    def on_test_epoch_end(self) -> None:
        """One row for each map, ordered pair and site; the directions of the space."""
        self.stream.reader.check.flush()
        self._retrieve()
        self.rows = list(self._rows())
        variance, explained = directions(JointMoments.of(self.embedded.compute(), self.models))
        table = [
            {"site": site, "direction": d + 1, "variance": float(variance[s, d])}
            | {
                model["name"]: float(explained[m, s, d])
                for m, model in enumerate(self.stored.data["models"])
            }
            for s, site in enumerate(self.names)
            for d in range(variance.shape[1])
        ]
        self.report_tables = {
            "directions": table,
            "shared": list(self._shared()),
            "curve": list(self._curve()),
        }
        self.report_tables["types"] = [] if self.by_type is None else self.by_type.table(self.names)
        self.meta = {**self.stream.describe(), "split": "test"}
        if self.left_out:
            self.meta["left_out"] = self.left_out

    def _shared(self) -> Iterator[dict[str, Any]]:
        """For each model and site what the space holds of its states, and what the models share of them linearly."""
        shared, groups = self.spaces[NETWORK].d_y, self._linear
        lost = (
            self._figures(HELD)["fvu"]
            if HELD in self.errors
            else torch.zeros(self.spaces[NETWORK].sites)
        )
        held = 1 - lost.unflatten(0, (self.models, -1))
        for s, site in enumerate(self.names):
            for m, model in enumerate(self.stored.data["models"]):
                shares = {
                    name: None if groups is None else float(groups[0][g, m, s])
                    for g, name in enumerate(GROUPS)
                }
                row = {
                    "site": site,
                    "model": model["name"],
                    "width": self.widths[m],
                    "shared": shared,
                }
                yield {**row, "held": float(held[m, s]), **shares}

    def _curve(self) -> Iterator[dict[str, Any]]:
        """The share of every model's variance in the directions that the models share most, for some numbers."""
        groups, names = self._linear, [model["name"] for model in self.stored.data["models"]]
        if groups is None:
            return
        most = max(self.widths)
        numbers = sorted(
            {*(round(most ** (p / POINTS)) for p in range(POINTS + 1)), self.spaces[NETWORK].d_y}
        )
        for s, site in enumerate(self.names):
            for number in numbers:
                held = {name: float(groups[1][m, s, number - 1]) for m, name in enumerate(names)}
                yield {"site": site, "directions": number, **held}

    @cached_property
    def _linear(self) -> tuple[Tensor, Tensor] | None:
        """As `shared_variance`; None with too few rows."""
        return shared_variance(self.joint) if self.joint.n > ROWS * sum(self.widths) else None

    def _retrieve(self) -> None:
        """Score every map by retrieval, on rows that were drawn from all ranks'."""
        x, self.retrieved = self.drawn.end(), dict[str, dict[str, Tensor]]()
        for name, universe in self.spaces.items():
            embedded = universe.embed(x)
            for shift in range(1, self.models):
                self.retrieved[f"{name}/{shift}"] = self.drawn.columns(
                    universe.predicted(embedded, shift)
                )
        sites = len(x) // self.models
        for key, _, (i, j), way in self._pair_ways():
            of_i, of_j = (slice(m * sites, (m + 1) * sites) for m in (i, j))
            mapped = way(x[of_i, :, : self.widths[i]])
            padded = torch.nn.functional.pad(mapped, (0, x.shape[-1] - mapped.shape[-1]))
            self.retrieved[key] = self.drawn.columns(padded, of_j)

    def _measured(
        self,
    ) -> Iterator[tuple[str, str, Aligner, list[str | None], list[tuple[int, int, int]]]]:
        """Every map: its key, method, bank and outcome of training, and source, target and site of its places."""
        sites = range(len(self.sites))
        for name, universe in self.spaces.items():
            trained = outcomes(self.stored.training.get(f"{FORWARD}.{name}"), universe.maps.sites)
            for shift in range(1, self.models):
                ends = [
                    ((t + shift) % self.models, t, site)
                    for t in range(self.models)
                    for site in sites
                ]
                both = [
                    (trained[i * len(sites) + site], trained[j * len(sites) + site])
                    for i, j, site in ends
                ]
                training = [
                    worst_of({"training": end} for end in pair)["training"] for pair in both
                ]
                yield f"{name}/{shift}", name, universe.maps, training, ends
        for key, (route, name, bank), (source, target), _ in self._pair_ways():
            maps = bank.maps[route][name]
            training = outcomes(bank.training.get(f"{route}.{name}"), maps.sites)
            yield (
                key,
                f"pairwise_{name}",
                maps,
                training,
                [(source, target, site) for site in sites],
            )

    def _rows(self) -> Iterator[dict[str, Any]]:
        """A row for each map, ordered pair of models and site."""
        names = [model["name"] for model in self.stored.data["models"]]
        for key, method, maps, training, ends in self._measured():
            places = [
                Place(
                    "",
                    names[i],
                    names[j],
                    self.sites[s][i],
                    self.sites[s][j],
                    {"site": self.names[s]},
                )
                for i, j, s in ends
            ]
            errors = self._figures(key)
            figures: dict[str, Any] = {figure: errors[figure] for figure in FIGURES}
            if key in self.far_errors:
                beside = cast(FarErrors, self.far_errors[key]).compute()
                figures[FAR_COLUMNS[self.stream.far_rows]] = beside
            figures |= {column: self.retrieved[key][column] for column in RETRIEVAL_COLUMNS}
            for column, trip in (("round_trip", f"{method}/trip"), ("cycle", f"{method}/cycle")):
                figures[column] = (
                    self._figures(trip)["round_trip"] if trip in self.errors else [None] * len(ends)
                )
            yield from error_rows(places, method, maps, training, figures)

    def _figures(self, key: str) -> dict[str, Tensor]:
        return cast(MapErrors, self.errors[key]).compute()


def _given(mapped: Tensor, _: Tensor) -> Tensor:
    return mapped


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
        there = bank.pairs.get(FORWARD, [])
        models = (
            [bank.data["models"][side] for side in "xy"]
            if "x" in bank.data["models"]
            else bank.data["models"]
        )
        ends = [
            n for model in models for n, member in enumerate(members) if same_model(model, member)
        ]
        wanted = [(of[ends[0]], of[ends[-1]]) for of in sites]
        if len(ends) != 2 or not set(wanted) <= set(there):
            raise UserError(
                f"Expected `against` to name maps between two models of the universe at its sites {wanted}, but "
                f"{bank.path} is of {' and '.join(model['name'] for model in models)} at {there}."
            )
        i, j = ends
        banks.append(((i, j), take_sites(bank, [there.index(site) for site in wanted])))
    return banks
