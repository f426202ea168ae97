"""A panel of a report: one route, one kind of rows, every method at every site, with its errors text by text."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from aligners.errors import finite
from aligners.fitting.errors import squared_errors
from aligners.injection.behaviour import BEHAVIOUR, BEHAVIOUR_COLUMNS, DRAWS, Behaviour, Natives, behaviour_columns
from aligners.injection.methods import Method
from aligners.injection.routes import Route
from aligners.injection.scoring.scores import TextScores, UnitMeans, bootstrap_interval, of_unseen, per_text_sums
from aligners.maps.canonical import reduced_mse
from datamodules.asking import TaskBatch
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
    squares, total = squared_errors(mapped, target, mean_target)
    errors = {
        "squares": per_text(squares),
        "squares_unseen": per_text(of_unseen(squares, rows)),
        "norm": per_text(squares.sqrt()),
        "total": per_text(total),
        "total_unseen": per_text(of_unseen(total, rows)),
        "cosine": per_text(torch.nn.functional.cosine_similarity(mapped.double(), target.double(), dim=-1)),
    }
    for name in ("back", "back_total", "gap", "largest"):
        errors[name] = torch.full_like(errors["squares"], torch.nan)
    if method.inverse is not None and mean_source is not None:
        back, back_total = squared_errors(method.inverse(target), source, mean_source)
        errors["back"] = per_text(back.nan_to_num(torch.inf, torch.inf))
        errors["back_total"] = per_text(back_total)
        gap = (method.inverse(mapped) - source).abs().amax(-1).nan_to_num(torch.inf, torch.inf)
        owner = rows.owner.expand_as(gap)
        blank = torch.zeros_like(errors["squares"], dtype=gap.dtype)
        errors["gap"] = blank.scatter_reduce(1, owner, gap, "amax")
        errors["largest"] = blank.scatter_reduce(1, owner, source.abs().amax(-1), "amax")
    return errors


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
    parts = {
        "fvu": (table["squares"], table["total"]),
        "fvu_seen": (table["squares"] - unseen, table["total"] - unseen_total),
        "fvu_unseen": (unseen, unseen_total),
        "fvu_other": (other["squares"], other["total"]),
    }
    fvus: dict[str, Tensor] = {}
    for name, part in parts.items():
        low, high = bootstrap_interval(*part, seed=seed)
        fvus |= {name: part[0].sum(-1) / part[1].sum(-1), f"{name}_low": low, f"{name}_high": high}
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
        self.answers = [name for name in (behaviour.whole if behaviour else ()) for _ in range(DRAWS.get(name, 1))]
        self.whole = TextScores(BEHAVIOUR, len(self.answers), 1, texts) if behaviour else None
        self.lengths = TextScores(COUNTED, 1, 1, texts)
        self.elsewhere = TextScores(SQUARES, len(self.methods), sites, others) if others else None
        self.fitting = UnitMeans(1 + len(SQUARES) * len(self.methods) * sites) if fitting else None

    def update(self, read: PanelBatch, natives: Natives) -> None:
        """Score every method at every site on one batch.

        Args:
            read: of the batch.
            natives: what each model that knows the task answers by itself, where states are injected.
        """
        text, rows = read.batch.texts.text, read.batch.rows
        ones = torch.ones(1, 1, len(rows), device=text.device)
        counted = zip(COUNTED, (ones, of_unseen(ones, rows)), strict=True)
        self.lengths.update(text, {name: per_text_sums(values, rows) for name, values in counted})
        if self.behaviour is not None and self.whole is not None and read.task is not None:
            self.whole.update(text, self.behaviour.without_sites(read.task, natives))
        results = []
        for method in self.methods:
            mapped, sums = method.map(read.source, read.batch), {}
            if self.mean_target is not None and read.target is not None:
                means = self.mean_source, self.mean_target
                sums = text_errors(method, rows, read.source, read.target, mapped, means)
            if self.behaviour is not None and read.task is not None:
                put = mapped if read.injected is None else method.map(read.injected, read.task)
                sums |= self.behaviour.injected(read.task, put, natives[self.route.target])
            results.append(sums)
        self.scores.update(text, {name: torch.stack([e[name] for e in results]) for name in self.scores.quantities})

    def update_squares(self, split: str, read: PanelBatch) -> None:
        """Measure how far every method is off at every site on a batch of another source, or of the fitting texts."""
        rows, target, mean = read.batch.rows, cast(Tensor, read.target), cast(Tensor, self.mean_target)
        errors = [squared_errors(method.map(read.source, read.batch), target, mean) for method in self.methods]
        sums = (torch.stack([per_text_sums(part, rows) for part in parts]) for parts in zip(*errors, strict=True))
        squares = dict(zip(SQUARES, sums, strict=True))  # (methods, S, B)
        if split == "other" and self.elsewhere is not None:
            self.elsewhere.update(read.batch.texts.text, squares)
        elif self.fitting is not None:
            counts = torch.as_tensor(rows.counts, device=read.source.device)
            self.fitting.update(torch.cat([counts[None].double(), torch.stack([*squares.values()]).flatten(0, -2)]))

    # ------------------------------------------------------------------ after

    def rows(self) -> list[Row]:
        """One row for every method and site, after those of what needs no site."""
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
            "n_texts_other": None if self.elsewhere is None else len(self.elsewhere.seen),
            "seed": self.seed,
            "score_name": None if self.behaviour is None else self.behaviour.asked.score,
        }
        return [{**base, **row} for row in self._rows(whole, counted)]

    def _rows(self, whole: dict[str, Tensor], counted: Tensor) -> Iterator[Row]:
        table, pairs = self.scores.compute(), self.route.pairs
        overflows = torch.zeros(len(self.methods), len(pairs), dtype=torch.bool)
        columns: dict[str, Tensor] = {}
        if self.behaviour is not None:
            names, task = self.answers, self.behaviour.asked
            index = names.index("native_y" if "native_y" in names else "native")
            native = {name: values[index, 0] for name, values in whole.items()}
            without = behaviour_columns(whole, native, task, self.seed)
            for name, answers in groupby(range(len(names)), lambda place: names[place]):
                role = "ceiling" if name.startswith("native") else "floor"
                yield _row(name, role, (None, None), {}, _over_draws(without, list(answers)))
            columns |= behaviour_columns(table, native, task, self.seed)
            overflows |= ~table["loss"].isfinite().all(-1)
        if self.mean_target is not None:
            columns |= self._errors(table, counted)
            overflows |= (~table["squares"].isfinite() | table["back"].isinf() | table["gap"].isinf()).any(-1)
        for place, method in enumerate(self.methods):
            reduced = reduced_mse(method.aligner, len(pairs))
            for s, pair in enumerate(pairs):
                about = {"fitted_on": self.kind, **method.about, "training": method.outcome(s)}
                extra = {"mse_reduced": reduced[s], "overflow": bool(overflows[place, s])}
                yield _row(method.name, method.role, pair, about, _figures(columns, place, s) | extra)

    def _errors(self, table: dict[str, Tensor], counted: Tensor) -> dict[str, Tensor]:
        """The columns of the held-out rows, of other texts, and of the fitting rows, each (methods, S)."""
        width, nothing = self.route.target.width, torch.full_like(table["squares"], torch.nan)
        other = dict.fromkeys(SQUARES, nothing) if self.elsewhere is None else self.elsewhere.compute()
        shape = len(SQUARES), len(self.methods), len(self.route.pairs)
        sums = torch.full((1 + math.prod(shape),), torch.nan) if self.fitting is None else self.fitting.compute().cpu()
        squares, total = sums[1:].reshape(shape)
        fitted = squares / (sums[0] * width), squares / total, (squares / total).sqrt()
        columns = error_columns(table, other, counted, width, self.seed)
        return columns | dict(zip(FITTING, fitted, strict=True))


def _row(name: str, role: str, pair: Sequence[int | None], about: Mapping[str, Any], found: dict[str, Any]) -> Row:
    """The columns of a method at a site pair; null where nothing was found."""
    return {
        "method": name,
        "role": role,
        "site_x": pair[0],
        "site_y": pair[1],
        **{column: about.get(column) for column in METHOD_COLUMNS},
        **dict.fromkeys((*BEHAVIOUR_COLUMNS, *ERROR_COLUMNS, "mse_reduced")),
        "overflow": False,
        **found,
    }


def _over_draws(columns: dict[str, Tensor], draws: list[int]) -> dict[str, Any]:
    """One row's figures: of several draws the mean, whose interval ends at the least and the largest of them."""
    if len(draws) == 1:
        return _figures(columns, draws[0], 0)
    found: dict[str, Any] = {"fit": f"mean of {len(draws)} draws, interval from the least to the largest"}
    ends: dict[str, Callable[[Tensor], Tensor]] = {"low": torch.amin, "high": torch.amax}
    for name, values in columns.items():
        base, _, end = name.rpartition("_")
        found[name] = finite(ends.get(end, torch.mean)((columns[base] if end in ends else values)[draws, 0]))
    return found


def _figures(columns: dict[str, Tensor], method: int, site: int) -> dict[str, Any]:
    """One row's figures; null where a figure does not apply or, as `overflow` then says, is not finite."""
    return {name: finite(column[method, site]) for name, column in columns.items()}
