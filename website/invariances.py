"""The table of measures: what each is computed from, and what it does not change under, tried on random rows."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aligners.similarity.catalogue import DEFAULT, Measure, catalogue
from aligners.similarity.functional.cca import pwcca, r2_cca, r2_svcca, svcca
from benchmarks.known_cases import MEASURES, draw

__all__ = ["page", "unchanged"]

ROWS, WIDTH = 400, 8
SAME = 1e-6
INTRODUCTION = """# Measures in a table

What stands in the catalogue (`aligners/similarity/catalogue.py`); what is **bold** is computed by default. What each
measure means, misses and costs: [Measures](../measures.md).
"""
INVARIANCES = """
## What a measure does not change under

Tried on random rows when this page was built. "Both" says that the value stays the same whichever model's rows are
changed, "X" or "Y" that only that model's may be, and a dash that it moves either way.
"""
FAMILIES = {
    "moments": "moments",
    "batches": "batches",
    "rows": "a sample of rows",
    "heads": "attention of each text",
    "head_moments": "moments of attention",
}


def _changes() -> dict[str, Callable[[Tensor], Tensor]]:
    """What is done to rows (N, d), by name: the same each time."""
    generator = torch.Generator().manual_seed(1)
    square = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    scales = torch.logspace(
        -2, 1, WIDTH, dtype=torch.float64
    )  # so that SVCCA cuts other directions
    signs = torch.ones(WIDTH, dtype=torch.float64).index_fill(
        0, torch.tensor([1, 4]), -1
    )
    return {
        "rotation": lambda rows: rows @ torch.linalg.qr(square).Q,
        "one scale": lambda rows: 3 * rows,
        "translation": lambda rows: rows + scales,
        "order of neurons": lambda rows: rows.flip(1),
        "signs of neurons": lambda rows: rows * signs,
        "scales of neurons": lambda rows: rows * scales,
        "invertible map": lambda rows: rows @ square,
    }


def unchanged(measure: Callable[[Tensor, Tensor], Tensor]) -> dict[str, str]:
    """Which model's rows may be changed, by change: both, X, Y, or a dash for neither.

    Args:
        measure: from rows of all layers (L_x, N, d_x) and (L_y, N, d_y) to (L_x, L_y).
    """
    generator = torch.Generator().manual_seed(0)
    x, noise = (draw(ROWS, WIDTH, generator) + 1 for _ in range(2))
    y = x + noise
    said = {
        (True, True): "both",
        (True, False): "X",
        (False, True): "Y",
        (False, False): "–",
    }
    value = measure(x[None], y[None])

    def same(other: Tensor) -> bool:
        return bool((other - value).abs().max() < SAME)

    return {
        name: said[
            same(measure(change(x)[None], y[None])),
            same(measure(x[None], change(y)[None])),
        ]
        for name, change in _changes().items()
    }


def page() -> str:
    """The page: what each measure is computed from, and what it does not change under."""
    measures = catalogue().values()
    sources = [_source(measure) for measure in measures]
    functions = {**MEASURES, "r2_cca": r2_cca, "r2_svcca": r2_svcca}
    functions |= {
        f"{each.__name__}_standardised": partial(each, standardised=True)
        for each in (svcca, pwcca)
    }
    tried = [
        [_name(each), *unchanged(functions[each.name]).values()]
        for each in measures
        if each.name in functions
    ]
    return "\n".join(
        [
            INTRODUCTION,
            *_table(
                ["measure", "symmetric", "computed from", "fitted to the rows"], sources
            ),
            INVARIANCES,
            *_table(["measure", *_changes()], tried),
            "",
        ]
    )


def _source(measure: Measure) -> list[str]:
    sample = f", {measure.budget:,}" if measure.budget else ""
    fitted = "yes" if measure.held_out or measure.chance else "no"
    return [
        _name(measure),
        "yes" if measure.symmetric else "no",
        FAMILIES[measure.family] + sample,
        fitted,
    ]


def _name(measure: Measure) -> str:
    return f"**`{measure.name}`**" if measure.name in DEFAULT else f"`{measure.name}`"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)
    ]
