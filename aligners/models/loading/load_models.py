"""Loads pretrained models from the Hub or a folder, complete or not at all, in the precision asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from aligners.errors import UserError
from aligners.models.architectures import Architecture, Task, architecture_of
from aligners.models.hooks import blocks_of
from aligners.models.loading.adapters import brings_tokens
from aligners.models.loading.known import KnownModels, SleepingModel
from aligners.models.loading.model_files import (
    listed,
    quiet,
    read_config,
    read_tokenizer,
    read_weights,
    weight_options,
)
from aligners.models.loading.placement import DeviceMap, check_device_map
from aligners.models.model import FrozenModel, quantisation

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_precision(trainer: pl.Trainer, allowed: Sequence[str] = ("32-true",)) -> None:
    """Raise if the Trainer's precision would round aligners, sums and figures along with the models.

    Args:
        trainer: of the run.
        allowed: precisions that leave them in full precision.

    Raises:
        ValueError: `trainer.precision` is not among `allowed`.
    """
    if trainer.precision not in allowed:
        raise UserError(
            f"Expected `trainer.precision` {' or '.join(allowed)}, but got {trainer.precision}: aligners and sums stay "
            "in full precision. For the models, which take most of the time, set `data.dtype`, for example to bfloat16."
        )


logger = getLogger(__name__)


_HEADS: dict[Task, Any] = {
    "classification": transformers.AutoModelForSequenceClassification,
    "masked": transformers.AutoModelForMaskedLM,
    "causal": transformers.AutoModelForCausalLM,
}


def load_frozen(
    name: str | Path,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device: str | torch.device = "cpu",
    device_map: DeviceMap | None = None,
    tokenizer: bool = True,
    known_as: str | None = None,
    known: KnownModels | None = None,
    merge_adapters: bool | None = None,
) -> FrozenModel:
    """Load a model, with its classification or language modelling head where the checkpoint names one.

    Weights come from safetensors where there are any; an older `pytorch_model.bin` is read as tensors only
    and cannot run code. What lies above the last site of a bare encoder (a pooler) is not loaded. A checkpoint that
    names a language modelling head but has no weights for it is loaded without a head, with a warning.

    Args:
        name: Hub id, or a folder that `save_pretrained` wrote; `owner/name/folder` for a folder in a repository; a
            GGUF file in any of these, whose weights are unpacked; or an adapter of peft, which is put on its base.
        revision: branch, tag or commit on the Hub. The base of an adapter has that of the adapter's config.
        dtype: of the weights: float32, bfloat16 or float16.
        attn_implementation: "sdpa", "eager", ...; None: what transformers prefers.
        trust_remote_code: whether code from the Hub may run.
        device: where the weights go, all of them.
        device_map: which part goes where instead: "auto", or a mapping from modules to devices. For a model that is
            too large for one device; needs accelerate.
        tokenizer: whether to load the tokenizer too.
        known_as: the model's name in reports; default: `name`.
        known: models whose weights were read before: such a one reads them again when something is run.
        merge_adapters: whether an adapter's weights are added to its base's. Default: where that is exact to rounding,
            in float32 and unquantised.

    Raises:
        ValueError: if there is no such model, its architecture is not registered, a file is damaged or missing, weights
            are missing or of another shape, the tokenizer is missing, or the device map splits a block or leaves
            weights where they are not used.
    """
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    options = {
        "trust_remote_code": trust_remote_code,
        **weight_options(dtype, attn_implementation),
    }
    named: dict[str, Any] = {"name": known_as or str(name), "revision": revision}
    with quiet():
        config = read_config(str(name), source)
        architecture = architecture_of(config.model_type)
        tasks = [architecture.task(kind, config) for kind in config.architectures or ()]
        task = next((task for task in tasks if task is not None), None)
        if device_map is not None:
            empty = _skeleton(
                config, task, architecture, {"trust_remote_code": trust_remote_code}
            )
            check_device_map(device_map, empty, blocks_of(empty))
        placed = {
            **options,
            "revision": revision,
            "device_map": device_map,
            "merge_adapters": merge_adapters,
        }
        if (
            architecture.rereads
        ):  # or a T5Gemma's encoder would not be loaded without its decoder
            config.is_encoder_decoder = False
        read = quiet()(
            partial(_model, str(name), task, architecture, placed | {"config": config})
        )
        lasting = device_map is None and quantisation(config) in (
            None,
            "torchao",
        )  # the same on every device
        lasting = lasting and not brings_tokens(
            str(name), source
        )  # or its config is not that of the files
        place = (
            known.place(str(name), source, options["dtype"], merge_adapters)
            if known and lasting
            else None
        )
        entry = known.find(place) if known is not None and place is not None else None
        # A model's faults are said before its tokenizer's.
        model = (
            read()
            if entry is None
            else _skeleton(
                config, None if entry.headless else task, architecture, options
            )
        )
        words = read_tokenizer(str(name), source, model.config) if tokenizer else None
    if entry is not None:
        return _told(SleepingModel(model, words, **named, about=entry, read=read)).to(
            device
        )
    frozen = _told(FrozenModel(model, words, **named))
    if known is not None and place is not None:
        known.note(
            place, frozen, headless=task is not None and model.base_model is model
        )
    return frozen if device_map is not None else frozen.to(device)


def _told(model: FrozenModel) -> FrozenModel:
    """Log what makes a model doubtful."""
    for caution in model.cautions:
        logger.warning(caution)
    return model


def _skeleton(
    config: PreTrainedConfig,
    task: Task | None,
    architecture: Architecture,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    """The model without weights, on the meta device."""
    loader, bare = (
        (architecture.bare_class, architecture.bare)
        if task is None
        else (_HEADS[task], {})
    )
    with torch.device("meta"):
        return loader.from_config(config, **options, **bare)


def _model(
    name: str, task: Task | None, architecture: Architecture, options: dict[str, Any]
) -> PreTrainedModel:
    if task is None:
        model, unfit = read_weights(
            name, architecture.bare_class, {**options, **architecture.bare}
        )
    else:
        model, unfit = read_weights(name, _HEADS[task], options)
        inside = f"{model.base_model_prefix}."
        # Sentence encoders often name the language model that they were made from, and have thrown its head away.
        if (
            task != "classification"
            and unfit
            and not any(key.startswith(inside) for key in unfit)
        ):
            logger.warning(
                "%s has no weights for the head of a %s: no head is loaded.",
                name,
                type(model).__name__,
            )
            return _model(name, None, architecture, options)
    if unfit:
        raise UserError(
            f"Expected all weights of a {type(model).__name__} in {name!r}, but got none, or none of the right shape, "
            f"for {listed(unfit)}. They would be random: fine-tune the model first, or name a checkpoint that has them."
        )
    return model
