"""Describes a run, so that another may resume it only if it is about the same thing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aligners.datamodules.text.recorded_texts import without_ignored
from aligners.errors import UserError

if TYPE_CHECKING:
    from aligners.datamodules.module import TextModule

# Options that do not change the result, and options that are compared by their effect: models by their weights,
# sites by their numbers.
FREE = {"workers", "cache", "devices", "device_map", "attn_implementation"}
FREE |= {"trust_remote_code", "merge_adapters", "recipe"}
FREE |= {"model_x", "model_y", "models", "bases"}
FREE |= {"revision_x", "revision_y", "revisions", "sites"}
# Options that are never taken from an earlier run's file, which may be somebody else's: where states and models
# are written, and whether a model's own code is run.
NOT_OF_FILES = ("trust_remote_code", "cache", "store")
PARTS = ("data", "data_config", "options", "trainer", "early_stopping")
COMPARED = {
    "options": "model",
    "trainer": "trainer",
    "early_stopping": "early_stopping",
}
SPLITS = {"fit": "fitting", "validation": "validation", "test": "held-out"}
LIMITS = ("max_epochs", "max_steps")  # a resumed run may go on for longer
# Options of a Trainer, besides its limits: which texts are read, how steps are taken, when maps are compared.
DECIDES: tuple[str, ...]
DECIDES = ("limit_train_batches", "limit_val_batches", "overfit_batches")
DECIDES += ("accumulate_grad_batches", "gradient_clip_val")
DECIDES += ("val_check_interval", "check_val_every_n_epoch", "min_epochs", "min_steps")


def identity(data: TextModule, **options: Any) -> dict[str, Any]:
    """Describe a run in plain values: its data, and what is trained on it.

    Args:
        data: the data module, whose texts and models are loaded by now.
        options: options of what is trained on it.
    """
    return {"data": data.describe(), "data_config": data.config(), "options": options}


def trainer_identity(trainer: Any) -> dict[str, Any]:
    """The Trainer's options that change what is trained, or on which texts, as plain values."""
    options: dict[str, Any] = {"precision": trainer.precision}
    for name in (*DECIDES, *LIMITS):
        value = getattr(trainer, name)
        counts_batches = name.startswith(("limit_", "val_check"))
        if counts_batches and value == 1 and isinstance(value, int):
            value = "1 batch"  # 1.0 means all
        options[name] = value
    return options


def refuse_other_run(
    then: Mapping[str, Any], now: Mapping[str, Any], what: str
) -> None:
    """Raise if a second run may not resume a first one.

    Of the models, only the implementation of attention is compared. What the first run's version did not record is not
    compared.

    Args:
        then: `identity` of the first run, with `trainer_identity` under `trainer` if it has one; further entries are
            allowed.
        now: `identity` of the second.
        what: what the first run left behind, for the message.

    Raises:
        ValueError: texts, options of the data module, or options of what is trained differ. All are named.
    """
    then = _as_kept(then)
    now = _as_kept(now)
    texts = then["data"]["text"]
    texts_now = now["data"]["text"]
    equal = texts.get("hashes") == texts_now["hashes"]
    before = _data_options(then, equal)
    after = _data_options(now, equal)
    changes = []
    for name, value in before.items():
        changes += differences(value, after.get(name), f"data.{name}")
    if not equal:
        changes += _other_texts(texts, texts_now)
    for part, prefix in COMPARED.items():
        if then[part] is not None and now[part] is not None:
            changes += _changed(then[part], now[part], prefix)
    if changes:
        raise UserError(
            f"{what} is of a run with other data or options: {'; '.join(changes)}. To resume it, give the same "
            "options; otherwise begin a new run."
        )


def _as_kept(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a run as JSON stores it: without tuples."""
    kept = {name: run.get(name) for name in PARTS}
    return json.loads(json.dumps(kept, default=str))


def _data_options(run: Mapping[str, Any], equal: bool) -> dict[str, Any]:
    """Return the options that decide what the data module yields; for equal texts, only the seed of theirs."""
    described = run["data"]
    options = without_ignored(run["data_config"])
    for name in FREE:
        options.pop(name, None)
    if equal:
        options["text"] = {"seed": options["text"]["seed"]}
    options["sites"] = described.get("sites")
    options["stored_as"] = described.get("stored_as")
    options["label_names"] = described["text"].get("label_names")
    models = described.get("models") or []
    if isinstance(models, dict):
        models = list(models.values())
    attention = [model.get("attention") for model in models]
    # Implementations round differently. Earlier versions did not record which one was used.
    if any(attention):
        options["attn_implementation"] = attention
    return options


def _changed(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> list[str]:
    """List what differs from the options that the first run recorded. Limits may be higher."""
    lines = []
    for name, before in then.items():
        after = now.get(name)
        if name in LIMITS and _most(before) <= _most(after):
            continue
        lines += differences(before, after, f"{prefix}.{name}")
    return lines


def _most(limit: int | None) -> float:
    """Return a limit of Lightning as a number."""
    return math.inf if limit is None or limit == -1 else limit


def differences(then: Any, now: Any, name: str) -> list[str]:
    """List each value that differs, by its dotted name.

    Args:
        then: nested plain values.
        now: the same, later.
        name: how the dotted names begin.
    """
    if _are_models(then) and _are_models(now) and len(then) == len(now):
        then = dict(enumerate(then, start=1))
        now = dict(enumerate(now, start=1))
    if isinstance(then, dict) and isinstance(now, dict):
        changes = []
        for key in {**then, **now}:
            dotted = f"{name}.{key}".lstrip(".")
            changes += differences(then.get(key), now.get(key), dotted)
        return changes
    if then == now:
        return []
    return [f"`{name}` was {json.dumps(then)} and is {json.dumps(now)}"]


def _are_models(value: Any) -> bool:
    """Tell whether a value is a list of models' identities."""
    return isinstance(value, list) and set(map(type, value)) == {dict}


def kept_alike(then: Any, now: Any) -> Any:
    """Describe the present run without what an earlier version did not record of its models."""
    if isinstance(then, dict) and isinstance(now, dict):
        alike = {}
        for key, value in now.items():
            if key in then or "fingerprint" not in then:
                alike[key] = kept_alike(then.get(key), value)
        return alike
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return list(map(kept_alike, then, now))
    return now


def _other_texts(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the splits whose texts differ. If the first run kept no hashes, the numbers of texts are compared."""
    changes = []
    for split, name in SPLITS.items():
        before = str(then["n_texts"][split])
        after = str(now["n_texts"][split])
        if "hashes" in then:
            before += f" (hash {then['hashes'][split]})"
            after += f" (hash {now['hashes'][split]})"
        if before != after:
            changes.append(f"the {name} texts were {before} and are {after}")
    return changes
