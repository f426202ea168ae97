"""Expands a study into its cells."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from aligners.datamodules.run_identity import NOT_OF_FILES
from aligners.datamodules.text.recorded_texts import check_options
from aligners.errors import UserError
from aligners.models.recipes import EMBEDDED
from aligners.models.recorded.source_names import all_recorded, check_command
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
from aligners.studies.spec import Model, Stage, Study

OF_PAIRS = ("stitch", "attention", "compare", "carry")  # a cell for each pair
ModelPair = tuple[Model, Model]
# The cell that fits a pair, and the option that names the file of its maps.
Maps = tuple[Cell | None, Options]
NO_MAPS: Maps = (None, {})


class Commands(Protocol):
    """Describes the options of commands."""

    def accepts(self, kind: str, option: str) -> bool:
        """Tell whether a command has an option, by its dotted name."""

    def resolve(self, kind: str, options: Options) -> Options:
        """Return the options that decide a command's result, by their dotted names, defaults filled in.

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
    check_recorded(study)
    cells = _Cells(study, commands)
    for task in study.tasks:
        for stage in study.stages:
            _AtStage(cells, task, stage).add_all()
        _Comparisons(cells, "similarity", task).add_all()
        _Comparisons(cells, "identity", task).add_all()
        if study.finetune is not None and study.pairs.every:
            for model in study.models_at("finetuned"):
                cells.model(model, "finetuned", task)
    for text in study.further_texts("similarity"):
        _Comparisons(cells, "similarity", text).add_all()
    return list(cells.found.values())


