"""Rows of a study as `collect` gives them, of models in two groups, whose effects are known, and what they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import make

MODELS = ("a:0", "a:1", "a:2", "a:3", "b:0", "b:1", "b:2", "b:3")
METHODS = {"identity": ("floor", 4.0), "linear": ("method", 2.0), "mlp": ("method", 0.9), "inn": ("method", 1.0)}
LAYERS = (0, 1, 2, 3)
STAGES = ("pretrained", "finetuned")


Collected = dict[str, pd.DataFrame]


def items(frames: Collected, *names: str) -> dict[str, Any]:
    """Tables and figures by their names; those that are missing are left out."""
    made = make(Frames(frames), names)
    return {item.name: item for item in (*made.tables, *made.figures)}


def collected(tasks: Sequence[str] = ("sst2",), models: Sequence[str] = MODELS) -> Collected:
    """Kind -> rows, every kind that there is."""
    makers = {"inject": inject, "similarity": similarity, "stitching": stitching, "recover": recover}
    frames = {kind: pd.DataFrame(maker(tasks, models)) for kind, maker in makers.items()}
    frames["finetune"] = pd.DataFrame(finetune(tasks))
    norms = [
        {"cell": "n", "kind": "similarity_layers", "task": task, "stage": stage, "model": model, "layer": layer,
         "nuclear_norm": 100.0 - 10 * layer + order}
        for task in tasks for stage in STAGES for order, model in enumerate(models) for layer in LAYERS
    ]  # fmt: skip
    return {**frames, "similarity_layers": pd.DataFrame(norms)}


def keys(kind: str, task: str, stage: str, x: str, y: str) -> dict[str, Any]:
    return {
        **{"cell": f"{kind}-{task}-{stage}-{x}-{y}", "kind": kind, "task": task, "stage": stage},
        **{"model_x": x, "model_y": y, "group_x": x[0], "group_y": y[0]},
    }


def inject(tasks: Sequence[str], models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Errors are (effect of the models + layer) × effect of the method, twice as large after fine-tuning."""
    draw = np.random.default_rng(0)
    effect = dict(zip(models, draw.uniform(0.01, 0.03, len(models)), strict=True))
    nothing = dict.fromkeys(("score", "score_low", "score_high", "agreement", "penalty", "loss"))
    for task in tasks:
        for stage in STAGES:
            for x, y in [*combinations(models, 2), *((model, model) for model in models)]:
                base = {**keys("inject", task, stage, x, y), "rows": "tokens", "overflow": False, "n_units": 100.0}
                floor = {**base, "role": "ceiling", "method": "native_y", "site_x": np.nan, "site_y": np.nan}
                yield {**floor, **nothing, "score": 0.9, "agreement": 1.0, "penalty": 0.0, "mse": None, "fvu": None}
                for method, (role, factor) in METHODS.items():
                    for site_x in LAYERS:
                        for site_y in LAYERS:
                            mse = factor * (effect[x] + effect[y] + 0.01 * site_x + 0.05 * abs(site_x - site_y))
                            mse *= 2 if stage == "finetuned" else 1
                            yield {**base, **nothing, "role": role, "method": method, "site_x": site_x,
                                   "site_y": site_y, "score": 0.9 - mse, "agreement": 1 - mse, "penalty": mse,
                                   "mse": mse, "mse_fit": 0.8 * mse,
                                   "mse_reduced": 0.5 * mse if method == "linear" else None,
                                   "relative_error": mse**0.5, "fvu": min(mse, 1),
                                   "fvu_fit": 0.8 * mse, "fvu_inverse": None}  # fmt: skip


def similarity(
    tasks: Sequence[str],
    models: Sequence[str],
    measures: Sequence[str] = ("cka", "minibatch_cka", "svcca", "neuronsim"),
    stages: Sequence[str] = STAGES,
) -> Iterator[dict[str, Any]]:
    """CKA falls with the distance of layers; models of one group are more alike, and layers 2 and 3 a cluster."""
    for task in tasks:
        for stage in stages:
            for x, y in [*combinations(models, 2), *((model, model) for model in models)]:
                for measure in measures:
                    for way in ("forward", "backward") if measure == "neuronsim" else ("both",):
                        for a in LAYERS:
                            for b in LAYERS:
                                value = 1 - 0.02 * abs(a - b) - 0.5 * ((a > 1) != (b > 1))
                                value -= 0 if x == y else 0.1 if x[0] == y[0] else 0.25
                                yield {**keys("similarity", task, stage, x, y), "measure": measure, "direction": way,
                                       "label": measure, "features": "raw", "layer_x": a, "layer_y": b,
                                       "value": value, "held_out": None, "null": 0.05, "untrained": 0.3}  # fmt: skip


def stitching(tasks: Sequence[str], models: Sequence[str]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        for x in models:
            for y in models:
                for site in LAYERS:
                    penalty = 0.0 if x == y else 0.1 * site * (1 if x[0] == y[0] else 3)
                    place = {"method": "identity", "role": "floor", "site_x": site, "site_y": site}
                    own = keys("stitching", task, "finetuned", x, y)
                    yield {**own, **place, "penalty": penalty, "score_penalty": penalty / 10}


def recover(tasks: Sequence[str], models: Sequence[str]) -> Iterator[dict[str, Any]]:
    for model in models:
        for strength in (0.5, 2.0):
            for method, error in (("linear", 0.1), ("inn", 0.001)):
                yield {"cell": model, "kind": "recover", "task": tasks[0], "stage": "pretrained", "model_x": model,
                       "site_x": 2, "strength": strength, "method": method, "mse_fit": error, "mse": strength * error,
                       "relative_error": error, "fvu": error}  # fmt: skip


def finetune(tasks: Sequence[str]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        for variant, score in (("none", 0.92), ("bottom-4", 0.93)):
            for seed in (0, 1):
                cell = {"cell": f"{variant}-{seed}", "kind": "finetune", "task": task, "stage": None}
                yield {**cell, "base": "bert-base", "variant": variant, "seed": seed, "score": score + seed / 100}
