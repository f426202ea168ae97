"""On states of known features: norms alone call artefacts own, controls do not, and what is own stays so."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from aligners.similarity.latents.dictionary import PairedDictionary
from aligners.similarity.latents.examination import Examination, Spaces, examine
from aligners.similarity.latents.other_texts import other_rows
from aligners.similarity.latents.planted import KINDS, Damaged, Plan, Planted, plant
from aligners.similarity.latents.readings import FittedReadings, decoder_readings
from aligners.similarity.latents.unit_sums import LatentSums
from aligners.similarity.latents.verdicts import SHARED, Verdicts, verdicts

SEEDS = range(3)
ARTEFACTS = 10
PLAN = Plan(d_x=32, d_y=32, shared=50, scaled=10, own_x=20, own_y=20, texts=400, active=4.0)


@dataclass
class Case:
    """A damaged dictionary of planted states, examined."""

    planted: Planted
    damaged: Damaged
    found: Examination

    @property
    def owner(self) -> torch.Tensor:
        return self.planted.owner[self.damaged.feature]

    @property
    def by_norm(self) -> torch.Tensor:
        """Whether the norm alone calls a latent own, as in 2504.02922."""
        return (self.found.norm[0] - 0.5).abs() > 0.4


@cache
def case(plan: Plan, spaces: Spaces, seed: int) -> Case:
    planted = plant(plan, seed)
    damaged = Damaged.by_l1(planted, ARTEFACTS, ARTEFACTS, seed=seed)
    found = examine(damaged.dictionary, damaged.codes, planted.x, planted.y, planted.text, spaces)
    return Case(planted, damaged, found)


def judged(plan: Plan, spaces: Spaces, seed: int) -> tuple[Case, Verdicts]:
    pair = case(plan, spaces, seed)
    return pair, verdicts(pair.found.parts, [equal_models(seed).found.parts], [pair.found.permuted])


def equal_models(seed: int, spaces: Spaces = "one") -> Case:
    """The same features in both, with noise of their own and the same artefacts."""
    return case(PLAN._replace(shared=110, scaled=0, own_x=0, own_y=0), spaces, seed + 100)


PLANS = {
    "one": (PLAN, "one"),
    "apart": (PLAN, "apart"),
    "rotated": (PLAN._replace(shared=30, rotated=20), "apart"),
    "wider": (PLAN._replace(d_y=48), "apart"),
    "topics": (PLAN._replace(topics=4), "apart"),
}


@pytest.mark.parametrize("name", PLANS)
def test_own_latents_survive_controls_and_artefacts_do_not(name: str) -> None:
    """At least .9 of own and .9 of shared latents found, at most .05 of what is called own false, over seeds."""
    plan, spaces = PLANS[name]
    own = own_found = false_own = shared = shared_found = 0
    for seed in SEEDS:
        pair, found = judged(plan, spaces, seed)
        verdict = found.verdict[0]
        is_own = pair.owner >= 0
        artefacts = pair.damaged.shrunk | pair.damaged.split
        assert pair.by_norm[artefacts].all()
        assert not is_own[artefacts].any()
        own += int(is_own.sum())
        own_found += int((verdict == pair.owner)[is_own].sum())
        false_own += int((verdict[~is_own] < SHARED).sum())
        shared += int((~is_own).sum())
        shared_found += int((verdict[~is_own] == SHARED).sum())
        assert found.error_rate <= 0.05
    assert own_found >= 0.9 * own
    assert shared_found >= 0.9 * shared
    assert false_own <= 0.05 * (own_found + false_own)


@pytest.mark.parametrize("spaces", ["one", "apart"])
def test_two_equal_models_have_hardly_any_latent_of_their_own(spaces: Spaces) -> None:
    latents = own = by_norm = 0
    for seed in SEEDS:
        equal = equal_models(seed, spaces)
        counts = verdicts(equal.found.parts).counts()
        own += counts["x"] + counts["y"]
        latents += len(equal.owner)
        by_norm += int(equal.by_norm.sum())
    assert by_norm == len(SEEDS) * 3 * ARTEFACTS
    assert own <= 0.01 * latents


def test_each_artefact_shows_in_its_ratio() -> None:
    """ν^ε of a shrunk latent is near 1 and its ν^r near 0; a split one has them the other way round."""
    pair = case(PLAN, "one", 0)
    parts = pair.found.parts
    ratio = (parts.other.sum(1) / parts.own.sum(1))[:, 0]
    shrunk, split = pair.damaged.shrunk, pair.damaged.split
    torch.testing.assert_close(ratio[:, shrunk].mean(1), torch.tensor([1.0, 0.0]).double(), rtol=0, atol=0.2)
    torch.testing.assert_close(ratio[:, split].mean(1), torch.tensor([0.0, 1.0]).double(), rtol=0, atol=0.2)


def test_a_rotation_needs_directions_that_are_fitted() -> None:
    """Along Y's decoders X has nothing of a feature that has another direction there."""
    plan, _ = PLANS["rotated"]
    pair, along_decoders = judged(plan, "one", 0)
    rotated = (pair.planted.kind == KINDS.index("rotated"))[pair.damaged.feature]
    rotated &= ~pair.damaged.split & ~pair.damaged.shrunk
    _, fitted = judged(plan, "apart", 0)
    assert (along_decoders.verdict[0, rotated] < SHARED).double().mean() >= 0.8
    assert (fitted.verdict[0, rotated] == SHARED).double().mean() >= 0.8


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spaces", ["one", "apart"])
def test_nothing_is_shared_with_permuted_rows(spaces: Spaces, seed: int) -> None:
    pair = case(PLAN, spaces, seed)
    assert verdicts(pair.found.permuted).counts()["shared"] <= 1


