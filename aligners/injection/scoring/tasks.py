"""How well a head answers what it is asked, unit by unit: losses and scores of every kind of task.

Nothing here but `check_labels` waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from aligners.errors import UserError
from aligners.injection.scoring.answers import in_data_order
from datamodules.asking import Targets
from datamodules.text.label_names import ClassMap
from datamodules.text.labels import known_labels

if TYPE_CHECKING:
    from aligners.models.model import FrozenModel


def chosen(logits: Tensor, targets: Targets, groups: ClassMap | None = None) -> Tensor:
    """Select each unit's logits, (U, C) float32, from those of the batch, (B, C) or (B, T, C), in the texts' order.

    Args:
        logits: of the head.
        targets: the units.
        groups: see `in_data_order`.
    """
    return in_data_order(logits.flatten(0, -2).index_select(0, targets.index).float(), groups)


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
    learning, matched = ((each / temperature).log_softmax(-1) for each in (logits, own))
    return temperature**2 * kl_div(learning, matched, reduction="none", log_target=True).sum(-1)


def per_text(values: Tensor, targets: Targets) -> Tensor:
    """Sum over the units of each text: (..., U) -> (..., B); zero for a text without units."""
    return values.new_zeros(*values.shape[:-1], targets.texts).index_add(-1, targets.owner, values)


def unit_scores(logits: Tensor, targets: Targets, own: Tensor | None = None) -> dict[str, Tensor]:
    """Score the answer to each unit; NaN where logits are not finite, since there is no answer then.

    Args:
        logits: chosen logits (..., U, C).
        targets: the right answers.
        own: (U,) the answers that the model gives on its own, to see whether others agree with them.

    Returns:
        loss, the cross-entropy in nats or the squared error of a number; correct, 1 where the answer is right; and with
        `own`, agree, 1 where the answer is the same: each (..., U). For numbers, correct and agree are NaN.
    """
    known = torch.where(logits.isfinite().all(-1), 1.0, torch.nan)
    if targets.answer.is_floating_point():
        missing = torch.full_like(known, torch.nan)
        agree = {} if own is None else {"agree": missing}
        return {"loss": unit_losses(logits, targets) * known, "correct": missing, **agree}
    answer = logits.argmax(-1)
    scores = {
        "loss": unit_losses(logits.float(), targets) * known,
        "correct": (answer == targets.answer) * known,
    }
    return scores if own is None else {**scores, "agree": (answer == own) * known}


def unit_answers(logits: Tensor, *, regression: bool) -> Tensor:
    """Return the class or number answered to each unit, NaN where logits are not finite: (..., U, C) -> (..., U)."""
    answers = logits[..., 0].double() if regression else logits.argmax(-1).double()
    return answers.where(logits.isfinite().all(-1), torch.nan)


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
            f"The task needs a model with a classification head, but {target.name} has none. Name a model that "
            "was fine-tuned to classify."
        )
    if labels is None:
        raise UserError(f"The task needs labels, but the texts of {source!r} have none. Name a `label_column`.")
    missing = ~known_labels(labels)
    if bool(missing.any()):
        raise UserError(
            f"The task needs a label for every text, but {int(missing.sum())} of {len(labels)} texts of {source!r} "
            "have none (-1, or nothing). Leave these texts out, or choose another split with `held_out`."
        )
    if target.regression and target.n_labels != 1:
        raise UserError(
            f"Expected a regression head of one number, but that of {target.name} predicts {target.n_labels}. Name "
            "another model."
        )
    if target.regression:
        return
    if labels.is_floating_point():
        raise UserError(
            f"Expected classes, as the head of {target.name} answers, but the texts of {source!r} have numbers with "
            "fractions to predict. Name a model with a regression head, or write classes as whole numbers."
        )
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= target.n_labels:
        raise UserError(
            f"Expected labels 0..{target.n_labels - 1}, as the head of {target.name} answers, but the texts of "
            f"{source!r} have labels {least}..{most}. Name a model that was fine-tuned on this task."
        )
