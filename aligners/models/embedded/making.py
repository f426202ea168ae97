"""What all embedded models share: a cache of complete models, and reproducible training.

A model is an ordinary folder of `transformers`, loaded like any other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    BertConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from aligners.files.whole import check_folder, whole_folder
from aligners.models.loading.saving import save_model

__all__ = ["Size", "alone", "bert_config", "cache_folder", "family_folder", "keep_model", "train"]


@dataclass(frozen=True)
class Size:
    """How large an embedded model is.

    Args:
        vocabulary: number of pieces of the tokenizer.
        layers: number of blocks, L.
        width: of the states, d; the feed-forward layers are four times as wide.
        heads: attention heads per block.
        max_length: the most tokens of a text or a training sequence: what is beyond is cut.
    """

    vocabulary: int = 1536
    layers: int = 4
    width: int = 64
    heads: int = 2
    max_length: int = 128

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"Expected `{name}` of an embedded model to be at least 1, but got {value}.")
        if self.width % self.heads:
            raise ValueError(
                f"Expected `width` of an embedded model to be a multiple of its `heads`, {self.heads}, but got "
                f"{self.width}."
            )


class Rates(Protocol):
    """What every recipe says of its optimiser; see `aligners.models.embedded.classifier.Recipe`."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def warm_up(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def bert_config(recipe: Size, vocabulary: int, dropout: float, **options: Any) -> BertConfig:
    """Config of a BERT of this size. Attention has no dropout, which would double its cost."""
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=4 * recipe.width,
        max_position_embeddings=recipe.max_length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        **options,
    )


def cache_folder(cache: Path | None = None) -> Path:
    """The folder of embedded models: `cache`, else $ALIGNERS_CACHE, else ~/.cache/aligners."""
    return Path(cache or os.environ.get("ALIGNERS_CACHE") or "~/.cache/aligners").expanduser()


def family_folder(kind: str, recipe: Size, data: list[Any], cache: Path | None) -> Path:
    """The folder of all seeds of a recipe, named after everything that determines them.

    Args:
        kind: how the name begins.
        recipe: how they are made.
        data: the training data, as JSON can hold it.
        cache: see `cache_folder`.
    """
    made_from = json.dumps([asdict(recipe), *data]).encode()
    digest = hashlib.blake2b(made_from, digest_size=6).hexdigest()
    return cache_folder(cache) / "embedded" / f"{kind}-{recipe.layers}x{recipe.width}-{digest}"


def keep_model(
    family: Path,
    seed: int,
    make_tokenizer: Callable[[], PreTrainedTokenizerBase],
    make_model: Callable[[PreTrainedTokenizerBase], PreTrainedModel],
    said: str | None,
) -> Path:
    """The folder of one seed, complete; made now if it does not exist.

    Several processes may ask at once: one makes the model, the others wait. All seeds share the tokenizer.

    Args:
        family: see `family_folder`.
        seed: which one.
        make_tokenizer: called if the family has no tokenizer yet.
        make_model: called with the family's tokenizer.
        said: what is being made, announced on the screen; None to stay silent.

    Raises:
        ValueError: the cache cannot be written to.
    """
    folder = family / f"seed-{seed}"
    if folder.is_dir():
        return folder
    check_folder(family, "cache")
    with FileLock(family / ".lock"):
        if not (family / "tokenizer").is_dir():
            with whole_folder(family / "tokenizer") as unfinished:
                make_tokenizer().save_pretrained(unfinished)
        if not folder.is_dir():
            if said is not None:
                print(
                    f"Training the embedded model of seed {seed} ({said}), which is not yet in the cache: {folder}",
                    flush=True,
                )
            tokenizer = AutoTokenizer.from_pretrained(family / "tokenizer")
            with whole_folder(folder) as unfinished:
                save_model(unfinished, make_model(tokenizer), tokenizer)
    return folder


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Within it, training is seeded, quiet and on one thread, and leaves the surrounding run as it was.

    One thread, because more would hardly speed up so small a model, and the weights would depend on their number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with isolate_rng(), _quiet_lightning():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def train(
    model: PreTrainedModel,
    batches: DataLoader,
    recipe: Rates,
    *,
    epochs: int,
    bar: str | None,
    loss: Callable[[Any, dict[str, Tensor]], Tensor] | None = None,
) -> None:
    """Train a model with AdamW, warm-up and linear decay; inside `alone`.

    Args:
        model: changed in place.
        batches: keyword arguments of the model's forward.
        recipe: learning rate, warm-up and weight decay.
        epochs: passes over the batches.
        bar: how the progress bar begins; None for no bar.
        loss: of the model on a batch, a scalar; default: the model's own.
    """
    # On one CPU process, whatever the surrounding run uses: the models are small, and a seed must always give the
    # same weights.
    trainer = Trainer(
        strategy=SingleDeviceStrategy(torch.device("cpu")),
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=bar is not None,
        callbacks=[] if bar is None else [_Bar(bar)],
    )
    trainer.fit(_Training(model, recipe, epochs * len(batches), loss or _own_loss), batches)
    if trainer.interrupted:
        raise KeyboardInterrupt


def _own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


class _Training(LightningModule):
    """AdamW, warm-up, linear decay."""

    def __init__(
        self, model: PreTrainedModel, recipe: Rates, steps: int, loss: Callable[[Any, dict[str, Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.model, self.recipe, self.steps, self.loss = model, recipe, steps, loss

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """Loss of the batch."""
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a learning rate that rises, then falls to 0 at the last step."""
        recipe = self.recipe
        optimizer = torch.optim.AdamW(self.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        schedule = get_linear_schedule_with_warmup(optimizer, int(recipe.warm_up * self.steps), self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Bar(RichProgressBar):
    """Lightning's bar, naming what is trained."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{self.name}, {super()._get_train_description(current_epoch).lower()}"


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence Lightning's notes on devices and workers: this is not the user's run."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        logger.setLevel(level)
