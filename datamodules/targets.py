"""What a head is asked, unit by unit. A unit is answered once: a text by a classifier, a token by a language model.

Targets are found on the CPU, where the batch is made: on another device, that would mean waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["UNASKED", "Targets", "classification_targets", "masked_targets", "next_token_targets"]

UNASKED = -100  # in the place of an answer where nothing is asked, as PyTorch's cross-entropy has it


@dataclass
class Targets:
    """The U units of a batch of B texts, in the order of the texts.

    Attributes:
        index: (U,) row of each unit in the logits, all of whose axes but the last are flattened.
        answer: (U,) the right class or token, int64; or the right number, float32.
        owner: (U,) text of the batch, 0..B-1, ascending.
        texts: B.
    """

    index: Tensor
    answer: Tensor
    owner: Tensor
    texts: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Targets:
        """Copy the targets to another device."""
        index, answer, owner = (
            part.to(device, non_blocking=non_blocking) for part in (self.index, self.answer, self.owner)
        )
        return Targets(index, answer, owner, self.texts)

    def __len__(self) -> int:
        """U, the number of units."""
        return len(self.index)


def classification_targets(labels: Tensor) -> Targets:
    """One unit for each text, from its class, or the number that is to be predicted: labels (B,)."""
    every = torch.arange(len(labels), device=labels.device)
    return Targets(every, labels, every, len(labels))


def next_token_targets(inputs: Mapping[str, Tensor]) -> Targets:
    """One unit for each real token that a real one follows: position t is asked for token t + 1.

    Args:
        inputs: `input_ids` (B, T) and, where there is padding on either side, `attention_mask` (B, T). A text of
            one token has no unit.
    """
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask", torch.ones_like(ids)) != 0
    following = torch.full_like(ids, UNASKED)
    following[:, :-1] = ids[:, 1:].where(real[:, :-1] & real[:, 1:], UNASKED)
    return masked_targets(following)


def masked_targets(answers: Tensor) -> Targets:
    """One unit for each position that is asked: answers (B, T), -100 where nothing is."""
    owner, position = (answers != UNASKED).nonzero(as_tuple=True)
    return Targets(owner * answers.shape[1] + position, answers[owner, position], owner, len(answers))
