from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.references import attention as reference
from torch import Tensor

from aligners.similarity.functional import attention
from aligners.similarity.functional.attention import (
    AttentionSums,
    attention_sums,
    attnsim,
    fold,
    real_pairs,
    word_pairs,
)

KINDS = ("norm", "pearson", "js")
WORDS = torch.tensor([4, 1, 2, 5, 3, 5, 2])


def heads(layers: int, heads: int, words: Tensor = WORDS, seed: int = 0, spread: float = 2.0) -> Tensor:
    """Random folded attention, (L, H, B, W, W); `spread` 0: even."""
    draw = torch.Generator().manual_seed(seed)
    width = int(words.max())
    scores = spread * torch.randn(layers, heads, len(words), width, width, generator=draw, dtype=torch.float64)
    real = torch.arange(width) < words[:, None]
    weights = scores.masked_fill(~real[:, None, :], -torch.inf).softmax(-1)
    return weights * real[:, :, None]


def similarities(sums: AttentionSums) -> dict[str, Tensor]:
    return {kind: attnsim(sums, kind) for kind in KINDS}  # type: ignore[arg-type]


def texts_of(weights: Tensor, words: Tensor = WORDS) -> list[list[list[np.ndarray]]]:
    """As the reference takes it: layer by layer, head by head, one matrix for each text."""
    return [[[head[t, :n, :n].numpy() for t, n in enumerate(words.tolist())] for head in layer] for layer in weights]


def expected(a: Tensor, b: Tensor, words: Tensor = WORDS) -> dict[str, Tensor]:
    found = [[reference.best_heads(x, y) for y in texts_of(b, words)] for x in texts_of(a, words)]
    return dict(zip(KINDS, torch.tensor(found, dtype=torch.float64).unbind(-1), strict=True))


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert set(found) == set(wanted) == set(KINDS)
    for name in KINDS:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("spread", [2.0, 20.0, 1e-4])
def test_they_are_what_the_definitions_give_head_by_head(spread: float) -> None:
    a, b = heads(2, 2, spread=spread), heads(1, 3, seed=1, spread=spread)
    sums = attention_sums(a, b, WORDS)
    assert (sums.texts, sums.words) == (6, 21)
    assert sums.correlated.eq(21).all()
    close(similarities(sums), expected(a, b), 1e-8)
    close(similarities(sums.swap()), expected(b, a), 1e-8)


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 0.0])
def test_distances_of_heads_that_are_alike_do_not_cancel(gap: float) -> None:
    a = heads(1, 3)
    b = a + gap * (heads(1, 3, seed=1) - a)
    found = attention_sums(a, b, WORDS).distance
    wanted = (a - b).square().sum((-2, -1)).sqrt()[:, :, WORDS > 1].sum(-1)[0]
    torch.testing.assert_close(found[0, :, 0].diagonal(), wanted, rtol=1e-7, atol=0)


def test_identical_models_are_at_the_ceiling() -> None:
    a = heads(3, 4)
    for name, found in similarities(attention_sums(a, a.clone(), WORDS)).items():
        torch.testing.assert_close(found.diagonal(), torch.ones(3).double(), rtol=0, atol=1e-13, msg=name)
        assert bool((found - found.diagonal().diag() < 0.9).all())


@settings(max_examples=12, deadline=None)
@given(cuts=st.sets(st.integers(1, len(WORDS) - 1)), seed=st.integers(0, 5))
def test_any_split_into_batches_gives_the_whole(cuts: set[int], seed: int) -> None:
    a, b = heads(2, 3, seed=seed), heads(3, 2, seed=seed + 10)
    sums = AttentionSums.zeros(2, 3, 3, 2)
    for start, end in pairwise([0, *sorted(cuts), len(WORDS)]):
        words = WORDS[start:end]
        width = int(words.max())  # as if the batch had been folded alone
        part = attention_sums(*(weights[:, :, start:end, :width, :width] for weights in (a, b)), words)
        sums = AttentionSums(*(one + more for one, more in zip(sums, part, strict=True)))
    close(similarities(sums), similarities(attention_sums(a, b, WORDS)), 1e-12)
    close(similarities(sums.swap()), similarities(attention_sums(b, a, WORDS)), 1e-12)


