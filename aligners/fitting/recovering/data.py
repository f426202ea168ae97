"""The data module in which Y is a random bijection of X's states."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from aligners.fitting.recovering.targets import random_inns
from aligners.maps.inn import INN
from aligners.similarity.algebra.moments import Moments, merge_moments, moments_of
from datamodules.paired import PairedActivations
from datamodules.rows.reading import PairedBatch, PairReader, Place, Prepared, read_rows

__all__ = ["RandomTargets", "TargetReader"]

SCALED_ON = 256  # fitting texts from which centre and scale of the states are taken


class TargetReader(PairReader):
    """Reads X, and maps its states by a random network at each place: strengths x targets x sites.

    Attributes:
        target: the networks, set before anything is read.
        strengths: (S,) strength of each place's network.
        seeds: (S,) its seed.
    """

    target: INN

    def __init__(self, *args: Any, strengths: list[float], seeds: list[int]) -> None:
        super().__init__(*args)
        self.own = list(self.sites)
        every = list(product(strengths, seeds, self.own))
        self.sites = [pair for _, _, pair in every]
        self.strengths, self.seeds = [strength for strength, _, _ in every], [seed for _, seed, _ in every]

    def places(self) -> list[Place]:
        """What stands along the leading axis S."""
        x, found = self.model_x.name, []
        for strength, seed, (i, j) in zip(self.strengths, self.seeds, self.sites, strict=True):
            about = {"strength": strength, "target_seed": seed}
            name = f"{strength:g}/{seed}/{i}-{j}"
            found.append(Place(name, x, f"f{seed}(X), strength {strength:g}", i, j, about))
        return found

    def read(self, prepared: Prepared) -> PairedBatch:
        """Run the front of X, and map what was gathered."""
        copies = len(self.sites) // len(self.own)
        texts, rows = prepared.texts, prepared.rows[0]
        sites = [i for i, _ in self.own]
        stored = texts.stored.get(self.model_x)
        once = read_rows(self.model_x, texts.inputs_x, sites, rows, self.component, stored)
        self.check.watch(once, [f"site {i} of X ({self.model_x.name})" for i in sites], "states", self._read)
        self._read += 1
        x = once.repeat(copies, 1, 1)
        with torch.no_grad():
            return PairedBatch(x, self.target.to(x.device)(x), rows, texts)


class RandomTargets(PairedActivations):
    """Pairs the states x of a model with f(x), where f is a random invertible network (Ren et al. 2023, §4.3).

    A bijection from X to Y exists then, and is known: what a map leaves unexplained is its own failure. Every strength
    and every target is one more place for each site, so that all are fitted in one run.

    Args:
        model: X, as in `PairedActivations`.
        strengths: of the non-linearity; 0 is none. See `aligners.fitting.recovering.targets`.
        targets: number of random networks of each strength.
        target_seed: of the first of them; the others follow.
        couplings: of each network.
        sites: as in `PairedActivations`, of the model with itself.
        revision: of the model on the Hub.
        options: of `PairedActivations`, by their names.

    Raises:
        ValueError: an option is out of its range.
    """

    fixed = ("model_x", "model_y", "revision_x", "revision_y", "labels")

    def __init__(
        self,
        model: str = "embedded:0",
        strengths: list[float] = [0.1, 0.3, 1.0],  # noqa: B006  (copied)
        targets: int = 1,
        target_seed: int = 0,
        couplings: int = 4,
        sites: str | list[str | int] = "blocks",
        revision: str | None = None,
        **options: Any,
    ) -> None:
        for name, value, least in (("targets", targets, 1), ("target_seed", target_seed, 0)):
            if value < least:
                raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")
        if couplings < 2:
            raise ValueError(f"Expected `couplings` to be at least 2, to change every dimension, but got {couplings}.")
        if not strengths or min(strengths) < 0 or len(set(strengths)) < len(strengths):
            raise ValueError(f"Expected `strengths` to be different numbers of at least 0, but got {strengths}.")
        super().__init__(
            model_x=model, model_y=model, sites=sites, revision_x=revision, revision_y=revision, labels=None, **options
        )
        self.model, self.revision, self.strengths = model, revision, list(strengths)
        self.targets, self.target_seed, self.couplings = targets, target_seed, couplings
        self._targets: TargetReader | None = None

    @property
    def reader(self) -> TargetReader:
        """The model, its sites and the targets, loaded on first use."""
        if self._targets is None:
            plain = super().reader
            given = plain.model_x, plain.model_y, plain.sites, self.rows, self.special_tokens, self.component
            seeds = list(range(self.target_seed, self.target_seed + self.targets))
            self._targets = TargetReader(*given, strengths=self.strengths, seeds=seeds)
        return self._targets

    def setup(self, stage: str) -> None:
        """Load everything, then draw the targets: these need the scale of the states."""
        super().setup(stage)
        reader = self.reader
        if not hasattr(reader, "target"):
            moments = self._moments(reader)
            reader.target = random_inns(moments, reader.strengths, reader.seeds, self.couplings)

    def _moments(self, reader: TargetReader) -> Moments:
        """Moments of x with x at each place, from some fitting texts that are the same on every rank."""
        found: Moments | None = None
        for texts in self.pipeline.loader("fit", None, only=SCALED_ON):
            prepared = reader.prepare(texts).to(reader.model_x.device)
            sites = [i for i, _ in reader.own]
            x = read_rows(reader.model_x, prepared.texts.inputs_x, sites, prepared.rows[0], self.component)
            new = moments_of(x.cpu(), x.cpu())
            found = new if found is None else merge_moments(found, new)
        assert found is not None  # a split is never empty
        copies = len(reader.sites) // len(reader.own)
        return Moments(found.n, *(value.repeat(copies, *[1] * (value.ndim - 1)) for value in found[1:]))

    def describe(self) -> dict[str, Any]:
        """Describe texts, rows, the model and the targets for a report, as plain values."""
        described = super().describe()
        target = {**described["models"]["x"], "name": f"random INNs of {described['models']['x']['name']}"}
        own = {name: getattr(self, name) for name in ("strengths", "targets", "target_seed", "couplings")}
        return {**described, "models": {**described["models"], "y": target}, **own}