class _Cells:
    """The cells found so far, and how a cell is made.

    Args:
        study: the study.
        commands: what the commands say of their options.
    """

    def __init__(self, study: Study, commands: Commands) -> None:
        self.study = study
        self.commands = commands
        self.found: dict[str, Cell] = {}
        self._models: dict[tuple[Model, Stage, str], Instance] = {}

    def add(
        self,
        kind: str,
        task: str | None,
        models: Sequence[Instance],
        given: Options | None = None,
        after: Cell | None = None,
    ) -> Cell:
        """Make a cell, unless it is there.

        Args:
            kind: kind of the cell.
            task: its task; None: it reads no texts.
            models: that it is about.
            given: options that belong to this cell alone.
            after: the cell that fits its maps, which bring the data options that both have.
        """
        shared = self.options(kind, task, after)
        options = merged(shared, given or {})
        named = merged(options, {"data": naming(kind, models)})
        check_options(kind, [model.path for model in models], named)
        needs = [model.cell for model in models if model.cell is not None]
        if after is not None:
            needs.append(after.id)
        needs = list(dict.fromkeys(needs))

        decides = {
            "kind": kind,
            "options": self.resolve(kind, options),
            "models": [model.path for model in models],
            "pairs": options["data"].get("pairs"),
            "needs": needs,
        }
        text = json.dumps(decides, sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=6)
        number = digest.hexdigest()
        cell = Cell(number, kind, task, tuple(models), named, tuple(needs))
        return self.found.setdefault(number, cell)

    def resolve(self, kind: str, options: Options) -> Options:
        """Return the options that decide the result, except those that name models."""
        about = KINDS[kind]
        unnamed = about.unnamed(options)
        resolved = dict(self.commands.resolve(kind, unnamed))
        for name in about.names:
            resolved.pop(f"data.{name}", None)
        return resolved

    # ------------------------------------------------------------------ options

    def options(
        self, kind: str, task: str | None, after: Cell | None = None
    ) -> Options:
        """Return the options that all cells of a kind and a task share."""
        study = self.study
        options: Options = {"data": {}}
        if task is not None:
            of_task = study.tasks.get(task, {})
            for data in (study.data, of_task):
                shared = self._shared_data(kind, data, after)
                options = merged(options, {"data": shared})
        options = merged(options, self._of_studies(kind))
        work = study.work().get(kind.removesuffix("_pairs"))
        if work is not None:
            options = merged(options, work.options)
        elif kind == "finetune" and study.finetune is not None:
            own = study.finetune.tasks.get(str(task), {})
            options = merged(options, study.finetune.options)
            options = merged(options, own)
        if study.as_printed:
            options = merged(options, with_definitions(kind, options))
        return options

    def _shared_data(self, kind: str, data: Options, after: Cell | None) -> Options:
        """Return the data options of a kind of cell, except those that come with the maps of another cell."""
        accepts = self.commands.accepts
        shared = {}
        for name, value in data.items():
            option = f"data.{name}"
            if not accepts(kind, option):
                continue
            comes_with_maps = after is not None and accepts(after.kind, option)
            if name in NOT_OF_FILES or not comes_with_maps:
                shared[name] = value
        return shared

    def _of_studies(self, kind: str) -> Options:
        """Return the options of a command that are the same for all cells of a study."""
        accepts = self.commands.accepts
        store = self.study.store
        if store == "own":
            store = f"{FOLDER}/store"
        options: Options = {}
        if store is not None and accepts(kind, "data.store"):
            options["data"] = {"store": store}
        if accepts(kind, "trainer.enable_progress_bar"):  # nobody watches
            options["trainer"] = {"enable_progress_bar": False}
        if accepts(kind, "checkpoint.at_end"):  # nothing goes on from a finished cell
            options["checkpoint"] = {"at_end": False}
        return options

    # ------------------------------------------------------------------ models

    def model(self, model: Model, stage: Stage, task: str) -> Instance:
        """Return a model at a stage, with the cell that makes it."""
        if stage == "pretrained":
            return Instance(model.name, stage, model.base)
        key = model, stage, task
        if key not in self._models:
            make = self._finetuned if stage == "finetuned" else self._random
            self._models[key] = make(model, task)
        return self._models[key]

    def _finetuned(self, model: Model, task: str) -> Instance:
        """Return a fine-tuned model. Each variant is a separate cell, and other cells need the first."""
        base = self.model(model, "pretrained", task)
        options = self.options("finetune", task)
        variants = self.resolve("finetune", options)["variants"]
        cells = []
        for variant in variants:
            given: Options = {"seeds": [model.copy]}
            if len(variants) > 1:
                given["variants"] = [variant]
            cell = self.add("finetune", task, [base], given)
            cells.append(cell)

        first = variants[0].replace(":", "-")
        path = f"{FOLDER}/{cells[0].folder}/run/{first}/seed-{model.copy}"
        return Instance(model.name, "finetuned", path, cells[0].id, task)

    def _random(self, model: Model, task: str) -> Instance:
        """Return an untrained twin. That of an embedded model depends on the texts that its tokenizer is made from."""
        base = self.model(model, "pretrained", task)
        bases = self.study.models.listed()
        seed = bases.index(model.base)
        reads = task if model.base.startswith(EMBEDDED) else None
        cell = self.add("untrained", reads, [base], {"seed": seed})
        path = f"{FOLDER}/{cell.folder}/run/model"
        return Instance(model.name, "random", path, cell.id)


