"""Generates text while the states at a site are added to, or replaced by mapped states of another model."""

from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from aligners.errors import UserError, check_range
from aligners.injection.forward import mapped_rows
from aligners.models.hooks import Changed, change, read, trunk_of
from aligners.models.model import FrozenModel


class Added(NamedTuple):
    """A vector that is added to the states at a site.

    Attributes:
        site: 0 is the embedding output, l the output of block l.
        vector: (d,), in the units of the states.
    """

    site: int
    vector: Tensor

    def begin(self) -> Changed:
        """What is done at every step of one generation."""
        return lambda states, called: states + self.vector.to(states)


class Replaced(NamedTuple):
    """States at a site that are replaced by those of another model, mapped: it reads the same growing text.

    Attributes:
        site: where they go in.
        source: the other model, with the same tokens. It has a cache of its own, and reads one token a step.
        source_site: where it is read; no block above is run, except the first.
        map: from its rows (N, d_x) to rows (N, d_y).
    """

    site: int
    source: FrozenModel
    source_site: int
    map: Callable[[Tensor], Tensor]

    def begin(self) -> Changed:
        """What is done at every step of one generation."""
        trunk, site = trunk_of(self.source.model), self.source_site
        cache = DynamicCache(config=self.source.model.config)

        def changed(states: Tensor, called: dict[str, Any]) -> Tensor:
            ids = called["input_ids"].to(self.source.device)
            run = lambda: trunk(input_ids=ids, past_key_values=cache, use_cache=True)  # noqa: E731
            # A block at least, whose part of the cache tells how much was read: positions follow from it.
            rows = read(self.source.blocks, {site, max(site, 1)}, run)[site].flatten(0, 1)
            return mapped_rows(self.map, rows.float()).to(states).view(states.shape)

        return changed


def check_causal(model: FrozenModel) -> None:
    """Raise unless a model predicts the next token.

    Raises:
        ValueError: it does not.
    """
    if model.task != "causal":
        raise UserError(
            f"Expected a causal language model, but {model.name} is a {type(model.model).__name__}. Name a model that "
            "predicts the next token."
        )


def check_cache(model: FrozenModel, tokens: int) -> None:
    """Raise unless a causal model keeps keys and values of so many tokens, of a prompt and what is written after it.

    Raises:
        ValueError: it keeps none, or has fewer positions.
    """
    stateful = getattr(model.model, "_is_stateful", False)
    if not model.causal or stateful or "past_key_values" not in signature(trunk_of(model.model).forward).parameters:
        raise UserError(
            f"Expected a model with a cache of keys and values to generate text with, but {model.name} "
            f"({type(model.model).__name__}) has none: every token would run the whole text again. Name another model."
        )
    if model.max_length is not None and tokens > model.max_length:
        raise UserError(
            f"Expected at most {model.max_length} tokens in all, as {model.name} has positions for, but got {tokens} "
            "of prompts and `new_tokens`. Generate fewer, or cut the prompts."
        )


@torch.no_grad()
def generate(
    model: FrozenModel, prompts: Tensor, changing: Added | Replaced | None = None, *, new_tokens: int = 32,
    temperature: float = 0.0, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Continue prompts, with the states at a site changed at every step or, without `changing`, as the model does.

    `transformers`' own `generate` does it, with caches, without the penalties and filters of a model's own settings.
    A text ends at the model's end-of-text token.

    Args:
        model: a causal language model.
        prompts: (B, T) int64, tokens without padding.
        changing: what is done to the states at which site.
        new_tokens: most tokens of a continuation.
        temperature: 0: the most probable token each time; else tokens are drawn from softmax(logits / temperature).
        seed: of the draws, which depend on the whole batch.

    Returns:
        The continuations, (B, new_tokens) int64 on the device of the prompts; -1 after the token that ends a text.

    Raises:
        ValueError: the model generates nothing, or has no cache; it has no such site, or no room for the tokens.
    """
    check_causal(model)
    check_range(least=1, new_tokens=new_tokens)
    check_range(least=0, temperature=temperature)
    length, end = prompts.shape[1], model.model.generation_config.eos_token_id
    check_cache(model, length + new_tokens)
    steps: Any = nullcontext()
    if changing is not None:
        model.check_site(changing.site, "site")
        if isinstance(changing, Replaced):
            changing.source.check_site(changing.source_site, "source_site")
            check_cache(changing.source, length + new_tokens)
        steps = change(model.model, model.blocks, changing.site, changing.begin())
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    settings = GenerationConfig(
        max_new_tokens=new_tokens, repetition_penalty=1.0, num_beams=1, use_cache=True, eos_token_id=ends or None,
        pad_token_id=(ends or [0])[0], do_sample=bool(drawn), **drawn,
    )  # fmt: skip
    there: Any = prompts.to(model.device)
    with torch.random.fork_rng(), steps:
        torch.manual_seed(seed)
        found: Any = model.model.generate(there, attention_mask=torch.ones_like(there), generation_config=settings)
    tokens = found[:, length:].to(prompts.device)
    ended = torch.isin(tokens, torch.tensor(ends, device=tokens.device, dtype=tokens.dtype)).long()
    tokens = tokens.where(ended.cumsum(1) - ended == 0, -1)
    return torch.nn.functional.pad(tokens, (0, new_tokens - tokens.shape[1]), value=-1)  # where all have ended
