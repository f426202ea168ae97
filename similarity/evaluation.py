"""Compares two or more models: all measures of all layer pairs in one pass, with controls."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations_with_replacement
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import SumMetric

from datamodules.protocol import LayerData, stream_of
from frozen.loading.precision import check_precision
from similarity.algebra.folding import fold
from similarity.arms import Arm, PairedRows, Shape, evaluate
from similarity.catalogue import DEFAULT, Measure, catalogue
from similarity.controls import matching_layers
from similarity.functional.summaries import angular_distance, localization, nuclear_norm_from_moments
from similarity.memory import memory_of
from similarity.outcome import Refusals, caution, controls_of, rows_of
from similarity.scales import FeatureScales

__all__ = ["SimilarityEvaluation"]

logger = logging.getLogger(__name__)

GROUPS = 10  # of the jackknife

Row = dict[str, Any]
ATTENTION = ("heads", "head_moments")


class SimilarityEvaluation(pl.LightningModule):
    """Measures how similar all layers of the data module's models are, in one pass over the held-out texts.

    With `controls`, every value comes with
    - its 95 % interval, from a jackknife over groups of texts, along matching layers;
    - its null: the same rows, with those of Y rolled to other texts;
    - its floor: untrained twins of the two models on the same texts;
    - its ceiling: the model with itself;
    - its value on standardised features (mean and deviation of the fitting texts);
    - for fitted measures (CCA family, regression), its value when fitted on the fitting texts.

    Args:
        measures: names, or `all`. The default leaves out what needs attention weights (`attnsim_*`, `attention_*`:
            set `data.attention` too) and what is defined by a batch or a small sample (`minibatch_cka`, `rbf_cka`).
        controls: compute them. They cost about five times the measures alone, and a pass over the fitting texts.
        within: also compare each model's layers with each other; `controls`, or more or fewer than two models, do so
            in any case.
        groups: groups of texts that the jackknife leaves out in turn; default: 10, or as many as there are batches if
            these are fewer.
        permutations: rolls over which the null is averaged.
        share: the share of the variance that SVCCA and PWCCA keep.
        products: float64, or float32 for the products of X with Y in moments, for GPUs that are slow in double
            precision; six digits of each covariance are kept.
        seed: of the samples of rows and of the untrained twins.
    """

    def __init__(
        self,
        measures: list[str] | str = list(DEFAULT),  # noqa: B006  (never changed)
        controls: bool = False,
        within: bool = False,
        groups: int | None = None,
        permutations: int = 1,
        share: float = 0.99,
        products: Literal["float64", "float32"] = "float64",
        seed: int = 0,
    ) -> None:
        super().__init__()
        known = catalogue(share)
        names = list(known) if measures == "all" else [measures] if isinstance(measures, str) else list(measures)
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise ValueError(f"Expected `measures` out of {', '.join(known)}, or `all`, but got {', '.join(unknown)}.")
        for name, value, least in (("groups", groups, 2), ("permutations", permutations, 1)):
            if value is not None and value < least:
                raise ValueError(f"Expected `{name}` of at least {least}, but got {value}.")
        if not 0 < share <= 1:
            raise ValueError(f"Expected `share` of the variance in (0, 1], but got {share:g}.")
        self.measures: list[Measure] = [known[name] for name in dict.fromkeys(names)]
        self.controls, self.within = controls, within
        self.wanted_groups, self.permutations, self.share, self.seed = groups, permutations, share, seed
        self.products: torch.dtype = getattr(torch, products)
        self.arms = nn.ModuleDict()
        self.rows: list[Row] = []
        self.layers: list[Row] = []
        self.distances: list[Row] = []
        self.meta: dict[str, Any] = {}

    @property
    def _stream(self) -> LayerData:
        """The data module of the run."""
        return stream_of(self.trainer, LayerData)

    @property
    def report_tables(self) -> dict[str, list[Row]]:
        """Further tables of the report."""
        return {"layers": self.layers, "distances": self.distances}

    # ------------------------------------------------------------------ before

    def setup(self, stage: str) -> None:
        """Run all checks that can be made before reading, and build the accumulators of every pair of models."""
        check_precision(self.trainer)
        self._choose_layers(self._stream)
        self._choose_groups(self._stream)
        self._accumulate()
        self.rows, self.layers, self.distances, self.refusals = [], [], [], Refusals()
        self.cautions: list[str] = []

    def _choose_layers(self, data: LayerData) -> None:
        """The models, their layers and their sizes."""
        attention = any(measure.family in ATTENTION for measure in self.measures)
        if attention and not data.attention:
            raise ValueError(
                "Measures of attention need attention weights, but got `data.attention` false: set it to true, or "
                f"leave out {', '.join(measure.name for measure in self.measures if measure.family in ATTENTION)}."
            )
        self.models = list(data.reader.models)
        twice = {model.name for model in self.models if [other.name for other in self.models].count(model.name) > 1}
        if twice:
            raise ValueError(
                f"Expected `data.models` to name each model once, but got {', '.join(sorted(twice))} more than once. "
                "To set a model's layers against each other, name it alone, or set `within`."
            )
        self.places = [list(layers) for layers in data.reader.layers]
        self.shapes = [
            Shape(len(layers), model.width, *((model.depth, model.heads) if attention else ()))
            for model, layers in zip(self.models, self.places, strict=True)
        ]

    def _choose_groups(self, data: LayerData) -> None:
        """The number of groups of held-out texts."""
        data.plan(("fit", "test") if self._fits else ("test",))
        self._batches = self._count_batches()
        self.groups = self.wanted_groups or min(GROUPS, self._batches)
        if self._fits and self._batches < self.groups:
            raise ValueError(
                f"The jackknife leaves out `groups` = {self.groups} groups of batches in turn, but the held-out texts "
                f"make {self._batches} batches. Lower `groups` or `data.batch_size`, or give more texts."
            )

    def _accumulate(self) -> None:
        """Build the empty accumulators."""
        self.arms = nn.ModuleDict()
        for i, j in self.pairs:
            for name, measures, groups in self._arms_of(i, j):
                shapes, matching = (self.shapes[i], self.shapes[j]), self._matching(i, j)
                self.arms[_key(i, j, name)] = Arm(measures, *shapes, groups, matching, self.seed, self.products)
        self.scales = nn.ModuleList(FeatureScales(shape.layers, shape.width) for shape in self.shapes if self._fits)
        self.counts = SumMetric().set_dtype(torch.float64)
        twins = [model.model for model in self.models if self._fits]
        self.announced = memory_of(cast(Any, self.arms.values()), self.shapes, self._largest_batch(), twins)
        if self.trainer.is_global_zero:
            logger.warning("This comparison takes up to %.2f GB besides its models.", self.announced / 1e9)

    def _matching(self, i: int, j: int) -> list[tuple[int, int]]:
        """Indices of the matching layers of two models, for which there are intervals."""
        x, y = self.places[i], self.places[j]
        return [(x.index(a), y.index(b)) for a, b in matching_layers(x, y)]

    def _count_batches(self) -> int:
        """Batches of held-out texts that all ranks together will read."""
        count, limit = cast(Any, self._stream.loader("test").sampler).count, self.trainer.limit_test_batches
        return int(count * limit) if isinstance(limit, float) else min(count, limit * self.trainer.world_size)

    def _largest_batch(self) -> int:
        """Most tokens, and so most rows, that a batch can have."""
        batches = cast(Any, self._stream.loader("test").sampler)
        return int(np.sort(batches.lengths)[-int(np.diff(batches.bounds).max()) :].sum())

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of models to compare, by index."""
        every = combinations_with_replacement(range(len(self.models)), 2)
        several = len(self.models) != 2
        return [(i, j) for i, j in every if i != j or several or self.within or self.controls]

    @property
    def _fits(self) -> bool:
        """Whether the fitting texts are read too."""
        return self.controls and len(self.models) > 1

    def _arms_of(self, i: int, j: int) -> Iterator[tuple[str, list[Measure], int]]:
        """Name, measures and number of groups of each stream of paired rows of two models."""
        controlled = self.controls and i != j
        yield "value", self.measures, self.groups if controlled else 1
        if controlled:
            for roll in range(self.permutations):
                yield f"null_{roll}", self.measures, 1
            yield "untrained", self.measures, 1
            yield "standardised", [measure for measure in self.measures if measure.family not in ATTENTION], 1
            yield "fit", [measure for measure in self.measures if measure.held_out is not None], 1

    def _arm(self, i: int, j: int, name: str) -> Arm:
        return cast(Arm, self.arms[_key(i, j, name)])

    def on_test_start(self) -> None:
        """The untrained twins of all models, each drawn from a different seed."""
        self.twins = [model.untrained(self.seed + place) for place, model in enumerate(self.models) if self._fits]

    # ------------------------------------------------------------------ the pass

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add one batch to every accumulator that it concerns."""
        streams = self._paired(batch, batch.states, batch.attention)
        if self._stream.splits[dataloader_idx] == "fit":
            for (i, j), rows in streams.items():
                if i != j:
                    self._arm(i, j, "fit").update(rows)
            for scales, states in zip(self.scales, batch.states, strict=True):
                cast(FeatureScales, scales).update(states)
            return
        self.counts.update(batch.states[0].shape[1])
        group = batch.number * self.groups // self._batches
        for (i, j), rows in streams.items():
            self._arm(i, j, "value").update(rows, group if self._fits and i != j else 0)
        if self._fits:
            self._add_controls(batch, streams)

    def _paired(
        self, batch: Any, states: Sequence[Tensor], attention: Sequence[Sequence[Tensor]] | None
    ) -> dict[tuple[int, int], PairedRows]:
        """The rows of every pair of models, with attention folded to the words that all models have."""
        folded: list[Tensor | None] = [None] * len(states)
        words = None
        if attention is not None and any(measure.family in ATTENTION for measure in self.measures):
            some = batch.word_count > 0
            words = batch.word_count[some]
            if len(words):
                folded = [
                    fold([block[some] for block in blocks], word[some], words).weights
                    for blocks, word in zip(attention, batch.words, strict=True)
                ]
        return {
            (i, j): PairedRows(states[i], states[j], batch.text, batch.token, folded[i], folded[j], words)
            for i, j in self.pairs
        }

    def _add_controls(self, batch: Any, streams: dict[tuple[int, int], PairedRows]) -> None:
        read = [self._stream.reader.read_model(twin, batch, place) for place, twin in enumerate(self.twins)]
        attention = None if batch.attention is None else [weights for _, weights in read]
        untrained = self._paired(batch, [states for states, _ in read], attention)
        scaled = [
            (states.double() - mean[:, None]) / deviation[:, None]
            for states, (mean, deviation) in zip(batch.states, self._scales(), strict=True)
        ]
        for (i, j), rows in streams.items():
            if i == j:
                continue
            self._arm(i, j, "untrained").update(untrained[i, j])
            self._arm(i, j, "standardised").update(rows._replace(x=scaled[i], y=scaled[j]))
            for roll in range(self.permutations):
                share = (roll + 1) / (self.permutations + 1)
                self._arm(i, j, f"null_{roll}").update(rows.permuted(share))

    def _scales(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and deviation of each model's features on the fitting texts."""
        return [cast(FeatureScales, scales).compute() for scales in self.scales]

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """Compute every measure from the accumulators."""
        self._stream.reader.check.flush()
        n_rows = int(self.counts.compute())
        values = {
            (i, j, measure.name): self.refusals.attempt(
                self._said(measure, i, j), partial(self._evaluate, measure, i, j, "value")
            )
            for i, j in self.pairs
            for measure in self.measures
        }
        if not any(values.values()):
            reasons = " ".join(dict.fromkeys(self.refusals.values()))
            raise ValueError(f"No measure could be computed. {reasons} `data.layers` says which layers are compared.")
        for i, j in self.pairs:
            head = {"model_x": self.models[i].name, "model_y": self.models[j].name, "n_rows": n_rows}
            for measure in self.measures:
                head["measure"], layers = measure.name, self._numbers(measure, i, j)
                controls, standardised = self._controls(measure, i, j, values)
                if values[i, j, measure.name]:
                    controls["chance"] = self._chance(measure, i, j)
                self.rows += rows_of(head, "raw", values[i, j, measure.name], layers, controls)
                self.rows += rows_of(head, "standardised", standardised, layers, {})
        self._summarise(values)
        self.meta = {
            **self._stream.describe(),
            "split": "test",
            "n_rows": n_rows,
            "controls": self.controls,
            "groups": self.groups if self._fits else None,
            "permutations": self.permutations if self._fits else None,
            "share": self.share,
            "products": str(self.products).removeprefix("torch."),
            "sample_seed": self.seed,
            "refusals": dict(self.refusals),
            "cautions": self.cautions,
        }

    def _numbers(self, measure: Measure, i: int, j: int) -> list[list[int]]:
        """Numbers of the layers that a measure compares; for attention, all blocks."""
        if measure.family in ATTENTION:
            return [list(range(1, self.models[m].depth + 1)) for m in (i, j)]
        return [self.places[m] for m in (i, j)]

    def _said(self, measure: Measure, i: int, j: int) -> str:
        return f"{measure.name} of {self.models[i].name} and {self.models[j].name}"

    def _evaluate(self, measure: Measure, i: int, j: int, arm: str) -> dict[str, Tensor]:
        return evaluate(measure, self._arm(i, j, arm).content(measure))

    def _controls(
        self, measure: Measure, i: int, j: int, values: dict[tuple[int, int, str], dict[str, Tensor]]
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """The controls of a measure, and its values on standardised features; empty if there are none."""
        if not self._fits or i == j or not values[i, j, measure.name]:
            return {}, {}
        said = self._said(measure, i, j)
        arms = {name: self._arm(i, j, name) for name, _, _ in self._arms_of(i, j)}
        same = [values[m, m, measure.name] for m in (i, j)]
        controls = controls_of(arms, measure, same, self._numbers(measure, i, j), self.refusals, said)
        if measure.family in ATTENTION:
            return controls, {}
        scaled = partial(self._evaluate, measure, i, j, "standardised")
        return controls, self.refusals.attempt(f"{said}, standardised", scaled)

    def _chance(self, measure: Measure, i: int, j: int) -> dict[str, Tensor]:
        """How much chance alone explains, with a caution if that is much; nothing for measures without a fit."""
        if measure.chance is None or i == j:
            return {}
        content, said = self._arm(i, j, "value").content(measure), self._said(measure, i, j)
        found = {way: grid.cpu() for way, grid in evaluate(measure._replace(compute=measure.chance), content).items()}
        warning = caution(said, found, int(content.moments.n))
        if warning is not None:
            self.cautions.append(warning)
            logger.warning(warning)
        return found

    def _summarise(self, values: dict[tuple[int, int, str], dict[str, Tensor]]) -> None:
        """Figures of single layers, and of pairs of models as a whole."""
        moments = next((measure for measure in self.measures if measure.family == "moments"), None)
        for m, model in enumerate(self.models):
            norms = None if moments is None else self._nuclear_norms(m, moments)
            scores = self._localization(m, values)
            for place, layer in enumerate(self.places[m]):
                row: Row = {"model": model.name, "layer": layer}
                row["nuclear_norm"] = None if norms is None else float(norms[place])
                row["localization"] = None if scores is None else float(scores[place])
                self.layers.append(row)
        for i, j in self.pairs:
            cka = values.get((i, j, "cka"), {}).get("both")
            if i != j and cka is not None and len(cka) == cka.shape[1]:
                self.distances.append(
                    {
                        "model_x": self.models[i].name,
                        "model_y": self.models[j].name,
                        "angular_distance": float(angular_distance(cka)),
                    }
                )

    def _nuclear_norms(self, m: int, measure: Measure) -> Tensor:
        i, j = next(pair for pair in self.pairs if m in pair)
        return nuclear_norm_from_moments(self._arm(i, j, "value").content(measure).moments)[0 if m == i else 1].cpu()

    def _localization(self, m: int, values: dict[tuple[int, int, str], dict[str, Tensor]]) -> Tensor | None:
        """Wu et al. §5.1, over all other layers that model m was compared with; None without the two measures."""
        neurons, subspaces, own = [], [], []
        for i, j in self.pairs:
            if m not in (i, j):
                continue
            neuronsim, svcca = (values.get((i, j, name), {}) for name in ("neuronsim", "svcca"))
            if not neuronsim or not svcca:
                return None
            turned = m != i
            neurons.append(neuronsim["backward"].mT if turned else neuronsim["forward"])
            subspaces.append(svcca["both"].mT if turned else svcca["both"])
            own.append((torch.eye if i == j else torch.zeros)(*neurons[-1].shape).bool())
        return localization(*(torch.cat(grids, 1) for grids in (neurons, subspaces, own)))


def _key(i: int, j: int, arm: str) -> str:
    return f"{i}_{j}_{arm}"
