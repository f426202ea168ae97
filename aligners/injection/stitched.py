"""Stitching layers among the maps of an injection, and the types that any of its checkpoints was fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aligners.errors import UserError
from aligners.fitting.storage.bank import FORWARD, StoredBank
from datamodules.rows.types import SeenTypes

TASK_LOSS = "task loss"  # how stitching layers were fitted, as reports say it
OTHERS = ("models", "revisions", "masked_share", "sites")  # of `stitched_texts`, not of `pair_states`


def between_two_models(bank: StoredBank) -> StoredBank:
    """A finished run as one between two models, X and Y, whose tokens were mapped.

    Args:
        bank: of `train.py fit`, which is one, or of `train.py stitch`.

    Raises:
        ValueError: layers were trained between other than two models, or the file is a whole universe.
    """
    if bank.command == "fit":
        return bank
    if bank.command == "universe":
        raise UserError(
            f"Expected a checkpoint of two models, but {bank.path} holds a universe of "
            f"{len(bank.data['models'])}. Name one of the files pairs/X--Y/aligners.ckpt beside it."
        )
    config, models = bank.data_config, bank.data["models"]
    if len(models) != 2:
        raise UserError(
            f"Expected stitching layers between two models, but {bank.path} was trained on {len(models)}. Measure them "
            "with `evaluate.py stitch --checkpoint`."
        )
    rows = {"rows": "tokens", "special_tokens": True, "held_out_types": 0.0}
    named = {f"model_{side}": name for side, name in zip("xy", config["models"], strict=True)}
    named |= {f"revision_{side}": name for side, name in zip("xy", config["revisions"] or [None] * 2, strict=True)}
    sites = {"sites": ",".join(f"{i}:{j}" for i, j in bank.pairs.get(FORWARD, []))}
    kept = {name: value for name, value in config.items() if name not in OTHERS}
    data = {**bank.data, **rows, "models": dict(zip("xy", models, strict=True))}
    return replace(bank, data=data, data_config={**kept, **named, **sites, **rows})


def seen_by_any(stored: Sequence[StoredBank], data: Any) -> SeenTypes:
    """The types that were among the fitting rows of at least one checkpoint.

    Args:
        stored: the checkpoints. Stitching layers, which are trained on whole texts, have seen the run's types if their
            texts are the run's.
        data: the data module of the run.

    Returns:
        The types, of no kind where they are not known of every checkpoint, or are not of one kind.
    """
    unknown, present = SeenTypes(None, frozenset()), data.config()

    def of_the_run(bank: StoredBank) -> bool:
        return all(bank.data_config[name] == present[name] for name in ("text", "rows", "special_tokens", "max_length"))

    each = [bank.seen or (data.seen if of_the_run(bank) else unknown) for bank in stored]
    kinds = {seen.kind for seen in each}
    return unknown if len(kinds) > 1 else SeenTypes(kinds.pop(), frozenset().union(*(seen.names for seen in each)))
