"""The cells of a study, and the sizes of the models that they are about.

A cell is one call of a command. Its id is made of everything that decides its result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from aligners.files.yaml_tables import table_beside
from aligners.models.architectures import architecture_of
from aligners.models.loading.model_files import read_config
from aligners.models.recipes import EMBEDDED, Recipe, embedded_recipe
from aligners.models.recorded.files import open_states
from aligners.models.recorded.source_names import is_recorded, states_source
from aligners.studies.spec import Stage, base_of

PAIR = ["model_x", "model_y"]
FOLDER = "{study}"  # stands for the study's folder in the options of a cell
Options = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of cell.

    Attributes:
        script: `train` or `evaluate`.
        command: command of that script.
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
        """Return the options of a cell that name neither models nor cells."""
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
        stage: stage of the model.
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
        options: options of the command.
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
        """The stage of the models; None if they differ in stage."""
        stages = {model.stage for model in self.models}
        return stages.pop() if len(stages) == 1 else None

    @property
    def folder(self) -> str:
        """The folder, below the study's folder."""
        return f"cells/{self.id}"

    def said(self) -> str:
        """A description in a few words."""
        names = [model.name for model in self.models]
        listed = " – ".join(names)
        if len(names) > 3:
            listed = f"{len(names)} models"
        return ", ".join(filter(None, [f"{self.kind} {listed}", self.task, self.stage]))


def naming(kind: str, models: Sequence[Instance]) -> Options:
    """Return the data options that name the models of a cell."""
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
    """Merge nested options; the second ones take precedence.

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


# ---------------------------------------------------------------------- sizes of models


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        layers: number of blocks, L.
        width: width of the states, d.
        vocabulary: number of tokens; 0 for recorded states, which have no weights.
        head: task of its head: classification, masked or causal; None: no head, or not known.
        known: whether the size was read; otherwise it is a guess.
        heads: attention heads of each block; None: not known.
        normed: whether there can be a final norm, whose output is site L + 1.
    """

    layers: int
    width: int
    vocabulary: int
    head: str | None = None
    known: bool = True
    heads: int | None = None
    normed: bool = False

    @property
    def weights(self) -> int:
        """Number of weights: 12 d² in a block, whose feed-forward layer is 4 d wide, and d for each token."""
        if not self.vocabulary:
            return 0
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width


# Of a model that cannot be reached.
GUESS = Size(layers=12, width=768, vocabulary=30522, known=False)


def size_of(name: str, data: Mapping[str, Any]) -> Size:
    """Return the size of a model.

    Args:
        name: Hub id, folder, embedded model, or recorded states.
        data: the study's data options.

    Raises:
        ValueError: there is no such model, or it cannot be reached.
    """
    if name.startswith(EMBEDDED):
        return _embedded_size(name)
    if is_recorded(name):
        return _recorded_size(name)
    trusted = data.get("trust_remote_code", False)
    config = read_config(name, {"revision": None, "trust_remote_code": trusted})
    architecture = architecture_of(config.model_type)
    head = None
    for kind in config.architectures or ():
        head = head or architecture.task(kind, config)
    sizes: Any = config.get_text_config()
    return Size(
        sizes.num_hidden_layers,
        sizes.hidden_size,
        sizes.vocab_size,
        head,
        heads=sizes.num_attention_heads,
        normed=bool(architecture.norm),
    )


def _embedded_size(name: str) -> Size:
    _, recipe = embedded_recipe(name)
    head = "masked"
    if isinstance(recipe, Recipe):
        head = "classification"
    elif "gpt" in name:
        head = "causal"
    return Size(
        recipe.layers,
        recipe.width,
        recipe.vocabulary,
        head,
        heads=recipe.heads,
        normed=head == "causal",
    )


def _recorded_size(name: str) -> Size:
    arrays = open_states(states_source(name)).arrays
    return Size(layers=len(arrays) - 1, width=arrays[0].width, vocabulary=0)


def sizes_in(cell: Cell, sizes: Mapping[str, Size]) -> list[Size]:
    """Return the sizes of a cell's models; a fine-tuned model has a classifier's head.

    Args:
        cell: the cell.
        sizes: sizes of the models by their names in the study file.
    """
    found = []
    for model in cell.models:
        size = sizes[base_of(model.name, sizes)]
        if model.stage == "finetuned":
            size = replace(size, head="classification")
        found.append(size)
    return found
