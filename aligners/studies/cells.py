"""The cells of a study: each one call of a command, of a kind, named after everything that decides its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from aligners.errors import UserError
from aligners.reports.names import file_names
from aligners.studies.spec import Model, Stage, Study


@dataclass(frozen=True)
class Kind:
    """A kind of cell.

    Attributes:
        script: `train` or `evaluate`.
        command: of that script.
        unit: what a cell is about.
        names: data options of the command that say which models, and which pairs of them.
        report: file with the rows in the command's folder; None: the command leaves a model and no rows.
        table: name of the table that the rows go into; None: none.
        leaves: what other cells need of it, below its folder.
        apart: further options that name models or cells.
    """

    script: Literal["train", "evaluate"]
    command: str
    unit: Literal["model", "pair", "models"]
    names: tuple[str, ...] = ("models",)
    report: str | None = None
    table: str | None = None
    leaves: str = "run"
    apart: tuple[str, ...] = ()

    def unnamed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a cell that name neither models nor cells."""
        found = {name: value for name, value in options.items() if name not in self.apart}
        data = {name: value for name, value in options.get("data", {}).items() if name not in self.names}
        return {**found, "data": data}


PAIR = ("model_x", "model_y")


KINDS = {
    "untrained": Kind("train", "untrained", "model", leaves="run/model"),
    "finetune": Kind("train", "finetune", "model", report="finetuning.json", table="finetune"),
    "fit": Kind("train", "fit", "pair", PAIR, "summary.json", "fit", leaves="run/aligners.ckpt"),
    "fit_pairs": Kind("train", "fit_pairs", "models", ("models", "pairs"), "summary.json", "fit", leaves="run/pairs"),
    "attention": Kind("train", "fit_attention", "pair", PAIR, "attention.json", "attention"),
    "inject": Kind("evaluate", "inject", "pair", PAIR, "report.json", "inject", apart=("checkpoints",)),
    "similarity": Kind("evaluate", "similarity", "models", report="similarity.json", table="similarity"),
    "stitch": Kind("train", "stitch", "pair", report="stitching.json", table="stitching"),
    "identity": Kind("evaluate", "stitch", "models", report="stitching.json", table="stitching", apart=("groups",)),
    "surgery": Kind("evaluate", "surgery", "models", ("models", "bases"), "surgery.json", "surgery"),
    "probe": Kind("train", "probe", "model", report="probing.json", table="probing"),
    "recover": Kind("train", "recover", "model", ("model",), "recover.json", "recover"),
}


FOLDER = "{study}"  # stands for the study's folder in the options of a cell


EMBEDDED = "embedded"


