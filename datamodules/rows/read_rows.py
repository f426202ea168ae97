"""From a batch of texts to paired rows, in one pass of each model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aligners.datamodules.batches import Movable, StoredRows, TextBatch
from aligners.datamodules.rows.policies import RowKind, Rows, TokenPairs, rows_of_each
from aligners.datamodules.rows.row_types import SeenTypes
from aligners.datamodules.text.sources import TextSource
from aligners.errors import UserError
from aligners.models.architectures import Component
from aligners.models.calling import FiniteCheck
from aligners.models.model import FrozenModel


def read_rows(
    model: FrozenModel,
    inputs: dict[str, Tensor],
    sites: Sequence[int],
    rows: Rows,
    component: Component = "residual",
    stored: StoredRows | None = None,
) -> Tensor:
    """The rows of one model at some sites, (S, N, d) float32, its blocks run once and no further up.

    Args:
        model: the model.
        inputs: of a batch (B, T).
        sites: in any order.
        rows: of the batch.
        component: what is read at a site.
        stored: the states that a store has of the batch; the model is then not run.
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
    """As `read_rows`, for several choices of rows at once; of stored rows that are pooled there is no other choice."""
    if stored is not None and stored.pooled:
        return [
            torch.stack([stored.states[stored.sites.index(site)] for site in sites]) for _ in each
        ]
    if stored is not None:
        states = {
            site: at_site[None] for site, at_site in zip(stored.sites, stored.states, strict=True)
        }
        packed = (
            inputs["attention_mask"].flatten().cumsum(0) - 1
        )  # place of each position among the real tokens
        each = [replace(rows, index=packed[rows.index]) for rows in each]
    else:
        wanted = sorted(set(sites))
        with torch.inference_mode():
            states = dict(zip(wanted, model.front(inputs, wanted, component), strict=True))
    return [gather_rows(states, sites, rows, model.width) for rows in each]


def gather_rows(
    states: Mapping[int, Tensor], sites: Sequence[int], rows: Rows, width: int
) -> Tensor:
    """The rows (S, N, d) float32 at some sites, from the states (B, T, d) of each."""
    # Never in inference mode, so that what is gathered can enter a graph.
    with torch.no_grad():
        out = torch.empty(len(sites), len(rows), width, device=rows.index.device)
        for place, site in enumerate(sites):
            rows.gather(states[site], out[place])
    return out


@dataclass
class PairedBatch:
    """Paired rows of one batch of texts, and what is needed to put rows back where they came from.

    Attributes:
        x: (S, N, d_x) states of X, float32.
        y: (S, N, d_y) states of Y, row by row their partners.
        rows: where the rows came from.
        texts: the tokenised batch.
        others: the same texts as rows of other kinds, where some were asked for.
        task: what a head is asked about these texts (a `TaskBatch`), if anything.
        whole: where rows that are far from all others are left out, the same with them, and marked in `rows.far`.
    """

    x: Tensor
    y: Tensor
    rows: Rows
    texts: TextBatch
    others: list["PairedBatch"] = field(default_factory=list)
    task: Any = None
    whole: "PairedBatch | None" = None

    @property
    def text(self) -> Tensor:
        """Id of the text of each row, (N,)."""
        return self.texts.text[self.rows.owner]

    @property
    def counterpart(self) -> "PairedBatch | None":
        """The batch with far rows, if they are left out, or without, if they are kept; None if its texts have none."""
        if self.whole is not None:
            return self.whole
        if self.rows.far is None:
            return self if self.texts.far else None
        kept = (~self.rows.far).nonzero()[:, 0]
        x = self.x.index_select(1, kept)
        y = x if self.y is self.x else self.y.index_select(1, kept)
        return PairedBatch(x, y, self.rows.without(self.rows.far), self.texts)


@dataclass(frozen=True)
class Plan:
    """What an evaluation reads of paired rows.

    Attributes:
        kinds: kinds of rows to read from the same texts; those beside `data.rows` become `PairedBatch.others`.
        measured: the types by which rows are marked as unseen outside fitting; None: those of the fitting rows.
        other: a source whose held-out texts become one more split, `other`. Their labels are not read.
        targets_of: what is asked about every held-out text: `PairedBatch.task`.
        fitting: whether fitting texts come too, as many as are held out: one more split, `fit`.
    """

    kinds: Sequence[RowKind] = ()
    measured: SeenTypes | None = None
    other: TextSource | None = None
    targets_of: Callable[[TextBatch], Any] | None = None
    fitting: bool = False


