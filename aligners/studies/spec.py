"""The content of a study file."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import combinations
from typing import Any, Literal, get_args, get_type_hints

from aligners.errors import UserError, check_known, check_range

Stage = Literal["random", "pretrained", "finetuned"]
SEED = "{seed}"
COPY = "#"  # before the number of a further fine-tuning, in the name of a model


def base_of(name: str, names: Collection[str]) -> str:
    """Return the model that a name stands for: one of `names`, or what NAME#2, NAME#3, ... are copies of.

    A name of the study file stands for itself, also if it ends like that of a copy; so do names that are not known.
    """
    base, _, number = name.rpartition(COPY)
    if name not in names and base in names and number.isdigit():
        return base
    return name


@dataclass(frozen=True)
class Model:
    """A model of a study, whatever its stage.

    Attributes:
        name: in tables; a further copy is called NAME#2, NAME#3, ...
        base: what is loaded, or fine-tuned from.
        copy: number of its fine-tuning, from 0; pretrained and random models have only 0.
    """

    name: str
    base: str
    copy: int = 0


@dataclass
class Models:
    """The models to compare.

    Args:
        names: Hub ids, folders, or embedded models; or one name with {seed} in it, and `seeds`. Or all of them are
            recorded states, `states:PATH`.
        seeds: how many (25: 0, 1, ..., 24), or which.
        groups: name of a group -> its models, for example families; tables keep them apart.
        bases: name of a pretrained model -> those of `names` that were fine-tuned from it; or the name of the only one.
            They are not independent: intervals leave them out together. Copies that the study fine-tunes itself need
            not be named.
    """

    names: list[str] | str
    seeds: int | list[int] | None = None
    groups: dict[str, list[str]] | None = None
    bases: dict[str, list[str]] | str | None = None

    def listed(self) -> list[str]:
        """The names, with seeds filled in.

        Raises:
            ValueError: none, one twice, `seeds` without {seed}, or {seed} without `seeds`.
        """
        names = list(self.names)
        if isinstance(self.names, str):
            names = [self.names]
        if (self.seeds is None) == any(SEED in name for name in names):
            raise UserError(
                f"Expected `models.seeds` if a name contains {SEED}, and no seeds otherwise, but got "
                f"{self.seeds!r} for {', '.join(names)}."
            )
        if self.seeds is not None:
            seeds = range(self.seeds) if isinstance(self.seeds, int) else self.seeds
            patterns, names = names, []
            for name in patterns:
                names += [name.replace(SEED, str(seed)) for seed in seeds]
        if not names:
            raise UserError(
                "Expected `models` to name at least one model, but got none."
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"Expected `models` to name each once, but got {', '.join(twice)} twice."
            )
        return names

    def group(
        self, name: str, option: Literal["groups", "bases"] = "groups"
    ) -> str | None:
        """The group of a model, or of the model that it is a copy of; or, by `bases`, what it was fine-tuned from."""
        of = {name, base_of(name, self.listed())}
        for group, names in self.members(option).items():
            if not of.isdisjoint(names):
                return group
        return None

    def members(self, option: Literal["groups", "bases"]) -> dict[str, list[str]]:
        """Name of a group, or of a pretrained model -> its models."""
        if option == "groups":
            return self.groups or {}
        if isinstance(self.bases, str):
            return {self.bases: self.listed()}
        return self.bases or {}


@dataclass
class Pairs:
    """Which pairs of models are compared. Default: all.

    Args:
        random: so many of them, drawn by `seed`.
        seed: seed of the draw.
        given: these, each a list of two names.
        same: each model with itself as well, where maps are fitted.
    """

    random: int | None = None
    seed: int = 0
    given: list[list[str]] | None = None
    same: bool = False

    @property
    def every(self) -> bool:
        """Whether these are all pairs."""
        return self.random is None and self.given is None

    def of(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The pairs of these models, each with itself left out.

        Raises:
            ValueError: there are not so many pairs, or no such model.
        """
        every = list(combinations(names, 2))
        if self.given is not None:
            return [self._known(pair, names) for pair in self.given]
        if self.random is None:
            return every
        check_range(least=1, most=len(every), **{"pairs.random": self.random})
        drawn = random.Random(self.seed).sample(every, self.random)
        return sorted(drawn, key=every.index)

    def _known(self, pair: Sequence[str], names: Sequence[str]) -> tuple[str, str]:
        if len(pair) != 2 or not {*pair} <= {*names}:
            raise UserError(
                f"Expected each of `pairs.given` to be two of {', '.join(names)}, but got {list(pair)}."
            )
        return pair[0], pair[1]


