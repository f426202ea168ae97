"""What a run is about: whether another run may go on from where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aligners.errors import UserError

if TYPE_CHECKING:
    from aligners.datamodules.module import TextModule

# Options that change nothing in the result, and those that are compared by what they lead to: models by their weights,
# sites by their numbers.
FREE = (
    *("workers", "cache", "devices", "device_map", "attn_implementation", "trust_remote_code", "merge_adapters"),
    *("recipe", "model_x", "model_y", "models", "bases", "revision_x", "revision_y", "revisions", "sites"),
)
PARTS = ("data", "data_config", "options", "trainer")


def identity(data: TextModule, **options: Any) -> dict[str, Any]:
    """Say in plain values what a run is about.

    Args:
        data: the data module, whose texts and models are loaded now.
        options: of what is trained on it.
    """
    return {"data": data.describe(), "data_config": data.config(), "options": options}


def trainer_identity(trainer: Any) -> dict[str, Any]:
    """The Trainer's options that change what is trained, or on which texts, as plain values."""
    limits = {name: getattr(trainer, name) for name in ("limit_train_batches", "limit_val_batches")}
    one = {name: "1 batch" for name, limit in limits.items() if limit == 1 and isinstance(limit, int)}  # 1.0 is all
    return {"precision": trainer.precision, **limits, **one}


def refuse_other_run(then: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Compare what two runs are about, of which the second is to go on from the first.

    Models are not compared, nor is anything that the version of the first run did not keep.

    Args:
        then: `identity` of the first run, and `trainer_identity` under `trainer` where it has one; or with more in it.
        now: `identity` of the second.
        what: was kept of the first, for the message.

    Raises:
        ValueError: texts, options of the data module, or options of what is trained differ. All are named.
    """
    # as JSON gives them back, which knows no tuples
    then, now = ({name: json.loads(json.dumps(run.get(name), default=str)) for name in PARTS} for run in (then, now))
    texts = [run["data"]["text"] for run in (then, now)]
    equal = texts[0].get("hashes") == texts[1]["hashes"]
    before, after = (_data_options(run, equal) for run in (then, now))
    diffs = differences(before, {name: value for name, value in after.items() if name in before}, "data")
    diffs += [] if equal else _other_texts(*texts)
    for part, prefix in (("options", "model"), ("trainer", "trainer")):
        diffs += [] if then[part] is None else differences(then[part], now[part], prefix)
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
    return {**options, **led_to, "label_names": run["data"]["text"].get("label_names")}


def differences(then: Any, now: Any, name: str) -> list[str]:
    """List each value that differs, by its dotted name.

    Args:
        then: nested plain values.
        now: the same, later.
        name: how the dotted names begin.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        names = {**then, **now}
        return [line for key in names for line in differences(then.get(key), now.get(key), f"{name}.{key}".lstrip("."))]
    return [] if then == now else [f"`{name}` was {json.dumps(then)} and is {json.dumps(now)}"]


def _other_texts(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The splits whose texts differ; those of a run that kept no hashes, by their numbers."""
    lines = []
    for split, name in {"fit": "fitting", "validation": "validation", "test": "held-out"}.items():
        before, after = (str(texts["n_texts"][split]) for texts in (then, now))
        if "hashes" in then:
            before, after = (f"{texts['n_texts'][split]} (hash {texts['hashes'][split]})" for texts in (then, now))
        if before != after:
            lines.append(f"the {name} texts were {before} and are {after}")
    return lines
