"""The data module that streams many pairs of models at once, each model read once a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from aligners.models.model import FrozenModel
from datamodules.frozen_models import with_revisions
from datamodules.paired import PairedActivations
from datamodules.rows.reading import PairedBatch, PairReader, Place, Prepared, read_rows
from datamodules.rows.sites import parse_sites

__all__ = ["ManyPairReader", "ManyPairs"]


class ManyPairReader(PairReader):
    """Reads the same rows of k models, each once, as the pairs of one bank: pairs x sites along the leading axis.

    Attributes:
        models: all of them.
        columns: of each place along the leading axis the numbers of X and Y and their sites.

    Args:
        models: see there.
        pairs: numbers of X and of Y.
        sites: for each pair its site pairs.
        options: of `PairReader`, from `rows` on.

    Raises:
        ValueError: the widths of the pairs differ, or a model lacks a site.
    """

    def __init__(
        self,
        models: Sequence[FrozenModel],
        pairs: Sequence[tuple[int, int]],
        sites: Sequence[Sequence[tuple[int, int]]],
        *options: Any,
    ) -> None:
        x, y = (models[m] for m in pairs[0])
        super().__init__(x, y, sites[0], *options)
        self.models = list(models)
        self.columns = [(a, b, *site) for (a, b), each in zip(pairs, sites, strict=True) for site in each]
        self.sites = [(i, j) for _, _, i, j in self.columns]
        for a, b, i, j in self.columns:
            if (models[a].width, models[b].width) != (x.width, y.width):
                raise ValueError(
                    f"Expected pairs of equal widths, as one bank holds, but {x.name} and {y.name} have {x.width} "
                    f"and {y.width}, {models[a].name} and {models[b].name} have {models[a].width} and "
                    f"{models[b].width}. Fit them apart."
                )
            models[a].check_site(i, "sites", self.component)
            models[b].check_site(j, "sites", self.component)

    def places(self) -> list[Place]:
        """What stands along the leading axis."""
        names = [model.name for model in self.models]
        return [Place(f"{a}-{b}/{i}-{j}", names[a], names[b], i, j) for a, b, i, j in self.columns]

    def read(self, prepared: Prepared) -> PairedBatch:
        """Run each front once, and gather the rows of every pair."""
        texts, rows = prepared.texts, prepared.rows
        shape, device = (len(self.columns), len(rows[0])), rows[0].index.device
        x = torch.empty(*shape, self.model_x.width, device=device)
        y = torch.empty(*shape, self.model_y.width, device=device)
        for m, model in enumerate(self.models):
            wanted = [(x, s, i) for s, (a, _, i, _) in enumerate(self.columns) if a == m]
            wanted += [(y, s, j) for s, (_, b, _, j) in enumerate(self.columns) if b == m]
            if wanted:
                sites = sorted({site for _, _, site in wanted})
                stored = texts.stored.get(model)
                states = read_rows(model, texts.inputs[m], sites, rows[m], self.component, stored)
                self.check.watch(states, [f"site {site} of {model.name}" for site in sites], "states", self._read)
                for out, place, site in wanted:
                    out[place] = states[sites.index(site)]
        self._read += 1
        return PairedBatch(x, y, rows[0], texts)


class ManyPairs(PairedActivations):
    """Turns text into paired rows of many pairs of models, for one bank of pairs x sites.

    A batch has x (S, N, d_x) and y (S, N, d_y), pair after pair, with the sites of each pair in order. Every model is
    read once a batch, however many pairs it is in.

    Args:
        models: Hub ids, local folders or embedded models, as in `PairedActivations`.
        pairs: numbers of X and Y in `models`, such as [[0, 1], [0, 2]]; default: every model with each later one.
        sites: as in `PairedActivations`, the same for every pair.
        revisions: of each model on the Hub.
        options: of `PairedActivations`, by their names. Words are those that all models have in full.

    Raises:
        ValueError: an option is out of its range.
    """

    fixed: tuple[str, ...] = ("model_x", "model_y", "revision_x", "revision_y", "labels")

    def __init__(
        self,
        models: list[str] = ["embedded:0", "embedded:1"],  # noqa: B006  (copied)
        pairs: list[list[int]] | None = None,
        sites: str | list[str | int] = "blocks",
        revisions: list[str | None] | None = None,
        **options: Any,
    ) -> None:
        self.models, self.revisions = list(models), revisions
        named = self._named()
        (x, at_x), (y, at_y) = named[0], named[-1]
        super().__init__(model_x=x, model_y=y, sites=sites, revision_x=at_x, revision_y=at_y, labels=None, **options)
        self.pairs = None if pairs is None else [list(pair) for pair in pairs]
        self.numbers = _numbers(models, pairs)
        self._many: ManyPairReader | None = None

    def _named(self) -> list[tuple[str, str | None]]:
        return with_revisions(self.models, self.revisions)

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The sites of each model."""
        each: list[set[int]] = [set() for _ in depths]
        for a, b in self.numbers:
            for i, j in parse_sites(self.sites, depths[a], depths[b], self.component):
                each[a].add(i)
                each[b].add(j)
        return [sorted(sites) for sites in each]

    @property
    def reader(self) -> ManyPairReader:
        """The models, the pairs and their sites, loaded on first use."""
        if self._many is None:
            models = self.frozen
            sites = [parse_sites(self.sites, models[a].depth, models[b].depth, self.component) for a, b in self.numbers]
            options = self.rows, self.special_tokens, self.component
            self._many = ManyPairReader(models, self.numbers, sites, *options)
        return self._many

    def describe(self) -> dict[str, Any]:
        """Describe texts, models, pairs and rows for a report, as plain values."""
        models = [model.identity() for model in self.reader.models]
        return {**super().describe(), "models": models, "pairs": [list(pair) for pair in self.numbers]}

    def described_pairs(self) -> list[tuple[range, dict[str, Any], dict[str, Any]]]:
        """For each pair its places along the leading axis, and what a `PairedActivations` of it would say of itself.

        Returns:
            The places, its `describe()` and its `config()`.
        """
        described, config, found, first = self.describe(), self.config(), [], 0
        names, revisions = config.pop("models"), config.pop("revisions") or [None] * len(self.models)
        for a, b in self.numbers:
            count = sum(column[:2] == (a, b) for column in self.reader.columns)
            own = {**described, "models": {"x": described["models"][a], "y": described["models"][b]}}
            own["sites"] = described["sites"][first : first + count]
            chosen = {"model_x": names[a], "model_y": names[b], "labels": None}
            chosen |= {"revision_x": revisions[a], "revision_y": revisions[b]}
            place = range(first, first + count)
            found.append((place, _without(own, "pairs"), {**_without(config, "pairs"), **chosen}))
            first += count
        return found


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _numbers(models: Sequence[str], pairs: Sequence[Sequence[int]] | None) -> list[tuple[int, int]]:
    """The pairs by number, checked."""
    if pairs is None:
        pairs = list(combinations(range(len(models)), 2))
    found = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2 and all(0 <= m < len(models) for m in pair)]
    if not found or len(found) < len(pairs) or len(set(found)) < len(found) or any(a == b for a, b in found):
        raise ValueError(
            f"Expected `pairs` to name two different ones of the {len(models)} `models`, counted from 0, and no pair "
            f"twice, but got {[list(pair) for pair in pairs]}."
        )
    return found