class _AtStage:
    """Makes the cells of single models and of pairs at one stage, on the texts of one task.

    Args:
        cells: that these are added to.
        task: the task.
        stage: stage of the models.
    """

    def __init__(self, cells: _Cells, task: str, stage: Stage) -> None:
        self.cells = cells
        self.study = cells.study
        self.task = task
        self.stage = stage
        self.models = self.study.models_at(stage)
        self.wanted = self.study.wanted(stage, task)

    def add_all(self) -> None:
        """Add them all."""
        self._add_pairs()
        for kind in ("recover", "probe"):
            if kind in self.wanted:
                self._add_models(kind)
        if self.stage == "finetuned" and "surgery" in self.wanted:
            self._add_surgeries()

    def _instances(self, models: Sequence[Model]) -> list[Instance]:
        make = self.cells.model
        return [make(model, self.stage, self.task) for model in models]

    def _add(
        self,
        kind: str,
        models: Sequence[Model],
        given: Options | None = None,
        after: Cell | None = None,
    ) -> Cell:
        instances = self._instances(models)
        return self.cells.add(kind, self.task, instances, given, after)

    def _add_pairs(self) -> None:
        """Add the cells of pairs."""
        pairs = self.study.pairs_at(self.stage)
        with_itself: list[ModelPair] = []
        if self.study.pairs.same:
            with_itself = [(model, model) for model in self.models]
        fitted: dict[ModelPair, Maps] = {}
        if self.study.fit is not None and "fit" in self.wanted:
            at_once = self.study.fit.pairs_at_once or 1
            fitted |= self._fits(pairs, at_once)
            fitted |= self._fits(with_itself, 1)

        for pair in [*pairs, *with_itself]:
            if "inject" in self.wanted:
                fit, given = fitted.get(pair, NO_MAPS)
                self._add("inject", pair, given, fit)
            if pair[0] == pair[1]:
                continue
            for kind in OF_PAIRS:
                if kind in self.wanted:
                    self._add(kind, pair)

    def _fits(self, pairs: Sequence[ModelPair], at_once: int) -> dict[ModelPair, Maps]:
        """Add the fits of pairs, one or several in a cell.

        This function alone decides how pairs become cells.
        """
        by_pair: dict[ModelPair, Maps] = {}
        for first in range(0, len(pairs), at_once):
            part = pairs[first : first + at_once]
            if len(part) > 1:
                by_pair |= self._fits_in_one(part)
                continue
            pair = part[0]
            cell = self._add("fit", pair)
            by_pair[pair] = _maps(cell, "run/aligners.safetensors")
        return by_pair

    def _fits_in_one(self, pairs: Sequence[ModelPair]) -> dict[ModelPair, Maps]:
        """Add the fit of several pairs in one cell."""
        models: list[Model] = []
        numbers = []
        for pair in pairs:
            for model in pair:
                if model not in models:
                    models.append(model)
            numbers.append([models.index(model) for model in pair])
        cell = self._add("fit_pairs", models, {"data": {"pairs": numbers}})

        names = file_names(model.path for model in cell.models)
        in_files = list(names.values())
        by_pair: dict[ModelPair, Maps] = {}
        for pair, (x, y) in zip(pairs, numbers, strict=True):
            folder = f"run/pairs/{in_files[x]}--{in_files[y]}"
            by_pair[pair] = _maps(cell, f"{folder}/aligners.safetensors")
        return by_pair

    def _add_models(self, kind: str) -> None:
        """Add the cells of single models, on the texts of the task and on further ones."""
        further = self.study.further_texts(kind).values()
        for model in self.models:
            for data in ({}, *further):
                self._add(kind, [model], {"data": data})

    def _add_surgeries(self) -> None:
        """Add a cell for each model, with all of its fine-tunings."""
        options = self.cells.options("surgery", self.task)
        resolved = self.cells.resolve("surgery", options)
        trains_heads = resolved.get("trainer.max_epochs") != 0
        for base in self.study.models.listed():
            tuned = [model for model in self.models if model.base == base]
            instances = self._instances(tuned)
            if trains_heads:  # on the states of the pretrained model, too
                instances.append(Instance(base, "pretrained", base))
            self.cells.add("surgery", self.task, instances)


def _maps(cell: Cell, path: str) -> Maps:
    """Return the maps that a cell leaves at a path below its folder."""
    return cell, {"checkpoints": [f"{FOLDER}/{cell.folder}/{path}"]}


class _Comparisons:
    """Makes the cells of one kind that compare many models on the texts of a task, or on further ones.

    Args:
        cells: that these are added to.
        kind: `similarity` or `identity`.
        task: the task, or the name of the further texts.
    """

    def __init__(self, cells: _Cells, kind: str, task: str) -> None:
        self.cells = cells
        self.study = cells.study
        self.kind = kind
        self.task = task
        self.further = self.study.further_texts(kind).get(task)

    def add_all(self) -> None:
        """Add one for all models, or one for each of the pairs that the study names."""
        stages: list[Stage] = []
        for stage in self.study.stages:
            if self.kind in self.study.wanted(stage, self.task):
                stages.append(stage)
        if stages and self._crosses("across_stages"):
            self._add(stages)
        else:
            for stage in stages:
                self._add([stage])

    def _crosses(self, option: str) -> bool:
        """Whether the study compares across stages, or across tasks."""
        return getattr(self.study.work()[self.kind], option, False)

    def _add(self, stages: Sequence[Stage]) -> None:
        """Add those that compare models at some stages with each other."""
        models: list[tuple[Model, Stage]] = []
        pairs: list[tuple[str, str]] = []
        for stage in stages:
            models += [(model, stage) for model in self.study.models_at(stage)]
            for x, y in self.study.pairs_at(stage):
                pairs.append((x.name, y.name))
        if self.study.pairs.every:
            self._add_one(models)
            return
        for pair in dict.fromkeys(pairs):
            both = [one for one in models if one[0].name in pair]
            self._add_one(both)

    def _add_one(self, models: Sequence[tuple[Model, Stage]]) -> None:
        """Add the one that compares these models at their stages."""
        across_tasks = self.further is not None or self._crosses("across_tasks")
        instances = []
        groups: dict[str, list[str]] = {}
        for model, stage in models:
            tasks = [self.task]
            if across_tasks and stage == "finetuned":
                tasks = list(self.study.tasks)
            group = self.study.models.group(model.name)
            for task in tasks:
                instance = self.cells.model(model, stage, task)
                instances.append(instance)
                if group is not None:
                    groups.setdefault(group, []).append(instance.path)

        options: Options = {"data": self.further or {}}
        if groups and self.kind == "identity":  # whose command tells groups apart
            options["groups"] = groups
        self.cells.add(self.kind, self.task, instances, options)


