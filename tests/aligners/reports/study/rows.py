"""Rows of a study as `collect` gives them, of models in two groups, whose effects are known, and what they make."""

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pandas as pd

import papers  # noqa: F401  (registers their tables)
from aligners.reports.study.frames import Frames
from aligners.reports.study.registry import make

MODELS = ("a:0", "a:1", "a:2", "a:3", "b:0", "b:1", "b:2", "b:3")
METHODS = {"identity": ("floor", 4.0), "linear": ("method", 2.0), "mlp": ("method", 0.9), "inn": ("method", 1.0)}
LAYERS = (0, 1, 2, 3)
STAGES = ("pretrained", "finetuned")
TASKS, DEPTH = ("mnli", "sst2"), 3
SITES = range(DEPTH + 1)
BERT = "google-bert/bert-base-uncased"
MEASURES = ("cka", "minibatch_cka", "svcca", "neuronsim")
Names = Sequence[str]
Rows = Iterator[dict[str, Any]]
Collected = dict[str, pd.DataFrame]


def items(frames: Collected, *names: str) -> dict[str, Any]:
    """Tables and figures by their names; those that are missing are left out."""
    made = make(Frames(frames), names)
    return {item.name: item for item in (*made.tables, *made.figures)}


def collected(tasks: Names = ("sst2",), models: Names = MODELS) -> Collected:
    """Kind -> rows, every kind that there is."""
    kinds = {"inject": inject, "similarity": similarity, "stitching": stitching, "recover": recover}
    kinds |= {"similarity_layers": norms, "finetune": finetune}
    frames = {kind: pd.DataFrame(rows(tasks, models)) for kind, rows in kinds.items()}
    return {**frames, "surgery": pd.DataFrame(surgery()), "probing": pd.DataFrame(probing()),
            "probing_codelengths": pd.DataFrame(codelengths())}  # fmt: skip


def pairs(kind: str, tasks: Names, models: Names, stages: Names = STAGES) -> Rows:
    """What every row of a pair has, each model with itself among them."""
    for task, stage, (x, y) in product(tasks, stages, combinations_with_replacement(models, 2)):
        cell = {"cell": f"{kind}-{task}-{stage}-{x}-{y}", "kind": kind, "task": task, "stage": stage}
        yield {**cell, "model_x": x, "model_y": y, "group_x": x[0], "group_y": y[0]}


def inject(tasks: Names, models: Names) -> Rows:
    """Errors are (effect of the models + layer) × effect of the method, twice as large after fine-tuning."""
    effect = dict(zip(models, np.random.default_rng(0).uniform(0.01, 0.03, len(models)), strict=True))
    nothing = dict.fromkeys(("score_low", "score_high", "loss", "mse", "mse_reduced", "fvu", "fvu_inverse"))
    for pair in pairs("inject", tasks, models):
        pair |= {"rows": "tokens", "overflow": False, "n_units": 100.0, **nothing}
        native = {"score": 0.9, "agreement": 1.0, "penalty": 0.0, "site_x": np.nan, "site_y": np.nan}
        yield {**pair, "role": "ceiling", "method": "native_y", **native}
        for (method, (role, factor)), x, y in product(METHODS.items(), LAYERS, LAYERS):
            mse = factor * (effect[pair["model_x"]] + effect[pair["model_y"]] + 0.01 * x + 0.05 * abs(x - y))
            mse *= 2 if pair["stage"] == "finetuned" else 1
            scores = {"score": 0.9 - mse, "agreement": 1 - mse, "penalty": mse}
            errors = {"mse": mse, "mse_fit": 0.8 * mse, "relative_error": mse**0.5, "fvu": min(mse, 1)}
            errors |= {"fvu_fit": 0.8 * mse, "mse_reduced": 0.5 * mse if method == "linear" else None}
            yield {**pair, "role": role, "method": method, "site_x": x, "site_y": y, **scores, **errors}


