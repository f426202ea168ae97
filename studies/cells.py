"""The cells of a study: each one call of a command, named after everything that decides its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from studies.kinds import KINDS
from studies.spec import Model, Stage, Study

__all__ = ["FOLDER", "Cell", "Commands", "Instance", "expand"]

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
    """

    name: str
    stage: Stage
    path: str
    cell: str | None = None


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
        self._resolved: dict[str, dict[str, Any]] = {}
        self._shared: dict[tuple[str, str | None, bool], dict[str, Any]] = {}
        self._known: dict[tuple[Model, Stage, str], Instance] = {}

    def cells(self) -> list[Cell]:
        self._check_data()
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
        """The cells of each pair. This function alone decides how pairs become cells."""
        pairs = self.study.pairs_at(stage)
        with_itself = [(model, model) for model in self.study.models_at(stage) if self.study.pairs.same]
        for x, y in [*pairs, *with_itself]:
            both, fitted = None, None
            if self.study.wants("fit", stage, task):
                both = both or self._instances([x, y], stage, task)
                fitted = self._add("fit", task, both)
            if self.study.wants("inject", stage, task):
                both = both or self._instances([x, y], stage, task)
                self._inject(task, both, fitted)
            if self.study.wants("stitch", stage, task) and x != y:
                self._add("stitch", task, both or self._instances([x, y], stage, task))

    def _inject(self, task: str, both: Sequence[Instance], fitted: Cell | None) -> None:
        if fitted is None:
            self._add("inject", task, both)
        else:
            file = f"{FOLDER}/{fitted.folder}/run/aligners.ckpt"
            self._add("inject", task, both, {"checkpoints": [file]}, needs=[fitted.id], own=True)

    def _models(self, task: str, stage: Stage) -> None:
        if self.study.wants("recover", stage, task):
            for model in self.study.models_at(stage):
                self._add("recover", task, self._instances([model], stage, task))

    def _comparisons(self, task: str) -> None:
        """The cells of many models: one of all, or one for each of some pairs."""
        for kind in ("similarity", "identity"):
            stages = [stage for stage in self.study.stages if self.study.wants(kind, stage, task)]
            together = getattr(self.study.work().get(kind), "across_stages", False)
            for each in [stages] if together else [[stage] for stage in stages]:
                for models in self._sets(each):
                    instances = [self._instance(model, stage, task) for model, stage in models]
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
        for each in instances:
            group = self.study.models.group(each.name)
            if group is not None:
                found.setdefault(group, []).append(each.path)
        return {"groups": found} if kind == "identity" and found else {}

    # ------------------------------------------------------------------ models

    def _instances(self, models: Sequence[Model], stage: Stage, task: str) -> list[Instance]:
        return [self._instance(model, stage, task) for model in models]

    def _instance(self, model: Model, stage: Stage, task: str) -> Instance:
        if stage == "pretrained":
            return Instance(model.name, stage, model.base)
        if (model, stage, task) not in self._known:
            make = self._finetuned if stage == "finetuned" else self._random
            self._known[model, stage, task] = make(model, task)
        return self._known[model, stage, task]

    def _finetuned(self, model: Model, task: str) -> Instance:
        base = Instance(model.name, "pretrained", model.base)
        cell = self._add("finetune", task, [base], {"seeds": [model.copy]})
        variant = self._resolve(cell.kind, cell.options)["variants"][0].replace(":", "-")
        return Instance(model.name, "finetuned", f"{FOLDER}/{cell.folder}/run/{variant}/seed-{model.copy}", cell.id)

    def _random(self, model: Model, task: str) -> Instance:
        """An untrained twin. That of an embedded model depends on the texts, of which its tokenizer is made."""
        base = Instance(model.name, "pretrained", model.base)
        seed = {"seed": self.study.models.listed().index(model.base)}
        embedded = model.base.startswith(EMBEDDED)
        cell = self._add("untrained", task if embedded else None, [base], seed, own=not embedded)
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
        own: bool = False,
    ) -> Cell:
        """Make a cell, unless it is there.

        Args:
            kind: of the cell.
            task: its task.
            models: that it is about.
            given: options that belong to this cell alone.
            needs: cells that it needs beside those that make its models.
            own: whether the data options of study and task are left out, as what it needs has them.
        """
        options = merged(self._options(kind, task, own), given or {})
        needs = tuple(dict.fromkeys([*(model.cell for model in models if model.cell is not None), *needs]))
        decides = {
            "kind": kind,
            "options": self._resolve(kind, options),
            "models": [model.path for model in models],
            "needs": needs,
        }
        digest = hashlib.blake2b(json.dumps(decides, sort_keys=True, default=str).encode(), digest_size=6)
        named = merged(options, {"data": naming(kind, models)})
        cell = Cell(digest.hexdigest(), kind, task, tuple(models), named, needs)
        return self.found.setdefault(cell.id, cell)

    def _options(self, kind: str, task: str | None, own: bool) -> dict[str, Any]:
        """The options that all cells of a kind and a task share."""
        if (kind, task, own) not in self._shared:
            self._shared[kind, task, own] = self._collected(kind, task, own)
        return self._shared[kind, task, own]

    def _collected(self, kind: str, task: str | None, own: bool) -> dict[str, Any]:
        work = getattr(self.study, kind, None)
        shared = [] if own else [self.study.data, {} if task is None else self.study.tasks[task]]
        found: dict[str, Any] = {}
        for data in shared:
            found = merged(found, {"data": {name: v for name, v in data.items() if self._has(kind, name)}})
        if self.study.store is not None and self._has(kind, "store"):
            folder = f"{FOLDER}/store" if self.study.store == "own" else self.study.store
            found = merged(found, {"data": {"store": folder}})
        if self.commands.accepts(kind, "trainer.enable_progress_bar"):
            found["trainer"] = {"enable_progress_bar": False}  # nobody watches
        return merged(found, {} if work is None else work.options)

    def _has(self, kind: str, name: str) -> bool:
        return self.commands.accepts(kind, f"data.{name}")

    def _resolve(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """The options that decide the result, models apart; asked for once, whichever models they are for."""
        names = [f"data.{name}" for name in KINDS[kind].names]
        shared = {name: value for name, value in options.items() if name not in KINDS[kind].apart}
        shared["data"] = {n: v for n, v in options.get("data", {}).items() if f"data.{n}" not in names}
        key = json.dumps([kind, shared], sort_keys=True, default=str)
        if key not in self._resolved:
            found = self.commands.resolve(kind, shared)
            self._resolved[key] = {name: value for name, value in found.items() if name not in names}
        return self._resolved[key]

    def _check_data(self) -> None:
        """Raise if a data option is one that no command of the study has."""
        kinds = [*self.study.work(), *(["finetune"] if self.study.finetune is not None else [])]
        for place, data in {"data": self.study.data, **{f"tasks.{n}": d for n, d in self.study.tasks.items()}}.items():
            unknown = [name for name in data if not any(self._has(kind, name) for kind in kinds)]
            if unknown:
                raise ValueError(
                    f"Expected `{place}` to hold data options of {', '.join(kinds)}, but none of them has "
                    f"{', '.join(unknown)}. Their `--help` lists what there is as `--data.NAME`."
                )
        if self.study.store is not None and not any(self._has(kind, "store") for kind in kinds):
            raise ValueError(f"Expected `store` only where a command has `data.store`, but got {self.study.store!r}.")


def naming(kind: str, models: Sequence[Instance]) -> dict[str, Any]:
    """The data options that name the models of a cell."""
    paths = [model.path for model in models]
    names = KINDS[kind].names
    return {names[0]: paths} if len(names) == 1 else dict(zip(names, paths, strict=True))


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Nested options, the second taking precedence; a `class_path` is replaced whole."""
    found = dict(first)
    for name, value in second.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping) and "class_path" not in value
        found[name] = merged(found[name], value) if both else value
    return found
