"""From a batch of texts to paired rows: which sites, which vectors, and the one pass that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from datamodules.batches import TextBatch
from frozen.architectures import Component, first_site
from frozen.finite import FiniteCheck
from frozen.model import FrozenModel

__all__ = [
    "WORDS",
    "PairReader",
    "PairedBatch",
    "Prepared",
    "RowKind",
    "RowPolicy",
    "Rows",
    "check_policy",
    "gather_rows",
    "parse_sites",
    "read_rows",
    "rows_of_each",
    "select_rows",
    "select_words",
]

RowPolicy = Literal["tokens", "mean", "cls", "words", "words_first", "words_mean"]
WORDS = ("words", "words_first", "words_mean")


@dataclass(frozen=True)
class RowKind:
    """Which rows are meant: a policy, and whether special tokens count, where that makes a difference."""

    policy: RowPolicy
    special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.policy not in ("tokens", "mean"):
            object.__setattr__(self, "special_tokens", True)

    def __str__(self) -> str:
        return self.policy + ("" if self.special_tokens else ", special tokens left out")


@dataclass
class Rows:
    """Which positions of a batch (B, T) become its N rows.

    Attributes:
        index: (P,) positions in the flattened batch; P = N, but for means one for every token that enters one.
        owner: (N,) which text of the batch each row belongs to, 0..B-1, ascending.
        texts: B.
        share: (P,) weight of the position in its mean, or None where every position is a row itself.
        row: (P,) which mean the position enters, 0..N-1, or None likewise.
        counts: rows of each text, known without asking the device, as long as the rows were chosen on the CPU.
        unseen: (N,) whether the row's type is not among those that fitting sees; None where that is not known.
    """

    index: Tensor
    owner: Tensor
    texts: int
    share: Tensor | None = None
    row: Tensor | None = None
    counts: tuple[int, ...] = ()
    unseen: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.counts and self.owner.device.type == "cpu":
            self.counts = tuple(torch.bincount(self.owner, minlength=self.texts).tolist())

    @property
    def place(self) -> Tensor:
        """(N,) number of each row among those of its text, 0, 1, ...: the same however texts are batched."""
        counts = torch.zeros(self.texts, dtype=torch.int64, device=self.owner.device)
        counts.index_add_(0, self.owner, torch.ones_like(self.owner))
        return torch.arange(len(self), device=self.owner.device) - (counts.cumsum(0) - counts)[self.owner]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Rows:
        """The same rows on another device."""

        def moved(part: Tensor | None) -> Any:
            return None if part is None else part.to(device, non_blocking=non_blocking)

        share, row, unseen = moved(self.share), moved(self.row), moved(self.unseen)
        return Rows(moved(self.index), moved(self.owner), self.texts, share, row, self.counts, unseen)

    def only(self, kept: Tensor) -> Rows:
        """The rows where `kept` (N,) is True."""
        if self.share is None or self.row is None:
            return Rows(self.index[kept], self.owner[kept], self.texts)
        entering = kept[self.row]
        row = (kept.cumsum(0) - 1)[self.row[entering]]
        return Rows(self.index[entering], self.owner[kept], self.texts, self.share[entering], row)

    def gather(self, states: Tensor, out: Tensor) -> None:
        """Write the rows of states (B, T, d) into `out` (N, d)."""
        flat = states.flatten(0, 1)
        if self.share is None or self.row is None:
            if flat.dtype == out.dtype:
                torch.index_select(flat, 0, self.index, out=out)
            else:
                out.copy_(flat.index_select(0, self.index))
            return
        weighted = flat.index_select(0, self.index).to(out.dtype) * self.share[:, None]
        out.zero_().index_add_(0, self.row, weighted)

    def scatter(self, rows: Tensor, states: Tensor) -> Tensor:
        """A copy of states (B, T, d) in which the rows (N, d) stand at their positions."""
        return states.flatten(0, 1).index_copy(0, self.index, rows.to(states.dtype)).view_as(states)

    def __len__(self) -> int:
        """N, how many rows `gather` gives."""
        return len(self.owner)


def select_rows(mask: Tensor, special: Tensor, policy: RowPolicy, special_tokens: bool = True) -> Rows:
    """Rows of a batch on the CPU, before it is moved: their number is then known without asking the device.

    Args:
        mask: (B, T) attention mask; padding is never a row.
        special: (B, T) True at special tokens.
        policy: `tokens`: every real token; `mean`: the mean over a text's real tokens; `cls`: a text's first
            real token.
        special_tokens: whether special tokens count for `tokens` and `mean`.

    Raises:
        ValueError: a text has no token that counts.
    """
    counts, every = mask.bool(), torch.arange(len(mask))
    if policy == "cls":
        first = counts.int().argmax(1)
        return Rows(every * mask.shape[1] + first, every, len(mask))
    if not special_tokens:
        counts = counts & ~special
    lengths = counts.sum(1)
    if not lengths.all():
        raise ValueError(
            f"Expected every text to have a token that counts as a row, but text number "
            f"{int((lengths == 0).nonzero()[0])} of the batch has none. Drop empty texts, or count special tokens."
        )
    index = counts.flatten().nonzero()[:, 0]
    owner = index // mask.shape[1]
    if policy == "mean":
        return Rows(index, every, len(mask), share=1 / lengths[owner].float(), row=owner)
    return Rows(index, owner, len(mask))


def select_words(words: Tensor, counts: Tensor, policy: RowPolicy) -> Rows:
    """One row for every word of a batch, text by text and in the order of their numbers; on the CPU too.

    The rows of two models are paired by this order alone, so a word must be there for both or for neither.

    Args:
        words: (B, T) word of each token, 0..W_b-1 in text b, -1 for none.
        counts: (B,) words of each text, W_b; every word has a token.
        policy: `words`: the last token of a word; `words_first`: its first; `words_mean`: the mean over them.
    """
    index = (words >= 0).flatten().nonzero()[:, 0]
    row = (counts.cumsum(0) - counts)[index // words.shape[1]] + words.flatten()[index]
    n, owner = int(counts.sum()), torch.arange(len(words)).repeat_interleave(counts)
    if policy == "words_mean":
        pieces = torch.bincount(row, minlength=n)
        return Rows(index, owner, len(words), share=1 / pieces[row].float(), row=row)
    chosen = torch.empty(n, dtype=torch.int64)
    chosen.scatter_reduce_(0, row, index, "amax" if policy == "words" else "amin", include_self=False)
    return Rows(chosen, owner, len(words))


def rows_of_each(texts: TextBatch, policy: RowPolicy, special_tokens: bool) -> tuple[Rows, ...]:
    """The rows of every model of a batch, one object for models of equal tokenizers.

    Raises:
        ValueError: words are asked for of texts that were tokenised without them; or as in `select_rows`.
    """
    found: dict[int, Rows] = {}
    for m, (inputs, special) in enumerate(zip(texts.inputs, texts.special, strict=True)):
        if id(inputs) in found:
            continue
        if policy not in WORDS:
            found[id(inputs)] = select_rows(inputs["attention_mask"], special, policy, special_tokens)
        elif texts.words is None or texts.word_count is None:
            raise ValueError(
                f"`rows` {policy!r} needs to know the words of the texts, but they were tokenised without. Call "
                "`tokenise` with `words=True`."
            )
        else:
            found[id(inputs)] = select_words(texts.words[m], texts.word_count, policy)
    return tuple(found[id(inputs)] for inputs in texts.inputs)


def check_policy(rows: str) -> None:
    """Refuse a row policy that there is not.

    Raises:
        ValueError: naming those that there are.
    """
    if rows not in get_args(RowPolicy):
        raise ValueError(f"Expected `rows` to be one of {', '.join(get_args(RowPolicy))}, but got {rows!r}.")


def read_rows(
    model: FrozenModel, inputs: dict[str, Tensor], sites: Sequence[int], rows: Rows, component: Component = "residual"
) -> Tensor:
    """The rows of one model at some sites, (S, N, d) float32, its blocks run once and no further up."""
    return read_each(model, inputs, sites, [rows], component)[0]


def read_each(
    model: FrozenModel,
    inputs: dict[str, Tensor],
    sites: Sequence[int],
    each: Sequence[Rows],
    component: Component = "residual",
) -> list[Tensor]:
    """As `read_rows`, for several choices of rows at once."""
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
        task: what a head is asked about these texts (a `TaskBatch`), where anything is.
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


# a batch, then the rows of X and those of Y, kind by kind, and last what is asked about it, if anything is
Prepared = tuple[TextBatch, *tuple[Any, ...]]


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
        check_policy(rows)
        for i, j in sites:
            model_x.check_site(i, "sites", component)
            model_y.check_site(j, "sites", component)
        self.model_x, self.model_y = model_x, model_y
        self.sites = list(sites)
        self.policy: RowPolicy = rows
        self.special_tokens, self.component = special_tokens, component
        self.check = FiniteCheck()
        self._read = 0

    @property
    def kind(self) -> RowKind:
        """Which rows these are."""
        return RowKind(self.policy, self.special_tokens)

    def prepare(
        self, texts: TextBatch, others: Sequence[RowKind] = (), asking: Callable[[TextBatch], Any] | None = None
    ) -> Prepared:
        """The part that belongs on the CPU: which positions are rows of X and of Y, for each kind of rows.

        Rows of unseen types are left out of a batch to fit on, and marked in any other.

        Args:
            texts: on the CPU.
            others: further kinds of rows to gather from the same states.
            asking: makes of a batch what a head is asked about it; see `datamodules.asking`.
        """
        found: list[Rows] = []
        for kind in (self.kind, *others):
            rows = rows_of_each(texts, kind.policy, kind.special_tokens)
            found += _told_apart(rows[0], rows[-1], texts.unseen.get(kind), texts.leave_out)
        return texts, *found, *([] if asking is None else [asking(texts)])

    def read(self, prepared: Prepared) -> PairedBatch:
        """Run both fronts on the batch's device and gather the rows."""
        texts, *each = prepared
        task = each.pop() if len(each) % 2 else None
        rows_x, rows_y = each[::2], each[1::2]
        sites_x, sites_y = [i for i, _ in self.sites], [j for _, j in self.sites]
        x = read_each(self.model_x, texts.inputs_x, sites_x, rows_x, self.component)
        y = read_each(self.model_y, texts.inputs_y, sites_y, rows_y, self.component)
        self.check.watch(x[0], [f"site {i} of X ({self.model_x.name})" for i in sites_x], "states", self._read)
        self.check.watch(y[0], [f"site {j} of Y ({self.model_y.name})" for j in sites_y], "states", self._read)
        self._read += 1
        own, *others = [PairedBatch(a, b, rows, texts) for a, b, rows in zip(x, y, rows_x, strict=True)]
        own.others, own.task = others, task
        return own


