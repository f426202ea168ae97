"""From a batch of texts to paired rows, in one pass of each model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from aligners.models.architectures import Component
from aligners.models.finite import FiniteCheck
from aligners.models.model import FrozenModel
from datamodules.batches import StoredRows, TextBatch
from datamodules.rows.policies import RowKind, RowPolicy, Rows, rows_of_each

if TYPE_CHECKING:
    from datamodules.rows.types import SeenTypes
    from datamodules.text.sources import TextSource

__all__ = ["PairReader", "PairedBatch", "Place", "Plan", "Prepared", "gather_rows", "read_rows"]


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
    """As `read_rows`, for several choices of rows at once."""
    if stored is not None:
        states = {site: at_site[None] for site, at_site in zip(stored.sites, stored.states, strict=True)}
        packed = inputs["attention_mask"].flatten().cumsum(0) - 1  # place of each position among the real tokens
        places = [replace(rows, index=packed[rows.index]) for rows in each]
        return [gather_rows(states, sites, rows, model.width) for rows in places]
    wanted = sorted(set(sites))
    with torch.inference_mode():
        states = dict(zip(wanted, model.front(inputs, wanted, component), strict=True))
    return [gather_rows(states, sites, rows, model.width) for rows in each]


def gather_rows(states: Mapping[int, Tensor], sites: Sequence[int], rows: Rows, width: int) -> Tensor:
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
    """

    x: Tensor
    y: Tensor
    rows: Rows
    texts: TextBatch
    others: list[PairedBatch] = field(default_factory=list)
    task: Any = None

    @property
    def text(self) -> Tensor:
        """Id of the text of each row, (N,)."""
        return self.texts.text[self.rows.owner]

    @property
    def token(self) -> Tensor | None:
        """Position of each row in X's padded text, (N,); None for means."""
        width = self.texts.inputs_x["input_ids"].shape[1]
        return None if self.rows.share is not None else self.rows.index % width


@dataclass(frozen=True)
class Plan:
    """What an evaluation reads of paired rows.

    Attributes:
        kinds: kinds of rows to read from the same texts; those beside `data.rows` become `PairedBatch.others`.
        measured: the types by which rows are marked as unseen outside fitting; None: those of the fitting rows.
        other: a source whose held-out texts become one more split, `other`. Their labels are not read.
        asking: what is asked about every held-out text: `PairedBatch.task`.
        fitting: whether fitting texts come too, as many as are held out: one more split, `fit`.
    """

    kinds: Sequence[RowKind] = ()
    measured: SeenTypes | None = None
    other: TextSource | None = None
    asking: Callable[[TextBatch], Any] | None = None
    fitting: bool = False


@dataclass
class Prepared:
    """A batch of texts, and what is chosen on the CPU before it goes to the device.

    Attributes:
        texts: the tokenised batch.
        rows: where the rows of each model are; one object for models of equal tokenizers.
        others: likewise for each further kind of rows.
        task: what a head is asked about the texts, if anything.
    """

    texts: TextBatch
    rows: tuple[Rows, ...]
    others: list[tuple[Rows, ...]] = field(default_factory=list)
    task: Any = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Prepared:
        """The same on another device, every part moved once."""
        kinds = [self.rows, *self.others]
        moved = {id(rows): rows.to(device, non_blocking) for each in kinds for rows in each}
        rows, *others = [tuple(moved[id(rows)] for rows in each) for each in kinds]
        task = None if self.task is None else self.task.to(device, non_blocking)
        return Prepared(self.texts.to(device, non_blocking), rows, others, task)


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


class PairReader:
    """Reads paired rows of two frozen models at site pairs, each model's blocks run once and no further up.

    Args:
        model_x: X.
        model_y: Y.
        sites: site pairs (i, j): state of X at i with state of Y at j.
        rows: row policy.
        special_tokens: whether special tokens count, for `tokens` and `mean`.
        component: states of the residual stream, or what the attention or the feed-forward layer of a block adds.
    """

    def __init__(
        self,
        model_x: FrozenModel,
        model_y: FrozenModel,
        sites: Sequence[tuple[int, int]],
        rows: RowPolicy = "tokens",
        special_tokens: bool = True,
        component: Component = "residual",
    ) -> None:
        for i, j in sites:
            model_x.check_site(i, "sites", component)
            model_y.check_site(j, "sites", component)
        self.model_x, self.model_y = model_x, model_y
        self.sites = list(sites)
        self.kind, self.component = RowKind(rows, special_tokens), component
        self.check = FiniteCheck()
        self._read = 0

    @property
    def widths(self) -> tuple[int, int]:
        """d_x and d_y."""
        return self.model_x.width, self.model_y.width

    def places(self) -> list[Place]:
        """What stands along the leading axis S."""
        return [Place(f"{i}-{j}", self.model_x.name, self.model_y.name, i, j) for i, j in self.sites]

    def prepare(
        self, texts: TextBatch, others: Sequence[RowKind] = (), asking: Callable[[TextBatch], Any] | None = None
    ) -> Prepared:
        """Choose the rows of X and of Y for each kind of rows, which belongs on the CPU.

        Rows of unseen types are left out of a batch to fit on, and marked in any other.

        Args:
            texts: on the CPU.
            others: further kinds of rows to gather from the same states.
            asking: turns a batch into what a head is asked about it; see `datamodules.asking`.
        """
        own, *further = [_told_apart(texts, kind) for kind in (self.kind, *others)]
        return Prepared(texts, own, further, None if asking is None else asking(texts))

    def read(self, prepared: Prepared) -> PairedBatch:
        """Run both fronts on the batch's device, if their states do not come from a store, and gather the rows."""
        texts = prepared.texts
        rows_x, rows_y = zip(*((each[0], each[-1]) for each in (prepared.rows, *prepared.others)), strict=True)
        sites_x, sites_y = [i for i, _ in self.sites], [j for _, j in self.sites]
        stored_x, stored_y = (texts.stored.get(model) for model in (self.model_x, self.model_y))
        x = read_each(self.model_x, texts.inputs_x, sites_x, rows_x, self.component, stored_x)
        y = read_each(self.model_y, texts.inputs_y, sites_y, rows_y, self.component, stored_y)
        self.check.watch(x[0], [f"site {i} of X ({self.model_x.name})" for i in sites_x], "states", self._read)
        self.check.watch(y[0], [f"site {j} of Y ({self.model_y.name})" for j in sites_y], "states", self._read)
        self._read += 1
        own, *others = [PairedBatch(a, b, rows, texts) for a, b, rows in zip(x, y, rows_x, strict=True)]
        own.others, own.task = others, prepared.task
        return own


def _told_apart(texts: TextBatch, kind: RowKind) -> tuple[Rows, ...]:
    """The rows of each model, those of unseen types left out or marked, where types are known."""
    rows, unseen = rows_of_each(texts, kind), texts.unseen.get(kind)
    if unseen is None:
        return rows
    if texts.leave_out:
        return tuple(each.only(~unseen) for each in rows)
    return replace(rows[0], unseen=unseen), *rows[1:]
