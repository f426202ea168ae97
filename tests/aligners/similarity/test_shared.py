"""What measures share: one copy of what is accumulated, computed from tile by tile, and one decomposition."""

import pytest
import torch

from aligners.similarity.algebra import moments
from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.algebra.pairs import CentredRows
from aligners.similarity.catalogue import catalogue
from aligners.similarity.functional import cca
from aligners.similarity.functional.cca import SharedMoments, cca_held_out
from aligners.similarity.functional.regression import mixedsim_held_out, r2_held_out
from aligners.similarity.outcome import TileFigures, evaluate
from aligners.similarity.passes.plan import Span, Tile
from tests.contents import content_of
from tests.rows import LAYERS_X, LAYERS_Y, paired

SHARE = 0.9
EVERY = catalogue(SHARE)
ON_STATES = [EVERY[name] for name in ("svcca", "pwcca")]
ON_HEADS = [EVERY[name] for name in ("attention_svcca", "attention_pwcca")]
ON_ROWS = [measure for measure in EVERY.values() if measure.family in ("moments", "rows", "batches")]


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


def test_moments_take_the_place_of_their_sums_and_a_sample_is_not_kept_twice() -> None:
    content, expected = content_of(*paired(90), ON_ROWS), grid_moments(*paired(90))
    found = content.of(EVERY["cka"]).moments
    x, y, cross = content.grids["moments", 0, None]
    for name, sums in (("xx", x.xx), ("yy", y.xx), ("xy", cross.xy)):
        assert getattr(found, name).data_ptr() == sums.data_ptr()
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-11)
    sample = content.of(EVERY["rsa"])
    assert sample.x.data_ptr() == content.x.samples[EVERY["rsa"].budget].data_ptr()
    assert sample.x.shape[1] == 90
    rows = CentredRows(sample.x)
    with torch.profiler.profile(profile_memory=True) as profile:
        rows[:, :10]
    assert max(event.cpu_memory_usage for event in profile.events()) < sample.x.nbytes / 2


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_figure() -> dict[str, torch.Tensor]:
        given = [grid_moments(*paired(90, seed=seed)) for seed in (0, 1)]
        on_moments = [measure for measure in ON_ROWS if measure.family == "moments"]
        found = {measure.name: evaluate(measure, SharedMoments(given[0])) for measure in on_moments}
        held_out = {f.__name__: f(*given) for f in (cca_held_out, r2_held_out, mixedsim_held_out)}
        return {f"{name} {way}": values for name, grids in found.items() for way, values in grids.items()} | held_out

    whole = every_figure()
    monkeypatch.setattr(moments, "TILE", 1)
    for name, values in every_figure().items():
        torch.testing.assert_close(values, whole[name], rtol=1e-12, atol=1e-12, msg=name)


def test_both_measures_in_both_directions_are_one_decomposition_of_a_tile(decomposed: list[str]) -> None:
    contents = {"value": content_of(*paired(60), ON_STATES), "fit": content_of(*paired(50, seed=1), ON_STATES)}
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
    names = ("value", "fit", "untrained", "null_0")
    contents = {name: content_of(*paired(50, seed=seed), ON_STATES) for seed, name in enumerate(names)}
    tile = Tile(Span(0, 0, LAYERS_X), Span(1, 0, LAYERS_Y))
    figures = TileFigures.of(tile, ON_STATES, contents, [])
    assert {key for key in figures.refused} == {("svcca", "interval"), ("pwcca", "interval")}  # of one group
    for measure in ON_STATES:
        assert set(figures.grids[measure.name, "held_out"]) == set(figures.grids[measure.name, "untrained"])
    assert len(decomposed) == 4  # of the rows, of the fitting rows, of the untrained models and of the null


def test_every_figure_is_the_one_that_is_computed_alone() -> None:
    x, y = paired(60)
    fitted, pwcca = grid_moments(x, y), EVERY["pwcca"]
    others = [SharedMoments(grid_moments(*(rows[:, :n] for rows in paired(40, seed=1)))) for n in (40, 20)]
    for start in (SharedMoments(fitted), SharedMoments(fitted.swap()).swap()):
        for _ in range(2):
            both = evaluate(pwcca, start)
            for found, alone in (
                (start.correlations("SVCCA", SHARE).mean(), cca.svcca(x, y, share=SHARE)),
                (both["forward"], cca.pwcca(x, y, share=SHARE)),
                (both["backward"], cca.pwcca(y, x, share=SHARE).mT),
            ):
                torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)
            for tested in others:
                for one, other in ((start, tested), (start.swap(), tested.swap())):
                    alone = cca._correlations(one.moments, other.moments, share=SHARE, measure="PWCCA").weighted()
                    found = one.correlations("PWCCA", SHARE, other).weighted()
                    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)


def test_the_other_way_round_is_found_first() -> None:
    x, y = paired(60)
    shared = SharedMoments(grid_moments(x, y))
    back = shared.swap().correlations("PWCCA", SHARE)
    assert back.rho.shape[:2] == (LAYERS_Y, LAYERS_X)
    torch.testing.assert_close(back.weighted(), cca.pwcca(y, x, share=SHARE), rtol=1e-12, atol=0)
    there = shared.correlations("PWCCA", SHARE).weighted()
    torch.testing.assert_close(there, cca.pwcca(x, y, share=SHARE), rtol=1e-12, atol=0)


def test_each_measure_is_refused_by_its_own_name(decomposed: list[str]) -> None:
    few, enough, short = (content_of(*paired(n), ON_STATES) for n in (3, 50, 2))
    for measure, name in zip(ON_STATES, ("SVCCA", "PWCCA"), strict=True):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{name} expects more rows"):
                evaluate(measure, few.of(measure))
        with pytest.raises(ValueError, match=f"^Held-out {name} expects at least 3 rows"):
            measure.held_out(enough.of(measure), short.of(measure))
    assert decomposed == []
