"""A panel of a report: one route, one kind of rows, every method at every site, with its errors text by text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from aligners.datamodules.rows.policies import Rows
from aligners.datamodules.task_targets import TaskBatch
from aligners.errors import finite
from aligners.fitting.heldout_retrieval import RETRIEVAL_COLUMNS, HeldOutRows
from aligners.fitting.map_errors import (
    FAR_COLUMNS,
    FarErrors,
    far_columns,
    squared_distances,
    squared_errors,
)
from aligners.injection.behaviour import (
    BEHAVIOUR,
    BEHAVIOUR_COLUMNS,
    DRAWS,
    Behaviour,
    Natives,
    behaviour_columns,
)
from aligners.injection.methods import Method
from aligners.injection.routes import Route
from aligners.injection.scoring.scores import (
    Row,
    Sums,
    TextScores,
    UnitMeans,
    interval,
    named,
    of_unseen,
    per_text_sums,
)
from aligners.maps.canonical import reduced_mse
from aligners.progress import track

ERRORS = [
    "squares", "total", "squares_unseen", "total_unseen", "cosine", "norm", "back", "back_total", "gap", "largest",
]  # fmt: skip
FVUS = ("fvu", "fvu_seen", "fvu_unseen", "fvu_other")
FITTING = ("mse_fit", "fvu_fit", "relative_error_fit")
ERROR_COLUMNS = (
    "mse", "l2", *(f"{name}{end}" for name in FVUS for end in ("", "_low", "_high")),
    *FAR_COLUMNS.values(), "fvu_inverse", "relative_error", "cosine", "round_trip", *FITTING,
)  # fmt: skip
METHOD_COLUMNS = ("parameters", "fit", "bijective", "fitted_on", "training")
COUNTED = ["rows", "unseen"]
SQUARES = ["squares", "total"]
Columns = dict[str, Tensor]  # of a report, each (methods, S)
Inverse = Callable[[Tensor], Tensor]
EachMethod = Callable[[Iterable[Method]], Iterator[Method]]


def text_totals(
    rows: Rows,
    source: Tensor,
    target: Tensor,
    mean_source: Tensor | None,
    mean_target: Tensor,
) -> Sums:
    """Return the divisors of all methods' errors: those of `ERRORS` that need no map, each (S, B).

    Args:
        rows: which text each row belongs to.
        source: (S, N, d_x) rows that are mapped.
        target: (S, N, d_y) rows that they should be mapped to.
        mean_source: (S, d_x) mean of the source on the fitting rows; None: inverses are not measured.
        mean_target: (S, d_y) mean of the target on the fitting rows.
    """
    total = squared_distances(target, mean_target[:, None])
    back = torch.full_like(total, torch.nan)
    if mean_source is not None:
        back = squared_distances(source, mean_source[:, None])
    return {
        "total": per_text_sums(total, rows),
        "total_unseen": per_text_sums(of_unseen(total, rows), rows),
        "back_total": per_text_sums(back, rows),
        "largest": _per_text_largest(source.abs().amax(-1), rows),
    }


def text_errors(
    rows: Rows, source: Tensor, target: Tensor, mapped: Tensor, inverse: Inverse | None
) -> Sums:
    """Measure how far mapped rows are from the target's, and inverted ones from the source: `ERRORS`, each (S, B).

    Without an inverse, its errors are NaN. An inverse that is not finite has infinite errors.

    Args:
        rows: which text each row belongs to.
        source: (S, N, d_x) rows that were mapped.
        target: (S, N, d_y) rows that they should be mapped to.
        mapped: (S, N, d_y) rows that they were mapped to.
        inverse: maps target rows to source rows.
    """
    errors = _forward_errors(rows, target, mapped)
    if inverse is None:
        nothing = torch.full_like(errors["squares"], torch.nan)
        return {**errors, "back": nothing, "gap": nothing}
    back = squared_errors(inverse(target), source)
    gap = (inverse(mapped) - source).abs_().amax(-1)
    for values in (back, gap):
        values.nan_to_num_(torch.inf, torch.inf)
    errors["back"] = per_text_sums(back, rows)
    errors["gap"] = _per_text_largest(gap, rows)
    return errors


def _forward_errors(rows: Rows, target: Tensor, mapped: Tensor) -> Sums:
    """Return those of `text_errors` that need no inverse."""
    squares = squared_errors(mapped, target)
    cosine = cosine_similarity(mapped.double(), target.double(), dim=-1)
    return {
        "squares": per_text_sums(squares, rows),
        "squares_unseen": per_text_sums(of_unseen(squares, rows), rows),
        "norm": per_text_sums(squares.sqrt(), rows),
        "cosine": per_text_sums(cosine, rows),
    }


def _per_text_largest(values: Tensor, rows: Rows) -> Tensor:
    """Return the largest value over the rows of each text of a batch: (S, N) -> (S, B)."""
    zeros = values.new_zeros(len(values), rows.texts)
    return zeros.scatter_reduce(1, rows.owner.expand_as(values), values, "amax")


def error_columns(table: Sums, rows: int, width: int, seed: int) -> Columns:
    """Return the `ERROR_COLUMNS` over all held-out texts.

    Args:
        table: quantity -> (methods, S, texts).
        rows: number of rows of all texts.
        width: d_y.
        seed: seed of the resampling of texts.
    """
    sums = {name: values.sum(-1) for name, values in table.items()}
    worst = table["gap"].amax(-1)
    largest = table["largest"].amax(-1)
    columns = {
        "mse": sums["squares"] / (rows * width),
        "l2": sums["norm"] / rows,
        "fvu_inverse": sums["back"] / sums["back_total"],
        "relative_error": (sums["squares"] / sums["total"]).sqrt(),
        "cosine": sums["cosine"] / rows,
        "round_trip": worst / largest,
    }
    return columns | _fvu_columns(table, seed)


def _fvu_columns(table: Sums, seed: int) -> Columns:
    """Return FVU with its interval, on all rows, and on those of seen and of unseen types; see `error_columns`."""
    squares, total = table["squares"], table["total"]
    unseen, unseen_total = table["squares_unseen"], table["total_unseen"]
    parts = {
        "fvu": (squares, total),
        "fvu_seen": (squares - unseen, total - unseen_total),
        "fvu_unseen": (unseen, unseen_total),
    }
    columns: Columns = {}
    for name, (above, below) in parts.items():
        columns |= named(name, interval(above, below, seed=seed))
    return columns


class PanelBatch(NamedTuple):
    """What a panel gets of a batch.

    Attributes:
        batch: the batch, with its `rows` and the `texts` that they come from.
        source: (S, N, d_x) rows to map.
        target: (S, N, d_y) Y's own states at the same places; None: they were not read.
        task: the task of the target; None: nothing is injected.
        injected: (S, N', d_x) the source's states on the inputs of `task`, if these differ, as masked ones do.
        beside: the batch with far rows if `batch` leaves them out, or without if it keeps them; None: there are none.
        own: (S, N', d_y) the target's own states on the inputs of `task`, if it keeps them at the far rows of `beside`.
    """

    batch: Any
    source: Tensor
    target: Tensor | None
    task: TaskBatch | None = None
    injected: Tensor | None = None
    beside: "PanelBatch | None" = None
    own: Tensor | None = None


class Panel(nn.Module):
    """Scores every method of one route on one kind of rows, text by text, and makes the report's rows of it.

    Args:
        route: from X into Y.
        methods: floors and maps.
        texts: number of held-out texts.
        seed: seed of the resampling of texts.
        kind: kind of the rows, as a report writes it.
        means: (S, d_x) and (S, d_y) means of the fitting rows of this kind. Without Y's mean no errors are measured;
            without X's mean, none of inverses.
        behaviour: puts mapped states into the target; None: only errors are measured.
        others: number of texts from another source.
        retrieval: draws rows on which maps are scored by retrieval; None: no retrieval.
        far_rows: `data.far_rows`, where errors are measured.
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
        means: tuple[Tensor | None, Tensor | None] = (None, None),
        behaviour: Behaviour | None = None,
        others: int = 0,
        retrieval: HeldOutRows | None = None,
        far_rows: str = "leave_out",
    ) -> None:
        super().__init__()
        self.route = route
        self.methods = list(methods)
        self.texts = texts
        self.seed = seed
        self.kind = kind
        self.behaviour = behaviour
        self.retrieval = retrieval
        self.far_rows = far_rows
        self.register_buffer("mean_source", means[0])
        self.register_buffer("mean_target", means[1])
        aligners = [method.aligner for method in self.methods if method.aligner]
        self.owned = nn.ModuleList(aligners)
        self.native_answers: dict[str, Tensor] = {}  # model -> (texts,), after `rows`
        self.far_errors = nn.ModuleList()
        if self.mean_target is not None:
            for _ in self.methods:
                self.far_errors.append(FarErrors(self.mean_target))
        self._make_tables(others)

    def _make_tables(self, others: int) -> None:
        """Make the tables of sums over the batches."""
        scored = []
        if self.mean_target is not None:
            scored += ERRORS
        self.answers = list[
            str
        ]()  # methods that need no site, one for each time they are drawn
        if self.behaviour is not None:
            scored += self.behaviour.scored
            for name in self.behaviour.whole:
                self.answers += [name] * DRAWS.get(name, 1)

        count, sites = len(self.methods), len(self.route.pairs)
        self.scores = TextScores(scored, count, sites, self.texts)
        self.whole = TextScores(BEHAVIOUR, len(self.answers), 1, self.texts)
        self.lengths = TextScores(COUNTED, 1, 1, self.texts)
        self.elsewhere = TextScores(SQUARES, count, sites, others)
        self.fitting = UnitMeans((count + 1) * sites)

    def update(
        self, read: PanelBatch, natives: Natives, each: EachMethod = iter
    ) -> None:
        """Score every method at every site on one batch.

        Args:
            read: what was read of the batch.
            natives: own answers of each model that knows the task, where states are injected.
            each: iterates over the methods, and shows the progress.
        """
        text = read.batch.texts.text
        self._count(text, read.batch.rows)
        if self.behaviour is not None and read.task is not None:
            answers = self.behaviour.without_sites(read.task, natives)
            self.whole.update(text, answers)

        totals = self._totals(read)
        results = []
        for method in each(self.methods):
            results.append(self._scored(method, read, totals, natives))
        table = {}
        for name in self.scores.quantities:
            of_methods = [result[name] for result in results]
            table[name] = torch.stack(of_methods)
        self.scores.update(text, table)
        if read.beside is not None and totals:
            self._update_beside(read.beside)

    def _count(self, text: Tensor, rows: Rows) -> None:
        """Count the rows of each text, and the rows of unseen types."""
        ones = torch.ones(1, 1, len(rows), device=text.device)
        counts = per_text_sums(ones, rows)
        unseen = per_text_sums(of_unseen(ones, rows), rows)
        self.lengths.update(text, {"rows": counts, "unseen": unseen})

    def _totals(self, read: PanelBatch) -> Sums:
        """Return the divisors of all methods' errors, empty if no errors are measured. Draws rows for retrieval."""
        if self.mean_target is None or read.target is None:
            return {}
        source, target, rows = read.source, read.target, read.batch.rows
        if self.retrieval is not None:
            text = read.batch.texts.text[rows.owner]
            self.retrieval.add(source, target, text, rows.place)
        return text_totals(rows, source, target, self.mean_source, self.mean_target)

    def _scored(
        self, method: Method, read: PanelBatch, totals: Sums, natives: Natives
    ) -> Sums:
        """Score a method on one batch: its errors, and the target's answers with its states."""
        mapped = method.map(read.source, read.batch)
        sums = dict(totals)
        if read.target is not None and totals:
            inverse = method.inverse
            if self.mean_source is None:
                inverse = None
            rows = read.batch.rows
            sums |= text_errors(rows, read.source, read.target, mapped, inverse)
        if self.behaviour is None or read.task is None:
            return sums

        mapped = _put_into_target(method, read, mapped)
        native = natives[self.route.target]
        return sums | self.behaviour.injected(read.task, mapped, native)

    def _update_beside(self, read: PanelBatch) -> None:
        """Add the errors on the batch with or without far rows, the counterpart of the one that counts."""
        target = cast(Tensor, read.target)
        for method, errors in zip(self.methods, self.far_errors, strict=True):
            mapped = method.map(read.source, read.batch)
            cast(FarErrors, errors).update(mapped, target)

    def update_squares(
        self, split: str, read: PanelBatch, each: EachMethod = iter
    ) -> None:
        """Measure the squared errors of every method and site on a batch of another source, or of the fitting texts."""
        target = cast(Tensor, read.target)
        mean = cast(Tensor, self.mean_target)
        parts = []
        for method in each(self.methods):
            mapped = method.map(read.source, read.batch)
            parts.append(squared_errors(mapped, target))
        squares = torch.stack(parts)  # (methods, S, N)
        total = squared_distances(target, mean[:, None])
        if split == "fit":
            both = torch.cat([squares, total[None]])
            self.fitting.update(both.flatten(0, 1))
            return
        rows = read.batch.rows
        sums = per_text_sums(squares, rows)
        totals = per_text_sums(total, rows).expand_as(sums)
        table = {"squares": sums, "total": totals}
        self.elsewhere.update(read.batch.texts.text, table)

    # ------------------------------------------------------------------ after

    def rows(self, quiet: bool = True) -> list[Row]:
        """Return a row for every method and site, after those that need no site; show progress unless `quiet`."""
        about = self._about()
        table = self.scores.compute()
        columns: Columns = {}
        rows: list[Row] = []
        if self.behaviour is not None:
            asked = self.behaviour.asked
            whole = self.whole.compute()
            native = self._native(whole)
            about["n_units"] = int(native["units"].sum())
            about["score_name"] = asked.score
            answers = behaviour_columns(whole, native, asked, self.seed)
            rows += self._rows_without_sites(answers)
            columns |= behaviour_columns(table, native, asked, self.seed)
        if self.mean_target is not None:
            columns |= self._errors(table, about["n_rows"])
        columns |= self._retrieval(quiet)
        rows += self._rows_of_sites(columns, _overflows(table))
        return [about | row for row in rows]

    def _about(self) -> Row:
        """Return the columns that all rows have in common."""
        counts = self.lengths.compute()
        unseen = counts["unseen"].sum()
        return {
            "model_x": self.route.source.name,
            "model_y": self.route.target.name,
            "same_model": self.route.same,
            "direction": self.route.key,
            "rows": self.kind,
            "n_texts": self.texts,
            "n_rows": int(counts["rows"].sum()),
            "n_unseen": int(unseen) if unseen.isfinite() else None,
            "n_units": None,
            "n_texts_other": len(self.elsewhere.seen) or None,
            "seed": self.seed,
            "score_name": None,
        }

    def _native(self, whole: Sums) -> Sums:
        """Score the target's own answers, text by text; the answers of both models are kept."""
        own = {
            "native_x": self.route.source.name,
            "native_y": self.route.target.name,
            "native": self.route.target.name,
        }
        self.native_answers = {}
        target = 0
        for place, name in enumerate(self.answers):
            if name in own:
                self.native_answers[own[name]] = whole["answer"][place, 0]
            if name in ("native_y", "native"):
                target = place
        return {quantity: values[target, 0] for quantity, values in whole.items()}

    def _rows_without_sites(self, columns: Columns) -> Iterator[Row]:
        """Return a row for each ceiling and floor that needs no site."""
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self.answers):
            places.setdefault(name, []).append(place)
        for name, draws in places.items():
            role = "ceiling" if name.startswith("native") else "floor"
            found = _over_draws(columns, draws)
            yield _row(name, role, (None, None), {}, found)

    def _rows_of_sites(self, columns: Columns, overflows: Tensor) -> Iterator[Row]:
        """Return a row for each method and site pair."""
        pairs = self.route.pairs
        for place, method in enumerate(self.methods):
            reduced = reduced_mse(method.aligner, len(pairs))
            about = {"fitted_on": self.kind, **method.about}
            for s, pair in enumerate(pairs):
                about["training"] = method.outcome(s)
                found = _figures(columns, place, s)
                found["mse_reduced"] = reduced[s]
                found["overflow"] = bool(overflows[place, s])
                yield _row(method.name, method.role, pair, about, found)

    def _errors(self, table: Sums, rows: int) -> Columns:
        """Return the columns of errors on held-out rows, other texts, and fitting rows, each (methods, S)."""
        width = self.route.target.width
        columns = error_columns(table, rows, width, self.seed)
        if self.elsewhere.update_called:
            other = self.elsewhere.compute()
            figures = interval(other["squares"], other["total"], seed=self.seed)
            columns |= named("fvu_other", figures)
        if self.fitting.update_called:
            columns |= self._fitting_columns(width)
        far = None
        each = cast(Sequence[FarErrors], self.far_errors)
        if each[0].update_called:
            far = torch.stack([errors.compute() for errors in each])
        return columns | far_columns(self.far_rows, far, columns["fvu"])

    def _fitting_columns(self, width: int) -> Columns:
        """Return the columns of the fitting rows."""
        sites = len(self.route.pairs)
        means = self.fitting.compute().cpu()
        squares = means[:-sites].view(-1, sites)
        total = means[-sites:]
        fvu = squares / total
        figures = squares / width, fvu, fvu.sqrt()
        return dict(zip(FITTING, figures, strict=True))

    def _retrieval(self, quiet: bool) -> Columns:
        """Return the columns of retrieval, each (methods, S); NaN for a floor that is no map."""
        if self.retrieval is None:
            return {}
        drawn = self.retrieval.end()
        shape = len(self.methods), len(self.route.pairs)
        nothing = torch.full(shape, torch.nan, dtype=torch.float64)
        columns = {name: nothing.clone() for name in RETRIEVAL_COLUMNS}
        methods = track(self.methods, "Retrieval", disable=quiet)
        for place, method in enumerate(methods):
            if method.aligner is None:
                continue
            found = self.retrieval.columns(method.map(drawn, None))
            for name, values in found.items():
                columns[name][place] = values
        return columns


