"""The data module that streams the states of k models at the same sites, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.models.model import FrozenModel
from datamodules.many_pairs import ManyPairReader, ManyPairs
from datamodules.rows.reading import PairedBatch, Prepared
from datamodules.rows.sites import parse_sites

__all__ = ["NewcomerStates", "UniverseStates", "check_widths"]


class UniverseStates(ManyPairs):
    """Turns text into the same rows of k models at the same sites, each model read once a batch.

    A batch has x (k · S, N, d), model after model and site by site, and y the same.

    Args:
        models: Hub ids, local folders or embedded models, as in `PairedActivations`: 3 or more, of one width.
        sites: `all` (0..L), `blocks` (1..L), or a list of layers: every model is read at each.
        revisions: of each model on the Hub.
        options: of `PairedActivations`, by their names. Words are those that all models have in full.

    Raises:
        ValueError: there are too few models, one is there twice, or an option is out of its range.
    """

    fixed: tuple[str, ...] = (*ManyPairs.fixed, "pairs")
    fewest = 3  # of two, the shared space may be that of either

    def __init__(
        self,
        models: list[str] = ["embedded:0", "embedded:1", "embedded:2"],  # noqa: B006  (copied)
        sites: str | list[str | int] = "blocks",
        revisions: list[str | None] | None = None,
        **options: Any,
    ) -> None:
        if len(models) < self.fewest:
            raise ValueError(
                f"A universe expects `models` to name at least {self.fewest} models, but got {len(models)}. Between "
                "two, `train.py fit` finds one map."
            )
        twice = sorted({name for name in models if models.count(name) > 1})
        if twice and revisions is None:
            raise ValueError(f"A universe expects different `models`, but got {', '.join(twice)} more than once.")
        super().__init__(models=models, pairs=None, sites=sites, revisions=revisions, **options)
        self.numbers = [(model, model) for model in range(len(models))]

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The sites of each model, the same for all.

        Raises:
            ValueError: a site pairs different layers, or a model does not have it.
        """
        each = [parse_sites(self.sites, depth, depth, self.component) for depth in depths]
        apart = [pair for sites in each for pair in sites if pair[0] != pair[1]]
        if apart:
            raise ValueError(
                f"A universe expects `sites` of one depth in all models, but got {apart[0][0]}:{apart[0][1]}. Name "
                "single layers."
            )
        differing = next((m for m, sites in enumerate(each) if sites != each[0]), None)
        if differing is not None:
            raise ValueError(
                f"A universe expects the same `sites` in all models, but {self.models[0]} has {depths[0]} blocks and "
                f"{self.models[differing]} {depths[differing]}. Name the layers, such as `sites` [1, 2]."
            )
        return [[site for site, _ in sites] for sites in each]

    @property
    def reader(self) -> ManyPairReader:
        """The models and their sites, loaded on first use."""
        if self._many is None:
            models = self.frozen
            check_widths([(model.name, model.width) for model in models])
            _check_different(models)
            sites = [[(site, site) for site in each] for each in self.wanted([model.depth for model in models])]
            self._many = ManyPairReader(models, self.numbers, sites, self.rows, self.special_tokens, self.component)
        return self._many

    def describe(self) -> dict[str, Any]:
        """Describe texts, models and rows for a report, as plain values."""
        found = super().describe()
        del found["pairs"]
        return {**found, "sites": found["sites"][: self.sites_each]}

    @property
    def sites_each(self) -> int:
        """S, the number of sites of a model."""
        return len(self.reader.columns) // len(self.models)

    def described_pair(self, i: int, j: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a `PairedActivations` of models i and j would say of itself: its `describe()` and its `config()`."""
        described, config = self.describe(), self.config()
        names, revisions = config.pop("models"), config.pop("revisions") or [None] * len(self.models)
        models = {"x": described["models"][i], "y": described["models"][j]}
        chosen = {"model_x": names[i], "model_y": names[j], "labels": None}
        return {**described, "models": models}, {
            **config,
            **chosen,
            "revision_x": revisions[i],
            "revision_y": revisions[j],
        }


class NewcomerStates(UniverseStates):
    """The states of one more model, paired with what the members of a universe make of the same texts.

    The last of `models` is new. While `embed` is set, a batch has x (S, N, d), the newcomer's states, and y (S, N, d),
    those of the members in their shared space, each row that of one member in turn. All members are read. Otherwise a
    batch is that of `UniverseStates`.

    Args:
        options: of `UniverseStates`.
    """

    embed: Callable[[Tensor], Tensor] | None = None

    def on_after_batch_transfer(self, batch: Prepared, dataloader_idx: int) -> PairedBatch:
        """Run the models, and pair the newcomer with the members."""
        read = super().on_after_batch_transfer(batch, dataloader_idx)
        if self.embed is not None:
            members, rows = len(self.models) - 1, torch.arange(read.x.shape[1], device=read.x.device)
            each = self.embed(read.x[: -self.sites_each].detach()).unflatten(0, (members, -1))
            read.y = each[rows % members, :, rows].movedim(0, 1).contiguous()
            read.x = read.x[-self.sites_each :]
        return read


def _check_different(models: Sequence[FrozenModel]) -> None:
    """Raise if two models have the same weights."""
    known: dict[str, str] = {}
    for model in models:
        first = known.setdefault(str(model.identity()["fingerprint"]), model.name)
        if first != model.name:
            raise ValueError(f"A universe expects different `models`, but {first} and {model.name} have equal weights.")


def check_widths(widths: Sequence[tuple[str, int]]) -> None:
    """Raise unless all models have one width.

    Args:
        widths: of each model by name.
    """
    (first, width), *others = widths
    for name, other in others:
        if other != width:
            raise ValueError(
                f"A universe expects `models` of one width, but {first} has {width} and {name} {other}: there is no "
                "bijection between their spaces."
            )
