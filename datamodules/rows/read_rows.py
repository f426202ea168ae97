"""Reads paired rows from a batch of texts, in one pass of each model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from aligners.datamodules.batches import Movable, StoredRows, TextBatch
from aligners.datamodules.rows.policies import RowKind, Rows, rows_of_each
from aligners.datamodules.rows.row_types import SeenTypes
from aligners.datamodules.rows.token_pairs import TokenPairs
from aligners.datamodules.text.sources import TextSource
from aligners.errors import UserError
from aligners.models.architectures import Component
from aligners.models.calling import FiniteCheck
from aligners.models.model import FrozenModel

# ---------------------------------------------------------------------- one model


def read_rows(
    model: FrozenModel,
    inputs: dict[str, Tensor],
    sites: Sequence[int],
    rows: Rows,
    component: Component = "residual",
    stored: StoredRows | None = None,
) -> Tensor:
    """Read the rows of one model at some sites, (S, N, d) float32, running its blocks once and only as far as needed.

    Args:
        model: the model.
        inputs: inputs of a batch (B, T).
        sites: sites in any order.
        rows: rows of the batch.
        component: what is read at a site.
        stored: the states that a store has of the batch; if given, the model is not run.
    """
    return read_each(model, inputs, sites, [rows], component, stored)[0]


def read_each(
    model: FrozenModel,
    inputs: dict[str, Tensor],
    sites: Sequence[int],
    each: Sequence[Rows],
    component: Component = "residual",
    stored: StoredRows | None = None,
) -> list[Tensor]:
    """Read like `read_rows`, for several choices of rows at once; stored rows that are pooled allow only one choice."""
    if stored is None:
        wanted = sorted(set(sites))
        with torch.inference_mode():
            read = model.front(inputs, wanted, component)
        states = dict(zip(wanted, read, strict=True))
        return [gather_rows(states, sites, rows, model.width) for rows in each]

    by_site = dict(zip(stored.sites, stored.states, strict=True))
    if stored.pooled:
        rows_at_sites = torch.stack([by_site[site] for site in sites])
        return [rows_at_sites] * len(each)
    states = {site: at_site[None] for site, at_site in by_site.items()}
    in_store = _places_in_store(inputs["attention_mask"], each)
    return [gather_rows(states, sites, rows, model.width) for rows in in_store]


def _places_in_store(mask: Tensor, each: Sequence[Rows]) -> list[Rows]:
    """Return choices of rows of a padded batch with mask (B, T) as places among its stored tokens."""
    real = mask.flatten()
    place_in_store = real.cumsum(0) - 1  # the states of each position's token
    return [replace(rows, index=place_in_store[rows.index]) for rows in each]


def gather_rows(
    states: Mapping[int, Tensor], sites: Sequence[int], rows: Rows, width: int
) -> Tensor:
    """Gather the rows (S, N, d) float32 at some sites, from the states (B, T, d) of each."""
    # Never in inference mode, so that what is gathered can enter a graph.
    with torch.no_grad():
        out = torch.empty(len(sites), len(rows), width, device=rows.index.device)
        for place, site in enumerate(sites):
            rows.gather(states[site], out[place])
    return out


# ---------------------------------------------------------------------- which rows


@dataclass
class ChosenRows(Movable):
    """The rows of one kind in a batch, before any model is run.

    Attributes:
        rows: for each model the rows that count; one object for models with equal tokenizers.
        whole: the same rows together with those left out as far, which are marked; None if none are left out.
        near: (N,) numbers in `whole` of the rows that count; None if none are left out.
    """

    rows: tuple[Rows, ...]
    whole: tuple[Rows, ...] | None = None
    near: Tensor | None = None

    @property
    def read(self) -> tuple[Rows, ...]:
        """The rows to read from the models: all of them, far ones included."""
        return self.whole or self.rows


def choose_rows(texts: TextBatch, kind: RowKind, *, leave_out_far: bool) -> ChosenRows:
    """Choose the rows of each model. Where types are known, those of unseen types are left out or marked.

    A batch to fit on comes without rows of unseen types and far rows, as its marks say. In any other batch, unseen
    types are marked, and far rows are left out or marked.

    Args:
        texts: a batch on the CPU.
        kind: kind of the rows.
        leave_out_far: whether rows that are far from all others are left out; otherwise they are marked.
    """
    rows = rows_of_each(texts, kind)
    unseen = texts.unseen.get(kind)
    if texts.leave_out:
        if unseen is not None:
            rows = tuple(of_model.only(~unseen) for of_model in rows)
        return ChosenRows(rows)
    if unseen is not None:
        rows = replace(rows[0], unseen=unseen), *rows[1:]

    far = texts.far.get(kind)
    if far is None or not far.any():
        return ChosenRows(rows)
    marked = replace(rows[0], far=far), *rows[1:]
    if not leave_out_far:
        return ChosenRows(marked)
    without = tuple(of_model.without(far) for of_model in rows)
    near = (~far).nonzero()[:, 0]
    return ChosenRows(without, marked, near)


@dataclass
class Prepared(Movable):
    """A batch of texts, and the rows chosen on the CPU before it goes to the device.

    Attributes:
        texts: the tokenised batch.
        chosen: the rows that were chosen.
        others: the rows chosen for each further kind.
        task: the targets of a head's task on the texts, if there are any.
    """

    texts: TextBatch
    chosen: ChosenRows
    others: list[ChosenRows] = field(default_factory=list)
    task: Any = None

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Where the rows of each model are."""
        return self.chosen.rows


