"""The cells of a study: each one call of a command, of a kind, named after everything that decides its result."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from aligners.datamodules.run_identity import NOT_OF_FILES
from aligners.errors import UserError
from aligners.files.yaml_tables import table_beside
from aligners.models.recipes import EMBEDDED
from aligners.reports.names import file_names
from aligners.reports.study.printed import with_definitions
from aligners.studies.spec import Model, Stage, Study

PAIR = ["model_x", "model_y"]
OF_PAIRS = ("stitch", "attention", "compare", "carry")  # a cell for each pair of different models
FOLDER = "{study}"  # stands for the study's folder in the options of a cell
Options = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of cell.

    Attributes:
        script: `train` or `evaluate`.
        command: of that script.
        names: data options of the command that say which models, and which pairs of them.
        report: file with the rows in the command's folder; None: the command leaves a model and no rows.
        table: name of the table that the rows go into; None: none.
        leaves: what other cells need of it, below its folder.
        apart: further options that name models or cells.
        alone: whether one process runs it, however many devices a cell has.
    """

    script: Literal["train", "evaluate"]
    command: str
    names: Sequence[str] = ("models",)
    report: str | None = None
    table: str | None = None
    leaves: str = "run"
    apart: Sequence[str] = ()
    alone: bool = False

    def unnamed(self, options: Mapping[str, Any]) -> Options:
        """The options of a cell that name neither models nor cells."""
        rest = {name: value for name, value in options.items() if name not in self.apart}
        data = {
            name: value for name, value in options.get("data", {}).items() if name not in self.names
        }
        return {**rest, "data": data}


KINDS = {kind: Kind(**about) for kind, about in table_beside(__file__, "kinds.yaml").items()}


class Commands(Protocol):
    """What the commands say of their options."""

    def accepts(self, kind: str, option: str) -> bool:
        """Whether a command has an option, by its dotted name."""

    def resolve(self, kind: str, options: Options) -> Options:
        """The options that decide a command's result, by their dotted names, defaults filled in.

        Raises:
            ValueError: the command does not take these options.
        """


@dataclass(frozen=True)
class Instance:
    """A model at a stage.

    Attributes:
        name: as in the study file, whatever the stage.
        stage: of the model.
        path: name by which a command loads it.
        cell: the cell that makes it; None: it is there.
        tuned_on: name of the task that it was fine-tuned on; None: on none.
    """

    name: str
    stage: Stage
    path: str
    cell: str | None = None
    tuned_on: str | None = None


@dataclass(frozen=True)
class Cell:
    """One call of a command.

    Attributes:
        id: hash of everything that decides the result.
        kind: one of `KINDS`.
        task: name of the task; None: it matters to no cell of this kind.
        models: that it is about, in the order of the command.
        options: of the command.
        needs: ids of the cells that must be done before.
    """

    id: str
    kind: str
    task: str | None
    models: tuple[Instance, ...]
    options: Options
    needs: tuple[str, ...] = ()

    @property
    def stage(self) -> Stage | None:
        """The stage of the models; None if they differ in it."""
        stages = {model.stage for model in self.models}
        return stages.pop() if len(stages) == 1 else None

    @property
    def pairs(self) -> int:
        """How many pairs of models it fits."""
        return len(self.options["data"].get("pairs", [0]))

    @property
    def folder(self) -> str:
        """Below the study's folder."""
        return f"cells/{self.id}"

    def said(self) -> str:
        """What it is, in a few words."""
        names = [model.name for model in self.models]
        listed = " – ".join(names) if len(names) < 4 else f"{len(names)} models"
        return ", ".join(filter(None, [f"{self.kind} {listed}", self.task, self.stage]))


Instances = Sequence[Instance]


def expand(study: Study, commands: Commands) -> list[Cell]:
    """List the cells of a study, each after those that it needs.

    Args:
        study: the study.
        commands: what the commands say of their options.

    Raises:
        ValueError: an option that no command has, or that a command does not take.
    """
    return _Expansion(study, commands).cells()