def _told_apart(rows_x: Rows, rows_y: Rows, unseen: Tensor | None, leave_out: bool) -> tuple[Rows, Rows]:
    """The rows of X and of Y, those of unseen types left out or marked, where types are known."""
    if unseen is None:
        return rows_x, rows_y
    if leave_out:
        return rows_x.only(~unseen), rows_y.only(~unseen)
    return replace(rows_x, unseen=unseen), rows_y


def parse_sites(
    sites: str | Sequence[str | int], depth_x: int, depth_y: int, component: Component = "residual"
) -> list[tuple[int, int]]:
    """Site pairs from what a user writes.

    Args:
        sites: `all` (0..L, of a sub-layer 1..L), `blocks` (1..L), `grid` (every block of X with every block of Y), or
            layers `3` and pairs `3:5` (X's site 3, Y's site 5), as one string `1,3:5` or as a list.
        depth_x: L of X.
        depth_y: L of Y.
        component: what is read there.

    Raises:
        ValueError: something else was written, a site twice, or `all` and `blocks` at unequal depths.
    """
    if isinstance(sites, str) and sites in ("all", "blocks"):
        if depth_x != depth_y:
            raise ValueError(
                f"`sites` {sites!r} pairs equal layers, but X has {depth_x} blocks and Y has {depth_y}. "
                "Name the pairs, for example `sites` '1:2, 2:4'."
            )
        return [(site, site) for site in range(first_site(component) if sites == "all" else 1, depth_x + 1)]
    if sites == "grid":
        return [(i, j) for i in range(1, depth_x + 1) for j in range(1, depth_y + 1)]
    entries = sites.replace(",", " ").split() if isinstance(sites, str) else list(sites)
    swallowed = [n for n in entries if isinstance(n, int) and n >= 60 and n > max(depth_x, depth_y)]
    if swallowed:
        raise ValueError(
            f"`sites` holds {swallowed[0]}, but the models have {depth_x} and {depth_y} blocks. If you wrote "
            f"{swallowed[0] // 60}:{swallowed[0] % 60} in a list: YAML reads that as a number of base 60. "
            "Write the list as one string, without brackets: `sites` '1, 2:3'."
        )
    try:
        pairs = [_pair(str(entry)) for entry in entries]
    except ValueError:
        raise ValueError(
            "Expected `sites` to be 'all', 'blocks', 'grid', or a list of layers (3) and pairs (3:5), "
            f"but got {sites!r}. Write for example `sites` '1, 2:3'."
        ) from None
    if not pairs or len(set(pairs)) < len(pairs):
        raise ValueError(f"Expected `sites` to name at least one site pair and none twice, but got {sites!r}.")
    return pairs


def _pair(entry: str) -> tuple[int, int]:
    left, colon, right = entry.partition(":")
    return int(left), int(right if colon else left)
