"""The LightningModules that fit a universe, and one more model to a universe."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from aligners.errors import UserError, check_known
from aligners.fitting.alignment import Alignment
from aligners.fitting.bank import FORWARD, StoredBank, build_aligner, describe_aligner, join_banks, refuse_other_models
from aligners.fitting.fits import AlignerFactory, Fit, seeded
from aligners.fitting.parts import join_records
from aligners.fitting.universe.joint import JointMoments, paired_rows
from aligners.fitting.universe.universe import CLOSED_UNIVERSES, NETWORK, Universe, fit_network
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.similarity.algebra.moments import Moments
from datamodules.rows.reading import PairedBatch
from datamodules.states import States


class UniverseAlignment(Alignment):
    """Fits one invertible map for each of k models into a space that all share, on the same rows.

    A step takes one pass of all maps into the space, and one of their inverses: see `Universe.loss`. Moments,
    optimiser, schedule, clipping and what happens to sites that diverge are those of `Alignment`.

    Args:
        network: the map of every model at every site; it has to be invertible. A state passes two of them: with half
            of the couplings that a lone network has by default, a map between two models is as deep as that.
        closed_form: linear universes to solve and measure beside it: procrustes, gcca.
        optimizer: as in `Alignment`. Matrices between couplings learn at a quarter of its rate.
        options: of `Alignment`, by their names; gradients are clipped for each map.

    Raises:
        ValueError: an option is unknown or out of its range.
    """

    final = "universe.safetensors"

    def __init__(
        self,
        network: AlignerFactory = lambda sites, d_x, d_y: INN(sites, d_x, d_y, couplings=4, start="procrustes"),
        closed_form: Sequence[str] = tuple(CLOSED_UNIVERSES),
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=2e-2, weight_decay=0.0, fused=True),
        **options: Any,
    ) -> None:
        super().__init__(aligners={NETWORK: network}, both_directions=False, optimizer=optimizer, **options)
        check_known(CLOSED_UNIVERSES, closed_form=closed_form)
        self.closed_form = list(closed_form)

    def made(self, sites: int, d_x: int, d_y: int) -> Iterator[Fit]:
        """Build the universes for this many places, k times as many as sites, and keep none."""
        models = len(self.stream.models)
        yield Fit(NETWORK, FORWARD, Universe(self.network(sites, d_x), models, fit_network))
        for name in self.closed_form:
            made, fit_maps = CLOSED_UNIVERSES[name]
            yield Fit(name, FORWARD, Universe(made(sites, d_x, d_y), models, fit_maps))

    def network(self, places: int, width: int) -> Aligner:
        """A bank of maps of the models, not yet fitted.

        Raises:
            ValueError: the maps are no bijections at this width.
        """
        maps = seeded(self.factories[NETWORK], self.seed, places, width, width)
        if not maps.bijective:
            raise UserError(f"A universe expects a bijective `network`, but {type(maps).__name__} is not. Use INN.")
        return maps

    def moment_rows(self, batch: PairedBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """The rows of all pairs of models."""
        return {"maps": paired_rows(batch.x, len(self.stream.models))}

    def rows_of(self, batch: PairedBatch) -> tuple[Tensor, Tensor]:
        """The rows of all models, twice; who predicts a text changes from one training step to the next."""
        for universe in self.universes().values():
            universe.turns = batch.text + (self.global_step if self.training else 0)
        return super().rows_of(batch)

    def means(self, fit: Fit) -> tuple[Tensor, Tensor]:
        """The mean of each model's states on the fitting rows, twice: they are source and target."""
        mean = JointMoments.of(cast(Moments, self.moments), len(self.stream.models)).mean.flatten(0, 1)
        return mean, mean

    def criteria(self) -> dict[str, Tensor]:
        """FVU of the last validation, the mean over the models at each of a site's places."""
        return {key: self.universes()[NETWORK].over_models(found) for key, found in super().criteria().items()}

    def universes(self) -> dict[str, Universe]:
        """The trained universe and the closed forms, by name."""
        return {fit.name: cast(Universe, fit.aligner) for fit in self.fits()}

    def stored(self) -> StoredBank:
        """Return the maps of all models as banks of k · S places, with what another process needs to use them."""
        bank = super().stored()
        bank.command = "universe"
        bank.maps = {FORWARD: {name: universe.maps for name, universe in self.universes().items()}}
        bank.pairs = {FORWARD: list(self.sites)}
        return bank


