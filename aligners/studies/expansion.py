"""Expands a study into its cells."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from aligners.datamodules.run_identity import NOT_OF_FILES
from aligners.errors import UserError
from aligners.models.recipes import EMBEDDED
from aligners.reports.names import file_names
from aligners.reports.study.printed import with_definitions
from aligners.studies.cells import (
    FOLDER,
    KINDS,
    Cell,
    Instance,
    Options,
    merged,
    naming,
)
from aligners.studies.spec import Comparison, Model, Stage, Study

OF_PAIRS = (
    "stitch",
    "attention",
    "compare",
    "carry",
)  # a cell for each pair of different models
ModelPair = tuple[Model, Model]
Maps = tuple[
    Cell | None, str | None
]  # the cell that fits a pair, and the file of its maps


class Commands(Protocol):
    """What the commands say of their options."""

    def accepts(self, kind: str, option: str) -> bool:
        """Whether a command has an option, by its dotted name."""

    def resolve(self, kind: str, options: Options) -> Options:
        """The options that decide a command's result, by their dotted names, defaults filled in.

        Raises:
            ValueError: the command does not take these options.
        """


def expand(study: Study, commands: Commands) -> list[Cell]:
    """List the cells of a study, each after those that it needs.

    Args:
        study: the study.
        commands: what the commands say of their options.

    Raises:
        ValueError: an option that no command has, or that a command does not take.
    """
    check_data(study, commands)
    check_embedded(study)
    return _Expansion(study, commands).cells()


class _Expansion:
    def __init__(self, study: Study, commands: Commands) -> None:
        self.study, self.commands = study, commands
        self.found: dict[str, Cell] = {}
        self._made: dict[tuple[Model, Stage, str], Instance] = {}

    def cells(self) -> list[Cell]:
        study = self.study
        for task in study.tasks:
            for stage in study.stages:
                self._pairs(task, stage)
                self._models(task, stage)
            self._comparisons(task)
            if study.finetune is not None and study.pairs.every:
                self._instances(study.models_at("finetuned"), "finetuned", task)
        for text in study.further_texts("similarity"):
            self._comparisons(text)
        return list(self.found.values())

    # ------------------------------------------------------------------ what is measured

    def _pairs(self, task: str, stage: Stage) -> None:
        """The cells of pairs."""
        study = self.study
        pairs = study.pairs_at(stage)
        with_itself = []
        if study.pairs.same:
            with_itself = [(model, model) for model in study.models_at(stage)]
        fitted: dict[ModelPair, Maps] = {}
        if study.fit is not None and study.wants("fit", stage, task):
            fitted |= self._fits(task, stage, pairs, study.fit.pairs_at_once or 1)
            fitted |= self._fits(task, stage, with_itself, 1)
        for pair in [*pairs, *with_itself]:
            if study.wants("inject", stage, task):
                fit, maps = fitted.get(pair, (None, None))
                given = {"checkpoints": [maps]} if maps else {}
                self._add(
                    "inject", task, self._instances(pair, stage, task), given, fit
                )
            for kind in OF_PAIRS:
                if study.wants(kind, stage, task) and pair[0] != pair[1]:
                    self._add(kind, task, self._instances(pair, stage, task))

    def _fits(
        self, task: str, stage: Stage, pairs: Sequence[ModelPair], at_once: int
    ) -> dict[ModelPair, Maps]:
        """Fit pairs, one or several in a cell.

        This function alone decides how pairs become cells.
        """
        by_pair: dict[ModelPair, Maps] = {}
        for first in range(0, len(pairs), at_once):
            part = pairs[first : first + at_once]
            if len(part) > 1:
                by_pair |= self._fits_in_one(task, stage, part)
                continue
            cell = self._add("fit", task, self._instances(part[0], stage, task))
            by_pair[part[0]] = cell, f"{FOLDER}/{cell.folder}/run/aligners.safetensors"
        return by_pair

    def _fits_in_one(
        self, task: str, stage: Stage, pairs: Sequence[ModelPair]
    ) -> dict[ModelPair, Maps]:
        """Fit several pairs in a cell."""
        models = list(dict.fromkeys(model for pair in pairs for model in pair))
        instances = self._instances(models, stage, task)
        numbers = [[models.index(x), models.index(y)] for x, y in pairs]
        cell = self._add("fit_pairs", task, instances, {"data": {"pairs": numbers}})
        names = list(file_names([model.path for model in instances]).values())
        by_pair: dict[ModelPair, Maps] = {}
        for pair, (x, y) in zip(pairs, numbers, strict=True):
            below = f"run/pairs/{names[x]}--{names[y]}/aligners.safetensors"
            by_pair[pair] = cell, f"{FOLDER}/{cell.folder}/{below}"
        return by_pair

    def _models(self, task: str, stage: Stage) -> None:
        """The cells of single models, and of a model with its fine-tunings."""
        study = self.study
        for kind in ("recover", "probe"):
            if not study.wants(kind, stage, task):
                continue
            for model in study.models_at(stage):
                for data in ({}, *study.further_texts(kind).values()):
                    self._add(
                        kind, task, [self._instance(model, stage, task)], {"data": data}
                    )
        if stage == "finetuned" and study.wants("surgery", stage, task):
            self._surgeries(task)

    def _surgeries(self, task: str) -> None:
        """A cell for each model, with all of its fine-tunings."""
        resolved = self._resolve("surgery", self._options("surgery", task))
        for base in self.study.models.listed():
            tuned = [
                model
                for model in self.study.models_at("finetuned")
                if model.base == base
            ]
            instances = self._instances(tuned, "finetuned", task)
            if (
                resolved.get("trainer.max_epochs") != 0
            ):  # heads are trained on its states, too
                instances.append(Instance(base, "pretrained", base))
            self._add("surgery", task, instances)

    def _comparisons(self, task: str) -> None:
        """The cells of many models on a task's texts, or on further ones: one of all, or one for each of some pairs."""
        study = self.study
        for kind in ("similarity", "identity"):
            work = study.work().get(kind)
            further = study.further_texts(kind).get(task)
            across_stages = across_tasks = False
            if isinstance(work, Comparison):
                across_stages = work.across_stages
                across_tasks = work.across_tasks or further is not None
            stages = [stage for stage in study.stages if study.wants(kind, stage, task)]
            together = [stages] if across_stages else [[stage] for stage in stages]
            for some in together:
                for models in self._sets(some):
                    instances = self._compared(models, task, across_tasks=across_tasks)
                    groups = self._groups(instances) if kind == "identity" else {}
                    self._add(kind, task, instances, {"data": further or {}, **groups})

    def _sets(self, stages: Sequence[Stage]) -> list[list[tuple[Model, Stage]]]:
        """All models at some stages together, or two by two."""
        models = [
            (model, stage) for stage in stages for model in self.study.models_at(stage)
        ]
        if self.study.pairs.every:
            return [models] if models else []
        pairs = dict[tuple[str, str], None]()
        for stage in stages:
            for x, y in self.study.pairs_at(stage):
                pairs[x.name, y.name] = None
        return [
            [(model, stage) for model, stage in models if model.name in pair]
            for pair in pairs
        ]

    def _compared(
        self, models: Sequence[tuple[Model, Stage]], task: str, *, across_tasks: bool
    ) -> list[Instance]:
        """Models at their stages; fine-tuned ones on one task, or on each."""
        instances = []
        for model, stage in models:
            tuned_on = [task]
            if across_tasks and stage == "finetuned":
                tuned_on = list(self.study.tasks)
            instances += [self._instance(model, stage, other) for other in tuned_on]
        return instances

    def _groups(self, instances: Sequence[Instance]) -> Options:
        """The groups of models, for the command that tells them apart itself."""
        groups: dict[str, list[str]] = {}
        for model in instances:
            group = self.study.models.group(model.name)
            if group is not None:
                groups.setdefault(group, []).append(model.path)
        return {"groups": groups} if groups else {}

    # ------------------------------------------------------------------ models

    def _instances(
        self, models: Sequence[Model], stage: Stage, task: str
    ) -> list[Instance]:
        return [self._instance(model, stage, task) for model in models]

    def _instance(self, model: Model, stage: Stage, task: str) -> Instance:
        if stage == "pretrained":
            return Instance(model.name, stage, model.base)
        if (model, stage, task) not in self._made:
            make = self._finetuned if stage == "finetuned" else self._random
            self._made[model, stage, task] = make(model, task)
        return self._made[model, stage, task]

    def _finetuned(self, model: Model, task: str) -> Instance:
        """A fine-tuned model. Each variant is a cell of its own, and the first of them is what others need."""
        base = self._instance(model, "pretrained", task)
        of_task: Options = {}
        if self.study.finetune is not None:
            of_task = self.study.finetune.tasks.get(task, {})
        options = merged(self._options("finetune", task), of_task)
        variants = self._resolve("finetune", options)["variants"]
        cells = []
        for variant in variants:
            given = {**of_task, "seeds": [model.copy]}
            if len(variants) > 1:
                given["variants"] = [variant]
            cells.append(self._add("finetune", task, [base], given))
        below = f"{variants[0].replace(':', '-')}/seed-{model.copy}"
        path = f"{FOLDER}/{cells[0].folder}/run/{below}"
        return Instance(model.name, "finetuned", path, cells[0].id, task)

    def _random(self, model: Model, task: str) -> Instance:
        """An untrained twin. That of an embedded model depends on the texts, of which its tokenizer is made."""
        base = self._instance(model, "pretrained", task)
        seed = {"seed": self.study.models.listed().index(model.base)}
        reads = task if model.base.startswith(EMBEDDED) else None
        cell = self._add("untrained", reads, [base], seed)
        return Instance(
            model.name, "random", f"{FOLDER}/{cell.folder}/run/model", cell.id
        )

    # ------------------------------------------------------------------ options and ids

    def _add(
        self,
        kind: str,
        task: str | None,
        models: Sequence[Instance],
        given: Options | None = None,
        after: Cell | None = None,
    ) -> Cell:
        """Make a cell, unless it is there.

        Args:
            kind: of the cell.
            task: its task; None: it reads no texts.
            models: that it is about.
            given: options that belong to this cell alone.
            after: the cell that fits what it needs, with the data options that both have.
        """
        options = merged(self._options(kind, task, after), given or {})
        needs = [model.cell for model in models if model.cell is not None]
        if after is not None:
            needs.append(after.id)
        needs = list(dict.fromkeys(needs))
        decides = {
            "kind": kind,
            "options": self._resolve(kind, options),
            "models": [model.path for model in models],
            "pairs": options["data"].get("pairs"),
            "needs": needs,
        }
        text = json.dumps(decides, sort_keys=True, default=str)
        number = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        named = merged(options, {"data": naming(kind, models)})
        cell = Cell(number, kind, task, tuple(models), named, tuple(needs))
        return self.found.setdefault(number, cell)

    def _options(
        self, kind: str, task: str | None, after: Cell | None = None
    ) -> Options:
        """The options that all cells of a kind and a task share."""
        study, accepts = self.study, self.commands.accepts
        options: Options = {"data": {}}
        if task is not None:
            for data in (study.data, study.tasks.get(task, {})):
                options = merged(
                    options, {"data": self._shared_data(kind, data, after)}
                )
        if study.store is not None and accepts(kind, "data.store"):
            own = study.store == "own"
            options["data"]["store"] = f"{FOLDER}/store" if own else study.store
        if accepts(kind, "trainer.enable_progress_bar"):
            options["trainer"] = {"enable_progress_bar": False}  # nobody watches
        if accepts(kind, "checkpoint.at_end"):
            options["checkpoint"] = {
                "at_end": False
            }  # nothing goes on from a cell that is done
        work = study.work().get(kind.removesuffix("_pairs"))
        if kind == "finetune" and study.finetune is not None:
            options = merged(options, study.finetune.options)
        elif work is not None:
            options = merged(options, work.options)
        if study.as_printed:
            options = merged(options, with_definitions(kind, options))
        return options

    def _shared_data(self, kind: str, data: Options, after: Cell | None) -> Options:
        """Those of some data options that a kind of cell has, and that do not come with the maps of another cell."""
        shared = {}
        for name, value in data.items():
            option = f"data.{name}"
            comes_with_maps = after is not None and self.commands.accepts(
                after.kind, option
            )
            if self.commands.accepts(kind, option) and (
                name in NOT_OF_FILES or not comes_with_maps
            ):
                shared[name] = value
        return shared

    def _resolve(self, kind: str, options: Options) -> Options:
        """The options that decide the result, models apart, which are the same whichever models they are for."""
        resolved = dict(self.commands.resolve(kind, KINDS[kind].unnamed(options)))
        for name in KINDS[kind].names:
            resolved.pop(f"data.{name}", None)
        return resolved


