"""Short ways to what the tests of a run need: a data module on the tiny world, a quiet Trainer, paired rows."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from tests.world import World
from torch import Tensor

from aligners.callbacks.checkpoint import WholeCheckpoints
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.sources import TextSource


def activations(world: World, **options: Any) -> PairedActivations:
    """The data module of the tiny world."""
    text = options.pop("text", TextSource(world.fit, held_out=world.test))
    options = {"held_out_types": 0.0} | options  # only 35 words: what leaves some out says so
    options = {"model_x": world.model_x, "model_y": world.model_y, "batch_size": 16, "max_length": 64} | options
    return pair_states(text=text, **options)


def made_again(kind: Callable[..., Any], config: dict[str, Any]) -> Any:
    """A data module from what its `config` kept."""
    text = TextSource(**config["text"])
    return kind(**{**config, "text": text, "cache": config["cache"] and Path(config["cache"])})


def rank_of(rank: int, world_size: int) -> Any:
    """What a data module asks of the Trainer of one of several ranks."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    shown = {"is_global_zero": False, "progress_bar_callback": None}
    return SimpleNamespace(global_rank=rank, world_size=world_size, strategy=strategy, **shown)


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer that shows and writes nothing of its own."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "plugins": [WholeCheckpoints()],
    }
    saving = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in options.get("callbacks") or ())
    return pl.Trainer(**quiet | {"enable_checkpointing": saving} | options)


def related_rows(sites: int, n: int, d_x: int, d_y: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Paired rows in float64, (S, n, d_x) and (S, n, d_y): Y a noisy linear map of X, each site its own."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    x = normal(sites, n, d_x) @ normal(sites, d_x, d_x) + 3
    return x, x @ normal(sites, d_x, d_y) / d_x**0.5 + 0.3 * normal(sites, n, d_y) - 2


def state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds."""
    held: dict[str, Any] = torch.load(path, weights_only=True)
    return held
