"""Measures of arrays with what they are worth: the value under permutations, a p-value, and an interval over groups."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property, reduce
from itertools import product
from math import isnan
from operator import add
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aligners.api.arrays import Array, by_site, rows
from aligners.api.groups import Groups, numbered
from aligners.api.measures import FAMILIES
from aligners.errors import UserError, check_known, check_range
from aligners.similarity.algebra.grid import GridSums, grid_moments
from aligners.similarity.algebra.permuted_pairs import OfPairs, PermutedPairs
from aligners.similarity.catalogue import Measure, catalogue
from aligners.similarity.controls import (
    Sample,
    calibrated,
    jackknife_interval,
    matching_layers,
)
from aligners.similarity.functional.canonical_correlations import whitenings
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.functional.cka import (
    hsic_pairs,
    unbiased_hsic,
    unbiased_hsic_from_sums,
)
from aligners.similarity.functional.neighbours import (
    Neighbours,
    neighbours_of,
    neighbours_of_rests,
)
from aligners.similarity.functional.predictivity import all_but_one
from aligners.similarity.text_orders import AS_PAIRED, permuted_rows

__all__ = ["Compared", "compare_arrays"]

MadeOf = Callable[[Tensor, Tensor], OfPairs]  # of rows of X and of Y
PARTS = 10  # that the jackknife leaves out in turn
SHOWN = ("value", "null", "effect", "p", "p_family", "low", "high")


class Compared:
    """What `compare_arrays` found: `rows()` for a data frame, `print` for a table.

    Attributes:
        n: number of rows; groups: number of groups, None without them; draws: number of permutations.
        level: of the intervals.
        cautions: what to know of the figures.
    """

    def __init__(
        self,
        rows: list[dict[str, Any]],
        *,
        n: int,
        groups: int | None,
        draws: int,
        level: float,
        cautions: list[str],
    ) -> None:
        self._rows = rows
        self.n = n
        self.groups = groups
        self.draws = draws
        self.level = level
        self.cautions = cautions

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each measure and pair of sites.

        Its keys: `measure`, `site_x`, `site_y`, `value`; `null`, the mean under the permutations; `effect`, the value
        over it, (value − null) / (1 − null); `p`, and `p_family` over all pairs of sites; `low` and `high`, None where
        there is no interval; `n`, `groups`, `draws`.
        """
        return [dict(row) for row in self._rows]

    def __repr__(self) -> str:
        """Return a table with a line for each measure and pair of sites."""
        several = len({(row["site_x"], row["site_y"]) for row in self._rows}) > 1
        columns = ["measure", *SHOWN]
        if several:
            columns[1:1] = ["site_x", "site_y"]
        else:
            columns.remove("p_family")
        lines = [columns]
        for row in self._rows:
            lines.append([_written(row[column]) for column in columns])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        of_groups = "" if self.groups is None else f" in {self.groups:,} groups"
        told = [
            f"{self.n:,} rows{of_groups}; {self.draws} permutations, so p is at least {1 / (1 + self.draws):.2g}; "
            f"intervals of {self.level:.0%}"
        ]
        for line in lines:
            cells = zip(line, widths, strict=True)
            told.append("  ".join(cell.rjust(width) for cell, width in cells))
        return "\n".join([*told, *self.cautions])