@dataclass
class WholeRows(Movable):
    """The rows of a batch of which some are left out because they are far from all others.

    Attributes:
        rows: all of them, of each model.
        kept: (N,) numbers of those that stay.
    """

    rows: tuple[Rows, ...]
    kept: Tensor


@dataclass
class Prepared(Movable):
    """A batch of texts, and what is chosen on the CPU before it goes to the device.

    Attributes:
        texts: the tokenised batch.
        rows: where the rows of each model are; one object for models of equal tokenizers.
        others: likewise for each further kind of rows.
        task: what a head is asked about the texts, if anything.
        whole: for `rows` and each of `others` the same with rows that are left out for being far; None: there are none.
    """

    texts: TextBatch
    rows: tuple[Rows, ...]
    others: list[tuple[Rows, ...]] = field(default_factory=list)
    task: Any = None
    whole: Sequence[WholeRows | None] = ()


class Place(NamedTuple):
    """What stands at a place along the leading axis S of a batch and of every bank.

    Attributes:
        name: of the place, different from all others of a run.
        model_x: name of X.
        model_y: name of Y.
        site_x: where X is read.
        site_y: where Y is read.
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
        site_x: where X is read.
        site_y: where Y is read.
        begins: how the name of the place begins, where sites alone do not tell it from others.
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
    """Reads linked columns of frozen models, each model's blocks run once a batch and no further up.

    Args:
        models: all of them; one may be there several times, and is read once.
        links: what is paired, in the order of the leading axis.
        kind: of the rows.
        component: states of the residual stream, or what the attention or the feed-forward layer of a block adds.
        token_pairs: rows are these pairs of tokens instead, and what is read is the attention weights that the heads of
            a block give them.
        transform: what becomes of a batch after it was read.
        padded: the widths of the links may differ: states of narrower models end in zeros.
        leave_out_far: rows that are far from all others are left out; else they are marked.

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
        self.sites = [(link.site_x, link.site_y) for link in self.links]
        x = [(self.models.index(self.models[link.x]), link.site_x) for link in self.links]
        y = [(self.models.index(self.models[link.y]), link.site_y) for link in self.links]
        self._columns = [x, y]
        self._read_at: dict[int, list[int]] = {}
        for m, site in dict.fromkeys(x + y):
            self.models[m].check_site(site, "sites", self.component)
            self._read_at.setdefault(m, []).append(site)
        each = list(map(self._widths, self.links))
        self.widths = (max(x for x, _ in each), max(y for _, y in each)) if self.padded else each[0]
        first = self.places()[0]
        for place, widths in zip(self.places(), each, strict=True):
            if widths != self.widths and not self.padded:
                raise UserError(
                    f"Expected pairs of equal widths, as one bank holds, but {first.model_x} and {first.model_y} have "
                    f"{self.widths}, {place.model_x} and {place.model_y} {widths}. Fit them apart."
                )
        self.check = FiniteCheck()
        self._read = 0

    def _widths(self, link: Link) -> tuple[int, int]:
        x, y = self.models[link.x], self.models[link.y]
        return (x.width, y.width) if self.token_pairs is None else (x.heads, y.heads)

    @property
    def model_x(self) -> FrozenModel:
        """X of the first link."""
        return self.models[self.links[0].x]

    @property
    def model_y(self) -> FrozenModel:
        """Y of the first link."""
        return self.models[self.links[0].y]

    def places(self) -> list[Place]:
        """What stands along the leading axis S."""
        names = [model.name for model in self.models]
        return [
            Place(f"{begins}{i}-{j}", names[x], called or names[y], i, j, about)
            for x, y, i, j, begins, called, about in self.links
        ]

    def prepare(
        self,
        texts: TextBatch,
        others: Sequence[RowKind] = (),
        targets_of: Callable[[TextBatch], Any] | None = None,
    ) -> Prepared:
        """Choose the rows of each model for each kind of rows, which belongs on the CPU.

        Rows of unseen types are left out of a batch to fit on, and marked in any other. Far rows are left out of
        both, or marked.

        Args:
            texts: on the CPU.
            others: further kinds of rows to gather from the same states.
            targets_of: turns a batch into what a head is asked about it; see `aligners.datamodules.task_targets`.
        """
        if self.token_pairs is not None:
            return Prepared(texts, (self.token_pairs(texts),) * len(self.models))
        every = [
            told_apart(texts, kind, leave_out=self.leave_out_far) for kind in (self.kind, *others)
        ]
        (rows, *further), whole = zip(*every, strict=True)
        return Prepared(
            texts, rows, further, None if targets_of is None else targets_of(texts), whole
        )

    def read(self, prepared: Prepared) -> PairedBatch:
        """Run the fronts on the batch's device, if their states do not come from a store, and gather the rows."""
        texts, kinds = prepared.texts, (prepared.rows, *prepared.others)
        wholes = prepared.whole or [None] * len(kinds)
        gathered = [
            rows if whole is None else whole.rows for rows, whole in zip(kinds, wholes, strict=True)
        ]
        by_model = {
            m: self._rows_of(m, texts, [rows[m] for rows in gathered]) for m in self._read_at
        }
        batches = []
        for number, (rows, whole) in enumerate(zip(kinds, wholes, strict=True)):
            found = {
                m: _widened(tensors[number], self.widths, self.padded)
                for m, tensors in by_model.items()
            }
            x, y = (self._side(found, side) for side in self._columns)
            y = x if self._columns[0] == self._columns[1] else y
            batches.append(
                _without_far(PairedBatch(x, y, gathered[number][0], texts), rows[0], whole)
            )
        batch, *batch.others = batches
        batch.task = prepared.task
        for name, values, side in zip("XY", (batch.x, batch.y), self._columns, strict=True):
            names = [f"site {site} of {name} ({self.models[m].name})" for m, site in side]
            self.check.watch(
                values,
                names,
                "states" if self.token_pairs is None else "attention weights",
                self._read,
            )
        self._read += 1
        if self.transform is None:
            return batch
        if batch.whole is not None:
            batch.whole = self.transform(batch.whole)
        return self.transform(batch)

    def _rows_of(self, m: int, texts: TextBatch, kinds: Sequence[Rows]) -> list[Tensor]:
        """The rows of a model at all sites where it is read, for each kind (S_m, N, d)."""
        model, inputs, sites = self.models[m], texts.inputs[m], self._read_at[m]
        if self.token_pairs is None:
            return read_each(model, inputs, sites, kinds, self.component, texts.stored.get(model))
        with torch.no_grad():
            weights, _ = model.attention(inputs)
        by_block = {block: weights[block - 1].movedim(1, -1).flatten(1, 2) for block in sites}
        return [gather_rows(by_block, sites, rows, model.heads) for rows in kinds]

    def _side(self, found: Mapping[int, Tensor], columns: Sequence[tuple[int, int]]) -> Tensor:
        """The rows of X, or of Y, at all places."""
        only = columns[0][0]
        if columns == [(only, site) for site in self._read_at[only]]:
            return found[only]  # one model, each site once: nothing to copy
        return torch.stack([found[m][self._read_at[m].index(site)] for m, site in columns])


