"""What stitching layers are trained on: the target's own task, its own answers, its own states.

Sites never meet: each is run through its own tail and its graph is dropped before the next is built, so a bank needs
the memory of one site.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.injection.forward import pair_logits
from aligners.injection.routes import Route
from aligners.injection.scoring.tasks import divergence, unit_losses
from datamodules.asking import TaskBatch


@dataclass(frozen=True)
class LossWeights:
    """What a stitching layer is trained on: a weighted sum.

    Args:
        task: of the target's own task, cross-entropy in nats per text or predicted token.
        distillation: of KL(target's own answer ‖ stitched answer), likewise per text or token.
        temperature: at which both answers are compared; the divergence is multiplied by its square.
        activation: of the squared distance to the target's own states, in units of FVU.

    Raises:
        ValueError: a weight is negative, or all are zero; the temperature is not positive.
    """

    task: float = 1.0
    distillation: float = 0.0
    temperature: float = 1.0
    activation: float = 0.0

    def __post_init__(self) -> None:
        weights = (self.task, self.distillation, self.activation)
        if not (min(weights) >= 0 and max(weights) > 0):
            raise UserError(
                "Expected `loss` weights of zero or more, at least one of them positive, but got task "
                f"{self.task}, distillation {self.distillation}, activation {self.activation}."
            )
        check_range(above=0, **{"loss.temperature": self.temperature})


@dataclass(frozen=True, eq=False)
class RouteLoss:
    """The loss of one route on one batch, site pair by site pair, as `bank_gradients` asks for it.

    Args:
        weights: of its parts.
        route: from which model into which.
        batch: on the device.
        units: the units (texts or tokens) that the mean is over; under several ranks, those of a rank on average.
        rows: the rows that the mean is over, likewise.
        own: (U, C) answers of the target by itself, for distillation.
        states: (S, N, d_y) states of the target itself, for the activation loss.
        variance: (S,) variance of those over the fitting rows, summed over their features, on the CPU.
    """

    weights: LossWeights
    route: Route
    batch: TaskBatch
    units: Tensor | float
    rows: Tensor | float
    own: Tensor | None = None
    states: Tensor | None = None
    variance: Tensor | None = None

    def __call__(self, pair: int, mapped: Tensor) -> Tensor:
        """The weighted sum for mapped rows (N, d_y) at the site pair of this number, a scalar."""
        total = mapped.new_zeros(())
        if self.weights.task or self.own is not None:
            logits = pair_logits(self.route, pair, self.batch, mapped)
            if self.weights.task:
                total = total + self.weights.task * unit_losses(logits, self.batch.targets).sum() / self.units
            if self.own is not None:
                gap = divergence(logits, self.own, self.weights.temperature).sum() / self.units
                total = total + self.weights.distillation * gap
        if self.states is not None and self.variance is not None:
            squares = (mapped - self.states[pair]).square().sum()
            total = total + self.weights.activation * squares / (self.rows * float(self.variance[pair]))
        return total


def bank_gradients(mapped: Tensor, loss: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of each site and its gradient with respect to the mapped rows, one site after another.

    Args:
        mapped: (S, N, d) outputs of a bank; its own graph is not touched.
        loss: (number of the site pair, rows (N, d)) -> a scalar.

    Returns:
        Losses (S,) without a graph, and gradients (S, N, d), for `mapped.backward(gradients)`.
    """
    losses, gradients = [], torch.empty_like(mapped)
    for s, rows in enumerate(mapped.detach()):
        leaf = rows.requires_grad_()
        with torch.enable_grad():
            value = loss(s, leaf)
        (gradients[s],) = torch.autograd.grad(value, leaf)
        losses.append(value.detach())
    return torch.stack(losses), gradients
