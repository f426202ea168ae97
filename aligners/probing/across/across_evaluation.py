"""The evaluation of maps by probes: whether a probe of Y reads g(X), and whether Y uses what the probe reads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.read_rows import PairedBatch, Plan
from aligners.datamodules.task_targets import TaskBatch
from aligners.datamodules.text.annotated.sentence import Sentence
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError, check_known, check_range
from aligners.fitting.saved_bank import StoredBank
from aligners.injection.behaviour import Behaviour
from aligners.injection.injecting import TOKENS, Evaluation, check_stored
from aligners.injection.methods import (
    CLOSED_FORMS,
    Method,
    build_floors,
    route_methods,
    stored_kind,
)
from aligners.injection.routes import InjectedTask, paired_routes
from aligners.injection.scoring.scores import ScoredTask, resampled_columns
from aligners.models.loading.load_models import check_precision
from aligners.models.model import FrozenModel
from aligners.probing.across.twin import Twin, parts_of, read_subspaces
from aligners.probing.probe_bank import ModelLayer, Variant, Words, WordsBeingRead
from aligners.probing.probes import STRUCTURAL
from aligners.probing.probing_tasks import ProbeTraining, Row, Task, ended
from aligners.probing.word_states import check_annotated, check_room, make_task
from aligners.progress import hidden, track

MEAN = "mean"  # the floor: what a probe says of states that all are equal
BASELINE = (
    "baseline"  # needs no states: the most frequent labels, or a chain of the words
)
AT_ONCE = 8192  # rows that are mapped together


class PairedWords(NamedTuple):
    """The same words as two models have them.

    Attributes:
        x: the words with X's states, at each of its sites once.
        y: with Y's.
        pairs: S site pairs (i, j).
    """

    x: Words
    y: Words
    pairs: Sequence[tuple[int, int]]

    def mapped(self, method: Method) -> list[Words]:
        """What a map makes of X's words, as words of Y: for each site pair words with states at Y's site."""
        sources = [self.x.places.index(ModelLayer("model", i)) for i, _ in self.pairs]
        x = self.x.states[sources]
        with torch.no_grad():
            y = torch.cat([method.map(rows, None) for rows in x.split(AT_ONCE, 1)], 1)
        words = []
        for s, (_, j) in enumerate(self.pairs):
            place = ModelLayer("model", j)
            words.append(replace(self.y, states=y[s : s + 1], places=(place,)))
        return words


class PairsBeingRead:
    """Collects batches of paired words.

    Args:
        sentences: of the split, by the numbers of its texts.
        pairs: the site pairs of the batches.
    """

    def __init__(
        self, sentences: Sequence[Sentence], pairs: Sequence[tuple[int, int]]
    ) -> None:
        self.pairs = pairs
        self._x = SideBeingRead(sentences, [i for i, _ in pairs])
        self._y = SideBeingRead(sentences, [j for _, j in pairs])

    def add(self, batch: PairedBatch) -> None:
        """Add the sentences of a batch that both models read whole."""
        self._x.add(batch, batch.x)
        self._y.add(batch, batch.y)

    def whole(self) -> PairedWords:
        """All of them, in the order of the texts.

        Raises:
            ValueError: no sentence is read whole.
        """
        return PairedWords(self._x.words.whole(), self._y.words.whole(), self.pairs)


class SideBeingRead:
    """The words of one model, with the states of each of its sites once.

    Args:
        sentences: of the split, by the numbers of its texts.
        sites: of the model, one of each site pair.
    """

    def __init__(self, sentences: Sequence[Sentence], sites: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(sites))
        self._chosen = [sites.index(site) for site in distinct]
        places = [ModelLayer("model", site) for site in distinct]
        self.words = WordsBeingRead(sentences, tuple(places))

    def add(self, batch: PairedBatch, states: Tensor) -> None:
        """Add a batch with the model's states, (S, n, d)."""
        self.words.add(
            batch.texts.text_numbers, batch.rows.counts, states[self._chosen]
        )


