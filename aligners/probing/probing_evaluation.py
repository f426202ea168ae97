"""The experiment: train every probe of every model and its controls, and measure them on held-out words."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch

from aligners.datamodules.layers import LayerActivations, LayerBatch
from aligners.datamodules.module import stream_of
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError, check_range
from aligners.probing.codes import PORTIONS, code_rows, portion_ends, portion_rows, send
from aligners.probing.probe_bank import (
    Bank,
    ModelLayer,
    Source,
    Variant,
    Words,
    WordsBeingRead,
)
from aligners.probing.probes import STRUCTURAL, EdgeTask
from aligners.probing.probing_tasks import ProbeTraining, Row, Task, ended
from aligners.probing.storing import save_banks
from aligners.probing.trees import drawn_trees
from aligners.probing.word_states import (
    SPLITS,
    check_annotated,
    check_room,
    make_task,
    usual_tasks,
)
from aligners.progress import hidden, track

OF_TREES = ("distance", "model")  # task and source of the probes whose trees are drawn


class ProbeExperiment(pl.LightningModule):
    """Reads each model, and its untrained twin, once in its test loop, and keeps the states of all words.

    `train_probes` then trains all probes on them.

    A task's probes of all layers form one bank, together with the controls: the same probe on the untrained twin, and
    on a control task, in which every word has a random label of its own. Layer 0 is the lexical control. Held-out
    sentences choose nothing: the validation sentences decide when training stops.

    Attributes:
        rows: rows of the report, once the probes are trained.
        meta: what holds for all rows.
        report_tables: weights of the mixes, drawn trees, and description lengths.
        probed: each model's number with a task on its words, which holds the trained probes.
        words: the words of each model and split.

    Args:
        tasks: tasks to probe: `distance` and `depth` for structural probes, and any tasks of labelled spans that the
            sentences have: for CoNLL-U pos, morphology and dependencies, for JSON lines the name of the file without
            train, dev or test, or the `task` of its lines. Default: pos, dependencies, distance and depth where the
            sentences have them, or else all that they have.
        ranks: ranks of the structural probes. Default: 64, or the width of narrower states.
        mix: whether to train an edge probe over a learned mix of all layers as well.
        controls: whether to probe the untrained twin and the control task as well.
        seeds: trainings of each probe, from seeds 0, 1, ...
        projection: width to which edge probes project states.
        hidden: width of edge probes' hidden layer.
        training: how probes are trained.
        long_sentences: what to do with sentences that a model does not read whole: `drop` leaves them out, and the
            report counts them; `error` ends the run.
        drawn: number of held-out sentences whose trees the report draws.
        portions: ends, as shares of the fitting sentences, of the portions in which their labels are sent, each by edge
            probes trained on the portions before. None: measure no description length. Structural probes have none,
            because they predict distances, which give no code of the labels.
        twin_mix: whether the untrained twin also has an edge probe over a mix of its layers (Merchant et al. 2020,
            Table 1); needs `mix` and `controls`. It changes the weights that other probes start from.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        tasks: list[str] | None = None,
        ranks: list[int] | None = None,
        mix: bool = True,
        controls: bool = True,
        seeds: int = 2,
        projection: int = 128,
        hidden: int = 128,
        training: ProbeTraining = ProbeTraining(),  # noqa: B008  (frozen)
        long_sentences: Literal["drop", "error"] = "drop",
        drawn: int = 3,
        portions: list[float] = list(PORTIONS),  # noqa: B006  (copied)
        twin_mix: bool = False,
    ) -> None:
        super().__init__()
        self.seeds = seeds
        self.sizes = {"projection": projection, "hidden": hidden}
        count = None if tasks is None else len(tasks)
        check_range(least=1, tasks=count, ranks=ranks, seeds=seeds, **self.sizes)
        check_range(least=0, drawn=drawn)
        if twin_mix and not (mix and controls):
            raise UserError(
                "Expected `mix` and `controls` where `twin_mix` is set, but got one of them false."
            )
        if portions:
            portion_ends(10**6, portions)
        self.portions = list(portions)
        self.tasks = list(dict.fromkeys(tasks or ()))
        self.ranks = ranks
        self.controls = controls
        self.mixes: list[Source] = []
        if mix:
            self.mixes.append("model")
        if twin_mix:
            self.mixes.append("untrained")
        self.how = training
        self.drop = long_sentences == "drop"
        self.drawn = drawn

    @property
    def _data(self) -> LayerActivations:
        return stream_of(self.trainer, LayerActivations)

    def _name(self, m: int) -> str:
        return self._data.reader.models[m].name

    # ------------------------------------------------------------------ reading

    def setup(self, stage: str) -> None:
        """Check that all tasks can be probed, that the states fit in memory, and that there is one process."""
        data, trainer = self._data, self.trainer
        self._sentences = check_annotated(data, self.tasks, trainer.world_size)
        self.tasks = self.tasks or usual_tasks(self._sentences["fit"])
        if data.component != "residual":
            raise UserError(
                f"Expected `data.component` residual, as layer 0 is a control, but got {data.component!r}."
            )
        data.keep_far()  # a probe answers for every word of a sentence
        numbers = 0
        for m, model in enumerate(data.reader.models):
            numbers += model.width * len(self._places(m))
        check_room(self._sentences.values(), numbers, trainer.strategy.root_device)
        data.plan(tuple(SPLITS))

    def _places(self, m: int) -> list[ModelLayer]:
        """Return the places where states of a model are read: all layers, then those of its twin."""
        sources: list[Source] = ["model"]
        if self.controls:
            sources.append("untrained")
        layers = self._data.reader.layers[m]
        return [ModelLayer(*place) for place in product(sources, layers)]

    def on_test_start(self) -> None:
        """Make the untrained twins."""
        self._twins = []
        self._reading: dict[tuple[int, Split], WordsBeingRead] = {}
        for m, model in enumerate(self._data.reader.models):
            if self.controls:
                seed = self._data.seed + m
                self._twins.append(model.untrained(seed))
            places = self._places(m)
            for split in SPLITS:
                words = WordsBeingRead(self._sentences[split], places)
                self._reading[m, split] = words

    def test_step(
        self, batch: LayerBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the states of a batch's words."""
        split = list(SPLITS)[dataloader_idx]
        numbers = batch.texts.text_numbers
        for m, states in enumerate(batch.states):
            if self.controls:
                twin = self._twins[m].to(states.device)
                untrained, *_ = self._data.reader.read_model(twin, batch, m)
                states = torch.cat([states, untrained])
            counts = batch.rows[m].counts
            self._reading[m, split].add(numbers, counts, states)

    def on_test_epoch_end(self) -> None:
        """Check the states of the last batch, and free the twins."""
        self._data.reader.check.flush()
        self._twins = []

    # ------------------------------------------------------------------ training

    def train_probes(self) -> None:
        """Train every bank on the words that were read, and measure it on the held-out words."""
        self._make_tasks()
        self._train()
        self.rows: list[Row] = []
        for m, task in self.probed:
            for row in task.rows(self.words[m, "test"]):
                self.rows.append({**row, "model": self._name(m)})
        unfinished = self._unfinished()
        self.report_tables = {"mixes": self._mixes(), "trees": self._trees()}
        if self.portions:
            self.report_tables |= self._sent(unfinished)
        self.meta = {
            **self._data.describe(),
            "split": "test",
            "seeds": self.seeds,
            "training": vars(self.how),
            **self.sizes,
            **self._counted(),
            "unfinished": dict(unfinished),
        }

    def _train(self) -> None:
        """Train each task once from each seed."""
        planned = list(product(self.probed, range(self.seeds)))
        quiet = hidden(self.trainer)
        for (_, task), seed in track(planned, "Training", disable=quiet):
            task.train(self.how, seed)

    def _unfinished(self) -> Counter[str]:
        """Return how many of all probes were still learning at the limit."""
        banks = list[Bank]()
        for _, task in self.probed:
            banks += task.banks
        return ended(banks)

    def _counted(self) -> Row:
        """Count the sentences of each split that the first model read, and those that were dropped."""
        read = dict[str, int]()
        dropped = dict[str, int]()
        for split in SPLITS:
            words = self.words[0, split]
            read[split] = len(words.sentences)
            dropped[split] = words.cut
        return {"sentences": read, "sentences_dropped": dropped}

    def _make_tasks(self) -> None:
        """Make all tasks on the words of all models, which checks them before any training."""
        self.words: dict[tuple[int, Split], Words] = {}
        for place, being_read in self._reading.items():
            self.words[place] = being_read.whole(drop=self.drop)

        self.probed: list[tuple[int, Task]] = []
        models = range(len(self._data.reader.models))
        for m, name in product(models, self.tasks):
            task = make_task(
                name,
                self.words[m, "fit"],
                self.words[m, "validation"],
                self._variants(m, name),
                self.sizes,
                self._data.seed,
            )
            self.probed.append((m, task))

    def _variants(self, m: int, name: str) -> list[Variant]:
        """Return the probes of a task: one for each place and rank, or for each place, mix and control task."""
        variants = []
        places = self._places(m)
        if name in STRUCTURAL:
            ranks: Sequence[int | None] = self.ranks or [None]
            for place, rank in product(places, ranks):
                variants.append(Variant(*place, rank=rank))
            return variants

        variants += [Variant(*place) for place in places]
        variants += [Variant(source, None) for source in self.mixes]
        if not self.controls:
            return variants
        controls = []
        for variant in variants:
            if variant.source == "model":
                controls.append(variant._replace(control=True))
        return variants + controls

    def save(self, path: Path) -> None:
        """Write the trained probes to a file; `load_banks` reads them."""
        banks = {}
        for m, task in self.probed:
            model = self._name(m)
            for seed, bank in enumerate(task.banks):
                about = {"model": model, "seed": seed, **task.about()}
                banks[f"{task.name}, seed {seed}, {model}"] = bank, about
        save_banks(path, banks)

    # ------------------------------------------------------------------ further tables

    def _sent(self, unfinished: Counter[str]) -> dict[str, list[Row]]:
        """Return the bits that the labels of the fitting sentences take, by model and task, and portion by portion."""
        lengths = list[Row]()
        portions = list[Row]()
        labelled = [(m, task) for m, task in self.probed if isinstance(task, EdgeTask)]
        for m, task in track(labelled, "Sending", disable=hidden(self.trainer)):
            codes = []
            for seed in range(self.seeds):
                code = send(task, self.how, seed, self.portions)
                trained = len(code.bits) * len(code.sent)
                unfinished.update(probes=code.unfinished, of=trained)
                codes.append(code)

            model = {"model": self._name(m)}
            lengths += [model | row for row in code_rows(task, codes)]
            portions += [model | row for row in portion_rows(task, codes)]
        return {"codelengths": lengths, "portions": portions}

    def _mixes(self) -> list[Row]:
        """Return the weight of each layer in each mix of the models' layers."""
        mix = Variant("model", None)
        rows = list[Row]()
        for m, task in self.probed:
            about = {"model": self._name(m), "task": task.name}
            if mix not in task.variants:
                continue
            number = task.variants.index(mix)
            for seed, bank in enumerate(task.banks):
                weights = bank.readings.weights()[number].tolist()
                for place, weight in zip(bank.places, weights, strict=True):
                    if mix.reads(place):
                        layer = {"layer": place.layer, "weight": weight}
                        rows.append({**about, "seed": seed, **layer})
        return rows

    def _trees(self) -> list[Row]:
        """Return trees of a few held-out sentences, as predicted by the best distance probe of each model."""
        trees = list[Row]()
        for m, task in self.probed:
            if task.name != "distance":
                continue
            model = self._name(m)
            own = []
            for row in self.rows:
                if (row["model"], row["task"], row["source"]) == (model, *OF_TREES):
                    own.append(row)
            best = max(own, key=lambda row: row["score"] or -1)
            variant = Variant("model", best["site"], rank=best["rank"])
            number = task.variants.index(variant)
            probe = task.banks[0].only([number])
            trees += drawn_trees(probe, self.words[m, "test"], self.drawn, model)
        return trees