def _written(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


def compare_arrays(
    x: Array,
    y: Array,
    measures: str | Sequence[str] = ("unbiased_cka", "mutual_knn"),
    *,
    groups: Groups | None = None,
    draws: int = 99,
    level: float = 0.95,
    seed: int = 0,
) -> Compared:
    """Measure how similar paired rows are, and set each value against its null.

    The null pairs the rows of X with those of Y in another order, drawn at random: whole groups where there are groups,
    as rows of one text depend on each other, so that independent rows would be too easy to beat. Groups of nearly equal
    size change places, each cut to the rows of the shortest of them, so that a row meets one at its own place in its
    group; effect and p compare with the value of these rows. A value no higher than its null shows no similarity,
    however high it is; few rows of many features give a high null.

    A permutation changes the products of X with Y alone. Moments of each side, neighbours and, of up to some thousand
    rows, Gram matrices (`rsa`, `rbf_cka`, ...) are made once. What is left for each permutation is a product of X with
    Y, and where a measure decomposes that (CCA, `nbs`) or matches it, the decomposition or the matching.

    Args:
        x: (N, d_x) rows, or those of several sites; see `aligners.api.arrays`.
        y: (N, d_y) their partners. Of several sites, every one of X is compared with every one of Y.
        measures: names of the catalogue, but those of attention. One that is not symmetric is taken as its function
            takes it, from X to Y.
        groups: (N,) the text of each row, by name or number. Also leaves a row's text out of its nearest neighbours.
        draws: number of permutations. p is (1 + those as high) / (1 + draws).
        level: of the intervals, from a jackknife that leaves out a tenth of the groups in turn, of rows where there
            are no groups. Of several sites, those at matching places have one.
        seed: of the permutations.

    Raises:
        ValueError: rows that are not paired, not finite, or too few for a measure; an unknown measure; one group.

    References:
        Gröger et al. 2026, "Revisiting the Platonic Representation Hypothesis", arXiv 2602.14486, for the effect over
        the null; the null there is of single rows. `aligners.similarity.controls.calibrated` has the rest.
    """
    chosen = _chosen(measures)
    check_range(least=1, draws=draws)
    check_range(above=0, below=1, level=level)
    keys, sites = _sites(x, y)
    arranged = _Arranged.of(*sites, groups)
    against = _against_nulls(chosen, arranged, draws, seed)
    values = {name: figures.value for name, figures in against.items()}
    cautions: list[str] = []
    ends = _intervals(chosen, arranged, level, values, cautions)
    about = {"n": arranged.n, "groups": arranged.group_count, "draws": draws}
    found = []
    for measure in chosen:
        name = measure.name
        grids = _figures(against[name], ends[name])
        for row in _rows(keys, grids):
            found.append({"measure": name} | row | about)
    return Compared(
        found,
        n=arranged.n,
        groups=arranged.group_count,
        draws=draws,
        level=level,
        cautions=cautions,
    )


class _Arranged(NamedTuple):
    """Rows in the order of their groups.

    Attributes:
        x: (L_x, N, d_x); y: (L_y, N, d_y).
        groups: (N,) number of each row's group, None without groups.
    """

    x: Tensor
    y: Tensor
    groups: Tensor | None

    @classmethod
    def of(cls, x: Tensor, y: Tensor, groups: Groups | None) -> Self:
        """Arrange rows in any order.

        Raises:
            ValueError: one group.
        """
        number = numbered(groups, x.shape[1])
        if number is None:
            return cls(x, y, None)
        order = number.argsort(stable=True)
        number = number[order]
        if number[-1] < 1:
            raise UserError(
                "Expected at least 2 groups in `groups`, since the null reorders whole groups, but got 1. Leave "
                "`groups` out if rows do not depend on each other."
            )
        return cls(x[:, order.to(x.device)], y[:, order.to(y.device)], number)

    def rows(self, chosen: Tensor) -> Self:
        """Some of the rows."""
        groups = None if self.groups is None else self.groups[chosen]
        of_x = self.x[:, chosen.to(self.x.device)]
        of_y = self.y[:, chosen.to(self.y.device)]
        return type(self)(of_x, of_y, groups)

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.x.shape[1]

    @property
    def group_count(self) -> int | None:
        """Number of groups; None without groups."""
        return None if self.groups is None else 1 + int(self.groups[-1])

    @property
    def text(self) -> Tensor:
        """(N,) group of each row, or a number for each."""
        if self.groups is None:
            return torch.arange(self.n)
        return self.groups


class _Against(NamedTuple):
    """A measure at all pairs of sites, and what its null is.

    Attributes:
        value: (L_x, L_y) of all rows.
        as_paired: (L_x, L_y) of the rows that are permuted.
        nulls: (R, L_x, L_y) of these in other orders.
    """

    value: Tensor
    as_paired: Tensor
    nulls: Tensor


def _figures(against: _Against, ends: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The columns of a measure by name, (L_x, L_y) each."""
    figures = calibrated(against.value, against.nulls, against.as_paired)
    grids = {"value": against.value}
    for name in ("null", "effect", "p", "p_family"):
        grids[name] = getattr(figures, name)
    low, high = ends
    return grids | {"low": low, "high": high}


def _rows(
    keys: tuple[list[Hashable], list[Hashable]], grids: dict[str, Tensor]
) -> Iterator[dict[str, Any]]:
    """Sites and figures of each pair of sites, None for NaN."""
    for (i, site_x), (j, site_y) in product(*map(enumerate, keys)):
        row: dict[str, Any] = {"site_x": site_x, "site_y": site_y}
        for name, grid in grids.items():
            figure = float(grid[i, j])
            row[name] = None if isnan(figure) else figure
        yield row


def _chosen(names: str | Sequence[str]) -> list[Measure]:
    """The measures of these names, each once."""
    if isinstance(names, str):
        names = [names]
    known = {}
    for name, measure in catalogue().items():
        if measure.family in FAMILIES:
            known[name] = measure
    check_known(known, measures=list(names) or ["none"])
    return [known[name] for name in dict.fromkeys(names)]


def _sites(
    x: Array, y: Array
) -> tuple[tuple[list[Hashable], list[Hashable]], tuple[Tensor, Tensor]]:
    """The keys of the sites of both, and their rows (L_x, N, d_x) and (L_y, N, d_y), of one type and device."""
    of_x = rows(x, "x")
    of_y = rows(y, "y")
    if of_x.shape[1] != of_y.shape[1]:
        raise UserError(
            f"Expected as many rows in `y` as in `x`, which are paired one by one, but got {of_y.shape[1]} and "
            f"{of_x.shape[1]}."
        )
    dtype = torch.promote_types(of_x.dtype, of_y.dtype)
    keys = by_site(x)[0] or [0], by_site(y)[0] or [0]
    return keys, (of_x.to(dtype), of_y.to(of_x.device, dtype))


def _orders(
    groups: Tensor | None, n: int, draws: int, seed: int
) -> tuple[Tensor, list[Tensor]]:
    """Choose the rows that are permuted, (M,), and draw orders of them, (M,) each: numbers among these rows."""
    everything = torch.arange(n)
    if groups is None:
        generator = torch.Generator().manual_seed(seed)
        return everything, [
            torch.randperm(n, generator=generator) for _ in range(draws)
        ]
    chosen, _ = permuted_rows(groups, AS_PAIRED, seed)
    place = torch.empty_like(everything)
    place[chosen] = torch.arange(len(chosen))
    orders = []
    for number in range(1, draws + 1):
        _, partners = permuted_rows(groups, number, seed)
        orders.append(place[partners])
    return chosen, orders


# ---------------------------------------------------------------------- values, and values under permutations


class _Reordered:
    """A sample of rows of one site of X and all sites of Y, those of Y in some order, with neighbours found before."""

    def __init__(
        self, x: Tensor, y: Tensor, text: Tensor, order: Tensor, contents: "_Contents"
    ) -> None:
        self.x = x
        self.text = text
        self._y = y
        self._order = order
        self._contents = contents

    @cached_property
    def y(self) -> Tensor:
        """(L_y, N, d_y)."""
        return self._y[:, self._order]

    def near(self) -> tuple[list[Neighbours], list[Neighbours]]:
        """As `Sample.near`."""
        of_x, of_y = self._contents.near()
        return of_x, [each.reordered(self._order) for each in of_y]

    def of_pairs(self, made_of: MadeOf) -> Tensor:
        """As `Sample.of_pairs`."""
        return self._contents.pairs(made_of).value(self._order)


class _Contents:
    """What measures are computed from, of one site of X and all sites of Y, whose rows are in some order.

    Args:
        x: (1, N, d_x); y: (L_y, N, d_y).
        text: (N,) groups, or a number for each row.
        shared: what other sites of X have computed of Y, by name.
    """

    def __init__(
        self, x: Tensor, y: Tensor, text: Tensor, shared: dict[str, Any]
    ) -> None:
        self.x = x
        self.y = y
        self.text = text
        self.shared = shared
        self._pairs: dict[MadeOf, OfPairs] = {}

    def of(self, family: str, order: Tensor) -> Any:
        """The content of a family, with the rows of Y in this order."""
        if family == "moments":
            return self._moments(order)
        if family == "batches":
            return unbiased_hsic_from_sums(self._batch.of(order))
        return _Reordered(self.x, self.y, self.text, order, self)

    @cached_property
    def _batch(self) -> PermutedPairs:
        return hsic_pairs(self.x, self.y)

    def pairs(self, made_of: MadeOf) -> OfPairs:
        """What a measure of pairs of rows is made of, at the first call."""
        if made_of not in self._pairs:
            self._pairs[made_of] = made_of(self.x, self.y)
        return self._pairs[made_of]

    def _moments(self, order: Tensor) -> SharedMoments:
        """Moments whose products of X with Y alone are new."""
        moments, white_x = self._within
        back = order.argsort()  # of X, which is one site
        of_x, squares_x = self._centred_x
        of_x = of_x[back]
        products = []
        fourth = []
        for of_y, squares_y in self._centred_y:
            products.append(of_x.T @ of_y)
            fourth.append(squares_x[back] @ squares_y)
        moments = moments._replace(
            xy=torch.stack(products)[None], q_xy=torch.stack(fourth)[None]
        )
        return SharedMoments(moments, white_x, self.shared["white"])

    @cached_property
    def _within(self) -> tuple[Any, Any]:
        """The moments as the rows are paired, and the whitening of X."""
        moments = grid_moments(self.x, self.y)
        if "white" not in self.shared:
            self.shared["white"] = whitenings(moments.yy)
        return moments, whitenings(moments.xx)

    @cached_property
    def _centred_x(self) -> tuple[Tensor, Tensor]:
        return _centred(self.x[0])

    @property
    def _centred_y(self) -> list[tuple[Tensor, Tensor]]:
        if "centred" not in self.shared:
            self.shared["centred"] = [_centred(layer) for layer in self.y]
        return self.shared["centred"]

    def near(self) -> tuple[list[Neighbours], list[Neighbours]]:
        """The neighbours of X's rows and of Y's, found at the first call."""
        return self._near_x, self._near_y

    @cached_property
    def _near_x(self) -> list[Neighbours]:
        return neighbours_of(self.x, "x", groups=self.text)

    @property
    def _near_y(self) -> list[Neighbours]:
        if "near" not in self.shared:
            self.shared["near"] = neighbours_of(self.y, "y", groups=self.text)
        return self.shared["near"]


def _centred(layer: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, d) less their mean, in float64, and their squared lengths."""
    double = layer.double()
    centred = double - double.mean(0)
    return centred, torch.linalg.vecdot(centred, centred)


def _against_nulls(
    measures: Sequence[Measure], arranged: _Arranged, draws: int, seed: int
) -> dict[str, _Against]:
    """Compute each measure of all rows, and of those that are permuted, as they are paired and in other orders."""
    chosen, orders = _orders(arranged.groups, arranged.n, draws, seed)
    permuted = _grids(measures, arranged.rows(chosen), orders)
    whole = permuted
    if len(chosen) < arranged.n:
        whole = _grids(measures, arranged, [])
    against = {}
    for name, grids in permuted.items():
        against[name] = _Against(whole[name][0], grids[0], grids[1:])
    return against


def _grids(
    measures: Sequence[Measure], arranged: _Arranged, orders: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The values of each measure as rows are paired, and in each order: (1 + R, L_x, L_y)."""
    as_paired = torch.arange(arranged.n)
    shared: dict[str, Any] = {}
    layers = []
    for layer in arranged.x.split(1):
        text = arranged.text.to(layer.device)
        contents = _Contents(layer, arranged.y, text, shared)
        of_orders = []
        for order in (as_paired, *orders):
            of_orders.append(_values(measures, contents, order.to(layer.device)))
        layers.append(of_orders)
    grids = {}
    for place, measure in enumerate(measures):
        of_layers = []
        for of_orders in layers:
            of_layers.append(torch.stack([found[place] for found in of_orders]))
        grids[measure.name] = torch.stack(of_layers, 1)
    return grids


def _values(
    measures: Sequence[Measure], contents: _Contents, order: Tensor
) -> list[Tensor]:
    """The values of the measures under one order, (L_y,) each."""
    of_family: dict[str, Any] = {}
    values = []
    for measure in measures:
        family = measure.family
        if family not in of_family:
            of_family[family] = contents.of(family, order)
        value = measure.compute(of_family[family])
        values.append(value[0].cpu().double())
    return values


# ---------------------------------------------------------------------- intervals


def _intervals(
    measures: Sequence[Measure],
    arranged: _Arranged,
    level: float,
    values: dict[str, Tensor],
    cautions: list[str],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Both ends of the interval of each measure, (L_x, L_y) each, NaN where there is none."""
    x, y, _ = arranged
    ends = {}
    for measure in measures:
        low = torch.full_like(values[measure.name], torch.nan)
        ends[measure.name] = low, low.clone()
    for i, j in matching_layers(range(len(x)), range(len(y))):
        samples = _parts(arranged, i, j)
        for name, left_out in _left_out(measures, samples, cautions).items():
            low, high = ends[name]
            estimate = values[name][i, j]
            low[i, j], high[i, j] = jackknife_interval(estimate, left_out, level)
    return ends


def _parts(arranged: _Arranged, i: int, j: int) -> list[Sample]:
    """The rows of a site of X and one of Y in about `PARTS` parts of whole groups."""
    x, y, _ = arranged
    text = arranged.text
    count = 1 + int(text[-1])
    part = text * min(PARTS, count) // count
    sizes = part.bincount().tolist()
    of_x = x[i : i + 1].split(sizes, 1)
    of_y = y[j : j + 1].split(sizes, 1)
    of_text = text.to(x.device).split(sizes)
    return list(map(Sample, of_x, of_y, of_text))


def _left_out(
    measures: Sequence[Measure], samples: Sequence[Sample], cautions: list[str]
) -> dict[str, Tensor]:
    """Each measure of all samples but one, (G,); nothing of one that is refused, which is said."""
    rest: list[GridSums] = []
    if any(measure.family == "moments" for measure in measures):
        rest = all_but_one([_sums(sample) for sample in samples])
    near = _NearOfRests(samples)
    found: dict[str, list[Tensor]] = {measure.name: [] for measure in measures}
    for place in range(len(samples)):
        content: dict[str, Any] = {}
        for measure in measures:
            if measure.name not in found:
                continue
            if measure.family not in content:
                content[measure.family] = _joined(
                    measure.family, place, samples, rest, near
                )
            try:
                value = measure.compute(content[measure.family])
            except ValueError as error:
                cautions.append(f"No interval of {measure.name}: {error}")
                del found[measure.name]
                continue
            found[measure.name].append(value[0, 0].cpu().double())
    return {name: torch.stack(values) for name, values in found.items()}


def _sums(sample: Sample) -> GridSums:
    """The sums of a sample of one site of X and one of Y."""
    sums = GridSums.zeros(1, sample.x.shape[2], 1, sample.y.shape[2], sample.x.device)
    return sums.add_(sample.x, sample.y)


class _NearOfRests:
    """The neighbours of all samples but one, for each, found for all of them at the first call.

    Args:
        samples: consecutive rows of one site of X and one of Y.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def of(self, place: int) -> tuple[list[Neighbours], list[Neighbours]]:
        """As `Sample.near`, without the sample at `place`."""
        of_x, of_y = self._found
        return [of_x[place]], [of_y[place]]

    @cached_property
    def _found(self) -> tuple[list[Neighbours], list[Neighbours]]:
        every = reduce(add, self._samples)
        sizes = [len(sample.text) for sample in self._samples]
        of_x = neighbours_of_rests(every.x[0], "x", sizes, groups=every.text)
        of_y = neighbours_of_rests(every.y[0], "y", sizes, groups=every.text)
        return of_x, of_y


class _Remaining:
    """A sample of rows without one part."""

    def __init__(self, sample: Sample, place: int, found: _NearOfRests) -> None:
        self.x, self.y, self.text = sample
        self._sample = sample
        self._place = place
        self._found = found

    def near(self) -> tuple[list[Neighbours], list[Neighbours]]:
        """As `Sample.near`."""
        return self._found.of(self._place)

    def of_pairs(self, made_of: MadeOf) -> Tensor:
        """As `Sample.of_pairs`."""
        return self._sample.of_pairs(made_of)


def _joined(
    family: str,
    place: int,
    samples: Sequence[Sample],
    rest: Sequence[GridSums],
    near: _NearOfRests,
) -> Any:
    """What measures of a family are computed from, of all samples but the one at `place`."""
    if family == "moments":
        return SharedMoments(rest[place].moments())
    sample = reduce(add, [*samples[:place], *samples[place + 1 :]])
    if family == "batches":
        return unbiased_hsic(sample.x, sample.y)
    return _Remaining(sample, place, near)