def compared(
    x: Task, y: Task, held: PairedWords, methods: Sequence[Method], seed: int
) -> Iterator[Row]:
    """Rows of one task: for each measure and site pair Y's own score, X's own, that of every map, and of the baseline.

    Args:
        x: with trained probes of X.
        y: with trained probes of Y.
        held: the held-out words.
        methods: maps and floors, the mean among them.
        seed: of the resampling of sentences.
    """
    mapped = {method.name: held.mapped(method) for method in methods}
    baseline = y.measures(None, held.y, seed)
    for s, (site_x, site_y) in enumerate(held.pairs):
        own = y.at(site_y, held.y, seed)
        lines = [
            Line("native_y", "ceiling", own),
            Line("native_x", "ceiling", x.at(site_x, held.x, seed)),
        ]
        for method in methods:
            measures = y.at(site_y, mapped[method.name][s], seed)
            lines.append(Line(method.name, method.role, measures, method.outcome(s)))
        lines.append(Line(BASELINE, "floor", baseline))
        floors = next(line.measures for line in lines if line.method == MEAN)

        for measure, (native, *_) in own.items():
            floor = floors[measure][0]
            to_beat = (
                torch.stack((baseline[measure][0, 0], floor[0])).nan_to_num(0.0).max()
            )
            beaten = bool(native[0] > to_beat)
            for line in lines:
                yield {
                    "task": y.name,
                    "measure": measure,
                    "method": line.method,
                    "role": line.role,
                    "training": line.training,
                    "site_x": site_x,
                    "site_y": site_y,
                    "n_sentences": len(held.y.sentences),
                    **columns(line.measures[measure][0], native, floor, beaten),
                }


class Line(NamedTuple):
    """What one method, ceiling or floor scores at a site pair.

    Attributes:
        method: its name.
        role: method, ceiling or floor.
        measures: name -> (1, 1 + R).
        training: how the training of a map ended, if it was trained.
    """

    method: str
    role: str
    measures: dict[str, Tensor]
    training: str | None = None


def columns(score: Tensor, own: Tensor, floor: Tensor, beaten: bool) -> Row:
    """A score, its distance from Y's own, and how much of Y's own gain over the floor it keeps, as a share.

    Where equal states have no score, as there is no rank correlation with a constant, the floor is 0. Where Y's own
    does not beat the baseline and the floor, there is nothing of which a share could be kept.

    Args:
        score: (1 + R,) on the sentences as they are, and in each resample, as are the others.
        own: Y's own.
        floor: that of the mean.
        beaten: whether Y's own beats the baseline and the floor.
    """
    least = floor.nan_to_num(0.0)
    kept = torch.full_like(score, torch.nan)
    if beaten:
        kept = (score - least) / (own - least)
    return resampled_columns({"score": score, "lost": own - score, "kept": kept})


