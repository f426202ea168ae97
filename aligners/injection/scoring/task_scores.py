"""Losses and answers of a model's head, unit by unit, and which of its classes answer the texts' classes.

Only `check_labels` waits for the device.
"""

import logging
from collections.abc import Mapping, Sequence
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

# Number of logits scored at a time: limited by a GPU's memory, or by the cache of a CPU core.
PART = (2**28, 2**18)


def in_data_order(logits: Tensor, groups: ClassMap | None) -> Tensor:
    """Turn the logits of a head (..., C) into those of the texts' classes (..., K), adding probabilities.

    For a group that is `Largest`, the most probable class answers instead, as if predictions were renamed.

    Args:
        logits: the head's logits.
        groups: for each class of the texts, the head's classes that answer it; None if `logits` are in order.
    """
    if groups is None:
        return logits
    merged = []
    for group in groups:
        # one by one: a list index would be copied to the device, which has to be waited for
        columns = [logits[..., place] for place in group]
        if len(group) == 1:
            merged += columns
        elif isinstance(group, Largest):
            merged.append(torch.stack(columns).amax(0))
        else:
            merged.append(torch.stack(columns).logsumexp(0))
    return torch.stack(merged, -1)


def one_after_another(groups: ClassMap | None) -> ClassMap | None:
    """Return groups of the same sizes for a new head, whose classes have no meaning yet; None if they are in order."""
    if groups is None or max(map(len, groups)) == 1:
        return None
    renumbered = []
    start = 0
    for group in groups:
        end = start + len(group)
        renumbered.append(type(group)(range(start, end)))
        start = end
    return tuple(renumbered)


# ---------------------------------------------------------------------- classes of heads and of texts


def match_heads(
    data: TextModule, asked: Sequence[FrozenModel], read: Sequence[FrozenModel] = ()
) -> dict[FrozenModel, dict[str, list[str]]]:
    """Set each head's `class_map` by the names of its classes and of the texts', or by `data.labels`.

    Where the texts' classes have no names, their numbers are those of the heads, which must then agree.

    Args:
        data: the texts, their models, and `labels`.
        asked: the scored models, which have passed `check_labels`.
        read: further models, scored if possible; they need not know the task.

    Returns:
        For each scored model, the name of every class of the texts and what its head calls it; empty where
        numbers are predicted.

    Raises:
        ValueError: the names of the texts' classes differ from a head's, or the names of two heads differ while the
            texts have none, and `data.labels` does not resolve this; or some heads predict numbers and others classes.
    """
    kinds = {model.regression: model.name for model in asked}
    _check_kinds(kinds)
    if True in kinds:
        return {model: {} for model in (*asked, *read) if model.regression}

    matched: dict[FrozenModel, dict[str, list[str]]] = {}
    for model in dict.fromkeys((*asked, *read)):
        if model in asked:
            _match_head(data, model)
        elif not _can_answer(data, model):
            continue
        names = data.texts.label_names
        matched[model] = in_words(model.class_map, model.label_names, names)
    if numbered(data.texts.label_names, data.texts.classes) is not None:
        _check_agreement(data, list(matched))
    for caution in matched_by_number(data, list(matched)):
        logger.warning(caution)
    return matched


def _check_kinds(kinds: dict[bool, str]) -> None:
    """Raise unless all heads predict numbers, or all predict classes; `kinds` names a model of each kind."""
    if len(kinds) > 1:
        raise UserError(
            f"Expected models of one task, but the head of {kinds[True]} predicts a number and that of {kinds[False]} "
            "predicts classes. Measure them one by one."
        )


def _match_head(data: TextModule, model: FrozenModel) -> None:
    """Set `class_map` of one head."""
    model.class_map = class_map(
        model.label_names,
        data.texts.label_names,
        data.texts.classes,
        given=_given(data, model),
        model=model.name,
        source=data.text.source,
    )


