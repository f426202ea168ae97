"""Maps judged by probes: whether a probe of Y reads g(X), and whether Y uses what the probe reads."""

from collections.abc import Iterator, Mapping, Sequence
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
    KNOWN_CLOSED_FORMS,
    Method,
    build_floors,
    first_moments,
    route_methods,
)
from aligners.injection.routes import InjectedTask, paired_routes
from aligners.injection.scoring.scores import ScoredTask, resampled_columns
from aligners.models.loading.load_models import check_precision
from aligners.models.model import FrozenModel
from aligners.probing.across.twin import Twin, parts_of, read_subspaces
from aligners.probing.probe_bank import ModelLayer, Variant, Words, WordsBeingRead
from aligners.probing.probes import STRUCTURAL
from aligners.probing.probing_tasks import Measures, ProbeTraining, Row, Task, ended
from aligners.probing.word_states import check_annotated, check_room, make_task
from aligners.progress import hidden, track

NATIVE_X, NATIVE_Y = (
    "native_x",
    "native_y",
)  # scores of the probes on the models' own states
MEAN = "mean"  # the floor: what a probe answers if all states are equal
BASELINE = "baseline"  # a baseline without states: the most frequent labels, or a chain of words
AT_ONCE = 8192  # number of rows that are mapped together
Pairs = Sequence[tuple[int, int]]  # site pairs (i, j)


class PairedWords(NamedTuple):
    """The same words, with the states of two models.

    Attributes:
        x: the words with X's states, at each of its sites once.
        y: the words with Y's states, likewise.
        pairs: S site pairs (i, j).
    """

    x: Words
    y: Words
    pairs: Pairs

    def mapped(self, method: Method) -> list[Words]:
        """Apply a map to X's words: for each site pair, return Y's words with the mapped states."""
        numbers = self.x.numbers([i for i, _ in self.pairs])
        x = self.x.states[numbers]
        parts = []
        with torch.no_grad():
            for rows in x.split(AT_ONCE, 1):
                parts.append(method.map(rows, None))
        y = torch.cat(parts, 1)

        words = []
        for s, (_, j) in enumerate(self.pairs):
            states = y[s : s + 1]
            places = [ModelLayer("model", j)]
            words.append(replace(self.y, states=states, places=places))
        return words


class PairsBeingRead:
    """Collects batches of paired words, with the states of each model's sites once.

    Args:
        sentences: all sentences of the split, by the numbers of its texts.
        pairs: site pairs of the batches.
    """

    def __init__(self, sentences: Sequence[Sentence], pairs: Pairs) -> None:
        self.pairs = pairs
        self._chosen = []
        self._words = []
        for sites in zip(*pairs, strict=True):
            distinct = list(dict.fromkeys(sites))
            places = [ModelLayer("model", site) for site in distinct]
            self._chosen.append([sites.index(site) for site in distinct])
            self._words.append(WordsBeingRead(sentences, places))

    def add(self, batch: PairedBatch) -> None:
        """Add the sentences of a batch that both models read whole."""
        numbers = batch.texts.text_numbers
        for side, states in enumerate((batch.x, batch.y)):
            own = states[self._chosen[side]]
            self._words[side].add(numbers, batch.rows.counts, own)

    def whole(self) -> PairedWords:
        """Return all collected words, in the order of the texts.

        Raises:
            ValueError: no sentence is read whole.
        """
        x, y = (words.whole() for words in self._words)
        return PairedWords(x, y, self.pairs)


def compared(
    x: Task, y: Task, held: PairedWords, methods: Sequence[Method], seed: int
) -> Iterator[Row]:
    """Score one task: for each measure and site pair, Y's own states, X's own, all maps, and a baseline, as rows.

    Args:
        x: the task with trained probes of X.
        y: the task with trained probes of Y.
        held: the held-out words.
        methods: maps and floors, the mean among them.
        seed: seed of the resampling of sentences.
    """
    mapped = {method.name: held.mapped(method) for method in methods}
    baseline = y.measures(None, held.y, seed)
    for s, (site_x, site_y) in enumerate(held.pairs):
        native_x = x.at(site_x, held.x, seed)
        native_y = y.at(site_y, held.y, seed)
        lines = {
            NATIVE_Y: Line("ceiling", native_y),
            NATIVE_X: Line("ceiling", native_x),
        }
        for method in methods:
            words = mapped[method.name][s]
            measures = y.at(site_y, words, seed)
            training = method.outcome(s)
            lines[method.name] = Line(method.role, measures, training)
        lines[BASELINE] = Line("floor", baseline)
        place = {"site_x": site_x, "site_y": site_y}
        place["n_sentences"] = len(held.y.sentences)
        yield from _rows(y.name, place, lines)


