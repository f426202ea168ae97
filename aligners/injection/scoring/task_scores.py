"""How well a head answers what it is asked, unit by unit: classes, losses and scores of every kind of task.

Nothing here but `check_labels` waits for the device.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from aligners.datamodules.module import TextModule
from aligners.datamodules.task_targets import Targets
from aligners.datamodules.text.labels import (
    ClassMap,
    Largest,
    by_number,
    check_labelled,
    class_map,
    in_words,
    numbered,
)
from aligners.errors import UserError
from aligners.models.model import FrozenModel
from aligners.models.recipes import EMBEDDED

logger = logging.getLogger(__name__)

# Logits that are scored at once: what a GPU has memory for, and what stays in the cache of a CPU's core.
PART = (2**28, 2**18)


def in_data_order(logits: Tensor, groups: ClassMap | None) -> Tensor:
    """The logits of the texts' classes (..., K) from those of a head (..., C), adding probabilities.

    Of a group that is `Largest` the most probable class answers instead, as where a prediction is renamed.

    Args:
        logits: the head's logits.
        groups: for each class of the texts, the head's classes that answer it; None if `logits` are in order.
    """
    if groups is None:
        return logits
    # one by one: a list as an index would be copied to the device, and that waits for it
    columns = [[logits[..., place] for place in group] for group in groups]
    added = [
        Tensor.amax if isinstance(group, Largest) else Tensor.logsumexp
        for group in groups
    ]
    both = zip(columns, added, strict=True)
    return torch.stack(
        [
            parts[0] if len(parts) == 1 else joined(torch.stack(parts), 0)
            for parts, joined in both
        ],
        -1,
    )


def one_after_another(groups: ClassMap | None) -> ClassMap | None:
    """Groups of the same sizes for a new head, whose classes have no meaning yet; None if they are in order."""
    if groups is None or all(len(group) == 1 for group in groups):
        return None
    ends = [sum(len(group) for group in groups[:k]) for k in range(len(groups) + 1)]
    return tuple(type(group)(range(*ends[k : k + 2])) for k, group in enumerate(groups))


def match_heads(
    data: TextModule, asked: Sequence[FrozenModel], read: Sequence[FrozenModel] = ()
) -> dict[FrozenModel, dict[str, list[str]]]:
    """Set each head's `class_map` by the names of its classes and of the texts', or by `data.labels`.

    Where the texts' classes have no names, their numbers are those of the heads, which must then agree.

    Args:
        data: the texts, their models, and `labels`.
        asked: the scored models; `tasks.check_labels` has passed them.
        read: further models, scored if they can be; they need not know the task.

    Returns:
        For each scored model, the name of every class of the texts and what its head calls it; empty where
        numbers are predicted.

    Raises:
        ValueError: the names of the texts' classes differ from a head's, or those of two heads differ where the texts
            have none, and `data.labels` does not match them; or some heads predict numbers and others classes.
    """
    kinds = {model.regression: model.name for model in asked}
    if len(kinds) > 1:
        raise UserError(
            f"Expected models of one task, but the head of {kinds[True]} predicts a number and that of {kinds[False]} "
            "predicts classes. Measure them one by one."
        )
    if True in kinds:
        return {model: {} for model in (*asked, *read) if model.regression}
    names, classes = data.texts.label_names, data.texts.classes
    matched: dict[FrozenModel, dict[str, list[str]]] = {}
    for model in dict.fromkeys((*asked, *read)):
        head, given = model.label_names, _given(data, model)
        if model not in asked and (model.n_labels is None or model.regression):
            continue
        try:
            model.class_map = class_map(
                head,
                names,
                classes,
                given=given,
                model=model.name,
                source=data.text.source,
            )
        except ValueError as error:
            if model in asked or given is not None:
                raise
            logger.warning(
                "%s only supplies states: its head seems to be for another task. %s",
                model.name,
                error,
            )
            continue
        matched[model] = in_words(model.class_map, head, names)
    if numbered(names, classes) is not None:
        _check_agreement(
            [model for model in matched if _given(data, model) is None], classes
        )
    for caution in matched_by_number(data, list(matched)):
        logger.warning(caution)
    return matched


def matched_by_number(data: TextModule, models: Sequence[FrozenModel]) -> list[str]:
    """Cautions about models whose classes were matched with the texts' by number, because only one side names them.

    Embedded models number theirs, and were trained on the texts' own.
    """
    texts, source = (
        data.texts,
        data.text.source,
    )  # which may have no labels where there are no models
    cautions = (
        by_number(
            model.label_names,
            texts.label_names,
            texts.classes,
            model=model.name,
            source=source,
        )
        for model in models
        if not model.regression
        and _given(data, model) is None
        and not model.name.startswith(EMBEDDED)
    )
    return list(filter(None, cautions))


def _given(data: TextModule, model: FrozenModel) -> Any:
    """What `data.labels` says about a model, a `GivenMap`; None: nothing."""
    if data.labels is None or isinstance(data.labels, Mapping):
        return data.labels
    named = data.named()
    if len(data.labels) != len(named):
        raise UserError(
            f"Expected `data.labels` to be one map, or a list of one for each of the {len(named)} models (null: by its "
            f"names), but got {len(data.labels)}."
        )
    place = next(
        (place for place, other in enumerate(data.frozen) if other is model), 0
    )
    return data.labels[place] if place < len(named) else None


def _check_agreement(models: Iterable[FrozenModel], classes: int) -> None:
    """Raise if heads give one number different names: nothing says which of them the texts mean."""
    meant: dict[tuple[str, ...], Any] = {}
    for model in models:
        if numbered(model.label_names, classes) is None:
            meant.setdefault(
                tuple(name.strip().casefold() for name in model.label_names), model
            )
    if len(meant) > 1:
        listed = "; ".join(
            f"{model.name} has {', '.join(model.label_names)}"
            for model in meant.values()
        )
        raise UserError(
            f"The texts' classes have no names, and the heads name theirs differently: {listed}. Say which of a head's "
            "classes stand for class 0, 1, ... of the texts: by names that all heads use, as in --data.labels "
            f'\'{{"0": "{next(iter(meant))[0]}", ...}}\', or as a list of one map for each model.'
        )


def chosen(logits: Tensor, targets: Targets, groups: ClassMap | None = None) -> Tensor:
    """Select each unit's logits, (U, C) float32, from those of the batch, (B, C) or (B, T, C), in the texts' order.

    Args:
        logits: of the head.
        targets: the units.
        groups: see `in_data_order`.
    """
    return in_data_order(
        logits.flatten(0, -2).index_select(0, targets.index).float(), groups
    )


def unit_losses(logits: Tensor, targets: Targets) -> Tensor:
    """Return cross-entropies in nats, or the squared errors of numbers: chosen logits (..., U, C) -> (..., U)."""
    if targets.answer.is_floating_point():
        return (logits[..., 0].float() - targets.answer).square()
    lead = logits.shape[:-1]
    answer = targets.answer.expand(lead).reshape(-1)
    return cross_entropy(logits.flatten(0, -2), answer, reduction="none").view(lead)


def divergence(logits: Tensor, own: Tensor, temperature: float = 1.0) -> Tensor:
    """The loss of distillation (Hinton, Vinyals and Dean 2015): T² KL(softmax(own / T) ‖ softmax(logits / T)).

    Args:
        logits: (..., C) logits of the model that learns.
        own: (..., C) logits of the model that it matches.
        temperature: T.

    Returns:
        (...) in nats.
    """
    learning, matched = (
        (values / temperature).log_softmax(-1) for values in (logits, own)
    )
    return temperature**2 * kl_div(
        learning, matched, reduction="none", log_target=True
    ).sum(-1)


class UnitAnswers(NamedTuple):
    """What is answered to U units of a batch, without the logits: those of a language model would fill the memory.

    Attributes:
        loss: (..., U) cross-entropy in nats, or the squared error of a number.
        correct: (..., U) 1 where the answer is the right one; NaN of numbers.
        answer: (..., U) float64, the class, token or number.
    """

    loss: Tensor
    correct: Tensor
    answer: Tensor


def unit_answers(logits: Tensor, targets: Targets) -> UnitAnswers:
    """Score the answer to each unit by chosen logits (..., U, C); NaN where they are not finite: there is no answer."""
    return _answers(targets, *_looked_at(logits.float(), targets))


def batch_answers(
    logits: Tensor, targets: Targets, groups: ClassMap | None = None
) -> UnitAnswers:
    """As `unit_answers` of the `chosen` logits, part by part: no second copy of the logits of a batch is ever held.

    Args:
        logits: of the head, (B, C) or (B, T, C).
        targets: the units.
        groups: see `in_data_order`.
    """
    units = max(1, PART[logits.device.type == "cpu"] // logits.shape[-1])
    parts = [
        _looked_at(chosen(logits, part, groups), part) for part in targets.split(units)
    ]
    return _answers(targets, *map(torch.cat, zip(*parts, strict=True)))


def _looked_at(logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
    """What scores are made of, from chosen logits (..., U, C): losses, answers and least logits, each (..., U)."""
    answer = (
        logits[..., 0].double()
        if targets.answer.is_floating_point()
        else _likeliest(logits)
    )
    return unit_losses(logits, targets), answer, logits.amin(-1)


def _answers(
    targets: Targets, loss: Tensor, answer: Tensor, least: Tensor
) -> UnitAnswers:
    """Score the answers to all units at once: many small steps for every part would take longer than its logits."""
    finite = (
        least.isfinite() & ~loss.isnan()
    )  # a logit of NaN or +inf makes the loss NaN
    known = torch.where(finite, 1.0, torch.nan)
    numbers = targets.answer.is_floating_point()
    correct = (
        torch.full_like(known, torch.nan)
        if numbers
        else (answer == targets.answer) * known
    )
    return UnitAnswers(loss * known, correct, answer.double() * known)


def _likeliest(logits: Tensor) -> Tensor:
    """The first of the largest logits (..., C), as a class (...). On a CPU, NumPy finds it ten times as fast."""
    return (
        torch.as_tensor(logits.detach().numpy().argmax(-1))
        if logits.device.type == "cpu"
        else logits.argmax(-1)
    )


def agreement(answer: Tensor, own: Tensor) -> Tensor:
    """1 where an answer is the one that a model gives by itself; NaN where there is no answer."""
    return (answer == own).float().where(~answer.isnan(), torch.nan)


def check_labels(target: FrozenModel, labels: Tensor | None, source: str) -> None:
    """Raise if a classifier cannot be asked this task.

    Args:
        target: the model that answers.
        labels: the texts' classes or numbers, or None.
        source: where the texts come from, for the message.

    Raises:
        ValueError: the model has no classification head, some texts have no label, or the head cannot answer the
            labels.
    """
    if target.n_labels is None:
        raise UserError(
            f"The task needs a model with a classification head, but {target.name} {target.unasked or 'has none'}. "
            "Name a model that was fine-tuned to classify."
        )
    labels = check_labelled(labels, "The task", source)
    if target.regression:
        return
    if labels.is_floating_point():
        raise UserError(
            f"Expected classes, as the head of {target.name} has, but the texts of {source!r} have numbers with "
            "fractions to predict. Name a model with a regression head, or write classes as whole numbers."
        )
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= target.n_labels:
        raise UserError(
            f"Expected labels 0..{target.n_labels - 1}, as the head of {target.name} has, but the texts of "
            f"{source!r} have labels {least}..{most}. Name a model that was fine-tuned on this task."
        )
