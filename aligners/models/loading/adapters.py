"""Adapters (LoRA and others) that `peft` puts on a base, merged into its weights or beside them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
)
from transformers.utils import cached_file, find_adapter_config_file

from aligners.errors import UserError, check_extra
from aligners.files.user_files import refusing
from aligners.models.loading.named import located

WEIGHTS, OLDER = "adapter_model.safetensors", "adapter_model.bin"
AGAIN = "If a file of it is missing, damaged or incomplete, download or save the adapter again."
_HUB = re.compile(
    r"\w[\w.-]*(/[\w.-]+)*"
)  # a name on the Hub, perhaps of a folder or file in a repository
# What families call the embeddings of tokens, and the layer that predicts them.
EMBEDDINGS = frozenset(
    {
        "embed_tokens",
        "wte",
        "word_embeddings",
        "embed_in",
        "embeddings",
        "tok_embeddings",
        "shared",
    }
)
OUTPUTS = frozenset({"lm_head", "embed_out", "decoder"})
_WRAPPED = ".base_layer."  # in the names of weights that peft has put a layer around


class Adapter(NamedTuple):
    """An adapter, as its config describes it.

    Attributes:
        name: Hub id or folder.
        where: the folder or Hub id, and how `from_pretrained` takes what lies where in it.
        base: name of the model that it is put on, and how that is read.
        task: what it was trained for, in peft's words; None: that is not said.
        heads: names of the modules that it replaces.
    """

    name: str
    where: tuple[str, dict[str, Any]]
    base: tuple[str, dict[str, Any]]
    task: str | None
    heads: list[str]

    def config(self, base: PreTrainedConfig) -> PreTrainedConfig:
        """The config of the base under the adapter, which may bring a classification head, or want none."""
        if self.task == "FEATURE_EXTRACTION":
            base.architectures = None
        if (
            self.task == "SEQ_CLS"
            and base.model_type in CLASSIFIERS
            and (classes := self._classes())
        ):
            base.architectures, base.num_labels = (
                [CLASSIFIERS[base.model_type]],
                classes,
            )
        return base

    def brings(self, weight: str) -> bool:
        """Whether a weight is one of the modules that it replaces."""
        return not set(weight.split(".")).isdisjoint(self.heads)

    def has_tokenizer(self) -> bool:
        """Whether a tokenizer lies beside it, which may know more than the base's."""
        folder, where = self.where
        absent = {
            f"_raise_exceptions_for_{kind}": False
            for kind in ("missing_entries", "connection_errors")
        }
        return (
            cached_file(folder, "tokenizer_config.json", **where, **absent) is not None
        )

    def vocabulary(self) -> int | None:
        """Tokens that the model has under the adapter, which may bring embeddings of more; None: those of the base."""
        for key, shape in self._shapes().items():
            if (
                key.endswith(".weight")
                and not EMBEDDINGS.isdisjoint(key.split("."))
                and len(shape) == 2
            ):
                return shape[0]
        return None

    def has_outputs(self) -> bool:
        """Whether it brings the layer that predicts tokens."""
        return any(
            key.endswith(".weight") and not OUTPUTS.isdisjoint(key.split("."))
            for key in self._shapes()
        )

    def _classes(self) -> int | None:
        """The classes of the head: what the last, and narrowest, of its layers answers with; None: it has no layer."""
        heads = set(self.heads) - EMBEDDINGS - OUTPUTS
        outputs = (
            shape[0]
            for key, shape in self._shapes().items()
            if heads & set(key.split(".")) and shape[1:]
        )
        return min(outputs, default=None)

    def _shapes(self) -> dict[str, list[int]]:
        """The shape of each of its weights."""
        folder, where = self.where
        with (
            refusing(f"The adapter {self.name!r} cannot be read", AGAIN),
            safe_open(cached_file(folder, WEIGHTS, **where), framework="pt") as weights,
        ):
            return {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118  (no mapping)


def adapter_of(name: str, source: Mapping[str, Any]) -> Adapter | None:
    """The adapter of this name; None: it is a model.

    A base with a relative path lies in the current folder, or else beside the adapter.

    Args:
        name: Hub id or folder.
        source: `revision` and `trust_remote_code`.

    Raises:
        ValueError: peft is not installed, the adapter's config is damaged or names no base, or a whole model lies
            beside it.
    """
    folder, place = located(name, source)
    where = {key: place[key] for key in ("revision", "subfolder") if place.get(key)}
    may_be = "gguf_file" not in place and (
        Path(folder).is_dir() or _HUB.fullmatch(folder)
    )
    file = find_adapter_config_file(folder, **where) if may_be else None
    if file is None:
        return None
    check_extra("formats", "peft", f"The adapter {name!r}")
    with refusing(f"The adapter {name!r} cannot be read"):
        told = dict(json.loads(Path(file).read_text(encoding="utf-8")))
    if any(Path(file).parent.glob("model*.safetensors")):
        raise UserError(
            f"Expected a model or an adapter in {name!r}, but got both. Move one into a folder of its own."
        )
    base = told.get("base_model_name_or_path") or ""
    beside = Path(file).parent / base
    if not base or not (Path(base).exists() or beside.exists() or _HUB.fullmatch(base)):
        raise UserError(
            f"Expected the base of the adapter {name!r}, but got {base!r}, which is neither a folder here nor a name "
            "on the Hub. Correct base_model_name_or_path in its adapter_config.json."
        )
    base = str(beside) if beside.exists() and not Path(base).exists() else base
    _check_weights(name, folder, where)
    under = {**source, "revision": told.get("revision")}
    return Adapter(
        name,
        (folder, where),
        (base, under),
        told.get("task_type"),
        told.get("modules_to_save") or [],
    )


def _check_weights(name: str, folder: str, where: dict[str, Any]) -> None:
    """Raise if an adapter has its weights in an older file alone: that could run code as it is read."""
    absent = {
        f"_raise_exceptions_for_{kind}": False
        for kind in ("missing_entries", "connection_errors")
    }
    if cached_file(folder, WEIGHTS, **where, **absent) is not None:
        return
    if cached_file(folder, OLDER, **where, **absent) is None:
        raise UserError(
            f"Expected the weights of the adapter {name!r} in {WEIGHTS}, but there is no such file. {AGAIN}"
        )
    raise UserError(
        f"Expected the weights of the adapter {name!r} in {WEIGHTS}, but got {OLDER} alone, which is not read, as such "
        "files can run code. If you trust it, load it with peft and save it again: `model.save_pretrained(folder)`."
    )


def brings_tokens(name: str, source: Mapping[str, Any]) -> bool:
    """Whether a model of this name is an adapter with embeddings of its own."""
    adapter = adapter_of(name, source)
    return adapter is not None and adapter.vocabulary() is not None


def put_on(model: PreTrainedModel, adapter: Adapter, merge: bool | None) -> None:
    """Put an adapter on its base, in place.

    Args:
        model: the base.
        adapter: what is put on it.
        merge: whether its weights are added to those of the base, which then is an ordinary model. Default: where that
            is exact to rounding, in float32 and unquantised.

    Raises:
        ValueError: weights of the adapter are missing, or fit nowhere.
    """
    from peft.tuners.tuners_utils import (
        BaseTunerLayer,
    )  # an extra: only adapters need it
    from peft.utils import ModulesToSaveWrapper

    (folder, where), name, conversions = (
        adapter.where,
        adapter.name,
        getattr(model, "_weight_conversions", None),
    )
    unfit = set[str]()
    with refusing(f"The adapter {name!r} cannot be put on {adapter.base[0]!r}", AGAIN):
        resized = _resize(model, adapter)
        info = model.load_adapter(
            folder, adapter_kwargs=where, ignore_mismatched_sizes=True
        )
    outputs: Any = model.get_output_embeddings() if resized else None
    if outputs is not None and adapter.has_outputs():
        model.config.tie_word_embeddings = False  # they were kept apart
    elif outputs is not None and model.config.tie_word_embeddings:
        outputs.weight = _inner(model.get_input_embeddings()).weight
    elif outputs is not None:
        unfit.add("the output embeddings of its new tokens")
    for key in info.unexpected_keys:
        # Of a bare encoder no pooler is loaded; and peft writes some modules twice.
        if ".pooler." not in f".{key}" and not key.endswith(
            (".modules_to_save.weight", ".original_module.weight")
        ):
            unfit.add(key)
    unfit |= {*info.missing_keys, *(key for key, *_ in info.mismatched_keys)}
    if unfit:
        raise UserError(
            f"Expected the adapter {name!r} to fit its base, {adapter.base[0]!r}, but they differ in {min(unfit)} and "
            f"{len(unfit) - 1} other weights. Name the base that it was trained on."
        )
    if merge is None:
        merge = (
            model.dtype == torch.float32
            and getattr(model.config, "quantization_config", None) is None
        )
    for path, part in list(model.named_modules()):
        if isinstance(
            part, ModulesToSaveWrapper
        ):  # it keeps what was there before, too
            model.set_submodule(path, part.modules_to_save["default"])
        if merge and isinstance(part, BaseTunerLayer):
            base: Any = part.get_base_layer()
            base.weight = nn.Parameter(
                base.weight.detach().clone()
            )  # which another layer may share
            part.merge()
            model.set_submodule(path, base)
            if base in (model.get_input_embeddings(), model.get_output_embeddings()):
                model.config.tie_word_embeddings = False
    if merge:
        del model.requires_grad_(True).peft_config
        vars(model).update(
            _hf_peft_config_loaded=False, _weight_conversions=conversions
        )  # by which it is saved


def _resize(model: PreTrainedModel, adapter: Adapter) -> bool:
    """Give a base embeddings of as many tokens as its adapter brings; whether that was necessary."""
    tokens = adapter.vocabulary()
    if tokens is None or tokens == len(cast(Any, model.get_input_embeddings()).weight):
        return False
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(tokens, mean_resizing=False)
    return True


def _inner(part: Any) -> Any:
    """The layer that an adapter has put something around, or has replaced."""
    saved = getattr(part, "modules_to_save", None)
    part = part if saved is None else saved["default"]
    return getattr(part, "base_layer", part)


def share_weights(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model use the weights of another wherever theirs are equal, if one of them is under an unmerged adapter."""
    if not (hasattr(model, "peft_config") or hasattr(other, "peft_config")):
        return
    theirs = {
        name.replace(_WRAPPED, "."): weight for name, weight in other.named_parameters()
    }
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        same = theirs.get(name.replace(_WRAPPED, "."), weight)
        if (
            type(same) is type(weight) is nn.Parameter
            and same.dtype == weight.dtype
            and torch.equal(same, weight)
        ):
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, same)
