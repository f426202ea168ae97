"""Small BERTs that need no model hub: trained here from a seed and labelled text, then kept.

What is made is an ordinary folder of `transformers`, read by the code that reads any other model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging as transformers_logging

__all__ = ["Recipe", "cache_folder", "embedded_model"]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@dataclass(frozen=True)
class Recipe:
    """How an embedded model is built and trained.

    Args:
        vocabulary: number of word pieces.
        layers: number of blocks, L.
        width: of the states, d; the feed-forward layers are four times as wide.
        heads: attention heads per block.
        max_length: longest text in tokens; what is beyond is cut.
        epochs: passes over the texts.
        batch: texts per step.
        learning_rate: of AdamW, reached after the warm-up and then falling linearly to 0.
        warm_up: share of the steps in which the learning rate rises.
        weight_decay: of AdamW.
        dropout: of states. Attention weights are not dropped: that would double the cost of attention.
    """

    vocabulary: int = 1536
    layers: int = 4
    width: int = 64
    heads: int = 2
    max_length: int = 128
    epochs: int = 4
    batch: int = 64
    learning_rate: float = 5e-4
    warm_up: float = 0.1
    weight_decay: float = 0.01
    dropout: float = 0.1


def cache_folder(cache: Path | None = None) -> Path:
    """Where what is made here is kept: `cache`, else $ALIGNERS_CACHE, else ~/.cache/aligners."""
    return Path(cache or os.environ.get("ALIGNERS_CACHE") or "~/.cache/aligners").expanduser()


def embedded_model(
    seed: int,
    texts: list[str],
    labels: list[int],
    *,
    recipe: Recipe | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> Path:
    """The folder of the classifier with this seed, trained now if it is not in the cache.

    The weights follow from the arguments and the machine; the global random state is left alone. Seeds share
    the tokenizer, which is trained on the same texts. Several processes may ask at once: one trains, the
    others wait.

    Args:
        seed: of the initial weights, dropout and the order of the texts.
        texts: to train on; no text that anything is evaluated on.
        labels: class of each text, 0, 1, ...
        recipe: how to train; by default `Recipe()`.
        cache: folder to keep models in; see `cache_folder`.
        progress: say what is being made, and show a bar.

    Raises:
        ValueError: no texts, not one label for each, or fewer than two classes.
    """
    recipe = recipe or Recipe()
    _check(texts, labels)
    made_from = json.dumps([asdict(recipe), texts, labels]).encode()
    name = f"bert-{recipe.layers}x{recipe.width}-{hashlib.blake2b(made_from, digest_size=6).hexdigest()}"
    family = cache_folder(cache) / "embedded" / name
    folder = family / f"seed-{seed}"
    if folder.is_dir():
        return folder
    family.mkdir(parents=True, exist_ok=True)
    with FileLock(family / ".lock"):
        tokenizer = _tokenizer(family / "tokenizer", texts, recipe)
        if not folder.is_dir():
            if progress:
                print(
                    f"Training the embedded model of seed {seed} (BERT, {recipe.layers} blocks, "
                    f"{recipe.width} wide, on {len(texts)} texts), which is not yet in the cache: {folder}",
                    flush=True,
                )
            with _whole(folder) as unfinished:
                model = _train(seed, texts, labels, tokenizer, recipe, progress)
                _save(unfinished, model, tokenizer)
    return folder


def _check(texts: list[str], labels: list[int]) -> None:
    if not texts or len(texts) != len(labels):
        raise ValueError(
            "Expected `texts` to train on and one of `labels` for each, but received "
            f"{len(texts)} texts and {len(labels)} labels."
        )
    if min(labels) < 0 or len(set(labels)) < 2:
        raise ValueError(
            f"Expected `labels` of at least two classes, counted from 0, but received {sorted(set(labels))}. "
            "Choose labelled text."
        )


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write to that becomes `folder` only when everything is in it."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed; we hold the lock
    unfinished.mkdir()
    try:
        yield unfinished
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tokenizer(folder: Path, texts: list[str], recipe: Recipe) -> BertTokenizer:
    """The tokenizer that all seeds of the recipe and texts share."""
    if not folder.is_dir():
        with _whole(folder) as unfinished:
            _train_tokenizer(texts, recipe).save_pretrained(unfinished)
    return BertTokenizer.from_pretrained(folder)


def _train_tokenizer(texts: list[str], recipe: Recipe) -> BertTokenizer:
    """Word pieces learned from the texts, the same in every process.

    The trainer numbers single letters in the order of a hash table, which differs between processes, and
    breaks ties between merges by these numbers. Here the letters are given to it in order.
    """
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    letters = sorted({c for text in texts for c in tokenizer.normalizer.normalize_str(text) if not c.isspace()})
    trainer = WordPieceTrainer(
        vocab_size=recipe.vocabulary,
        initial_alphabet=letters,
        special_tokens=SPECIAL + [f"##{letter}" for letter in letters],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BertTokenizer(vocab=tokenizer.get_vocab(), model_max_length=recipe.max_length)


def _train(
    seed: int,
    texts: list[str],
    labels: list[int],
    tokenizer: BertTokenizer,
    recipe: Recipe,
    progress: bool,
) -> BertForSequenceClassification:
    with isolate_rng(), _one_thread(), _quiet_lightning():
        torch.manual_seed(seed)
        model = BertForSequenceClassification(_config(recipe, len(tokenizer), max(labels) + 1))
        batches = _batches(seed, texts, labels, tokenizer, recipe)
        # On the CPU and alone, whatever the run around this one uses: the models are small, and the same seed
        # must give the same weights.
        trainer = Trainer(
            strategy=SingleDeviceStrategy(torch.device("cpu")),
            accelerator="cpu",
            devices=1,
            max_epochs=recipe.epochs,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=progress,
            callbacks=[_Bar(seed)] if progress else [],
        )
        trainer.fit(_Training(model, recipe, recipe.epochs * len(batches)), batches)
        if trainer.interrupted:
            raise KeyboardInterrupt
    return model


def _config(recipe: Recipe, vocabulary: int, classes: int) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=4 * recipe.width,
        max_position_embeddings=recipe.max_length,
        hidden_dropout_prob=recipe.dropout,
        attention_probs_dropout_prob=0.0,
        id2label={number: f"LABEL_{number}" for number in range(classes)},
    )


def _batches(seed: int, texts: list[str], labels: list[int], tokenizer: BertTokenizer, recipe: Recipe) -> DataLoader:
    """Batches of texts of similar length, in an order that follows from the seed."""
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


class _Training(LightningModule):
    """Trains the classifier: AdamW, warm-up, linear decay."""

    def __init__(self, model: BertForSequenceClassification, recipe: Recipe, steps: int) -> None:
        super().__init__()
        self.model, self.recipe, self.steps = model, recipe, steps

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """Cross-entropy of the batch."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a learning rate that rises, then falls to 0 at the last step."""
        recipe = self.recipe
        optimizer = torch.optim.AdamW(self.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        schedule = get_linear_schedule_with_warmup(optimizer, int(recipe.warm_up * self.steps), self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Bar(RichProgressBar):
    """Lightning's bar, naming the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def _get_train_description(self, current_epoch: int) -> str:
        return f"Seed {self.seed}, {super()._get_train_description(current_epoch).lower()}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: more would gain so small a model little, and the weights would depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keeps devices, tips and advice on workers off the screen: this run is not the user's."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        logger.setLevel(level)


def _save(folder: Path, model: BertForSequenceClassification, tokenizer: BertTokenizer) -> None:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # two files of 2 MB are no progress to report
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
