"""Compares two or more models: all measures of all layer pairs within a limit of memory, with controls."""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement
from math import inf
from typing import Any, Literal, cast

import lightning.pytorch as pl
import numpy as np
import torch

from aligners.datamodules.batches import LengthBatches
from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.module import stream_of
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError, check_known, check_range
from aligners.files.resources import free_memory
from aligners.models.loading.load_models import check_precision
from aligners.progress import hidden, track
from aligners.similarity.catalogue import ATTENTION, DEFAULT, Measure, catalogue
from aligners.similarity.outcome import Grids, TileFigures
from aligners.similarity.passes.one_pass import PassRun
from aligners.similarity.passes.pass_memory import PassMemory
from aligners.similarity.passes.pass_plan import Pass, Settings, in_words, plan_passes
from aligners.similarity.passes.ranks import collected, from_first, this_rank
from aligners.similarity.passes.saved import PassFigures, SavedPasses
from aligners.similarity.passes.streams import FAR_VALUES, Shape, streams_of
from aligners.similarity.similarity_tables import (
    PairFigures,
    Row,
    Values,
    distance_rows,
    joined_norms,
    layer_rows,
    rows_of,
)
from aligners.similarity.text_orders import sure_orders

logger = logging.getLogger(__name__)

GROUPS = 10  # of the jackknife
# options that decide the figures
OWN = ("controls", "within", "groups", "permutations", "share", "seed", "products")


