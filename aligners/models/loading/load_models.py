"""Loads pretrained models from the Hub or a folder, complete or not at all, in the requested precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel

from aligners.errors import UserError
from aligners.models.architectures import Task, architecture_of
from aligners.models.hooks import blocks_of
from aligners.models.loading.adapters import brings_tokens
from aligners.models.loading.known import Known, KnownModels, SleepingModel
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
from aligners.models.model_identity import LOADERS

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = getLogger(__name__)


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
        dtype: data type of the weights: float32, bfloat16 or float16.
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
    path = str(name)
    label = known_as or path
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    options = weight_options(dtype, attn_implementation)
    with quiet():
        checkpoint = _Checkpoint(path, source, options, device_map, merge_adapters)
        place, entry = checkpoint.look_up(known)
        # A model's faults are said before its tokenizer's.
        model = checkpoint.read() if entry is None else checkpoint.sleeping(entry)
        words = None
        if tokenizer:
            words = read_tokenizer(path, source, model.config)

    frozen: FrozenModel
    if entry is None:
        frozen = FrozenModel(model, words, name=label, revision=revision)
        if known is not None and place is not None:
            known.note(place, frozen, headless=checkpoint.is_headless(model))
    else:
        frozen = SleepingModel(
            model,
            words,
            name=label,
            revision=revision,
            about=entry,
            read=checkpoint.read,
        )
    for caution in frozen.cautions:
        logger.warning(caution)
    if device_map is None:
        frozen.to(device)
    return frozen


class _Checkpoint:
    """A checkpoint whose config is read, and the options for reading its weights.

    Args:
        name: Hub id or folder.
        source: `revision` and `trust_remote_code`.
        options: how weights are loaded and run.
        device_map: as for `load_frozen`.
        merge_adapters: likewise.
    """

    def __init__(
        self,
        name: str,
        source: dict[str, Any],
        options: dict[str, Any],
        device_map: DeviceMap | None,
        merge_adapters: bool | None,
    ) -> None:
        self.name = name
        self.source = source
        self.options = options
        self.device_map = device_map
        self.merge_adapters = merge_adapters
        self.config = read_config(name, source)
        self.architecture = architecture_of(self.config.model_type)
        self.task = self._task()
        if device_map is not None:
            empty = self._skeleton(self.task)
            check_device_map(device_map, empty, blocks_of(empty))
        if self.architecture.rereads:
            # or a T5Gemma's encoder would not be loaded without its decoder
            self.config.is_encoder_decoder = False

    def _task(self) -> Task | None:
        """The task of the head that the config names; None if it names none."""
        for kind in self.config.architectures or ():
            task = self.architecture.task(kind, self.config)
            if task is not None:
                return task
        return None

    def look_up(self, known: KnownModels | None) -> tuple[Path | None, Known | None]:
        """Return where `known` records the model, and what it knows of it, each None if there is no such thing.

        Only a model that is the same on every device, and whose config is that of its files, is written down.
        """
        if known is None or self.device_map is not None:
            return None, None
        if quantisation(self.config) not in (None, "torchao"):
            return None, None
        if brings_tokens(self.name, self.source):
            return None, None
        dtype = self.options["dtype"]
        place = known.place(self.name, self.source, dtype, self.merge_adapters)
        if place is None:
            return None, None
        return place, known.find(place)

    def is_headless(self, model: PreTrainedModel) -> bool:
        """Tell whether a model was read without the head that the config names."""
        return self.task is not None and model.base_model is model

    def sleeping(self, known: Known) -> PreTrainedModel:
        """Make the model without weights, on the meta device, with the head that it is known to have."""
        task = None if known.headless else self.task
        return self._skeleton(task, **self.options)

    def _skeleton(self, task: Task | None, **options: Any) -> PreTrainedModel:
        """Make the model with the head of a task and without weights, on the meta device."""
        options["trust_remote_code"] = self.source["trust_remote_code"]
        loader, bare = self._loader(task)
        with torch.device("meta"):
            return loader.from_config(self.config, **options, **bare)

    def _loader(self, task: Task | None) -> tuple[Any, Mapping[str, Any]]:
        """Return the class that loads the model with the head of a task, and its arguments."""
        if task is None:
            return self.architecture.bare_class, self.architecture.bare
        return getattr(transformers, LOADERS[task]), {}

    def read(self) -> PreTrainedModel:
        """Read the model with its weights.

        Raises:
            ValueError: weights are missing, or of another shape.
        """
        with quiet():
            model, unfit = self._weights(self.task)
            if self._lacks_head(model, unfit):
                logger.warning(
                    "%s has no weights for the head of a %s: no head is loaded.",
                    self.name,
                    type(model).__name__,
                )
                model, unfit = self._weights(None)
        if unfit:
            raise UserError(
                f"Expected all weights of a {type(model).__name__} in {self.name!r}, but got none, or none of the "
                f"right shape, for {listed(unfit)}. They would be random: fine-tune the model first, or name a "
                "checkpoint that has them."
            )
        return model

    def _weights(self, task: Task | None) -> tuple[PreTrainedModel, list[str]]:
        """Read the model with the head of a task; return it with the names of its weights that are random."""
        options = {
            **self.source,
            **self.options,
            "config": self.config,
            "device_map": self.device_map,
            "merge_adapters": self.merge_adapters,
        }
        loader, bare = self._loader(task)
        return read_weights(self.name, loader, {**options, **bare})

    def _lacks_head(self, model: PreTrainedModel, unfit: Sequence[str]) -> bool:
        """Tell whether all random weights belong to a language modelling head.

        Sentence encoders often name the language model that they were made from, and have thrown its head away.
        """
        if self.task in (None, "classification") or not unfit:
            return False
        inside = f"{model.base_model_prefix}."
        return not any(key.startswith(inside) for key in unfit)
