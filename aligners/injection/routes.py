"""Routes: from which model into which, at which site pairs, which are impossible, and what their targets are asked."""

from collections.abc import Callable, Sequence
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
from aligners.datamodules.tokens.tokenised import same_tokenizer
from aligners.errors import UserError, check_known
from aligners.fitting.saved_bank import BACKWARD, FORWARD
from aligners.injection.scoring.scores import ScoredTask
from aligners.injection.scoring.task_scores import check_labels, match_heads
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel

Routes = Literal["all", "different", "forward"]


@dataclass(frozen=True, eq=False)
class Route:
    """From which model into which, and where.

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
        """As a report writes it."""
        return f"{self.source.name} → {self.target.name}"

    @property
    def same(self) -> bool:
        """Whether a model is stitched to itself, the baseline that tells optimisation from difference."""
        return self.source is self.target

    def site_names(self) -> list[str]:
        """`l-m` for each site pair."""
        return [f"{i}-{j}" for i, j in self.pairs]


def build_routes(
    models: Sequence[FrozenModel],
    sites: str | Sequence[str | int],
    wanted: Routes,
    component: Component = "residual",
) -> list[Route]:
    """The routes between models, none of them twice.

    Args:
        models: in the order of the run; one that is named twice is one object, and a route to it leads to itself.
        sites: as the user wrote them.
        wanted: `all`: every ordered pair, each model to itself among them; `different`: without those; `forward`: from
            the first model into each other one.
        component: what is read and replaced at a site.

    Raises:
        ValueError: `wanted` is none of these, or the sites do not fit the models.
    """
    depths = [model.depth for model in models]
    routes: list[Route] = []
    taken = set()
    for a, b in route_numbers(len(models), wanted):
        places = [
            (models[a], models[b], pair)
            for pair in route_sites(sites, depths, a, b, component)
        ]
        new = tuple(place[-1] for place in places if place not in taken)
        if new:
            routes.append(Route(f"{a}_{b}", models[a], models[b], new, component))
        taken.update(places)
    return routes


def route_numbers(count: int, wanted: Routes) -> list[tuple[int, int]]:
    """The numbers of source and target of each route between so many models: different models first.

    Raises:
        ValueError: `wanted` is none of those that `build_routes` has.
    """
    check_known(get_args(Routes), routes=wanted)
    if wanted == "forward":
        return [(0, b) for b in range(1, count)]
    return [
        *permutations(range(count), 2),
        *((a, a) for a in range(count) if wanted == "all"),
    ]


def check_routes(
    routes: Sequence[Route],
    labels: Tensor | None,
    source: str,
    *,
    allow_mixed: bool,
    gradients: bool,
) -> None:
    """Raise if a route cannot be stitched, or would measure something else.

    Args:
        routes: of the run.
        labels: (n,) classes of the held-out texts; None: they have none.
        source: name of the texts, for messages.
        allow_mixed: allow routes from a model that sees the next token to one that has to predict it.
        gradients: whether gradients must pass through the targets.

    Raises:
        ValueError: targets have no head, one that predicts a number, or heads of different tasks; a classification
            without labels or with labels that the head does not have; a front that sees the tokens
            which the tail should predict; quantised weights.
    """
    targets = list(dict.fromkeys(route.target for route in routes))
    for target in targets:
        if target.task is None:
            raise UserError(
                f"Stitching needs a model with a classification head or a language modelling head to stitch into, but "
                f"{target.name} {target.no_task}. Name another model, with its head."
            )
        if target.regression:
            raise UserError(
                f"A penalty is in nats, of a classifier or of a language model, but the head of {target.name} predicts "
                "a number. Evaluate it with `evaluate.py inject`."
            )
        if target.task == "classification":
            check_labels(target, labels, source)
        if gradients and target.quantised is not None:
            raise UserError(
                f"Expected weights that gradients can pass through, but {target.name} is quantised "
                f"({target.quantised}). Load it unquantised; `data.dtype` 'bfloat16' halves its memory."
            )
    tasks = {str(target.task): target.name for target in targets}
    if len(tasks) > 1:
        listed = ", ".join(f"{name}: {task}" for task, name in tasks.items())
        raise UserError(
            f"Expected models with the same task to stitch into, but got {listed}. Their losses cannot be compared: "
            "stitch them in runs of their own, with `routes` 'forward'."
        )
    for route in routes:
        why = None if allow_mixed else gives_answers(route.source, route.target)
        if why is not None:
            raise UserError(
                f"{why}: a low loss would mean nothing. Stitch models of one kind, or set `allow_mixed` to true if "
                "this is what you want to measure."
            )


def gives_answers(source: FrozenModel, target: FrozenModel) -> str | None:
    """Why states of a model would give a next-token head its answers, as a sentence without its full stop; or None."""
    if target.task != "causal" or source.causal:
        return None
    return (
        f"{source.name} sees the whole text (when the last token of a text changes, the states before it move), and "
        f"would give {target.name} the tokens that it should predict"
    )


def paired_routes(data: PairedActivations, *, both_directions: bool) -> list[Route]:
    """The routes between the two models of a data module: from X into Y, and back."""
    reader, component = data.reader, data.component
    models, there = (reader.model_x, reader.model_y), tuple(reader.sites)
    routes = [Route(FORWARD, *models, there, component)]
    if both_directions:
        routes.append(
            Route(BACKWARD, *models[::-1], tuple((j, i) for i, j in there), component)
        )
    return routes


@dataclass(frozen=True)
class InjectedTask:
    """What the held-out texts ask of the targets of routes, and of the sources that know the task.

    Attributes:
        not_injected: for each route why states cannot be put into its target, or None.
        answering: the models that can be asked.
        labels: of classifiers among them, what was matched with what.
        asked: what is scored; None where nothing is asked.
        targets_of: what makes targets of texts, likewise.
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
            routes: between its models; the task is that of the first route's target, if it can be asked.
            masked_share: share of the tokens that a masked language model has to find.
            seed: of the random floors.

        Raises:
            ValueError: the labels are not those of a target's head.
        """
        why: dict[Route, str | None] = {}
        for route in routes:
            why[route] = _no_injection(route, data, routes[0], why)
        targets = [route.target for route in routes if why[route] is None]
        if not targets:
            return cls(why)
        first, models = targets[0], (routes[0].source, routes[0].target)
        check_mask(first)
        targets_of = partial(
            task_batch, model=first, masked_share=masked_share, seed=data.seed
        )
        labels = (
            match_heads(data, targets, models)
            if first.task == "classification"
            else None
        )
        answering = (
            [model for model in dict.fromkeys(models) if model.task == first.task]
            if labels is None
            else labels
        )
        return cls(
            why,
            list(answering),
            labels,
            ScoredTask.of(data, first, seed=seed),
            targets_of,
        )


def _no_injection(
    route: Route, data: PairedActivations, first: Route, why: dict[Route, str | None]
) -> str | None:
    """Why states cannot be put into the target of a route, or None.

    Args:
        route: which.
        data: the texts.
        first: the first route.
        why: the same of the routes before.
    """
    source, target = route.source, route.target
    labels, text = data.split("test").labels, data.text.source
    if target.task is None:
        return f"{target.name} {target.no_task}"
    if target.task == "classification" and (
        labels is None or not known_labels(labels).any()
    ):
        return (
            f"the texts of {text!r} have no labels{data.texts.columns_without_labels}"
        )
    if not same_tokenizer(*(cast(Any, model.tokenizer) for model in (source, target))):
        return f"the tokenizers of {source.name} and {target.name} differ"
    if (leak := gives_answers(source, target)) is not None:
        return leak
    if target.task != first.target.task and why.get(first, "") is None:
        return f"{target.name} has another task ({target.task}) than {first.target.name} ({first.target.task})"
    if target.task == "classification":
        check_labels(target, labels, text)
    return None
