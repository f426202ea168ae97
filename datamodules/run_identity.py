"""What a run is about: whether another run may go on from where it stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aligners.errors import UserError

if TYPE_CHECKING:
    from aligners.datamodules.module import TextModule

# Options that change nothing in the result, and those that are compared by what they lead to: models by their weights,
# sites by their numbers.
FREE = (
    *(
        "workers",
        "cache",
        "devices",
        "device_map",
        "attn_implementation",
        "trust_remote_code",
        "merge_adapters",
    ),
    *(
        "recipe",
        "model_x",
        "model_y",
        "models",
        "bases",
        "revision_x",
        "revision_y",
        "revisions",
        "sites",
    ),
)
# Options that are never taken from a file that a run left, which may be somebody else's: where states and models are
# written, and whether a model's own code is run.
NOT_OF_FILES = ("trust_remote_code", "cache", "store")
PARTS = ("data", "data_config", "options", "trainer", "early_stopping")
LIMITS = ("max_epochs", "max_steps")  # a run may go on for longer
# of a Trainer, beside its limits: which texts are read, how steps are taken, and when maps are compared
DECIDES = (
    *(
        "limit_train_batches",
        "limit_val_batches",
        "overfit_batches",
        "accumulate_grad_batches",
        "gradient_clip_val",
    ),
    *("val_check_interval", "check_val_every_n_epoch", "min_epochs", "min_steps"),
)


def identity(data: TextModule, **options: Any) -> dict[str, Any]:
    """Say in plain values what a run is about.

    Args:
        data: the data module, whose texts and models are loaded now.
        options: of what is trained on it.
    """
    return {"data": data.describe(), "data_config": data.config(), "options": options}


def trainer_identity(trainer: Any) -> dict[str, Any]:
    """The Trainer's options that change what is trained, or on which texts, as plain values."""
    options: dict[str, Any] = {"precision": trainer.precision}
    for name in (*DECIDES, *LIMITS):
        value = getattr(trainer, name)
        one = name.startswith(("limit_", "val_check")) and value == 1 and isinstance(value, int)
        options[name] = "1 batch" if one else value  # 1.0 is all
    return options


def refuse_other_run(then: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Compare what two runs are about, of which the second is to go on from the first.

    Of models only their implementation of attention is compared, and nothing that the version of the first run did not
    keep.

    Args:
        then: `identity` of the first run, and `trainer_identity` under `trainer` where it has one; or with more in it.
        now: `identity` of the second.
        what: was kept of the first, for the message.

    Raises:
        ValueError: texts, options of the data module, or options of what is trained differ. All are named.
    """
    # as JSON gives them back, which knows no tuples
    then, now = (
        {name: json.loads(json.dumps(run.get(name), default=str)) for name in PARTS}
        for run in (then, now)
    )
    texts = [run["data"]["text"] for run in (then, now)]
    equal = texts[0].get("hashes") == texts[1]["hashes"]
    before, after = (_data_options(run, equal) for run in (then, now))
    diffs = differences(
        before, {name: value for name, value in after.items() if name in before}, "data"
    )
    diffs += [] if equal else _other_texts(*texts)
    for part, prefix in (
        ("options", "model"),
        ("trainer", "trainer"),
        ("early_stopping", "early_stopping"),
    ):
        if then[part] is not None and now[part] is not None:
            diffs += _changed(then[part], now[part], prefix)
    if diffs:
        raise UserError(
            f"{what} is of a run with other data or options: {'; '.join(diffs)}. To go on, give the same; for anything "
            "else, begin a new run."
        )


def _data_options(run: Mapping[str, Any], equal: bool) -> dict[str, Any]:
    """The options that decide what the data module yields. Of equal texts only their seed does."""
    options = {name: value for name, value in run["data_config"].items() if name not in FREE}
    if equal:
        options["text"] = {"seed": options["text"]["seed"]}
    led_to = {name: run["data"].get(name) for name in ("sites", "stored_as")}
    led_to |= _attention(run["data"].get("models"))
    return {**options, **led_to, "label_names": run["data"]["text"].get("label_names")}


def _attention(models: Any) -> dict[str, Any]:
    """The implementations of attention that were used, which round differently; nothing where that was not kept."""
    listed = list(models.values()) if isinstance(models, dict) else models or []
    used = [model.get("attention") for model in listed]
    return {"attn_implementation": used} if any(used) else {}


def _changed(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> list[str]:
    """What differs of all that the first run kept. Limits may be higher."""
    lines = []
    for name, before in then.items():
        after = now.get(name)
        if name in LIMITS and _most(before) <= _most(after):
            continue
        lines += differences(before, after, f"{prefix}.{name}")
    return lines


def _most(limit: int | None) -> float:
    """A limit of Lightning as a number."""
    return math.inf if limit is None or limit == -1 else limit


def differences(then: Any, now: Any, name: str) -> list[str]:
    """List each value that differs, by its dotted name.

    Args:
        then: nested plain values.
        now: the same, later.
        name: how the dotted names begin.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        names = {**then, **now}
        return [
            line
            for key in names
            for line in differences(then.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    if _of_models(then) and _of_models(now) and len(then) == len(now):
        numbered = {str(number): model for number, model in enumerate(then, start=1)}
        return differences(
            numbered, {str(number): model for number, model in enumerate(now, start=1)}, name
        )
    return [] if then == now else [f"`{name}` was {json.dumps(then)} and is {json.dumps(now)}"]


def _of_models(value: Any) -> bool:
    """Whether a value is a list of models' identities."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def kept_alike(then: Any, now: Any) -> Any:
    """What a run is about now, without what an earlier version did not keep of its models."""
    if isinstance(then, dict) and isinstance(now, dict):
        model = "fingerprint" in then
        return {key: kept_alike(then.get(key), now[key]) for key in now if key in then or not model}
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return [kept_alike(before, after) for before, after in zip(then, now, strict=True)]
    return now


def _other_texts(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The splits whose texts differ; those of a run that kept no hashes, by their numbers."""
    lines = []
    for split, name in {"fit": "fitting", "validation": "validation", "test": "held-out"}.items():
        before, after = (str(texts["n_texts"][split]) for texts in (then, now))
        if "hashes" in then:
            before, after = (
                f"{texts['n_texts'][split]} (hash {texts['hashes'][split]})"
                for texts in (then, now)
            )
        if before != after:
            lines.append(f"the {name} texts were {before} and are {after}")
    return lines
