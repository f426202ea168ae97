"""Generates text while the states at a site are added to, or replaced by mapped states of another model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from aligners.errors import UserError, check_range
from aligners.models.calling import Layout
from aligners.models.hooks import change, read, trunk_of
from aligners.models.model import FrozenModel, Inputs

Changed = Callable[[Tensor, Tensor, Tensor], Tensor]  # of states (B, T, d), tokens (B, T), and all masks so far


@dataclass(frozen=True)
class Added:
    """A vector that is added to the states at a site.

    Attributes:
        site: 0 is the embedding output, l the output of block l.
        vector: (d,), in the units of the states.
        generated_only: whether the states of the prompt stay as they are. Its last token predicts the first new one.
    """

    site: int
    vector: Tensor
    generated_only: bool = False

    def begin(self) -> Changed:
        """What is done at every step of one generation."""
        prompts = iter([True])

        def changed(states: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
            stays = next(prompts, False) and self.generated_only
            return states if stays else states + self.vector.to(states)

        return changed


@dataclass(frozen=True)
class Replaced:
    """States at a site that are replaced by those of another model, mapped: it reads the same growing text.

    Attributes:
        site: where they go in.
        source: the other model, with the same tokens. It has a cache of its own, and reads one token a step.
        source_site: where it is read; no block above is run.
        map: from its rows (N, d_x) to rows (N, d_y).
    """

    site: int
    source: FrozenModel
    source_site: int
    map: Callable[[Tensor], Tensor]

    def begin(self) -> Changed:
        """What is done at every step of one generation."""
        model, trunk = self.source.model, trunk_of(self.source.model)
        cache, known = DynamicCache(config=model.config), set(signature(trunk.forward).parameters)

        def changed(states: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
            now = tokens.shape[1]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -now:]
            given = {"attention_mask": mask, "position_ids": positions}
            # As `generate` does: without padding there is no mask, and the same kernels give the same bits.
            given = {
                name: value for name, value in given.items() if name in known and not (value is mask and mask.all())
            }
            arguments = {"input_ids": tokens, "past_key_values": cache, "use_cache": True, **given}
            there = {name: value.to(self.source.device) if isinstance(value, Tensor) else value
                     for name, value in arguments.items()}  # fmt: skip
            site = self.source_site
            rows = read(self.source.blocks, [site], lambda: trunk(**there))[site].flatten(0, 1)
            with torch.autocast(rows.device.type, enabled=False):
                mapped = self.map(rows.float()).to(states).view(states.shape)
            return mapped.where(mask[:, -now:, None].bool().to(mapped.device), 0)  # as padding has elsewhere

        return changed


class Generated(NamedTuple):
    """Continuations of B prompts.

    Attributes:
        tokens: (B, N) int64, on the device of the prompts; padding after the end of a text.
        lengths: (B,) number of tokens of each, that which ends the text included.
        logits: (B, N, V) before any temperature; None if they were not asked for.
    """

    tokens: Tensor
    lengths: Tensor
    logits: Tensor | None = None


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


def check_generates(model: FrozenModel) -> None:
    """Raise unless a model generates text token by token with a cache.

    Raises:
        ValueError: it is no causal language model, or keeps nothing of the tokens before.
    """
    check_causal(model)
    check_cache(model)


def check_cache(model: FrozenModel) -> None:
    """Raise unless a causal model keeps keys and values of the tokens before.

    Raises:
        ValueError: it does not.
    """
    stateful = getattr(model.model, "_is_stateful", False)
    if not model.causal or stateful or "past_key_values" not in signature(trunk_of(model.model).forward).parameters:
        raise UserError(
            f"Expected a model with a cache of keys and values to generate text with, but {model.name} "
            f"({type(model.model).__name__}) has none: every token would run the whole text again. Name another model."
        )


def check_room(model: FrozenModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raise unless a model has positions for a prompt and what is written after it.

    Raises:
        ValueError: it has fewer.
    """
    if model.max_length is not None and prompt_tokens + new_tokens > model.max_length:
        raise UserError(
            f"Expected at most {model.max_length} tokens in all, as {model.name} has positions for, but got prompts of "
            f"{prompt_tokens} and `new_tokens` {new_tokens}. Generate fewer, or cut the prompts."
        )


@torch.no_grad()
def generate(
    model: FrozenModel, prompts: Inputs, changing: Added | Replaced | None = None, *, new_tokens: int = 32,
    temperature: float = 0.0, seed: int = 0, logits: bool = False,
) -> Generated:  # fmt: skip
    """Continue prompts, with the states at a site changed at every step or, without `changing`, as the model does.

    `transformers`' own `generate` does it, with caches, without the penalties and filters of a model's own settings.
    A text ends at the model's end-of-text token.

    Args:
        model: a causal language model.
        prompts: `input_ids` (B, T) and `attention_mask`, padded on either side.
        changing: what is done to the states at which site.
        new_tokens: most tokens of a continuation.
        temperature: 0: the most probable token each time; else tokens are drawn from softmax(logits / temperature).
        seed: of the draws, which depend on the whole batch.
        logits: whether the logits are kept.

    Raises:
        ValueError: the model generates nothing, or has no cache; it has no such site, or no room for the tokens.
    """
    check_generates(model)
    check_range(least=1, new_tokens=new_tokens)
    check_range(least=0, temperature=temperature)
    ids, end = prompts["input_ids"], model.model.generation_config.eos_token_id
    for reader in (model, *([changing.source] if isinstance(changing, Replaced) else [])):
        check_room(reader, ids.shape[1], new_tokens)
    layout = Layout(prompts, "left", model.device)
    there, mask = layout.turn(ids), layout.turn(prompts.get("attention_mask", torch.ones_like(ids)))
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    padding = getattr(model.tokenizer, "pad_token_id", None)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    settings = GenerationConfig(
        max_new_tokens=new_tokens, repetition_penalty=1.0, num_beams=1, use_cache=True, return_dict_in_generate=True,
        output_logits=logits, eos_token_id=ends or None, **{"do_sample": False, **drawn},
        pad_token_id=padding if padding is not None else (ends or [0])[0],
    )  # fmt: skip
    with torch.random.fork_rng(), _changed(model, changing, mask):
        torch.manual_seed(seed)
        found: Any = model.model.generate(there, attention_mask=mask, generation_config=settings)
    tokens = found.sequences[:, there.shape[1] :]
    over = torch.isin(tokens, torch.tensor(ends, device=tokens.device, dtype=tokens.dtype)).cumsum(1)
    lengths = ((over == 0).sum(1) + 1).clamp(max=tokens.shape[1])
    answers = torch.stack(found.logits, 1) if logits else None
    return Generated(layout.bring_back(tokens), layout.bring_back(lengths), answers)


@contextmanager
def _changed(model: FrozenModel, changing: Added | Replaced | None, mask: Tensor) -> Iterator[None]:
    """Within it, the states at a site are changed at every step of one generation from prompts with this mask."""
    if changing is None:
        yield
        return
    model.check_site(changing.site, "site")
    if isinstance(changing, Replaced):
        changing.source.check_site(changing.source_site, "source_site")
        check_cache(changing.source)
    changed, masks = changing.begin(), list[Tensor]()

    def at_step(states: Tensor, called: dict[str, Any]) -> Tensor:
        tokens = cast(Tensor, called["input_ids"])
        masks.append(mask.new_ones(tokens.shape) if masks else mask)
        return changed(states, tokens, torch.cat(masks, 1))

    with change(model.model, model.blocks, changing.site, at_step):
        yield
