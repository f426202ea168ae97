"""Rows as reports get them, made up, and what the tables that show them hold."""

import io
import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from rich.console import Console

from aligners.fitting.heldout_retrieval import RETRIEVAL_COLUMNS
from aligners.injection.behaviour import BEHAVIOUR_COLUMNS
from aligners.injection.panels import ERROR_COLUMNS
from aligners.reports.screen import SiteTable

Row = dict[str, Any]
MEASURED = (*BEHAVIOUR_COLUMNS, *ERROR_COLUMNS, *RETRIEVAL_COLUMNS)
COLUMNS = ("parameters", "fit", "bijective", "fitted_on", "training", *MEASURED)
NATIVE = 0.8
METHODS = {"affine_norm": ("method", 1.0), "linear": ("method", 2.0), "identity": ("floor", 40.0)}


def row(x: str, y: str, method: str, role: str, pair: Sequence[int | None], **known: Any) -> Row:
    """A row of an injection or a stitching; what is not known is None."""
    names = {"model_x": x, "model_y": y, "method": method, "role": role, "site_x": pair[0], "site_y": pair[1]}
    return {**names, "rows": "tokens", "score_name": "accuracy", "seed": 0, **dict.fromkeys(COLUMNS), **known}


def scored(accuracy: float, far: float) -> Row:
    """Accuracy, which is the score, with an interval."""
    ends = {"": accuracy, "_low": accuracy - far, "_high": accuracy + far}
    return {f"{name}{end}": value for name in ("accuracy", "score") for end, value in ends.items()}


def stitched(models: Sequence[str] = ("gelu", "solu"), sites: Sequence[Any] = (1, 2, 3)) -> list[Row]:
    """All routes. The first model's states are the cheaper the more alike the models, deeper sites dearer."""
    pairs = [site if isinstance(site, tuple) else (site, site) for site in sites]
    rows = []
    for (i, x), (j, y) in product(enumerate(models), repeat=2):
        rows.append(_stitched(x, y, "native", "ceiling", (None, None), 0.0))
        for (method, (role, dear)), (l, m) in product(METHODS.items(), pairs):  # noqa: E741
            base = 0.03 * (1 + i) * (1 + abs(i - j)) * (1 + abs(l - m)) * math.sqrt(m)
            cost = (0.004 if method != "identity" else 0.0) if x == y and l == m else base * dear
            rows.append(_stitched(x, y, method, role, (l, m), cost))
    return rows


def _stitched(x: str, y: str, method: str, role: str, pair: Sequence[int | None], penalty: float) -> Row:
    """Accuracy falls by a tenth of the penalty."""
    accuracy, far = max(NATIVE - penalty / 10, 0.5), 0.1 * abs(penalty) + 0.001
    trained = {"parameters": 1000, "fit": "task loss"} if method == "affine_norm" else {}
    costs = {"penalty": penalty, "penalty_low": penalty - far, "penalty_high": penalty + far}
    lost = {"accuracy_penalty": NATIVE - accuracy, "score_penalty": NATIVE - accuracy}
    about = {"same_model": x == y, "loss": 0.5 + penalty, "agreement": 0.9, "overflow": False}
    return row(x, y, method, role, pair, **trained, **about, **costs, **lost, **scored(accuracy, 0.02))


def curves(rows: Sequence[Row], steps: Sequence[int] = (0, 50, 100, 150, 200)) -> list[Row]:
    """Penalties of the trained methods falling to those of the rows."""
    kept = ("model_x", "model_y", "method", "site_x", "site_y")
    return [
        {"step": step, **{key: r[key] for key in kept}, "penalty": r["penalty"] + 2 * math.exp(-step / 40)}
        for r in rows
        if r["fit"] == "task loss"
        for step in steps
    ]


def printed(tables: Iterable[SiteTable], width: int = 120) -> str:
    """The tables on a screen."""
    console = Console(width=width, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def cells(tables: Iterable[SiteTable]) -> set[str]:
    """What stands in any cell."""
    return {cell for table in tables for column in table.columns for cell in column.cells}
