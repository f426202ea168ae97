"""Whether a position of a model sees those after it: asked of the model itself, not of its family or config."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aligners.models.model import FrozenModel

TEXTS, TOKENS = 4, 8
MOST = 0.03  # that rounding moves a feature, whatever the data type


@torch.no_grad()
def is_causal(model: FrozenModel) -> bool:
    """Whether the last token of a text changes nothing before it.

    The model reads a few random texts twice, the second time with other last tokens. In a causal model the states
    before them stay as they were, bit for bit, except that a mixture of experts, or quantised activations, may round
    them otherwise. Earlier states count as moved where at least half of their features move by more than √ε of the
    feature's deviation, with ε the precision of the model's data type: .0003 in float32, .09 in bfloat16.

    Args:
        model: with its weights, wherever they are.
    """
    ids, changed = _texts(model)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    (before,) = model.front(inputs, [model.depth])
    (after,) = model.front({**inputs, "input_ids": changed}, [model.depth])
    moved = float(movement(before[:, :-1].float(), after[:, :-1].float()))
    return not moved > tolerance(model)  # NaN shows nothing: `self_test` raises for it


def tolerance(model: FrozenModel) -> float:
    """How far rounding alone may move a feature, in deviations of it: √ε of the data type, at most `MOST`."""
    if model.quantised is not None:
        return MOST
    return min(float(torch.finfo(model.dtype).eps) ** 0.5, MOST)


def movement(before: Tensor, after: Tensor) -> Tensor:
    """How far the most moved position moved: the median of its features' movements, in deviations of each feature.

    Args:
        before: (B, T, d) states.
        after: (B, T, d) those of other texts.

    Returns:
        A number; NaN where states are not finite.
    """
    moved = (after - before).abs()
    deviation = before.flatten(0, 1).std(0)
    shares = moved / deviation.clamp(min=torch.finfo(torch.float32).tiny)
    return shares.median(-1).values.max()


def _texts(model: FrozenModel) -> tuple[Tensor, Tensor]:
    """Two batches of token ids (B, T), equal but for the last column. No special tokens: they may mean padding."""
    vocabulary = cast(Tensor, model.model.get_input_embeddings().weight).shape[0]
    keep = torch.ones(vocabulary, dtype=torch.bool)
    for token in _special(model):
        if 0 <= token < vocabulary:
            keep[token] = False
    ordinary = keep.nonzero()[:, 0]
    length = min(TOKENS, model.max_length or TOKENS)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(ordinary), (TEXTS, length), generator=generator)
    other = drawn.clone()
    other[:, -1] = (drawn[:, -1] + len(ordinary) // 2) % len(ordinary)
    return ordinary[drawn].to(model.device), ordinary[other].to(model.device)


def _special(model: FrozenModel) -> set[int]:
    """Token ids that mean something else than text: padding, ends, pictures."""
    found = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    for config in (model.config, model.config.get_text_config()):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
                found.add(value)
    return found