class Line(NamedTuple):
    """The scores of one method, ceiling or floor at a site pair.

    Attributes:
        role: method, ceiling or floor.
        measures: name -> (1, 1 + R).
        training: how the training of a map ended, if it was trained.
    """

    role: str
    measures: Measures
    training: str | None = None


def _rows(task: str, place: Row, lines: Mapping[str, Line]) -> Iterator[Row]:
    """Make the rows of each measure at a site pair, from the lines of all methods."""
    for measure in lines[NATIVE_Y].measures:
        (own,) = lines[NATIVE_Y].measures[measure]
        (floor,) = lines[MEAN].measures[measure]
        (baseline,) = lines[BASELINE].measures[measure]
        floors = torch.stack((baseline[0], floor[0]))
        to_beat = floors.nan_to_num(0.0)
        beaten = bool(own[0] > to_beat.max())
        for method, line in lines.items():
            (score,) = line.measures[measure]
            yield {
                "task": task,
                "measure": measure,
                "method": method,
                "role": line.role,
                "training": line.training,
                **place,
                **columns(score, own, floor, beaten),
            }


def columns(score: Tensor, own: Tensor, floor: Tensor, beaten: bool) -> Row:
    """Return a score, its distance from Y's own, and the share that it keeps of Y's own gain over the floor.

    The floor is 0 where equal states have no score, as a rank correlation with a constant is undefined. The share is
    missing where Y's own score does not beat the baseline and the floor.

    Args:
        score: (1 + R,) the score on the sentences as they are, and in each resample. All scores below have this shape.
        own: Y's own score.
        floor: the score of the mean.
        beaten: whether Y's own score beats the baseline and the floor.
    """
    least = floor.nan_to_num(0.0)
    kept = torch.full_like(score, torch.nan)
    if beaten:
        kept = (score - least) / (own - least)
    return resampled_columns({"score": score, "lost": own - score, "kept": kept})


