"""What is asked of the models that states are put into, or why nothing can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from aligners.fitting.storage.bank import BACKWARD, FORWARD
from aligners.injection.routes import Route
from aligners.injection.scoring.answers import match_heads
from aligners.injection.scoring.asked import Asked
from aligners.injection.scoring.tasks import check_labels
from aligners.models.model import FrozenModel
from datamodules.asking import Asking
from datamodules.states import States
from datamodules.text.labels import known_labels
from datamodules.tokens.tokenised import same_tokenizer

__all__ = ["DIRECTIONS", "InjectedTask", "paired_routes"]

DIRECTIONS = {FORWARD: "forward", BACKWARD: "backward"}  # as reports call the routes between two models


def paired_routes(data: States, *, both_directions: bool) -> list[Route]:
    """The routes between the two models of a data module: from X into Y, and back."""
    reader, component = data.reader, data.component
    models, there = (reader.model_x, reader.model_y), tuple(reader.sites)
    routes = [Route(FORWARD, *models, there, component)]
    if both_directions:
        routes.append(Route(BACKWARD, *models[::-1], tuple((j, i) for i, j in there), component))
    return routes


@dataclass(frozen=True)
class InjectedTask:
    """What the held-out texts ask of the targets of routes, and of the sources that know the task.

    Attributes:
        not_injected: for each route why states cannot be put into its target, or None.
        answering: the models that can be asked.
        labels: of classifiers among them, what was matched with what.
        asked: what is scored; None where nothing is asked.
        asking: what makes targets of texts, likewise.
    """

    not_injected: dict[Route, str | None]
    answering: Sequence[FrozenModel] = ()
    labels: dict[FrozenModel, dict[str, list[str]]] | None = None
    asked: Asked | None = None
    asking: Asking | None = None

    @classmethod
    def of(cls, data: States, routes: Sequence[Route], *, masked_share: float, seed: int) -> InjectedTask:
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
        asked = [route.target for route in routes if why[route] is None]
        if not asked:
            return cls(why)
        first, models = asked[0], (routes[0].source, routes[0].target)
        asking = Asking.of(first, masked_share=masked_share, seed=data.seed)
        if first.task == "classification":
            labels = match_heads(data, asked, models)
            return cls(why, list(labels), labels, Asked.of(data, first, seed=seed), asking)
        answering = [model for model in dict.fromkeys(models) if model.task == first.task]
        return cls(why, answering, None, Asked.of(data, first, seed=seed), asking)


def _no_injection(route: Route, data: States, first: Route, why: dict[Route, str | None]) -> str | None:
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
        return f"{target.name} has no classification head and none for language modelling"
    if target.task == "classification" and (labels is None or not known_labels(labels).any()):
        return f"the texts of {text!r} have no labels"
    if not same_tokenizer(*(cast(Any, model.tokenizer) for model in (source, target))):
        return f"the tokenizers of {source.name} and {target.name} differ"
    if target.causal and not source.causal:
        return f"{source.name} sees the whole text, and would tell {target.name} the tokens that it is asked for"
    if target.task != first.target.task and why.get(first, "") is None:
        return f"{target.name} has another task ({target.task}) than {first.target.name} ({first.target.task})"
    if target.task == "classification":
        check_labels(target, labels, text)
    return None
