"""Attention between words, and the similarity of two models' heads: all heads of all layers, from sums."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.similarity.algebra.moments import Device, zeros_of

# float64 values of a temporary (2 MiB, near the processor); at most three of them at once
BUDGET = 2**18
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
        device: Device = None,
    ) -> Self:
        """Return the sums of no texts."""
        pairs = (layers_x, heads_x, layers_y, heads_y)
        shapes = [pairs, pairs, pairs, pairs, (), ()]
        zeros = zeros_of(shapes, device)
        return cls(*zeros)

    def __add__(self, other: object) -> Self:
        """Add the sums of two disjoint sets of texts."""
        if not isinstance(other, AttentionSums):
            return NotImplemented
        sums = map(torch.add, self, other)
        return type(self)(*sums)

    def pair(self, i: int, j: int) -> Self:
        """Return the sums of one block of X and one of Y, by index."""
        one = slice(i, i + 1)
        other = slice(j, j + 1)
        *by_pair, texts, words = self
        some = [values[one, :, other] for values in by_pair]
        sums = [*some, texts, words]
        return type(self)(*sums)

    def swap(self) -> Self:
        """Return the sums of (Y, X), for the similarity in the other direction."""
        *by_pair, texts, words = self
        swapped = [values.permute(2, 3, 0, 1) for values in by_pair]
        sums = [*swapped, texts, words]
        return type(self)(*sums)


def attnsim(sums: AttentionSums, kind: Kinds) -> Tensor:
    """Return the similarity of the heads of two models, (L_x, L_y), from X to Y; not symmetric.

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
    if sums.texts == 0:
        raise UserError(
            "Expected at least one text of two words or more, but got none: heads cannot be told apart on a "
            "single word. Use longer texts."
        )
    unknown = sums.correlated == 0
    if unknown.any():
        first = unknown.nonzero()[0]
        block_x, head_x, block_y, head_y = (first + 1).tolist()
        raise UserError(
            "Expected heads whose attention varies over the words of some text, but there is no word with a Pearson "
            f"correlation between head {head_x} of block {block_x} of X and head {head_y} of block {block_y} of Y: "
            "at every word one of them spreads its attention evenly. Leave that block out, or use more text."
        )
    distance = sums.distance / sums.texts
    divergence = sums.divergence / sums.words
    similarity = {
        "norm": 1 - distance,
        "pearson": sums.correlation / sums.correlated,
        "js": 1 - divergence,
    }
    of_best_heads = similarity[kind].amax(3)
    return of_best_heads.mean(1)


def attention_sums(a: Tensor, b: Tensor, words: Tensor) -> AttentionSums:
    """Sum over the texts of one batch, for all head pairs of all layer pairs.

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
    _check("a", a, words)
    _check("b", b, words)
    pairs = real_pairs(words, a.shape[-1])
    seen = _seen(pairs, a, b)
    shape = a.shape[:2] + b.shape[:2]
    a = a.double().flatten(0, 1)
    b = b.double().flatten(0, 1)
    distance = _distances(a, b)
    correlation, correlated = _correlations(a, b, seen)
    divergence = _divergences(a[:, pairs], b[:, pairs])
    counted = words[words > 1].double()
    return AttentionSums(
        distance=distance.view(shape),
        correlation=correlation.view(shape),
        correlated=correlated.view(shape),
        divergence=divergence.view(shape),
        texts=torch.ones_like(counted).sum(),
        words=counted.sum(),
    )


def _seen(pairs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the pairs of words (B, W, W) where attention is possible: none ahead if both models are causal."""
    if looks_ahead(a) or looks_ahead(b):
        return pairs
    return pairs.tril()


