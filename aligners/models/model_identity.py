"""Which model a model is: its weights, and what else decides what it computes from a text."""

import inspect
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

Identity = Mapping[
    str, Any
]  # name, revision, fingerprint; settings and attention, which earlier versions did not keep

# What a config says that no state of a frozen model depends on: names and versions, what a head's answers are called,
# how texts are generated, and how a model is trained.
BESIDE = (
    *(
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "architectures",
        "id2label",
        "label2id",
    ),
    *(
        "problem_type",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
    ),
    *(
        "bos_token_id",
        "eos_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "forced_eos_token_id",
    ),
    *(
        "initializer_range",
        "initializer_factor",
        "task_specific_params",
        "finetuning_task",
        "tie_word_embeddings",
    ),
    *(
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "tokenizer_class",
        "_attn_implementation_autoset",
    ),
    *("attn_implementation", "_attn_implementation"),
)


DECIDING = ("fingerprint", "settings", "code")


def deciding(identity: Identity) -> dict[str, Any]:
    """The part of an identity that decides what the model computes."""
    return {name: identity[name] for name in DECIDING if name in identity}


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What a config says that its model's states depend on, as JSON gives it back."""
    return json.loads(
        json.dumps(_without_names(config.to_dict()), sort_keys=True, default=str)
    )


def code_of(model: PreTrainedModel) -> str | None:
    """A hash of the code of a model that is not of transformers; None: it is, or its code is not there."""
    module = inspect.getmodule(type(model))
    if module is None or module.__name__.startswith("transformers."):
        return None
    try:
        return blake2b(inspect.getsource(module).encode(), digest_size=16).hexdigest()
    except OSError:
        return None


def implementation_of(model: PreTrainedModel) -> str | None:
    """The implementation of attention that a model uses, such as `sdpa`."""
    config: Any = model.base_model.config
    return config._attn_implementation


def preferred_implementation(model: PreTrainedModel) -> str:
    """The implementation of attention that transformers chooses for a model where nothing is said."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def differing(then: Identity, now: Identity) -> list[str]:
    """What differs between two models, as far as both identities say it: empty where they are one.

    Names and revisions may differ, as those of a folder that has moved; attention implementations round differently.
    """
    if then.get("fingerprint") != now.get("fingerprint"):
        return ["it has other weights"]
    changed = _changed(then.get("settings", {}), now.get("settings", {}), "")
    if "code" in then and "code" in now and then["code"] != now["code"]:
        changed.append("it has other code")
    return changed


def listed_change(then: Identity, now: Identity) -> str:
    """Say which model was there and which is now, by name, weights, and what else has changed."""
    changed = differing(then, now)
    said = f"{then['name']} (fingerprint {str(then['fingerprint'])[:12]}) and is "
    said += f"{now['name']} (fingerprint {str(now['fingerprint'])[:12]})"
    if then["fingerprint"] != now["fingerprint"]:
        return said
    return f"{said}, whose weights are the same, but {', '.join(changed[:4])}"


def same_model(a: Identity, b: Identity) -> bool:
    """Whether two identities are those of one model."""
    return not differing(a, b)


def same_models(some: Sequence[Identity], others: Sequence[Identity]) -> bool:
    """Whether two lists name the same models in the same order."""
    return len(some) == len(others) and all(map(same_model, some, others))


def _without_names(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in config.items():
        if name in BESIDE or "drop" in name:  # dropout is off
            continue
        kept[name] = _without_names(value) if isinstance(value, Mapping) else value
    return kept


def _changed(then: Any, now: Any, name: str) -> list[str]:
    """The settings that differ, of those that both have: other versions of transformers know others."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        changed = []
        for key in then:
            if key in now:
                changed += _changed(then[key], now[key], f"{name}.{key}".lstrip("."))
        return changed
    return (
        []
        if then == now
        else [f"its {name} was {json.dumps(then)} and is {json.dumps(now)}"]
    )
