"""What a head's classes mean: which of them answer each class of the texts, and its logits in the texts' order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.models.embedded.recipes import EMBEDDED
from datamodules.text.label_names import ClassMap, GivenMap, by_number, class_map, in_words, numbered

if TYPE_CHECKING:
    from aligners.models.model import FrozenModel
    from datamodules.module import TextModule

logger = logging.getLogger(__name__)


def in_data_order(logits: Tensor, groups: ClassMap | None) -> Tensor:
    """The logits of the texts' classes (..., K) from those of a head (..., C), adding probabilities.

    Args:
        logits: the head's logits.
        groups: for each class of the texts, the head's classes that answer it; None if `logits` are in order.
    """
    if groups is None:
        return logits
    # one by one: a list as an index would be copied to the device, and that waits for it
    columns = [[logits[..., place] for place in group] for group in groups]
    return torch.stack([own[0] if len(own) == 1 else torch.stack(own).logsumexp(0) for own in columns], -1)


def one_after_another(groups: ClassMap | None) -> ClassMap | None:
    """Groups of the same sizes for a new head, whose classes have no meaning yet; None if they are in order."""
    if groups is None or all(len(group) == 1 for group in groups):
        return None
    ends = [sum(len(group) for group in groups[:k]) for k in range(len(groups) + 1)]
    return tuple(tuple(range(*ends[k : k + 2])) for k in range(len(groups)))


def match_heads(
    data: TextModule, asked: Sequence[FrozenModel], read: Sequence[FrozenModel] = ()
) -> dict[FrozenModel, dict[str, list[str]]]:
    """Set each head's `class_map` by the names of its classes and of the texts', or by `data.labels`.

    Where the texts' classes have no names, their numbers are those of the heads, which must then agree.

    Args:
        data: the texts, their models, and `labels`.
        asked: models that answer; `tasks.check_labels` has passed them.
        read: models that answer if they can; they need not know the task.

    Returns:
        For each model that answers, the name of every class of the texts and what its head calls it; empty where
        numbers are predicted.

    Raises:
        ValueError: the names of the texts' classes differ from a head's, or those of two heads differ where the texts
            have none, and `data.labels` does not match them; or some heads predict numbers and others classes.
    """
    kinds = {model.regression: model.name for model in asked}
    if len(kinds) > 1:
        raise UserError(
            f"Expected models of one task, but the head of {kinds[True]} predicts a number and that of {kinds[False]} "
            "answers classes. Measure them one by one."
        )
    if True in kinds:
        return {model: {} for model in (*asked, *read) if model.regression}
    names, classes = data.texts.label_names, data.texts.classes
    found: dict[FrozenModel, dict[str, list[str]]] = {}
    for model in dict.fromkeys((*asked, *read)):
        head, given = model.label_names, _given(data, model)
        if model not in asked and (model.n_labels is None or model.regression):
            continue
        try:
            model.class_map = class_map(head, names, classes, given=given, model=model.name, source=data.text.source)
        except ValueError as error:
            if model in asked or given is not None:
                raise
            logger.warning("%s only supplies states: its head seems to be for another task. %s", model.name, error)
            continue
        found[model] = in_words(model.class_map, head, names)
    if numbered(names, classes) is not None:
        _check_agreement([model for model in found if _given(data, model) is None], classes)
    for caution in matched_by_number(data, list(found)):
        logger.warning(caution)
    return found


def matched_by_number(data: TextModule, models: Sequence[FrozenModel]) -> list[str]:
    """Cautions about models whose classes were matched with the texts' by number, because only one side names them.

    Embedded models number theirs, and were trained on the texts' own.
    """
    doubtful = [
        model
        for model in models
        if not model.regression and _given(data, model) is None and not model.name.startswith(EMBEDDED)
    ]
    texts, source = data.texts, data.text.source
    each = [by_number(m.label_names, texts.label_names, texts.classes, model=m.name, source=source) for m in doubtful]
    return [caution for caution in each if caution is not None]


def _given(data: TextModule, model: FrozenModel) -> GivenMap | None:
    """Return what `data.labels` says about a model."""
    if data.labels is None or isinstance(data.labels, Mapping):
        return data.labels
    named = data.named()
    if len(data.labels) != len(named):
        raise UserError(
            f"Expected `data.labels` to be one map, or a list of one for each of the {len(named)} models (null: by its "
            f"names), but got {len(data.labels)}."
        )
    place = next((place for place, other in enumerate(data.frozen) if other is model), 0)
    return data.labels[place] if place < len(named) else None


def _check_agreement(models: Iterable[FrozenModel], classes: int) -> None:
    """Raise if heads give one number different names: nothing says which of them the texts mean."""
    meant: dict[tuple[str, ...], Any] = {}
    for model in models:
        if numbered(model.label_names, classes) is None:
            meant.setdefault(tuple(name.strip().casefold() for name in model.label_names), model)
    if len(meant) > 1:
        listed = "; ".join(f"{model.name} has {', '.join(model.label_names)}" for model in meant.values())
        raise UserError(
            f"The texts' classes have no names, and the heads name theirs differently: {listed}. Say which of a head's "
            "classes answer class 0, 1, ... of the texts: by names that all heads use, as in --data.labels "
            f'\'{{"0": "{next(iter(meant))[0]}", ...}}\', or as a list of one map for each model.'
        )