def _widened(states: Tensor, widths: tuple[int, int], padded: bool) -> Tensor:
    missing = max(widths) - states.shape[-1] if padded else 0
    return torch.nn.functional.pad(states, (0, missing)) if missing else states


def _without_far(batch: PairedBatch, rows: Rows, whole: WholeRows | None) -> PairedBatch:
    """A batch of all rows without the far ones, which keeps it as `whole`."""
    if whole is None:
        return batch
    x = batch.x.index_select(1, whole.kept)
    y = x if batch.y is batch.x else batch.y.index_select(1, whole.kept)
    return PairedBatch(x, y, rows, batch.texts, whole=batch)


def told_apart(
    texts: TextBatch, kind: RowKind, *, leave_out: bool
) -> tuple[tuple[Rows, ...], WholeRows | None]:
    """The rows of each model, those of unseen types left out or marked, where types are known.

    Args:
        texts: on the CPU.
        kind: of the rows.
        leave_out: whether rows that are far from all others are left out; else they are marked.

    Returns:
        The rows, and where far ones are left out of a batch that is not fitted on, those with them.
    """
    rows, unseen, far = rows_of_each(texts, kind), texts.unseen.get(kind), texts.far.get(kind)
    if texts.leave_out:
        return rows if unseen is None else tuple(of_model.only(~unseen) for of_model in rows), None
    if unseen is not None:
        rows = replace(rows[0], unseen=unseen), *rows[1:]
    if far is None or not far.any():
        return rows, None
    marked = replace(rows[0], far=far), *rows[1:]
    if not leave_out:
        return marked, None
    return tuple(of_model.without(far) for of_model in rows), WholeRows(
        marked, (~far).nonzero()[:, 0]
    )
