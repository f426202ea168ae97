"""What a model's name can mean: a folder, a repository, a file in these, or an adapter that `peft` puts on a base."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

GGUF = ".gguf"
WEIGHTS, OLDER = "adapter_model.safetensors", "adapter_model.bin"
AGAIN = "If a file of it is missing, damaged or incomplete, download or save the adapter again."
# a name on the Hub, perhaps of a folder or file in a repository
_HUB = re.compile(r"\w[\w.-]*(/[\w.-]+)*")
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


def located(name: str, source: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the folder or repository that a name begins with, and where in it the model is.

    Args:
        name: a folder; `owner/name` on the Hub; `owner/name/folder` for a folder in that; or a GGUF file in these. On
            the Hub, `@` and a branch, tag or commit may follow.
        source: how it is read, such as `revision`, which holds where the name has none.

    Returns:
        The folder, or the id on the Hub; and `source` with `subfolder` or `gguf_file`, as `from_pretrained` takes them.

    Raises:
        ValueError: it is a GGUF file, and a package that reads those is not installed.
    """
    source = dict(source)
    here = Path(name).exists() or name.startswith((".", "/", "~"))
    if "@" in name and not here:
        name, _, source["revision"] = name.rpartition("@")

    parts, gguf = Path(name).parts, name.endswith(GGUF)
    for package in ("gguf", "accelerate") if gguf else ():
        check_extra("formats", package, f"The GGUF file {name!r}")
    whole = min(len(parts) if here else 2, len(parts) - gguf)
    inside = "/".join(parts[whole:])
    if not inside:
        return name, source
    source["gguf_file" if gguf else "subfolder"] = inside
    return str(Path(*parts[:whole])), source


