"""Classification heads trained on the states of a frozen model, one for each site."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from aligners.models.heads import head_parts, with_head
from aligners.models.model import FrozenModel

__all__ = ["HeadBank"]


class HeadBank(nn.Module):
    """A copy of a model's classification head, with its pooler if it has one, for each of S sites.

    The model stays frozen: only the heads get gradients. A final norm is the model's own. The heads train without
    dropout, so each is what it would be if it were trained alone.

    Args:
        model: a classifier; every copy starts as its head.
        sites: S, the number of copies.
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
        """Return each head's logits for its site's states, as if these were the last site's: (S, B, C) float32.

        Args:
            model: the model, on the device of the heads.
            inputs: the tokenised batch.
            states: (B, T, d) for each site.
        """
        answers = []
        for head, state in zip(self.heads, states, strict=True):
            with with_head(model.model, dict(zip(self.names, cast(nn.ModuleList, head), strict=True))):
                answers.append(model.tail(inputs, model.depth, state))
        return torch.stack(answers).float()
