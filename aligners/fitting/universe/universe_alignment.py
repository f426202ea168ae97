"""The LightningModules that fit a universe, and one more model to a universe."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn.functional import pad

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.read_rows import PairedBatch
from aligners.datamodules.rows.token_pairs import row_keys
from aligners.errors import UserError, check_range
from aligners.fitting.alignment import Alignment
from aligners.fitting.fits import AlignerFactory, Fit, seeded
from aligners.fitting.saved_bank import (
    FORWARD,
    StoredBank,
    build_aligner,
    join_banks,
    join_records,
    kind_of,
    refuse_other_models,
)
from aligners.fitting.steps import Schedule
from aligners.fitting.universe.joint import JointMoments, paired_rows
from aligners.fitting.universe.shared_part import SharedPart, plain_kind
from aligners.fitting.universe.through import TwoLinear
from aligners.fitting.universe.universe import LINEAR, NETWORK, RIVALS, Universe
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.similarity.algebra.moments import Moments

COUPLINGS = 4  # couplings of the default network
HIDDEN = 3  # width of a coupling's hidden layer, in widths of the states
NOBODY = torch.iinfo(torch.int64).max  # the turn of a row that is only padding
PARTS, FEWEST_ROWS = 2, 96  # steps per batch, each on no fewer rows than that


class UniverseAlignment(Alignment):
    """Fits one invertible map for each of k models, on the same rows, into a space that all models share.

    A step takes one pass of all maps into the space, and one of their inverses: see `Universe.loss`. Moments,
    optimiser, schedule, clipping and the treatment of sites that diverge are those of `Alignment`.

    Args:
        network: the map of every model at every site; it has to be invertible. A state passes through two of them.
            Default: an INN with half as many couplings as usual, so that a map between two models is as deep as usual.
        closed_form: whether to solve and measure a linear universe (MAXVAR, `gcca` in reports) too. States of narrower
            models are then padded with zeros.
        shared: m, the number of coordinates that the models share; at most, and by default, the smallest width. The
            remaining coordinates of a wider model are its own: see `SharedPart`.
        optimizer: as in `Alignment`. Matrices between couplings learn at a quarter of its rate. Without weight decay
            inverses steepen in long runs, and single rows of unseen types are thrown far off.
        schedule: as in `Alignment`, with another default.
        averaging: as in `Alignment`.
        options: of `Alignment`, by their names; gradients are clipped for each map.

    Raises:
        ValueError: an option is out of its range.
    """

    final = "universe.safetensors"

    def __init__(
        self,
        network: AlignerFactory | None = None,
        closed_form: bool = True,
        shared: int | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(
            p, lr=2e-2, weight_decay=0.1, fused=True
        ),
        schedule: Schedule = "one_cycle",
        averaging: bool = False,
        **options: Any,
    ) -> None:
        check_range(least=1, shared=shared)
        super().__init__(
            aligners={NETWORK: network or _default},
            both_directions=False,
            optimizer=optimizer,
            schedule=schedule,
            averaging=averaging,
            **options,
        )
        self.closed_form = closed_form
        self.shared = shared

    def made(self, sites: int, d_x: int, d_y: int) -> Iterator[Fit]:
        """Build the universes for this many places, k times as many as sites, without keeping them."""
        widths = [model.width for model in self.stream.frozen]
        yield Fit(NETWORK, FORWARD, self.universe(sites, widths))
        if self.closed_form:
            maps = TwoLinear(sites, d_x, d_y)
            linear = Universe(maps, len(widths), widths)
            yield Fit(LINEAR, FORWARD, linear)

    def universe(self, places: int, widths: Sequence[int]) -> Universe:
        """Build the universe to train, not yet fitted; see `network`."""
        maps = self.network(places, widths)
        return Universe(maps, len(widths), widths)

    def network(self, places: int, widths: Sequence[int]) -> Aligner:
        """Build a bank of maps of the models, not yet fitted.

        Args:
            places: number of places, the same number for each model.
            widths: of the models.

        Raises:
            ValueError: the maps are not bijections, or more coordinates are to be shared than a model has.
        """
        sites = places // len(widths)
        banks = {}
        for width, models in Counter(widths).items():
            count = sites * models
            maps = seeded(self.factories[NETWORK], self.seed, count, width, width)
            if not maps.bijective:
                raise UserError(
                    f"A universe expects a bijective `network`, but {type(maps).__name__} is not. Use INN."
                )
            banks[width] = maps
        shared = self.shared or min(widths)
        if set(widths) == {shared}:
            return banks[shared]
        return SharedPart.of(banks, widths, shared)

    # ------------------------------------------------------------------ rows

    def moment_rows(self, batch: PairedBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the rows of all pairs of models."""
        models = len(self.stream.models)
        return {"maps": paired_rows(batch.x, models)}

    def rows_of(self, batch: PairedBatch) -> tuple[Tensor, Tensor]:
        """Return the rows of all models, twice."""
        turns = row_keys(0, batch.text, batch.rows.place)
        self._take_turns(turns)
        return super().rows_of(batch)

    def parts_of(self, rows: float | None) -> int:
        """Return more parts than usual: networks that learn from each other need more, smaller steps."""
        if rows is None:
            return 1
        most = int(rows // FEWEST_ROWS)
        return min(PARTS, max(1, most))

    def part_of(self, batch: PairedBatch, part: int) -> tuple[Tensor, Tensor]:
        """Return every n-th row of a text, for all models, twice; who predicts a row is drawn anew in every step."""
        place = batch.rows.place
        chosen = (batch.text + place) % self.parts == part
        rows = chosen.nonzero().squeeze(1)
        step = 1 + self.global_step
        turns = row_keys(step, batch.text[rows], place[rows])
        x = batch.x[:, rows]
        y = batch.y[:, rows]
        self._take_turns(turns)
        universe = self.universes()[NETWORK]
        universe.rivals = self._rivals(turns, y)
        return x, y

    def _rivals(self, turns: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the turns and states of the rows of all ranks with the smallest turns."""
        turns, y = _first_rivals(turns, y)
        if self.trainer.world_size == 1:
            return turns, y
        missing = RIVALS - len(turns)  # each rank must gather equally many
        nobody = turns.new_full((missing,), NOBODY)
        turns = torch.cat([turns, nobody])
        y = pad(y, (0, 0, 0, missing))
        all_turns = cast(Tensor, self.all_gather(turns))
        all_y = cast(Tensor, self.all_gather(y))
        by_place = all_y.movedim(0, 1)
        turns, y = _first_rivals(all_turns.flatten(), by_place.flatten(1, 2))
        there = turns < NOBODY
        return turns[there], y[:, there]

    def _take_turns(self, turns: Tensor) -> None:
        for universe in self.universes().values():
            universe.turns = turns

    # ------------------------------------------------------------------ what an `Alignment` asks for

    def means(self, fit: Fit) -> tuple[Tensor, Tensor]:
        """Return the mean of each model's states on the fitting rows, twice: they are source and target."""
        moments = cast(Moments, self.moments)
        models = len(self.stream.models)
        joint = JointMoments.of(moments, models)
        mean = joint.mean.flatten(0, 1)
        return mean, mean

    def criteria(self) -> dict[str, Tensor]:
        """Return the FVU of the last validation: at each of a site's places, the mean over the models."""
        universe = self.universes()[NETWORK]
        of_places = super().criteria()
        means = {}
        for key, found in of_places.items():
            means[key] = universe.over_models(found)
        return means

    def universes(self) -> dict[str, Universe]:
        """Return the trained universe and the linear one, by name."""
        found = {}
        for fit in self.fits():
            found[fit.name] = cast(Universe, fit.aligner)
        return found

    def stored(self) -> StoredBank:
        """Return the maps of all models as banks of k · S places, with what another process needs to use them."""
        bank = super().stored()
        bank.command = "universe"
        maps = {}
        for name, universe in self.universes().items():
            maps[name] = universe.maps
        bank.maps = {FORWARD: maps}
        bank.pairs = {FORWARD: list(self.sites)}
        return bank


def _default(sites: int, d_x: int, d_y: int) -> INN:
    return INN(sites, d_x, d_y, couplings=COUPLINGS, hidden=HIDDEN * d_x)


def _first_rivals(turns: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = turns.argsort()[:RIVALS]
    return turns[first], y[:, first]


class Joining(Alignment):
    """Fits the bijection of one more model into the shared space of a universe, whose members stay unchanged.

    This is an ordinary fit in both directions: x is the newcomer's state, and y is the same row of a member in the
    shared space; the members take turns, row by row.

    Args:
        options: of `Alignment`, by their names.

    Attributes:
        members: the universe, set before the fit.
    """

    final = ""  # the universe of all models is written once it is measured
    members: Universe

    def __init__(self, **options: Any) -> None:
        super().__init__(aligners=None, both_directions=False, **options)

    def setup(self, stage: str) -> None:
        """Build the newcomer's maps like the members'; only its places count."""
        super().setup(stage)
        count = len(self.sites) // len(self.stream.models)
        self.sites = self.sites[-count:]
        self.places = self.places[-count:]

    def rows_of(self, batch: PairedBatch) -> tuple[Tensor, Tensor]:
        """Return the newcomer's states, and each row of one member in the shared space, members in turn."""
        members = self.members
        count = len(self.sites)
        of_members = batch.x[:-count, :, : members.d_x].detach()
        embedded = members.embed(of_members)
        models = members.models
        by_model = embedded.unflatten(0, (models, -1))
        rows = torch.arange(embedded.shape[1], device=batch.x.device)
        y = by_model[rows % models, :, rows]
        x = batch.x[-count:, :, : self.width]
        return x, y.movedim(0, 1).contiguous()

    @property
    def width(self) -> int:
        """The width of the newcomer."""
        return self.stream.frozen[-1].width

    def made(self, sites: int, d_x: int, d_y: int) -> Iterator[Fit]:
        """Build the newcomer's maps for the places of all models, without keeping them."""
        members = self.members
        width = self.width
        kind = kind_like(members.maps, width)

        def build(sites: int, d_x: int, d_y: int) -> Aligner:
            return build_aligner({**kind, "sites": sites, "d_x": d_x, "d_y": d_y})

        places = sites // (members.models + 1)
        newcomer = seeded(build, self.seed, places, width, width)
        if width != members.d_y:
            newcomer = SharedPart.of({width: newcomer}, [width], members.d_y)
        yield Fit(NETWORK, FORWARD, newcomer)

    def joined(self, stored: StoredBank) -> StoredBank:
        """Return the universe of all models, the newcomer last; its moments are unknown.

        Args:
            stored: the universe of the members.
        """
        members = stored.maps[FORWARD][NETWORK]
        device = next(members.parameters()).device
        newcomer = self.fits()[0].aligner.to(device)
        maps = _with(members, newcomer)
        sites = [*stored.pairs[FORWARD], *self.sites]
        key = f"{FORWARD}.{NETWORK}"
        training = {}
        if key in stored.training and key in self.training_record:
            records = [stored.training[key], self.training_record[key]]
            training[key] = join_records(records)
        joined = replace(
            stored,
            maps={FORWARD: {NETWORK: maps}},
            pairs={FORWARD: sites},
            data=self.data,
            data_config=self.data_config,
            moments=None,
            seen=self.stream.seen,
            training=training,
        )
        return joined.freeze()

    def refuse_narrow(self, widths: Sequence[int]) -> None:
        """Raise if the newcomer, the last model, is narrower than what the members share.

        Args:
            widths: widths of all models.

        Raises:
            ValueError: the newcomer is narrower.
        """
        shared = self.members.d_y
        width = widths[-1]
        if width < shared:
            raise UserError(
                f"Expected a model of at least the width {shared}, which the members share, but the newcomer has "
                f"{width}. Fit a universe of all with `--model.shared {width}`."
            )

    def refuse_other_members(self, stored: StoredBank, data: PairedActivations) -> None:
        """Raise unless the run reads the universe's models on its texts, and a model that is not in it.

        Raises:
            ValueError: the run reads other models or texts, or a model that is in the universe.
        """
        then = stored.data
        now = data.describe()
        *members, _ = now["models"]
        refuse_other_models(then["models"], members, str(stored.path))
        for name in ("component", "rows", "special_tokens"):
            if then[name] != now[name]:
                raise UserError(
                    f"{stored.path} was fitted with `{name}` {then[name]}, but `data.{name}` gives {now[name]}. Leave "
                    "it out."
                )
        held_out = then["text"]["hashes"]["test"]
        if held_out != now["text"]["hashes"]["test"]:
            raise UserError(
                f"{stored.path} holds out other texts than `data.text` gives. Leave `data.text` out, or name the same "
                "source and fewer of its texts for fitting: `--data.text.max_texts`."
            )


def kind_like(maps: Aligner, width: int) -> dict[str, Any]:
    """Return class and options of bijections of a width, like those of a universe.

    At a width that no member has, hidden layers have their default size.

    Args:
        maps: of the universe.
        width: width of a model, in the universe or not.
    """
    kinds = {str(maps.d_x): kind_of(maps)}
    if isinstance(maps, SharedPart):
        kinds = maps.networks
    if str(width) in kinds:
        return plain_kind(kinds[str(width)])
    first, *_ = kinds.values()
    kind = plain_kind(first)
    kind["options"].pop("hidden", None)
    return kind


def _with(members: Aligner, newcomer: Aligner) -> Aligner:
    """Join the maps of a universe and those of one more model."""
    banks = [members, newcomer]
    if SharedPart not in map(type, banks):
        return join_banks(banks)
    parts = []
    for bank in banks:
        if not isinstance(bank, SharedPart):
            width = bank.d_x
            models = bank.sites // newcomer.sites
            bank = SharedPart.of({width: bank}, [width] * models, bank.d_y)
        parts.append(bank)
    return SharedPart.joined(parts)
