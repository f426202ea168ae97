"""Embedded masked models of sentences: small BERTs that read one text at a time, as probes do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler

from aligners.models.embedded.language import masked_tokens
from aligners.models.embedded.making import Size, alone, bert_config, family_folder, keep_model, train
from aligners.models.embedded.tokenizers import word_pieces

__all__ = ["SentenceRecipe", "sentence_model"]


@dataclass(frozen=True)
class SentenceRecipe(Size):
    """How an embedded masked BERT of sentences is built and trained.

    Every text is a sequence of its own, so that positions mean in training what they mean when the model is read, and
    a step costs no more than its sentences need.

    Args:
        vocabulary: large enough for whole words, of which a small model learns more in a minute than of pieces.
        epochs: passes over the texts, masked anew each time.
        batch: texts a step, of similar length.
        learning_rate: of AdamW, reached after the warm-up and then falling linearly to 0.
        warm_up: share of the steps in which the learning rate rises.
        weight_decay: of AdamW.
        masked_share: share of the tokens that it has to find. As in BERT, 80 % of them are masked, 10 % replaced by
            another token, and 10 % left.
        initial: standard deviation of the initial weights; see `MaskedRecipe`.
    """

    vocabulary: int = 8192
    layers: int = 3
    epochs: int = 15
    batch: int = 16
    learning_rate: float = 3e-3
    warm_up: float = 0.1
    weight_decay: float = 0.01
    masked_share: float = 0.3
    initial: float = 0.08


def sentence_model(seed: int, texts: list[str], recipe: SentenceRecipe, cache: Path | None, progress: bool) -> Path:
    """The folder of the masked BERT with this seed; see `aligners.models.embedded.recipes.embedded_model`."""
    if not texts:
        raise ValueError("Expected `texts` to train on, but got none.")
    said = f"masked BERT, {recipe.layers} blocks, {recipe.width} wide, {recipe.epochs} times over {len(texts)} texts"
    return keep_model(
        family_folder("bert-sentences", recipe, [texts], cache),
        seed,
        lambda: word_pieces(texts, recipe.vocabulary, recipe.max_length),
        lambda tokenizer: _trained(seed, texts, tokenizer, recipe, progress),
        said if progress else None,
    )


def _trained(
    seed: int, texts: list[str], tokenizer: PreTrainedTokenizerBase, recipe: SentenceRecipe, progress: bool
) -> BertForMaskedLM:
    with alone(seed):
        model = BertForMaskedLM(bert_config(recipe, len(tokenizer), 0.0, initializer_range=recipe.initial))
        batches = _batches(seed, texts, tokenizer, recipe)
        bar = f"Seed {seed}" if progress else None
        train(model, batches, recipe, epochs=recipe.epochs, bar=bar, loss=partial(masked_tokens, padded=True))
    return model


def _batches(seed: int, texts: list[str], tokenizer: PreTrainedTokenizerBase, recipe: SentenceRecipe) -> DataLoader:
    """Batches of texts of similar length, masked and in an order as determined by the seed."""
    ids = tokenizer(texts, truncation=True, max_length=recipe.max_length)["input_ids"]
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe.masked_share, seed=seed)
    mask.generator = torch.Generator().manual_seed(seed)  # it makes none of its own in a process of a pool

    def collate(rows: list[list[int]]) -> dict[str, Tensor]:
        return dict(mask([{"input_ids": row} for row in rows]))

    draw = torch.Generator().manual_seed(seed)
    sampler = LengthGroupedSampler(recipe.batch, lengths=[len(row) for row in ids], generator=draw)
    rows: Any = ids
    return DataLoader(rows, recipe.batch, sampler=sampler, collate_fn=collate)
