"""Tests, intervals, controls and the agreement of dictionaries, against loops and by hand."""

from itertools import permutations

import numpy as np
import pytest
import torch
from tests.references import latents as reference
from torch import Tensor

from aligners.injection.scoring.scores import resampled_counts
from aligners.similarity.latents.agreement import agreement, joint_decoders, recurrences
from aligners.similarity.latents.dictionary import PairedDictionary
from aligners.similarity.latents.ratios import p_above, p_below, ratios, ratios_with_intervals
from aligners.similarity.latents.unit_sums import Parts
from aligners.similarity.latents.verdicts import VERDICTS, benjamini_hochberg, verdicts

UNITS = 20


def parts_of(ratio: Tensor, noise: float = 0.1, squared: bool = False, seed: int = 0) -> Parts:
    """Parts whose ratios, (2, m), are these but for noise; every latent fires in every unit, and Y owns all."""
    draw = torch.Generator().manual_seed(seed)
    shape = (2, UNITS, 1, ratio.shape[1])
    own = 1 + noise * torch.randn(shape, generator=draw).double()
    other = (ratio**2 if squared else ratio)[:, None, None] + noise * torch.randn(shape, generator=draw).double()
    fired = torch.ones(shape[1:]).double()
    return Parts(own, other, fired, torch.ones(1, ratio.shape[1]), squared)


def even(value: float, latents: int = 200) -> Tensor:
    return torch.full((2, latents), value)


@pytest.mark.parametrize("squared", [False, True])
def test_p_is_that_of_a_t_test_over_units(squared: bool) -> None:
    parts = parts_of(torch.rand(2, 4), noise=0.5, squared=squared)
    parts.fired[:8, :, 1] = 0
    limits = (0.2, 0.5)
    for kind, limit in enumerate(limits):
        for j in range(4):
            own, other = parts.own[kind, :, 0, j].tolist(), parts.other[kind, :, 0, j].tolist()
            fired = parts.fired[:, 0, j].tolist()
            expected = reference.p_above(own, other, fired, limit**2 if squared else limit)
            assert float(p_above(parts, limits)[kind, 0, j]) == pytest.approx(expected, rel=1e-9)
            assert float(p_below(parts, limits)[kind, 0, j]) == pytest.approx(1 - expected, rel=1e-9)


def test_latents_of_few_units_or_without_an_owner_are_never_certain() -> None:
    parts = parts_of(even(0.0, 3))
    parts.fired[4:, :, 0] = 0
    parts.own[:, :, :, 1] = -1
    for p in (p_below, p_above):
        assert (p(parts, (0.2, 0.5))[:, 0, :2] == 1).all()
    assert ratios(parts)[:, 0, 1].isnan().all()
    found = verdicts(parts)
    assert [VERDICTS[number] for number in found.verdict[0].tolist()] == ["undecided", "undecided", "y"]


@pytest.mark.parametrize("squared", [False, True])
def test_intervals_are_quantiles_of_resampled_ratios(squared: bool) -> None:
    parts = parts_of(torch.tensor([[0.3, 0.0], [0.8, 0.1]]), noise=0.3, squared=squared)
    counts = resampled_counts(UNITS, 0)
    found = ratios_with_intervals(parts, counts)
    for kind in range(2):
        for j in range(2):
            own, other = parts.own[kind, :, 0, j].numpy(), parts.other[kind, :, 0, j].numpy()
            drawn = []
            for weights in counts.numpy():
                ratio = float((weights * other).sum() / (weights * own).sum())
                drawn.append(np.sign(ratio) * np.sqrt(abs(ratio)) if squared else ratio)
            assert float(found.ratio[kind, 0, j]) == pytest.approx(drawn[0], rel=1e-12)
            low, high = np.quantile(drawn[1:], 0.025, method="lower"), np.quantile(drawn[1:], 0.975, method="higher")
            assert float(found.low[kind, 0, j]) == pytest.approx(low, rel=1e-9)
            assert float(found.high[kind, 0, j]) == pytest.approx(high, rel=1e-9)
    with pytest.raises(ValueError, match=r"`counts` of shape \(resamples, 20\), but got \(1001, 19\)"):
        ratios_with_intervals(parts, counts[:, 1:])


