"""Routes: from which model into which, at which site pairs; which routes are impossible, and the targets' task."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, Literal, Self, cast, get_args

from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.sites import route_sites
from aligners.datamodules.task_targets import TaskBatch, check_mask, task_batch
from aligners.datamodules.text.labels import known_labels
from aligners.datamodules.tokens.tokenising import same_tokenizer
from aligners.errors import UserError, check_known
from aligners.fitting.saved_bank import BACKWARD, FORWARD
from aligners.injection.scoring.scores import ScoredTask
from aligners.injection.scoring.task_scores import check_labels, match_heads
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel

Routes = Literal["all", "different", "forward"]


@dataclass(frozen=True, eq=False)
class Route:
    """Which model is read, which model is run from its states, and at which site pairs.

    Attributes:
        key: numbers of the two models in the run, `0_1`.
        source: the model that is read, f.
        target: the model that is run from there, g.
        pairs: site pairs (l, m): the state of f at l goes in at m of g.
        component: what a state is: the residual stream, or what a sub-layer adds to it.
    """

    key: str
    source: FrozenModel
    target: FrozenModel
    pairs: tuple[tuple[int, int], ...]
    component: Component = "residual"

    @property
    def name(self) -> str:
        """The name in a report."""
        return f"{self.source.name} → {self.target.name}"

    @property
    def same(self) -> bool:
        """Whether a model is stitched to itself, a baseline that separates optimisation from difference."""
        return self.source is self.target

    @property
    def read_at(self) -> list[int]:
        """The site of the source in each pair."""
        return [i for i, _ in self.pairs]

    @property
    def put_at(self) -> list[int]:
        """The site of the target in each pair."""
        return [j for _, j in self.pairs]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """S, d_x and d_y of its banks."""
        return len(self.pairs), self.source.width, self.target.width

    def site_names(self) -> list[str]:
        """`l-m` for each site pair."""
        return [f"{i}-{j}" for i, j in self.pairs]


def targets_of(routes: Iterable[Route]) -> list[FrozenModel]:
    """Return the targets of routes, each once."""
    return list(dict.fromkeys(route.target for route in routes))


def build_routes(
    models: Sequence[FrozenModel],
    sites: str | Sequence[str | int],
    wanted: Routes,
    component: Component = "residual",
) -> list[Route]:
    """Build the routes between models, each once.

    Args:
        models: models in the order of the run; a model named twice is one object, and a route to it leads to itself.
        sites: sites as the user wrote them.
        wanted: `all`: every ordered pair, including each model with itself; `different`: only pairs of different
            models; `forward`: from the first model into each other one.
        component: what is read and replaced at a site.

    Raises:
        ValueError: `wanted` is none of these, or the sites do not fit the models.
    """
    depths = [model.depth for model in models]
    routes: list[Route] = []
    taken: set[tuple[Any, ...]] = set()
    for a, b in route_numbers(len(models), wanted):
        source, target = models[a], models[b]
        new = []
        for pair in route_sites(sites, depths, a, b, component):
            if (source, target, pair) not in taken:
                new.append(pair)
                taken.add((source, target, pair))
        if new:
            routes.append(Route(f"{a}_{b}", source, target, tuple(new), component))
    return routes


def route_numbers(count: int, wanted: Routes) -> list[tuple[int, int]]:
    """Return the numbers of source and target of each route between so many models: different models first.

    Raises:
        ValueError: `wanted` is not an option of `build_routes`.
    """
    check_known(get_args(Routes), routes=wanted)
    if wanted == "forward":
        return [(0, b) for b in range(1, count)]
    routes = list(permutations(range(count), 2))
    if wanted == "all":
        routes += [(a, a) for a in range(count)]
    return routes


def check_routes(
    routes: Sequence[Route],
    labels: Tensor | None,
    source: str,
    *,
    allow_mixed: bool,
    gradients: bool,
) -> None:
    """Raise if a route cannot be stitched, or if its loss would mean something else.

    Args:
        routes: routes of the run.
        labels: (n,) classes of the held-out texts; None: they have none.
        source: name of the texts, for messages.
        allow_mixed: allow routes from a model that sees the next token to one that must predict it.
        gradients: whether gradients must pass through the targets.

    Raises:
        ValueError: a target has no head or one that predicts a number, or the targets have different tasks; the texts
            of a classification have no labels, or labels that the head does not have; a front sees the tokens that the
            tail should predict; weights are quantised, and gradients must pass through them.
    """
    tasks = {}
    for target in targets_of(routes):
        _check_head(target)
        if target.task == "classification":
            check_labels(target, labels, source)
        if gradients and target.quantised is not None:
            raise UserError(
                f"Expected weights that gradients can pass through, but {target.name} is quantised "
                f"({target.quantised}). Load it unquantised; `data.dtype` 'bfloat16' halves its memory."
            )
        tasks[target.task] = f"{target.name}: {target.task}"
    if len(tasks) > 1:
        listed = ", ".join(tasks.values())
        raise UserError(
            f"Expected models with the same task to stitch into, but got {listed}. Their losses cannot be compared: "
            "stitch them in runs of their own, with `routes` 'forward'."
        )
    if allow_mixed:
        return
    for route in routes:
        why = gives_answers(route.source, route.target)
        if why is not None:
            raise UserError(
                f"{why}: a low loss would mean nothing. Stitch models of one kind, or set `allow_mixed` to true if "
                "you want to measure this anyway."
            )


def _check_head(target: FrozenModel) -> None:
    """Raise if a model has no head whose answers have a loss in nats."""
    if target.task is None:
        raise UserError(
            f"Stitching needs a model with a classification head or a language modelling head to stitch into, but "
            f"{target.name} {target.no_task}. Name another model, with its head."
        )
    if target.regression:
        raise UserError(
            f"A penalty is in nats, so it needs a classifier or a language model, but the head of {target.name} "
            "predicts a number. Evaluate it with `evaluate.py inject`."
        )


def gives_answers(source: FrozenModel, target: FrozenModel) -> str | None:
    """Say, without full stop, why a model's states would give away a next-token head's answers; or return None."""
    if target.task != "causal" or source.causal:
        return None
    return (
        f"{source.name} sees the whole text (when the last token of a text changes, the states before it move), and "
        f"would reveal to {target.name} the tokens that it should predict"
    )


def paired_routes(data: PairedActivations, *, both_directions: bool) -> list[Route]:
    """Return the routes between the two models of a data module: from X into Y, and back."""
    x, y = data.reader.model_x, data.reader.model_y
    pairs = tuple(data.reader.sites)
    routes = [Route(FORWARD, x, y, pairs, data.component)]
    if both_directions:
        turned = tuple((j, i) for i, j in pairs)
        routes.append(Route(BACKWARD, y, x, turned, data.component))
    return routes


@dataclass(frozen=True)
class InjectedTask:
    """The task that the held-out texts set for the targets of routes, and for sources that know it.

    Attributes:
        not_injected: for each route why states cannot be put into its target, or None.
        answering: models that can be asked.
        labels: for each classifier among them, which of its classes stands for which class of the texts.
        asked: the scored task; None where nothing is asked.
        targets_of: makes the targets of texts; None where nothing is asked.
    """

    not_injected: dict[Route, str | None]
    answering: Sequence[FrozenModel] = ()
    labels: dict[FrozenModel, dict[str, list[str]]] | None = None
    asked: ScoredTask | None = None
    targets_of: Callable[[TextBatch], TaskBatch] | None = None

    @classmethod
    def of(
        cls,
        data: PairedActivations,
        routes: Sequence[Route],
        *,
        masked_share: float,
        seed: int,
    ) -> Self:
        """Find out what can be asked.

        Args:
            data: the texts, and the models, which are loaded now.
            routes: between its models; the task is that of the first target that can be injected into.
            masked_share: share of the tokens that a masked language model must predict.
            seed: seed of the random floors.

        Raises:
            ValueError: the labels are not those of a target's head.
        """
        not_injected: dict[Route, str | None] = {}
        injected: list[Route] = []
        for route in routes:
            why = _no_injection(route, data, injected)
            not_injected[route] = why
            if why is None:
                injected.append(route)
        if not injected:
            return cls(not_injected)

        first = injected[0].target
        check_mask(first)
        models = routes[0].source, routes[0].target
        labels = None
        answering = [
            model for model in dict.fromkeys(models) if model.task == first.task
        ]
        if first.task == "classification":
            labels = match_heads(data, targets_of(injected), models)
            answering = list(labels)
        asked = ScoredTask.of(data, first, seed=seed)
        make_targets = partial(
            task_batch, model=first, masked_share=masked_share, seed=data.seed
        )
        return cls(not_injected, answering, labels, asked, make_targets)


def _no_injection(
    route: Route, data: PairedActivations, injected: Sequence[Route]
) -> str | None:
    """Say why states cannot be put into the target of a route, given the routes before it; or return None."""
    source, target = route.source, route.target
    labels, text = data.split("test").labels, data.text.source
    classifies = target.task == "classification"
    if target.task is None:
        return f"{target.name} {target.no_task}"
    if classifies and (labels is None or not known_labels(labels).any()):
        columns = data.texts.columns_without_labels
        return f"the texts of {text!r} have no labels{columns}"
    if not same_tokenizer(cast(Any, source.tokenizer), cast(Any, target.tokenizer)):
        return f"the tokenizers of {source.name} and {target.name} differ"
    leak = gives_answers(source, target)
    if leak is not None:
        return leak
    first = target
    if injected:
        first = injected[0].target
    if target.task != first.task:
        return f"{target.name} has another task ({target.task}) than {first.name} ({first.task})"
    if classifies:
        check_labels(target, labels, text)
    return None
