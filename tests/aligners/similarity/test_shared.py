from __future__ import annotations

import pytest
import torch

from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.catalogue import catalogue
from aligners.similarity.functional import cca
from aligners.similarity.functional.cca import SharedMoments
from aligners.similarity.outcome import TileFigures, evaluate
from aligners.similarity.passes.plan import Span, Tile
from tests.contents import content_of
from tests.rows import LAYERS_X, LAYERS_Y, paired

SHARE = 0.9
ON_STATES = [catalogue(SHARE)[name] for name in ("svcca", "pwcca")]
ON_HEADS = [catalogue(SHARE)[name] for name in ("attention_svcca", "attention_pwcca")]


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every decomposition of a grid, with or without directions."""
    calls: list[str] = []
    for name in ("_decomposed", "_mean_correlation"):
        original = getattr(cca, name)

        def counted(*given: object, name: str = name, original: object = original) -> object:
            calls.append(name)
            return original(*given)  # type: ignore[operator]

        monkeypatch.setattr(cca, name, counted)
    return calls


def test_both_measures_in_both_directions_are_one_decomposition_of_a_tile(decomposed: list[str]) -> None:
    x, y = paired(60)
    contents = {"value": content_of(x, y, ON_STATES), "fit": content_of(*paired(50, seed=1), ON_STATES)}
    for measures in (ON_STATES, ON_STATES[::-1]):
        found = {measure.name: evaluate(measure, contents["value"].of(measure)) for measure in measures}
        assert len(decomposed) == 1
    assert list(found["pwcca"]) == ["forward", "backward"]
    other = catalogue(0.8)["svcca"]
    evaluate(other, contents["value"].of(other))
    assert len(decomposed) == 2
    evaluate(ON_STATES[1], contents["fit"].of(ON_STATES[1]))
    assert len(decomposed) == 3


def test_heads_are_shared_as_states_are(decomposed: list[str]) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = [torch.rand(*shape, 5, 6, 6, generator=draw, dtype=torch.float64) for shape in ((2, 4), (3, 3))]
    states = torch.zeros(1, 5, 4)
    made = content_of(states, states, ON_HEADS, weights, torch.full((5,), 6))
    found = [evaluate(measure, made.of(measure)) for measure in ON_HEADS]
    assert len(decomposed) == 1
    assert found[0]["both"].shape == found[1]["backward"].shape == (2, 3)


def test_held_out_there_is_one_decomposition_too(decomposed: list[str]) -> None:
    contents = {
        name: content_of(*paired(50, seed=seed), ON_STATES)
        for seed, name in enumerate(("value", "fit", "untrained", "null_0"))
    }
    tile = Tile(Span(0, 0, LAYERS_X), Span(1, 0, LAYERS_Y))
    figures = TileFigures.of(tile, ON_STATES, contents, [])
    assert {name for name, _ in figures.refused} == {"svcca", "pwcca"}  # the interval of one group
    for measure in ON_STATES:
        assert {direction for direction in figures.grids[measure.name, "held_out"]} == set(
            figures.grids[measure.name, "untrained"]
        )
    assert len(decomposed) == 4  # of the rows, of the fitting rows, of the untrained models and of the null


def test_every_figure_is_the_one_that_is_computed_alone() -> None:
    x, y = paired(60)
    new_x, new_y = paired(40, seed=1)
    fitted, held_out = grid_moments(x, y), grid_moments(new_x, new_y)
    for start in (SharedMoments(fitted), SharedMoments(fitted.swap()).swap()):
        other, last = SharedMoments(held_out), SharedMoments(grid_moments(new_x[:, :20], new_y[:, :20]))
        pwcca = catalogue(SHARE)["pwcca"]
        for again in range(2):
            torch.testing.assert_close(
                start.correlations("SVCCA", SHARE).mean(), cca.svcca(x, y, share=SHARE), rtol=1e-12, atol=0
            )
            there, back = evaluate(pwcca, start).values()
            torch.testing.assert_close(there, cca.pwcca(x, y, share=SHARE), rtol=1e-12, atol=0)
            torch.testing.assert_close(back, cca.pwcca(y, x, share=SHARE).mT, rtol=1e-12, atol=0)
            for tested in (other, last):
                alone = cca._correlations(fitted, tested.moments, share=SHARE, measure="PWCCA").weighted()
                found = start.correlations("PWCCA", SHARE, tested).weighted()
                torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14, msg=str(again))
                alone = cca._correlations(fitted.swap(), tested.moments.swap(), share=SHARE, measure="PWCCA").weighted()
                found = start.swap().correlations("PWCCA", SHARE, tested.swap()).weighted()
                torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14, msg=str(again))


def test_the_other_way_round_is_found_first() -> None:
    x, y = paired(60)
    shared = SharedMoments(grid_moments(x, y))
    back = shared.swap().correlations("PWCCA", SHARE)
    assert back.rho.shape[:2] == (LAYERS_Y, LAYERS_X)
    torch.testing.assert_close(back.weighted(), cca.pwcca(y, x, share=SHARE), rtol=1e-12, atol=0)
    there = shared.correlations("PWCCA", SHARE).weighted()
    torch.testing.assert_close(there, cca.pwcca(x, y, share=SHARE), rtol=1e-12, atol=0)


def test_held_out_rows_the_wrong_way_round_are_refused_even_if_the_right_ones_were_there() -> None:
    fitted, held_out = (SharedMoments(grid_moments(*paired(50, seed=seed))) for seed in (0, 1))
    fitted.correlations("SVCCA", SHARE, held_out)
    for first, second in ((fitted.swap(), held_out), (fitted, held_out.swap())):
        with pytest.raises(ValueError, match="layers and widths that `fitted` has"):
            first.correlations("SVCCA", SHARE, second)


def test_each_measure_is_refused_by_its_own_name(decomposed: list[str]) -> None:
    few = content_of(*paired(3), ON_STATES)
    for measure, name in zip(ON_STATES, ("SVCCA", "PWCCA"), strict=True):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{name} expects more rows"):
                evaluate(measure, few.of(measure))
    enough = content_of(*paired(50), ON_STATES)
    short = content_of(*paired(2), ON_STATES)
    for measure, name in zip(ON_STATES, ("SVCCA", "PWCCA"), strict=True):
        with pytest.raises(ValueError, match=f"^Held-out {name} expects at least 3 rows"):
            measure.held_out(enough.of(measure), short.of(measure))
    assert decomposed == []
