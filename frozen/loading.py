"""Loading a pretrained model from the Hub or a folder, whole or not at all."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from frozen.architectures import Architecture, Task, architecture_of
from frozen.hooks import blocks_of
from frozen.model import FrozenModel
from frozen.placement import DeviceMap, check_device_map
from frozen.solu import register_solu

__all__ = ["load_frozen"]

logger = getLogger(__name__)
_HEADS: dict[Task, Any] = {
    "classification": AutoModelForSequenceClassification,
    "masked": AutoModelForMaskedLM,
    "causal": AutoModelForCausalLM,
}
# What transformers and the readers of files raise for a model that is missing, incomplete or damaged.
_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError)


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
) -> FrozenModel:
    """Load a model, with its classification or language modelling head where the checkpoint names one.

    Weights come from safetensors where there are any; an older `pytorch_model.bin` is read as tensors only
    and cannot run code. What lies above the last site of a bare encoder (a pooler) is not loaded. A checkpoint that
    names a language modelling head and has no weights for it is loaded without, and that is said.

    Args:
        name: Hub id, or a folder that `save_pretrained` wrote.
        revision: branch, tag or commit on the Hub.
        dtype: of the weights: float32, bfloat16 or float16.
        attn_implementation: "sdpa", "eager", ...; None: what transformers prefers.
        trust_remote_code: whether code from the Hub may run.
        device: where the weights go, all of them.
        device_map: which part goes where instead: "auto", or a mapping from modules to devices. For a model that is
            too large for one device; needs accelerate.
        tokenizer: whether to load the tokenizer too.

    Raises:
        ValueError: if there is no such model, its architecture is not registered, a file is damaged or
            missing, weights are missing or of another shape, the tokenizer is missing or knows more tokens
            than the model, or the device map splits a block or leaves weights where they are not used.
    """
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    register_solu()
    with _quiet():
        config = _config(str(name), source)
        architecture = architecture_of(config.model_type)
        tasks = (architecture.task(kind) for kind in config.architectures or ())
        task = next((task for task in tasks if task is not None), None)
        options: dict[str, Any] = {**source, "dtype": _dtype(dtype)}
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        if device_map is not None:
            _check_map(device_map, config, task, architecture, trust_remote_code)
            options["device_map"] = device_map
        model = _model(str(name), task, architecture, options)
        words = _tokenizer(str(name), source, config) if tokenizer else None
    frozen = FrozenModel(model, words, name=str(name), revision=revision)
    return frozen if device_map is not None else frozen.to(device)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"Expected `dtype` to be float32, bfloat16 or float16, received {dtype!r}.")
    return found


def _config(name: str, source: dict[str, Any]) -> PreTrainedConfig:
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(
            f"Expected a model folder as `save_pretrained` writes it, received {name!r}, which has no "
            "config.json: it is no model, or was not written to its end. Name another one, or save it again."
        )
    try:
        return AutoConfig.from_pretrained(name, **source)
    except _UNREADABLE as error:
        raise ValueError(
            "Expected `name` to be a local model folder or a model on the Hub that can be reached, received "
            f"{name!r}. {_reason(error)}"
        ) from error


def _check_map(
    device_map: DeviceMap, config: PreTrainedConfig, task: Task | None, architecture: Architecture, trust: bool
) -> None:
    loader, options = (architecture.bare_class, architecture.bare) if task is None else (_HEADS[task], {})
    with torch.device("meta"):
        skeleton = loader.from_config(config, trust_remote_code=trust, **options)
    check_device_map(device_map, skeleton, blocks_of(skeleton))


def _model(name: str, task: Task | None, architecture: Architecture, options: dict[str, Any]) -> PreTrainedModel:
    if task is None:
        model, unfit = _weights(name, architecture.bare_class, {**options, **architecture.bare})
    else:
        model, unfit = _weights(name, _HEADS[task], options)
        inside = f"{model.base_model_prefix}."
        # Sentence encoders often name the language model that they were made from, and have thrown its head away.
        if task != "classification" and unfit and not any(key.startswith(inside) for key in unfit):
            logger.warning("%s has no weights for the head of a %s: it is loaded without.", name, type(model).__name__)
            return _model(name, None, architecture, options)
    if unfit:
        listed = ", ".join(unfit[:4]) + (f" and {len(unfit) - 4} more" if len(unfit) > 4 else "")
        raise ValueError(
            f"Expected all weights of a {type(model).__name__} in {name!r}, received none, or none of the "
            f"right shape, for {listed}. They would be random: fine-tune the model first, or name a "
            "checkpoint that has them."
        )
    return model


def _weights(name: str, loader: Any, options: dict[str, Any]) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the weights that are missing or of another shape."""
    try:
        # Weights of another shape are let through here, and then refused by name beside the missing ones.
        model, found = loader.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except _UNREADABLE as error:
        raise ValueError(
            f"The model {name!r} cannot be loaded {_reason(error)}. If a file of it is missing, damaged or "
            "not written to its end, download or save the model again."
        ) from error
    return model, sorted({*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])})


def _tokenizer(name: str, source: dict[str, Any], config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
    except _UNREADABLE as error:
        raise ValueError(
            f"Expected a tokenizer beside the model {name!r}, received none that can be read. Save one, "
            f"or pass `tokenizer=False` to work on token ids. {_reason(error)}"
        ) from error
    # Without any vocabulary file transformers makes one up out of the special tokens.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError(
            f"Expected a tokenizer beside the model {name!r}, received one without a vocabulary. Save one, "
            "or pass `tokenizer=False` to work on token ids."
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"Expected a tokenizer of at most {config.vocab_size} tokens, the vocabulary of {name!r}, "
            f"received one of {len(tokenizer)}: it belongs to another model. Save the model's own beside it."
        )
    return tokenizer


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"({type(error).__name__}: {lines[0] if lines else 'no message'})"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' bars and loading report: what matters in them is raised here."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