def similarity(tasks: Names, models: Names, measures: Names = MEASURES, stages: Names = STAGES) -> Rows:
    """CKA falls with the distance of layers; models of one group are more alike, and layers 2 and 3 a cluster."""
    for pair, measure in product(pairs("similarity", tasks, models, stages), measures):
        (x, y), about = (pair["model_x"], pair["model_y"]), {"measure": measure, "label": measure, "features": "raw"}
        ways = ("forward", "backward") if measure == "neuronsim" else ("both",)
        for way, a, b in product(ways, LAYERS, LAYERS):
            value = 1 - 0.02 * abs(a - b) - 0.5 * ((a > 1) != (b > 1))
            value -= 0 if x == y else 0.1 if x[0] == y[0] else 0.25
            controls = {"held_out": None, "null": 0.05, "untrained": 0.3}
            yield {**pair, **about, "direction": way, "layer_x": a, "layer_y": b, "value": value, **controls}


def stitching(tasks: Names, models: Names) -> Rows:
    """Stitching costs more with depth, and three times as much between groups."""
    for task, x, y, site in product(tasks, models, models, LAYERS):
        penalty = 0.0 if x == y else 0.1 * site * (1 if x[0] == y[0] else 3)
        place = {"task": task, "stage": "finetuned", "model_x": x, "model_y": y, "group_x": x[0], "group_y": y[0]}
        place |= {"method": "identity", "role": "floor", "site_x": site, "site_y": site}
        yield {**place, "penalty": penalty, "score_penalty": penalty / 10, "accuracy_penalty": penalty / 20}


def recover(tasks: Names, models: Names) -> Rows:
    """The error of a map grows with the strength of the network."""
    for model, strength, (method, error) in product(models, (0.5, 2.0), (("linear", 0.1), ("inn", 0.001))):
        place = {"task": tasks[0], "stage": "pretrained", "model_x": model, "site_x": 2, "strength": strength}
        errors = {"mse_fit": error, "mse": strength * error, "relative_error": error, "fvu": error}
        yield {**place, "method": method, **errors}


def norms(tasks: Names, models: Names) -> Rows:
    """The norm falls with the layer."""
    for task, stage, (order, model), layer in product(tasks, STAGES, enumerate(models), LAYERS):
        place = {"task": task, "stage": stage, "model": model, "layer": layer}
        yield {**place, "nuclear_norm": 100.0 - 10 * layer + order}


def finetune(tasks: Names, models: Names) -> Rows:
    """Freezing the bottom layers is better."""
    for task, (variant, score), seed in product(tasks, (("none", 0.92), ("bottom-4", 0.93)), (0, 1)):
        place = {"task": task, "stage": None, "base": "bert-base", "variant": variant, "seed": seed}
        yield {**place, "n_fit": 950, "n_validation": 50, "n_texts": 200, "score": score + seed / 100}


# ---------------------------------------------------------------------- what is made of fine-tuned models alone


def surgery(models: Names = ("bert", "bert#2")) -> Rows:
    """Two fine-tunings of one model: the score is .5 + .1 a layer, .02 more in the second; a block less costs .1."""
    none = dict.fromkeys(("site", "first", "last"))
    for task, (copy, model) in product(TASKS, enumerate(models)):
        base = {**none, "task": task, "stage": "finetuned", "model": model, "majority_score": 0.4}
        for condition, site in product(("untuned", "tuned"), SITES):
            score = 0.5 + 0.1 * site + 0.02 * copy
            ends = {"score": score, "score_low": score - 0.05, "score_high": score + 0.05}
            yield {**base, "condition": condition, "site": site, **ends}
        yield {**base, "condition": "native", "score": 0.8 + 0.02 * copy}
        for first, last in combinations_with_replacement(SITES[1:], 2):
            span = {"first": first, "last": last, "score": 0.8 - 0.1 * (last - first + 1)}
            yield {**base, **span, "condition": "skip"}
        yield {**base, "model": "mean of the models", "stage": None, "condition": "untuned", "site": 1, "score": 9.0}


