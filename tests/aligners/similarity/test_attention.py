from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligners.models import FrozenModel
from aligners.similarity.functional import attention
from aligners.similarity.functional.attention import AttentionSums, attention_sums, attnsim, fold, word_pairs
from aligners.similarity.functional.cka import linear_cka
from tests.references import attention as reference
from tests.tiny import tiny_model, tokenised

NAMES = ("attnsim_norm", "attnsim_pearson", "attnsim_js")
WORDS = torch.tensor([4, 1, 2, 5, 3, 5, 2])


def heads(layers: int, heads: int, words: Tensor = WORDS, seed: int = 0, spread: float = 2.0) -> Tensor:
    """Random folded attention, (L, H, B, W, W); `spread` 0: even."""
    draw = torch.Generator().manual_seed(seed)
    width = int(words.max())
    scores = spread * torch.randn(layers, heads, len(words), width, width, generator=draw, dtype=torch.float64)
    real = torch.arange(width) < words[:, None]
    weights = scores.masked_fill(~real[:, None, :], -torch.inf).softmax(-1)
    return weights * real[:, :, None]


def texts_of(weights: Tensor, words: Tensor = WORDS) -> list[list[list[np.ndarray]]]:
    """As the reference takes it: layer by layer, head by head, one matrix for each text."""
    return [[[head[t, :n, :n].numpy() for t, n in enumerate(words.tolist())] for head in layer] for layer in weights]


def expected(a: Tensor, b: Tensor, words: Tensor = WORDS) -> dict[str, Tensor]:
    found = [[reference.best_heads(x, y) for y in texts_of(b, words)] for x in texts_of(a, words)]
    return dict(zip(NAMES, torch.tensor(found, dtype=torch.float64).unbind(-1), strict=True))


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert set(found) == set(wanted) == set(NAMES)
    for name in NAMES:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("spread", [2.0, 20.0, 1e-4])
def test_they_are_what_the_definitions_give_head_by_head(spread: float) -> None:
    a, b = heads(3, 2, spread=spread), heads(2, 4, seed=1, spread=spread)
    found = attnsim(attention_sums(a, b, WORDS))
    assert found["attnsim_js"].shape == (3, 2)
    close(found, expected(a, b), 1e-8)
    close(attnsim(attention_sums(a, b, WORDS).swap()), expected(b, a), 1e-8)


def test_sums_of_each_pair_of_heads() -> None:
    a, b = heads(2, 2), heads(1, 3, seed=1)
    sums = attention_sums(a, b, WORDS)
    assert (sums.texts, sums.words) == (6, 21)
    assert sums.correlated.eq(21).all()
    for i in range(2):
        for j in range(3):
            norm, pearson, js = reference.similarities(texts_of(a)[1][i], texts_of(b)[0][j])
            assert sums.distance[1, i, 0, j] == pytest.approx((1 - norm) * 6, rel=1e-10)
            assert sums.correlation[1, i, 0, j] == pytest.approx(pearson * 21, rel=1e-10)
            assert sums.divergence[1, i, 0, j] == pytest.approx((1 - js) * 21, rel=1e-10)


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 0.0])
def test_distances_of_heads_that_are_alike_do_not_cancel(gap: float) -> None:
    a = heads(1, 3)
    b = a + gap * (heads(1, 3, seed=1) - a)
    found = attention_sums(a, b, WORDS).distance
    wanted = (a - b).square().sum((-2, -1)).sqrt()[:, :, WORDS > 1].sum(-1)[0]
    torch.testing.assert_close(found[0, :, 0].diagonal(), wanted, rtol=1e-7, atol=0)


def test_identical_models_are_at_the_ceiling() -> None:
    a = heads(3, 4)
    for name, found in attnsim(attention_sums(a, a.clone(), WORDS)).items():
        torch.testing.assert_close(found.diagonal(), torch.ones(3).double(), rtol=0, atol=1e-13, msg=name)
        assert bool((found - found.diagonal().diag() < 0.9).all())