def _can_answer(data: TextModule, model: FrozenModel) -> bool:
    """Match the head of a model that need not know the task; return whether that worked."""
    if model.n_labels is None or model.regression:
        return False
    try:
        _match_head(data, model)
    except ValueError as error:
        if _given(data, model) is not None:
            raise
        logger.warning(
            "%s only supplies states: its head seems to be for another task. %s",
            model.name,
            error,
        )
        return False
    return True


def matched_by_number(data: TextModule, models: Sequence[FrozenModel]) -> list[str]:
    """Return a caution where classes were matched by number because only one side names them.

    Embedded models are exempt: they were trained on the texts' own numbers.
    """
    cautions = []
    for model in models:
        if model.regression or model.name.startswith(EMBEDDED):
            continue
        if _given(data, model) is not None:
            continue
        caution = by_number(
            model.label_names,
            data.texts.label_names,
            data.texts.classes,
            model=model.name,
            source=data.text.source,
        )
        if caution is not None:
            cautions.append(caution)
    return cautions


def _given(data: TextModule, model: FrozenModel) -> Any:
    """Return what `data.labels` says about a model; None: nothing."""
    if data.labels is None or isinstance(data.labels, Mapping):
        return data.labels
    named = data.named()
    if len(data.labels) != len(named):
        raise UserError(
            f"Expected `data.labels` to be one map, or a list of one for each of the {len(named)} models (null: by its "
            f"names), but got {len(data.labels)}."
        )
    place = 0
    if model in data.frozen:
        place = data.frozen.index(model)
    if place >= len(named):
        return None
    return data.labels[place]


def _check_agreement(data: TextModule, models: Sequence[FrozenModel]) -> None:
    """Raise if heads give one number different names, so that its meaning in the texts is unknown."""
    meant: dict[tuple[str, ...], FrozenModel] = {}
    for model in models:
        if _given(data, model) is not None:
            continue
        if numbered(model.label_names, data.texts.classes) is None:
            names = [name.strip().casefold() for name in model.label_names]
            meant.setdefault(tuple(names), model)
    if len(meant) < 2:
        return
    listed = []
    for model in meant.values():
        listed.append(f"{model.name} has {', '.join(model.label_names)}")
    example = next(iter(meant))[0]
    raise UserError(
        f"The texts' classes have no names, and the heads name theirs differently: {'; '.join(listed)}. Say which of a "
        "head's classes stand for class 0, 1, ... of the texts: by names that all heads use, as in --data.labels "
        f'\'{{"0": "{example}", ...}}\', or as a list of one map for each model.'
    )


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
            f"Expected classes, as the head of {target.name} has, but the texts of {source!r} have fractional "
            "numbers to predict. Name a model with a regression head, or write classes as whole numbers."
        )
    least, most = labels.aminmax()
    if least < 0 or most >= target.n_labels:
        raise UserError(
            f"Expected labels 0..{target.n_labels - 1}, as the head of {target.name} has, but the texts of "
            f"{source!r} have labels {least}..{most}. Name a model that was fine-tuned on this task."
        )


# ---------------------------------------------------------------------- losses and answers


def chosen(logits: Tensor, targets: Targets, groups: ClassMap | None = None) -> Tensor:
    """Select each unit's logits, (U, C) float32, in the order of the texts' classes.

    Args:
        logits: logits of the head on the batch, (B, C) or (B, T, C).
        targets: the units.
        groups: see `in_data_order`.
    """
    rows = logits.flatten(0, -2).index_select(0, targets.index)
    return in_data_order(rows.float(), groups)


def unit_losses(logits: Tensor, targets: Targets) -> Tensor:
    """Return cross-entropies in nats, or the squared errors of numbers: chosen logits (..., U, C) -> (..., U)."""
    answer = targets.answer
    if answer.is_floating_point():
        return (logits[..., 0].float() - answer).square()
    lead = logits.shape[:-1]
    answer = answer.expand(lead).reshape(-1)
    losses = cross_entropy(logits.flatten(0, -2), answer, reduction="none")
    return losses.view(lead)


