"""Chooses the tokens that a masked language model has to predict: the same for a text however it is batched.

With `DataCollatorForLanguageModeling` of transformers, with which embedded models are trained, they would depend on the
other texts of the batch and on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from datamodules.targets import UNASKED

__all__ = ["mask_tokens"]

_MASKED, _RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest stay as they are


def mask_tokens(
    inputs: Mapping[str, Tensor],
    special: Tensor,
    text: Tensor,
    *,
    mask_token: int,
    vocabulary: int,
    share: float,
    seed: int,
    epoch: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """Mask a batch by BERT's recipe (Devlin et al. 2019, §3.1 and A.1), on the CPU.

    Of each text's tokens that are neither special nor padding, `share` are chosen, rounded, at least one. Each becomes
    the mask token with probability .8, a token drawn from the vocabulary with .1, and else stays. The draw follows
    from the seed, the epoch and the text's number alone: it is the same in any batch and on any number of ranks.

    Args:
        inputs: what the model takes: `input_ids` (B, T) int64 and others, which stay. None is changed.
        special: True at special tokens and padding, (B, T).
        text: number of each text in its split, (B,).
        mask_token: its id.
        vocabulary: number of tokens.
        share: in (0, 1]; BERT's is .15.
        seed: zero or positive, as is `epoch`.
        epoch: another epoch chooses other tokens.

    Returns:
        The inputs with other `input_ids`, and the answers (B, T) int64: the token where one was chosen, else -100.
    """
    _check(share, mask_token, vocabulary)
    ids = inputs["input_ids"].clone()
    answers = torch.full_like(ids, UNASKED)
    for row, number in enumerate(text.tolist()):
        places = (~special[row]).nonzero()[:, 0].numpy()
        if len(places):
            draw = np.random.default_rng([seed, epoch, number])
            places = draw.permutation(places)[: max(1, round(share * len(places)))]
            answers[row, places] = own = ids[row, places]
            ids[row, places] = _replaced(own, draw, mask_token, vocabulary)
    return {**inputs, "input_ids": ids}, answers


def _replaced(own: Tensor, draw: np.random.Generator, mask_token: int, vocabulary: int) -> Tensor:
    """What stands in the place of the chosen tokens (n,)."""
    fate, others = draw.random(len(own)), draw.integers(vocabulary, size=len(own))
    kept = np.where(fate < _MASKED + _RANDOM, others, own)
    return torch.from_numpy(np.where(fate < _MASKED, mask_token, kept))


def _check(share: float, mask_token: int, vocabulary: int) -> None:
    """Raise if the share is out of range, or the mask token is not in the vocabulary."""
    if not 0 < share <= 1:
        raise ValueError(f"Expected `share` of the tokens in (0, 1], but got {share:g}. BERT's is 0.15.")
    if not 0 <= mask_token < vocabulary:
        raise ValueError(
            f"Expected `mask_token` to be one of the {vocabulary} tokens of `vocabulary`, but got {mask_token}. Give "
            "the size of the model's embedding and its tokenizer's mask token."
        )
