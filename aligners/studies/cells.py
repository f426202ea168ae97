"""The cells of a study: each is one call of a command, and has an id made of everything that decides its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aligners.files.yaml_tables import table_beside
from aligners.studies.spec import Stage

PAIR = ["model_x", "model_y"]
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
        rest = dict(options)
        for name in self.apart:
            rest.pop(name, None)
        data = dict(options.get("data", {}))
        for name in self.names:
            data.pop(name, None)
        return {**rest, "data": data}


KINDS = {}
for _name, _about in table_beside(__file__, "kinds.yaml").items():
    KINDS[_name] = Kind(**_about)


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
    def folder(self) -> str:
        """Below the study's folder."""
        return f"cells/{self.id}"

    def said(self) -> str:
        """What it is, in a few words."""
        names = [model.name for model in self.models]
        listed = " – ".join(names)
        if len(names) > 3:
            listed = f"{len(names)} models"
        return ", ".join(filter(None, [f"{self.kind} {listed}", self.task, self.stage]))


def naming(kind: str, models: Sequence[Instance]) -> Options:
    """The data options that name the models of a cell."""
    names = KINDS[kind].names
    paths = [model.path for model in models]
    if names == PAIR:
        return dict(zip(PAIR, paths, strict=True))
    if "bases" in names:
        tuned: list[str] = []
        bases: list[str] = []
        for model in models:
            group = tuned if model.stage == "finetuned" else bases
            group.append(model.path)
        return {"models": tuned, "bases": bases}
    if "model" in names:
        return {"model": paths[0]}
    return {names[0]: paths}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Options:
    """Nested options, the second taking precedence.

    Options with a `class_path`, and those of a text with another `source`, are replaced as a whole.
    """
    result = dict(first)
    for name, value in second.items():
        before: Any = result.get(name)
        nested = isinstance(value, Mapping) and isinstance(before, Mapping)
        if nested:
            other_text = "source" in value and "source" in before
            if "class_path" not in value and not other_text:
                value = merged(before, value)
        result[name] = value
    return result