def test_chunks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = heads(2, 3), heads(3, 2, seed=1)
    b[0, 0] = a[1, 2]
    wanted = attention_sums(a, b, WORDS)
    for budget in (1, 7, 50, 300):
        monkeypatch.setattr(attention, "BUDGET", budget)
        for name, found in attention_sums(a, b, WORDS)._asdict().items():
            torch.testing.assert_close(found, getattr(wanted, name), rtol=1e-12, atol=1e-12, msg=name)


def test_rows_that_spread_evenly_have_no_correlation_and_are_counted() -> None:
    a, b = heads(1, 2), heads(1, 2, seed=1)
    a[0, 0, 3, 0, :5] = 1 / 5
    a[0, 0, 3, 1, :5] = 1 / 5 + torch.tensor([1, -1, 1, -1, 0]).double() * 1e-16  # to rounding
    b[0, 1, 4] = 0
    b[0, 1, 4, :3, :3] = 1 / 3
    b[0, 1, 3, 0, :5] = 1 / 5
    sums = attention_sums(a, b, WORDS)
    assert sums.correlated[0, :, 0].tolist() == [[19, 16], [21, 17]]
    a[0, 0, 3, 1, :5] = 1 / 5
    close(similarities(attention_sums(a, b, WORDS)), expected(a, b), 1e-8)


def causal(weights: Tensor) -> Tensor:
    """Such attention as a causal model has: none on words ahead."""
    kept = weights.tril()
    return kept / kept.sum(-1, keepdim=True).clamp(min=1e-300)


def test_zeros_that_two_masks_share_do_not_correlate() -> None:
    """Against the sums of `PearsonMaxMinCorr2` of Wu et al., over the entries where both weights are not zero."""
    a, b = causal(heads(2, 2)), causal(heads(1, 3, seed=1))
    sums = attention_sums(a, b, WORDS)
    expected = torch.zeros(2, 2, 3, dtype=torch.float64)
    for text, n in enumerate(WORDS.tolist()):
        x, y = a[:, :, None, text, :n, :n], b[:, None, :, text, :n, :n]
        count = ((x != 0) & (y != 0)).sum(-1)
        covariance = (x * y).sum(-1) - x.sum(-1) * y.sum(-1) / count
        variances = [part.square().sum(-1) - part.sum(-1).square() / count for part in (x, y)]
        correlation = covariance / (variances[0] * variances[1]).sqrt()
        expected += correlation[..., 1:].nan_to_num(0, 0, 0).sum(-1) * (n > 1)
    torch.testing.assert_close(sums.correlation[:, :, 0], expected, rtol=0, atol=1e-6)
    assert sums.correlated.eq(21 - 6).all()  # at the first word of a text there is nothing to correlate
    rows = word_pairs(a, WORDS, ahead=False)
    assert rows.shape[1] == sum(n * (n + 1) // 2 for n in WORDS.tolist() if n > 1)
    assert bool((rows != 0).any(-1).all())


def test_heads_that_always_spread_evenly_and_texts_of_one_word_are_errors() -> None:
    even, other = heads(2, 3), heads(1, 2, seed=1)
    even[1, 2] = heads(1, 1, spread=0.0)[0, 0]
    with pytest.raises(ValueError, match="head 3 of block 2 of X and head 1 of block 1 of Y"):
        similarities(attention_sums(even, other, WORDS))
    words = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="at least one text of two words"):
        similarities(attention_sums(heads(1, 2, words), heads(1, 2, words), words))


