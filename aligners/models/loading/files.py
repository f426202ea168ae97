"""Reads the parts of a pretrained model from the Hub or a folder, with errors that say what is wrong with them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS
from transformers.utils import logging
from transformers.utils.quantization_config import GgufConfig

from aligners.errors import UserError
from aligners.models.architectures import register_solu
from aligners.models.loading.adapters import adapter_of, put_on
from aligners.models.loading.named import GGUF, located, refusing


def weight_options(dtype: str | torch.dtype, attn_implementation: str | None) -> dict[str, Any]:
    """How weights are loaded and run, as `from_pretrained` takes it: None there would be a wish of its own.

    Raises:
        ValueError: there is no such floating-point type.
    """
    resolved = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise UserError(f"Expected `dtype` to be float32, bfloat16 or float16, but got {dtype!r}.")
    options = {"dtype": resolved, "attn_implementation": attn_implementation}
    return {name: value for name, value in options.items() if value is not None}


def read_config(name: str, source: dict[str, Any]) -> PreTrainedConfig:
    """The config of a model.

    Args:
        name: Hub id or folder.
        source: `revision` and `trust_remote_code`.

    Raises:
        ValueError: there is no such model, or its config cannot be read.
    """
    register_solu()  # a config may name it
    adapter = adapter_of(name, source)
    if adapter is not None:
        with refusing(f"The base of the adapter {name!r}, {adapter.base[0]!r}, cannot be read"):
            return adapter.config(read_config(*adapter.base))
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        files = sorted(map(str, Path(name).glob(f"*{GGUF}")))
        instead = f"Name one of its files: {listed(files)}." if files else "Name another one, or save it again."
        raise UserError(
            f"Expected a model folder as `save_pretrained` writes it, but got {name!r}, which has no "
            f"config.json: it is not a model, or is incomplete. {instead}"
        )
    place, where = located(name, source)
    expected = "Expected `name` to be a local model folder or a model on the Hub that can be reached, but got"
    with refusing(f"{expected} {name!r}"):
        config = AutoConfig.from_pretrained(place, **where)
    if "gguf_file" in where and config.model_type in LANGUAGE_MODELS:  # the file names no class
        config.architectures = [LANGUAGE_MODELS[config.model_type]]
    return config


def read_weights(name: str, loader: Any, options: dict[str, Any]) -> tuple[PreTrainedModel, list[str]]:
    """Load a model, and list its weights that are random: missing from the checkpoint, or of another shape there.

    Args:
        name: Hub id or folder.
        loader: a class of `transformers` with `from_pretrained`.
        options: for `from_pretrained`; and `merge_adapters`, as `load_frozen` takes it.

    Raises:
        ValueError: the files cannot be read, or an adapter does not fit its base.
    """
    adapter = adapter_of(name, options)
    if adapter is not None:
        base, under = adapter.base
        model, unfit = read_weights(base, loader, {**options, **under})
        put_on(model, adapter, options.get("merge_adapters"))
        return model, [key for key in unfit if not adapter.brings(key)]
    place, where = located(name, {key: value for key, value in options.items() if key != "merge_adapters"})
    if "gguf_file" in where:  # by default it depends on the machine whether weights stay packed
        where["quantization_config"] = GgufConfig(dequantize=True)
    advice = "If a file of it is missing, damaged or incomplete, download or save the model again."
    with refusing(f"The model {name!r} cannot be loaded", advice):
        # Weights of another shape pass here, and are then refused by name together with the missing ones.
        model, info = loader.from_pretrained(place, output_loading_info=True, ignore_mismatched_sizes=True, **where)
    return model, sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})


def read_tokenizer(name: str, source: dict[str, Any], config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a model.

    Args:
        name: Hub id or folder.
        source: `revision` and `trust_remote_code`.
        config: of the model.

    Raises:
        ValueError: there is no tokenizer, it has no vocabulary, or a larger one than the model's.
    """
    adapter = adapter_of(name, source)
    if adapter is not None and not adapter.has_tokenizer():
        return read_tokenizer(*adapter.base, config)
    place, where = located(name, source)
    expected = f"Expected a tokenizer beside the model {name!r}, but got"
    advice = "Save one, or pass `tokenizer=False` to work on token ids."
    with refusing(f"{expected} none that can be read", advice):
        tokenizer = AutoTokenizer.from_pretrained(place, **where)
    # Without any vocabulary file transformers makes one up out of the special tokens.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise UserError(f"{expected} one without a vocabulary. {advice}")
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"Expected a tokenizer of at most {config.vocab_size} tokens, the vocabulary of {name!r}, "
            f"but got one of {len(tokenizer)}: it belongs to another model. Save the model's own beside it."
        )
    return tokenizer


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few names, and how many more there are, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and loading report; callers raise what matters in them."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model and its tokenizer into a folder, as `load_frozen` reads them."""
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
