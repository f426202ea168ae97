"""The experiment: every probe of every model and its controls, trained on fitting words, measured on held-out words."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from aligners.datamodules.layers import LayerActivations, LayerBatch
from aligners.datamodules.module import stream_of
from aligners.errors import UserError, check_range
from aligners.probing.codes import PORTIONS, code_rows, portion_ends, portion_rows, send
from aligners.probing.probe_bank import Arm, ModelLayer, Source, WordsBeingRead
from aligners.probing.probes import STRUCTURAL, EdgeTask
from aligners.probing.probing_tasks import ProbeTraining, Row, Task, ended
from aligners.probing.storing import save_banks
from aligners.probing.trees import drawn_trees
from aligners.probing.word_states import SPLITS, check_annotated, check_room, make_task, usual_tasks
from aligners.progress import hidden, track


class ProbeExperiment(pl.LightningModule):
    """Reads each model, and its untrained twin, once, when it is tested, and keeps the states of all words.

    `train_probes` then trains all probes on them.

    A task's probes of all layers are one bank, with those of the controls: the same probe on the untrained twin, and
    on a control task, in which every word has a label drawn for it, wherever it stands. Layer 0 is the lexical
    control. Nothing is chosen on the held-out sentences: the validation sentences say when a probe has learned enough.

    Attributes:
        rows: of the report, once the probes are trained.
        meta: what holds for all of them.
        report_tables: the weights of the mixes, and the trees that are drawn.
        probed: the number of a model, and a task on its words with the trained probes.
        words: of each model and split.

    Args:
        tasks: what is probed: `distance` and `depth` for structural probes, and any tasks of labelled spans that the
            sentences have: for CoNLL-U pos, morphology and dependencies, for JSON lines the name of the file without
            train, dev or test, or the `task` of its lines. Default: pos, dependencies, distance and depth where the
            sentences have them, or else all that they have.
        ranks: ranks of the structural probes. Default: 64, or the width of narrower states.
        mix: whether there is also an edge probe over a learned mix of all layers.
        controls: whether the untrained twin and the control task are probed as well.
        seeds: trainings of each probe, from seeds 0, 1, ...
        projection: width to which edge probes project states.
        hidden: width of their hidden layer.
        training: how probes are trained.
        long_sentences: what to do with sentences that a model does not read whole: `drop` leaves them out, and the
            report counts them; `error` ends the run.
        drawn: number of held-out sentences whose trees are drawn.
        portions: where the portions end, as shares, in which the labels of the fitting sentences are sent, each by edge
            probes that were trained on those before. None: no description length is taken. Structural probes have none,
            because they predict distances, which give no code of the labels.
        twin_mix: whether the untrained twin has an edge probe over a mix of its layers, too (Merchant et al. 2020,
            Table 1); needs `mix` and `controls`. Other probes then start from other weights.

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
        self.seeds, self.sizes = seeds, {"projection": projection, "hidden": hidden}
        check_range(
            least=1,
            tasks=None if tasks is None else len(tasks),
            ranks=ranks,
            seeds=seeds,
            **self.sizes,
        )
        check_range(least=0, drawn=drawn)
        if twin_mix and not (mix and controls):
            raise UserError(
                "Expected `mix` and `controls` where `twin_mix` is set, but got one of them false."
            )
        if portions:
            portion_ends(10**6, portions)
        self.portions = list(portions)
        self.tasks, self.ranks, self.controls = list(dict.fromkeys(tasks or ())), ranks, controls
        mixes: dict[Source, bool] = {"model": mix, "untrained": twin_mix}
        self.mixes = [source for source, mixed in mixes.items() if mixed]
        self.how, self.drop, self.drawn = training, long_sentences == "drop", drawn

    @property
    def _data(self) -> LayerActivations:
        return stream_of(self.trainer, LayerActivations)

    @property
    def _names(self) -> list[str]:
        return [model.name for model in self._data.reader.models]

    # ------------------------------------------------------------------ reading

    def setup(self, stage: str) -> None:
        """Check that all tasks can be probed, that the states fit in memory, and that there is one process."""
        data = self._data
        self._sentences = check_annotated(data, self.tasks or None, self.trainer.world_size)
        self.tasks = self.tasks or usual_tasks(self._sentences["fit"])
        if data.component != "residual":
            raise UserError(
                f"Expected `data.component` residual, as layer 0 is a control, but got {data.component!r}."
            )
        data.keep_far()  # a probe answers for every word of a sentence
        wide = sum(model.width * len(self._places(m)) for m, model in enumerate(data.reader.models))
        check_room(self._sentences.values(), wide, self.trainer.strategy.root_device)
        data.plan(tuple(SPLITS))

    def _places(self, m: int) -> tuple[ModelLayer, ...]:
        sources: list[Source] = ["model", "untrained"] if self.controls else ["model"]
        return tuple(
            ModelLayer(source, layer) for source in sources for layer in self._data.reader.layers[m]
        )

    def on_test_start(self) -> None:
        """Make the untrained twins."""
        models = self._data.reader.models
        twins = enumerate(models if self.controls else [])
        self._twins = [model.untrained(self._data.seed + m) for m, model in twins]
        self._reading = {
            (m, split): WordsBeingRead(self._sentences[split], self._places(m))
            for m in range(len(models)) for split in SPLITS
        }  # fmt: skip

    def test_step(self, batch: LayerBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the states of a batch's words."""
        split = list(SPLITS)[dataloader_idx]
        for m, states in enumerate(batch.states):
            read = self._data.reader.read_model
            twins = [read(self._twins[m].to(states.device), batch, m)[0]] if self.controls else []
            words = torch.cat([states, *twins])
            self._reading[m, split].add(batch.texts.text_numbers, batch.rows[m].counts, words)

    def on_test_epoch_end(self) -> None:
        """Look at the last batch, and let the twins go."""
        self._data.reader.check.flush()
        self._twins = []

    # ------------------------------------------------------------------ training

    def train_probes(self) -> None:
        """Train every bank on the words that were read, and measure it on the held-out words."""
        data = self._data
        self.words = {
            which: being_read.whole(drop=self.drop) for which, being_read in self._reading.items()
        }
        self.probed = [
            (m, self._task(m, name)) for m in range(len(self._names)) for name in self.tasks
        ]
        planned = [(task, seed) for _, task in self.probed for seed in range(self.seeds)]
        for task, seed in self._shown(planned, "Training"):
            task.train(self.how, seed)
        unfinished = ended(bank for _, task in self.probed for bank in task.banks)
        names = self._names
        self.rows = [
            row | {"model": names[m]}
            for m, task in self.probed
            for row in task.rows(self.words[m, "test"])
        ]
        self.report_tables = {"mixes": self._mixes(), "trees": self._trees()}
        if self.portions:
            self.report_tables |= self._sent(unfinished)
        self.meta = {
            **data.describe(), "split": "test", "seeds": self.seeds, "training": vars(self.how), **self.sizes,
            "sentences": {split: len(self.words[0, split].sentences) for split in SPLITS},
            "sentences_dropped": {split: self.words[0, split].cut for split in SPLITS}, "unfinished": dict(unfinished),
        }  # fmt: skip

    def _shown(self, planned: Sequence[Any], what: str) -> Any:
        return track(planned, what, disable=hidden(self.trainer))

    def _task(self, m: int, name: str) -> Task:
        """A task on a model's words. All are made, and checked, before any training."""
        places = self._places(m)
        if name in STRUCTURAL:
            arms = [Arm(*place, rank=rank) for place in places for rank in (self.ranks or (None,))]
        else:
            arms = [Arm(*place) for place in places] + [Arm(source, None) for source in self.mixes]
            arms += [
                arm._replace(control=True)
                for arm in arms
                if self.controls and arm.source == "model"
            ]
        return make_task(
            name,
            self.words[m, "fit"],
            self.words[m, "validation"],
            arms,
            self.sizes,
            self._data.seed,
        )

    def save(self, path: Path) -> None:
        """Write the trained probes to a file; `load_banks` reads them."""
        banks = {}
        for m, task in self.probed:
            for seed, bank in enumerate(task.banks):
                about = {"model": self._names[m], "seed": seed, **task.about()}
                banks[f"{task.name}, seed {seed}, {self._names[m]}"] = bank, about
        save_banks(path, banks)

    # ------------------------------------------------------------------ further tables

    def _sent(self, unfinished: Counter[str]) -> dict[str, list[Row]]:
        """How many bits the labels of the fitting sentences take, by model and task, and portion by portion."""
        tables: dict[str, list[Row]] = {"codelengths": [], "portions": []}
        for m, task in self._shown(
            [pair for pair in self.probed if isinstance(pair[1], EdgeTask)], "Sending"
        ):
            codes = [send(task, self.how, seed, self.portions) for seed in range(self.seeds)]
            for code in codes:
                unfinished.update(probes=code.unfinished, of=len(code.bits) * (len(code.ends) - 1))
            for name, rows in {
                "codelengths": code_rows(task, codes),
                "portions": portion_rows(task, codes),
            }.items():
                tables[name] += [{"model": self._names[m], **row} for row in rows]
        return tables

    def _mixes(self) -> list[Row]:
        """The weight of each layer in each mix."""
        return [
            {"model": self._names[m], "task": task.name, "seed": seed, "layer": place.layer, "weight": float(weight)}
            for m, task in self.probed for seed, bank in enumerate(task.banks)
            for arm, weights in zip(bank.arms, bank.readings.weights(), strict=True)
            for place, weight in zip(bank.places, weights.tolist(), strict=True)
            if arm == Arm("model", None) and arm.reads(place)
        ]  # fmt: skip

    def _trees(self) -> list[Row]:
        """Trees of a few held-out sentences, as the best distance probe of each model sees them."""
        trees: list[Row] = []
        for m, task in self.probed:
            if task.name == "distance":
                wanted = (self._names[m], task.name, "model")
                rows = [
                    row for row in self.rows if (row["model"], row["task"], row["source"]) == wanted
                ]
                best = max(rows, key=lambda row: row["score"] or -1)
                arm = task.arms.index(Arm("model", best["site"], rank=best["rank"]))
                trees += drawn_trees(
                    task.banks[0].only([arm]), self.words[m, "test"], self.drawn, self._names[m]
                )
        return trees
