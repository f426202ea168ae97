"""Tiny random models of every supported architecture, with a tokenizer, from explicit configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForSequenceClassification,
    ElectraModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

from frozen import FrozenModel

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # <pad> has id 1, as RoBERTa and MPNet expect
# fmt: off
WORDS = [
    "a", "the", "this", "that", "film", "plot", "story", "actor", "scene", "joke", "is", "was", "feels",
    "looks", "good", "great", "fine", "bad", "dull", "poor", "funny", "sad", "warm", "cold", "long", "short",
    "very", "rather", "not", "never", "always", "and", "but", "with", "without",
]
# fmt: on
TEXTS = (
    "the film is good",
    "a dull plot and a poor story but the actor was great",
    "not funny",
    "this very long scene feels rather cold and never looks warm",
    "good",
)
_COMMON = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 1}
_RANGE = 0.3  # far from the usual .02: a random model that hardly moves its states would pass any test


def _standard(width: int, layers: int) -> dict[str, object]:
    return _COMMON | {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 64,
        "initializer_range": _RANGE,
    }


def _bert(width: int, layers: int, labels: int) -> PreTrainedConfig:
    return BertConfig(**_standard(width, layers), num_labels=labels)


def _distilbert(width: int, layers: int, labels: int) -> PreTrainedConfig:
    return DistilBertConfig(
        **_COMMON,
        dim=width,
        n_layers=layers,
        n_heads=2,
        hidden_dim=2 * width,
        max_position_embeddings=64,
        initializer_range=_RANGE,
        num_labels=labels,
    )


def _electra(width: int, layers: int, labels: int) -> PreTrainedConfig:
    return ElectraConfig(**_standard(width, layers), embedding_size=width // 2, num_labels=labels)


def _mpnet(width: int, layers: int, labels: int) -> PreTrainedConfig:
    return MPNetConfig(**_standard(width, layers), num_labels=labels)


def _roberta(width: int, layers: int, labels: int) -> PreTrainedConfig:
    return RobertaConfig(**_standard(width, layers), type_vocab_size=1, num_labels=labels)


_Build = Callable[[int, int, int], PreTrainedConfig]
_KINDS: dict[str, tuple[_Build, type[PreTrainedModel], type[PreTrainedModel]]] = {
    "bert": (_bert, BertForSequenceClassification, BertModel),
    "distilbert": (_distilbert, DistilBertForSequenceClassification, DistilBertModel),
    "electra": (_electra, ElectraForSequenceClassification, ElectraModel),
    "mpnet": (_mpnet, MPNetForSequenceClassification, MPNetModel),
    "roberta": (_roberta, RobertaForSequenceClassification, RobertaModel),
}
ARCHITECTURES = tuple(_KINDS)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words; `<s> text </s>`, or `<s> text </s> text </s>` for pairs."""
    tokens = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", tokens["<s>"]), ("</s>", tokens["</s>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        unk_token="<unk>",
        model_max_length=60,
    )


def tiny_model(
    architecture: str, *, seed: int = 0, layers: int = 3, width: int = 16, n_labels: int | None = 2
) -> PreTrainedModel:
    """A random model; `n_labels=None`: without a classification head."""
    build, classifier, bare = _KINDS[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = build(width, layers, n_labels or 2)
        model = (bare if n_labels is None else classifier)(config).eval()
    limit = 2 * (width * (_COMMON["vocab_size"] + 64) + layers * 10 * width**2)
    size = sum(weight.numel() for weight in model.parameters())
    assert size < limit, f"the tiny {architecture} has {size} weights: a config name is misspelt"
    return model


def tiny_frozen(architecture: str = "bert", **options: int | None) -> FrozenModel:
    """`tiny_model` as a FrozenModel with its tokenizer."""
    return FrozenModel(tiny_model(architecture, **options), tiny_tokenizer(), name=f"tiny-{architecture}")


def tiny_folder(folder: Path, architecture: str = "bert", **options: int | None) -> Path:
    """`tiny_model` and its tokenizer, saved as a model folder."""
    tiny_model(architecture, **options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tokenised(texts: tuple[str, ...] = TEXTS, side: str = "right") -> dict[str, torch.Tensor]:
    """A batch of texts, padded to its longest on `side`."""
    batch = tiny_tokenizer()(list(texts), padding=True, padding_side=side, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
