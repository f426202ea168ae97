"""The LightningModule that fits a universe, and the file that it leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from aligners.fitting.alignment import Alignment
from aligners.fitting.fits import AlignerFactory, Fit, seeded
from aligners.fitting.storage.bank import FORWARD, StoredBank
from aligners.fitting.universe.joint import paired_rows
from aligners.fitting.universe.universe import CLOSED_UNIVERSES, NETWORK, Universe, fit_network
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.similarity.algebra.moments import Moments
from datamodules.rows.reading import PairedBatch
from datamodules.universe import UniverseStates

__all__ = ["UniverseAlignment"]


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

    def __init__(
        self,
        network: AlignerFactory = lambda sites, d_x, d_y: INN(sites, d_x, d_y, couplings=4, start="procrustes"),
        closed_form: Sequence[str] = tuple(CLOSED_UNIVERSES),
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=2e-2, weight_decay=0.0, fused=True),
        **options: Any,
    ) -> None:
        super().__init__(aligners={NETWORK: network}, both_directions=False, optimizer=optimizer, **options)
        unknown = [name for name in closed_form if name not in CLOSED_UNIVERSES]
        if unknown:
            raise ValueError(
                f"Expected `closed_form` out of {', '.join(CLOSED_UNIVERSES)}, but got {', '.join(unknown)}."
            )
        self.closed_form = list(closed_form)

    @property
    def _models(self) -> int:
        return len(cast(UniverseStates, self._stream).models)

    def made(self, sites: int, d_x: int, d_y: int) -> Iterator[Fit]:
        """Build the universes for this many places, k times as many as sites, and keep none."""
        models = self._models
        yield Fit(NETWORK, "forward", Universe(self._network(sites, d_x), models, fit_network))
        for name in self.closed_form:
            made, fit_maps = CLOSED_UNIVERSES[name]
            yield Fit(name, "forward", Universe(made(sites, d_x, d_y), models, fit_maps))

    def check(self, width: int) -> None:
        """Raise unless the network is a bijection at this width.

        Raises:
            ValueError: it is none.
        """
        self._network(1, width)

    def _network(self, places: int, width: int) -> Aligner:
        maps = seeded(self.factories[NETWORK], self.seed, places, width, width)
        if not maps.bijective:
            raise ValueError(f"A universe expects a bijective `network`, but {type(maps).__name__} is none. Use INN.")
        return maps

    def _read(self, texts: Any) -> dict[str, tuple[Tensor, Tensor]]:
        states, _ = super()._read(texts)["maps"]
        return {"maps": paired_rows(states, self._models)}

    def training_step(self, batch: PairedBatch, batch_idx: int) -> None:
        """Take a step; who predicts a text changes from step to step."""
        self._take_turns(batch, self.global_step)
        super().training_step(batch, batch_idx)

    def validation_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Errors of every universe on one batch."""
        self._take_turns(batch, 0)
        super().validation_step(batch, batch_idx, dataloader_idx)

    def _take_turns(self, batch: PairedBatch, step: int) -> None:
        for universe in self.universes().values():
            universe.turns = batch.text + step

    def means(self, fit: Fit) -> tuple[Tensor, Tensor]:
        """The mean of each model's states on the fitting rows, twice: they are source and target."""
        mean = self.universes()[NETWORK].joint(cast(Moments, self.moments)).mean.flatten(0, 1)
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