def divergence(logits: Tensor, own: Tensor, temperature: float = 1.0) -> Tensor:
    """The loss of distillation (Hinton, Vinyals and Dean 2015): T² KL(softmax(own / T) ‖ softmax(logits / T)).

    Args:
        logits: (..., C) logits of the model that learns.
        own: (..., C) logits of the model that it matches.
        temperature: T.

    Returns:
        (...) in nats.
    """
    learning = (logits / temperature).log_softmax(-1)
    matched = (own / temperature).log_softmax(-1)
    kl = kl_div(learning, matched, reduction="none", log_target=True)
    return temperature**2 * kl.sum(-1)


class UnitAnswers(NamedTuple):
    """The answers to U units of a batch, without the logits: those of a language model would fill the memory.

    Attributes:
        loss: (..., U) cross-entropy in nats, or the squared error of a number.
        correct: (..., U) 1 where the answer is the right one; NaN of numbers.
        answer: (..., U) float64, the class, token or number.
    """

    loss: Tensor
    correct: Tensor
    answer: Tensor


def unit_answers(logits: Tensor, targets: Targets) -> UnitAnswers:
    """Score the answer to each unit by chosen logits (..., U, C); NaN, for no answer, where they are not finite."""
    found = _from_logits(logits.float(), targets)
    return _scored(targets, *found)


def batch_answers(
    logits: Tensor, targets: Targets, groups: ClassMap | None = None
) -> UnitAnswers:
    """Score the `chosen` logits like `unit_answers`, in parts, so that a batch's logits are never copied whole.

    Args:
        logits: logits of the head, (B, C) or (B, T, C).
        targets: the units.
        groups: see `in_data_order`.
    """
    parts = []
    for part in targets.split(_units(logits)):
        parts.append(_from_logits(chosen(logits, part, groups), part))
    found = map(torch.cat, zip(*parts, strict=True))
    return _scored(targets, *found)


def batch_divergences(
    logits: Tensor, own: Tensor, targets: Targets, groups: ClassMap | None = None
) -> Tensor:
    """Return KL(own ‖ these) of the `chosen` logits, in nats and in float64, in parts as `batch_answers`: (U,).

    Args:
        logits: logits of the head, (B, C) or (B, T, C).
        own: those of the model with nothing replaced, likewise.
        targets: the units.
        groups: see `in_data_order`.
    """
    parts = []
    for part in targets.split(_units(logits)):
        these = chosen(logits, part, groups).double()
        mine = chosen(own, part, groups).double()
        parts.append(divergence(these, mine))
    return torch.cat(parts)


def _units(logits: Tensor) -> int:
    """Return how many units of such logits (..., C) are scored at a time."""
    on_cpu = logits.device.type == "cpu"
    return max(1, PART[on_cpu] // logits.shape[-1])


def _from_logits(logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, answers and smallest logits, each (..., U), for chosen logits (..., U, C)."""
    loss, least = unit_losses(logits, targets), logits.amin(-1)
    if targets.answer.is_floating_point():
        return loss, logits[..., 0].double(), least
    if logits.device.type == "cpu":  # NumPy is ten times as fast there
        likeliest = logits.detach().numpy().argmax(-1)
        return loss, torch.as_tensor(likeliest), least
    return loss, logits.argmax(-1), least


def _scored(
    targets: Targets, loss: Tensor, answer: Tensor, least: Tensor
) -> UnitAnswers:
    """Score the answers to all units at once: in small parts the overhead would exceed the work."""
    # a logit of NaN or +inf makes the loss NaN
    finite = least.isfinite() & ~loss.isnan()
    known = torch.where(finite, 1.0, torch.nan)
    if targets.answer.is_floating_point():
        correct = torch.full_like(known, torch.nan)
    else:
        correct = (answer == targets.answer) * known
    return UnitAnswers(loss * known, correct, answer.double() * known)


def agreement(answer: Tensor, own: Tensor) -> Tensor:
    """Return 1 where an answer equals the model's own answer, else 0; NaN where there is no answer."""
    same = (answer == own).float()
    return same.where(~answer.isnan(), torch.nan)
