"""Row policies: which vectors of a batch become rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from aligners.datamodules.batches import Movable, TextBatch
from aligners.errors import UserError, check_known

if TYPE_CHECKING:
    from aligners.models.architectures import Component

# SplitMix64's increment and its two factors, as int64.
_STEP, _FACTORS = (
    0x9E3779B97F4A7C15 - 2**64,
    (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64),
)


FREE = torch.iinfo(torch.int64).max  # the key of an empty place: greater than any row's


def row_keys(seed: int, text: Tensor, token: Tensor) -> Tensor:
    """Pseudo-random keys of rows, (N,) int64 in [0, 2⁶³): a hash of seed, text and token alone.

    The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"),
    applied after each of the three. 64-bit products wrap, as they do there.

    Args:
        seed: any int64.
        text: (N,) int64 ids of texts.
        token: (N,) int64 places of rows in their texts.
    """
    state = torch.full_like(text, seed)
    for part in (torch.zeros_like(text), text, token):
        state = (state ^ part) + _STEP
        for shift, factor in zip((30, 27), _FACTORS, strict=True):
            state = (state ^ _shifted(state, shift)) * factor
        state = state ^ _shifted(state, 31)
    return state & FREE


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; int64 would extend the sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


Kind = Literal["tokens", "words"]


RowPolicy = str  # one of POLICIES


PAIRS_TOKENS = (
    "`rows` 'tokens' pairs models token by token",
    "Use `rows` 'words', 'mean' or 'cls'",
)


@dataclass
class Rows(Movable):
    """Which positions of a batch (B, T) become its N rows.

    Attributes:
        index: (P,) positions in the flattened batch; P = N, but for means one for every token that enters one.
        owner: (N,) which text of the batch each row belongs to, 0..B-1, ascending.
        texts: B.
        share: (P,) weight of the position in its mean, or None where every position is a row itself.
        row: (P,) which mean the position enters, 0..N-1, or None likewise.
        counts: rows of each text, for which nobody waits for a device, if the rows were chosen on the CPU.
        unseen: (N,) whether fitting does not see the row's type; None where that is not known.
        far: (N,) whether the row is far from all others; None where none of the batch is.
        places: (N,) `place` of each row before far ones were left out; None where none were.
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
            self.counts = tuple(torch.bincount(self.owner, minlength=self.texts).tolist())

    @property
    def place(self) -> Tensor:
        """(N,) number of each row among those of its text, 0, 1, ...: the same however texts are batched."""
        if self.places is not None:
            return self.places
        counts = torch.zeros(self.texts, dtype=torch.int64, device=self.owner.device)
        counts.index_add_(0, self.owner, torch.ones_like(self.owner))
        return (
            torch.arange(len(self), device=self.owner.device)
            - (counts.cumsum(0) - counts)[self.owner]
        )

    def only(self, kept: Tensor) -> Rows:
        """The rows where `kept` (N,) is True."""
        if self.share is None or self.row is None:
            return Rows(self.index[kept], self.owner[kept], self.texts)
        entering = kept[self.row]
        row = (kept.cumsum(0) - 1)[self.row[entering]]
        return Rows(self.index[entering], self.owner[kept], self.texts, self.share[entering], row)

    def without(self, far: Tensor) -> Rows:
        """The rows that are not marked in `far` (N,), each with the place and the mark that it had."""
        rows = self.only(~far)
        rows.counts = rows.counts or tuple(
            torch.bincount(rows.owner, minlength=rows.texts).tolist()
        )
        rows.places = self.place[~far]
        rows.unseen = None if self.unseen is None else self.unseen[~far]
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
        weighted = flat.index_select(0, self.index).to(out.dtype) * self.share[:, None]
        out.zero_().index_add_(0, self.row, weighted)

    def scatter(self, rows: Tensor, states: Tensor) -> Tensor:
        """A copy of states (B, T, d) in which the rows (N, d) stand at their positions."""
        return states.flatten(0, 1).index_copy(0, self.index, rows.to(states.dtype)).view_as(states)

    def __len__(self) -> int:
        """N, the number of rows."""
        return len(self.owner)


