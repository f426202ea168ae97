"""Edge probes: what can be read off the states of a span of words, or of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aligners.maps.base import BankLinear
from aligners.probing.bank import Arm, Probes
from aligners.probing.edges.targets import Targets


class EdgeProbes(Probes):
    """Projection, attention within each span, and a network of two layers.

    Args:
        arms: A, the number of probes.
        width: d, of the states.
        labels: K, the number of labels.
        spans: S, 1 or 2 for each target.
        several: whether a target may have several labels, or none: each is then a question of its own.
        projection: width to which states are projected before they are pooled.
        hidden: width of the hidden layer.

    References:
        Tenney et al. 2019, "What do you learn from context? Probing for sentence structure in contextualized word
        representations", ICLR, §3.1 and Figure 1; as used by Merchant et al. 2020, §4.1.
    """

    control: Tensor

    def __init__(
        self,
        arms: Sequence[Arm],
        width: int,
        labels: int,
        spans: int = 1,
        several: bool = False,
        projection: int = 256,
        hidden: int = 256,
    ) -> None:
        super().__init__(arms, width)
        self.labels, self.spans, self.several = labels, spans, several
        self.projection, self.hidden = projection, hidden
        self.projections = nn.ModuleList(BankLinear(len(arms), width, projection) for _ in range(spans))
        self.attention = nn.ModuleList(BankLinear(len(arms), projection, 1) for _ in range(spans))
        self.first = BankLinear(len(arms), spans * projection, hidden)
        self.last = BankLinear(len(arms), hidden, labels)
        self.register_buffer("control", torch.tensor([int(arm.control) for arm in arms]), persistent=False)

    def forward(self, read: Tensor, part: Targets) -> Tensor:
        """Logits of each target: rows of words (A, n, d) -> (A, T, K)."""
        pooled = [
            _pooled(project(read), attend, part.spans[:, place])
            for place, (project, attend) in enumerate(zip(self.projections, self.attention, strict=True))
        ]
        hidden = self.first(torch.cat(pooled, -1)).tanh()
        return self.last(nn.functional.layer_norm(hidden, (self.hidden,)))

    def asked(self, part: Targets) -> Tensor:
        """The labels that each arm is asked for, (A, T, K) bool: those of the task, or of its control task."""
        return part.labels[self.control]

    def losses(self, read: Tensor, part: Targets) -> Tensor:
        """Negative log-likelihood of the labels of each target, in nats, (A, T)."""
        return self.surprise(self(read, part), part)

    def surprise(self, logits: Tensor, part: Targets) -> Tensor:
        """Negative log-likelihood of the labels of each target, in nats.

        Args:
            logits: (A, T, K).
            part: of T targets.

        Returns:
            (A, T); infinite for a target whose only label is not among the K.
        """
        asked = self.asked(part)
        if self.several:
            losses = nn.functional.binary_cross_entropy_with_logits(logits, asked.to(logits.dtype), reduction="none")
            return losses.sum(-1)
        return -logits.log_softmax(-1).masked_fill(~asked, -torch.inf).amax(-1)


def _pooled(states: Tensor, attend: nn.Module, spans: Tensor) -> Tensor:
    """Average the rows of each span, weighted by attention: (A, n, p), (T, 2) -> (A, T, p)."""
    first, end = spans.unbind(1)
    longest = int((end - first).max())
    if longest == 1:
        return states[:, first]
    rows = first[:, None] + torch.arange(longest, device=states.device)
    real = rows < end[:, None]
    rows = rows.where(real, first[:, None])
    scores = attend(states)[..., 0][:, rows].masked_fill(~real, -torch.inf)
    return (scores.softmax(-1)[..., None] * states[:, rows]).sum(2)
