"""Text that a language model generates while states at a site are steered or replaced."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, GenerationConfig

from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.errors import UserError, check_range
from aligners.fitting.saved_bank import DIRECTIONS
from aligners.injection.behaviour import mapped_rows
from aligners.injection.methods import Method
from aligners.injection.panels import Panel
from aligners.injection.routes import Route
from aligners.injection.scoring.scores import Row, mean_columns
from aligners.models.hooks import Changed, change, read, trunk_of
from aligners.models.model import FrozenModel
from aligners.progress import hidden, track


class Added(NamedTuple):
    """A vector to add to the states at a site.

    Attributes:
        site: 0 is the embedding output, l the output of block l.
        vector: (d,), in the units of the states.
    """

    site: int
    vector: Tensor

    def begin(self) -> Changed:
        """Return the change to the states at every step of one generation."""

        def changed(states: Tensor, called: dict[str, Any]) -> Tensor:
            return states + self.vector.to(states)

        return changed


class Replaced(NamedTuple):
    """States at a site that are replaced by mapped states of another model, which reads the same growing text.

    Attributes:
        site: site where the states are put.
        source: the other model, of the same tokens. It has its own cache, and reads one token per step.
        source_site: site at which the other model is read; blocks above it are not run, except the first.
        map: maps its rows (N, d_x) to rows (N, d_y).
    """

    site: int
    source: FrozenModel
    source_site: int
    map: Callable[[Tensor], Tensor]

    def begin(self) -> Changed:
        """Return the change to the states at every step of one generation."""
        trunk, site = trunk_of(self.source.model), self.source_site
        cache = DynamicCache(config=self.source.model.config)

        def changed(states: Tensor, called: dict[str, Any]) -> Tensor:
            ids = called["input_ids"].to(self.source.device)
            run = partial(trunk, input_ids=ids, past_key_values=cache, use_cache=True)
            # At least one block: its part of the cache tells how much was read, which gives the positions.
            found = read(self.source.blocks, {site, max(site, 1)}, run)
            rows = found[site].flatten(0, 1)
            mapped = mapped_rows(self.map, rows.float())
            return mapped.to(states).view(states.shape)

        return changed


def check_causal(model: FrozenModel) -> None:
    """Raise unless a model predicts the next token.

    Raises:
        ValueError: the model does not predict the next token.
    """
    if model.task != "causal":
        what = model.unasked or f"is a {type(model.model).__name__}"
        raise UserError(
            f"Expected a causal language model, but {model.name} {what}. Name a model that predicts the next token."
        )


def check_cache(model: FrozenModel, tokens: int) -> None:
    """Raise unless a causal model can keep keys and values of so many tokens: the prompt and its continuation.

    Raises:
        ValueError: the model keeps none, or has fewer positions.
    """
    stateful = getattr(model.model, "_is_stateful", False)
    if not model.causal:
        raise UserError(
            f"Expected a model in which a position sees only those before it, as generating text needs, but got "
            f"{model.name}: when the last token of a text changes, the states before it move. Name another model."
        )
    if (
        stateful
        or "past_key_values" not in signature(trunk_of(model.model).forward).parameters
    ):
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
    """Continue prompts while the states at a site are changed at every step, or unchanged if `changing` is None.

    This uses `generate` of `transformers`, with caches, and without the penalties and filters in a model's settings. A
    text ends at the model's end-of-text token.

    Args:
        model: a causal language model.
        prompts: (B, T) int64, tokens without padding.
        changing: the change to the states, and its site.
        new_tokens: most new tokens of a continuation.
        temperature: 0: take the most probable token each time; otherwise draw tokens from softmax(logits /
            temperature).
        seed: seed of the draws, which depend on the whole batch.

    Returns:
        The continuations, (B, new_tokens) int64 on the device of the prompts; -1 after the token that ends a text.

    Raises:
        ValueError: the model cannot generate text, has no cache or no such site, or has too few positions for the
            tokens.
    """
    check_causal(model)
    check_range(least=1, new_tokens=new_tokens)
    check_range(least=0, temperature=temperature)
    length = prompts.shape[1]
    check_cache(model, length + new_tokens)
    steps: Any = nullcontext()
    if changing is not None:
        _check_change(model, changing, length + new_tokens)
        steps = change(model.model, model.blocks, changing.site, changing.begin())

    ends = _end_tokens(model)
    settings = _settings(ends, new_tokens, temperature)
    ids: Any = prompts.to(model.device)
    mask = torch.ones_like(ids)
    with torch.random.fork_rng(), steps:
        torch.manual_seed(seed)
        found: Any = model.model.generate(
            ids, attention_mask=mask, generation_config=settings
        )

    tokens = _until_end(found[:, length:].to(prompts.device), ends)
    missing = new_tokens - tokens.shape[1]  # once all texts have ended
    return torch.nn.functional.pad(tokens, (0, missing), value=-1)


def _check_change(model: FrozenModel, changing: Added | Replaced, tokens: int) -> None:
    """Raise unless states can be changed while a model writes so many tokens, the prompt among them."""
    model.check_site(changing.site, "site")
    if isinstance(changing, Replaced):
        changing.source.check_site(changing.source_site, "source_site")
        check_cache(changing.source, tokens)


def _settings(ends: list[int], new_tokens: int, temperature: float) -> GenerationConfig:
    """Return the settings of `transformers` for one continuation, which `ends` may end."""
    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        repetition_penalty=1.0,
        num_beams=1,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        do_sample=bool(temperature),
    )
    if temperature:
        settings.update(temperature=temperature, top_k=0, top_p=1.0)
    return settings


def _until_end(tokens: Tensor, ends: list[int]) -> Tensor:
    """Set tokens (B, N) to -1 after the first that ends a text."""
    final = torch.tensor(ends, device=tokens.device, dtype=tokens.dtype)
    ended = torch.isin(tokens, final).long()
    after_the_end = ended.cumsum(1) - ended > 0
    return tokens.where(~after_the_end, -1)


def _end_tokens(model: FrozenModel) -> list[int]:
    """Return the tokens that end a text."""
    end = model.model.generation_config.eos_token_id
    if end is None:
        return []
    if isinstance(end, int):
        return [end]
    return list(end)


BATCH = 16  # prompts that are continued together
SHOWN = 3  # prompts whose continuations a report shows
Way = tuple[Row, FrozenModel, Added | Replaced | None]


@dataclass(frozen=True)
class Continuing:
    """Options for generating text.

    Args:
        generate: number of held-out texts whose beginnings language models continue, to compare the continuations in
            the report; 0: none.
        prompt_tokens: tokens of a beginning. Shorter texts are skipped.
        new_tokens: most new tokens of a continuation.
        temperature: 0: take the most probable token each time; otherwise draw tokens from softmax(logits /
            temperature).
    """

    generate: int = 0
    prompt_tokens: int = 8
    new_tokens: int = 32
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_range(least=0, generate=self.generate, temperature=self.temperature)
        check_range(
            least=1, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens
        )

    def prompts(self, texts: TokenisedTexts, *models: FrozenModel) -> Tensor:
        """Return the first tokens of the first texts that are long enough: (B, T) int64, which all models can continue.

        Raises:
            ValueError: no text is long enough; or a model has no cache, or too few positions.
        """
        for model in models:
            check_cache(model, self.prompt_tokens + self.new_tokens)
        tokens, _, lengths = texts.tokens_of(0)
        starts = lengths.cumsum(0) - lengths
        starts = starts[lengths > self.prompt_tokens][: self.generate]
        if not len(starts):
            raise UserError(
                f"Expected held-out texts of more than `prompt_tokens` {self.prompt_tokens} tokens to continue, but "
                f"the longest has {int(lengths.max())}. Use fewer, or longer texts."
            )
        places = starts[:, None] + torch.arange(self.prompt_tokens)
        return tokens[places].long()

    def check(self, texts: TokenisedTexts, route: Route, why: str | None) -> None:
        """Raise unless held-out texts can be continued through a route, if any are to be.

        Args:
            texts: held-out texts.
            route: from one model into another.
            why: reason why nothing can be injected there, or None.

        Raises:
            ValueError: as `prompts` does; or the target is no causal language model, or nothing can be injected into
                it.
        """
        if not self.generate:
            return
        check_causal(route.target)
        self.prompts(texts, route.source, route.target)
        if why is not None:
            raise UserError(
                f"Expected no `generate` where nothing can be injected: {why}. Leave it out."
            )


def continuations(
    prompts: Tensor, options: Continuing, seed: int, ways: Iterable[Way]
) -> dict[str, list[Row]]:
    """Make a report's tables: `generation`, a row for each way to continue the prompts, and `samples`, its texts.

    Args:
        prompts: (B, T) int64, without padding.
        options: how the prompts are continued.
        seed: seed of draws, and of the resampling of prompts.
        ways: each has columns for the report, the model that writes, and the change to it. The first is an unchanged
            model, which the others are compared with.
    """
    tables: dict[str, list[Row]] = {"generation": [], "samples": []}
    model: FrozenModel | None = None
    own = prompts
    for about, writer, changing in ways:
        parts = []
        for ids in prompts.split(BATCH):
            part = generate(
                writer,
                ids,
                changing,
                new_tokens=options.new_tokens,
                temperature=options.temperature,
                seed=seed,
            )
            parts.append(part)
        found = torch.cat(parts)
        if model is None:
            model, own = writer, found
        tables["generation"].append(about | figures(model, prompts, own, found, seed))

        for written in _samples(model, prompts, found):
            tables["samples"].append(about | written)
    return tables


def _samples(model: FrozenModel, prompts: Tensor, found: Tensor) -> Iterator[Row]:
    """Return the first prompts (B, T) and their continuations (B, N) as text."""
    decode = cast(Any, model.tokenizer).decode
    for prompt, tokens in zip(prompts[:SHOWN], found[:SHOWN], strict=True):
        yield {"prompt": decode(prompt), "continuation": decode(tokens[tokens >= 0])}


@torch.no_grad()
def figures(
    model: FrozenModel, prompts: Tensor, own: Tensor, found: Tensor, seed: int
) -> Row:
    """Compare continuations with a model's own, and measure how probable the model finds them.

    Args:
        model: the unchanged model.
        prompts: (B, T).
        own: (B, N) its own continuations, -1 after the end of a text.
        found: (B, N) other continuations.
        seed: seed of the resampling of prompts.
    """
    losses = _losses(model, prompts, found)

    either = (own >= 0) | (found >= 0)
    alike = (found == own) & either
    row = dict(mean_columns("agreement", alike.sum(1), either.sum(1), seed))
    mean_loss = mean_columns("perplexity", losses, (found >= 0).sum(1), seed)
    for name, value in mean_loss.items():
        row[name] = None if value is None else math.exp(value)
    return row | {"n_prompts": len(prompts)}


def _losses(model: FrozenModel, prompts: Tensor, found: Tensor) -> Tensor:
    """Return a model's loss on each continuation (B, N) of prompts (B, T), summed over its tokens, in nats: (B,)."""
    losses = []
    for ids, tokens in zip(prompts.split(BATCH), found.split(BATCH), strict=True):
        inputs = {
            "input_ids": torch.cat([ids, tokens.clamp(min=0)], 1),
            "attention_mask": torch.cat(
                [torch.ones_like(ids), (tokens >= 0).long()], 1
            ),
        }
        logits = model.logits(inputs)[:, ids.shape[1] - 1 : -1].float()
        loss = cross_entropy(
            logits.transpose(1, 2), tokens, ignore_index=-1, reduction="none"
        )
        losses.append(loss.sum(1))
    return torch.cat(losses)


