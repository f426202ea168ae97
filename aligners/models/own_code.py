"""Code of its own that a model's files name, and that was not run: without it, the model may be another one."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.models.architectures import architecture_of

# What loads a model with a head for each task, as the files of a model name it.
LOADERS = {
    "classification": "AutoModelForSequenceClassification",
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
}
DYNAMIC = "transformers_modules"  # the package that such code is imported into


def code_not_run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str
) -> list[str]:
    """Cautions about classes that the files of a model name for what was loaded, where others were loaded instead.

    Args:
        model: as it was loaded.
        tokenizer: likewise.
        name: of the model, for the sentences.

    Returns:
        At most one sentence.
    """
    config = model.config
    of_model: Mapping[str, Any] = getattr(config, "auto_map", None) or {}
    of_tokenizer = (
        (tokenizer.init_kwargs.get("auto_map") or {}) if tokenizer is not None else {}
    )
    task = architecture_of(config.model_type).task(type(model).__name__, config)
    loader = LOADERS.get(str(task), "AutoModel")
    parts = (
        ("model", of_model.get(loader), model),
        ("config", of_model.get("AutoConfig"), config),
        (
            "tokenizer",
            of_tokenizer.get("AutoTokenizer") or of_model.get("AutoTokenizer"),
            tokenizer,
        ),
    )
    missed = []
    for what, code, loaded in parts:
        named = _class_of(code)
        if named is not None and loaded is not None and not _is_own(loaded):
            missed.append(
                f"{named} for its {what}, where {type(loaded).__name__} of transformers was taken"
            )
    if not missed:
        return []
    return [
        f"Caution: the files of {name} name code of their own that was not run: {'; '.join(missed)}. What was loaded "
        "may be another model. If you trust that code, set `data.trust_remote_code` to true, or load it yourself."
    ]


def _class_of(code: Any) -> str | None:
    """The class that an entry of `auto_map` names, or one of a slow and a fast one; None: none."""
    if isinstance(code, (list, tuple)):
        code = next(filter(None, reversed(code)), None)
    return None if code is None else str(code)


def _is_own(loaded: object) -> bool:
    """Whether the class of an object, or one that it builds on, is such code."""
    return any(
        kind.__module__.split(".")[0] == DYNAMIC for kind in type(loaded).__mro__
    )
