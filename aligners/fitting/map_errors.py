"""Errors of maps on held-out and on fitting rows, site by site, and the report's rows for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aligners.datamodules.rows.read_rows import Place
from aligners.datamodules.rows.row_types import RowTypes
from aligners.errors import finite
from aligners.fitting.training_status import how_fitted
from aligners.maps.base import Aligner
from aligners.similarity.double_metric import DoubleMetric

Row = dict[str, Any]  # of a report, by column


class Way(NamedTuple):
    """A map, with its inverse if there is one."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows: (S, N, d_x) -> (S, N, d_y)."""
        return self.there(x)

    @property
    def invertible(self) -> bool:
        """Whether there is an inverse."""
        return self.back is not None

    def inverse(self, y: Tensor) -> Tensor:
        """Map rows back: (S, N, d_y) -> (S, N, d_x)."""
        return cast(Callable[[Tensor], Tensor], self.back)(y)


def squared_errors(mapped: Tensor, y: Tensor) -> Tensor:
    """Return the squared error of each row: (S, N, d) -> (S, N) in float64."""
    return (mapped - y).double().square_().sum(-1)


def squared_distances(y: Tensor, mean: Tensor) -> Tensor:
    """Return the squared distance of each row (S, N, d) from the mean (S, 1, d): (S, N) in float64."""
    return squared_errors(y.double(), mean)


def parameters_of(aligner: Aligner) -> int:
    """Return the number of parameters of one site."""
    return sum(weight[0].numel() for weight in aligner.parameters())


def columns_of(place: Place) -> Row:
    """Return the columns of a report that say where a row comes from."""
    return {
        "model_x": place.model_x,
        "model_y": place.model_y,
        "site_x": place.site_x,
        "site_y": place.site_y,
        **place.about,
    }


def error_rows(
    places: Sequence[Place],
    method: str,
    aligner: Aligner,
    training: Sequence[str | None],
    figures: Mapping[str, Any],
) -> list[Row]:
    """Make a report's rows for a map: one for each place, of which `training` and every figure have an entry."""
    about = {
        "method": method,
        "role": "method",
        "parameters": parameters_of(aligner),
        "fit": how_fitted(aligner),
    }
    rows = []
    for s, place in enumerate(places):
        row = {**columns_of(place), **about, "training": training[s]}
        for name, part in figures.items():
            row[name] = finite(part[s])
        rows.append(row)
    return rows


# For each value of `data.far_rows`, the column reported next to `fvu`.
FAR_COLUMNS = {"leave_out": "fvu_with_far", "keep": "fvu_without_far"}


