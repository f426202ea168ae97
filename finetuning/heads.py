"""Classification heads trained on the states of a frozen model, one for each site."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from frozen.heads import head_parts, with_head
from frozen.model import FrozenModel

__all__ = ["HeadBank"]


class HeadBank(nn.Module):
    """A copy of a model's classification head, with its pooler where it has one, for each of S sites.

    The model itself stays frozen: gradients go into the heads only. A final norm is the model's own. The heads are
    trained without dropout, so that a site's head is what it would be if it were trained alone.

    Args:
        model: a classifier, whose head every copy starts as.
        sites: S, one copy for each.
    """

    def __init__(self, model: FrozenModel, sites: int) -> None:
        super().__init__()
        parts = head_parts(model.model)
        self.names = list(parts)
        self.heads = nn.ModuleList(
            nn.ModuleList(copy.deepcopy(part).eval().requires_grad_(True) for part in parts.values())
            for _ in range(sites)
        )

    def logits(self, model: FrozenModel, inputs: Mapping[str, Tensor], states: Sequence[Tensor]) -> Tensor:
        """Logits of each head for the states of its site, taken as those of the last site: (S, B, C) float32.

        Args:
            model: the model, on the device of the heads.
            inputs: the tokenised batch.
            states: for each site (B, T, d).
        """
        answers = []
        for head, state in zip(self.heads, states, strict=True):
            with with_head(model.model, dict(zip(self.names, cast(nn.ModuleList, head), strict=True))):
                answers.append(model.tail(inputs, model.depth, state))
        return torch.stack(answers).float()