class ProbesAcrossMaps(Evaluation):
    """Reads the held-out words of X and Y when it is tested; `train_probes` then trains probes on the words of both.

    Y's probes read g(X), for every map and site pair.

    Then their causal twin, where maps of tokens are measured and Y has a head: for each task a narrow probe is trained
    on Y, which reads a few dimensions alone. Those of Y's states are swapped for g(X)'s, or for the mean, which erases
    what was there; Y's answers are measured beside those after a swap of random dimensions, of as many principal ones,
    and of the whole state.

    Sentences that a map was fitted on are never among the held-out ones.

    Attributes:
        rows: of the report, after the evaluation: one for each task, measure, map and site pair.
        report_tables: `twin`, with a row for each map, part and site pair.

    Args:
        stored: checkpoints, all of the same models and site pairs.
        closed_form: names of closed forms to fit on the first checkpoint's moments, where it does not hold them.
        tasks: what is probed: see `train.py probe`.
        dimensions: that a narrow probe reads, for each span; 0: no twin.
        draws: of random dimensions, over which is averaged.
        projection: width to which edge probes project states.
        hidden: width of their hidden layer.
        training: how probes are trained.
        masked_share: share of the tokens that a masked language model has to find.
        seed: of the probes, the random dimensions and the resampling of sentences.

    Raises:
        ValueError: an option is out of its range, or no checkpoint holds moments.
    """

    kind = PairedActivations

    def __init__(
        self,
        stored: Sequence[StoredBank],
        closed_form: Sequence[str] = ("linear", "procrustes"),
        tasks: list[str] = ["pos", "dependencies", "distance", "depth"],  # noqa: B006  (copied)
        dimensions: int = 8,
        draws: int = 3,
        projection: int = 128,
        hidden: int = 128,
        training: ProbeTraining = ProbeTraining(),  # noqa: B008  (frozen)
        masked_share: float = 0.15,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        check_known(CLOSED_FORMS, closed_form=closed_form)
        check_range(
            least=1, tasks=len(tasks), draws=draws, projection=projection, hidden=hidden
        )
        check_range(least=0, dimensions=dimensions)
        if all(checkpoint.moments is None for checkpoint in stored):
            raise UserError(
                "Expected a checkpoint of `train.py fit` in `checkpoints`, whose moments the mean needs."
            )
        self.stored = list(stored)
        self.closed_form = list(closed_form)
        self.tasks = list(dict.fromkeys(tasks))
        self.dimensions = dimensions
        self.draws = draws
        self.how = training
        self.sizes = {"projection": projection, "hidden": hidden}
        self.masked_share = masked_share
        self.report_tables: dict[str, list[Row]] = {}

    # ------------------------------------------------------------------ before

    def prepare_panels(self) -> None:
        """Check everything, and collect the maps."""
        check_precision(self.trainer)
        data, reader = self.stream, self.stream.reader
        device = self.trainer.strategy.root_device
        self.sentences = check_annotated(data, self.tasks, self.trainer.world_size)
        if data.held_out_types:
            raise UserError(
                "Expected `data.held_out_types` 0, as probes need every word of a sentence, but got "
                f"{data.held_out_types}."
            )
        check_room(
            self.sentences.values(), len(reader.sites) * sum(reader.widths), device
        )
        described = data.describe()
        check_stored(self.stored, described, reader.sites)

        (self.route,) = paired_routes(data, both_directions=False)
        methods, refusals = route_methods(self.route, self.stored, self.closed_form)
        self.methods = [*methods, *self._floors()]
        for method in self.methods:
            cast(Any, method.aligner).to(device)
        token_kind = str(TOKENS)
        self.swapped = [m for m in self.methods if m.about["fitted_on"] == token_kind]

        task = self._task()
        data.plan(Plan(targets_of=None if task is None else task.targets_of))
        self.meta = {
            **described,
            "split": "test",
            "seed": self.seed,
            "refusals": refusals,
            "training": vars(self.how),
            **self.sizes,
            "dimensions": self.dimensions,
            "not_swapped": self.not_swapped,
        }

    def _floors(self) -> list[Method]:
        """Floors that are maps, by the moments of the first checkpoint that has some."""
        first = next(
            checkpoint for checkpoint in self.stored if checkpoint.moments is not None
        )
        fitted_on = {"fitted_on": str(stored_kind(first))}
        floors = []
        for floor in build_floors(self.route, cast(Any, first.moments), self.seed):
            if floor.aligner is not None:
                floors.append(floor._replace(about={**floor.about, **fitted_on}))
        return floors

    def _task(self) -> InjectedTask | None:
        """What Y is asked; None where there is no twin, and `not_swapped` then says why."""
        self.asked = None
        self.not_swapped: str | None = None
        if not self.dimensions:
            self.not_swapped = "`dimensions` is 0"
            return None
        if not self.swapped:
            self.not_swapped = "no map was fitted on all tokens, and injection replaces the states of all tokens"
            return None
        task = InjectedTask.of(
            self.stream, [self.route], masked_share=self.masked_share, seed=self.seed
        )
        self.asked = task.asked
        self.not_swapped = task.not_injected[self.route]
        return task

    def injected_into(self) -> list[FrozenModel]:
        """Y, if there is a twin."""
        if self.asked is None:
            return []
        return [self.route.target]

    # ------------------------------------------------------------------ the held-out sentences

    def on_test_start(self) -> None:
        """Run the self-test."""
        super().on_test_start()
        self.reading = PairsBeingRead(self.sentences["test"], self.stream.reader.sites)

    def test_step(
        self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the words of a batch."""
        self.reading.add(batch)

    def on_test_epoch_end(self) -> None:
        """Look at the last batch."""
        self.stream.reader.check.flush()

    # ------------------------------------------------------------------ after

    def train_probes(self) -> None:
        """Train probes on the fitting words of both models, measure those of Y on mapped words, and swap."""
        fitting, watched = self._read("fit"), self._read("validation")
        self.held = held = self.reading.whole()
        self.fitted: list[tuple[Task, Task]] = []
        self.narrow: list[Task] = []
        for name in track(self.tasks, "Training", disable=hidden(self.trainer)):
            x = self._trained(name, fitting.x, watched.x)
            y = self._trained(name, fitting.y, watched.y)
            self.fitted.append((x, y))

        twin = None
        if self.asked is not None:
            twin = self._twin(self.asked, fitting.y, watched.y)
        trained = [task for pair in self.fitted for task in pair]
        self.meta["unfinished"] = dict(
            ended(task.banks[0] for task in (*trained, *self.narrow))
        )
        self.meta["sentences"] = {"test": len(held.y.sentences), "dropped": held.y.cut}

        names = {"model_x": self.route.source.name, "model_y": self.route.target.name}
        self.rows = []
        for x, y in self.fitted:
            self.rows += [
                names | row for row in compared(x, y, held, self.methods, self.seed)
            ]
        self.report_tables = {"twin": []}
        if twin is not None:
            self.report_tables["twin"] = list(self._swaps(twin, held.y))

    def _read(self, split: Split) -> PairedWords:
        """The words of a split."""
        words = PairsBeingRead(self.sentences[split], self.stream.reader.sites)
        for batch in self.stream.paired(split):
            words.add(batch)
        return words.whole()

    def _trained(
        self, name: str, words: Words, watched: Words, dimensions: int | None = None
    ) -> Task:
        """Train the probes of a task at all places of words, or narrow ones."""
        rank = dimensions if name in STRUCTURAL else None
        variants = [Variant(*place, rank=rank) for place in words.places]
        sizes = dict(self.sizes)
        if dimensions is not None:
            sizes["projection"] = dimensions
        task = make_task(name, words, watched, variants, sizes, self.seed)
        task.train(self.how, self.seed)
        return task

    def _twin(self, asked: ScoredTask, words: Words, watched: Words) -> Twin:
        """The swaps: for each task what a narrow probe reads, then other dimensions, then everything."""
        places = [
            words.places.index(ModelLayer("model", j)) for _, j in self.route.pairs
        ]
        self.narrow = [
            self._trained(name, words, watched, self.dimensions) for name in self.tasks
        ]
        read = {
            task.name: read_subspaces(task.banks[0])[places] for task in self.narrow
        }
        states = words.states[places]
        parts = parts_of(read, states, self.draws, self.seed)
        behaviour = Behaviour(self.route, asked, ("native_y",), self.seed)
        return Twin(behaviour, self.swapped, parts, self.n_texts, self.seed).to(
            states.device
        )

    def _swaps(self, twin: Twin, held: Words) -> Iterator[Row]:
        """Swap on the held-out texts: the rows of the twin, with what the narrow probes score."""
        target = self.route.target
        with torch.no_grad():
            paired, batches = (
                self.stream.paired("test"),
                len(self.stream.loader("test")),
            )
            for batch in track(
                paired, "Swapping", batches, disable=hidden(self.trainer)
            ):
                task = cast(TaskBatch, batch.task)
                twin.update(task, self.natives([target], task)[target])

        scores: dict[tuple[str, int], float] = {}
        for probed in self.narrow:
            for place in probed.words.places:
                first, *_ = probed.at(place.layer, held, self.seed).values()
                scores[probed.name, place.layer] = float(first[0, 0])
        for row in twin.rows():
            yield row | {"probe_score": scores.get((row["part"], row["site_y"]))}