def test_intervals_cover_as_often_as_they_say() -> None:
    """The true ratio of 400 latents, each with noise of its own over units."""
    found = ratios_with_intervals(parts_of(even(0.4, 400), noise=0.5, seed=1), resampled_counts(UNITS, 1))
    covered = (found.low <= 0.4) & (found.high >= 0.4)
    assert 0.88 <= float(covered.double().mean()) <= 0.98


def test_adjusted_p_is_the_least_of_its_rank_and_later_ones() -> None:
    p = torch.rand(30, generator=torch.Generator().manual_seed(0)).double() ** 2
    assert benjamini_hochberg(p).tolist() == pytest.approx(reference.benjamini_hochberg(p.tolist()), rel=1e-12)
    assert benjamini_hochberg(p[:0]).tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_few_of_the_latents_at_the_limit_are_called_own_or_shared(seed: int) -> None:
    """At the edge of both hypotheses every own or shared latent is false; hardly any of 200 is called so."""
    at_limit = torch.tensor([[0.2], [0.5]]).expand(2, 200)
    found = verdicts(parts_of(at_limit, noise=0.4, seed=seed))
    assert found.counts()["undecided"] >= 198


def test_shared_latents_pay_for_two_chances_and_own_ones_need_both() -> None:
    parts = parts_of(torch.rand(2, 30, generator=torch.Generator().manual_seed(0)), noise=0.8)
    above, below = p_above(parts, (0.2, 0.5))[:, 0], p_below(parts, (0.2, 0.5))[:, 0]
    twice = [min(1.0, 2 * min(pair)) for pair in above.T.tolist()]
    larger = [max(pair) for pair in below.T.tolist()]
    found = verdicts(parts)
    assert found.p_shared[0].tolist() == pytest.approx(reference.benjamini_hochberg(twice), rel=1e-9)
    assert found.p_own[0].tolist() == pytest.approx(reference.benjamini_hochberg(larger), rel=1e-9)


def test_either_ratio_makes_a_latent_shared_and_both_must_be_low_for_an_own_one() -> None:
    ratio = torch.tensor([[0.0, 1.0, 0.0, 0.2], [0.0, 0.0, 1.0, 0.0]])
    parts = parts_of(ratio)
    parts.owner[0, 0] = 0
    found = verdicts(parts)
    assert [VERDICTS[number] for number in found.verdict[0].tolist()] == ["x", "shared", "shared", "undecided"]
    assert found.rank_own.isnan().all()
    assert np.isnan(found.error_rate)


def test_own_latents_are_those_that_no_control_has() -> None:
    """If the same model against itself makes such latents, the dictionary makes them, and none is own."""
    parts = parts_of(torch.cat([even(0.02, 30), even(0.9, 70)], 1))
    clean, broken = parts_of(even(0.9), seed=1), parts_of(torch.cat([even(0.02, 20), even(0.9, 180)], 1), seed=2)
    assert verdicts(parts).counts()["y"] == 30
    survived = verdicts(parts, same=[clean])
    assert survived.counts()["y"] == 30
    assert survived.false_own == pytest.approx(100 / 201)
    assert survived.error_rate == pytest.approx(survived.false_own / 30)
    for controls in ([broken], [clean, broken], [broken, clean]):
        refuted = verdicts(parts, same=controls)
        assert refuted.counts()["y"] <= 3
        assert refuted.error_rate > 0.5


def test_shared_latents_are_those_that_beat_permuted_rows() -> None:
    parts = parts_of(torch.cat([even(0.0, 50), even(0.9, 50)], 1))
    nothing, everything = parts_of(even(0.0, 100), seed=1), parts_of(even(0.9, 100), noise=0.01, seed=2)
    assert verdicts(parts, permuted=[nothing]).counts()["shared"] == 50
    assert verdicts(parts, permuted=[nothing, everything]).counts()["shared"] == 0


