"""The identity of a model: its weights, and what else decides what it computes; cautions on code that was not run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# name, revision, fingerprint; settings and attention, which earlier versions did not keep
Identity = Mapping[str, Any]

# What a config says that no state of a frozen model depends on.
BESIDE = (
    # names and versions
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "tokenizer_class",
    "_attn_implementation_autoset",
    "attn_implementation",
    "_attn_implementation",
    # what a head's answers are called, and what else comes with them
    "id2label",
    "label2id",
    "problem_type",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torchscript",
    # how texts are generated
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "forced_eos_token_id",
    # how a model is trained
    "initializer_range",
    "initializer_factor",
    "task_specific_params",
    "finetuning_task",
    "tie_word_embeddings",
    "chunk_size_feed_forward",
    "gradient_checkpointing",
)

# What loads a model with a head for each task, as the files of a model name it.
LOADERS = {
    "classification": "AutoModelForSequenceClassification",
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
}
DYNAMIC = "transformers_modules"  # the package that such code is imported into

DECIDING = ("fingerprint", "settings", "code")


def deciding(identity: Identity) -> dict[str, Any]:
    """Return the part of an identity that decides what the model computes."""
    return {name: identity[name] for name in DECIDING if name in identity}


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a config that its model's states depend on, as JSON stores them."""
    settings = _without_names(config.to_dict())
    return json.loads(json.dumps(settings, sort_keys=True, default=str))


def code_of(model: PreTrainedModel) -> str | None:
    """Hash the code of a model that is not of transformers; None if it is, or if its code is missing."""
    module = inspect.getmodule(type(model))
    if module is None or module.__name__.startswith("transformers."):
        return None
    try:
        source = inspect.getsource(module)
    except OSError:
        return None
    return blake2b(source.encode(), digest_size=16).hexdigest()


def implementation_of(model: PreTrainedModel) -> str | None:
    """Return the implementation of attention that a model uses, such as `sdpa`."""
    config: Any = model.base_model.config
    return config._attn_implementation


def preferred_implementation(model: PreTrainedModel) -> str:
    """Return the implementation of attention that transformers chooses for a model by default."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def differing(then: Identity, now: Identity) -> list[str]:
    """Return what differs between two models, as far as both identities record it; empty if they are the same.

    Names and revisions may differ, as those of a folder that has moved; attention implementations round differently.
    """
    if then.get("fingerprint") != now.get("fingerprint"):
        return ["it has other weights"]
    changed = _changed(then.get("settings", {}), now.get("settings", {}), "")
    if "code" in then and "code" in now and then["code"] != now["code"]:
        changed.append("it has other code")
    return changed


def listed_change(then: Identity, now: Identity) -> str:
    """Describe a change of model, by name, weights, and whatever else has changed."""
    said = f"{_named(then)} and is {_named(now)}"
    if then["fingerprint"] != now["fingerprint"]:
        return said
    changed = ", ".join(differing(then, now)[:4])
    return f"{said}, whose weights are the same, but {changed}"


def _named(identity: Identity) -> str:
    """The name of a model and the first letters of its fingerprint."""
    return f"{identity['name']} (fingerprint {str(identity['fingerprint'])[:12]})"


def same_model(a: Identity, b: Identity) -> bool:
    """Whether two identities are those of one model."""
    return not differing(a, b)


def same_models(some: Sequence[Identity], others: Sequence[Identity]) -> bool:
    """Whether two lists name the same models in the same order."""
    return len(some) == len(others) and all(map(same_model, some, others))


def _without_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, with the configs in it, without entries that no state depends on."""
    kept = {}
    for name, value in config.items():
        if name in BESIDE or "drop" in name:  # dropout is off
            continue
        kept[name] = _without_names(value) if isinstance(value, Mapping) else value
    return kept


def _changed(then: Any, now: Any, name: str) -> list[str]:
    """Return the settings that differ, among those that both have: other versions of transformers know others."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        changed = []
        for key in then:
            if key in now:
                changed += _changed(then[key], now[key], f"{name}.{key}".lstrip("."))
        return changed
    if then == now:
        return []
    return [f"its {name} was {json.dumps(then)} and is {json.dumps(now)}"]


def code_not_run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str
) -> list[str]:
    """Return cautions about classes that a model's files name, where other classes were loaded instead.

    Args:
        model: as it was loaded.
        tokenizer: likewise.
        name: name of the model, for the sentences.

    Returns:
        At most one sentence.
    """
    # The import is here because maps, which name models, are read without transformers.
    from aligners.models.architectures import architecture_of

    config = model.config
    of_model: Mapping[str, Any] = getattr(config, "auto_map", None) or {}
    of_tokenizer: Mapping[str, Any] = {}
    if tokenizer is not None:
        of_tokenizer = tokenizer.init_kwargs.get("auto_map") or {}
    task = architecture_of(config.model_type).task(type(model).__name__, config)
    loader = LOADERS.get(str(task), "AutoModel")
    of_words = of_tokenizer.get("AutoTokenizer") or of_model.get("AutoTokenizer")

    missed = _missed("model", of_model.get(loader), model)
    missed += _missed("config", of_model.get("AutoConfig"), config)
    missed += _missed("tokenizer", of_words, tokenizer)
    if not missed:
        return []
    return [
        f"Caution: the files of {name} name code of their own that was not run: {'; '.join(missed)}. What was loaded "
        "may be another model. If you trust that code, set `data.trust_remote_code` to true, or load it yourself."
    ]


def _missed(what: str, code: Any, loaded: object) -> list[str]:
    """Say which class an entry of `auto_map` names, if another was loaded; it may name a slow and a fast one."""
    if isinstance(code, (list, tuple)):
        code = next(filter(None, reversed(code)), None)
    if code is None or loaded is None or _is_own(loaded):
        return []
    taken = type(loaded).__name__
    return [f"{code} for its {what}, where {taken} of transformers was taken"]


def _is_own(loaded: object) -> bool:
    """Tell whether an object's class, or one that it builds on, is such code."""
    packages = {kind.__module__.partition(".")[0] for kind in type(loaded).__mro__}
    return DYNAMIC in packages