@dataclass(frozen=True)
class Plan:
    """What an evaluation reads of paired rows: see `PairedActivations.plan`.

    Attributes:
        kinds: kinds of rows to read from the same texts; all but `data.rows` become `PairedBatch.others`.
        measured: the types by which rows are marked as unseen outside fitting; None: those of the fitting rows.
        other: a source whose held-out texts become another split, `other`. Their labels are not read.
        targets_of: makes the targets of every held-out batch, `PairedBatch.task`.
        fitting: whether to read as many fitting texts as are held out, as another split, `fit`.
        parts: numbers of held-out texts, which are read part by part in place of all, each rank in whole batches.
        group: texts of a part that stay together: see `LengthBatches`.
    """

    kinds: Sequence[RowKind] = ()
    measured: SeenTypes | None = None
    other: TextSource | None = None
    targets_of: Callable[[TextBatch], Any] | None = None
    fitting: bool = False
    parts: Sequence[Sequence[int]] = ()
    group: int = 1


# ---------------------------------------------------------------------- pairs


@dataclass
class PairedBatch:
    """Paired rows of one batch of texts, and what is needed to put rows back where they came from.

    Attributes:
        x: (S, N, d_x) states of X, float32.
        y: (S, N, d_y) states of Y, row by row the partners of `x`.
        rows: where the rows came from.
        texts: the tokenised batch.
        others: the same texts as rows of other kinds, if any were planned.
        task: the targets of a head's task on these texts (a `TaskBatch`), if there are any.
        whole: where rows that are far from all others are left out, the same batch with them, marked in `rows.far`.
    """

    x: Tensor
    y: Tensor
    rows: Rows
    texts: TextBatch
    others: list[PairedBatch] = field(default_factory=list)
    task: Any = None
    whole: PairedBatch | None = None

    @property
    def text(self) -> Tensor:
        """Id of the text of each row, (N,)."""
        return self.texts.text[self.rows.owner]

    @property
    def counterpart(self) -> PairedBatch | None:
        """The batch with far rows, if they were left out, or without them, if they were kept; None if it has none."""
        if self.whole is not None:
            return self.whole
        far = self.rows.far
        if far is not None:
            near = (~far).nonzero()[:, 0]
            return self.only(near, self.rows.without(far))
        if self.texts.far:
            return self
        return None

    def only(self, numbers: Tensor, rows: Rows) -> PairedBatch:
        """Return some of the rows, by their numbers (N',)."""
        x = self.x.index_select(1, numbers)
        y = x if self.y is self.x else self.y.index_select(1, numbers)
        return PairedBatch(x, y, rows, self.texts)


class Place(NamedTuple):
    """Describes a place along the leading axis S of a batch and of every bank.

    Attributes:
        name: name of the place, different from all others of a run.
        model_x: name of X.
        model_y: name of Y.
        site_x: site at which X is read.
        site_y: site at which Y is read.
        about: further columns of a report.
    """

    name: str
    model_x: str
    model_y: str
    site_x: int
    site_y: int
    about: Mapping[str, Any] = MappingProxyType({})