@dataclass
class Work:
    """One kind of cell.

    Args:
        options: options of the command, as its config files have them.
        stages: at which stages of the models; default: all those of the study.
        tasks: on which tasks; default: all.
    """

    options: dict[str, Any] = field(default_factory=dict)
    stages: list[Stage] | None = None
    tasks: list[str] | None = None


@dataclass
class Probing(Work):
    """Probes of every model.

    Args:
        options: options of `train.py probe`.
        stages: at which stages of the models; default: all those of the study.
        tasks: on which tasks; default: all.
        texts: name -> data options of further annotated sentences, such as {text: {source: FILE}}, each for cells of
            its own.
    """

    texts: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Finetuning:
    """Fine-tuning of every model on every task, where anything needs it.

    Args:
        options: options of `train.py finetune`.
        copies: so many times, with seeds 0, 1, ...
        tasks: task -> options of its own, which take precedence.
    """

    options: dict[str, Any] = field(default_factory=dict)
    copies: int = 1
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Fitting(Work):
    """Maps of every pair.

    Args:
        options: options of `train.py fit`.
        stages: at which stages of the models; default: all those of the study.
        tasks: on which tasks; default: all.
        pairs_at_once: pairs in one bank, and so in one cell, which reads each of its models once a batch. They need
            models of equal widths. Default: as many as `memory` holds, or 1 where widths differ.
        memory: GB that a bank may take where `pairs_at_once` is left out, whatever the machine has.
    """

    pairs_at_once: int | None = None
    memory: float = 8.0