class Commands(Protocol):
    """What the commands say of their options."""

    def accepts(self, kind: str, option: str) -> bool:
        """Whether a command has an option, by its dotted name."""

    def resolve(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
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
    options: dict[str, Any]
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

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


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
        return list(self.found.values())

    # ------------------------------------------------------------------ what is measured

    def _pairs(self, task: str, stage: Stage) -> None:
        """The cells of pairs."""
        pairs = self.study.pairs_at(stage)
        with_itself = [(model, model) for model in self.study.models_at(stage) if self.study.pairs.same]
        wants = {kind: self.study.wants(kind, stage, task) for kind in ("fit", "inject", "stitch", "attention")}
        fitted: dict[tuple[Model, Model], tuple[Cell, str]] = {}
        if wants["fit"]:
            at_once = (self.study.fit and self.study.fit.pairs_at_once) or 1
            fitted = self._fits(task, stage, pairs, at_once) | self._fits(task, stage, with_itself, 1)
        for pair in [*pairs, *with_itself] if any(wants.values()) else []:
            both = self._instances(pair, stage, task)
            if wants["inject"]:
                self._inject(task, both, *fitted.get(pair, (None, "")))
            for kind in ("stitch", "attention"):
                if wants[kind] and pair[0] != pair[1]:
                    self._add(kind, task, both)

    def _fits(
        self, task: str, stage: Stage, pairs: Sequence[tuple[Model, Model]], at_once: int
    ) -> dict[tuple[Model, Model], tuple[Cell, str]]:
        """Fit pairs, one or several in a cell; for each pair its cell, and its maps below the cell's folder.

        This function alone decides how pairs become cells.
        """
        found = {}
        for first in range(0, len(pairs), at_once):
            part = pairs[first : first + at_once]
            if len(part) == 1:
                cell = self._add("fit", task, self._instances(part[0], stage, task))
                found[part[0]] = cell, "run/aligners.ckpt"
                continue
            models = list(dict.fromkeys(model for pair in part for model in pair))
            instances = self._instances(models, stage, task)
            numbers = [[models.index(x), models.index(y)] for x, y in part]
            cell = self._add("fit_pairs", task, instances, {"data": {"pairs": numbers}})
            short = file_names([each.path for each in instances])
            names = [short[each.path] for each in instances]
            found |= {
                pair: (cell, f"run/pairs/{names[a]}--{names[b]}/aligners.ckpt")
                for pair, (a, b) in zip(part, numbers, strict=True)
            }
        return found

    def _inject(self, task: str, both: Sequence[Instance], fitted: Cell | None, maps: str) -> None:
        if fitted is None:
            self._add("inject", task, both)
        else:
            file = {"checkpoints": [f"{FOLDER}/{fitted.folder}/{maps}"]}
            self._add("inject", task, both, file, needs=[fitted.id], has=fitted.kind)

    def _models(self, task: str, stage: Stage) -> None:
        for kind in ("recover", "probe"):
            for model in self.study.models_at(stage) if self.study.wants(kind, stage, task) else []:
                self._add(kind, task, self._instances([model], stage, task))
        if stage == "finetuned" and self.study.wants("surgery", stage, task):
            for base in self.study.models.listed():
                self._surgery(task, base)

    def _surgery(self, task: str, base: str) -> None:
        """The cell of all fine-tunings of a model, and of the model itself where heads are trained on its states."""
        tuned = [model for model in self.study.models_at("finetuned") if model.base == base]
        instances = self._instances(tuned, "finetuned", task)
        heads = self._resolve("surgery", self._options("surgery", task, None)).get("trainer.max_epochs") != 0
        own = [Instance(base, "pretrained", base)] if heads else []
        self._add("surgery", task, [*instances, *own])

    def _comparisons(self, task: str) -> None:
        """The cells of many models: one of all, or one for each of some pairs."""
        for kind in ("similarity", "identity"):
            work = getattr(self.study, kind)
            stages = [stage for stage in self.study.stages if self.study.wants(kind, stage, task)]
            tuned_on = list(self.study.tasks) if getattr(work, "across_tasks", False) else [task]
            for each in [stages] if getattr(work, "across_stages", False) else [[stage] for stage in stages]:
                for models in self._sets(each):
                    instances = [
                        self._instance(model, stage, other)
                        for model, stage in models
                        for other in (tuned_on if stage == "finetuned" else [task])
                    ]
                    self._add(kind, task, instances, self._groups(kind, instances))

    def _sets(self, stages: Sequence[Stage]) -> list[list[tuple[Model, Stage]]]:
        if self.study.pairs.every:
            every = [(model, stage) for stage in stages for model in self.study.models_at(stage)]
            return [every] if every else []
        pairs = {(x.name, y.name): None for stage in stages for x, y in self.study.pairs_at(stage)}
        return [
            [(model, stage) for stage in stages for model in self.study.models_at(stage) if model.name in pair]
            for pair in pairs
        ]

    def _groups(self, kind: str, instances: Sequence[Instance]) -> dict[str, Any]:
        """The groups of models, for the command that tells them apart itself."""
        found: dict[str, list[str]] = {}
        for each in instances if kind == "identity" else ():
            group = self.study.models.group(each.name)
            if group is not None:
                found.setdefault(group, []).append(each.path)
        return {"groups": found} if found else {}

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
        base = Instance(model.name, "pretrained", model.base)
        cell = self._add("finetune", task, [base], {"seeds": [model.copy]})
        variant = self._resolve(cell.kind, cell.options)["variants"][0].replace(":", "-")
        folder = f"{FOLDER}/{cell.folder}/run/{variant}/seed-{model.copy}"
        return Instance(model.name, "finetuned", folder, cell.id, task)

    def _random(self, model: Model, task: str) -> Instance:
        """An untrained twin. That of an embedded model depends on the texts, of which its tokenizer is made."""
        base = Instance(model.name, "pretrained", model.base)
        seed = {"seed": self.study.models.listed().index(model.base)}
        embedded = model.base.startswith(EMBEDDED)
        cell = self._add("untrained", task if embedded else None, [base], seed, has=None if embedded else "untrained")
        return Instance(model.name, "random", f"{FOLDER}/{cell.folder}/run/model", cell.id)

    # ------------------------------------------------------------------ options and ids

    def _add(
        self,
        kind: str,
        task: str | None,
        models: Sequence[Instance],
        given: Mapping[str, Any] | None = None,
        *,
        needs: Sequence[str] = (),
        has: str | None = None,
    ) -> Cell:
        """Make a cell, unless it is there.

        Args:
            kind: of the cell.
            task: its task.
            models: that it is about.
            given: options that belong to this cell alone.
            needs: cells that it needs beside those that make its models.
            has: a kind of cell whose data options are left out, as they come with what this cell needs.
        """
        options = merged(self._options(kind, task, has), given or {})
        needs = tuple(dict.fromkeys([*(model.cell for model in models if model.cell is not None), *needs]))
        decides = {
            "kind": kind,
            "options": self._resolve(kind, options),
            "models": [model.path for model in models],
            "pairs": options.get("data", {}).get("pairs"),
            "needs": needs,
        }
        digest = hashlib.blake2b(json.dumps(decides, sort_keys=True, default=str).encode(), digest_size=6)
        named = merged(options, {"data": naming(kind, models)})
        cell = Cell(digest.hexdigest(), kind, task, tuple(models), named, needs)
        return self.found.setdefault(cell.id, cell)

    def _options(self, kind: str, task: str | None, has: str | None) -> dict[str, Any]:
        """The options that all cells of a kind and a task share."""
        work = getattr(self.study, kind.removesuffix("_pairs"), None)
        found: dict[str, Any] = {}
        for data in (self.study.data, {} if task is None else self.study.tasks[task]):
            own = {name: data[name] for name in data if self._has(kind, name) and not (has and self._has(has, name))}
            found = merged(found, {"data": own})
        if self.study.store is not None and self._has(kind, "store"):
            found["data"]["store"] = f"{FOLDER}/store" if self.study.store == "own" else self.study.store
        if self.commands.accepts(kind, "trainer.enable_progress_bar"):
            found["trainer"] = {"enable_progress_bar": False}  # nobody watches
        return merged(found, {} if work is None else work.options)

    def _has(self, kind: str, name: str) -> bool:
        return self.commands.accepts(kind, f"data.{name}")

    def _resolve(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """The options that decide the result, models apart, which are the same whichever models they are for."""
        names = [f"data.{name}" for name in KINDS[kind].names]
        found = self.commands.resolve(kind, KINDS[kind].unnamed(options))
        return {name: value for name, value in found.items() if name not in names}

    def _check_data(self) -> None:
        """Raise if a data option is one that no command of the study has."""
        kinds = [*self.study.work(), *(["finetune"] if self.study.finetune is not None else [])]
        places = {"data": self.study.data, **{f"tasks.{name}": data for name, data in self.study.tasks.items()}}
        for place, data in places.items():
            unknown = [name for name in data if not any(self._has(kind, name) for kind in kinds)]
            if unknown:
                raise UserError(
                    f"Expected `{place}` to hold data options of {', '.join(kinds)}, but none of them has "
                    f"{', '.join(unknown)}. Their `--help` lists what there is as `--data.NAME`."
                )
        if self.study.store is not None and not any(self._has(kind, "store") for kind in kinds):
            raise UserError(f"Expected `store` only where a command has `data.store`, but got {self.study.store!r}.")

    def _check_embedded(self) -> None:
        """Raise if embedded models would be others before fine-tuning than those that are fine-tuned.

        They are trained on the texts that a cell reads.
        """
        embedded = [name for name in self.study.models.listed() if name.startswith(EMBEDDED)]
        of_tasks = [data.get("text") for data in self.study.tasks.values()]
        for kind, work in self.study.work().items() if embedded else ():
            text = work.options.get("data", {}).get("text")
            stages = [stage for stage in (work.stages or self.study.stages) if stage != "pretrained"]
            if stages and text is not None and any(text != other for other in of_tasks):
                raise UserError(
                    f"Expected no `data.text` in `{kind}.options`, but got {text!r}: {embedded[0]} is trained on the "
                    f"texts that it reads, and would be another model there than where it is {stages[-1]}. Give the "
                    "tasks this text, or name models by their folders."
                )


def naming(kind: str, models: Sequence[Instance]) -> dict[str, Any]:
    """The data options that name the models of a cell."""
    paths = [model.path for model in models]
    names, unit = KINDS[kind].names, KINDS[kind].unit
    if "bases" in names:
        tuned = [model.path for model in models if model.stage == "finetuned"]
        return {"models": tuned, "bases": [path for path in paths if path not in tuned]}
    if unit == "pair" and len(names) == 2:
        return dict(zip(names, paths, strict=True))
    return {names[0]: paths[0] if names == ("model",) else paths}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Nested options, the second taking precedence; a `class_path`, or a text by another source, is replaced whole."""
    found = dict(first)
    for name, value in second.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping) and "class_path" not in value
        both = both and not ("source" in value and "source" in found[name])
        found[name] = merged(found[name], value) if both else value
    return found