# ---------------------------------------------------------------------- checks


def check_data(study: Study, commands: Commands) -> None:
    """Raise if a data option is one that no command of the study has."""
    kinds = list(study.work())
    if study.finetune is not None:
        kinds.append("finetune")
    for place, data in _places(study):
        wrong = []
        for name in data:
            if not _is_known(name, kinds, commands):
                wrong.append(name)
        if wrong:
            raise UserError(
                f"Expected `{place}` to hold data options of {', '.join(kinds)}, but none of them has "
                f"{', '.join(wrong)}. Their `--help` lists what there is as `--data.NAME`."
            )
    if study.store is not None and not _is_known("store", kinds, commands):
        raise UserError(
            f"Expected `store` only where a command has `data.store`, but got {study.store!r}."
        )


def _is_known(name: str, kinds: Sequence[str], commands: Commands) -> bool:
    """Tell whether a command of some kinds of cells has a data option."""
    return any(commands.accepts(kind, f"data.{name}") for kind in kinds)


def _places(study: Study) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the places of data options in the study's file, and the options."""
    yield "data", study.data
    for name, data in study.tasks.items():
        yield f"tasks.{name}", data
    for kind in study.work():
        for name, data in study.further_texts(kind).items():
            yield f"{kind}.texts.{name}", data


def check_embedded(study: Study) -> None:
    """Raise if an embedded model would be another one before fine-tuning than the one that is fine-tuned.

    Embedded models are trained on the texts that a cell reads.
    """
    embedded = [name for name in study.models.listed() if name.startswith(EMBEDDED)]
    if not embedded:
        return
    of_tasks = [data.get("text") for data in study.tasks.values()]
    for kind, work in study.work().items():
        stages = list(work.stages or study.stages)
        if "pretrained" in stages:
            stages.remove("pretrained")
        if not stages:
            continue
        own = work.options.get("data", {})
        further = study.further_texts(kind).values()
        for data in (own, *further):
            text = data.get("text")
            if text is not None and of_tasks != [text] * len(of_tasks):
                raise UserError(
                    f"Expected no `data.text` in `{kind}.options` or `{kind}.texts`, but got {text!r}: {embedded[0]} "
                    "is trained on the texts that it reads, and would be another model there than where it is "
                    f"{stages[-1]}. Give the tasks this text, or name models by their folders."
                )


def check_recorded(study: Study) -> None:
    """Raise if recorded states are named beside models, or for what needs a model that can be run."""
    names = study.models.listed()
    if not all_recorded(names):
        return
    made = [stage for stage in study.stages if stage != "pretrained"]
    if made:
        raise UserError(
            f"Expected `stages` to be pretrained alone for recorded states, but got {made[0]}, which makes other "
            f"models: {names[0]} was recorded from one that is not here."
        )
    for kind in study.work():
        check_command(kind, names)


def with_kept_rows(cell: Cell) -> Cell:
    """Return the same cell, keeping one row for each text in the store, unless its own options say otherwise."""
    options = merged({"data": {"store_rows": "texts"}}, cell.options)
    return replace(cell, options=options)