class Joining(Alignment):
    """Fits the bijection of one more model into the shared space of a universe, whose members stay as they are.

    It is one fit of two sides, both ways: x is the newcomer's state, y what a member makes of the same text in the
    shared space, row by row another member's, in turn.

    Args:
        options: of `Alignment`, by their names.

    Attributes:
        members: the universe, set before the fit.
    """

    final = ""  # the universe of all is written once it is measured

    def __init__(self, **options: Any) -> None:
        super().__init__(aligners=None, both_directions=False, **options)
        self.members: Universe | None = None

    def setup(self, stage: str) -> None:
        """Build the newcomer's maps, as the members' are; only its places count."""
        super().setup(stage)
        count = len(self.sites) // len(self.stream.models)
        self.sites, self.places = self.sites[-count:], self.places[-count:]

    def rows_of(self, batch: PairedBatch) -> tuple[Tensor, Tensor]:
        """The newcomer's states, and what a member makes of each row in the shared space, in turn."""
        members, rows = cast(Universe, self.members), torch.arange(batch.x.shape[1], device=batch.x.device)
        embedded = members.embed(batch.x[: -len(self.sites)].detach()).unflatten(0, (members.models, -1))
        return batch.x[-len(self.sites) :], embedded[rows % members.models, :, rows].movedim(0, 1).contiguous()

    def made(self, sites: int, d_x: int, d_y: int) -> Iterator[Fit]:
        """Build the newcomer's maps for the places of all models, and keep none."""
        members = cast(Universe, self.members)
        like = {**describe_aligner(members.maps), "sites": sites // (members.models + 1)}
        yield Fit(NETWORK, FORWARD, seeded(lambda *_: build_aligner(like), self.seed, like["sites"], d_x, d_y))

    def joined(self, stored: StoredBank) -> StoredBank:
        """The universe of all models, the newcomer last; its moments are not known.

        Args:
            stored: the universe of the members.
        """
        members, newcomer, key = stored.maps[FORWARD][NETWORK], self.fits()[0].aligner, f"{FORWARD}.{NETWORK}"
        records = [training[key] for training in (stored.training, self.training_record) if key in training]
        return replace(
            stored,
            maps={FORWARD: {NETWORK: join_banks([members, newcomer.to(next(members.parameters()).device)])}},
            pairs={FORWARD: [*stored.pairs[FORWARD], *self.sites]},
            data=self.data,
            data_config=self.data_config,
            moments=None,
            seen=self.stream.seen,
            training={key: join_records(records)} if len(records) == 2 else {},
        ).freeze()

    def refuse_other_members(self, stored: StoredBank, data: States) -> None:
        """Raise unless the run reads the universe's models at its sites on its texts, and a model that is not in it.

        Raises:
            ValueError: it does not.
        """
        described = data.describe()
        refuse_other_models(stored.data["models"], described["models"][:-1], str(stored.path))
        for name in ("sites", "component", "rows", "special_tokens"):
            if stored.data[name] != described[name]:
                raise UserError(
                    f"{stored.path} was fitted with `{name}` {stored.data[name]}, but `data.{name}` gives "
                    f"{described[name]}. Leave it out."
                )
        then, now = (about["text"]["hashes"] for about in (stored.data, described))
        if then != now:
            raise UserError(
                f"{stored.path} was fitted on other texts than `data.text` gives. The members' states of the same "
                "texts are what a newcomer is fitted to: leave `data.text` out."
            )
