"""How far mapped states are from the target's own, text by text, and the report's columns made of it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aligners.injection.methods import Method
from aligners.injection.scoring.scores import bootstrap_interval, of_unseen, per_text_sums
from datamodules.rows.policies import Rows

ERRORS = [
    "squares", "total", "squares_unseen", "total_unseen", "cosine", "norm", "back", "back_total", "gap", "largest",
]  # fmt: skip
FVUS = ("fvu", "fvu_seen", "fvu_unseen", "fvu_other")
FITTING = ("mse_fit", "fvu_fit", "relative_error_fit")
ERROR_COLUMNS = (
    "mse", "l2", *(f"{name}{end}" for name in FVUS for end in ("", "_low", "_high")),
    "fvu_inverse", "relative_error", "cosine", "round_trip", *FITTING,
)  # fmt: skip


def text_errors(
    method: Method, rows: Rows, source: Tensor, target: Tensor, mapped: Tensor, means: tuple[Tensor | None, Tensor]
) -> dict[str, Tensor]:
    """How far the mapped rows are from Y's own, and the inverse's from X's: quantity out of `ERRORS` -> (S, B).

    Where there is no inverse, what is said of it is NaN; an inverse that gives no number is infinitely far off.

    Args:
        method: what mapped.
        rows: which text each row belongs to.
        source: (S, N, d_x) what was mapped.
        target: (S, N, d_y) what it should be.
        mapped: (S, N, d_y) what it is.
        means: of source and target on the fitting rows, (S, 1, d); without that of the source, nothing is said of the
            inverse.
    """
    mean_source, mean_target = means

    per_text = partial(per_text_sums, rows=rows)
    squares = (mapped - target).double().square().sum(-1)
    total = (target.double() - mean_target).square().sum(-1)
    found = {
        "squares": per_text(squares),
        "squares_unseen": per_text(of_unseen(squares, rows)),
        "norm": per_text(squares.sqrt()),
        "total": per_text(total),
        "total_unseen": per_text(of_unseen(total, rows)),
        "cosine": per_text(torch.nn.functional.cosine_similarity(mapped.double(), target.double(), dim=-1)),
    }
    for name in ("back", "back_total", "gap", "largest"):
        found[name] = torch.full_like(found["squares"], torch.nan)
    if method.inverse is not None and mean_source is not None:
        back = (method.inverse(target) - source).double().square().sum(-1)
        found["back"] = per_text(back.nan_to_num(torch.inf, torch.inf))
        found["back_total"] = per_text((source.double() - mean_source).square().sum(-1))
        gap = (method.inverse(mapped) - source).abs().amax(-1).nan_to_num(torch.inf, torch.inf)
        owner = rows.owner.expand_as(gap)
        blank = torch.zeros_like(found["squares"], dtype=gap.dtype)
        found["gap"] = blank.scatter_reduce(1, owner, gap, "amax")
        found["largest"] = blank.scatter_reduce(1, owner, source.abs().amax(-1), "amax")
    return found


def error_columns(
    table: dict[str, Tensor], other: dict[str, Tensor], rows: Tensor, width: int, seed: int
) -> dict[str, Tensor]:
    """Each of `ERROR_COLUMNS` as (methods, S), over all texts.

    Args:
        table: quantity -> (methods, S, texts).
        other: squares and total likewise, of texts of another source.
        rows: number of rows of all texts.
        width: d_y.
        seed: of the resampling of texts.
    """
    squares, total = table["squares"].sum(-1), table["total"].sum(-1)
    unseen, unseen_total = table["squares_unseen"], table["total_unseen"]
    return {
        "mse": squares / (rows * width),
        "l2": table["norm"].sum(-1) / rows,
        **fvu_columns("fvu", table["squares"], table["total"], seed),
        **fvu_columns("fvu_seen", table["squares"] - unseen, table["total"] - unseen_total, seed),
        **fvu_columns("fvu_unseen", unseen, unseen_total, seed),
        **fvu_columns("fvu_other", other["squares"], other["total"], seed),
        "fvu_inverse": table["back"].sum(-1) / table["back_total"].sum(-1),
        "relative_error": (squares / total).sqrt(),
        "cosine": table["cosine"].sum(-1) / rows,
        "round_trip": table["gap"].amax(-1) / table["largest"].amax(-1),
    }


def fitting_columns(rows: Tensor, squares: Tensor, total: Tensor, width: int) -> dict[str, Tensor]:
    """Each of `FITTING` as (methods, S), from sums or means over the fitting texts.

    Args:
        rows: number of rows, ().
        squares: squared errors, (methods, S).
        total: squared distances from the mean, (methods, S).
        width: d_y.
    """
    fvu = squares / total
    return dict(zip(FITTING, (squares / (rows * width), fvu, fvu.sqrt()), strict=True))


def fvu_columns(name: str, squares: Tensor, total: Tensor, seed: int) -> dict[str, Tensor]:
    """FVU and its interval over texts, (..., texts) -> `name`, `name`_low, `name`_high, each (...)."""
    low, high = bootstrap_interval(squares, total, seed=seed)
    return {name: squares.sum(-1) / total.sum(-1), f"{name}_low": low, f"{name}_high": high}


def overflowing(table: dict[str, Tensor]) -> Tensor:
    """Where a map or its inverse overflowed, (methods, S): its columns are then null."""
    beyond = ~table["squares"].isfinite() | table["back"].isinf() | table["gap"].isinf()
    return beyond.any(-1)