def continue_texts(options: Continuing, trainer: pl.Trainer, module: Any) -> None:
    """Generate text with every map of an `InjectionEvaluation` in place at every site, once it has measured.

    Tables for the report: `generation`, a row for each method and site; `samples`, the first prompts and what follows.
    Only the first rank generates, as it alone writes the report.

    Args:
        options: options for generating; nothing happens if no text is to be continued.
        trainer: Trainer of the evaluation.
        module: the evaluation.
    """
    if not options.generate or not trainer.is_global_zero:
        return
    prompts = options.prompts(module.stream.split("test"))
    tables: dict[str, list[Row]] = {"generation": [], "samples": []}
    for panel in module.panels:
        if panel.behaviour is None:
            continue
        ways = track(list(_ways(panel)), "Generating", disable=hidden(trainer))
        here = prompts.to(panel.route.target.device)
        for name, rows in continuations(here, options, module.seed, ways).items():
            tables[name] += rows
    module.report_tables = tables
    module.meta |= {"generation": vars(options)}


def _ways(panel: Panel) -> Iterator[Way]:
    """Return the ways to continue: the models themselves, then every map at every site, and `identity`."""
    source, target = panel.route.source, panel.route.target
    about = {
        "model_x": source.name,
        "model_y": target.name,
        "direction": DIRECTIONS[panel.route.key],
    }
    alone = about | {"role": "ceiling", "site_x": None, "site_y": None}
    yield alone | {"method": "native_y"}, target, None
    if source.task == "causal":
        yield alone | {"method": "native_x"}, source, None
    yield from _ways_of_maps(panel, about)


def _ways_of_maps(panel: Panel, about: Row) -> Iterator[Way]:
    """Return a way for every map at every site, the states of the target replaced by mapped ones."""
    source, target, pairs = panel.route.source, panel.route.target, panel.route.pairs
    for method in panel.methods:
        if method.aligner is None or method.name == "mean":
            continue
        for place, (i, j) in enumerate(pairs):
            here = about | {
                "method": method.name,
                "role": method.role,
                "site_x": i,
                "site_y": j,
            }
            mapped = partial(_mapped, method, place, len(pairs))
            yield here, target, Replaced(j, source, i, mapped)


def _mapped(method: Method, place: int, sites: int, rows: Tensor) -> Tensor:
    """Map rows (N, d_x) by a method at one of its sites, to (N, d_y)."""
    return method.map(rows.expand(sites, *rows.shape), None)[place]