class SimilarityEvaluation(pl.LightningModule):
    """Measures how similar all layers of the data module's models are, within a limit of memory.

    With `controls`, every value comes with
    - its 95 % interval, from a jackknife over groups of texts, along matching layers;
    - its null: the same rows, with Y's texts in random orders within batches, and from it its effect and p;
    - its floor: untrained twins of the two models on the same texts; recorded states have none;
    - its ceiling: the model with itself;
    - its value on standardised features (mean and deviation of the fitting texts);
    - for fitted measures (CCA family, regression), its value when fitted on the fitting texts.

    Args:
        measures: names, or `all`. The default leaves out what needs attention weights (`attnsim_*`, `attention_*`:
            set `data.attention` too) and what is defined by a batch or a small sample (`minibatch_cka`, `rbf_cka`).
        controls: compute the controls. They cost about five times the measures alone, and a pass over the fitting
            texts.
        within: also compare each model's layers with each other; `controls`, or more or fewer than two models, do so
            in any case.
        groups: groups of texts that the jackknife leaves out in turn; default: 10, or as many as there are batches if
            these are fewer.
        permutations: number of random orders of Y's texts over which the null is averaged; the least p is 1 / (1 +
            permutations). Texts change places with those of nearly equal length in their batch.
        share: the share of the variance that SVCCA and PWCCA keep.
        products: float64, or float32 for the products of X with Y in moments, for GPUs that are slow in double
            precision; six digits of each covariance are kept.
        seed: seed of the samples of rows, of the untrained twins and of the permutations.
        memory: the most memory to take for sums, samples and their decompositions, in GB (10⁹ bytes) for each process;
            on a GPU, of its memory, models included. More pairs of models than fit are compared in several passes over
            the texts. Default: half of what is free.

    Attributes:
        saved: where the figures of each finished pass are kept, and from which another run goes on; None: nowhere.
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
        memory: float | None = None,
    ) -> None:
        super().__init__()
        self.measures = _measures(measures, share)
        check_range(least=2, groups=groups)
        check_range(least=1, permutations=permutations)
        check_range(above=0, below=inf, memory=memory)
        check_range(above=0, most=1, share=share)
        self.controls = controls
        self.within = within
        self.memory = memory
        self.wanted_groups = groups
        self.permutations = permutations
        self.share = share
        self.seed = seed
        self.products: torch.dtype = getattr(torch, products)
        self.rows: list[Row] = []
        self.report_tables: dict[str, list[Row]] = {}
        self.meta: dict[str, Any] = {}
        self.saved: SavedPasses | None = None

    @property
    def _stream(self) -> LayerActivations:
        """The data module of the run."""
        return stream_of(self.trainer, LayerActivations)

    # ------------------------------------------------------------------ before

    def setup(self, stage: str) -> None:
        """Run all checks that can be made before reading, and plan the passes."""
        check_precision(self.trainer)
        self.refusals: dict[str, str] = {}
        self.cautions: list[str] = []
        self._finished: dict[int, PassFigures] = {}
        self._choose_layers(self._stream)
        self._choose_groups()
        self._plan()

    def _choose_layers(self, data: LayerActivations) -> None:
        """The models, their layers and their sizes."""
        on_attention = [m.name for m in self.measures if m.family in ATTENTION]
        if on_attention and not data.attention:
            raise UserError(
                "Measures of attention need attention weights, but got `data.attention` false: set it to true, or "
                f"leave out {', '.join(on_attention)}."
            )
        self.models = list(data.reader.models)
        self.names = [model.name for model in self.models]
        twice = Counter(self.names) - Counter({*self.names})
        if twice:
            raise UserError(
                f"Expected `data.models` to name each model once, but got {', '.join(sorted(twice))} more than once. "
                "To set a model's layers against each other, name it alone, or set `within`."
            )
        self.places = [list(layers) for layers in data.reader.layers]
        self.shapes: list[Shape] = []
        for model, layers in zip(self.models, self.places, strict=True):
            shape = Shape(len(layers), model.width)
            if on_attention:
                shape = shape._replace(blocks=model.depth, heads=model.heads)
            self.shapes.append(shape)

    def _choose_groups(self) -> None:
        """The number of groups of held-out texts, of which all ranks together read so many batches."""
        count = self._held_out_batches().count
        limit = self.trainer.limit_test_batches
        if isinstance(limit, float):
            self._batches = int(count * limit)
        else:
            self._batches = min(count, limit * self.trainer.world_size)
        self.groups = self.wanted_groups or min(GROUPS, self._batches)
        if self._fits and self._batches < self.groups:
            raise UserError(
                f"The jackknife leaves out `groups` = {self.groups} groups of batches in turn, but the held-out texts "
                f"make {self._batches} batches. Lower `groups` or `data.batch_size`, or give more texts."
            )
        self._check_permutations()

    def _check_permutations(self) -> None:
        """Raise if the texts of the batches have fewer orders than are asked for."""
        if not self._fits:
            return
        bounds = self._held_out_batches().bounds[: self._batches + 1]
        orders = sure_orders(np.diff(bounds).tolist())
        if self.permutations >= orders:
            raise UserError(
                f"Expected fewer `permutations` than the texts of the batches have orders, {orders}, the true one "
                f"among them, but got {self.permutations}. Raise `data.batch_size`, or give more texts."
            )

    def _held_out_batches(self) -> LengthBatches:
        """The batches of held-out texts. No states are asked for yet: a store would write those that it lacks."""
        nothing: list[list[int]] = [[]] * len(self.models)
        loader = self._stream.loader("test", layers=nothing)
        return cast(LengthBatches, loader.sampler)

    def _plan(self) -> None:
        """Divide the pairs of models into passes, and say what they take.

        It raises if a pass does not fit, before anything is read: which rows are far is not known yet.
        """
        data = self._stream
        limit = min(collected(self._free()))
        self._divided(limit, None)
        beside = None
        if data.far.of("test", data.kinds_read):
            beside = FAR_VALUES[data.far_rows]
        limit = self._begun(limit)
        self.passes = self._divided(limit, beside)
        self._choose_passes()

        splits: tuple[Split, ...] = ("test",)
        if self._fits:
            splits = ("fit", "test")
        layers = []
        for number in self._to_run:
            read = self._settings.layers_read(self.passes[number])
            layers += [read] * len(splits)
        data.plan(splits * len(self._to_run), layers)
        self.announced = max(this.bytes for this in self.passes)
        self._announce(limit)

    def _announce(self, limit: int) -> None:
        """Log the memory that the passes take, and what they read."""
        besides = "with its models"
        if self._root_device.type == "cpu":
            besides = "besides its models"
        memory = f"{self.announced / 1e9:.3g} GB {besides}, of {limit / 1e9:.3g} GB (`memory`)"
        passes = in_words(self.passes, self.names)
        if self.trainer.is_global_zero:
            logger.warning("This comparison takes up to %s, in %s.", memory, passes)

    @property
    def _root_device(self) -> torch.device:
        """Where the rows are."""
        return self.trainer.strategy.root_device

    def _free(self) -> int:
        """The bytes that this process may take: as `memory` says, or half of its share of what is free."""
        if self.memory is not None:
            return int(self.memory * 1e9)
        sharing = 1
        if self._root_device.type == "cpu":
            sharing = self.trainer.num_devices
        return free_memory(self._root_device) // (2 * sharing)

    def _divided(self, limit: int, beside: str | None) -> list[Pass]:
        """The passes within a limit of memory; `beside` as for `streams_of`."""
        streams = streams_of(
            self.measures, self._fits, self.groups, self.permutations, beside
        )
        if self._stream.frozen_models.recorded is not None:
            # recorded states have no untrained twins
            streams = [each for each in streams if each.name != "untrained"]
        self._settings = Settings(
            streams=streams,
            shapes=self.shapes,
            reader=self._stream.reader,
            seed=self.seed,
            products=self.products,
            device=self._root_device,
        )
        memory = self._memory()
        layers = [shape.layers for shape in self.shapes]
        return plan_passes(layers, self.pairs, memory.of, limit)

    def _memory(self) -> PassMemory:
        """What passes take, for the largest batch there may be."""
        batches = self._held_out_batches()
        most = int(np.diff(batches.bounds).max())
        longest = np.sort(batches.lengths)[-most:]
        entries = len(longest) * int(longest.max()) ** 2
        # Weights count besides those on the CPU, which are always there: on a GPU, and of untrained twins.
        copies = int(self._root_device.type != "cpu") + int(self._fits)
        weights = [copies * model.nbytes for model in self.models]
        return PassMemory(self._settings, int(longest.sum()), entries, weights)

    def _begun(self, limit: int) -> int:
        """The limit of the run that is gone on with, if passes are kept; else the one given.

        Raises:
            ValueError: another comparison was begun.
        """
        saved = self.saved
        if saved is None:
            return limit
        about = {
            "data": self._stream.describe(),
            "measures": [measure.name for measure in self.measures],
        }
        for name in OWN:
            about[name] = getattr(self, name)
        about["trainer"] = {
            "world_size": self.trainer.world_size,
            "limit_test_batches": self.trainer.limit_test_batches,
        }
        given = self.memory is not None
        return from_first(lambda: saved.begin(about, limit, given))

    def _choose_passes(self) -> None:
        """Look which passes are finished. One is always made again, so that there is something to run."""
        self._finished = from_first(self._kept)
        count = len(self.passes)
        missing = {*range(count)} - {*self._finished}
        self._to_run = sorted(missing) or [count - 1]
        if self._finished and self.trainer.is_global_zero:
            finished = len(self._finished)
            logger.warning("Going on: %d of %d passes are finished.", finished, count)

    def _kept(self) -> dict[int, PassFigures]:
        """The figures of finished passes that are kept, by number."""
        kept: dict[int, PassFigures] = {}
        if self.saved is None:
            return kept
        for number, this in enumerate(self.passes):
            figures = self.saved.load(number, this)
            if figures is not None:
                kept[number] = figures
        return kept

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of models to compare, by index."""
        count = len(self.models)
        with_itself = count != 2 or self.within or self.controls
        if with_itself:
            return list(combinations_with_replacement(range(count), 2))
        return list(combinations(range(count), 2))

    @property
    def _fits(self) -> bool:
        """Whether the fitting texts are read too."""
        return self.controls and len(self.models) > 1

    # ------------------------------------------------------------------ the passes

    def on_test_start(self) -> None:
        """Nothing has been read."""
        self._place = -1

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add one batch to the sums of its pass."""
        # every rank goes through all texts of all passes
        while self._place < dataloader_idx:
            self._leave()
            self._place += 1
            self._enter()
        group = batch.texts.number * self.groups // self._batches
        self._run.add(batch, self._stream.splits[dataloader_idx], group)

    def _enter(self) -> None:
        """Begin a pass, with the first texts that it reads."""
        splits = self._stream.splits
        if splits[self._place] == splits[0]:
            place = self._place * len(self._to_run) // len(splits)
            self._number = self._to_run[place]
            self._run = PassRun(self.passes[self._number], self._settings)

    def _leave(self) -> None:
        """End the texts that were read last."""
        if self._place < 0:
            return
        self._stream.reader.check.flush()
        if self._stream.splits[self._place] == "fit":
            self._run.end_fit()
        else:
            self._end_pass()

    def _end_pass(self) -> None:
        """Measure what the pass has summed, and forget it."""
        self._run.end()
        tiles: list[TileFigures] = []
        for of_rank in collected(self._measured()):
            tiles += of_rank
        norms = {}
        for span, white in self._run.whitenings():
            norms[span.model, span.first] = white.nuclear_norm().cpu()

        figures = PassFigures(tiles, norms, int(self._run.rows))
        is_new = self._number not in self._finished
        if self.saved is not None and is_new and this_rank() == 0:
            self.saved.save(self._number, figures)
        self._finished[self._number] = figures
        del self._run

    def _measured(self) -> list[TileFigures]:
        """The figures of the tiles of this rank."""
        measured = []
        tiles = self._run.mine()
        for tile in track(tiles, "Measuring", disable=hidden(self.trainer)):
            sums = self._run.take(tile)
            matching = self._settings.matching(tile)
            measured.append(TileFigures.of(tile, self.measures, sums, matching))
        return measured

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """End the last pass, and make the tables of all."""
        self._leave()
        passes = [self._finished[number] for number in sorted(self._finished)]
        n_rows = passes[0].rows
        pairs = self._pairs_of(passes)
        self._note(pairs)
        values = self._values_of(pairs)
        self.rows = []
        for models, pair in pairs.items():
            for measure in self.measures:
                self.rows += self._rows_of(models, pair, measure, values, n_rows)
        norms = joined_norms([part.norms for part in passes])
        self.report_tables = {
            "layers": layer_rows(self.names, self.places, norms, values),
            "distances": distance_rows(self.names, values),
            "missing": self._missing,
            "models": [{"model": model.name, **model.sizes} for model in self.models],
        }
        self.meta = self._about(n_rows)

    def _pairs_of(
        self, passes: list[PassFigures]
    ) -> dict[tuple[int, int], PairFigures]:
        """The figures of each pair of models."""
        tiles: dict[tuple[int, int], list[TileFigures]] = {}
        for part in passes:
            for figures in part.tiles:
                tiles.setdefault(figures.tile.pair, []).append(figures)
        pairs = {}
        for i, j in self.pairs:
            shape = self.shapes[i].layers, self.shapes[j].layers
            pairs[i, j] = PairFigures(tiles[i, j], shape)
        return pairs

    def _values_of(self, pairs: dict[tuple[int, int], PairFigures]) -> Values:
        """The values of each measure of each pair.

        Raises:
            ValueError: there are none.
        """
        values = {}
        for (i, j), pair in pairs.items():
            for measure in self.measures:
                values[i, j, measure.name] = pair.grids(measure, "value")
        if not any(values.values()):
            reasons = " ".join(dict.fromkeys(self.refusals.values()))
            raise UserError(
                f"No measure could be computed. {reasons} `data.layers` says which layers are compared."
            )
        return values

    def _about(self, n_rows: int) -> dict[str, Any]:
        """What the report says of the run."""
        meta = {
            **self._stream.describe(),
            "split": "test",
            "n_rows": n_rows,
            "controls": self.controls,
            "groups": None,
            "permutations": None,
            "share": self.share,
            "products": str(self.products).removeprefix("torch."),
            "sample_seed": self.seed,
            "passes": len(self.passes),
            "memory_gb": self.announced / 1e9,
            "refusals": self.refusals,
            "cautions": self.cautions,
        }
        if self._fits:
            meta["groups"] = self.groups
            meta["permutations"] = self.permutations
        return meta

    def _rows_of(
        self,
        models: tuple[int, int],
        pair: PairFigures,
        measure: Measure,
        values: Values,
        n_rows: int,
    ) -> list[Row]:
        """The rows of one measure of two models: of the states as they are, and standardised."""
        i, j = models
        same: list[Grids] = [{}, {}]  # each model with itself: the ceiling
        if self._fits and i != j:
            same = [values[m, m, measure.name] for m in models]
        layers: list[Sequence[int]] = [self.places[i], self.places[j]]
        if measure.family in ATTENTION:  # which compare all blocks
            layers = [range(1, self.models[m].depth + 1) for m in models]
        head = {
            "model_x": self.names[i],
            "model_y": self.names[j],
            "n_rows": n_rows,
            "measure": measure.name,
        }
        value = pair.grids(measure, "value")
        standardised = pair.grids(measure, "standardised")
        controls = pair.controls(measure, same)
        rows = rows_of(head, "raw", value, layers, controls)
        return rows + rows_of(head, "standardised", standardised, layers, {})

    def _note(self, pairs: dict[tuple[int, int], PairFigures]) -> None:
        """Log and keep what could not be computed, and what is mostly counting."""
        self._missing: list[Row] = []
        for (i, j), pair in pairs.items():
            names = {"model_x": self.names[i], "model_y": self.names[j]}
            models = f"of {self.names[i]} and {self.names[j]}"
            for measure, figure, why in pair.refusals(self.measures):
                what = f"{measure.name} {models}"
                if figure != "value":
                    what += f", {figure.replace('held_out', 'held out')}"
                self.refusals[what] = why
                row = {**names, "measure": measure.name, "figure": figure, "why": why}
                self._missing.append(row)
            for measure in self.measures:
                caution = pair.caution(measure)
                if caution is not None:
                    self.cautions.append(f"{measure.name} {models}: {caution}")
        if self.trainer.is_global_zero:
            for what, why in self.refusals.items():
                logger.warning(f"No {what}: {why}")
            for caution in self.cautions:
                logger.warning(caution)


def _measures(names: list[str] | str, share: float) -> list[Measure]:
    """The measures of these names, each once."""
    known = catalogue(share)
    if names == "all":
        names = list(known)
    elif isinstance(names, str):
        names = [names]
    check_known([*known, "all"], measures=list(names) or ["none"])
    return [known[name] for name in dict.fromkeys(names)]
