"""Attention between words, and how alike the heads of two models are: all of all layers against all, from sums."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError

BUDGET = (
    2**18
)  # float64 values of a temporary (2 MiB, near the processor); at most three of them at once
CLOSE = 1e-6  # squared distances below this share of the squared norms are taken entry by entry
CONSTANT = 1e-12  # deviations below this share of a row are rounding
Kinds = Literal["norm", "pearson", "js"]  # of similarities of heads


class AttentionSums(NamedTuple):
    """Sums over texts for all pairs of a head of X and a head of Y, in float64; additive over batches and ranks.

    Texts of one word are left out: all heads agree on them.

    Attributes:
        distance: Frobenius distances, summed over texts, (L_x, H_x, L_y, H_y).
        correlation: Pearson correlations, summed over words, likewise.
        correlated: number of words in that sum: a word counts where neither head spreads its attention evenly, for
            then there is no correlation; likewise.
        divergence: Jensen-Shannon divergences in nats, summed over words, likewise.
        texts: number of texts, (); words: number of words, ().
    """

    distance: Tensor
    correlation: Tensor
    correlated: Tensor
    divergence: Tensor
    texts: Tensor
    words: Tensor

    @classmethod
    def zeros(
        cls,
        layers_x: int,
        heads_x: int,
        layers_y: int,
        heads_y: int,
        device: torch.device | str | None = None,
    ) -> Self:
        """The sums of no texts."""
        pairs = (layers_x, heads_x, layers_y, heads_y)
        shapes = (() if name in ("texts", "words") else pairs for name in cls._fields)
        return cls(
            *(
                torch.zeros(shape, dtype=torch.float64, device=device)
                for shape in shapes
            )
        )

    def __add__(self, other: object) -> Self:
        """The sums of two disjoint sets of texts."""
        return (
            type(self)(*map(torch.add, self, other))
            if isinstance(other, AttentionSums)
            else NotImplemented
        )

    def pair(self, i: int, j: int) -> Self:
        """Those of one block of X and one of Y, by index."""
        return type(self)(
            *(value[i : i + 1, :, j : j + 1] if value.ndim else value for value in self)
        )

    def swap(self) -> Self:
        """The sums of (Y, X): what the similarity in the other direction is computed from."""
        return type(self)(
            *(value.permute(2, 3, 0, 1) if value.ndim else value for value in self)
        )


def attnsim(sums: AttentionSums, kind: Kinds) -> Tensor:
    """How alike the heads of two models are, (L_x, L_y), from X to Y; not symmetric.

    With ē the mean over texts or words, k a head of X at l and k' one of Y at l':

    - `norm`: mean_k max_k' (1 − ē‖A_k − B_k'‖), Frobenius, over texts. 1 at most; negative for heads that look at
      different single words, since the distance grows with the length of a text.
    - `pearson`: mean_k max_k' ē r(a_k, b_k'), over words, r over the words of the text; if both models are causal over
      the words up to this one, as the zeros that both masks leave behind it would correlate.
    - `js`: mean_k max_k' (1 − ē JS(a_k, b_k')), over words, natural logarithm; at least 1 − ln 2.

    Invariant to the order of heads, of texts, and of the words of a text.

    Raises:
        ValueError: no text has two words, or a pair of heads has no word with a correlation.
    """
    if not bool(sums.texts > 0):
        raise UserError(
            "Expected at least one text of two words or more, but got none: heads cannot be told apart on a "
            "single word. Use longer texts."
        )
    if not bool((sums.correlated > 0).all()):
        block_x, head_x, block_y, head_y = (
            int(i) + 1 for i in (sums.correlated == 0).nonzero()[0]
        )
        raise UserError(
            "Expected heads whose attention varies over the words of some text, but there is no word with a Pearson "
            f"correlation between head {head_x} of block {block_x} of X and head {head_y} of block {block_y} of Y: "
            "at every word one of them spreads its attention evenly. Leave that block out, or use more text."
        )
    similarity = {
        "norm": 1 - sums.distance / sums.texts,
        "pearson": sums.correlation / sums.correlated,
        "js": 1 - sums.divergence / sums.words,
    }
    return similarity[kind].amax(3).mean(1)


def attention_sums(a: Tensor, b: Tensor, words: Tensor) -> AttentionSums:
    """Sums over the texts of one batch, for all head pairs of all layer pairs.

    Distances come from Gram products of all heads of a text, after the mean over heads is taken away, which changes
    no distance and keeps heads that are alike from cancelling; those that still would are taken entry by entry.
    Correlations are one product of standardised rows. The divergence H((a + b)/2) − ½H(a) − ½H(b) has no such
    form: its L_x·H_x·L_y·H_y·Σn² entropies (n words in a text) are what the measure costs. Memory: a few
    copies of `a` and `b` in float64, and at most 6 MiB and three times L_x·H_x·L_y·H_y values besides.

    Args:
        a: (L_x, H_x, B, W, W) attention between words of X, as `fold` gives it.
        b: (L_y, H_y, B, W, W) that of Y, between the same words.
        words: (B,) number of words of each text.

    Raises:
        ValueError: rows are not distributions over the words of their text.
    """
    _check(a, b, words)
    pairs = real_pairs(words, a.shape[-1])
    ahead = looks_ahead(a) or looks_ahead(b)
    heads = (*a.shape[:2], *b.shape[:2])
    a, b = (weights.double().flatten(0, 1) for weights in (a, b))
    seen = pairs if ahead else pairs.tril()
    (units_a, varies_a), (units_b, varies_b) = (
        _standardised(a, seen),
        _standardised(b, seen),
    )
    per_pair = {
        "distance": _distances(a, b),
        "correlation": units_a @ units_b.mT,
        "correlated": varies_a @ varies_b.mT,
        "divergence": _divergences(a[:, pairs], b[:, pairs]),
    }
    used = words.where(words > 1, 0).double()
    return AttentionSums(
        **{
            name: value.unflatten(1, heads[2:]).unflatten(0, heads[:2])
            for name, value in per_pair.items()
        },
        texts=(used > 0).sum().double(),
        words=used.sum(),
    )


def fold(weights: Sequence[Tensor], word: Tensor, words: Tensor) -> Tensor:
    """Attention between words: summed to their tokens, averaged from them (Wu et al. 2020, §4; Clark et al. 2019).

    Attention to special tokens is dropped, so that what is left of a row no longer sums to one; each row is divided
    by what is left. Two models whose tokenizers differ are folded with the same numbers of words: their weights
    then pair up entry by entry. One-hot products, in float64, one block after the other.

    Args:
        weights: of L blocks, (L, B, H, T, T) or a sequence of (B, H, T, T).
        word: (B, T) number of the word of each token, counted from 0 in each text; -1 where a token belongs to none
            that counts (special tokens, padding, words that the other model does not see).
        words: (B,) number of words of each text, at least 1.

    Returns:
        (L, H, B, W, W) float64, the weight from word i to word j at [..., i, j]. A row sums to one over the words of
        its text; beyond them everything is zero.

    Raises:
        ValueError: a word has no token or a token no word below `words`, or a head leaves nothing on the words of a
            text.
    """
    member = word[:, :, None] == torch.arange(
        int(words.max()), device=word.device
    )  # (B, T, W)
    counts = member.sum(1)
    real = torch.arange(counts.shape[1], device=word.device) < words[:, None]
    if not torch.equal(counts > 0, real) or bool((word >= words[:, None]).any()):
        raise UserError(
            "Expected `word` to number the words of each text from 0 to `words` - 1 and each of them to have a token, "
            "but got a word without one, or a number beyond. Give words that a model cuts off, or that one "
            "model does not see, the number -1 and count the others anew."
        )
    to = member[:, None].double()
    of = (
        (member / counts.clamp(min=1)[:, None]).double().mT[:, None]
    )  # the mean over a word's tokens
    folded = torch.stack(
        [(of @ (matrix.double() @ to)).transpose(0, 1) for matrix in weights]
    )
    mass = folded.sum(-1)
    if not bool((mass[..., real] > 0).all()):
        block, head, text, place = (int(i) for i in ((mass > 0) != real).nonzero()[0])
        raise UserError(
            f"Expected every head to leave some attention on words, but head {head + 1} of block {block + 1} puts "
            f"all that word {place} of text {text} of the batch has on other tokens, or it is NaN: there is no "
            "distribution over words. Load the model in float32, or drop that text."
        )
    return folded / mass.where(real, 1)[..., None]


def real_pairs(words: Tensor, width: int) -> Tensor:
    """Which entries (B, W, W) are pairs of words of a text that has at least two; W is `width`.

    One word attends to itself alone, whatever the head: such a text says nothing about heads.
    """
    real = torch.arange(width, device=words.device) < words.where(words > 1, 0)[:, None]
    return real[:, :, None] & real[:, None, :]


def looks_ahead(weights: Tensor) -> bool:
    """Whether any weight (..., W, W) is on a word that lies ahead: False of a causal model."""
    return bool(weights.triu(1).any())


def word_pairs(weights: Tensor, words: Tensor, ahead: bool = True) -> Tensor:
    """Attention as a representation: one row for every pair of words of a text, one feature for every head.

    For the distributed comparison (Wu et al. 2020, §3.5): the rows of two models that were folded with the same
    words are paired, and every measure of representations applies to them. Texts of one word are left out.

    Args:
        weights: (L, H, B, W, W), as `fold` gives them.
        words: (B,) number of words of each text.
        ahead: whether pairs are rows whose second word lies ahead. Between causal models all of these are zero in both,
            and many equal rows make any two models alike.

    Returns:
        (L, N, H), N the sum of the squared numbers of words; rows by text, then from-word, then to-word.
    """
    pairs = real_pairs(words, weights.shape[-1])
    return weights[..., pairs if ahead else pairs.tril()].mT


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Σ ‖A − B‖ over texts (0 in a text of one word), for a (K_x, B, W, W) and b (K_y, B, W, W): (K_x, K_y)."""
    total = a.new_zeros(len(a), len(b))
    a, b = (weights.flatten(2).transpose(0, 1) for weights in (a, b))  # (B, K, W²)
    for texts in _slices(len(a), BUDGET // total.numel()):
        total += _squared_distances(a[texts], b[texts]).sqrt().sum(0)
    return total


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """(B, K_x, D), (B, K_y, D) -> (B, K_x, K_y)."""
    centre = torch.cat([a, b], 1).mean(1, keepdim=True)
    x, y = a - centre, b - centre
    norms = (
        torch.linalg.vecdot(x, x)[:, :, None] + torch.linalg.vecdot(y, y)[:, None, :]
    )
    squared = torch.baddbmm(norms, x, y.mT, alpha=-2)
    close = (squared < CLOSE * norms).nonzero()
    for part in _slices(len(close), BUDGET // a.shape[2]):
        text, i, j = close[part].unbind(1)
        squared[text, i, j] = (a[text, i] - b[text, j]).square().sum(1)
    return squared


def _standardised(weights: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of (K, B, W, W) with mean 0 and length 1 over their text's words, and which ones vary at all.

    Returns:
        (K, B·W·W), zero where a row does not vary, and (K, B·W) of zeros and ones.
    """
    counts = pairs.sum(2).clamp(min=1)
    deviations = (weights - weights.sum(3, keepdim=True) / counts[..., None]) * pairs
    lengths = torch.linalg.vector_norm(deviations, dim=3)
    varies = lengths > CONSTANT * torch.linalg.vector_norm(weights, dim=3)
    units = deviations * (varies / lengths.where(varies, 1))[..., None]
    return units.flatten(1), varies.flatten(1).double()


def _divergences(a: Tensor, b: Tensor) -> Tensor:
    """Σ JS over rows that lie end to end, for a (K_x, N) and b (K_y, N): (K_x, K_y)."""
    entropy_a, entropy_b = (torch.special.entr(weights).sum(1) for weights in (a, b))
    a, b = a / 2, b / 2
    mixed = a.new_zeros(len(a), len(b))
    for entries in _slices(a.shape[1], BUDGET // len(b)):
        part_a, part_b = a[:, entries], b[:, entries]
        for heads in _slices(len(a), BUDGET // part_b.numel()):
            mixed[heads] += torch.special.entr(part_a[heads, None] + part_b).sum(2)
    return mixed - (entropy_a[:, None] + entropy_b) / 2


def _slices(n: int, step: int) -> Iterator[slice]:
    step = max(step, 1)
    return (slice(start, start + step) for start in range(0, n, step))


def _check(a: Tensor, b: Tensor, words: Tensor) -> None:
    for name, weights in (("a", a), ("b", b)):
        real = torch.arange(weights.shape[-1], device=words.device) < words[:, None]
        fine = (weights >= 0).all() & (
            (weights.sum(-1) - real.double()).abs() < 1e-6
        ).all()
        if not bool(fine & (weights * ~real[:, None, :] == 0).all()):
            raise UserError(
                f"Expected rows of `{name}` that are distributions over the words of their text, zero beyond them, but "
                "got others. Convert the weights of the model with aligners.similarity.functional.attention.fold first."
            )