def test_a_dense_feature_makes_latents_look_shared_unless_targets_are_centred() -> None:
    """Targets keep their mean in the paper: every latent that points to it then has something in rows of any text."""
    planted = plant(PLAN._replace(texts=100), 0)
    decoder_x, decoder_y, *_ = planted.dictionary
    mean = 10 * decoder_x[:, :1]
    decoder_x[:, 1:] += 0.2 * mean * (planted.kind[1:, None] != KINDS.index("y"))
    decoder_y[:, 1:] += 0.2 * mean * (planted.kind[1:, None] != KINDS.index("x"))
    codes = planted.codes.clone()
    codes[:, :, 0] = 10
    dictionary = PairedDictionary.of(decoder_x, decoder_y)
    x, y = codes @ decoder_x, codes @ decoder_y
    unit = planted.text
    owner = (planted.kind == KINDS.index("y")).long()[None]
    variances = x[0].var(0).sum()[None], y[0].var(0).sum()[None]
    fit = FittedReadings(dictionary, *variances)
    fit.update(codes, x, y)
    shared = []
    for readings in (decoder_readings(dictionary), decoder_readings(dictionary, fit.compute())):
        sums, null = LatentSums(dictionary, readings, 100), LatentSums(dictionary, readings, 100)
        sums.update(codes, x, y, unit)
        null.update(codes, x, y, unit, other_rows(unit))
        shared.append(verdicts(sums.parts(owner, null)).counts()["shared"])
    assert shared[0] >= 90
    assert shared[1] <= 1


def test_states_are_what_the_plan_says() -> None:
    plan = PLAN._replace(shared=200, rotated=30, noise=0.2, texts=500)
    planted = plant(plan, 3)
    assert planted.x.shape == (1, 10_000, 32)
    decoder_x, decoder_y, *_ = planted.dictionary
    norm_x, norm_y = decoder_x[0].norm(dim=1), decoder_y[0].norm(dim=1)
    kind = [KINDS[number] for number in planted.kind.tolist()]
    for j, name in enumerate(kind):
        assert (norm_x[j] == 0) == (name == "y")
        assert (norm_y[j] == 0) == (name == "x")
        assert torch.equal(decoder_x[0, j], decoder_y[0, j]) == (name == "shared")
    noise = planted.x[0] - planted.codes[0] @ decoder_x[0]
    assert float(noise.var(0).sum() / planted.x[0].var(0).sum()) == pytest.approx(0.2, abs=0.01)
    active = (planted.codes > 0).sum(2).double().mean()
    assert float(active) == pytest.approx(4.0, abs=0.4)
    frequency = (planted.codes[0] > 0).double().mean(0).sort(descending=True).values
    assert float(frequency[0] / frequency[99]) == pytest.approx(100**0.7, rel=0.4)
    assert torch.equal(plant(plan, 3).x, planted.x)
    assert not torch.equal(plant(plan, 4).x, planted.x)
    by_text = (planted.codes[0] > 0).double().view(500, 20, -1).mean(1)
    independent = frequency.mean() * (1 - frequency.mean()) / 20
    assert float(by_text.var(0).mean()) > 1.5 * float(independent)  # rows of a text are alike


def test_plans_and_rows_that_cannot_be_are_refused() -> None:
    for wrong, message in [
        ({"d_x": 0}, "`d_x` to be at least 1"),
        ({"noise": 1.0}, "`noise` to be at least 0 and below 1"),
        ({"own_x": -1}, "`features` to be at least 0"),
        ({"active": 500.0}, "`active` between 0 and the 100 features"),
    ]:
        with pytest.raises(ValueError, match=message):
            plant(PLAN._replace(**wrong))
    planted = plant(PLAN._replace(texts=3, rows=4))
    with pytest.raises(ValueError, match="at most the 60 shared features, but got 61"):
        Damaged.by_l1(planted, 60, 1)
    with pytest.raises(ValueError, match="at least 4 texts, two to fit on and two held out, but got 3"):
        examine(planted.dictionary, planted.codes, planted.x, planted.y, planted.text)
    with pytest.raises(ValueError, match="`spaces` to be one of one, apart"):
        examine(planted.dictionary, planted.codes, planted.x, planted.y, planted.text, "both")