@dataclass
class Comparison(Work):
    """A comparison of layers.

    Args:
        options: options of `evaluate.py similarity`.
        stages: at which stages of the models; default: all those of the study.
        tasks: on which tasks; default: all.
        across_stages: whether models of different stages are compared, too.
        across_tasks: whether models fine-tuned on different tasks are compared, on the texts of each of `tasks`.
        texts: name -> data options of further texts, of no task, such as {text: {source: FILE}}: on each of them models
            fine-tuned on any of the study's tasks are compared. In tables, `task` is this name.
    """

    across_stages: bool = False
    across_tasks: bool = False
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Study:
    """Many models, tasks, pairs and maps.

    Args:
        name: name of the study, of its folder runs/NAME, and of the group of its W&B runs.
        models: which models.
        tasks: name -> data options, such as {text: {source: sst2}}.
        stages: `pretrained`: the models as they are; `finetuned`: fine-tuned on the task; `random`: untrained twins.
        pairs: which pairs of them.
        data: data options that all commands share. A command without such an option does without.
        finetune: how models are fine-tuned (`train.py finetune`).
        fit: maps of each pair (`train.py fit`, or `fit_pairs`).
        inject: errors of these maps on held-out texts, and injection (`evaluate.py inject`).
        similarity: measures between layers (`evaluate.py similarity`).
        stitch: stitching layers of each pair (`train.py stitch`).
        identity: identity stitching (`evaluate.py stitch`).
        attention: maps between attention weights of each pair (`train.py fit_attention`).
        compare: what changed between each pair, old and new (`evaluate.py compare`).
        carry: artefacts of the first of each pair, old, carried to the second, new (`train.py carry`).
        recover: a random INN on the states of each model, to be recovered (`train.py recover`).
        probe: what is encoded in each model's states (`train.py probe`), on the annotated sentences that its `options`
            name as `data.text`.
        surgery: fine-tuned models truncated, and without spans of their layers (`evaluate.py surgery`).
        store: folder of a store of states, so that every model is read once; `own`: inside the study's folder.
        keep: `results`: a fit's maps are removed once every cell that needs them is done; `all`: nothing is.
        as_printed: whether a paper's own definition is computed beside ours where the two differ; see
            `aligners.reports.study.printed`.
        report: names of the tables and figures of the report; default: all that the results allow.
    """

    name: str
    models: Models
    tasks: dict[str, dict[str, Any]]
    stages: list[Stage] = field(default_factory=lambda: ["pretrained"])
    pairs: Pairs = field(default_factory=Pairs)
    data: dict[str, Any] = field(default_factory=dict)
    finetune: Finetuning | None = None
    fit: Fitting | None = None
    inject: Work | None = None
    similarity: Comparison | None = None
    stitch: Work | None = None
    identity: Work | None = None
    attention: Work | None = None
    compare: Work | None = None
    carry: Work | None = None
    recover: Work | None = None
    probe: Probing | None = None
    surgery: Work | None = None
    store: str | None = None
    keep: Literal["all", "results"] = "all"
    as_printed: bool = False
    report: list[str] | None = None

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(
                f"Expected `name` to be the name of a folder, but got {self.name!r}."
            )
        for option in ("tasks", "stages"):
            if not getattr(self, option):
                raise UserError(
                    f"Expected `{option}` to name at least one, but got none."
                )
        self._check_groups()
        self._check_finetuning()
        if self.fit is not None:
            check_range(least=1, **{"fit.pairs_at_once": self.fit.pairs_at_once})
            check_range(above=0, **{"fit.memory": self.fit.memory})
        for name, work in self.work().items():
            self._check_work(name, work)
        for stage in self.stages:
            self.pairs_at(stage)

    def _check_groups(self) -> None:
        names = self.models.listed()
        for option in ("groups", "bases"):
            for group, members in self.models.members(option).items():
                bare = [base_of(name, names) for name in members]
                check_known(names, **{f"models.groups.{group}": bare})

    def _check_finetuning(self) -> None:
        if self.finetune is not None:
            check_range(least=1, **{"finetune.copies": self.finetune.copies})
            check_known(self.tasks, **{"finetune.tasks": list(self.finetune.tasks)})
            self._check_copies()
        elif "finetuned" in self.stages:
            raise UserError(
                "Expected `finetune` to say how models are fine-tuned, as `stages` has finetuned."
            )
        if self.surgery is not None and "finetuned" not in self.stages:
            raise UserError(
                "Expected `stages` to include finetuned, as `surgery` needs fine-tuned models."
            )

    def _check_copies(self) -> None:
        tuned = [model.name for model in self.models_at("finetuned")]
        twice = sorted({name for name in tuned if tuned.count(name) > 1})
        if twice:
            raise UserError(
                f"Expected `models` without names of copies that `finetune` makes, but got {', '.join(twice)}. Rename "
                "the folder."
            )

    def _check_work(self, name: str, work: Work) -> None:
        check_known(self.stages, **{f"{name}.stages": work.stages})
        check_known(self.tasks, **{f"{name}.tasks": work.tasks})
        twice = set(self.tasks) & set(self.further_texts(name))
        if twice:
            raise UserError(
                f"Expected `{name}.texts` to be named unlike `tasks`, but got {', '.join(twice)}."
            )

    def work(self) -> dict[str, Work]:
        """The kinds of cells that are asked for, fine-tuning apart."""
        options = vars(self).items()
        return {name: value for name, value in options if isinstance(value, Work)}

    def wanted(self, stage: Stage, task: str) -> set[str]:
        """The kinds of cells that there are at a stage, on a task or on further texts."""
        kinds = set()
        for kind, work in self.work().items():
            stages = work.stages or self.stages
            tasks = [*(work.tasks or self.tasks), *self.further_texts(kind)]
            if stage in stages and task in tasks:
                kinds.add(kind)
        return kinds

    def further_texts(self, kind: str) -> dict[str, dict[str, Any]]:
        """The data options of the further texts of a kind of cells, by name."""
        return getattr(self.work().get(kind), "texts", {})

    def models_at(self, stage: Stage) -> list[Model]:
        """The models at a stage: of fine-tuned ones, every copy."""
        copies = 1
        if stage == "finetuned" and self.finetune is not None:
            copies = self.finetune.copies
        models = []
        for base in self.models.listed():
            models.append(Model(base, base))
            for copy in range(1, copies):
                models.append(Model(f"{base}{COPY}{copy + 1}", base, copy))
        return models

    def pairs_at(self, stage: Stage) -> list[tuple[Model, Model]]:
        """The pairs at a stage, each model with itself left out."""
        models = {model.name: model for model in self.models_at(stage)}
        names = self.pairs.of(list(models))
        return [(models[x], models[y]) for x, y in names]


def read_study(plain: dict[str, Any]) -> Study:
    """The study that the content of a study file describes.

    Args:
        plain: the content.

    Raises:
        ValueError: it has a key that is not known, or contradicts itself.
    """
    return _made(Study, plain, "a study file")


def _made(kind: Any, given: dict[str, Any], place: str) -> Any:
    """A dataclass of plain values, and of further dataclasses."""
    hints = get_type_hints(kind)
    unknown = [str(key) for key in given if key not in hints]
    if unknown:
        raise UserError(
            f"Expected the keys of {place} out of {', '.join(hints)}, but got {', '.join(unknown)}."
        )
    values = dict(given)
    for name, value in given.items():
        for hint in (hints[name], *get_args(hints[name])):
            if is_dataclass(hint) and value is not None:
                values[name] = _made(hint, value, f"`{name}`")
    return kind(**values)