class _Expansion:
    def __init__(self, study: Study, commands: Commands) -> None:
        self.study, self.commands = study, commands
        self.found: dict[str, Cell] = {}
        self._made: dict[tuple[Model, Stage, str], Instance] = {}

    def cells(self) -> list[Cell]:
        self._check_data()
        self._check_embedded()
        for task in self.study.tasks:
            for stage in self.study.stages:
                self._pairs(task, stage)
                self._models(task, stage)
            self._comparisons(task)
            if self.study.finetune is not None and self.study.pairs.every:
                self._instances(self.study.models_at("finetuned"), "finetuned", task)
        for text in self.study.further_texts("similarity"):
            self._comparisons(text)
        return list(self.found.values())

    # ------------------------------------------------------------------ what is measured

    def _pairs(self, task: str, stage: Stage) -> None:
        """The cells of pairs."""
        pairs = self.study.pairs_at(stage)
        with_itself = [
            (model, model) for model in self.study.models_at(stage) if self.study.pairs.same
        ]
        wants = {kind: self.study.wants(kind, stage, task) for kind in ("fit", "inject", *OF_PAIRS)}
        fitted: dict[tuple[Model, Model], tuple[Cell, str]] = {}
        if wants["fit"]:
            at_once = (self.study.fit and self.study.fit.pairs_at_once) or 1
            fitted = self._fits(task, stage, pairs, at_once) | self._fits(
                task, stage, with_itself, 1
            )
        for pair in [*pairs, *with_itself] if any(wants.values()) else []:
            both = self._instances(pair, stage, task)
            if wants["inject"]:
                fit, maps = fitted.get(pair, (None, None))
                self._add("inject", task, both, {"checkpoints": [maps]} if maps else {}, fit)
            for kind in OF_PAIRS:
                if wants[kind] and pair[0] != pair[1]:
                    self._add(kind, task, both)

    def _fits(
        self, task: str, stage: Stage, pairs: Sequence[tuple[Model, Model]], at_once: int
    ) -> dict[tuple[Model, Model], tuple[Cell, str]]:
        """Fit pairs, one or several in a cell; for each pair its cell, and the file of its maps.

        This function alone decides how pairs become cells.
        """
        by_pair = {}
        for first in range(0, len(pairs), at_once):
            part = pairs[first : first + at_once]
            if len(part) == 1:
                cell = self._add("fit", task, self._instances(part[0], stage, task))
                by_pair[part[0]] = cell, f"{FOLDER}/{cell.folder}/run/aligners.safetensors"
                continue
            models = list(dict.fromkeys(model for pair in part for model in pair))
            instances = self._instances(models, stage, task)
            numbers = [[models.index(x), models.index(y)] for x, y in part]
            cell = self._add("fit_pairs", task, instances, {"data": {"pairs": numbers}})
            names = list(file_names([model.path for model in instances]).values())
            for pair, (x, y) in zip(part, numbers, strict=True):
                by_pair[pair] = (
                    cell,
                    f"{FOLDER}/{cell.folder}/run/pairs/{names[x]}--{names[y]}/aligners.safetensors",
                )
        return by_pair

    def _models(self, task: str, stage: Stage) -> None:
        for kind in ("recover", "probe"):
            for model in self.study.models_at(stage) if self.study.wants(kind, stage, task) else []:
                for data in ({}, *self.study.further_texts(kind).values()):
                    self._add(kind, task, self._instances([model], stage, task), {"data": data})
        if stage == "finetuned" and self.study.wants("surgery", stage, task):
            heads = (
                self._resolve("surgery", self._options("surgery", task)).get("trainer.max_epochs")
                != 0
            )
            for base in self.study.models.listed():  # with all of its fine-tunings
                tuned = [model for model in self.study.models_at(stage) if model.base == base]
                trained = (
                    [Instance(base, "pretrained", base)] if heads else []
                )  # heads are trained on its states, too
                self._add("surgery", task, [*self._instances(tuned, stage, task), *trained])

    def _comparisons(self, task: str) -> None:
        """The cells of many models on a task's texts, or on further ones: one of all, or one for each of some pairs."""
        for kind in ("similarity", "identity"):
            work = getattr(self.study, kind)
            stages = [stage for stage in self.study.stages if self.study.wants(kind, stage, task)]
            further = self.study.further_texts(kind).get(task)
            across = getattr(work, "across_tasks", False) or further is not None
            tuned_on = list(self.study.tasks) if across else [task]
            for together in (
                [stages] if getattr(work, "across_stages", False) else [[stage] for stage in stages]
            ):
                for models in self._sets(together):
                    instances = [
                        self._instance(model, stage, other)
                        for model, stage in models
                        for other in (tuned_on if stage == "finetuned" else [task])
                    ]
                    groups = self._groups(instances) if kind == "identity" else {}
                    self._add(kind, task, instances, {"data": further or {}, **groups})

    def _sets(self, stages: Sequence[Stage]) -> list[list[tuple[Model, Stage]]]:
        """All models at some stages together, or two by two."""
        models = [(model, stage) for stage in stages for model in self.study.models_at(stage)]
        if self.study.pairs.every:
            return [models] if models else []
        pairs = {(x.name, y.name): None for stage in stages for x, y in self.study.pairs_at(stage)}
        return [[(model, stage) for model, stage in models if model.name in pair] for pair in pairs]

    def _groups(self, instances: Instances) -> Options:
        """The groups of models, for the command that tells them apart itself."""
        groups: dict[str, list[str]] = {}
        for model in instances:
            if (group := self.study.models.group(model.name)) is not None:
                groups.setdefault(group, []).append(model.path)
        return {"groups": groups} if groups else {}

    # ------------------------------------------------------------------ models

    def _instances(self, models: Sequence[Model], stage: Stage, task: str) -> list[Instance]:
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
        of_task = self.study.finetune.tasks.get(task, {}) if self.study.finetune is not None else {}
        wanted = self._resolve("finetune", merged(self._options("finetune", task), of_task))[
            "variants"
        ]
        alone = [{"variants": [variant]} for variant in wanted] if len(wanted) > 1 else [{}]
        cell, *_ = [
            self._add("finetune", task, [base], {**of_task, "seeds": [model.copy], **each})
            for each in alone
        ]
        folder = f"{FOLDER}/{cell.folder}/run/{wanted[0].replace(':', '-')}/seed-{model.copy}"
        return Instance(model.name, "finetuned", folder, cell.id, task)

    def _random(self, model: Model, task: str) -> Instance:
        """An untrained twin. That of an embedded model depends on the texts, of which its tokenizer is made."""
        base = self._instance(model, "pretrained", task)
        seed = {"seed": self.study.models.listed().index(model.base)}
        cell = self._add(
            "untrained", task if model.base.startswith(EMBEDDED) else None, [base], seed
        )
        return Instance(model.name, "random", f"{FOLDER}/{cell.folder}/run/model", cell.id)

    # ------------------------------------------------------------------ options and ids

    def _add(
        self,
        kind: str,
        task: str | None,
        models: Instances,
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
        needs = [model.cell for model in models if model.cell is not None] + (
            [after.id] if after else []
        )
        decides = {
            "kind": kind,
            "options": self._resolve(kind, options),
            "models": [model.path for model in models],
            "pairs": options["data"].get("pairs"),
            "needs": list(dict.fromkeys(needs)),
        }
        digest = hashlib.blake2b(
            json.dumps(decides, sort_keys=True, default=str).encode(), digest_size=6
        )
        named = merged(options, {"data": naming(kind, models)})
        cell = Cell(digest.hexdigest(), kind, task, tuple(models), named, tuple(decides["needs"]))
        return self.found.setdefault(cell.id, cell)

    def _options(self, kind: str, task: str | None, after: Cell | None = None) -> Options:
        """The options that all cells of a kind and a task share."""
        work = getattr(self.study, kind.removesuffix("_pairs"), None)
        options: Options = {"data": {}}
        for data in () if task is None else (self.study.data, self.study.tasks.get(task, {})):
            known = {name: value for name, value in data.items() if self._has(kind, name)}
            for name, value in known.items():
                if after is None or name in NOT_OF_FILES or not self._has(after.kind, name):
                    options = merged(options, {"data": {name: value}})
        if self.study.store is not None and self._has(kind, "store"):
            options["data"]["store"] = (
                f"{FOLDER}/store" if self.study.store == "own" else self.study.store
            )
        if self.commands.accepts(kind, "trainer.enable_progress_bar"):
            options["trainer"] = {"enable_progress_bar": False}  # nobody watches
        if self.commands.accepts(kind, "checkpoint.at_end"):
            options["checkpoint"] = {"at_end": False}  # nothing goes on from a cell that is done
        options = merged(options, {} if work is None else work.options)
        return (
            merged(options, with_definitions(kind, options)) if self.study.as_printed else options
        )

    def _has(self, kind: str, name: str) -> bool:
        return self.commands.accepts(kind, f"data.{name}")

    def _resolve(self, kind: str, options: Options) -> Options:
        """The options that decide the result, models apart, which are the same whichever models they are for."""
        names = [f"data.{name}" for name in KINDS[kind].names]
        resolved = self.commands.resolve(kind, KINDS[kind].unnamed(options))
        return {name: value for name, value in resolved.items() if name not in names}

    def _check_data(self) -> None:
        """Raise if a data option is one that no command of the study has."""
        kinds = [*self.study.work(), *(["finetune"] if self.study.finetune is not None else [])]
        places = {
            "data": self.study.data,
            **{f"tasks.{name}": data for name, data in self.study.tasks.items()},
        }
        for kind in self.study.work():
            places |= {
                f"{kind}.texts.{name}": data
                for name, data in self.study.further_texts(kind).items()
            }
        for place, data in places.items():
            unknown = [name for name in data if not any(self._has(kind, name) for kind in kinds)]
            if unknown:
                raise UserError(
                    f"Expected `{place}` to hold data options of {', '.join(kinds)}, but none of them has "
                    f"{', '.join(unknown)}. Their `--help` lists what there is as `--data.NAME`."
                )
        if self.study.store is not None and not any(self._has(kind, "store") for kind in kinds):
            raise UserError(
                f"Expected `store` only where a command has `data.store`, but got {self.study.store!r}."
            )

    def _check_embedded(self) -> None:
        """Raise if embedded models would be others before fine-tuning than those that are fine-tuned.

        They are trained on the texts that a cell reads.
        """
        embedded = [name for name in self.study.models.listed() if name.startswith(EMBEDDED)]
        of_tasks = [data.get("text") for data in self.study.tasks.values()]
        for kind, work in self.study.work().items() if embedded else ():
            every = [work.options.get("data", {}), *self.study.further_texts(kind).values()]
            texts = [data["text"] for data in every if "text" in data]
            text = next((text for text in texts if any(text != other for other in of_tasks)), None)
            stages = [
                stage for stage in (work.stages or self.study.stages) if stage != "pretrained"
            ]
            if stages and text is not None:
                raise UserError(
                    f"Expected no `data.text` in `{kind}.options` or `{kind}.texts`, but got {text!r}: {embedded[0]} "
                    "is trained on the texts that it reads, and would be another model there than where it is "
                    f"{stages[-1]}. Give the tasks this text, or name models by their folders."
                )


def naming(kind: str, models: Instances) -> Options:
    """The data options that name the models of a cell."""
    names, paths = KINDS[kind].names, [model.path for model in models]
    if names == PAIR:
        return dict(zip(PAIR, paths, strict=True))
    if "bases" in names:
        tuned = [model.path for model in models if model.stage == "finetuned"]
        return {"models": tuned, "bases": [path for path in paths if path not in tuned]}
    return {names[0]: paths[0] if "model" in names else paths}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Options:
    """Nested options, the second taking precedence; a `class_path`, or a text by another source, is replaced whole."""
    result = dict(first)
    for name, value in second.items():
        both = (
            isinstance(value, Mapping)
            and isinstance(result.get(name), Mapping)
            and "class_path" not in value
        )
        both = both and not ("source" in value and "source" in result[name])
        result[name] = merged(result[name], value) if both else value
    return result