def file_in(folder: str, file: str, where: Mapping[str, Any]) -> str | None:
    """Return the path of a file of a folder or repository, downloaded if necessary; None if there is no such file.

    Args:
        folder: folder, or id on the Hub.
        file: name of the file.
        where: `revision` and `subfolder`, if there are any.
    """
    return cached_file(
        folder,
        file,
        **where,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


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
        """Return the config of the base under the adapter, which may bring a classification head, or need no head."""
        if self.task == "FEATURE_EXTRACTION":
            base.architectures = None
        if self.task == "SEQ_CLS" and base.model_type in CLASSIFIERS:
            classes = self._classes()
            if classes:
                base.architectures = [CLASSIFIERS[base.model_type]]
                base.num_labels = classes
        return base

    def brings(self, weight: str) -> bool:
        """Tell whether a weight belongs to a module that the adapter replaces."""
        return not set(weight.split(".")).isdisjoint(self.heads)

    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer beside the adapter, which may have more tokens than the base's."""
        folder, where = self.where
        return file_in(folder, "tokenizer_config.json", where) is not None

    def vocabulary(self) -> int | None:
        """Number of tokens under the adapter, which may bring embeddings of new ones; None: that of the base."""
        for shape in self._shapes_in(EMBEDDINGS):
            if len(shape) == 2:
                return shape[0]
        return None

    def has_outputs(self) -> bool:
        """Whether the adapter brings the layer that predicts tokens."""
        return next(self._shapes_in(OUTPUTS), None) is not None

    def _shapes_in(self, modules: frozenset[str]) -> Iterator[list[int]]:
        """Return the shape of each weight, except biases, of modules with one of these names."""
        for key, shape in self._shapes().items():
            *path, kind = key.split(".")
            if kind == "weight" and not modules.isdisjoint(path):
                yield shape

    def _classes(self) -> int | None:
        """Return the classes of the head: the outputs of its last, and narrowest, layer; None: it has no layer."""
        heads = set(self.heads) - EMBEDDINGS - OUTPUTS
        outputs = []
        for key, shape in self._shapes().items():
            is_matrix = len(shape) > 1
            if is_matrix and not heads.isdisjoint(key.split(".")):
                outputs.append(shape[0])
        return min(outputs, default=None)

    def _shapes(self) -> dict[str, list[int]]:
        """Return the shape of each of the adapter's weights."""
        folder, where = self.where
        shapes = {}
        with refusing(f"The adapter {self.name!r} cannot be read", AGAIN):
            file = cached_file(folder, WEIGHTS, **where)
            with safe_open(file, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118  (not a mapping)
                    shapes[key] = weights.get_slice(key).get_shape()
        return shapes


def adapter_of(name: str, source: Mapping[str, Any]) -> Adapter | None:
    """Return the adapter of this name; None if it is a model.

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
    if "gguf_file" in place:
        return None
    if not Path(folder).is_dir() and not _HUB.fullmatch(folder):
        return None
    file = find_adapter_config_file(folder, **where)
    if file is None:
        return None

    check_extra("formats", "peft", f"The adapter {name!r}")
    with refusing(f"The adapter {name!r} cannot be read"):
        told = dict(json.loads(Path(file).read_text(encoding="utf-8")))
    beside = Path(file).parent
    if any(beside.glob("model*.safetensors")):
        raise UserError(
            f"Expected a model or an adapter in {name!r}, but got both. Move one into a folder of its own."
        )
    base = _base_of(name, beside, told.get("base_model_name_or_path") or "")
    _check_weights(name, folder, where)
    return Adapter(
        name,
        where=(folder, where),
        base=(base, {**source, "revision": told.get("revision")}),
        task=told.get("task_type"),
        heads=told.get("modules_to_save") or [],
    )


def _base_of(name: str, beside: Path, base: str) -> str:
    """Return the base of an adapter as its config names it, or its folder beside the adapter.

    Raises:
        ValueError: there is no such folder, and no repository can have that name.
    """
    if base and Path(base).exists():
        return base
    if base and (beside / base).exists():
        return str(beside / base)
    if _HUB.fullmatch(base):
        return base
    raise UserError(
        f"Expected the base of the adapter {name!r}, but got {base!r}, which is neither a folder here nor a name "
        "on the Hub. Correct base_model_name_or_path in its adapter_config.json."
    )


def _check_weights(name: str, folder: str, where: dict[str, Any]) -> None:
    """Raise if an adapter has its weights in an older file alone: that could run code as it is read."""
    if file_in(folder, WEIGHTS, where) is not None:
        return
    if file_in(folder, OLDER, where) is None:
        raise UserError(
            f"Expected the weights of the adapter {name!r} in {WEIGHTS}, but there is no such file. {AGAIN}"
        )
    raise UserError(
        f"Expected the weights of the adapter {name!r} in {WEIGHTS}, but got {OLDER} only, which is not read because"
        " such files can run code. If you trust it, load it with peft and save it again: "
        "`model.save_pretrained(folder)`."
    )


def brings_tokens(name: str, source: Mapping[str, Any]) -> bool:
    """Tell whether a model of this name is an adapter with its own embeddings."""
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
    conversions = getattr(model, "_weight_conversions", None)
    unfit = _load(model, adapter)
    if unfit:
        raise UserError(
            f"Expected the adapter {adapter.name!r} to fit its base, {adapter.base[0]!r}, but they differ in "
            f"{min(unfit)} and {len(unfit) - 1} other weights. Name the base that it was trained on."
        )
    if merge is None:
        quantised = getattr(model.config, "quantization_config", None) is not None
        merge = model.dtype == torch.float32 and not quantised
    _keep_saved(model)
    if merge:
        _merge(model)
        # by which it is saved
        vars(model).update(
            _hf_peft_config_loaded=False, _weight_conversions=conversions
        )


def _load(model: PreTrainedModel, adapter: Adapter) -> set[str]:
    """Load an adapter into its base, with embeddings for its tokens; return what is missing or fits nowhere."""
    folder, where = adapter.where
    what = f"The adapter {adapter.name!r} cannot be put on {adapter.base[0]!r}"
    with refusing(what, AGAIN):
        resized = _resize(model, adapter)
        info = model.load_adapter(
            folder, adapter_kwargs=where, ignore_mismatched_sizes=True
        )
    unfit = set(info.missing_keys)
    for key, *_ in info.mismatched_keys:
        unfit.add(key)
    for key in info.unexpected_keys:
        # Of a bare encoder no pooler is loaded; and peft writes some modules twice.
        twice = key.endswith((".modules_to_save.weight", ".original_module.weight"))
        if not twice and ".pooler." not in f".{key}":
            unfit.add(key)
    if resized and not _predicts_new_tokens(model, adapter):
        unfit.add("the output embeddings of its new tokens")
    return unfit


def _resize(model: PreTrainedModel, adapter: Adapter) -> bool:
    """Give a base embeddings of as many tokens as its adapter brings; return whether that was necessary."""
    tokens = adapter.vocabulary()
    embeddings: Any = model.get_input_embeddings()
    if tokens is None or tokens == len(embeddings.weight):
        return False
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(tokens, mean_resizing=False)
    return True


def _predicts_new_tokens(model: PreTrainedModel, adapter: Adapter) -> bool:
    """Tell whether a resized base's output layer has weights for the new tokens, or is missing; tie them again."""
    outputs: Any = model.get_output_embeddings()
    if outputs is None:
        return True
    if adapter.has_outputs():
        model.config.tie_word_embeddings = False  # they were kept apart
        return True
    if not model.config.tie_word_embeddings:
        return False
    outputs.weight = _inner(model.get_input_embeddings()).weight
    return True


def _inner(part: Any) -> Any:
    """Return the layer that an adapter has wrapped or replaced."""
    saved = getattr(part, "modules_to_save", None)
    if saved is not None:
        part = saved["default"]
    return getattr(part, "base_layer", part)


def _keep_saved(model: PreTrainedModel) -> None:
    """Keep the modules that an adapter brings; peft keeps the original ones, too."""
    from peft.utils import ModulesToSaveWrapper  # an extra: only adapters need it

    for path, part in list(model.named_modules()):
        if isinstance(part, ModulesToSaveWrapper):
            model.set_submodule(path, part.modules_to_save["default"])


def _merge(model: PreTrainedModel) -> None:
    """Add the weights of an adapter to those of its base, and forget the adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # an extra, likewise

    for path, part in list(model.named_modules()):
        if not isinstance(part, BaseTunerLayer):
            continue
        base: Any = part.get_base_layer()
        # a weight of its own: another layer may share this one
        base.weight = nn.Parameter(base.weight.detach().clone())
        part.merge()
        model.set_submodule(path, base)
        if base in (model.get_input_embeddings(), model.get_output_embeddings()):
            model.config.tie_word_embeddings = False
    del model.requires_grad_(True).peft_config


def share_weights(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model share another's weights where they are equal, if one of them is under an unmerged adapter."""
    if not hasattr(model, "peft_config") and not hasattr(other, "peft_config"):
        return
    theirs = {}
    for name, weight in other.named_parameters():
        theirs[name.replace(_WRAPPED, ".")] = weight
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        same = theirs.get(name.replace(_WRAPPED, "."))
        if same is not None and _are_equal(same, weight):
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, same)


def _are_equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Tell whether two plain weights have the same type and values."""
    if type(one) is not nn.Parameter or type(other) is not nn.Parameter:
        return False
    return one.dtype == other.dtype and torch.equal(one, other)