class FarErrors(DoubleMetric):
    """The FVU of g(X) on the counterpart of the rows that count: with far rows, or without them.

    Its means are taken over these rows, as the mean of the fitting rows describes the others.

    Args:
        mean_y: (S, d_y) origin for the squares, so that nothing cancels.
    """

    full_state_update = False
    mean_y: Tensor
    rows: Tensor
    squares: Tensor
    sums: Tensor

    def __init__(self, mean_y: Tensor, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        sites = len(mean_y)
        self.register_buffer("mean_y", mean_y[:, None].double(), persistent=False)
        self.add_state(
            "rows", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state(
            "squares", torch.zeros(2, sites, dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state(
            "sums", torch.zeros(mean_y.shape, dtype=torch.float64), dist_reduce_fx="sum"
        )

    def update(self, mapped: Tensor, y: Tensor) -> None:
        """Add mapped rows (S, N, d_y) and their targets."""
        away = y.double() - self.mean_y
        self.rows += y.shape[1]
        self.squares += torch.stack(
            [squared_errors(mapped, y).sum(-1), away.square().sum((1, 2))]
        )
        self.sums += away.sum(1)

    def compute(self) -> Tensor:
        """The FVU, (S,); NaN where there were no rows."""
        squares, totals = self.squares
        return squares / (totals - self.sums.square().sum(-1) / self.rows)


def far_columns(policy: str, fvu: Tensor | None, like: Tensor) -> dict[str, Tensor]:
    """Return the column of `FAR_COLUMNS` reported next to `fvu` under a policy; NaN where nothing is known."""
    columns = {name: torch.full_like(like, torch.nan) for name in FAR_COLUMNS.values()}
    if fvu is not None:
        columns[FAR_COLUMNS[policy]] = fvu.to(like)
    return columns


class MapErrors(DoubleMetric):
    """mse, l2, relative error, FVU and cosine of g(X) against Y; round trip and FVU of the inverse.

    `fvu_reconstruction` is the mean FVU of X and Y under what gives both back; NaN for other maps.

    `fvu_unseen` is the FVU on the rows whose types fitting did not see; NaN where there are none.

    The round trip is ‖g⁻¹(g(x)) − x‖∞ / ‖x‖∞, both norms over all rows.

    FVU takes Y's mean from the fitting rows, so it is 1 for a map that always returns that mean. Sums are in float64.
    Sums and maxima combine over batches and ranks: however the rows are split, the figures are the same.

    Args:
        mean_x: (S, d_x) mean of X's states on the fitting rows.
        mean_y: (S, d_y) the same for Y.
        widths: (S,) width of Y's states, if some are padded with zeros. Default: d_y.
    """

    full_state_update = False
    mean_x: Tensor
    mean_y: Tensor
    widths: Tensor
    sums: Tensor
    worst: Tensor

    def __init__(
        self,
        mean_x: Tensor,
        mean_y: Tensor,
        widths: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sites, d_y = mean_y.shape
        widths = torch.tensor(d_y) if widths is None else widths
        self.register_buffer("widths", widths, persistent=False)
        self.register_buffer("mean_x", mean_x[:, None].double(), persistent=False)
        self.register_buffer("mean_y", mean_y[:, None].double(), persistent=False)
        self.add_state(
            "sums", torch.zeros(10, sites, dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state(
            "worst", torch.zeros(2, sites, dtype=torch.float64), dist_reduce_fx="max"
        )

    def update(
        self, aligner: Aligner | Way, x: Tensor, y: Tensor, unseen: Tensor | None = None
    ) -> None:
        """Map x (S, N, d_x) and add its errors against y (S, N, d_y); `unseen` (N,) marks rows of unseen types."""
        mapped = aligner(x)
        squares = squared_errors(mapped, y)
        totals = squared_distances(y, self.mean_y)
        cosines = torch.nn.functional.cosine_similarity(
            mapped.double(), y.double(), dim=-1
        )
        if unseen is None:
            unseen = totals.new_zeros(x.shape[1], dtype=torch.bool)
        back, back_total = self._way_back(aligner, x, y, mapped)
        again = torch.full_like(back, torch.nan)
        if isinstance(aligner, Aligner) and aligner.reconstructs:
            again = aligner.reconstruction_errors(x, y).sum(-1)
        sums = [
            torch.full_like(back, x.shape[1]),
            squares.sum(-1),
            squares.sqrt().sum(-1),
            cosines.sum(-1),
            totals.sum(-1),
            back,
            back_total,
            squares.where(unseen, 0).sum(-1),
            totals.where(unseen, 0).sum(-1),
            again,
        ]
        self.sums += torch.stack(sums)

    def _way_back(
        self, aligner: Aligner | Way, x: Tensor, y: Tensor, mapped: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return squared errors of the inverse and squared distances from the mean, (S,) each; NaN without one."""
        if not aligner.invertible:
            nothing = self.sums.new_full((len(x),), torch.nan)
            return nothing, nothing
        self._keep_worst(aligner.inverse(mapped), x)
        errors = (aligner.inverse(y) - x).double().square().sum((1, 2))
        return errors, (x.double() - self.mean_x).square().sum((1, 2))

    def _keep_worst(self, back: Tensor, x: Tensor) -> None:
        """Keep the largest round-trip error, and the largest value."""
        # An inverse that overflows gives inf or NaN, which counts as the worst error, not as no inverse.
        gap = (back - x).abs().amax((1, 2)).nan_to_num(torch.inf, torch.inf)
        largest = torch.stack([gap, x.abs().amax((1, 2))]).double()
        self.worst = torch.maximum(self.worst, largest)

    def compute(self) -> dict[str, Tensor]:
        """Return each figure as (S,); those of the inverse are NaN if there is none."""
        (
            rows,
            squares,
            norms,
            cosine,
            total,
            back,
            back_total,
            squares_unseen,
            total_unseen,
            again,
        ) = self.sums
        fvu = squares / total
        return {
            "mse": squares / (rows * self.widths),
            "l2": norms / rows,
            "fvu": fvu,
            "fvu_unseen": squares_unseen / total_unseen,
            "relative_error": fvu.sqrt(),
            "cosine": cosine / rows,
            "fvu_inverse": back / back_total,
            "fvu_reconstruction": again / rows,
            "round_trip": self.worst[0]
            / self.worst[1],  # 0/0, so NaN, without an inverse
        }


# Fewest rows of a type in the table of `TypeErrors`, and most types per site.
LEAST_ROWS = 5
TOP = 50


class TypeErrors(DoubleMetric):
    """Sums of the errors of rows by their token or word types, over batches and ranks.

    Args:
        sites: S.
        types: types of the rows of a split.
        ids: (n,) ids of its texts.
        device: device of the errors.
    """

    full_state_update = False
    sums: Tensor

    def __init__(
        self, sites: int, types: RowTypes, ids: Tensor, device: torch.device
    ) -> None:
        super().__init__()
        number = types.number.to(device)
        counts = types.counts.to(device)
        self.types = replace(types, number=number, counts=counts)
        self.ids, self.texts = ids.to(device).sort()
        sums = torch.zeros(1 + sites, len(types.names), dtype=torch.float64)
        self.add_state("sums", sums, dist_reduce_fx="sum")
        self.to(device)

    def update(self, errors: Tensor, text: Tensor, place: Tensor) -> None:
        """Add the errors (S, N) of rows with these ids of texts (N,) and places in them (N,)."""
        texts = self.texts[torch.searchsorted(self.ids, text)]
        number = self.types.at(texts, place)
        ones = torch.ones_like(errors[:1])
        self.sums.index_add_(1, number, torch.cat([ones, errors]).double())

    def compute(self) -> Tensor:
        """Return the number of rows of each type, and the sums of their errors at each site: (1 + S, types)."""
        return self.sums

    def table(self, sites: Sequence[Any]) -> list[Row]:
        """Return the types with the largest mean error at each site, and its ratio to the mean error of all rows."""
        rows, *sums = self.compute().cpu()
        found = []
        for site, errors in zip(sites, sums, strict=True):
            means = (errors / rows).where(rows >= LEAST_ROWS, -1.0)
            order = means.argsort(descending=True, stable=True)
            for n in order[:TOP].tolist():
                if means[n] < 0:
                    continue
                row = {"site": site, "type": self.types.names[n]}
                row["rows"] = int(rows[n])
                row["fvu"] = float(means[n])
                times = means[n] * rows.sum() / errors.sum()
                row["times"] = float(times)
                found.append(row)
        return found