def _put_into_target(method: Method, read: PanelBatch, mapped: Tensor) -> Tensor:
    """Return the rows (S, N', d_y) that are put into the target: mapped ones, with its own where far rows are kept."""
    if read.injected is not None:
        mapped = method.map(read.injected, cast(TaskBatch, read.task))
    if read.own is not None and read.beside is not None:
        far = read.beside.batch.rows.far
        mapped = _own_where_far(mapped, read.own, far)
    return mapped


def _own_where_far(mapped: Tensor, own: Tensor, far: Tensor) -> Tensor:
    """Put the target's own states (S, N, d_y) at far rows (N,), among all rows mapped or only near ones."""
    own = own.to(mapped.dtype)
    if mapped.shape[1] == own.shape[1]:
        return own.where(far[:, None], mapped)
    near = (~far).nonzero()[:, 0]
    return own.index_copy(1, near, mapped)


def _overflows(table: Sums) -> Tensor:
    """Return where some output of a method is not finite, (methods, S)."""
    overflows = torch.tensor(False)
    for name in ("loss", "squares"):
        if name in table:
            overflows = overflows | ~table[name].isfinite().all(-1)
    for name in ("back", "gap"):
        if name in table:  # NaN where there is no inverse
            overflows = overflows | table[name].isinf().any(-1)
    return overflows


