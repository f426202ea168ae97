"""Random models of the families of those that they stand in for, with tokenizers of their families."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
import transformers
from huggingface_hub.file_download import repo_folder_name
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from aligners.models.architectures import FAMILIES
from aligners.models.loading.files import quiet, read_config, save_model
from aligners.models.loading.named import located
from aligners.models.tokenizers import byte_pairs

COMMIT = "0" * 40  # by which the cache of the Hub knows the files
VOCABULARY, LONGEST = 600, 128  # pieces of a tokenizer; tokens of a text
BLOCKS, WIDTH, STEP = 3, 384, 8  # a stand-in has a third of the blocks, and 8 of every 384 components
SOURCE = {"revision": None, "trust_remote_code": False}


class About(NamedTuple):
    """What is known of a model.

    Attributes:
        family: the `model_type` of its config.
        architecture: the class that its config names.
        layers: blocks.
        width: of its states.
        labels: names of its classes; none: those of its class.
        assumed: what of it was guessed, in words; empty: nothing.
    """

    family: str
    architecture: str
    layers: int
    width: int
    labels: Sequence[str] = ()
    assumed: str = ""


def about_model(name: str, known: Mapping[str, Mapping[str, Any]]) -> About:
    """What is known of a model: by its config, by the begin of its name, or else by a family in its name.

    Args:
        name: Hub id or folder.
        known: begin of a name -> attributes of `About`.
    """
    try:
        config: Any = read_config(name, SOURCE)
        sizes = config.get_text_config()
        labels = list(config.id2label.values()) if "Classification" in config.architectures[0] else ()
        return About(config.model_type, config.architectures[0], sizes.num_hidden_layers, sizes.hidden_size, labels)
    except (ValueError, TypeError):  # it cannot be reached, or names no class
        begins = [begin for begin in known if name.startswith(begin)]
    if begins:
        return About(**known[max(begins, key=len)])
    plain = name.lower().replace("_", "-")
    family = next(
        (family for family in sorted(FAMILIES, key=len, reverse=True) if family.replace("_", "-") in plain), "bert"
    )
    model: Any = transformers.MODEL_MAPPING[CONFIG_MAPPING[family]]
    return About(family, model.__name__, 12, 768, (), f"family {family}, no head, 12 blocks of width 768")


def put_model(
    hub: Path, name: str, about: About, texts: Sequence[str], settings: Mapping[str, Any], least_layers: int
) -> PreTrainedConfig:
    """Write a random model where `from_pretrained` finds it without a network.

    Args:
        hub: what HF_HUB_CACHE will name.
        name: its id on the Hub.
        about: what is known of it.
        texts: from which its tokenizer learns, if it cannot be reached.
        settings: of its config.
        least_layers: blocks that it needs.

    Returns:
        Its config.
    """
    repository, where = located(name, {})
    place = hub / repo_folder_name(repo_id=repository, repo_type="model")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()))
        tokenizer = _tokenizer(name, about.family, texts)
        kind: Any = CONFIG_MAPPING[about.family]
        given: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": STEP * max(2, round(about.width / WIDTH)),
            "num_hidden_layers": max(least_layers, about.layers // BLOCKS),
            "id2label": dict(enumerate(about.labels)) or None,
            **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "bos", "eos")},
            **settings,
        }
        config = kind(**{kind.attribute_map.get(name, name): n for name, n in given.items() if n is not None})
        save_model(
            place / "snapshots" / COMMIT / where.get("subfolder", ""),
            getattr(transformers, about.architecture)(config),
            tokenizer,
        )
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(COMMIT)
    return config


def _tokenizer(name: str, family: str, texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """The model's own tokenizer; if it cannot be reached, one that its family shares."""
    try:
        return AutoTokenizer.from_pretrained(name, **SOURCE)
    except (OSError, ValueError):
        return _learned_tokenizer(family, tuple(texts))


@cache
def _learned_tokenizer(family: str, texts: tuple[str, ...]) -> PreTrainedTokenizerBase:
    """A tokenizer of the family's class that learns from texts; of byte-level pieces, if the family has none."""
    named = TOKENIZER_MAPPING_NAMES.get(family)
    kind = tokenizer_class_from_name(named) if named and named != "TokenizersBackend" else None
    if kind is None:
        return byte_pairs(list(texts), VOCABULARY, LONGEST)
    empty = kind()
    empty.init_kwargs["model_max_length"] = LONGEST
    return empty.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
