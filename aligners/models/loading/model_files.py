"""Reads the parts of a pretrained model from the Hub or a folder; its errors say what is wrong with them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LANGUAGE_MODELS,
)
from transformers.utils import logging
from transformers.utils.quantization_config import GgufConfig

from aligners.errors import UserError
from aligners.files.sealed import WEIGHTS, WORDS, check_model, seal_model
from aligners.files.user_files import refusing
from aligners.models.architectures import register_solu
from aligners.models.loading.adapters import (
    GGUF,
    Adapter,
    adapter_of,
    file_in,
    located,
    put_on,
)

AGAIN = "If a file of it is missing, damaged or incomplete, download or save the model again."


def weight_options(
    dtype: str | torch.dtype, attn_implementation: str | None
) -> dict[str, Any]:
    """Return the options of `from_pretrained` for weights; it does not accept None in place of a default.

    Raises:
        ValueError: there is no such floating-point type.
    """
    resolved = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise UserError(
            f"Expected `dtype` to be float32, bfloat16 or float16, but got {dtype!r}."
        )
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
        return _config_under(adapter)
    _check_folder(Path(name))
    place, where = located(name, source)
    with refusing(*_unreadable(name)):
        config = AutoConfig.from_pretrained(place, **where)
    _check_sizes(name, config)
    if "gguf_file" in where and config.model_type in LANGUAGE_MODELS:
        # the file names no class
        config.architectures = [LANGUAGE_MODELS[config.model_type]]
    return config


def _config_under(adapter: Adapter) -> PreTrainedConfig:
    """Return the config of an adapter's base, as the adapter needs it."""
    base, source = adapter.base
    try:
        return adapter.config(read_config(base, source))
    except UserError as error:
        raise UserError(
            f"The base of the adapter {adapter.name!r}, {base!r}, cannot be read. {error}"
        ) from error


def _check_folder(folder: Path) -> None:
    """Raise if a folder has no config."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    instead = "Name another one, or save it again."
    files = sorted(map(str, folder.glob(f"*{GGUF}")))
    if files:
        instead = f"Name one of its files: {listed(files)}."
    raise UserError(
        f"Expected a model folder as `save_pretrained` writes it, but got {str(folder)!r}, which has no "
        f"config.json: it is not a model, or is incomplete. {instead}"
    )


def _unreadable(name: str) -> tuple[str, str]:
    """Return the error for a model whose config cannot be read, with what to do."""
    if not Path(name).exists():
        return (
            f"Expected `name` to be a local model folder or a model on the Hub that can be reached, but got {name!r}",
            "",
        )
    if name.endswith(GGUF):
        return (
            f"The GGUF file {name!r} is incomplete or damaged, or is none",
            "Download it again.",
        )
    return (
        f"The config.json of the model {name!r} cannot be read",
        "Download or save the model again.",
    )


def _check_sizes(name: str, config: PreTrainedConfig) -> None:
    """Raise unless the sizes that a config has are those of a model."""
    text = config.get_text_config()
    for size in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        value = getattr(text, size, None)
        if isinstance(value, int) and value < 1:
            raise UserError(
                f"Expected `{size}` to be at least 1 in the config.json of the model {name!r}, but got {value}. "
                "Download or save the model again."
            )


def _check_kinds(name: str, place: str, where: dict[str, Any]) -> None:
    """Raise if weights are stored as whole numbers, which transformers would round to: most of them to 0."""
    config = where.get("config")
    if "gguf_file" in where or getattr(config, "quantization_config", None) is not None:
        return
    options = {key: where[key] for key in ("revision", "subfolder") if where.get(key)}
    file = file_in(place, "model.safetensors", options)
    if file is None:
        return
    whole = {}
    with refusing(f"The model {name!r} cannot be loaded", AGAIN):  # noqa: SIM117
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118  (not a mapping)
                kind = stored.get_slice(key).get_dtype()
                if key.endswith("weight") and kind.startswith(("I", "U", "BOOL")):
                    whole[key] = kind
    if whole:
        raise UserError(
            f"Expected floating-point weights in the model {name!r}, but {listed(list(whole))} are stored as "
            f"{next(iter(whole.values()))}. Save the model in float32, float16 or bfloat16."
        )


def read_weights(
    name: str, loader: Any, options: dict[str, Any]
) -> tuple[PreTrainedModel, list[str]]:
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
    if Path(name).is_dir():
        check_model(Path(name), WEIGHTS)
    place, where = located(name, options)
    where.pop("merge_adapters", None)
    what = f"The model {name!r} cannot be loaded"
    if "gguf_file" in where:
        what = _unreadable(name)[0]
        # by default it depends on the machine whether weights stay packed
        where["quantization_config"] = GgufConfig(dequantize=True)
    _check_kinds(name, place, where)
    with refusing(what, AGAIN):
        # Weights of another shape pass here, and are then refused by name together with the missing ones.
        model, info = loader.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **where
        )
    random = set(info["missing_keys"])
    for key, *_ in info["mismatched_keys"]:
        random.add(key)
    return model, sorted(random)


def read_tokenizer(
    name: str, source: dict[str, Any], config: PreTrainedConfig
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a model.

    Args:
        name: Hub id or folder.
        source: `revision` and `trust_remote_code`.
        config: configuration of the model.

    Raises:
        ValueError: there is no tokenizer, or it has no vocabulary. It may know tokens that the model does not: texts
            that have one are refused as they are read.
    """
    adapter = adapter_of(name, source)
    if adapter is not None and not adapter.has_tokenizer():
        return read_tokenizer(*adapter.base, config)
    if Path(name).is_dir():
        check_model(Path(name), WORDS)
    place, where = located(name, source)
    expected = f"Expected a tokenizer beside the model {name!r}, but got"
    advice = "Save the one that the model was trained with beside it: `tokenizer.save_pretrained(folder)`."
    with refusing(f"{expected} none that can be read", advice):
        tokenizer = AutoTokenizer.from_pretrained(place, **where)
    # Without any vocabulary file transformers makes one up out of the special tokens.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise UserError(f"{expected} one without a vocabulary. {advice}")
    size = config.get_text_config().vocab_size
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= size:
        # the model has no embedding for it: any token does where nothing is looked at
        tokenizer.pad_token = None
    return tokenizer


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are, for a message."""
    said = ", ".join(names[:most])
    if len(names) > most:
        said += f" and {len(names) - most} more"
    return said


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


def save_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a model and its tokenizer into a folder, as `load_frozen` reads them."""
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    seal_model(folder)
