"""Embedded language models: a small GPT-2 and a small masked BERT, trained from a seed on plain text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from aligners.models.embedded.making import Size, alone, bert_config, family_folder, keep_model, train
from aligners.models.embedded.tokenizers import byte_pairs, ended_texts, word_pieces
from aligners.models.solu import register_solu

__all__ = ["GPTRecipe", "LanguageRecipe", "MaskedRecipe", "causal_model", "masked_model", "masked_tokens"]

ACTIVATIONS = ("gelu_new", "solu")
TOKENIZER_CHARACTERS = 5_000_000  # of the 25 million of the IMDB reviews: the rest makes no better tokenizer


@dataclass(frozen=True)
class LanguageRecipe(Size):
    """How an embedded language model is built and trained.

    Texts are laid end to end, the end-of-text token after each, and cut into sequences of one length: the first
    `steps` · `batch` of them, each read once, in an order drawn by the seed; where there are fewer, again.

    Args:
        steps: of the optimiser.
        batch: sequences per step.
        learning_rate: of AdamW, reached after the warm-up and then falling linearly to 0.
        warm_up: share of the steps in which the learning rate rises.
        weight_decay: of AdamW.
    """

    layers: int = 3
    steps: int = 2400
    batch: int = 4
    learning_rate: float = 2e-3
    warm_up: float = 0.1
    weight_decay: float = 0.01


@dataclass(frozen=True)
class GPTRecipe(LanguageRecipe):
    """How an embedded GPT-2 is built and trained, on the next token.

    Args:
        activation: of the feed-forward layers: gelu_new (GPT-2's own) or solu (Elhage et al. 2022).
    """

    vocabulary: int = 2048
    learning_rate: float = 6e-3
    activation: str = "gelu_new"


@dataclass(frozen=True)
class MaskedRecipe(LanguageRecipe):
    """How an embedded masked BERT is built and trained: [CLS], packed text, [SEP].

    Args:
        masked_share: share of the tokens that it has to find. As in BERT, 80 % of them are masked, 10 % replaced by
            another token, and 10 % left. Twice BERT's share, because the training is short.
        initial: standard deviation of the initial weights. BERT's .02 is meant for widths of 768; at 64 the model does
            not get beyond the frequencies of the tokens with it.
    """

    masked_share: float = 0.3
    initial: float = 0.08


def causal_model(seed: int, texts: list[str], recipe: GPTRecipe, cache: Path | None, progress: bool) -> Path:
    """The folder of the GPT-2 with this seed; see `aligners.models.embedded.recipes.embedded_model`."""
    if recipe.activation not in ACTIVATIONS:
        raise ValueError(f"Expected `activation` to be one of {', '.join(ACTIVATIONS)}, but got {recipe.activation!r}.")
    register_solu()
    kind = f"gpt2-{recipe.activation}"
    said = f"GPT-2 with {recipe.activation}, {recipe.layers} blocks, {recipe.width} wide"
    return _model(seed, texts, recipe, cache, progress, kind, said, byte_pairs, _causal)


def masked_model(seed: int, texts: list[str], recipe: MaskedRecipe, cache: Path | None, progress: bool) -> Path:
    """The folder of the masked BERT with this seed; see `aligners.models.embedded.recipes.embedded_model`."""
    said = f"masked BERT, {recipe.layers} blocks, {recipe.width} wide"
    return _model(seed, texts, recipe, cache, progress, "bert-mlm", said, word_pieces, _masked)


def _model(
    seed: int,
    texts: list[str],
    recipe: LanguageRecipe,
    cache: Path | None,
    progress: bool,
    kind: str,
    said: str,
    pieces: Callable[[list[str], int, int], PreTrainedTokenizerBase],
    plan_of: Callable[..., _Plan],
) -> Path:
    if not texts:
        raise ValueError("Expected `texts` to train on, but got none.")
    said = f"{said}, on {recipe.steps} batches of {recipe.batch} x {recipe.max_length} tokens"
    return keep_model(
        family_folder(kind, recipe, [texts], cache),
        seed,
        lambda: pieces(_first(texts, TOKENIZER_CHARACTERS), recipe.vocabulary, recipe.max_length),
        lambda tokenizer: _trained(plan_of, seed, texts, tokenizer, recipe, f"Seed {seed}" if progress else None),
        said if progress else None,
    )


def _first(texts: list[str], characters: int) -> list[str]:
    """The first texts, up to the one with which they reach this many characters together."""
    found, size = [], 0
    for text in texts:
        found.append(text)
        size += len(text)
        if size >= characters:
            break
    return found


# ---------------------------------------------------------------------- training


class _Plan(NamedTuple):
    """How one kind of language model is trained.

    Attributes:
        model: freshly initialised.
        end: the token that follows each text.
        length: of a sequence, in tokens of text.
        collate: makes a batch of sequences.
        loss: of the model on a batch, a scalar.
    """

    model: PreTrainedModel
    end: int
    length: int
    collate: Callable[[list[Tensor]], dict[str, Tensor]]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]


def _trained(
    plan_of: Callable[..., _Plan],
    seed: int,
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    recipe: LanguageRecipe,
    bar: str | None,
) -> PreTrainedModel:
    with alone(seed):
        plan = plan_of(seed, tokenizer, recipe)
        rows = _sequences(texts, tokenizer, plan.end, plan.length, recipe)
        train(plan.model, _batches(rows, recipe, seed, plan.collate), recipe, epochs=1, bar=bar, loss=plan.loss)
    # Not earlier: transformers would take a GPT's end-of-text tokens for padding, and warn.
    plan.model.config.pad_token_id = tokenizer.pad_token_id
    return plan.model


def _causal(seed: int, tokenizer: PreTrainedTokenizerBase, recipe: GPTRecipe) -> _Plan:
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=recipe.max_length,
        n_embd=recipe.width,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        activation_function=recipe.activation,
        # No dropout: every sequence is read only a few times, so there is no overfitting to prevent.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
    )
    return _Plan(
        GPT2LMHeadModel(config), end, recipe.max_length, lambda rows: {"input_ids": torch.stack(rows)}, _next_token
    )


def _next_token(model: GPT2LMHeadModel, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _masked(seed: int, tokenizer: PreTrainedTokenizerBase, recipe: MaskedRecipe) -> _Plan:
    model = BertForMaskedLM(bert_config(recipe, len(tokenizer), 0.0, initializer_range=recipe.initial))
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe.masked_share, seed=seed)
    mask.generator = torch.Generator().manual_seed(seed)  # it makes none of its own in a process of a pool
    first, last = torch.tensor([tokenizer.cls_token_id]), torch.tensor([tokenizer.sep_token_id])

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        return dict(mask([{"input_ids": torch.cat([first, row, last])} for row in rows]))

    return _Plan(model, tokenizer.sep_token_id, recipe.max_length - 2, collate, masked_tokens)


def masked_tokens(model: BertForMaskedLM, batch: dict[str, Tensor], padded: bool = False) -> Tensor:
    """Mean over the masked tokens. Running the head on these alone saves a third of the time."""
    asked = batch["labels"] != -100
    mask = batch["attention_mask"] if padded else None
    states = model.bert(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state[asked]
    return cross_entropy(model.cls(states), batch["labels"][asked])


def _sequences(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, end: int, length: int, recipe: LanguageRecipe
) -> Tensor:
    """The first packed sequences, (n, length), no more than training reads."""
    wanted, ids = recipe.steps * recipe.batch, list[int]()
    for first in range(0, len(texts), 1000):
        ids += chain.from_iterable(ended_texts(texts[first : first + 1000], tokenizer, end))
        if len(ids) >= wanted * length:
            break
    count = min(wanted, len(ids) // length)
    if count == 0:
        raise ValueError(
            f"Expected `texts` of at least {length} tokens together, one training sequence, but got {len(ids)}. "
            "Use more text, or a smaller `max_length`."
        )
    return torch.tensor(ids[: count * length]).view(count, length)


def _batches(
    rows: Tensor, recipe: LanguageRecipe, seed: int, collate: Callable[[list[Tensor]], dict[str, Tensor]]
) -> DataLoader:
    """`steps` batches of sequences, each sequence equally often, in an order determined by the seed."""
    wanted, draw = recipe.steps * recipe.batch, torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(rows), generator=draw) for _ in range(-(-wanted // len(rows)))])[:wanted]
    return DataLoader(rows, recipe.batch, sampler=order.tolist(), collate_fn=collate)  # type: ignore[arg-type]
