"""Search, its scores and their intervals, beside plain NumPy and scikit-learn."""

import numpy as np
import pytest

from aligners.errors import UserError
from aligners.fitting.migration import search
from aligners.fitting.migration.search import DRAWS, Resampling, nearest, scores

DRAW = np.random.default_rng(0)


def sorted_places(queries: np.ndarray, index: np.ndarray, k: int, cosine: bool) -> np.ndarray:
    """All similarities in float64, and a whole sort."""
    queries, index = queries.astype(float), index.astype(float)
    if cosine:
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
        index = index / np.linalg.norm(index, axis=1, keepdims=True)
    return np.argsort(-(queries @ index.T), axis=1)[:, :k]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("at_once", [1, 100, 10**6])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_finds_what_a_whole_sort_finds(
    monkeypatch: pytest.MonkeyPatch, similarity: str, at_once: int, dtype: type
) -> None:
    monkeypatch.setattr(search, "AT_ONCE", at_once)
    queries, index = (DRAW.normal(3, 2, (rows, 6)).astype(dtype) for rows in (9, 57))
    found = nearest(queries, index, 10, similarity=similarity)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, sorted_places(queries, index, 10, similarity == "cosine"))


def test_an_index_on_the_disk_is_searched_as_one_in_memory(tmp_path: object) -> None:
    index = DRAW.normal(size=(40, 5)).astype(np.float32)
    np.save(f"{tmp_path}/index.npy", index)
    mapped = np.load(f"{tmp_path}/index.npy", mmap_mode="r")
    np.testing.assert_array_equal(nearest(index[:7], mapped), nearest(index[:7], index))
    assert (nearest(index, index, 1)[:, 0] == np.arange(40)).all()


def test_more_documents_than_there_are_and_other_widths() -> None:
    rows = DRAW.normal(size=(5, 3))
    with pytest.raises(UserError, match="at least 10 documents in the index, but got 5"):
        nearest(rows, rows)
    with pytest.raises(UserError, match="queries of the width of the index, 3, but got 2"):
        nearest(rows[:, :2], rows, 2)


def test_scores_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    documents = 30
    found, relevant, expected = [], [], []
    for _ in range(50):
        order = DRAW.permutation(documents)
        gains = {
            int(place): float(DRAW.integers(1, 4)) for place in DRAW.permutation(documents)[: DRAW.integers(1, 15)]
        }
        true = np.zeros(documents)
        true[list(gains)] = list(gains.values())
        score = np.empty(documents)
        score[order] = -np.arange(documents)
        expected.append(metrics.ndcg_score([true], [score], k=10))
        found.append(order[:10])
        relevant.append(gains)
    made = scores(np.array(found), relevant)
    np.testing.assert_allclose(made["ndcg10"], expected, atol=1e-12)
    for row, gains, first, ten in zip(found, relevant, made["recall1"], made["recall10"], strict=True):
        assert first == (int(row[0]) in gains)
        assert ten == pytest.approx(len(set(row.tolist()) & gains.keys()) / min(10, len(gains)))


def test_intervals_cover_the_mean_of_many_queries_as_often_as_they_say() -> None:
    covered = 0
    for seed in range(100):
        values = np.random.default_rng(seed).random(80) < 0.7
        _, low, high = Resampling(80, seed).mean(values.astype(float))
        covered += low <= 0.7 <= high
    assert 88 <= covered <= 99


def test_ratios_are_paired() -> None:
    """What is the same share of every query has no spread, however much queries differ."""
    ceiling = DRAW.random(60)
    ratio = Resampling(60, 0).ratio(0.5 * ceiling, ceiling)
    np.testing.assert_allclose(ratio, [0.5, 0.5, 0.5])
    nothing = Resampling(60, 0).ratio(ceiling, 0 * ceiling)
    assert np.isnan(nothing.low)
    assert np.isinf(nothing.value)
    assert DRAWS >= 500
