"""Short ways to stitch tiny models in tests: the data module, a training run, an evaluation."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tests.runs import quiet_trainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.world import World

from aligners.datamodules.model_texts import ModelTexts, stitched_texts
from aligners.datamodules.text.sources import TextSource
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.injection.stitching.stitching_training import Stitching
from aligners.maps.affine import AffineLayer

LAYERS = {"affine": AffineLayer, "affine_norm": partial(AffineLayer, norm=True)}
OF_MODULE = (
    "routes", "loss", "fitted", "start_batches", "allow_mixed", "optimizer", "schedule", "warmup", "gradient_clip",
    "seed",
)  # fmt: skip


def model_texts(world: World, **options: Any) -> ModelTexts:
    """The data module on the tiny world's texts, by default with its two models."""
    text = options.pop("text", TextSource(world.fit, held_out=world.test))
    usual: dict[str, Any] = {
        "models": [world.model_x, world.model_y],
        "sites": ["1:2", 3],
        "batch_size": 16,
        "max_length": 60,
    }
    return stitched_texts(text=text, **usual | options)


def train(
    world: World,
    layers: Any = LAYERS,
    *,
    trainer: dict[str, Any] | None = None,
    resume: Path | None = None,
    **given: Any,
) -> Stitching:
    """Train on the tiny world: options of `Stitching` and of the data module by their names.

    Like the command: every two steps a validation, the first before any step.
    """
    fast: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "start_batches": 4}
    module = Stitching(layers, **fast | {name: given.pop(name) for name in OF_MODULE if name in given})
    steps: dict[str, Any] = {"max_steps": 4, "max_epochs": -1, "val_check_interval": 2, "check_val_every_n_epoch": None}
    run = quiet_trainer(**steps | (trainer or {}))
    run.fit(module, datamodule=model_texts(world, **given), ckpt_path=resume, weights_only=True)
    return module


def evaluate(
    world: World, *evaluation: Any, trainer: pl.Trainer | None = None, data: dict[str, Any] | None = None, **given: Any
) -> StitchingEvaluation:
    """Measure on the tiny world's held-out texts."""
    module = StitchingEvaluation(*evaluation, **given)
    (trainer or quiet_trainer()).test(module, datamodule=model_texts(world, **data or {}), verbose=False)
    return module


def rows_of(module: StitchingEvaluation, method: str, **where: Any) -> list[dict[str, Any]]:
    """The rows of a method, of some routes or sites."""
    return [r for r in module.rows if r["method"] == method and all(r[name] == value for name, value in where.items())]


def masking_folder(folder: Path, **options: Any) -> str:
    """A tiny masked language model whose tokenizer can mask."""
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "<unk>"  # which no text has
    tiny_model("bert", task="masked", **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
