"""A panel of a report: one direction, one kind of rows, every method at every site."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from aligners.injection.behaviour import BEHAVIOUR, BEHAVIOUR_COLUMNS, Behaviour, behaviour_columns
from aligners.injection.methods import WHOLE, Method, Route, build_floors
from aligners.injection.text_errors import ERROR_COLUMNS, ERRORS, error_columns, overflowing, text_errors
from aligners.scoring.scores import TextScores, of_unseen, per_text_sums
from datamodules.reading import PairedBatch, RowKind
from frozen.model import FrozenModel
from similarity.functional.moments import Moments

__all__ = ["METHOD_COLUMNS", "Panel"]

METHOD_COLUMNS = ("parameters", "fit", "bijective", "fitted_on")


class Panel(nn.Module):
    """Scores every method of one direction on one kind of rows, text by text, and makes the report's rows of it.

    Args:
        route: the maps.
        kind: of the rows.
        moments: of the fitting rows of this kind, for X and Y.
        sites: site pairs of X and Y.
        texts: number of held-out texts.
        others: number of texts of another source.
        behaviour: puts mapped states into the target; None: only errors are measured.
        seed: of the random floors and of the resampling of texts.
    """

    mean_source: Tensor
    mean_target: Tensor

    def __init__(
        self,
        route: Route,
        kind: RowKind,
        moments: Moments,
        sites: list[tuple[int, int]],
        texts: int,
        others: int,
        behaviour: Behaviour | None,
        seed: int,
    ) -> None:
        super().__init__()
        self.route, self.kind, self.behaviour = route, kind, behaviour
        self.sites, self.texts, self.seed = [route.orient(*pair) for pair in sites], texts, seed
        moments = moments if route.direction == "forward" else moments.swap()
        self.methods: list[Method] = [*build_floors(route, moments, seed), *route.methods]
        self.owned = nn.ModuleList(method.aligner for method in self.methods if method.aligner)
        self.register_buffer("mean_source", moments.mean_x[:, None])
        self.register_buffer("mean_target", moments.mean_y[:, None])
        scored = [*ERRORS, *(BEHAVIOUR if behaviour else [])]
        self.scores = TextScores(scored, len(self.methods), len(sites), texts)
        self.whole = TextScores(BEHAVIOUR, len(WHOLE), 1, texts) if behaviour else None
        self.lengths = TextScores(["rows", "unseen"], 1, 1, texts)
        self.elsewhere = TextScores(["squares", "total"], len(self.methods), len(sites), others) if others else None

    def update(self, batch: PairedBatch, natives: dict[FrozenModel, Tensor]) -> None:
        """Score every method at every site on one batch.

        Args:
            batch: rows of this panel's kind.
            natives: (B, C) what each model with a head for the task says by itself, where states are injected.
        """
        text = batch.texts.text
        ones = torch.ones(1, 1, len(batch.rows), device=text.device)
        counted = {"rows": ones, "unseen": of_unseen(ones, batch.rows)}
        self.lengths.update(text, {name: per_text_sums(each, batch.rows) for name, each in counted.items()})
        if self.behaviour is not None and self.whole is not None:
            self.whole.update(text, self.behaviour.whole(batch, natives))
        source, target = self.route.orient(batch.x, batch.y)
        means = self.mean_source, self.mean_target
        collected: dict[str, list[Tensor]] = {name: [] for name in self.scores.quantities}
        for method in self.methods:
            mapped = method.map(source, batch)
            found = text_errors(method, batch.rows, source, target, mapped, means)
            if self.behaviour is not None:
                found.update(self.behaviour.injected(batch, mapped, natives[self.route.target]))
            for name, values in found.items():
                collected[name].append(values)
        self.scores.update(text, {name: torch.stack(values) for name, values in collected.items()})

    def update_other(self, batch: PairedBatch) -> None:
        """Measure how far every method is off at every site on a batch of another source."""
        if self.elsewhere is None:
            return
        source, target = self.route.orient(batch.x, batch.y)
        means = self.mean_source, self.mean_target
        found = [
            text_errors(method._replace(inverse=None), batch.rows, source, target, method.map(source, batch), means)
            for method in self.methods
        ]
        each = {name: torch.stack([errors[name] for errors in found]) for name in self.elsewhere.quantities}
        self.elsewhere.update(batch.texts.text, each)

    # ------------------------------------------------------------------ after

    def rows(self) -> list[dict[str, Any]]:
        """One row for every method and site, after those of what needs no site."""
        counted, unseen = (each.sum() for each in self.lengths.compute().values())
        base = {
            "model_x": self.route.source.name,
            "model_y": self.route.target.name,
            "direction": self.route.direction,
            "rows": str(self.kind),
            "n_texts": self.texts,
            "n_rows": int(counted),
            "n_unseen": int(unseen) if unseen.isfinite() else None,
            "n_texts_other": None if self.elsewhere is None else len(self.elsewhere.seen),
            "seed": self.seed,
            "score_name": None if self.behaviour is None else self.behaviour.task.score,
        }
        return [{**base, **row} for row in (*self._rows_of_whole(), *self._rows_of_sites(counted))]

    def _rows_of_whole(self) -> Iterator[dict[str, Any]]:
        if self.whole is None:
            return
        behaviour = self._behaviour(self.whole.compute())
        for place, name in enumerate(WHOLE):
            yield {
                "method": name,
                "role": "ceiling" if name.startswith("native") else "floor",
                **dict.fromkeys(("site_x", "site_y", *METHOD_COLUMNS, "training")),
                **_take(behaviour, place, 0),
                **dict.fromkeys(ERROR_COLUMNS),
                "overflow": False,
            }

    def _behaviour(self, table: dict[str, Tensor]) -> dict[str, Tensor]:
        native = cast(Any, self.whole).compute()["answer"][WHOLE.index("native_y"), 0]
        return behaviour_columns(table, native, cast(Any, self.behaviour).task, self.seed)

    def _rows_of_sites(self, counted: Tensor) -> Iterator[dict[str, Any]]:
        table = self.scores.compute()
        overflows = overflowing(table)
        nothing = {name: torch.full_like(table[name], torch.nan) for name in ("squares", "total")}
        other = nothing if self.elsewhere is None else self.elsewhere.compute()
        columns = error_columns(table, other, counted, self.route.target.width, self.seed)
        if self.behaviour is not None:
            columns = {**self._behaviour(table), **columns}
            overflows |= ~table["loss"].isfinite().all(-1)
        missing = {} if self.behaviour is not None else dict.fromkeys(BEHAVIOUR_COLUMNS)
        for place, method in enumerate(self.methods):
            about = {"fitted_on": str(self.kind), **method.about}
            for s, (site_x, site_y) in enumerate(self.sites):
                yield {
                    "method": method.name,
                    "role": method.role,
                    "site_x": site_x,
                    "site_y": site_y,
                    **{name: about.get(name) for name in METHOD_COLUMNS},
                    "training": about["training"][s] if "training" in about else None,
                    **missing,
                    **_take(columns, place, s),
                    "overflow": bool(overflows[place, s]),
                }


def _take(columns: dict[str, Tensor], method: int, site: int) -> dict[str, float | None]:
    """One row's figures; null where a figure does not apply or, as `overflow` then says, is not finite."""
    values = {name: float(column[method, site]) for name, column in columns.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