def across_tasks() -> Rows:
    """A model and its fine-tunings on both tasks: 1 less .1 for every task by which two differ."""
    models = [("pretrained", None), *(("finetuned", task) for task in TASKS)]
    about = {"model_x": "bert", "model_y": "bert", "measure": "cka", "direction": "both", "features": "raw"}
    for task, (x, y), a, b in product(TASKS, combinations_with_replacement(models, 2), SITES, SITES):
        stages = {"stage": x[0] if x[0] == y[0] else None, "stage_x": x[0], "stage_y": y[0]}
        apart = (x[1] != y[1]) * 0.1 * (1 + (x[1] is not None)) + 0.01 * abs(a - b)
        place = {"task": task, **stages, "tuned_x": x[1], "tuned_y": y[1], "layer_x": a, "layer_y": b}
        yield {**about, **place, "value": 1 - apart}


def probing(model: str = BERT, task: str = "mnli", corpus: str = "en_ewt-ud-train.conllu") -> Rows:
    """A site more is .1 more, two fine-tunings take .01 and .03 from it; a twin reads .3; the mix .9, then .88."""
    stages = [("pretrained", model, 0.0), ("finetuned", model, 0.01), ("finetuned", f"{model}#2", 0.03)]
    probes = [("dependencies", "edge", None), ("depth", "depth", 64)]
    for stage, name, loss in stages:
        own = {"task": task, "corpus": corpus, "stage": stage, "model": name, "source": "model"}
        own["tuned"] = task if stage == "finetuned" else None
        for (probed, probe, rank), site in product(probes, (0, 1, 2)):
            each, score = {**own, "probed": probed, "probe": probe, "site": site, "rank": rank}, 0.6 + 0.1 * site - loss
            yield {**each, "score": score, "score_low": score - 0.02, "score_high": score + 0.02}
            yield {**each, "source": "untrained", "score": 0.3, "score_low": 0.3, "score_high": 0.3}
        mix = {**own, "probed": "dependencies", "probe": "edge", "site": None, "rank": None}
        yield {**mix, "score": 0.9 - loss, "score_low": 0.8, "score_high": 0.9}
        yield {**mix, "source": "untrained", "score": 0.4}
        yield {**mix, "source": "majority", "score": 0.1}


def rsa(base: str = BERT, tasks: Names = ("mnli", "squad"), texts: Names = ("mnli", "squad", "wikipedia")) -> Rows:
    """A layer more is .1 less, on other texts half of that; the second fine-tuning of each task is .02 below."""
    tunings = [(task, f"{base}{copy}", loss) for task in tasks for copy, loss in (("", 0.0), ("#2", 0.02))]
    for text, (task, name, loss), layer in product(texts, tunings, LAYERS):
        about = {"measure": "rsa", "label": "rsa", "features": "raw", "direction": "both", "task": text, "stage": None}
        sides = [{"model": base, "stage": "pretrained", "tuned": None}]
        sides.insert(len(sides) * (name == base), {"model": name, "stage": "finetuned", "tuned": task})
        about |= {f"{key}_{side}": value for side, one in zip("xy", sides, strict=True) for key, value in one.items()}
        value = 1 - loss - layer * (0.1 if text == task else 0.05)
        yield {**about, "layer_x": layer, "layer_y": layer, "value": value}
        yield {**about, "layer_x": layer, "layer_y": (layer + 1) % len(LAYERS), "value": 0.0}


def codelengths() -> Rows:
    """The mix sends 4,000 labels in 2,000 bits, in 200 more or less after two fine-tunings; a layer alone in 3,000."""
    stages = [("pretrained", BERT, 0), ("finetuned", BERT, 100), ("finetuned", f"{BERT}#2", 300)]
    for (stage, name, more), (site, bits), control in product(stages, ((None, 2000), (1, 3000)), (False, True)):
        about = {"task": "mnli", "corpus": "en_ewt-ud-train.conllu", "stage": stage, "model": name, "source": "model"}
        about |= {"tuned": "mnli" if stage == "finetuned" else None, "probed": "dependencies", "site": site}
        sent = bits + more + 5000 * control
        yield {**about, "control": control, "bits": sent, "uniform_bits": 8000.0, "compression": 8000 / sent}