def test_a_single_pair_of_equal_heads_is_at_the_ceiling() -> None:
    a = heads(1, 1)
    close(attnsim(attention_sums(a, a, WORDS)), dict.fromkeys(NAMES, torch.ones(1, 1).double()), 1e-13)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)), st.permutations(range(len(WORDS))), st.permutations(range(5)), st.integers(0, 9))
def test_order_of_heads_texts_and_words_does_not_matter(
    order: list[int], texts: list[int], place: list[int], seed: int
) -> None:
    words = torch.full_like(WORDS, 5)
    a, b = heads(2, 3, words, seed), heads(3, 4, words, seed + 10)
    found = attnsim(attention_sums(a, b, words))
    close(attnsim(attention_sums(a, b[:, order], words)), found, 1e-12)
    close(attnsim(attention_sums(a[:, :, texts], b[:, :, texts], words)), found, 1e-12)
    close(attnsim(attention_sums(*(weights[..., place, :][..., place] for weights in (a, b)), words)), found, 1e-12)


def test_every_head_of_x_looks_for_its_own_best() -> None:
    a, b = heads(1, 2), heads(1, 5, seed=1)
    both = torch.cat([b, a], 1)
    close(attnsim(attention_sums(a, both, WORDS)), dict.fromkeys(NAMES, torch.ones(1, 1).double()), 1e-13)
    for found in attnsim(attention_sums(both, a, WORDS)).values():
        assert found < 0.95


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, len(WORDS) - 1)), seed=st.integers(0, 5))
def test_any_split_into_batches_gives_the_whole(cuts: set[int], seed: int) -> None:
    a, b = heads(2, 3, seed=seed), heads(3, 2, seed=seed + 10)
    sums = AttentionSums.zeros(2, 3, 3, 2)
    for start, end in pairwise([0, *sorted(cuts), len(WORDS)]):
        words = WORDS[start:end]
        width = int(words.max())  # as if the batch had been folded alone
        part = attention_sums(*(weights[:, :, start:end, :width, :width] for weights in (a, b)), words)
        sums = AttentionSums(*(one + more for one, more in zip(sums, part, strict=True)))
    close(attnsim(sums), attnsim(attention_sums(a, b, WORDS)), 1e-12)
    close(attnsim(sums.swap()), attnsim(attention_sums(b, a, WORDS)), 1e-12)


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
    close(attnsim(attention_sums(a, b, WORDS)), expected(a, b), 1e-8)


def test_a_head_that_always_spreads_evenly_is_an_error() -> None:
    even, other = heads(2, 3), heads(1, 2, seed=1)
    even[1, 2] = heads(1, 1, spread=0.0)[0, 0]
    with pytest.raises(ValueError, match="head 3 of block 2 of X and head 1 of block 1 of Y"):
        attnsim(attention_sums(even, other, WORDS))


def test_texts_of_one_word_say_nothing_and_alone_are_an_error() -> None:
    words = torch.tensor([1, 1])
    sums = attention_sums(heads(1, 2, words), heads(1, 2, words), words)
    assert sums.texts == sums.words == 0
    with pytest.raises(ValueError, match="at least one text of two words"):
        attnsim(sums)


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


@pytest.mark.parametrize("side", ["right", "left"])
def test_from_models_to_a_similarity(side: str) -> None:
    inputs = tokenised(side=side)
    special = torch.isin(inputs["input_ids"], torch.tensor([0, 1, 2]))
    words = (~special).sum(1)
    word = torch.where(special, -1, (~special).cumsum(1) - 1)
    folded = []
    for architecture, layers in (("bert", 3), ("mpnet", 2)):
        model = tiny_model(architecture, layers=layers)
        model.set_attn_implementation("eager")
        frozen = FrozenModel(model, name=architecture)
        folded.append(fold(frozen.attention(inputs)[0], word, words))
    close(attnsim(attention_sums(folded[0], folded[1], words)), expected(*folded, words), 1e-8)
    rows = [word_pairs(weights, words) for weights in folded]
    found = linear_cka(*rows)
    assert found.shape == (3, 2)
    x, y = rows[0][1].numpy(), rows[1][0].numpy()
    x, y = x - x.mean(0), y - y.mean(0)
    cka = np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    assert found[1, 0] == pytest.approx(cka, rel=1e-10)