# ---------------------------------------------------------------------- checks


def check_data(study: Study, commands: Commands) -> None:
    """Raise if a data option is one that no command of the study has."""
    kinds = [*study.work(), *(["finetune"] if study.finetune is not None else [])]

    def unknown(name: str) -> bool:
        return not any(commands.accepts(kind, f"data.{name}") for kind in kinds)

    for place, data in _places(study).items():
        wrong = list(filter(unknown, data))
        if wrong:
            raise UserError(
                f"Expected `{place}` to hold data options of {', '.join(kinds)}, but none of them has "
                f"{', '.join(wrong)}. Their `--help` lists what there is as `--data.NAME`."
            )
    if study.store is not None and unknown("store"):
        raise UserError(
            f"Expected `store` only where a command has `data.store`, but got {study.store!r}."
        )


def _places(study: Study) -> dict[str, Mapping[str, Any]]:
    """The data options of a study, by where they stand in its file."""
    places: dict[str, Mapping[str, Any]] = {"data": study.data}
    for name, data in study.tasks.items():
        places[f"tasks.{name}"] = data
    for kind in study.work():
        for name, data in study.further_texts(kind).items():
            places[f"{kind}.texts.{name}"] = data
    return places


def check_embedded(study: Study) -> None:
    """Raise if embedded models would be others before fine-tuning than those that are fine-tuned.

    They are trained on the texts that a cell reads.
    """
    embedded = [name for name in study.models.listed() if name.startswith(EMBEDDED)]
    if not embedded:
        return
    of_tasks = [data.get("text") for data in study.tasks.values()]
    for kind, work in study.work().items():
        stages = [
            stage for stage in (work.stages or study.stages) if stage != "pretrained"
        ]
        for data in (work.options.get("data", {}), *study.further_texts(kind).values()):
            text = data.get("text")
            if stages and text is not None and any(text != other for other in of_tasks):
                raise UserError(
                    f"Expected no `data.text` in `{kind}.options` or `{kind}.texts`, but got {text!r}: {embedded[0]} "
                    "is trained on the texts that it reads, and would be another model there than where it is "
                    f"{stages[-1]}. Give the tasks this text, or name models by their folders."
                )


def with_kept_rows(cell: Cell) -> Cell:
    """The same cell, of whose texts a store keeps one row each, unless its own options say otherwise."""
    return replace(
        cell, options=merged({"data": {"store_rows": "texts"}}, cell.options)
    )
