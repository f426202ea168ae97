"""Embedded classifiers: small BERTs trained from a seed on labelled text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler

from aligners.models.embedded.making import Size, alone, bert_config, family_folder, keep_model, train
from aligners.models.embedded.tokenizers import word_pieces

__all__ = ["Recipe", "classifier"]


@dataclass(frozen=True)
class Recipe(Size):
    """How an embedded classifier is built and trained.

    Args:
        epochs: passes over the texts.
        batch: texts per step.
        learning_rate: of AdamW, reached after the warm-up and then falling linearly to 0.
        warm_up: share of the steps in which the learning rate rises.
        weight_decay: of AdamW.
        dropout: of states.
    """

    epochs: int = 4
    batch: int = 64
    learning_rate: float = 5e-4
    warm_up: float = 0.1
    weight_decay: float = 0.01
    dropout: float = 0.1


def classifier(
    seed: int, texts: list[str], labels: list[int], recipe: Recipe, cache: Path | None, progress: bool
) -> Path:
    """The folder of the classifier with this seed; see `aligners.models.embedded.recipes.embedded_model`."""
    _check(texts, labels)
    said = f"BERT, {recipe.layers} blocks, {recipe.width} wide, on {len(texts)} texts"
    return keep_model(
        family_folder("bert", recipe, [texts, labels], cache),
        seed,
        lambda: word_pieces(texts, recipe.vocabulary, recipe.max_length),
        lambda tokenizer: _train(seed, texts, labels, tokenizer, recipe, progress),
        said if progress else None,
    )


def _check(texts: list[str], labels: list[int]) -> None:
    if not texts or len(texts) != len(labels):
        raise ValueError(
            "Expected `texts` to train on and one of `labels` for each, but got "
            f"{len(texts)} texts and {len(labels)} labels."
        )
    if min(labels) < 0 or len(set(labels)) < 2:
        raise ValueError(
            f"Expected `labels` of at least two classes, counted from 0, but got {sorted(set(labels))}. "
            "Choose labelled text."
        )


def _train(
    seed: int,
    texts: list[str],
    labels: list[int],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    progress: bool,
) -> BertForSequenceClassification:
    with alone(seed):
        names = {number: f"LABEL_{number}" for number in range(max(labels) + 1)}
        model = BertForSequenceClassification(bert_config(recipe, len(tokenizer), recipe.dropout, id2label=names))
        batches = _batches(seed, texts, labels, tokenizer, recipe)
        train(model, batches, recipe, epochs=recipe.epochs, bar=f"Seed {seed}" if progress else None)
    return model


def _batches(
    seed: int, texts: list[str], labels: list[int], tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> DataLoader:
    """Batches of texts of similar length, in an order determined by the seed."""
    ids = tokenizer(texts, truncation=True, max_length=recipe.max_length)["input_ids"]

    def collate(rows: list[tuple[list[int], int]]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(row) for row, _ in rows])
        padded = pad_sequence([torch.tensor(row) for row, _ in rows], True, tokenizer.pad_token_id)
        real = torch.arange(padded.shape[1]) < lengths[:, None]
        return {
            "input_ids": padded,
            "attention_mask": real.long(),
            "labels": torch.tensor([label for _, label in rows]),
        }

    sampler = LengthGroupedSampler(
        recipe.batch, lengths=[len(row) for row in ids], generator=torch.Generator().manual_seed(seed)
    )
    rows = list(zip(ids, labels, strict=True))
    return DataLoader(rows, recipe.batch, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
