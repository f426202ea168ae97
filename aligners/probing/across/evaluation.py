"""The evaluation of maps by probes: whether a probe of Y reads g(X), and whether Y uses what the probe reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from aligners.errors import UserError, check_range
from aligners.fitting.bank import StoredBank
from aligners.injection.behaviour import Behaviour
from aligners.injection.injecting import TOKENS, Evaluation, check_stored
from aligners.injection.methods import build_floors, check_closed_forms, route_methods, stored_kind
from aligners.injection.routes import InjectedTask, paired_routes
from aligners.injection.scoring.task_scores import ScoredTask
from aligners.models.loading.models import check_precision
from aligners.models.model import FrozenModel
from aligners.probing.across.comparing import PairedWords, PairsBeingRead, Row, compared
from aligners.probing.across.twin import (
    PRINCIPAL,
    RANDOM,
    WHOLE,
    Part,
    Twin,
    principal_subspaces,
    random_subspaces,
    read_subspaces,
)
from aligners.probing.bank import Arm
from aligners.probing.reading import check_annotated, check_room, make_task
from aligners.probing.tasks import Task
from aligners.probing.training import ProbeTraining, ended
from aligners.probing.trees import STRUCTURAL
from aligners.probing.words import Place, Words
from aligners.progress import track
from datamodules.asking import TaskBatch
from datamodules.module import stream_of
from datamodules.rows.reading import PairedBatch, Plan
from datamodules.states import States
from datamodules.tokens.splits import Split


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
        check_closed_forms(closed_form)
        check_range(least=1, tasks=len(tasks), draws=draws, projection=projection, hidden=hidden)
        check_range(least=0, dimensions=dimensions)
        if all(checkpoint.moments is None for checkpoint in stored):
            raise UserError("Expected a checkpoint of `train.py fit` in `checkpoints`, whose moments the mean needs.")
        self.stored, self.closed_form, self.tasks = list(stored), list(closed_form), list(dict.fromkeys(tasks))
        self.dimensions, self.draws, self.how = dimensions, draws, training
        self.sizes, self.masked_share = {"projection": projection, "hidden": hidden}, masked_share
        self.report_tables: dict[str, list[Row]] = {}

    # ------------------------------------------------------------------ before

    @property
    def stream(self) -> States:
        """The data module of the run."""
        return stream_of(self.trainer, States)

    def prepare_panels(self) -> None:
        """Check everything, and collect the maps."""
        check_precision(self.trainer)
        data, reader = self.stream, self.stream.reader
        self.sentences = check_annotated(data, self.tasks, self.trainer.world_size)
        if data.held_out_types:
            raise UserError(
                "Expected `data.held_out_types` 0, as probes need every word of a sentence, but got "
                f"{data.held_out_types}."
            )
        check_room(self.sentences.values(), len(reader.sites) * sum(reader.widths), self.trainer.strategy.root_device)
        described = data.describe()
        check_stored(self.stored, described, reader.sites)
        (self.route,) = paired_routes(data, both_directions=False)
        methods, refusals = route_methods(self.route, self.stored, self.closed_form)
        first = next(checkpoint for checkpoint in self.stored if checkpoint.moments is not None)
        floors = build_floors(self.route, cast(Any, first.moments), self.seed)
        kind = {"fitted_on": str(stored_kind(first))}
        self.methods = [
            *methods, *(floor._replace(about={**floor.about, **kind}) for floor in floors if floor.aligner is not None)
        ]  # fmt: skip
        for method in self.methods:
            cast(Any, method.aligner).to(self.trainer.strategy.root_device)
        self.swapped = [method for method in self.methods if method.about["fitted_on"] == str(TOKENS)]
        task = self._task()
        data.plan(Plan(asking=None if task is None else task.asking))
        self.meta = {
            **described, "split": "test", "seed": self.seed, "refusals": refusals, "training": vars(self.how),
            **self.sizes, "dimensions": self.dimensions, "not_swapped": self.not_swapped,
        }  # fmt: skip

    def _task(self) -> InjectedTask | None:
        """What Y is asked; None where there is no twin, and `not_swapped` then says why."""
        self.asked, self.not_swapped = None, None
        if not self.dimensions:
            self.not_swapped = "`dimensions` is 0"
        elif not self.swapped:
            self.not_swapped = "no map was fitted on all tokens, which are what is replaced"
        else:
            task = InjectedTask.of(self.stream, [self.route], masked_share=self.masked_share, seed=self.seed)
            self.asked, self.not_swapped = task.asked, task.not_injected[self.route]
            return task
        return None

    def injected_into(self) -> list[FrozenModel]:
        """Y, if there is a twin."""
        return [] if self.asked is None else [self.route.target]

    # ------------------------------------------------------------------ the held-out sentences

    def on_test_start(self) -> None:
        """Run the self-test."""
        super().on_test_start()
        self.reading = PairsBeingRead(self.sentences["test"], self.stream.reader.sites)

    def test_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the words of a batch."""
        self.reading.add(batch)

    def on_test_epoch_end(self) -> None:
        """Look at the last batch."""
        self.stream.reader.check.flush()

    # ------------------------------------------------------------------ after

    def train_probes(self) -> None:
        """Train probes on the fitting words of both models, measure those of Y on mapped words, and swap."""
        fitting, watched, self.held = self._read("fit"), self._read("validation"), self.reading.whole()
        held, shown = self.held, self.trainer.progress_bar_callback is not None
        planned = [(name, *side) for name in self.tasks for side in ((fitting.x, watched.x), (fitting.y, watched.y))]
        trained = [self._trained(*each) for each in track(planned, "Training", transient=True, disable=not shown)]
        self.fitted, self.narrow = list(zip(trained[::2], trained[1::2], strict=True)), list[Task]()
        twin = None if self.asked is None else self._twin(self.asked, fitting.y, watched.y)
        self.meta["unfinished"] = dict(ended(task.banks[0] for task in (*trained, *self.narrow)))
        self.meta["sentences"] = {"test": len(held.y.sentences), "dropped": held.y.cut}
        names = {"model_x": self.route.source.name, "model_y": self.route.target.name}
        self.rows = [{**names, **row} for x, y in self.fitted for row in compared(x, y, held, self.methods, self.seed)]
        self.report_tables = {"twin": [] if twin is None else list(self._swaps(twin, held.y))}

    def _read(self, split: Split) -> PairedWords:
        """The words of a split."""
        words = PairsBeingRead(self.sentences[split], self.stream.reader.sites)
        for batch in self.stream.paired(split):
            words.add(batch)
        return words.whole()

    def _trained(self, name: str, words: Words, watched: Words, dimensions: int | None = None) -> Task:
        """Train the probes of a task at all places of words, or narrow ones."""
        arms = [Arm(*place, rank=dimensions if name in STRUCTURAL else None) for place in words.places]
        sizes = self.sizes if dimensions is None else {**self.sizes, "projection": dimensions}
        task = make_task(name, words, watched, arms, sizes, self.seed)
        task.train(self.how, self.seed)
        return task

    def _twin(self, asked: ScoredTask, words: Words, watched: Words) -> Twin:
        """The swaps: for each task what a narrow probe reads, then other dimensions, then everything."""
        places = [words.places.index(Place("model", j)) for _, j in self.route.pairs]
        self.narrow = [self._trained(name, words, watched, self.dimensions) for name in self.tasks]
        read = {task.name: read_subspaces(task.banks[0])[places] for task in self.narrow}
        states, parts = words.states[places], [Part(name, [subspace]) for name, subspace in read.items()]
        for like in {subspace.shape: subspace for subspace in read.values()}.values():
            parts.append(Part(RANDOM, [random_subspaces(like, self.seed + draw) for draw in range(self.draws)]))
            parts.append(Part(PRINCIPAL, [principal_subspaces(states, like.shape[-1])]))
        parts.append(Part(WHOLE, [None]))
        behaviour = Behaviour(self.route, asked, ("native_y",), self.seed)
        return Twin(behaviour, self.swapped, parts, self.n_texts, self.seed).to(states.device)

    def _swaps(self, twin: Twin, held: Words) -> Iterator[Row]:
        """Swap on the held-out texts: the rows of the twin, with what the narrow probes score."""
        with torch.no_grad():
            batches, hidden = len(self.stream.loader("test")), self.trainer.progress_bar_callback is None
            paired = self.stream.paired("test")
            for batch in track(paired, "Swapping", batches, transient=True, disable=hidden):
                task = cast(TaskBatch, batch.task)
                twin.update(task, self.natives([self.route.target], task)[self.route.target])
        scores: dict[tuple[str, int], float] = {}
        for probed in self.narrow:
            for place in probed.words.places:
                first, *_ = probed.at(place.layer, held, self.seed).values()
                scores[probed.name, place.layer] = float(first[0, 0])
        for row in twin.rows():
            yield row | {"probe_score": scores.get((row["part"], row["site_y"]))}