class Link(NamedTuple):
    """Two columns, each a model at a site, whose rows are paired.

    Attributes:
        x: number of X among the models that are read.
        y: number of Y.
        site_x: site at which X is read.
        site_y: site at which Y is read.
        begins: beginning of the place's name, where sites alone do not identify it.
        called: what reports call Y; default: its model's name.
        about: further columns of a report.
    """

    x: int
    y: int
    site_x: int
    site_y: int
    begins: str = ""
    called: str | None = None
    about: Mapping[str, Any] = MappingProxyType({})


@dataclass(eq=False)
class PairReader:
    """Reads linked columns of frozen models, running each model's blocks once a batch and only as far as needed.

    Args:
        models: all models; one may be listed several times, and is read once.
        links: columns to pair, in the order of the leading axis.
        kind: kind of the rows.
        component: states of the residual stream, or what the attention or the feed-forward layer of a block adds.
        token_pairs: pairs of tokens that are the rows, in place of `kind`; the attention weights that the heads of a
            block give them are then read.
        transform: changes a batch after it was read.
        padded: whether the links may differ in width: states of narrower models are then padded with zeros.
        leave_out_far: whether rows that are far from all others are left out; otherwise they are marked.

    Attributes:
        sites: site pairs (i, j) along the leading axis: state of X at i with state of Y at j.
        widths: d_x and d_y.

    Raises:
        ValueError: a model lacks a site, or the widths of the links differ.
    """

    models: Sequence[FrozenModel]
    links: Sequence[Link]
    kind: RowKind
    component: Component = "residual"
    token_pairs: TokenPairs | None = None
    transform: Callable[[PairedBatch], PairedBatch] | None = None
    padded: bool = False
    leave_out_far: bool = True

    def __post_init__(self) -> None:
        self.sites: list[tuple[int, int]] = []
        self._x: list[tuple[int, int]] = []
        self._y: list[tuple[int, int]] = []
        for link in self.links:
            self.sites.append((link.site_x, link.site_y))
            self._x.append(self._column(link.x, link.site_x))
            self._y.append(self._column(link.y, link.site_y))
        self._sites_read: dict[int, list[int]] = {}
        for model, site in dict.fromkeys(self._x + self._y):
            self.models[model].check_site(site, "sites", self.component)
            self._sites_read.setdefault(model, []).append(site)
        self.widths = self._check_widths()
        self.check = FiniteCheck()
        self._batches_read = 0

    def _column(self, model: int, site: int) -> tuple[int, int]:
        """Return a column as the first number of its model, which may be listed several times, and a site."""
        first = self.models.index(self.models[model])
        return first, site

    def _width(self, model: int) -> int:
        """Return the length of a model's rows."""
        if self.token_pairs is None:
            return self.models[model].width
        return self.models[model].heads

    def _check_widths(self) -> tuple[int, int]:
        """Return d_x and d_y; raise if the links differ in width although they must not."""
        x = [self._width(link.x) for link in self.links]
        y = [self._width(link.y) for link in self.links]
        if self.padded:
            return max(x), max(y)
        widths = list(zip(x, y, strict=True))
        places = self.places()
        first = places[0]
        for place, of_link in zip(places, widths, strict=True):
            if of_link != widths[0]:
                raise UserError(
                    f"Expected pairs of equal widths, as one bank holds, but {first.model_x} and {first.model_y} have "
                    f"{widths[0]}, {place.model_x} and {place.model_y} {of_link}. Fit them in separate runs."
                )
        return widths[0]

    @property
    def model_x(self) -> FrozenModel:
        """X of the first link."""
        return self.models[self.links[0].x]

    @property
    def model_y(self) -> FrozenModel:
        """Y of the first link."""
        return self.models[self.links[0].y]

    def places(self) -> list[Place]:
        """What each place along the leading axis S is."""
        places = []
        for link in self.links:
            name = f"{link.begins}{link.site_x}-{link.site_y}"
            x = self.models[link.x].name
            y = link.called or self.models[link.y].name
            place = Place(name, x, y, link.site_x, link.site_y, link.about)
            places.append(place)
        return places

    def prepare(self, texts: TextBatch, others: Sequence[RowKind] = ()) -> Prepared:
        """Choose the rows of each model for each kind of rows, while the batch is on the CPU.

        Args:
            texts: a batch on the CPU.
            others: further kinds of rows to gather from the same states.
        """
        if self.token_pairs is not None:
            rows = self.token_pairs.rows(texts)
            of_each = (rows,) * len(self.models)
            return Prepared(texts, ChosenRows(of_each))
        own = choose_rows(texts, self.kind, leave_out_far=self.leave_out_far)
        prepared = Prepared(texts, own)
        for kind in others:
            chosen = choose_rows(texts, kind, leave_out_far=self.leave_out_far)
            prepared.others.append(chosen)
        return prepared

    def read(self, prepared: Prepared) -> PairedBatch:
        """Run the fronts on the batch's device, if their states do not come from a store, and gather the rows."""
        kinds = [prepared.chosen, *prepared.others]
        rows_by_model: dict[int, list[Tensor]] = {}
        for model in self._sites_read:
            rows = [chosen.read[model] for chosen in kinds]
            rows_by_model[model] = self._read_model(model, prepared.texts, rows)

        batches = []
        for number, chosen in enumerate(kinds):
            states = {}
            for model, of_kinds in rows_by_model.items():
                states[model] = self._widened(of_kinds[number])
            batches.append(self._paired(states, chosen, prepared.texts))
        batch, *batch.others = batches
        batch.task = prepared.task
        self._watch(batch)
        if self.transform is None:
            return batch
        if batch.whole is not None:
            batch.whole = self.transform(batch.whole)
        return self.transform(batch)

    def _read_model(
        self, model: int, texts: TextBatch, kinds: Sequence[Rows]
    ) -> list[Tensor]:
        """Read the rows of a model at all sites where it is read, for each kind (S_m, N, d)."""
        frozen = self.models[model]
        inputs = texts.inputs[model]
        sites = self._sites_read[model]
        if self.token_pairs is None:
            stored = texts.stored.get(frozen)
            return read_each(frozen, inputs, sites, kinds, self.component, stored)
        with torch.no_grad():
            weights, _ = frozen.attention(inputs)
        by_block = {}
        for block in sites:
            of_block = weights[block - 1].movedim(1, -1)  # (B, T, T, H)
            by_block[block] = of_block.flatten(1, 2)
        return [gather_rows(by_block, sites, rows, frozen.heads) for rows in kinds]

    def _widened(self, rows: Tensor) -> Tensor:
        """Pad the rows of a narrow model (S, N, d) with zeros, if the pairing allows it."""
        missing = max(self.widths) - rows.shape[-1]
        if self.padded and missing:
            return pad(rows, (0, missing))
        return rows

    def _paired(
        self, states: dict[int, Tensor], chosen: ChosenRows, texts: TextBatch
    ) -> PairedBatch:
        """Pair the rows of the models, and leave far ones out of the batch but not out of its `whole`."""
        x = y = self._stacked(states, self._x)
        if self._x != self._y:
            y = self._stacked(states, self._y)
        batch = PairedBatch(x, y, chosen.read[0], texts)
        if chosen.near is None:
            return batch
        near = batch.only(chosen.near, chosen.rows[0])
        near.whole = batch
        return near

    def _stacked(
        self, states: dict[int, Tensor], columns: list[tuple[int, int]]
    ) -> Tensor:
        """Stack the rows of X, or of Y, at all places: (S, N, d)."""
        only = columns[0][0]
        if columns == [(only, site) for site in self._sites_read[only]]:
            return states[only]  # one model, each site once: nothing to copy
        rows = []
        for model, site in columns:
            place = self._sites_read[model].index(site)
            rows.append(states[model][place])
        return torch.stack(rows)

    def _watch(self, batch: PairedBatch) -> None:
        """Check for NaN and infinity, which are reported with the next batch."""
        self._watch_side("X", batch.x, self._x)
        self._watch_side("Y", batch.y, self._y)
        self._batches_read += 1

    def _watch_side(
        self, side: str, values: Tensor, columns: list[tuple[int, int]]
    ) -> None:
        what = "states" if self.token_pairs is None else "attention weights"
        names = []
        for model, site in columns:
            names.append(f"site {site} of {side} ({self.models[model].name})")
        self.check.watch(values, names, what, self._batches_read)