def test_what_is_no_distribution_over_words_is_refused() -> None:
    good = heads(1, 2)

    def spoil(place: tuple[int, ...], value: float) -> Tensor:
        bad = good.clone()
        bad[place] = value
        return bad

    beyond = spoil((0, 0, 1, 0, 0), 0.5)
    beyond[0, 0, 1, 0, 1] = 0.5  # a row of one that leaves its text
    negative = spoil((0, 0, 2, 0, 0), -0.5)
    negative[0, 0, 2, 0, 1] = 1.5
    for bad in (2 * good, beyond, negative, spoil((0, 0, 0, 0, 0), torch.nan), spoil((0, 0, 1, 3, 3), 1.0)):
        with pytest.raises(ValueError, match="`b` that are distributions"):
            attention_sums(good, bad, WORDS)
        with pytest.raises(ValueError, match="`a` that are distributions"):
            attention_sums(bad, good, WORDS)


# ---------------------------------------------------------------------- folding

# [CLS] the un+like+ly [SEP] / [CLS] good film [SEP] [PAD] [PAD]
WORD = torch.tensor([[-1, 0, 1, 1, 1, -1], [-1, 0, 1, -1, -1, -1]])
TWO = torch.tensor([2, 2])


def random_weights(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.softmax(2 * torch.randn(shape, generator=draw, dtype=torch.float64), -1)


def test_blocks_heads_and_texts_are_what_the_definition_gives_one_by_one() -> None:
    weights = random_weights(3, 2, 4, 6, 6).bfloat16()  # (L, B, H, T, T), folded in float64 all the same
    word = torch.tensor([[-1, 0, 0, 1, 2, -1], [0, -1, 0, 1, -1, -1]])  # the second not even in one piece
    words = torch.tensor([3, 2])
    tokens = [[[1, 2], [3], [4]], [[0, 2], [3]]]
    found = fold(weights, word, words)
    for block, head, text in product(range(3), range(4), range(2)):
        n = int(words[text])
        expected, _ = reference.fold(weights[block, text, head].double().numpy(), tokens[text])
        np.testing.assert_allclose(found[block, head, text, :n, :n], expected, rtol=1e-12)
    padded = found[:, :, 1]
    assert not padded[..., 2, :].any()
    assert not padded[..., 2].any()


def test_word_pairs_are_rows_and_heads_are_features() -> None:
    words = torch.tensor([2, 1, 3])
    weights = random_weights(2, 4, 3, 3, 3)
    rows = word_pairs(weights, words)
    assert rows.shape == (2, 4 + 9, 4)
    expected = [weights[1, 2, text, i, j] for text, n in ((0, 2), (2, 3)) for i in range(n) for j in range(n)]
    assert torch.equal(rows[1, :, 2], torch.stack(expected))
    assert real_pairs(words, 3).sum((1, 2)).tolist() == [4, 0, 9]


@pytest.mark.parametrize(
    ("word", "words"), [([0, 0, 1], 3), ([0, 2, -1], 2), ([-1, 1, 1], 2), ([0, 1, 2], 2), ([-1, -1, -1], 1)]
)
def test_numbers_that_leave_a_word_out_or_go_beyond_are_refused(word: list[int], words: int) -> None:
    for texts in ([word], [word, [0, 1, 2]]):
        counts = torch.tensor([words, 3][: len(texts)])
        with pytest.raises(ValueError, match="`word` to number the words of each text from 0"):
            fold(random_weights(1, len(texts), 1, 3, 3), torch.tensor(texts), counts)


def test_no_attention_left_on_words_is_refused() -> None:
    weights = random_weights(2, 2, 3, 6, 6)
    for row in (torch.tensor([1.0, 0, 0, 0, 0, 0]), torch.full((6,), torch.nan)):
        weights[1, 0, 2, 1] = row
        with pytest.raises(ValueError, match="head 3 of block 2 puts all that word 0 of text 0"):
            fold(weights, WORD, TWO)
