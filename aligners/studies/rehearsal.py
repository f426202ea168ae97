"""A rehearsal: a study with few texts and steps, and small random models in place of those of the Hub."""

import math
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertForSequenceClassification,
)

from aligners.datamodules.rows.sites import NORM
from aligners.datamodules.text.annotated.grammar import sentences
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.models.loading.model_files import quiet, read_config, save_model
from aligners.models.recipes import EMBEDDED
from aligners.models.tokenizers import byte_pairs
from aligners.studies.cells import merged
from aligners.studies.spec import Models, Study, base_of, read_study

REHEARSAL, NOTES = "rehearsal", "rehearsal.txt"
MEANINGLESS = "This was a rehearsal, with tiny models and few texts and steps: none of its numbers is a result."
LIMIT = 60  # texts of a split, and steps of a training
SEEDS = 3  # of the models that differ in their seeds, and pairs of those that are given
TRAINED = ("finetune", "fit", "stitch", "attention", "recover")  # with limited steps
STAND_IN = "grammar"  # the source that takes the place of texts that cannot be read
VOCABULARY, LONGEST = 600, 1024  # tokens that a stand-in knows, and tokens of a text
BERT = BertConfig, BertForMaskedLM, BertForSequenceClassification
NORMED_BERT = (
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertForSequenceClassification,
)
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "initializer_range": 0.25,  # at the usual 0.02 a model of this width would hardly move its states
}


def rehearsed(plain: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Cut a study down, and write stand-ins for models that are not on this machine.

    Args:
        plain: content of the study file, with all defaults.
        folder: folder of the rehearsal.

    Returns:
        Content of the rehearsal's study file, and what was replaced and cut, in lines.
    """
    plain = deepcopy(plain)
    study = read_study(plain)
    names = _kept_models(study)
    plain["models"] |= {"names": names, "seeds": None}
    for option in ("groups", "bases"):
        groups = plain["models"][option]
        if isinstance(groups, dict):
            plain["models"][option] = _kept_groups(groups, names)
    plain["pairs"] |= _kept_pairs(study, len(names))
    for kind in TRAINED:
        if plain[kind] is not None:
            steps = {"trainer": {"max_steps": LIMIT}}
            plain[kind]["options"] = merged(plain[kind]["options"], steps)
    plain["name"] = f"{plain['name']}-{REHEARSAL}"

    lines = [
        MEANINGLESS,
        f"At most {LIMIT} texts of each split, {LIMIT} steps and {SEEDS} seeds.",
    ]
    for options in _dicts(plain):
        lines += _cut_options(options)
    paths = _put_models(names, folder / "models", _layers_named(plain))
    for name in paths:
        lines.append(f"{name}: a random BERT of width {SMALL['hidden_size']}")
    return _renamed(plain, paths), list(dict.fromkeys(lines))


def _kept_models(study: Study) -> list[str]:
    """Return the models of the first given pairs, or the first seeds of each name."""
    names = study.models.listed()
    seeds = study.models.seeds
    if study.pairs.given is not None:
        kept: set[str] = set()
        for pair in study.pairs.given[:SEEDS]:
            kept.update(base_of(name, names) for name in pair)
        return [name for name in names if name in kept]
    if seeds is None:
        return names
    first = list(range(seeds)) if isinstance(seeds, int) else seeds
    return Models(study.models.names, first[:SEEDS]).listed()


def _kept_groups(
    groups: dict[str, list[str]], names: list[str]
) -> dict[str, list[str]]:
    """Return the groups of the models that are kept."""
    kept = {}
    for group, members in groups.items():
        there = [name for name in members if name in names]
        if there:
            kept[group] = there
    return kept


def _kept_pairs(study: Study, models: int) -> dict[str, Any]:
    """Return what a rehearsal changes in the options of the pairs."""
    changes: dict[str, Any] = {}
    pairs = study.pairs
    if pairs.given is not None:
        changes["given"] = pairs.given[:SEEDS]
    if pairs.random is not None:
        changes["random"] = min(pairs.random, math.comb(models, 2))
    return changes


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every dictionary within plain values, at any depth."""
    if isinstance(value, dict):
        yield value
        for part in list(value.values()):
            yield from _dicts(part)


def _cut_options(options: dict[str, Any]) -> list[str]:
    """Limit the texts and the steps in some options; return lines that say what was replaced."""
    for name in ("warmup", "val_check_interval"):
        if isinstance(options.get(name), int):
            options[name] = min(options[name], LIMIT // 2)
    text = options.get("text")
    if not isinstance(text, dict):
        return []
    for name in ("max_texts", "max_held_out"):
        text[name] = min(text.get(name) or LIMIT, LIMIT)
    if "source" not in text:
        return []
    try:
        load_texts(TextSource(**text))
    except (OSError, ValueError):
        options.pop("labels", None)
        limits = {"max_texts": LIMIT, "max_held_out": LIMIT}
        options["text"] = {"source": STAND_IN, **limits}
        return [f"{text['source']}: the source {STAND_IN}, as it cannot be read"]
    return []


def _layers_named(plain: dict[str, Any]) -> set[str]:
    """Return the words that name sites and layers anywhere in a study."""
    words: set[str] = set()
    for options in _dicts(plain):
        for option in ("sites", "layers"):
            written = str(options.get(option, ""))
            words.update(re.findall(r"\w+", written))
    return words


def _put_models(
    names: list[str], folder: Path, layers_named: set[str]
) -> dict[str, str]:
    """Write a model for each that is not on this machine; their folders."""
    paths = {}
    for name in names:
        if not name.startswith(EMBEDDED) and not Path(name).exists():
            place = _put_model(name, folder / name, layers_named)
            paths[name] = str(place.resolve())
    return paths


def _put_model(name: str, folder: Path, layers_named: set[str]) -> Path:
    """Write a small random BERT with as many blocks as a model has, if its config can be read; its folder.

    Where the site after a final norm is named, it is a Megatron-BERT, which has one.
    """
    if folder.is_dir():
        return folder
    texts = [sentence.text for sentence in sentences(4 * LIMIT)]
    tokenizer = byte_pairs(texts, VOCABULARY, LONGEST)
    try:
        real = read_config(name, {"revision": None, "trust_remote_code": False})
    except ValueError:
        real = BertConfig()
    layers = real.get_text_config().num_hidden_layers
    kinds: Sequence[Any] = BERT
    if not layers_named.isdisjoint((NORM, str(layers + 1))):
        kinds = NORMED_BERT
    make_config, kind, classifier = kinds
    config = make_config(
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        max_position_embeddings=LONGEST,
        pad_token_id=tokenizer.pad_token_id,
        **SMALL,
    )
    architectures = real.architectures or [""]
    if "Classification" in architectures[0]:
        kind = classifier
        config.id2label = real.id2label
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()))
        save_model(folder, kind(config), tokenizer)
    return folder


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Replace some names in plain values, also where they are keys."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [_renamed(part, names) for part in value]
    if isinstance(value, dict):
        renamed = {}
        for key, part in value.items():
            renamed[names.get(key, key)] = _renamed(part, names)
        return renamed
    return value
