"""Pieces as queries, beside plain loops: what they find, and what is foretold by them."""

import numpy as np
import pytest

from aligners.fitting.migration.forecast import Search
from aligners.fitting.migration.known_pairs import Known, fit_route
from aligners.fitting.migration.pieces import forecast_by_pieces, own_found, pieces_of, scores_at
from aligners.fitting.migration.vector_maps import Pairs, fit_vectors, together

DRAW = np.random.default_rng(0)


def test_a_piece_is_a_run_of_words_of_its_text() -> None:
    texts = [" ".join(f"w{place}" for place in range(number)) for number in (0, 1, 3, 40, 300)] * 5
    pieces = pieces_of(texts)
    assert pieces == pieces_of(texts)
    assert pieces[:7] == pieces_of(texts[:7])
    for text, piece in zip(texts, pieces, strict=True):
        assert piece in text
        words = len(piece.split())
        assert 3 <= words <= 10 or words == len(text.split())
    assert len(set(pieces)) > 10


def test_ranks_and_scores_are_those_of_a_whole_sort() -> None:
    similar = DRAW.normal(size=(12, 40))
    part = DRAW.permutation(40)[:25]
    for found, places in ((own_found(similar), np.arange(40)), (own_found(similar, part), part)):
        for row in range(12):
            others = [place for place in places if place != row]
            order = sorted([*others, row], key=lambda place: -similar[row, place])
            assert order.index(row) == found[row]
    scored = scores_at(np.array([0, 1, 9, 10]))
    np.testing.assert_array_equal(scored["recall1"], [1, 0, 0, 0])
    np.testing.assert_array_equal(scored["recall10"], [1, 1, 1, 0])
    np.testing.assert_allclose(scored["ndcg10"], [1, 1 / np.log2(3), 1 / np.log2(11), 0])


def drawn_search(queries: int, documents: int, loss: float, draw: np.random.Generator = DRAW) -> Search:
    """Similarities in which a query's own document stands out by an amount of its own."""
    ease = draw.normal(2.5, 1, queries)
    tables = []
    for less in (loss, 0, 0):
        table = draw.normal(size=(queries, documents))
        table[np.arange(queries), np.arange(queries)] += ease - less
        tables.append(table)
    return Search(*tables)


def test_forecasts_correct_for_how_hard_queries_are() -> None:
    """Of pieces as hard as queries the ratio itself is said, of harder queries a lower one."""
    made = drawn_search(1500, 1500, 1.0)
    before = [own_found(table) for table in made]
    through, new = (scores_at(one)["recall10"] for one in before[:2])
    said = forecast_by_pieces(made, 1500, scores_at(before[2]), 0)["recall10"]
    assert said.value == pytest.approx(through.mean() / new.mean(), abs=0.03)
    assert said.low < said.value < said.high
    hard = before[2] >= np.median(before[2])
    harder = {name: values[hard] for name, values in scores_at(before[2]).items()}
    less = forecast_by_pieces(made, 1500, harder, 0)["recall10"]
    assert less.value < said.value - 0.05
    assert less.value == pytest.approx(through[hard].mean() / new[hard].mean(), abs=0.06)


def test_parts_in_which_everything_is_found_do_not_decide() -> None:
    """Among twelve documents a search finds nearly all, and a line through such shares may lead anywhere."""
    draw = np.random.default_rng(0)
    for _ in range(5):
        made = drawn_search(100, 100, 0.7, draw)
        found = scores_at(own_found(made.old))
        said = forecast_by_pieces(made, 1800, found, 0)["recall10"]
        assert 0.1 < said.value < 3
        assert said.high < 100  # with all parts it is 300 to 14,000


def test_a_search_that_loses_nothing_is_foretold_to_be_the_whole() -> None:
    made = drawn_search(300, 900, 0)
    same = Search(made.new, made.new, made.old)
    found = scores_at(own_found(made.old))
    for estimate in forecast_by_pieces(same, 5000, found, 0).values():
        np.testing.assert_allclose(estimate, 1)


def known(rows: int, shift: float) -> Known:
    """New vectors are old ones turned; those of pieces lie elsewhere on the new side."""
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(8, 8)))[0]
    old = DRAW.normal(size=(rows, 8)) + 2
    asked = old + 0.3 * DRAW.normal(size=old.shape)
    return Known(Pairs(old, old @ turn), Pairs(asked, asked @ turn + shift))


def test_maps_of_queries_take_the_mean_of_pieces_to_that_of_texts() -> None:
    fit, validation = known(400, 5.0), known(100, 5.0)
    assert fit.pieces is not None
    made = fit_route("procrustes", "queries", fit, validation, similarity="cosine", normalised=False, seed=0)
    mean = made.mapped(fit.pieces.y.mean(0, keepdims=True))[0]
    np.testing.assert_allclose(mean, fit.texts.x.mean(0), atol=1e-4)
    blind = fit_route(
        "procrustes",
        "queries",
        Known(fit.texts),
        Known(validation.texts),
        similarity="cosine",
        normalised=False,
        seed=0,
    )
    plain = fit_vectors("procrustes", fit.texts.turned(), validation.texts.turned(), normalised=False)
    np.testing.assert_array_equal(blind.weight.numpy(), plain.weight.numpy())
    scale = made.weight.norm() / plain.weight.norm()
    np.testing.assert_allclose(made.weight / scale, plain.weight, atol=1e-4)


def test_groups_are_put_together_about_their_means() -> None:
    one, other = known(30, 1.0), known(20, 4.0)
    both = together([one.texts, other.texts], centred=True)
    assert len(both) == 50
    np.testing.assert_allclose(both.y[30:], other.texts.y - other.texts.y.mean(0))
    np.testing.assert_array_equal(together([one.texts, other.texts], centred=False).x[:30], one.texts.x)


def test_rows_with_a_zero_vector_on_any_side_are_known() -> None:
    rows = known(10, 0.0)
    assert rows.pieces is not None
    rows.texts.x[2] = 0
    rows.pieces.y[5] = 0
    np.testing.assert_array_equal(np.flatnonzero(~rows.whole()), [2, 5])
    assert rows.at(slice(3)).pieces is not None
    assert Known(rows.texts).at(slice(3)).pieces is None
