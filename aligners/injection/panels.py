"""A panel of a report: one route, one kind of rows, every method at every site, with its errors text by text."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

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
Inverse = Callable[[Tensor], Tensor]


def text_totals(
    rows: Rows,
    source: Tensor,
    target: Tensor,
    mean_source: Tensor | None,
    mean_target: Tensor,
) -> Sums:
    """What the errors of every method are compared with: those of `ERRORS` that need none, quantity -> (S, B).

    Args:
        rows: which text each row belongs to.
        source: (S, N, d_x) what is mapped.
        target: (S, N, d_y) what it should be.
        mean_source: (S, 1, d_x) mean of the source on the fitting rows; None: nothing is said of inverses.
        mean_target: (S, 1, d_y) that of the target.
    """
    total = squared_distances(target, mean_target)
    back = torch.full_like(total, torch.nan)
    if mean_source is not None:
        back = squared_distances(source, mean_source)
    return {
        "total": per_text_sums(total, rows),
        "total_unseen": per_text_sums(of_unseen(total, rows), rows),
        "back_total": per_text_sums(back, rows),
        "largest": _per_text_largest(source.abs().amax(-1), rows),
    }


def text_errors(
    rows: Rows, source: Tensor, target: Tensor, mapped: Tensor, inverse: Inverse | None
) -> Sums:
    """How far the mapped rows are from Y's own, and the inverse's from X's: the others of `ERRORS`, each (S, B).

    Where there is no inverse, what is said of it is NaN; an inverse that gives no number is infinitely far off.

    Args:
        rows: which text each row belongs to.
        source: (S, N, d_x) what was mapped.
        target: (S, N, d_y) what it should be.
        mapped: (S, N, d_y) what it is.
        inverse: from target rows to source rows.
    """
    squares = squared_errors(mapped, target)
    values = {
        "squares": squares,
        "squares_unseen": of_unseen(squares, rows),
        "norm": squares.sqrt(),
        "cosine": torch.nn.functional.cosine_similarity(
            mapped.double(), target.double(), dim=-1
        ),
    }
    errors = {name: per_text_sums(part, rows) for name, part in values.items()}
    if inverse is None:
        errors["back"] = errors["gap"] = torch.full_like(errors["squares"], torch.nan)
        return errors
    back = squared_errors(inverse(target), source)
    gap = (inverse(mapped) - source).abs_().amax(-1)
    errors["back"] = per_text_sums(back.nan_to_num(torch.inf, torch.inf), rows)
    errors["gap"] = _per_text_largest(gap.nan_to_num(torch.inf, torch.inf), rows)
    return errors


def _per_text_largest(values: Tensor, rows: Rows) -> Tensor:
    """The largest over the rows of each text of a batch: (S, N) -> (S, B)."""
    zeros = values.new_zeros(len(values), rows.texts)
    return zeros.scatter_reduce(1, rows.owner.expand_as(values), values, "amax")


def error_columns(
    table: Sums, other: Sums, rows: Tensor, width: int, seed: int
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
    parts = {
        "fvu": (table["squares"], table["total"]),
        "fvu_seen": (table["squares"] - unseen, table["total"] - unseen_total),
        "fvu_unseen": (unseen, unseen_total),
        "fvu_other": (other["squares"], other["total"]),
    }
    fvus: dict[str, Tensor] = {}
    for name, part in parts.items():
        fvus |= named(name, interval(*part, seed=seed))
    return {
        "mse": squares / (rows * width),
        "l2": table["norm"].sum(-1) / rows,
        **fvus,
        "fvu_inverse": table["back"].sum(-1) / table["back_total"].sum(-1),
        "relative_error": (squares / total).sqrt(),
        "cosine": table["cosine"].sum(-1) / rows,
        "round_trip": table["gap"].amax(-1) / table["largest"].amax(-1),
    }


METHOD_COLUMNS = ("parameters", "fit", "bijective", "fitted_on", "training")
Row = dict[str, Any]
COUNTED, SQUARES = ["rows", "unseen"], ["squares", "total"]


class PanelBatch(NamedTuple):
    """What a panel is given of a batch.

    Attributes:
        batch: with `rows`, and `texts` they are of.
        source: (S, N, d_x) what is mapped.
        target: (S, N, d_y) Y's own states there; None: they were not read.
        task: what is asked; None: nothing is injected.
        injected: (S, N', d_x) the source's states on the inputs of `task`, where these are others, as masked ones are.
        beside: with far rows where they are left out of `batch`, or without where they are kept; None: there are none.
        own: (S, N', d_y) the target's own states on the inputs of `task`, where far rows are left as they are.
    """

    batch: Any
    source: Tensor
    target: Tensor | None
    task: TaskBatch | None = None
    injected: Tensor | None = None
    beside: "PanelBatch | None" = None
    own: Tensor | None = None


EachMethod = Callable[[Iterable[Method]], Iterator[Method]]


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
        retrieval: draws rows on which maps are scored by retrieval; None: they are not.
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
        means: tuple[Tensor | None, Tensor] | None,
        behaviour: Behaviour | None,
        others: int = 0,
        fitting: bool = False,
        retrieval: HeldOutRows | None = None,
        far_rows: str = "leave_out",
    ) -> None:
        super().__init__()
        self.route = route
        self.kind = kind
        self.behaviour = behaviour
        self.methods = list(methods)
        self.texts = texts
        self.seed = seed
        self.retrieval = retrieval
        self.far_rows = far_rows
        self.far_errors = nn.ModuleList()
        self.owned = nn.ModuleList(
            method.aligner for method in self.methods if method.aligner
        )
        mean_source, mean_target = means or (None, None)
        self.register_buffer(
            "mean_source", None if mean_source is None else mean_source[:, None]
        )
        self.register_buffer(
            "mean_target", None if mean_target is None else mean_target[:, None]
        )

        count, sites = len(self.methods), len(route.pairs)
        scored: list[str] = []
        if means:
            scored += ERRORS
        self.answers: list[str] = []  # what needs no site, as often as it is drawn
        self.whole: TextScores | None = None
        if behaviour is not None:
            scored += behaviour.scored
            for name in behaviour.whole:
                self.answers += [name] * DRAWS.get(name, 1)
            self.whole = TextScores(BEHAVIOUR, len(self.answers), 1, texts)
        self.scores = TextScores(scored, count, sites, texts)
        self.lengths = TextScores(COUNTED, 1, 1, texts)
        self.native_answers: dict[
            str, Tensor
        ] = {}  # model -> (texts,), once there are rows
        self.elsewhere: TextScores | None = None
        if others:
            self.elsewhere = TextScores(SQUARES, count, sites, others)
        self.fitting: UnitMeans | None = None
        if fitting:
            self.fitting = UnitMeans(1 + len(SQUARES) * count * sites)

    def update(
        self, read: PanelBatch, natives: Natives, each: EachMethod = iter
    ) -> None:
        """Score every method at every site on one batch.

        Args:
            read: of the batch.
            natives: what each model that knows the task answers by itself, where states are injected.
            each: goes through the methods, and shows how far it is.
        """
        text, rows = read.batch.texts.text, read.batch.rows
        ones = torch.ones(1, 1, len(rows), device=text.device)
        counted = per_text_sums(ones, rows)
        unseen = per_text_sums(of_unseen(ones, rows), rows)
        self.lengths.update(text, {"rows": counted, "unseen": unseen})
        if (
            self.behaviour is not None
            and self.whole is not None
            and read.task is not None
        ):
            self.whole.update(text, self.behaviour.without_sites(read.task, natives))
        totals = Sums()
        if self.mean_target is not None and read.target is not None:
            totals = text_totals(
                rows, read.source, read.target, self.mean_source, self.mean_target
            )
            if self.retrieval is not None:
                self.retrieval.add(
                    read.source, read.target, text[rows.owner], rows.place
                )
        results = [
            self._scored(method, read, totals, natives) for method in each(self.methods)
        ]
        table = {}
        for name in self.scores.quantities:
            table[name] = torch.stack([result[name] for result in results])
        self.scores.update(text, table)
        if read.beside is not None and totals:
            self._update_beside(read.beside)

    def _scored(
        self, method: Method, read: PanelBatch, totals: Sums, natives: Natives
    ) -> Sums:
        """What a method scores on one batch: its errors, and what the target does with its states."""
        mapped = method.map(read.source, read.batch)
        sums = dict(totals)
        if read.target is not None and totals:
            inverse = None if self.mean_source is None else method.inverse
            sums |= text_errors(
                read.batch.rows, read.source, read.target, mapped, inverse
            )
        if self.behaviour is not None and read.task is not None:
            put = mapped
            if read.injected is not None:
                put = method.map(read.injected, read.task)
            if read.own is not None:
                put = self._beside_far(put, read)
            sums |= self.behaviour.injected(read.task, put, natives[self.route.target])
        return sums

    def _update_beside(self, read: PanelBatch) -> None:
        """Add the errors on the rows that stand beside those that count."""
        if not self.far_errors:
            mean = cast(Tensor, self.mean_target)[:, 0]
            self.far_errors.extend(
                FarErrors(mean).to(mean.device) for _ in self.methods
            )
        target = cast(Tensor, read.target)
        for method, errors in zip(self.methods, self.far_errors, strict=True):
            mapped = method.map(read.source, read.batch)
            cast(FarErrors, errors).update(mapped, target)

    @staticmethod
    def _beside_far(mapped: Tensor, read: PanelBatch) -> Tensor:
        """What is put into the target: mapped rows, and its own states where rows are far."""
        own, far = cast(Tensor, read.own), cast(PanelBatch, read.beside).batch.rows.far
        if far is None:
            return mapped
        if mapped.shape[1] == own.shape[1]:  # all rows were mapped
            return own.to(mapped.dtype).where(far[:, None], mapped)
        return own.to(mapped.dtype).index_copy(1, (~far).nonzero()[:, 0], mapped)

    def update_squares(
        self, split: str, read: PanelBatch, each: EachMethod = iter
    ) -> None:
        """Measure how far every method is off at every site on a batch of another source, or of the fitting texts."""
        rows = read.batch.rows
        target = cast(Tensor, read.target)
        total = per_text_sums(
            squared_distances(target, cast(Tensor, self.mean_target)), rows
        )
        parts = []
        for method in each(self.methods):
            errors = squared_errors(method.map(read.source, read.batch), target)
            parts.append(per_text_sums(errors, rows))
        sums = torch.stack(parts)  # (methods, S, B)
        totals = total.expand_as(sums)
        if split == "other" and self.elsewhere is not None:
            squares = {"squares": sums, "total": totals}
            self.elsewhere.update(read.batch.texts.text, squares)
        elif self.fitting is not None:
            counts = torch.as_tensor(rows.counts, device=read.source.device)
            values = torch.stack([sums, totals]).flatten(0, -2)
            self.fitting.update(torch.cat([counts[None].double(), values]))

    # ------------------------------------------------------------------ after

    def rows(self, quiet: bool = True) -> list[Row]:
        """One row for every method and site, after those of what needs no site; unless `quiet`, show how far it is."""
        counted, unseen = (count.sum() for count in self.lengths.compute().values())
        whole = {} if self.whole is None else self.whole.compute()
        base = {
            "model_x": self.route.source.name,
            "model_y": self.route.target.name,
            "same_model": self.route.same,
            "direction": self.route.key,
            "rows": self.kind,
            "n_texts": self.texts,
            "n_rows": int(counted),
            "n_unseen": int(unseen) if unseen.isfinite() else None,
            "n_units": int(whole["units"][0, 0].sum()) if whole else None,
            "n_texts_other": None
            if self.elsewhere is None
            else len(self.elsewhere.seen),
            "seed": self.seed,
            "score_name": None
            if self.behaviour is None
            else self.behaviour.asked.score,
        }
        return [{**base, **row} for row in self._rows(whole, counted, quiet)]

    def _rows(
        self, whole: dict[str, Tensor], counted: Tensor, quiet: bool
    ) -> Iterator[Row]:
        table, pairs = self.scores.compute(), self.route.pairs
        overflows = torch.zeros(len(self.methods), len(pairs), dtype=torch.bool)
        columns: dict[str, Tensor] = {}
        if self.behaviour is not None:
            native = self._native(whole)
            yield from self._rows_without_sites(whole, native)
            columns |= behaviour_columns(table, native, self.behaviour.asked, self.seed)
            overflows |= ~table["loss"].isfinite().all(-1)
        if self.mean_target is not None:
            columns |= self._errors(table, counted)
            infinite = table["back"].isinf() | table["gap"].isinf()
            overflows |= (~table["squares"].isfinite() | infinite).any(-1)
        drawn = None
        if self.retrieval is not None:
            drawn = self.retrieval.end()
        methods = list(enumerate(self.methods))
        for place, method in track(
            methods, "Retrieval", disable=quiet or drawn is None
        ):
            reduced = reduced_mse(method.aligner, len(pairs))
            retrieved = {}
            if (
                drawn is not None
                and self.retrieval is not None
                and method.aligner is not None
            ):
                retrieved = self.retrieval.columns(method.map(drawn, None))
            for s, pair in enumerate(pairs):
                about = {
                    "fitted_on": self.kind,
                    **method.about,
                    "training": method.outcome(s),
                }
                extra = {
                    "mse_reduced": reduced[s],
                    "overflow": bool(overflows[place, s]),
                }
                extra |= {name: finite(values[s]) for name, values in retrieved.items()}
                found = _figures(columns, place, s) | extra
                yield _row(method.name, method.role, pair, about, found)

    def _native(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the target does by itself, text by text; the answers of both models are kept."""
        own = {
            "native_x": self.route.source.name,
            "native_y": self.route.target.name,
            "native": self.route.target.name,
        }
        self.native_answers = {}
        for place, name in enumerate(self.answers):
            if name in own:
                self.native_answers[own[name]] = whole["answer"][place, 0]
        name = "native_y" if "native_y" in self.answers else "native"
        index = self.answers.index(name)
        return {quantity: values[index, 0] for quantity, values in whole.items()}

    def _rows_without_sites(
        self, whole: dict[str, Tensor], native: dict[str, Tensor]
    ) -> Iterator[Row]:
        """A row for each ceiling and floor that needs no site."""
        task = cast(Behaviour, self.behaviour).asked
        columns = behaviour_columns(whole, native, task, self.seed)
        for name in dict.fromkeys(self.answers):
            draws = [place for place, other in enumerate(self.answers) if other == name]
            role = "ceiling" if name.startswith("native") else "floor"
            yield _row(name, role, (None, None), {}, _over_draws(columns, draws))

    def _errors(self, table: dict[str, Tensor], counted: Tensor) -> dict[str, Tensor]:
        """The columns of the held-out rows, of other texts, and of the fitting rows, each (methods, S)."""
        width = self.route.target.width
        if self.elsewhere is None:
            other = dict.fromkeys(SQUARES, torch.full_like(table["squares"], torch.nan))
        else:
            other = self.elsewhere.compute()
        columns = error_columns(table, other, counted, width, self.seed)

        shape = len(SQUARES), len(self.methods), len(self.route.pairs)
        sums = torch.full((1 + math.prod(shape),), torch.nan)
        if self.fitting is not None:
            sums = self.fitting.compute().cpu()
        squares, total = sums[1:].reshape(shape)
        fitted = squares / (sums[0] * width), squares / total, (squares / total).sqrt()
        columns |= dict(zip(FITTING, fitted, strict=True))

        far = None
        if self.far_errors:
            each = [
                cast(FarErrors, errors).compute().cpu() for errors in self.far_errors
            ]
            far = torch.stack(each)
        return columns | far_columns(self.far_rows, far, columns["fvu"])


def _row(
    name: str,
    role: str,
    pair: Sequence[int | None],
    about: Mapping[str, Any],
    found: dict[str, Any],
) -> Row:
    """The columns of a method at a site pair; null where nothing was found."""
    return {
        "method": name,
        "role": role,
        "site_x": pair[0],
        "site_y": pair[1],
        **{column: about.get(column) for column in METHOD_COLUMNS},
        **dict.fromkeys(
            (*BEHAVIOUR_COLUMNS, *ERROR_COLUMNS, "mse_reduced", *RETRIEVAL_COLUMNS)
        ),
        "overflow": False,
        **found,
    }


def _over_draws(columns: dict[str, Tensor], draws: list[int]) -> dict[str, Any]:
    """One row's figures: of several draws the mean, whose interval ends at the least and the largest of them."""
    if len(draws) == 1:
        return _figures(columns, draws[0], 0)
    found: dict[str, Any] = {
        "fit": f"mean of {len(draws)} draws, interval from the least to the largest"
    }
    ends: dict[str, Callable[[Tensor], Tensor]] = {
        "low": torch.amin,
        "high": torch.amax,
    }
    for name, values in columns.items():
        base, _, end = name.rpartition("_")
        if end in ends:
            found[name] = finite(ends[end](columns[base][draws, 0]))
        else:
            found[name] = finite(values[draws, 0].mean())
    return found


def _figures(columns: dict[str, Tensor], method: int, site: int) -> dict[str, Any]:
    """One row's figures; null where a figure does not apply or, as `overflow` then says, is not finite."""
    return {name: finite(column[method, site]) for name, column in columns.items()}