@dataclass(frozen=True)
class RowKind:
    """A kind of rows: a policy, and whether special tokens count, where that makes a difference."""

    policy: RowPolicy
    special_tokens: bool = True

    def __post_init__(self) -> None:
        if not policy_of(self.policy).counts_special:
            object.__setattr__(self, "special_tokens", True)

    @property
    def types(self) -> Kind | None:
        """What the types of the rows are; None: they have none."""
        return policy_of(self.policy).types

    def __str__(self) -> str:
        return self.policy + ("" if self.special_tokens else ", special tokens left out")


@dataclass(frozen=True)
class Policy:
    """How the rows of a batch are chosen.

    Attributes:
        choose: from a batch on the CPU, the number of a model, and whether special tokens count, that model's rows.
        types: what the types of the rows are, by which some can be held out of fitting; `words` also says that the
            words of the texts are needed. None: the rows have no types.
        counts_special: whether it makes a difference if special tokens count.
        packed: whether packed sequences have such rows, which know neither whole words nor a first token.
    """

    choose: Callable[[TextBatch, int, bool], Rows]
    types: Kind | None = None
    counts_special: bool = False
    packed: bool = False


def select_rows(
    mask: Tensor, special: Tensor, policy: RowPolicy, special_tokens: bool = True
) -> Rows:
    """Choose the rows of a batch on the CPU, so that their number is known without asking another device.

    Args:
        mask: (B, T) attention mask; padding is never a row.
        special: (B, T) True at special tokens.
        policy: `tokens`: every real token; `mean`: the mean over a text's real tokens; `cls`: a text's first
            real token; `last`: its last.
        special_tokens: whether special tokens count for `tokens`, `mean` and `last`.

    Raises:
        ValueError: a text has no token that counts.
    """
    counts, every = mask.bool(), torch.arange(len(mask))
    if not special_tokens and policy != "cls":
        counts = counts & ~special
    lengths = counts.sum(1)
    if not lengths.all():
        raise UserError(
            f"Expected every text to have a token that counts as a row, but text number "
            f"{int((lengths == 0).nonzero()[0])} of the batch has none. Drop empty texts, or count special tokens."
        )
    if policy == "cls":
        first = counts.int().argmax(1)
        return Rows(every * mask.shape[1] + first, every, len(mask))
    index = counts.flatten().nonzero()[:, 0]
    owner = index // mask.shape[1]
    if policy == "last":
        return Rows(index[lengths.cumsum(0) - 1], every, len(mask))
    if policy == "mean":
        return Rows(index, every, len(mask), share=1 / lengths[owner].float(), row=owner)
    return Rows(index, owner, len(mask))


