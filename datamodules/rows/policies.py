"""Row policies: which vectors of a batch become rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from aligners.datamodules.batches import Movable, TextBatch
from aligners.errors import UserError, check_known

if TYPE_CHECKING:
    from aligners.models.architectures import Component

Kind = Literal["tokens", "words", "states"]
RowPolicy = str  # one of POLICIES
PAIRS_TOKENS = (
    "`rows` 'tokens' pairs models token by token",
    "Use `rows` 'words', 'mean' or 'cls'",
)


@dataclass
class Rows(Movable):
    """Which positions of a batch (B, T) become its N rows.

    Attributes:
        index: (P,) positions in the flattened batch. P = N, except for means, where every token in a mean has a
            position.
        owner: (N,) which text of the batch each row belongs to, 0..B-1, ascending.
        texts: B.
        share: (P,) weight of the position in its mean, or None where every position is a row itself.
        row: (P,) number of the mean that the position enters, 0..N-1; None where every position is a row itself.
        counts: number of rows of each text; if the rows were chosen on the CPU, reading it waits for no device.
        unseen: (N,) whether the row's type is absent from the fitting rows; None where that is not known.
        far: (N,) whether the row is far from all others; None if the batch has no far rows.
        places: (N,) `place` of each row before far ones were left out; None if none were left out.
    """

    index: Tensor
    owner: Tensor
    texts: int
    share: Tensor | None = None
    row: Tensor | None = None
    counts: tuple[int, ...] = ()
    unseen: Tensor | None = None
    far: Tensor | None = None
    places: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.counts and self.owner.device.type == "cpu":
            self.counts = self._count()

    def _count(self) -> tuple[int, ...]:
        """The number of rows of each text."""
        counts = torch.bincount(self.owner, minlength=self.texts)
        return tuple(counts.tolist())

    @property
    def place(self) -> Tensor:
        """The number of each row among those of its text, (N,), 0, 1, ...: the same for any batching."""
        if self.places is not None:
            return self.places
        device = self.owner.device
        counts = torch.zeros(self.texts, dtype=torch.int64, device=device)
        counts.index_add_(0, self.owner, torch.ones_like(self.owner))
        first = counts.cumsum(0) - counts
        return torch.arange(len(self), device=device) - first[self.owner]

    def only(self, kept: Tensor) -> Rows:
        """Return the rows where `kept` (N,) is True."""
        if self.share is None or self.row is None:
            return Rows(self.index[kept], self.owner[kept], self.texts)
        entering = kept[self.row]
        number = kept.cumsum(0) - 1
        row = number[self.row[entering]]
        share = self.share[entering]
        index = self.index[entering]
        return Rows(index, self.owner[kept], self.texts, share, row)

    def without(self, far: Tensor) -> Rows:
        """Return the rows that are not marked in `far` (N,), each with the place and the mark that it had."""
        rows = self.only(~far)
        rows.counts = rows.counts or rows._count()
        rows.places = self.place[~far]
        if self.unseen is not None:
            rows.unseen = self.unseen[~far]
        return rows

    def gather(self, states: Tensor, out: Tensor) -> None:
        """Write the rows of states (B, T, d) into `out` (N, d)."""
        flat = states.flatten(0, 1)
        if self.share is None or self.row is None:
            if flat.dtype == out.dtype:
                torch.index_select(flat, 0, self.index, out=out)
            else:
                out.copy_(flat.index_select(0, self.index))
            return
        entering = flat.index_select(0, self.index).to(out.dtype)
        weighted = entering * self.share[:, None]
        out.zero_()
        out.index_add_(0, self.row, weighted)

    def scatter(self, rows: Tensor, states: Tensor) -> Tensor:
        """Return a copy of states (B, T, d) with the rows (N, d) written at their positions."""
        flat = states.flatten(0, 1)
        changed = flat.index_copy(0, self.index, rows.to(states.dtype))
        return changed.view_as(states)

    def __len__(self) -> int:
        """N, the number of rows."""
        return len(self.owner)


@dataclass(frozen=True)
class RowKind:
    """A kind of rows: a policy, and whether special tokens count, where that matters."""

    policy: RowPolicy
    special_tokens: bool = True

    def __post_init__(self) -> None:
        if not policy_of(self.policy).counts_special:
            object.__setattr__(self, "special_tokens", True)

    @property
    def types(self) -> Kind | None:
        """What the types of the rows are; None: the rows have no types."""
        return policy_of(self.policy).types

    def __str__(self) -> str:
        if self.special_tokens:
            return self.policy
        return f"{self.policy}, special tokens left out"


class Policy:
    """How the rows of a batch are chosen.

    Attributes:
        types: what the types of the rows are, by which some can be held out of fitting; `words` also says that the
            words of the texts are needed. None: the rows have no types.
        counts_special: whether the policy gives other rows if special tokens count.
        packed: whether packed sequences have such rows: they have no whole words and no first token.
    """

    types: Kind | None = None
    counts_special = False
    packed = False

    def choose(self, texts: TextBatch, model: int, special_tokens: bool) -> Rows:
        """Choose the rows of a batch on the CPU, in an order that all models share.

        Args:
            texts: the batch.
            model: number of the model that reads it.
            special_tokens: whether special tokens count as rows.
        """
        raise NotImplementedError


class MaskPolicy(Policy):
    """Chooses rows by the attention mask; see `select_rows`."""

    def __init__(
        self,
        name: RowPolicy,
        types: Kind | None = None,
        *,
        counts_special: bool = False,
        packed: bool = False,
    ) -> None:
        self.name = name
        self.types = types
        self.counts_special = counts_special
        self.packed = packed

    def choose(self, texts: TextBatch, model: int, special_tokens: bool) -> Rows:
        """Choose the rows of one model."""
        mask = texts.inputs[model]["attention_mask"]
        return select_rows(mask, texts.special[model], self.name, special_tokens)


class WordPolicy(Policy):
    """Chooses words as rows; see `select_words`."""

    types: Kind | None = "words"

    def __init__(self, name: RowPolicy) -> None:
        self.name = name

    def choose(self, texts: TextBatch, model: int, special_tokens: bool) -> Rows:
        """Choose the rows of one model; words have no special tokens."""
        if texts.words is None or texts.word_count is None:
            raise UserError(
                f"`rows` {self.name!r} needs to know the words of the texts, but they were tokenised without them. "
                "Call `tokenise` with `words=True`."
            )
        return select_words(texts.words[model], texts.word_count, self.name)


def _check_lengths(lengths: Tensor) -> None:
    """Raise unless every text (B,) has a token that counts."""
    if not lengths.all():
        empty = int((lengths == 0).nonzero()[0])
        raise UserError(
            f"Expected every text to have a token that counts as a row, but text number {empty} of the batch has none. "
            "Drop empty texts, or count special tokens."
        )


def select_rows(
    mask: Tensor, special: Tensor, policy: RowPolicy, special_tokens: bool = True
) -> Rows:
    """Choose the rows of a batch on the CPU, so that their number is known without waiting for a GPU.

    Args:
        mask: (B, T) attention mask; padding is never a row.
        special: (B, T) True at special tokens.
        policy: `tokens`: every real token; `mean`: the mean over a text's real tokens; `cls`: a text's first
            real token; `last`: its last.
        special_tokens: whether special tokens count for `tokens`, `mean` and `last`.

    Raises:
        ValueError: a text has no token that counts.
    """
    counts = mask.bool()
    every = torch.arange(len(mask))
    if not special_tokens and policy != "cls":
        counts = counts & ~special
    lengths = counts.sum(1)
    _check_lengths(lengths)
    index = counts.flatten().nonzero()[:, 0]
    owner = index // mask.shape[1]
    ends = lengths.cumsum(0)
    if policy == "cls":
        return Rows(index[ends - lengths], every, len(mask))
    if policy == "last":
        return Rows(index[ends - 1], every, len(mask))
    if policy == "mean":
        share = 1 / lengths[owner].float()
        return Rows(index, every, len(mask), share, owner)
    return Rows(index, owner, len(mask))


def select_words(words: Tensor, counts: Tensor, policy: RowPolicy) -> Rows:
    """Choose a row for each word of a batch, text by text, in the order of the words' numbers, on the CPU.

    The rows of two models are paired by this order alone, so a word must be present in both or in neither.

    Args:
        words: (B, T) word of each token, 0..W_b-1 in text b, -1 for none.
        counts: (B,) words of each text, W_b; every word has a token.
        policy: `words`: the last token of a word; `words_first`: its first; `words_mean`: the mean over them.
    """
    index = (words >= 0).flatten().nonzero()[:, 0]
    first = counts.cumsum(0) - counts
    text = index // words.shape[1]
    row = first[text] + words.flatten()[index]
    n = int(counts.sum())
    owner = torch.arange(len(words)).repeat_interleave(counts)
    if policy == "words_mean":
        pieces = torch.bincount(row, minlength=n)
        share = 1 / pieces[row].float()
        return Rows(index, owner, len(words), share, row)
    reduce = "amax" if policy == "words" else "amin"
    chosen = torch.empty(n, dtype=torch.int64)
    chosen.scatter_reduce_(0, row, index, reduce, include_self=False)
    return Rows(chosen, owner, len(words))


POLICIES: dict[RowPolicy, Policy] = {
    "tokens": MaskPolicy("tokens", "tokens", counts_special=True, packed=True),
    "mean": MaskPolicy("mean", counts_special=True, packed=True),
    "cls": MaskPolicy("cls"),
    "words": WordPolicy("words"),
    "words_first": WordPolicy("words_first"),
    "words_mean": WordPolicy("words_mean"),
    "last": MaskPolicy("last", counts_special=True),
    "states": MaskPolicy("states", "states"),  # all rows of recorded states
}


def policy_of(rows: RowPolicy) -> Policy:
    """Look up a policy by its name.

    Raises:
        ValueError: `rows` is not a known policy.
    """
    check_known(POLICIES, rows=rows)
    return POLICIES[rows]


def one_tokenizer_for(rows: RowPolicy) -> tuple[str, str] | None:
    """Return why this policy needs models with equal tokenizers, and what else to use; None: it does not need them."""
    return PAIRS_TOKENS if rows == "tokens" else None


def rows_of_kind(rows: RowPolicy, *, recorded: bool) -> RowPolicy:
    """Return the policy by which rows are chosen: recorded states have rows, whether these are of tokens or words.

    Raises:
        ValueError: `rows` is not a known policy, or recorded rows are asked of models.
    """
    if recorded and policy_of(rows).types is not None:
        return "states"
    if rows == "states" and not recorded:
        raise UserError(
            "`rows` 'states' are the rows of recorded states, but models are named. Use 'tokens', 'words' or 'mean'."
        )
    return rows


def most_rows(rows: RowPolicy, texts: int, tokens: int) -> int:
    """Return the largest number of rows that so many texts, each of at most so many tokens, can have.

    Raises:
        ValueError: `rows` is not a known policy.
    """
    if policy_of(rows).types is None:
        return texts
    return texts * tokens


def rows_of_each(texts: TextBatch, kind: RowKind) -> tuple[Rows, ...]:
    """Choose the rows of each model of a batch; models with equal tokenizers share one object.

    Raises:
        ValueError: words are asked for of texts that were tokenised without them; or as in `select_rows`.
    """
    policy = policy_of(kind.policy)
    by_inputs: dict[int, Rows] = {}
    for model, inputs in enumerate(texts.inputs):
        if id(inputs) not in by_inputs:
            rows = policy.choose(texts, model, kind.special_tokens)
            by_inputs[id(inputs)] = rows
    return tuple(by_inputs[id(inputs)] for inputs in texts.inputs)


def check_rows(rows: str, component: Component, packed: bool) -> None:
    """Raise unless `rows` and `component` are known, and can be read from `packed` text if it is."""
    check_component(component)
    if packed and not policy_of(rows).packed:
        fit = [repr(name) for name, policy in POLICIES.items() if policy.packed]
        raise UserError(
            "A sequence of `packed` text has no whole words and no first token that stands for it. "
            f"Expected `rows` {' or '.join(fit)}, but got {rows!r}."
        )


def check_component(component: Component) -> None:
    """Raise unless `component` can be read."""
    # The import is here because it takes seconds.
    from aligners.models.architectures import Component

    check_known(get_args(Component), component=component)
