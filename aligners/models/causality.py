"""Whether a position of a model sees those after it: tested on the model itself, not read from its config."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TEXTS, TOKENS = 4, 8
MOST = 0.03  # that rounding moves a feature, whatever the data type


def is_causal(
    read: Callable[[Tensor], Tensor],
    tokens: Tensor,
    longest: int | None,
    tolerance: float,
) -> bool:
    """Tell whether a change of a text's last token changes nothing before it.

    The model reads a few random texts twice, the second time with other last tokens. In a causal model the states
    before them stay as they were, bit for bit, except that a mixture of experts, or quantised activations, may round
    them otherwise. Earlier states count as moved where at least half of the features of one of them move by more than
    `tolerance` deviations. Of tiny and untrained models of every family, those that see ahead move by .13 to 1.5,
    causal ones by exactly 0, and by 6e-7 with 8 experts in 12 blocks.

    Args:
        read: the model's last states (B, T, d) of token ids (B, T).
        tokens: (V,) ids of its ordinary tokens.
        longest: positions that it has; None: no limit.
        tolerance: see `rounding`.
    """
    ids, changed = random_texts(tokens, min(TOKENS, longest or TOKENS))
    before = read(ids)[:, :-1]
    after = read(changed)[:, :-1]
    moved = float(movement(before.float(), after.float()))
    # NaN shows nothing: `FrozenModel.self_test` raises for it
    return not moved > tolerance


def rounding(dtype: torch.dtype, quantised: bool) -> float:
    """Return how far rounding alone may move a feature, in its deviations: √ε of the data type, at most `MOST`."""
    if quantised:
        return MOST
    precision = float(torch.finfo(dtype).eps)
    return min(precision**0.5, MOST)


def movement(before: Tensor, after: Tensor) -> Tensor:
    """Return how far the most moved position moved: the median over features, in deviations of each feature.

    Args:
        before: (B, T, d) states.
        after: (B, T, d) those of other texts.

    Returns:
        A number; NaN where states are not finite.
    """
    moved = (after - before).abs()
    smallest = torch.finfo(torch.float32).tiny
    deviation = before.flatten(0, 1).std(0).clamp(min=smallest)
    shares = moved / deviation
    return shares.median(-1).values.max()


def random_texts(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Make two batches of token ids (B, T), the same on every machine, which differ only in the last column."""
    count = len(tokens)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, (TEXTS, length), generator=generator)
    other = drawn.clone()
    last = drawn[:, -1]
    other[:, -1] = (last + count // 2) % count
    return tokens[drawn], tokens[other]


def ordinary_tokens(
    vocabulary: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> Tensor:
    """Return ids (V,) of the tokens that mean text: no padding, by which positions count, no ends, no pictures."""
    special = _named_tokens(config)
    special |= _named_tokens(config.get_text_config())
    if tokenizer is not None:
        special.update(tokenizer.all_special_ids)
    ordinary = sorted(set(range(vocabulary)) - special)
    return torch.tensor(ordinary, dtype=torch.long)


def _named_tokens(config: PreTrainedConfig) -> set[int]:
    """Return the ids that a config has a name for."""
    found = set()
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            found.add(value)
    return found
