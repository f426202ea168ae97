"""The experiment: every probe of every model and its controls, trained on fitting words, asked of held-out words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch

from aligners.models.model import FrozenModel
from aligners.probing.arms import Arm
from aligners.probing.bank import Bank
from aligners.probing.edges.task import EdgeTask
from aligners.probing.online.codes import PORTIONS, portion_ends
from aligners.probing.online.rows import code_rows, portion_rows, send
from aligners.probing.reading import check_annotated, check_room, sentences_of
from aligners.probing.rows import Row
from aligners.probing.storing import save_banks
from aligners.probing.training import ProbeTraining, ended
from aligners.probing.trees.drawing import drawn_trees
from aligners.probing.trees.task import STRUCTURAL, TreeTask
from aligners.probing.words import Place, Source, Words, WordsBeingRead
from aligners.progress import track
from datamodules.layers import LayerActivations, LayerBatch
from datamodules.module import stream_of
from datamodules.rows.policies import policy_of
from datamodules.tokens.splits import Split

__all__ = ["ProbeExperiment"]

SPLITS: tuple[Split, ...] = ("fit", "validation", "test")


class ProbeExperiment(pl.LightningModule):
    """Reads each model, and its untrained twin, once; keeps the states of all words; trains all probes on them.

    A task's probes of all layers are one bank, with those of the controls: the same probe on the untrained twin, and
    on a control task, in which every word has a label drawn for it, wherever it stands. Layer 0 is the lexical
    control. Nothing is chosen on the held-out sentences: the validation sentences say when a probe has learned enough.

    Attributes:
        rows: of the report, after the evaluation.
        meta: what holds for all of them.
        report_tables: the weights of the mixes, and the trees that are drawn.
        banks: the trained probes: by model, task and seed.
        words: of each model and split.

    Args:
        tasks: what is probed: `distance` and `depth` for structural probes, and any tasks of labelled spans that the
            sentences have: for CoNLL-U pos, morphology and dependencies, for JSON lines the name of the file without
            train, dev or test, or the `task` of its lines.
        ranks: of the structural probes. Default: 64, or the width of narrower states.
        mix: whether there is also an edge probe over a learned mix of all layers.
        controls: whether the untrained twin and the control task are probed as well.
        seeds: trainings of each probe, from seeds 0, 1, ...
        projection: width to which edge probes project states.
        hidden: width of their hidden layer.
        training: how probes are trained.
        long_sentences: what becomes of sentences that a model does not read whole: `drop` leaves them out, and the
            report counts them; `error` ends the run.
        drawn: held-out sentences of which trees are drawn.
        portions: in which the labels of the fitting sentences are sent, each by edge probes that were trained on those
            before: where they end, as shares. None: no description length is taken. Structural probes have none: they
            predict distances, of which no code of the labels follows.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        tasks: list[str] = ["pos", "dependencies", "distance", "depth"],  # noqa: B006  (copied)
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
    ) -> None:
        super().__init__()
        for name, values, least in (
            ("tasks", [len(tasks)], 1), ("ranks", [1] if ranks is None else [*ranks, len(ranks)], 1),
            ("seeds", [seeds], 1), ("projection", [projection], 1), ("hidden", [hidden], 1), ("drawn", [drawn], 0),
        ):  # fmt: skip
            if min(values) < least:
                raise ValueError(f"Expected `{name}` to be at least {least}, but got {min(values)}.")
        if portions:
            portion_ends(10**6, portions)
        self.portions = list(portions)
        self.tasks, self.ranks, self.mix, self.controls = list(dict.fromkeys(tasks)), ranks, mix, controls
        self.seeds, self.sizes = seeds, {"projection": projection, "hidden": hidden}
        self.how, self.drop, self.drawn = training, long_sentences == "drop", drawn
        self.rows: list[Row] = []
        self.meta: Row = {}
        self.report_tables: dict[str, list[Row]] = {}
        self.banks: dict[tuple[str, str, int], Bank] = {}
        self.words: dict[tuple[int, Split], Words] = {}

    @property
    def _data(self) -> LayerActivations:
        return stream_of(self.trainer, LayerActivations)

    # ------------------------------------------------------------------ reading

    def setup(self, stage: str) -> None:
        """Check that all tasks can be asked, that the states fit in memory, and that there is one process."""
        data = self._data
        check_annotated(data, self.tasks, self.trainer.world_size)
        if policy_of(data.rows).types != "words" or data.component != "residual":
            raise ValueError(f"Expected `data.rows` to be of words, such as words_mean, but got {data.rows!r}.")
        self._sentences = {split: sentences_of(data, split) for split in SPLITS}
        wide = sum(model.width * len(self._places(m)) for m, model in enumerate(data.reader.models))
        check_room(self._sentences.values(), wide, self.trainer.strategy.root_device)
        data.plan(SPLITS)

    def _places(self, m: int) -> tuple[Place, ...]:
        sources: list[Source] = ["model", "untrained"] if self.controls else ["model"]
        return tuple(Place(source, layer) for source in sources for layer in self._data.reader.layers[m])

    def on_test_start(self) -> None:
        """Make the untrained twins."""
        models = self._data.reader.models
        self._twins: list[FrozenModel] = []
        if self.controls:
            self._twins = [model.untrained(self._data.seed + m) for m, model in enumerate(models)]
        self._reading = {
            (m, split): WordsBeingRead(self._sentences[split], self._places(m), m)
            for m in range(len(models)) for split in SPLITS
        }  # fmt: skip

    def test_step(self, batch: LayerBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the states of a batch's words."""
        for m, states in enumerate(batch.states):
            twins = [self._data.reader.states(self._twins[m].to(states.device), batch, m)] if self.controls else []
            self._reading[m, SPLITS[dataloader_idx]].add(batch, torch.cat([states, *twins]))

    # ------------------------------------------------------------------ training

    def on_test_epoch_end(self) -> None:
        """Train every bank, and ask it of the held-out words."""
        data = self._data
        data.reader.check.flush()
        self._twins = []
        self.words = {which: found.whole(drop=self.drop) for which, found in self._reading.items()}
        tasks = [(m, task) for m in range(len(data.reader.models)) for task in self._tasks(m)]
        planned = [(m, task, seed) for m, task in tasks for seed in range(self.seeds)]
        for m, task, seed in track(planned, "Training", transient=True, disable=not self._shown):
            with torch.enable_grad():
                self.banks[self._name(m), task.name, seed] = task.train(self.how, seed)
        self._ended = ended(self.banks.values())
        self._about = {(self._name(m), task.name): task.about() for m, task in tasks}
        self.rows = [row for m, task in tasks for row in self._asked(m, task)]
        self.meta = {
            **data.describe(), "split": "test", "seeds": self.seeds, "training": vars(self.how), **self.sizes,
            "sentences": {split: len(self.words[0, split].sentences) for split in SPLITS},
            "sentences_dropped": {split: self.words[0, split].cut for split in SPLITS},
        }  # fmt: skip
        self.report_tables = {"mixes": self._mixes(), "trees": self._trees(), **self._sent(tasks)}
        self.meta["unfinished"] = dict(self._ended)

    @property
    def _shown(self) -> bool:
        return self.trainer.progress_bar_callback is not None

    def _name(self, m: int) -> str:
        return self._data.reader.models[m].name

    def _tasks(self, m: int) -> list[EdgeTask | TreeTask]:
        """What is asked of a model's words. All tasks are made, and checked, before any training."""
        words, watched, seed = self.words[m, "fit"], self.words[m, "validation"], self._data.seed
        places = self._places(m)
        ranks: list[int] | list[None] = self.ranks or [None]
        made: list[EdgeTask | TreeTask] = []
        for name in self.tasks:
            if name in STRUCTURAL:
                arms = [Arm(*place, rank=rank) for place in places for rank in ranks]
                made.append(TreeTask(cast(Any, name), words, watched, arms, seed))
            else:
                edges = edge_arms(places, self.mix, self.controls)
                made.append(EdgeTask(name, words, watched, edges, self.sizes, seed))
        return made

    def _asked(self, m: int, task: EdgeTask | TreeTask) -> Iterator[Row]:
        """The rows of a task."""
        for row in task.rows(self._of_seeds(m, task.name), self.words[m, "test"]):
            yield row | {"model": self._name(m)}

    def _of_seeds(self, m: int, task: str) -> list[Bank]:
        return [self.banks[self._name(m), task, seed] for seed in range(self.seeds)]

    def save(self, path: Path) -> None:
        """Write the trained probes to a file; `load_banks` reads them."""
        names = {which: f"{which[1]}, seed {which[2]}, {which[0]}" for which in self.banks}
        about = {name: {"model": which[0], "seed": which[2], **self._about[which[:2]]} for which, name in names.items()}
        save_banks(path, {name: self.banks[which] for which, name in names.items()}, about)

    # ------------------------------------------------------------------ further tables

    def _sent(self, tasks: Sequence[tuple[int, EdgeTask | TreeTask]]) -> dict[str, list[Row]]:
        """How many bits the labels of the fitting sentences take, by model and task, and portion by portion."""
        if not self.portions:
            return {}
        codelengths, portions = list[Row](), list[Row]()
        edges = [(m, task) for m, task in tasks if isinstance(task, EdgeTask)]
        for m, task in track(edges, "Sending", transient=True, disable=not self._shown):
            with torch.enable_grad():
                codes = [send(task, self.how, seed, self.portions) for seed in range(self.seeds)]
            self._ended.update(
                probes=sum(code.unfinished for code in codes),
                of=sum(len(code.bits) * (len(code.ends) - 1) for code in codes),
            )
            codelengths += [{"model": self._name(m), **row} for row in code_rows(task, codes)]
            portions += [{"model": self._name(m), **row} for row in portion_rows(task, codes)]
        return {"codelengths": codelengths, "portions": portions}

    def _mixes(self) -> list[Row]:
        """The weight of each layer in each mix."""
        return [
            {"model": model, "task": task, "seed": seed, "layer": place.layer, "weight": float(weight)}
            for (model, task, seed), bank in self.banks.items()
            for arm, weights in zip(bank.arms, bank.readings.weights(), strict=True)
            for place, weight in zip(bank.places, weights.tolist(), strict=True)
            if arm.layer is None and not arm.control and arm.reads(place)
        ]

    def _trees(self) -> list[Row]:
        """Trees of a few held-out sentences, as the best distance probe of each model sees them."""
        found: list[Row] = []
        for m in range(len(self._data.reader.models) if "distance" in self.tasks else 0):
            name = self._name(m)
            own = [
                row for row in self.rows if (row["model"], row["task"], row["source"]) == (name, "distance", "model")
            ]
            best = max(own, key=lambda row: row["score"] or -1)
            arm = Arm("model", best["site"], rank=best["rank"])
            bank = self.banks[name, "distance", 0]
            found += drawn_trees(bank.only([bank.arms.index(arm)]), self.words[m, "test"], self.drawn, name)
        return found


def edge_arms(places: Sequence[Place], mix: bool, controls: bool) -> list[Arm]:
    """The arms of an edge task: one for each place, a mix of the model's layers, and controls of the model's."""
    arms = [Arm(*place) for place in places] + ([Arm("model", None)] if mix else [])
    return arms + [arm._replace(control=True) for arm in arms if controls and arm.source == "model"]
