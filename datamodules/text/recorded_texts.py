"""Groups of recorded rows in place of texts: divided as texts are, by a keyed hash of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.splitting import RawTexts, divide
from aligners.datamodules.text.texts import Texts
from aligners.errors import UserError
from aligners.models.recorded.source_names import check_command, is_recorded

DIVIDING = ("validation_share", "test_share", "max_texts", "max_held_out", "seed")
# Options that need a model or its texts, by their dotted names -> the defaults, which may be given.
OF_MODELS = {
    "data.packed": False,
    "data.component": "residual",
    "data.labels": None,
    "data.attention": False,
    "generate": 0,
    "other_text": None,
    "masked_share": 0.15,
    "source_pooler": False,
    "kl": False,
}
# Options that say how a model reads and is run, or how what it computes is kept -> the values that recorded states
# take: the default, and what comes to the same.
OF_READING: dict[str, tuple[Any, ...]] = {
    "max_length": (128,),
    "dtype": ("float32",),
    "attn_implementation": (None,),
    "merge_adapters": (None,),
    "device_map": (None,),
    "store_dtype": (None,),
    "store_rows": ("tokens",),
    "held_out_types": (0.1, 0),
}


def check_options(
    kind: str | None, names: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Raise if a command on recorded states would run a model, or has options that need one or its texts.

    Args:
        kind: kind of the command.
        names: names of its models.
        options: of the command, one within the other, with defaults or without.

    Raises:
        ValueError: as `check_command`; or naming the first option.
    """
    check_command(kind, names)
    recorded = [name for name in names if is_recorded(name)]
    if not recorded:
        return
    for option, default in OF_MODELS.items():
        given = _given(options, option, default)
        if given != default:
            raise _of_no_model(option, given, recorded[0])
    for option, taken in OF_READING.items():
        dotted = f"data.{option}"
        given = _given(options, dotted, taken[0])
        if given not in taken:
            raise _of_no_model(dotted, given, recorded[0])
    for name, default in _of_texts().items():
        given = _given(options, f"data.text.{name}", default)
        if given != default:
            raise _of_no_text(f"data.text.{name}", given, recorded[0])


def check_reading(
    named: Sequence[tuple[str, str | None]], options: Mapping[str, Any]
) -> None:
    """Raise if recorded states have a revision, or options of a data module that they would ignore.

    Args:
        named: name and revision of each model.
        options: options of `TextModule`, `FrozenModels` and `PairedActivations`, as far as they are given.

    Raises:
        ValueError: naming the first.
    """
    recorded = [name for name, _ in named if is_recorded(name)]
    if not recorded:
        return
    for option, taken in OF_READING.items():
        given = options.get(option, taken[0])
        if given not in taken:
            raise _of_no_model(option, given, recorded[0])
    for name, revision in named:
        if is_recorded(name) and revision is not None:
            raise _of_no_model("revision", revision, name)


def without_ignored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's data options; of recorded states, without what earlier versions took and ignored.

    Args:
        config: options of a data module, as its `config()` gives them.
    """
    kept = dict(config)
    names = [
        config.get("model_x"),
        config.get("model_y"),
        *(config.get("models") or ()),
    ]
    if not any(is_recorded(name) for name in names if name is not None):
        return kept
    for option, taken in OF_READING.items():
        if option in kept and kept[option] not in taken:
            kept[option] = taken[0]
    return kept


def _given(options: Mapping[str, Any], option: str, default: Any) -> Any:
    """The value of an option, by its dotted name; its default where there is none."""
    *places, last = option.split(".")
    within: Any = options
    for place in places:
        within = within.get(place)
        if within is None:
            return default
    given = within.get(last)
    return default if given is None else given


def _of_texts() -> dict[str, Any]:
    """The options of a text source that do not divide texts, with their defaults."""
    default = TextSource()
    options = {}
    for field in fields(TextSource):
        if field.name not in DIVIDING:
            options[field.name] = getattr(default, field.name)
    return options


def _of_no_model(option: str, given: Any, said: str) -> UserError:
    return UserError(
        f"Expected no `{option}` with recorded states, but got {given!r}: it needs a model that can be run, and {said} "
        "has only what was recorded. Leave it out."
    )


def _of_no_text(option: str, given: Any, said: str) -> UserError:
    return UserError(
        f"Recorded states bring their own texts, so `{option}` {given!r} has no meaning for {said}. Leave it out; "
        f"{', '.join(DIVIDING)} divide the groups of rows."
    )


def recorded_texts(
    source: TextSource, names: Sequence[str], said: str, digest: str
) -> Texts:
    """Divide groups of recorded rows into splits.

    Args:
        source: the user's options, of which only those that divide texts may be given.
        names: names of the groups, all different.
        said: where the rows are recorded.
        digest: hash of which rows belong to which group.

    Raises:
        ValueError: an option of texts was given, or a split would be empty.
    """
    from datasets import Dataset

    for name, default in _of_texts().items():
        given = getattr(source, name)
        if given != default:
            raise _of_no_text(f"text.{name}", given, said)
    table = Dataset.from_dict({"text": list(names)})
    origin = {
        "source": said,
        "subset": None,
        "revision": None,
        "text_columns": ["text"],
        "label_column": None,
        "split": "by a keyed hash of the group's name",
        "seed": source.seed,
        "validation_share": source.validation_share,
        "test_share": source.test_share,
    }
    # Groups of names that differ in case or white space alone share a split, and both stay.
    kept = replace(source, source=said, deduplicate=False)
    texts = divide(kept, RawTexts([table], ["text"], None, origin, []))
    hashes = {}
    for name, of_split in texts.origin["hashes"].items():
        both = f"{of_split} {digest}".encode()
        hashes[name] = blake2b(both, digest_size=8).hexdigest()
    return replace(texts, origin={**texts.origin, "hashes": hashes})
