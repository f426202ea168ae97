"""Kinds of embedded models: how large each is, its tokenizer, what it reads, and what it learns."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.errors import UserError, check_known, check_range
from aligners.models.architectures import register_solu
from aligners.models.tokenizers import byte_pairs, ended_texts, word_pieces

ACTIVATIONS = ("gelu_new", "solu")
# of IMDB's 25 million: the rest makes no better tokenizer
TOKENIZER_CHARACTERS = 5_000_000

Batch = dict[str, Tensor]


class Plan(NamedTuple):
    """The training of one model.

    Attributes:
        model: freshly initialised.
        batches: of one epoch.
        loss: of the model on a batch, a scalar.
        epochs: passes over the batches.
    """

    model: PreTrainedModel
    batches: DataLoader
    loss: Callable[[Any, Batch], Tensor]
    epochs: int = 1


@dataclass(frozen=True)
class Size:
    """How large an embedded model is.

    Args:
        vocabulary: number of pieces of the tokenizer.
        layers: number of blocks, L.
        width: width of the states, d; the feed-forward layers are four times as wide.
        heads: attention heads per block.
        max_length: the most tokens of a text or a training sequence; the rest is cut off.
    """

    vocabulary: int = 1536
    layers: int = 4
    width: int = 64
    heads: int = 2
    max_length: int = 128

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int):
                check_range(least=1, **{name: value})
        if self.width % self.heads:
            raise UserError(
                f"Expected `width` of an embedded model to be a multiple of its `heads`, {self.heads}, but got "
                f"{self.width}."
            )

    def tokenizer(self, texts: list[str]) -> PreTrainedTokenizerBase:
        """Learn the tokenizer from texts."""
        return word_pieces(texts, self.vocabulary, self.max_length)

    def bert_config(
        self, vocabulary: int, dropout: float = 0.0, **options: Any
    ) -> transformers.BertConfig:
        """Config of a BERT of this size. Attention has no dropout, which would double its cost."""
        return transformers.BertConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.max_length,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=0.0,
            **options,
        )


# ---------------------------------------------------------------------- text by text


@dataclass(frozen=True)
class ByTexts(Size):
    """How a model that reads text by text is trained.

    Args:
        epochs: passes over the texts.
        batch: texts per step, of similar length.
        learning_rate: learning rate of AdamW, reached after the warm-up and then falling linearly to 0.
        warm_up: share of the steps in which the learning rate rises.
        weight_decay: weight decay of AdamW.
    """

    epochs: int = 4
    batch: int = 64
    learning_rate: float = 5e-4
    warm_up: float = 0.1
    weight_decay: float = 0.01

    def length(self, texts: list[str]) -> str:
        """The length of the training, in words."""
        return f"{self.epochs} times over {len(texts)} texts"

    def rows(
        self, texts: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> list[dict[str, Any]]:
        """The token ids of each text."""
        encoded = tokenizer(texts, truncation=True, max_length=self.max_length)
        return [{"input_ids": ids} for ids in encoded["input_ids"]]

    def batches(
        self, rows: list[dict[str, Any]], seed: int, collate: Callable[[list], Batch]
    ) -> DataLoader:
        """Batches of texts of similar length, in an order determined by the seed."""
        from transformers.trainer_pt_utils import (
            LengthGroupedSampler,
        )  # which imports peft

        draw = torch.Generator().manual_seed(seed)
        lengths = [len(row["input_ids"]) for row in rows]
        sampler = LengthGroupedSampler(self.batch, lengths=lengths, generator=draw)
        return DataLoader(rows, self.batch, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Recipe(ByTexts):
    """How an embedded classifier is built and trained.

    Args:
        dropout: of states.
    """

    folder: ClassVar[str] = "bert"
    dropout: float = 0.1

    def plan(
        self,
        seed: int,
        texts: list[str],
        labels: list[int],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Plan:
        """Make a classifier and its batches."""
        names = {number: f"LABEL_{number}" for number in range(max(labels) + 1)}
        config = self.bert_config(len(tokenizer), self.dropout, id2label=names)
        rows = self.rows(texts, tokenizer)
        for row, label in zip(rows, labels, strict=True):
            row["labels"] = label
        batches = self.batches(
            rows, seed, transformers.DataCollatorWithPadding(tokenizer)
        )
        model = transformers.BertForSequenceClassification(config)
        return Plan(model, batches, classified, self.epochs)


@dataclass(frozen=True)
class SentenceRecipe(ByTexts):
    """How an embedded masked BERT of sentences is built and trained.

    Every text is a sequence of its own, so that positions mean in training what they mean when the model is read, and
    a step costs no more than its sentences need. They are masked anew in each epoch.

    Args:
        vocabulary: large enough for whole words, of which a small model learns more in a minute than of pieces.
        masked_share: share of the tokens that it has to find. As in BERT, 80 % of them are masked, 10 % replaced by
            another token, and 10 % left.
        initial: standard deviation of the initial weights; see `MaskedRecipe`.
    """

    folder: ClassVar[str] = "bert-sentences"
    vocabulary: int = 8192
    layers: int = 3
    epochs: int = 15
    batch: int = 16
    learning_rate: float = 3e-3
    masked_share: float = 0.3
    initial: float = 0.08

    def plan(
        self,
        seed: int,
        texts: list[str],
        labels: list[int],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Plan:
        """Make a masked model and its batches."""
        config = self.bert_config(len(tokenizer), initializer_range=self.initial)
        model = transformers.BertForMaskedLM(config)
        mask = _masking(tokenizer, self.masked_share, seed)
        batches = self.batches(self.rows(texts, tokenizer), seed, mask)
        return Plan(model, batches, masked_and_padded, self.epochs)


# ---------------------------------------------------------------------- packed text


@dataclass(frozen=True)
class LanguageRecipe(Size):
    """How a model of packed text is trained.

    Texts are laid end to end, the end-of-text token after each, and cut into sequences of one length: the first
    `steps` · `batch` of them, each read once, in an order drawn by the seed; where there are fewer, again.

    Args:
        steps: steps of the optimiser.
        batch: sequences per step.
        learning_rate: learning rate of AdamW, reached after the warm-up and then falling linearly to 0.
        warm_up: share of the steps in which the learning rate rises.
        weight_decay: weight decay of AdamW.
    """

    layers: int = 3
    steps: int = 2400
    batch: int = 4
    learning_rate: float = 2e-3
    warm_up: float = 0.1
    weight_decay: float = 0.01

    def length(self, texts: list[str]) -> str:
        """The length of the training, in words."""
        return f"{self.steps} batches of {self.batch} x {self.max_length} tokens"

    def sequences(
        self,
        texts: list[str],
        tokenizer: PreTrainedTokenizerBase,
        end: int,
        length: int,
    ) -> Tensor:
        """The first packed sequences, (n, length), no more than training reads."""
        wanted = self.steps * self.batch
        ids: list[int] = []
        for first in range(0, len(texts), 1000):
            some = ended_texts(texts[first : first + 1000], tokenizer, end)
            ids += chain.from_iterable(some)
            if len(ids) >= wanted * length:
                break
        count = min(wanted, len(ids) // length)
        if count == 0:
            raise UserError(
                f"Expected `texts` of at least {length} tokens together, one training sequence, but got {len(ids)}. "
                "Use more text, or a smaller `max_length`."
            )
        return torch.tensor(ids[: count * length]).view(count, length)

    def batches(
        self, rows: Tensor, seed: int, collate: Callable[[list[Tensor]], Batch]
    ) -> DataLoader:
        """`steps` batches of sequences, each sequence equally often, in an order determined by the seed."""
        wanted = self.steps * self.batch
        draw = torch.Generator().manual_seed(seed)
        order: list[int] = []
        while len(order) < wanted:
            order += torch.randperm(len(rows), generator=draw).tolist()
        return DataLoader(rows, self.batch, sampler=order[:wanted], collate_fn=collate)  # type: ignore[arg-type]


@dataclass(frozen=True)
class GPTRecipe(LanguageRecipe):
    """How an embedded GPT-2 is built and trained, on the next token.

    Args:
        activation: of the feed-forward layers: gelu_new (GPT-2's own) or solu (Elhage et al. 2022).
    """

    vocabulary: int = 2048
    learning_rate: float = 6e-3
    activation: str = "gelu_new"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known(ACTIVATIONS, activation=self.activation)

    @property
    def folder(self) -> str:
        """The beginning of its folder's name."""
        return f"gpt2-{self.activation}"

    def tokenizer(self, texts: list[str]) -> PreTrainedTokenizerBase:
        """Learn the tokenizer from texts."""
        return byte_pairs(_first(texts), self.vocabulary, self.max_length)

    def plan(
        self,
        seed: int,
        texts: list[str],
        labels: list[int],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Plan:
        """Make a GPT-2 and its batches."""
        register_solu()
        end = tokenizer.eos_token_id
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=self.max_length,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            activation_function=self.activation,
            # No dropout: every sequence is read only a few times, so there is no overfitting to prevent.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=end,
            eos_token_id=end,
        )
        model = transformers.GPT2LMHeadModel(config)
        rows = self.sequences(texts, tokenizer, end, self.max_length)
        return Plan(model, self.batches(rows, seed, _stacked), next_tokens)


@dataclass(frozen=True)
class MaskedRecipe(LanguageRecipe):
    """How an embedded masked BERT is built and trained: [CLS], packed text, [SEP].

    Args:
        masked_share: share of the tokens that it has to find. As in BERT, 80 % of them are masked, 10 % replaced by
            another token, and 10 % left. Twice BERT's share, because the training is short.
        initial: standard deviation of the initial weights. BERT's .02 is meant for widths of 768; at 64 the model does
            not get beyond the frequencies of the tokens with it.
    """

    folder: ClassVar[str] = "bert-mlm"
    masked_share: float = 0.3
    initial: float = 0.08

    def tokenizer(self, texts: list[str]) -> PreTrainedTokenizerBase:
        """Learn the tokenizer from texts."""
        return super().tokenizer(_first(texts))

    def plan(
        self,
        seed: int,
        texts: list[str],
        labels: list[int],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Plan:
        """Make a masked model and its batches."""
        config = self.bert_config(len(tokenizer), initializer_range=self.initial)
        model = transformers.BertForMaskedLM(config)
        mask = _masking(tokenizer, self.masked_share, seed)
        first = torch.tensor([tokenizer.cls_token_id])
        last = torch.tensor([tokenizer.sep_token_id])
        rows = self.sequences(
            texts, tokenizer, tokenizer.sep_token_id, self.max_length - 2
        )

        def collate(some: list[Tensor]) -> Batch:
            whole = [torch.cat([first, row, last]) for row in some]
            return mask([{"input_ids": ids} for ids in whole])

        return Plan(model, self.batches(rows, seed, collate), masked_tokens)


AnyRecipe = Recipe | GPTRecipe | MaskedRecipe | SentenceRecipe


def classified(
    model: transformers.BertForSequenceClassification, batch: Batch
) -> Tensor:
    """Return the mean cross-entropy of the classes."""
    return model(**batch).loss


def next_tokens(model: transformers.GPT2LMHeadModel, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next tokens."""
    logits = model(**batch, use_cache=False).logits[:, :-1]
    next_ids = batch["input_ids"][:, 1:]
    return cross_entropy(logits.flatten(0, 1), next_ids.flatten())


def masked_tokens(
    model: transformers.BertForMaskedLM,
    batch: Batch,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy of the masked tokens. Running the head on these only saves a third of the time."""
    masked = batch["labels"] != -100
    output = model.bert(input_ids=batch["input_ids"], attention_mask=attention_mask)
    logits = model.cls(output.last_hidden_state[masked])
    return cross_entropy(logits, batch["labels"][masked])


def masked_and_padded(model: transformers.BertForMaskedLM, batch: Batch) -> Tensor:
    """`masked_tokens` of texts of several lengths."""
    return masked_tokens(model, batch, batch["attention_mask"])


def _stacked(rows: list[Tensor]) -> Batch:
    """Stack rows of token ids into a batch."""
    return {"input_ids": torch.stack(rows)}


def _masking(
    tokenizer: PreTrainedTokenizerBase, share: float, seed: int
) -> Callable[[list[Any]], Batch]:
    """Return a function that pads rows of token ids to a batch and masks it, the same for every process."""
    mask = transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=share, seed=seed
    )
    # It makes no generator of its own in a process of a pool.
    mask.generator = torch.Generator().manual_seed(seed)
    return mask


def _first(texts: list[str]) -> list[str]:
    """Return the first texts that together reach `TOKENIZER_CHARACTERS`."""
    characters = 0
    for number, text in enumerate(texts, start=1):
        characters += len(text)
        if characters >= TOKENIZER_CHARACTERS:
            return texts[:number]
    return texts


# ---------------------------------------------------------------------- names

# From the prefix of a name to the recipe of such models.
_KINDS: dict[str, type[AnyRecipe]] = {
    "embedded": Recipe,
    "embedded-gpt": GPTRecipe,
    "embedded-mlm": MaskedRecipe,
    "embedded-sentences": SentenceRecipe,
}
EMBEDDED = tuple(f"{kind}:" for kind in _KINDS)  # for `startswith`


def embedded_recipe(name: str) -> tuple[int, AnyRecipe]:
    """Return seed and recipe of an embedded model, given its name.

    `embedded:SEED` is a classifier, `embedded-gpt:SEED` a causal language model, `embedded-mlm:SEED` a masked one,
    `embedded-sentences:SEED` a masked one that reads text by text. `embedded:SEED:layers=6,width=96` departs from the
    defaults of its recipe, any field of which can be named. Models of one kind and vocabulary, made from the same
    texts, share their tokenizer whatever their size.

    Args:
        name: the model's name.

    Raises:
        ValueError: the name is written in another way, or a field is unknown or named twice.

    Examples:
        >>> seed, recipe = embedded_recipe("embedded:3:layers=6")
        >>> seed, recipe.layers, recipe.width
        (3, 6, 64)
    """
    prefix, _, rest = name.partition(":")
    seed, colon, written = rest.partition(":")
    default = _KINDS.get(prefix, Recipe)()
    changes: dict[str, Any] | None = {}
    if colon:
        changes = _fields(written, asdict(default))
    if changes is None or not seed.isdigit() or prefix not in _KINDS:
        raise UserError(
            f"Expected an embedded model to be named `{prefix}:SEED`, or `{prefix}:SEED:layers=6,width=96` with any "
            f"of {', '.join(asdict(default))}, each once, but got {name!r}."
        )
    return int(seed), replace(default, **changes)


def _fields(written: str, defaults: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields that a name sets, in the types of their defaults; None if they cannot be read."""
    fields: dict[str, Any] = {}
    for entry in written.split(","):
        field, _, value = entry.strip().partition("=")
        if field not in defaults or field in fields:
            return None
        try:
            fields[field] = type(defaults[field])(value)
        except ValueError:
            return None
    return fields


def recipe_in_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an earlier version's data options, moving its `recipe` of embedded classifiers into their names."""
    options = dict(options)
    recipe = options.pop("recipe", None) or {}
    usual = asdict(Recipe())
    changed = {}
    for field, value in recipe.items():
        if value != usual.get(field):
            changed[field] = value
    for option in ("model_x", "model_y"):
        if option in options:
            options[option] = _named_with(options[option], changed)
    if "models" in options:
        options["models"] = [_named_with(name, changed) for name in options["models"]]
    return options


def _named_with(name: str, changed: Mapping[str, Any]) -> str:
    """Add fields to the name of an embedded classifier, unless it has them; return other names unchanged."""
    if not changed or not str(name).startswith("embedded:"):
        return name
    prefix, seed, *entries = name.split(":")
    for field, value in changed.items():
        if f"{field}=" not in name:
            entries.append(f"{field}={value}")
    written = ",".join(entries)
    return f"{prefix}:{seed}:{written}"