def select_words(words: Tensor, counts: Tensor, policy: RowPolicy) -> Rows:
    """Choose a row for each word of a batch, text by text, in the order of the words' numbers; on the CPU too.

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
    chosen.scatter_reduce_(
        0, row, index, "amax" if policy == "words" else "amin", include_self=False
    )
    return Rows(chosen, owner, len(words))


def _from_mask(policy: RowPolicy, texts: TextBatch, model: int, special_tokens: bool) -> Rows:
    return select_rows(
        texts.inputs[model]["attention_mask"], texts.special[model], policy, special_tokens
    )


def _from_words(policy: RowPolicy, texts: TextBatch, model: int, special_tokens: bool) -> Rows:
    if texts.words is None or texts.word_count is None:
        raise UserError(
            f"`rows` {policy!r} needs to know the words of the texts, but they were tokenised without them. Call "
            "`tokenise` with `words=True`."
        )
    return select_words(texts.words[model], texts.word_count, policy)


POLICIES: dict[RowPolicy, Policy] = {
    "tokens": Policy(partial(_from_mask, "tokens"), "tokens", counts_special=True, packed=True),
    "mean": Policy(partial(_from_mask, "mean"), counts_special=True, packed=True),
    "cls": Policy(partial(_from_mask, "cls")),
    **{
        name: Policy(partial(_from_words, name), "words")
        for name in ("words", "words_first", "words_mean")
    },
    "last": Policy(partial(_from_mask, "last"), counts_special=True),
}


def policy_of(rows: RowPolicy) -> Policy:
    """Look up a policy by its name.

    Raises:
        ValueError: there is none of this name.
    """
    check_known(POLICIES, rows=rows)
    return POLICIES[rows]


def most_rows(rows: RowPolicy, texts: int, tokens: int) -> int:
    """How many rows so many texts of at most so many tokens have at most.

    Raises:
        ValueError: there is no such policy.
    """
    return texts * (tokens if policy_of(rows).types else 1)


def rows_of_each(texts: TextBatch, kind: RowKind) -> tuple[Rows, ...]:
    """Choose the rows of each model of a batch; models with equal tokenizers share one object.

    Raises:
        ValueError: words are asked for of texts that were tokenised without them; or as in `select_rows`.
    """
    choose, by_inputs = policy_of(kind.policy).choose, dict[int, Rows]()
    for model, inputs in enumerate(texts.inputs):
        if id(inputs) not in by_inputs:
            by_inputs[id(inputs)] = choose(texts, model, kind.special_tokens)
    return tuple(by_inputs[id(inputs)] for inputs in texts.inputs)


def check_rows(rows: str, component: Component, packed: bool) -> None:
    """Raise unless `rows` and `component` are known, and can be read from `packed` text if it is."""
    check_component(component)
    if packed and not policy_of(rows).packed:
        fit = " or ".join(repr(name) for name, policy in POLICIES.items() if policy.packed)
        raise UserError(
            "A sequence of `packed` text has no whole words and no first token that stands for it. "
            f"Expected `rows` {fit}, but got {rows!r}."
        )


def check_component(component: Component) -> None:
    """Raise unless `component` is one that can be read."""
    from aligners.models.architectures import Component

    check_known(get_args(Component), component=component)


FURTHEST = 2**31


@dataclass(frozen=True)
class TokenPairs:
    """Rows that are a token and one that it looks at, drawn text by text whatever the batch; on the CPU.

    With `mean` a row is a token and what it gets from all tokens that can look at it, on average.

    Attributes:
        special_tokens: whether special tokens look and are looked at.
        causal: whether tokens that lie ahead are not looked at.
        share: of all such rows, that are taken.
        seed: of the draw.
        mean: whether rows are means over the tokens that look.
    """

    special_tokens: bool
    causal: bool
    share: float
    seed: int
    mean: bool = False

    def __call__(self, texts: TextBatch) -> Rows:
        """The rows of a batch, by their places in weights (B, T · T)."""
        tokens = rows_of_each(texts, RowKind("tokens", self.special_tokens))[0]
        length, counts = texts.inputs_x["input_ids"].shape[1], torch.tensor(tokens.counts)
        place = torch.arange(int(counts.max()))
        real = place[None] < counts[:, None]
        pairs = real[:, :, None] & real[:, None]
        if self.causal:
            pairs = pairs & (place[:, None] >= place[None])
        owner, query, key = pairs.nonzero(as_tuple=True)
        drawn = row_keys(self.seed, texts.text[owner], query * FURTHEST * (not self.mean) + key)
        taken = drawn <= min(int(self.share * FREE), FREE)
        owner, query, key = owner[taken], query[taken], key[taken]
        first, at = (
            (counts.cumsum(0) - counts)[owner],
            tokens.index % length,
        )  # where each token stands in its text
        index = (owner * length + at[first + query]) * length + at[first + key]
        if not self.mean:
            return Rows(index, owner, len(counts))
        looked_at, row, queries = torch.unique(
            owner * length + key, return_inverse=True, return_counts=True
        )
        return Rows(index, looked_at // length, len(counts), 1 / queries[row].float(), row)
