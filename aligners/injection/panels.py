"""A panel of a report: one route, one kind of rows, every method at every site."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aligners.injection.behaviour import BEHAVIOUR, BEHAVIOUR_COLUMNS, Answered, Behaviour, behaviour_columns
from aligners.injection.methods import Method
from aligners.injection.routes import Route
from aligners.injection.scoring.scores import TextScores, UnitMeans, of_unseen, per_text_sums
from aligners.injection.text_errors import (
    ERROR_COLUMNS,
    ERRORS,
    error_columns,
    fitting_columns,
    overflowing,
    text_errors,
)
from aligners.maps.canonical import reduced_mse
from aligners.models.model import FrozenModel
from datamodules.asking import TaskBatch

__all__ = ["METHOD_COLUMNS", "Panel", "Read"]

METHOD_COLUMNS = ("parameters", "fit", "bijective", "fitted_on")
COUNTED, SQUARES = ["rows", "unseen"], ["squares", "total"]


class Read(NamedTuple):
    """What a panel reads of a batch.

    Attributes:
        batch: with `rows`, and `texts` they are of.
        source: (S, N, d_x) what is mapped.
        target: (S, N, d_y) Y's own states there; None: they were not read.
        task: what is asked; None: nothing is injected.
        injected: (S, N', d_x) the source's states on the inputs of `task`, where these are others, as masked ones are.
    """

    batch: Any
    source: Tensor
    target: Tensor | None
    task: TaskBatch | None = None
    injected: Tensor | None = None


class Panel(nn.Module):
    """Scores every method of one route on one kind of rows, text by text, and makes the report's rows of it.

    Args:
        route: from X into Y.
        methods: floors and maps.
        texts: number of held-out texts.
        seed: of the resampling of texts.
        kind: of the rows, as a report writes it.
        means: (S, d_x) and (S, d_y) means of the fitting rows of this kind; None: no errors are measured. Without
            those of X nothing is said of inverses.
        behaviour: puts mapped states into the target; None: only errors are measured.
        others: number of texts of another source.
        fitting: whether the fitting texts are read as well.
    """

    mean_source: Tensor | None
    mean_target: Tensor | None

    def __init__(
        self,
        route: Route,
        methods: Sequence[Method],
        texts: int,
        seed: int,
        *,
        kind: str = "tokens",
        means: tuple[Tensor | None, Tensor] | None,
        behaviour: Behaviour | None,
        others: int = 0,
        fitting: bool = False,
    ) -> None:
        super().__init__()
        self.route, self.kind, self.behaviour = route, kind, behaviour
        self.methods, self.texts, self.seed = list(methods), texts, seed
        self.owned = nn.ModuleList(method.aligner for method in self.methods if method.aligner)
        for name, mean in zip(("mean_source", "mean_target"), means or (None, None), strict=True):
            self.register_buffer(name, None if mean is None else mean[:, None])
        sites = len(route.pairs)
        scored = [*(ERRORS if means else []), *(BEHAVIOUR if behaviour else [])]
        self.scores = TextScores(scored, len(self.methods), sites, texts)
        self.whole = TextScores(BEHAVIOUR, len(behaviour.whole), 1, texts) if behaviour else None
        self.lengths = TextScores(COUNTED, 1, 1, texts)
        self.elsewhere = TextScores(SQUARES, len(self.methods), sites, others) if others else None
        self.fitting = UnitMeans(1 + len(SQUARES) * len(self.methods) * sites) if fitting else None

    def update(self, read: Read, natives: dict[FrozenModel, Answered]) -> None:
        """Score every method at every site on one batch.

        Args:
            read: of the batch.
            natives: what each model that knows the task answers by itself, where states are injected.
        """
        text, rows = read.batch.texts.text, read.batch.rows
        ones = torch.ones(1, 1, len(rows), device=text.device)
        counted = ones, of_unseen(ones, rows)
        self.lengths.update(text, {n: per_text_sums(v, rows) for n, v in zip(COUNTED, counted, strict=True)})
        if self.behaviour is not None and self.whole is not None and read.task is not None:
            self.whole.update(text, self.behaviour.without_sites(read.task, natives))
        each = [self._of(method, read, natives) for method in self.methods]
        self.scores.update(text, {name: torch.stack([e[name] for e in each]) for name in self.scores.quantities})

    def _of(self, method: Method, read: Read, natives: dict[FrozenModel, Answered]) -> dict[str, Tensor]:
        """Errors and behaviour of one method: quantity -> (S, B)."""
        mapped, found = method.map(read.source, read.batch), {}
        if self.mean_target is not None and read.target is not None:
            found = text_errors(method, read.batch.rows, read.source, read.target, mapped, self._means())
        if self.behaviour is not None and read.task is not None:
            put = mapped if read.injected is None else method.map(read.injected, read.task)
            found.update(self.behaviour.injected(read.task, put, natives[self.route.target]))
        return found

    def _means(self) -> tuple[Tensor | None, Tensor]:
        return self.mean_source, torch.as_tensor(self.mean_target)

    def update_other(self, read: Read) -> None:
        """Measure how far every method is off at every site on a batch of another source."""
        if self.elsewhere is not None and read.target is not None:
            self.elsewhere.update(read.batch.texts.text, self._squares(read))

    def update_fitting(self, read: Read) -> None:
        """The same on a batch of the fitting texts."""
        if self.fitting is not None and read.target is not None:
            counts = torch.as_tensor(read.batch.rows.counts, device=read.source.device)
            squares = torch.stack(list(self._squares(read).values()))
            self.fitting.update(torch.cat([counts[None].double(), squares.flatten(0, -2)]))

    def _squares(self, read: Read) -> dict[str, Tensor]:
        """Squared errors of every method, and what they are shares of: quantity -> (methods, S, B)."""
        rows, means, target = read.batch.rows, self._means(), torch.as_tensor(read.target)
        found = [
            text_errors(m._replace(inverse=None), rows, read.source, target, m.map(read.source, read.batch), means)
            for m in self.methods
        ]
        return {name: torch.stack([errors[name] for errors in found]) for name in SQUARES}

    # ------------------------------------------------------------------ after

    def rows(self) -> list[dict[str, Any]]:
        """One row for every method and site, after those of what needs no site."""
        counted, unseen = (each.sum() for each in self.lengths.compute().values())
        whole = None if self.whole is None else self.whole.compute()
        base = {
            "model_x": self.route.source.name,
            "model_y": self.route.target.name,
            "same_model": self.route.same,
            "direction": self.route.key,
            "rows": self.kind,
            "n_texts": self.texts,
            "n_rows": int(counted),
            "n_unseen": int(unseen) if unseen.isfinite() else None,
            "n_units": None if whole is None else int(whole["units"][0, 0].sum()),
            "n_texts_other": None if self.elsewhere is None else len(self.elsewhere.seen),
            "seed": self.seed,
            "score_name": None if self.behaviour is None else self.behaviour.asked.score,
        }
        native = {} if whole is None else self._native(whole)
        return [{**base, **row} for row in (*self._without_sites(whole, native), *self._with_sites(native, counted))]

    def _native(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Y by itself: quantity -> (texts,)."""
        names = self.behaviour.whole if self.behaviour is not None else ()
        place = names.index("native_y" if "native_y" in names else "native")
        return {name: values[place, 0] for name, values in whole.items()}

    def _without_sites(self, whole: dict[str, Tensor] | None, native: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
        if whole is None or self.behaviour is None:
            return
        columns = behaviour_columns(whole, native, self.behaviour.asked, self.seed)
        for place, name in enumerate(self.behaviour.whole):
            yield {
                "method": name,
                "role": "ceiling" if name.startswith("native") else "floor",
                **dict.fromkeys(("site_x", "site_y", *METHOD_COLUMNS, "training")),
                **_take(columns, place, 0),
                **dict.fromkeys(ERROR_COLUMNS),
                "mse_reduced": None,
                "overflow": False,
            }

    def _with_sites(self, native: dict[str, Tensor], counted: Tensor) -> Iterator[dict[str, Any]]:
        table = self.scores.compute()
        overflows = torch.zeros(len(self.methods), len(self.route.pairs), dtype=torch.bool)
        columns: dict[str, Tensor] = {}
        if self.behaviour is not None:
            columns |= behaviour_columns(table, native, self.behaviour.asked, self.seed)
            overflows |= ~table["loss"].isfinite().all(-1)
        if self.mean_target is not None:
            columns |= self._errors(table, counted)
            overflows |= overflowing(table)
        missing = dict.fromkeys((*BEHAVIOUR_COLUMNS, *ERROR_COLUMNS))
        for place, method in enumerate(self.methods):
            about = {"fitted_on": self.kind, **method.about}
            reduced = reduced_mse(method.aligner, len(self.route.pairs))
            for s, (site_x, site_y) in enumerate(self.route.pairs):
                yield {
                    "method": method.name,
                    "role": method.role,
                    "site_x": site_x,
                    "site_y": site_y,
                    **{name: about.get(name) for name in METHOD_COLUMNS},
                    "training": method.outcome(s),
                    **missing,
                    **_take(columns, place, s),
                    "mse_reduced": reduced[s],
                    "overflow": bool(overflows[place, s]),
                }

    def _errors(self, table: dict[str, Tensor], counted: Tensor) -> dict[str, Tensor]:
        nothing = {name: torch.full_like(table[name], torch.nan) for name in SQUARES}
        other = nothing if self.elsewhere is None else self.elsewhere.compute()
        width = self.route.target.width
        return error_columns(table, other, counted, width, self.seed) | self._fitting_errors(width)

    def _fitting_errors(self, width: int) -> dict[str, Tensor]:
        """The columns of the fitting rows, each (methods, S)."""
        kept = torch.full((1 + len(SQUARES) * len(self.methods) * len(self.route.pairs),), torch.nan)
        kept = kept if self.fitting is None else self.fitting.compute().cpu()
        squares, total = kept[1:].reshape(len(SQUARES), len(self.methods), -1)
        return fitting_columns(kept[0], squares, total, width)


def _take(columns: dict[str, Tensor], method: int, site: int) -> dict[str, float | None]:
    """One row's figures; null where a figure does not apply or, as `overflow` then says, is not finite."""
    values = {name: float(column[method, site]) for name, column in columns.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