def fold(weights: Sequence[Tensor], word: Tensor, words: Tensor) -> Tensor:
    """Attention between words: summed to their tokens, averaged from them (Wu et al. 2020, §4; Clark et al. 2019).

    Attention to special tokens is dropped, so that what is left of a row no longer sums to one; each row is divided
    by what is left. Two models whose tokenizers differ are folded with the same numbers of words: their weights
    then pair up entry by entry. One-hot products, in float64, one block after the other.

    Args:
        weights: weights of L blocks, (L, B, H, T, T) or a sequence of (B, H, T, T).
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
    member = _members(word, words)
    counts = member.sum(1)
    tokens = counts.clamp(min=1)
    sums = member[:, None].double()
    means = member / tokens[:, None]  # over a word's tokens
    means = means.double().mT
    means = means[:, None]
    blocks = []
    for matrix in weights:
        block = means @ (matrix.double() @ sums)
        blocks.append(block.transpose(0, 1))
    folded = torch.stack(blocks)

    real = counts > 0
    mass = folded.sum(-1)
    _check_mass(mass, real)
    mass = mass.where(real, 1)
    return folded / mass[..., None]


def _check_mass(mass: Tensor, real: Tensor) -> None:
    """Raise unless heads leave something, (L, H, B, W), on the words that there are, (B, W), and nothing beyond."""
    wrong = (mass > 0) != real
    if not wrong.any():
        return
    first = wrong.nonzero()[0]
    block, head, text, place = first.tolist()
    raise UserError(
        f"Expected every head to leave some attention on words, but head {head + 1} of block {block + 1} puts "
        f"all that word {place} of text {text} of the batch has on other tokens, or it is NaN: there is no "
        "distribution over words. Load the model in float32, or drop that text."
    )


def _members(word: Tensor, words: Tensor) -> Tensor:
    """Return which token belongs to which word, (B, T, W). Raises unless words are numbered as `fold` expects."""
    width = int(words.max())
    numbers = torch.arange(width, device=word.device)
    member = word[:, :, None] == numbers
    beyond = word >= words[:, None]
    found = member.any(1)
    real = _real(words, width)
    complete = torch.equal(found, real)
    if beyond.any() or not complete:
        raise UserError(
            "Expected `word` to number the words of each text from 0 to `words` - 1 and each of them to have a token, "
            "but got a word without one, or a number beyond. Give words that a model cuts off, or that one "
            "model does not see, the number -1 and count the others anew."
        )
    return member


def real_pairs(words: Tensor, width: int) -> Tensor:
    """Return which entries (B, W, W) are pairs of words of a text that has at least two; W is `width`.

    One word attends to itself alone, whatever the head: such a text says nothing about heads.
    """
    several = words > 1
    words = words.where(several, 0)
    real = _real(words, width)
    return real[:, :, None] & real[:, None]


def _real(words: Tensor, width: int) -> Tensor:
    """Return which of `width` places have a word, (B, W)."""
    places = torch.arange(width, device=words.device)
    return places < words[:, None]


def looks_ahead(weights: Tensor) -> bool:
    """Tell whether any weight (..., W, W) is on a later word: False for a causal model."""
    ahead = weights.triu(1)
    return bool(ahead.any())


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
    if not ahead:
        pairs = pairs.tril()
    return weights[..., pairs].mT


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Sum ‖A − B‖ over texts (0 for a text of one word), for a (K_x, B, W, W) and b (K_y, B, W, W): (K_x, K_y)."""
    total = a.new_zeros(len(a), len(b))
    a = a.flatten(2)
    b = b.flatten(2)
    a = a.transpose(0, 1)  # (B, K, W²)
    b = b.transpose(0, 1)
    at_once = BUDGET // total.numel()
    for texts in _slices(len(a), at_once):
        squared = _squared_distances(a[texts], b[texts])
        total += squared.sqrt().sum(0)
    return total


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """(B, K_x, D), (B, K_y, D) -> (B, K_x, K_y)."""
    both = torch.cat([a, b], 1)
    centre = both.mean(1, keepdim=True)
    x = a - centre
    y = b - centre
    norms_x = torch.linalg.vecdot(x, x)
    norms_y = torch.linalg.vecdot(y, y)
    norms = norms_x[:, :, None] + norms_y[:, None]
    squared = torch.baddbmm(norms, x, y.mT, alpha=-2)
    close = (squared < CLOSE * norms).nonzero()
    _take_entry_by_entry(squared, close, a, b)
    return squared


def _take_entry_by_entry(squared: Tensor, close: Tensor, a: Tensor, b: Tensor) -> None:
    """Put into squared distances (B, K_x, K_y) those at these places, (M, 3), of a (B, K_x, D) and b (B, K_y, D)."""
    at_once = BUDGET // a.shape[2]
    for part in _slices(len(close), at_once):
        places = close[part]
        text, i, j = places.unbind(1)
        difference = a[text, i] - b[text, j]
        squared[text, i, j] = difference.square().sum(1)


def _correlations(a: Tensor, b: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Sum r over words where neither head spreads evenly, and count these, for (K_x, B, W, W) and (K_y, B, W, W)."""
    units_a, varies_a = _standardised(a, pairs)
    units_b, varies_b = _standardised(b, pairs)
    return units_a @ units_b.mT, varies_a @ varies_b.mT


def _standardised(weights: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of (K, B, W, W) with mean 0 and length 1 over their text's words, and which ones vary at all.

    Returns:
        (K, B·W·W), zero where a row does not vary, and (K, B·W) of zeros and ones.
    """
    counts = pairs.sum(2).clamp(min=1)
    total = weights.sum(3, keepdim=True)
    mean = total / counts[..., None]
    deviations = (weights - mean) * pairs
    lengths = torch.linalg.vector_norm(deviations, dim=3)
    whole = torch.linalg.vector_norm(weights, dim=3)
    varies = lengths > CONSTANT * whole
    scale = varies / lengths.where(varies, 1)
    units = deviations * scale[..., None]
    varies = varies.flatten(1)
    return units.flatten(1), varies.double()


def _divergences(a: Tensor, b: Tensor) -> Tensor:
    """Sum JS over rows that lie end to end, for a (K_x, N) and b (K_y, N): (K_x, K_y)."""
    entropy_a = torch.special.entr(a).sum(1)
    entropy_b = torch.special.entr(b).sum(1)
    own = entropy_a[:, None] + entropy_b
    a = a / 2
    b = b / 2
    mixed = torch.zeros_like(own)
    at_once = BUDGET // len(b)
    for entries in _slices(a.shape[1], at_once):
        part_a = a[:, entries]
        part_b = b[:, entries]
        heads_at_once = BUDGET // part_b.numel()
        for heads in _slices(len(a), heads_at_once):
            mixture = part_a[heads, None] + part_b
            entropy = torch.special.entr(mixture)
            mixed[heads] += entropy.sum(2)
    return mixed - own / 2


def _slices(n: int, step: int) -> Iterator[slice]:
    """Yield slices of at most `step` of n, in order."""
    step = max(step, 1)
    for start in range(0, n, step):
        yield slice(start, start + step)


def _check(name: str, weights: Tensor, words: Tensor) -> None:
    """Raise unless rows are distributions over the words of their text, and zero beyond them."""
    real = _real(words, weights.shape[-1])
    total = weights.sum(-1)
    excess = total - real.double()
    beyond = weights * ~real[:, None]
    positive = (weights >= 0).all()
    whole = (excess.abs() < 1e-6).all()
    alone = (beyond == 0).all()
    if not (positive and whole and alone):
        raise UserError(
            f"Expected rows of `{name}` that are distributions over the words of their text, zero beyond them, but "
            "got others. Convert the weights of the model with aligners.similarity.functional.attention.fold first."
        )