class ProbesAcrossMaps(Evaluation):
    """Reads the held-out words of X and Y in its test loop; `train_probes` then trains probes on the words of both.

    Y's probes read g(X), for every map and site pair.

    If maps of tokens are measured and Y has a head, the causal twin follows. For each task, a narrow probe, which reads
    only a few dimensions, is trained on Y. These dimensions of Y's states are then replaced by those of g(X), or of the
    mean, which erases their content. Y's answers are compared with those after a swap of random dimensions, of as many
    principal ones, and of the whole state.

    Sentences that a map was fitted on are never among the held-out ones.

    Attributes:
        rows: rows of the report, after the evaluation: one for each task, measure, map and site pair.
        report_tables: `twin`, with a row for each map, part and site pair.

    Args:
        stored: checkpoints, all of the same models and site pairs.
        closed_form: names of closed forms to fit on the first checkpoint's moments, where no checkpoint holds them.
        tasks: tasks to probe; see `train.py probe`.
        dimensions: number of dimensions that a narrow probe reads for each span; 0: no twin.
        draws: number of draws of random dimensions to average over.
        projection: width to which edge probes project states.
        hidden: width of edge probes' hidden layer.
        training: how probes are trained.
        masked_share: share of the tokens that a masked language model must predict.
        seed: seed of the probes, the random dimensions and the resampling of sentences.

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
        self.sizes = {"projection": projection, "hidden": hidden}
        check_known(KNOWN_CLOSED_FORMS, closed_form=closed_form)
        check_range(least=1, tasks=len(tasks), draws=draws, **self.sizes)
        check_range(least=0, dimensions=dimensions)
        first_moments(stored)  # the mean is computed from them
        self.stored = list(stored)
        self.closed_form = list(closed_form)
        self.tasks = list(dict.fromkeys(tasks))
        self.dimensions = dimensions
        self.draws = draws
        self.how = training
        self.masked_share = masked_share
        self.report_tables: dict[str, list[Row]] = {}

    # ------------------------------------------------------------------ before

    def prepare_panels(self) -> None:
        """Check the options, and collect the maps."""
        check_precision(self.trainer)
        self._check_words()
        described = self.stream.describe()
        check_stored(self.stored, described, self.stream.reader.sites)
        (self.route,) = paired_routes(self.stream, both_directions=False)
        methods, refusals = route_methods(self.route, self.stored, self.closed_form)
        self.methods = [*methods, *self._floors()]
        self.swapped = []
        for method in self.methods:
            cast(Any, method.aligner).to(self.trainer.strategy.root_device)
            if method.about["fitted_on"] == str(TOKENS):
                self.swapped.append(method)

        self.stream.plan(self._plan())
        self.meta = self._about(described, refusals)

    def _about(self, described: dict[str, Any], refusals: Any) -> dict[str, Any]:
        """Return what holds for all rows of the report."""
        return {
            **described,
            "split": "test",
            "seed": self.seed,
            "refusals": refusals,
            "training": vars(self.how),
            **self.sizes,
            "dimensions": self.dimensions,
            "not_swapped": self.not_swapped,
        }

    def _check_words(self) -> None:
        """Check that all words of annotated sentences are read, and that their states fit in memory."""
        data, reader = self.stream, self.stream.reader
        self.sentences = check_annotated(data, self.tasks, self.trainer.world_size)
        if data.held_out_types:
            raise UserError(
                "Expected `data.held_out_types` 0, as probes need every word of a sentence, but got "
                f"{data.held_out_types}."
            )
        numbers = len(reader.sites) * sum(reader.widths)
        device = self.trainer.strategy.root_device
        check_room(self.sentences.values(), numbers, device)

    def _floors(self) -> list[Method]:
        """Return the floors that are maps, made from the moments of the first checkpoint that has some."""
        kind, moments = first_moments(self.stored)
        floors = []
        for floor in build_floors(self.route, moments, self.seed):
            if floor.aligner is None:
                continue
            about = {**floor.about, "fitted_on": str(kind)}
            floors.append(floor._replace(about=about))
        return floors

    def _plan(self) -> Plan:
        """Plan what is read besides states: Y's task, if there is a twin; otherwise `not_swapped` says why."""
        self.asked = None
        self.not_swapped: str | None = None
        if not self.dimensions:
            self.not_swapped = "`dimensions` is 0"
            return Plan()
        if not self.swapped:
            self.not_swapped = "no map was fitted on all tokens, and injection replaces the states of all tokens"
            return Plan()
        task = InjectedTask.of(
            self.stream, [self.route], masked_share=self.masked_share, seed=self.seed
        )
        self.asked = task.asked
        self.not_swapped = task.not_injected[self.route]
        return Plan(targets_of=task.targets_of)

    def injected_into(self) -> list[FrozenModel]:
        """Y, if there is a twin."""
        if self.asked is None:
            return []
        return [self.route.target]

    # ------------------------------------------------------------------ the held-out sentences

    def on_test_start(self) -> None:
        """Run the self-test."""
        super().on_test_start()
        self.reading = self._words_of("test")

    def test_step(
        self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the words of a batch."""
        self.reading.add(batch)

    def on_test_epoch_end(self) -> None:
        """Check the states of the last batch."""
        self.stream.reader.check.flush()

    # ------------------------------------------------------------------ after

    def _train_each(self, fitting: PairedWords, watched: PairedWords) -> None:
        """Train the probes of each task, on the words of X and on those of Y."""
        self.fitted: list[tuple[Task, Task]] = []
        self.trained: list[Task] = []
        for name in track(self.tasks, "Training", disable=hidden(self.trainer)):
            x = self._trained(name, fitting.x, watched.x)
            y = self._trained(name, fitting.y, watched.y)
            self.fitted.append((x, y))

    def train_probes(self) -> None:
        """Train probes on the fitting words of both models, apply those of Y to mapped words, and swap dimensions."""
        fitting = self._read("fit")
        watched = self._read("validation")
        self.held = self.reading.whole()
        self._train_each(fitting, watched)

        self.report_tables = {"twin": []}
        if self.asked is not None:
            twin, narrow = self._twin(self.asked, fitting.y, watched.y)
            self._swap(twin)
            self.report_tables["twin"] = self._swapped_rows(twin, narrow)
        self.rows = self._compared()
        self.meta |= self._counted()

    def _compared(self) -> list[Row]:
        """Return the rows of all tasks; see `compared`."""
        route = self.route
        names = {"model_x": route.source.name, "model_y": route.target.name}
        rows = []
        for x, y in self.fitted:
            for row in compared(x, y, self.held, self.methods, self.seed):
                rows.append(names | row)
        return rows

    def _counted(self) -> Row:
        """Count the probes that were still learning at the limit, and the held-out sentences."""
        banks = [task.banks[0] for task in self.trained]
        held = self.held.y
        return {
            "unfinished": dict(ended(banks)),
            "sentences": {"test": len(held.sentences), "dropped": held.cut},
        }

    def _words_of(self, split: Split) -> PairsBeingRead:
        sites = self.stream.reader.sites
        return PairsBeingRead(self.sentences[split], sites)

    def _read(self, split: Split) -> PairedWords:
        """Read the words of a split."""
        words = self._words_of(split)
        for batch in self.stream.paired(split):
            words.add(batch)
        return words.whole()

    def _trained(
        self, name: str, words: Words, watched: Words, dimensions: int | None = None
    ) -> Task:
        """Train the probes of a task at all places of words; they may be narrow ones."""
        rank = None
        sizes = dict(self.sizes)
        if name in STRUCTURAL:
            rank = dimensions
        elif dimensions is not None:
            sizes["projection"] = dimensions
        variants = [Variant(*place, rank=rank) for place in words.places]
        task = make_task(name, words, watched, variants, sizes, self.seed)
        task.train(self.how, self.seed)
        self.trained.append(task)
        return task

    def _twin(
        self, asked: ScoredTask, words: Words, watched: Words
    ) -> tuple[Twin, list[Task]]:
        """Run the causal twin: for each task swap what a narrow probe reads, then other dimensions, then everything."""
        places = words.numbers([j for _, j in self.route.pairs])
        narrow = []
        read = {}
        for name in self.tasks:
            task = self._trained(name, words, watched, self.dimensions)
            narrow.append(task)
            subspaces = read_subspaces(task.banks[0])
            read[name] = subspaces[places]
        states = words.states[places]
        parts = parts_of(read, states, self.draws, self.seed)
        behaviour = Behaviour(self.route, asked, (NATIVE_Y,), self.seed)
        twin = Twin(behaviour, self.swapped, parts, self.n_texts, self.seed)
        return twin.to(states.device), narrow

    @torch.no_grad()
    def _swap(self, twin: Twin) -> None:
        """Swap on the held-out texts."""
        target = self.route.target
        batches = len(self.stream.loader("test"))
        paired = self.stream.paired("test")
        quiet = hidden(self.trainer)
        for batch in track(paired, "Swapping", batches, disable=quiet):
            task = cast(TaskBatch, batch.task)
            natives = self.natives([target], task)
            twin.update(task, natives[target])

    def _swapped_rows(self, twin: Twin, narrow: Sequence[Task]) -> list[Row]:
        """Make the rows of the twin, with the scores of the narrow probes."""
        scores = dict[tuple[str, int], float]()
        for task in narrow:
            for place in task.words.places:
                layer = place.layer
                first, *_ = task.at(layer, self.held.y, self.seed).values()
                scores[task.name, layer] = float(first[0, 0])

        rows = []
        for row in twin.rows():
            read_at = row["part"], row["site_y"]
            rows.append({**row, "probe_score": scores.get(read_at)})
        return rows
