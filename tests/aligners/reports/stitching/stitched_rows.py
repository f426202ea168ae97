"""Rows of a stitching evaluation as the report gets them, made up: routes, methods, sites, models."""

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
NATIVE = 0.8
METHODS = {"affine_norm": ("method", 1.0), "linear": ("method", 2.0), "identity": ("floor", 40.0)}


def row(model_x: str, model_y: str, method: str, pair: tuple[int, int] | None, penalty: float) -> Row:
    """One row; accuracy falls by a tenth of the penalty."""
    same, role = model_x == model_y, "ceiling" if pair is None else METHODS[method][0]
    accuracy = max(NATIVE - penalty / 10, 0.5)
    places = dict(zip(("site_x", "site_y"), pair or (None, None), strict=True))
    trained = method == "affine_norm"
    ends = {"": 0.0, "_low": -0.02, "_high": 0.02}
    return {
        "model_x": model_x, "model_y": model_y, "same_model": same, "method": method, "role": role, **places,
        "parameters": 1000 if trained else None, "fit": "task loss" if trained else None,
        "n_texts": 100, "n_units": 100, "loss": 0.5 + penalty, "penalty": penalty,
        "penalty_low": penalty - 0.1 * abs(penalty) - 0.001, "penalty_high": penalty + 0.1 * abs(penalty) + 0.001,
        **{f"{name}{end}": accuracy + far for name in ("accuracy", "score") for end, far in ends.items()},
        "accuracy_penalty": NATIVE - accuracy, "score_penalty": NATIVE - accuracy, "score_name": "accuracy",
        **dict.fromkeys(("perplexity", "bits_per_byte", "fvu")), "agreement": 0.9, "overflow": False, "seed": 0,
    }  # fmt: skip


def stitched(models: Sequence[str] = ("gelu", "solu"), sites: Sequence[Any] = (1, 2, 3)) -> list[Row]:
    """All routes. The first model's states are the cheaper the more alike the models, deeper sites dearer."""
    pairs = [site if isinstance(site, tuple) else (site, site) for site in sites]
    rows = []
    for i, x in enumerate(models):
        for j, y in enumerate(models):
            rows.append(row(x, y, "native", None, 0.0))
            for method, (_, dear) in METHODS.items():
                for l, m in pairs:  # noqa: E741
                    base = 0.03 * (1 + i) * (1 + abs(i - j)) * (1 + abs(l - m)) * math.sqrt(m)
                    cost = (0.004 if method != "identity" else 0.0) if x == y and l == m else base * dear
                    rows.append(row(x, y, method, (l, m), cost))
    return rows


def curves(rows: Sequence[Row], steps: Sequence[int] = (0, 50, 100, 150, 200)) -> list[Row]:
    """Penalties of the trained methods falling to those of the rows."""
    kept = ("model_x", "model_y", "method", "site_x", "site_y")
    return [
        {"step": step, **{key: r[key] for key in kept}, "penalty": r["penalty"] + 2 * math.exp(-step / 40)}
        for r in rows
        if r["fit"] == "task loss"
        for step in steps
    ]