def test_dead_latents_are_told_apart() -> None:
    parts = parts_of(even(0.0, 3))
    parts.fired[:, :, 1] = 0
    assert verdicts(parts).counts() == {"x": 0, "y": 2, "shared": 0, "undecided": 0, "dead": 1}


def test_controls_that_cannot_tell_are_refused() -> None:
    parts, small = parts_of(even(0.0)), parts_of(even(0.9, 50))
    with pytest.raises(ValueError, match=r"A control of 50 latents cannot give a rank below 1 in 51.*`rank` 0\.01"):
        verdicts(parts, same=[small])
    silent = small._replace(own=small.own * 0)
    with pytest.raises(ValueError, match="a control of which latents fire"):
        verdicts(parts, permuted=[silent])
    for wrong in ({"rate": 0.0}, {"rank": 1.0}, {"limits": (0.0, 0.5)}):
        with pytest.raises(ValueError, match=f"Expected `{next(iter(wrong))}`"):
            verdicts(parts, **wrong)


# ---------------------------------------------------------------------- dictionaries of other seeds


def test_one_to_one_is_the_best_of_all_assignments() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 4, 3, generator=draw), torch.randn(2, 6, 3, generator=draw)
    found = agreement(a, b, threshold=0.5)
    for site in range(2):
        cosines = np.zeros((4, 6))
        for i, of_a in enumerate(a[site].double().numpy()):
            for j, of_b in enumerate(b[site].double().numpy()):
                cosines[i, j] = of_a @ of_b / np.linalg.norm(of_a) / np.linalg.norm(of_b)
        best = max(sum(cosines[i, j] for i, j in enumerate(chosen)) for chosen in permutations(range(6), 4))
        assert float(found.cosine[site].sum()) == pytest.approx(best)
        picked = cosines[np.arange(4), found.partner[site].numpy()]
        np.testing.assert_allclose(found.cosine[site], picked)
        assert float(found.share[site]) == pytest.approx((picked >= 0.5).mean())
        nearest = agreement(a, b, "nearest")
        np.testing.assert_allclose(nearest.cosine[site], cosines.max(1))
    swapped = agreement(b, a)
    assert ((swapped.partner == -1).sum(1) == 2).all()
    assert (swapped.cosine[swapped.partner == -1] == -1).all()


@pytest.mark.parametrize("matching", ["nearest", "one_to_one"])
def test_what_recurs_is_found_in_any_order_and_scale_and_chance_is_small(matching: str) -> None:
    draw = torch.Generator().manual_seed(1)
    a = torch.randn(1, 40, 64, generator=draw)
    order = torch.randperm(40, generator=draw)
    b = 3 * a[:, order] + 0.5 * torch.randn(1, 40, 64, generator=draw)
    new = order < 10
    b[:, new] = torch.randn(1, 10, 64, generator=draw)
    found = agreement(a, b, matching)
    assert found.share.tolist() == [0.75]
    assert found.chance.tolist() == [0.0]
    recurs = found.cosine[0] >= 0.7
    assert (order[found.partner[0, recurs]] == recurs.nonzero()[:, 0]).all()
    times = recurrences([a, b, a], matching)
    assert times[0][0, 10:].tolist() == [2] * 30
    assert times[0][0, :10].tolist() == [1] * 10
    assert times[1][0, ~new].tolist() == [2] * 30


def test_joint_decoders_weigh_both_models_alike() -> None:
    dictionary = PairedDictionary.of(torch.ones(1, 2, 3), torch.ones(1, 2, 5))
    joint = joint_decoders(dictionary, torch.tensor([4.0]), torch.tensor([0.25]))
    assert joint[0, 0].tolist() == [0.5] * 3 + [2.0] * 5


def test_dictionaries_that_cannot_be_compared_are_refused() -> None:
    a = torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match=r"\(1, 2, 3\) and \(1, 2, 4\)"):
        agreement(a, torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match="`b` to be finite"):
        agreement(a, a / 0)
    with pytest.raises(ValueError, match="`matching` to be one of nearest, one_to_one"):
        agreement(a, a, "soft")
    with pytest.raises(ValueError, match="at least 2 `dictionaries`"):
        recurrences([a])