def _row(
    name: str,
    role: str,
    pair: Sequence[int | None],
    about: Mapping[str, Any],
    found: Row,
) -> Row:
    """Return the columns of a method at a site pair; null where there is no figure."""
    site_x, site_y = pair
    row = {"method": name, "role": role, "site_x": site_x, "site_y": site_y}
    for column in METHOD_COLUMNS:
        row[column] = about.get(column)
    figures = *BEHAVIOUR_COLUMNS, *ERROR_COLUMNS, "mse_reduced", *RETRIEVAL_COLUMNS
    return {**row, **dict.fromkeys(figures), "overflow": False, **found}


def _over_draws(columns: Columns, draws: list[int]) -> Row:
    """Return one row's figures: of several draws the mean, with an interval from the least to the largest."""
    if len(draws) == 1:
        return _figures(columns, draws[0], 0)
    found: Row = {
        "fit": f"mean of {len(draws)} draws, interval from the least to the largest"
    }
    for name, values in columns.items():
        figure, _, end = name.rpartition("_")
        if end == "low":
            value = columns[figure][draws, 0].amin()
        elif end == "high":
            value = columns[figure][draws, 0].amax()
        else:
            value = values[draws, 0].mean()
        found[name] = finite(value)
    return found


def _figures(columns: Columns, method: int, site: int) -> Row:
    """Return the figures of one row; null where a figure does not apply or, as `overflow` then says, is not finite."""
    return {name: finite(column[method, site]) for name, column in columns.items()}
