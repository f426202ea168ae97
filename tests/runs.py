"""Short ways to what most tests of a run need: a data module on the tiny world, and a quiet Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from aligners.alignment import Alignment
from datamodules.paired import PairedActivations
from datamodules.text import TextSource
from similarity.functional.moments import Moments, moments_of
from tests.conftest import World

__all__ = ["activations", "fitted", "parameters", "quiet_trainer", "related_rows", "rows_moments"]


def activations(world: World, **options: Any) -> PairedActivations:
    """The data module of the tiny world."""
    text = options.pop("text", TextSource(world.fit, held_out=world.test))
    options = {"model_x": world.model_x, "model_y": world.model_y, "batch_size": 16} | options
    return PairedActivations(text=text, **options)


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer that shows and writes nothing of its own."""
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
        }
        | options
    )


def fitted(module: Alignment, data: PairedActivations, **options: Any) -> Alignment:
    """The module after a fit."""
    quiet_trainer(**options).fit(module, datamodule=data)
    return module


def parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, copied."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def related_rows(sites: int, n: int, d_x: int, d_y: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Paired rows in float64, (S, N, d_x) and (S, N, d_y): Y is a noisy linear map of X, each site its own."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sites, n, d_x, generator=draw, dtype=torch.float64)
    x = x @ torch.randn(sites, d_x, d_x, generator=draw, dtype=torch.float64) + 3
    weight = torch.randn(sites, d_x, d_y, generator=draw, dtype=torch.float64) / d_x**0.5
    noise = torch.randn(sites, n, d_y, generator=draw, dtype=torch.float64)
    return x, x @ weight + 0.3 * noise - 2


def rows_moments(x: Tensor, y: Tensor) -> Moments:
    """Their moments."""
    return moments_of(x, y)
