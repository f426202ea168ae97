from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import TEXTS, WORDS, tiny_frozen, tokenised
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.policies import select_rows
from aligners.datamodules.task_targets import TaskBatch, next_token_targets
from aligners.injection.generation.continuing import Added, generate
from aligners.injection.generation.steering import (
    Direction,
    Steering,
    at_equal_cost,
    crossings,
    curve,
    first_tokens,
    random_directions,
)
from aligners.models import FrozenModel

GOOD, BAD = ([WORDS.index(word) + 4] for word in ("good", "bad"))
ASKED = (["good"], ["bad"])
ALPHAS = (-1.0, 0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def model() -> FrozenModel:
    return tiny_frozen("llama", task="causal")


def batch(texts: tuple[str, ...] = TEXTS, side: str = "right") -> TaskBatch:
    inputs = tokenised(texts, side)
    special = ~inputs["attention_mask"].bool()
    rows = select_rows(inputs["attention_mask"], special, "tokens")
    return TaskBatch(TextBatch((inputs,), (special,), torch.arange(len(texts))), rows, next_token_targets(inputs))


def directions(model: FrozenModel) -> list[Direction]:
    draw = torch.Generator().manual_seed(3)
    native, other = torch.randn(2, model.width, generator=draw)
    known = [Direction("mine", 1, native), Direction("theirs", 1, native + other / 3, "carried")]
    return [*known, Direction("mine", 2, other), *random_directions(known, 2, seed=0)]


@pytest.fixture(scope="module")
def steering(model: FrozenModel) -> Steering:
    reader = torch.randn(model.width, generator=torch.Generator().manual_seed(5))
    made = Steering(
        model, directions(model), ALPHAS, ASKED, SimpleNamespace(site=3, answers=lambda rows: rows @ reader[:, None])
    )
    made.measure_units([batch()])
    return made


def by_hand(steering: Steering, text: str, one: Direction, alpha: float) -> dict[str, float]:
    """The same of one text, without padding, by a hook of torch's own on the plain model."""
    model, ids = steering.model, tokenised((text,))["input_ids"]

    def hook(block: Any, args: Any, output: Tensor) -> Tensor:
        return output + steering.vector(one, alpha)

    def run(*hooks: Any) -> tuple[Tensor, Tensor]:
        read: list[Tensor] = []
        handles = [model.blocks[one.site - 1].register_forward_hook(each) for each in hooks]
        handles.append(model.blocks[2].register_forward_hook(lambda block, args, output: read.append(output)))
        logits = model.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        for handle in handles:
            handle.remove()
        return logits, read[0][0, :-1]

    (own, states), (new, moved) = run(), run(hook)
    answer = ids[0, 1:, None]
    odds = [(logits[:, GOOD[0]] - logits[:, BAD[0]]).sum() for logits in (own, new)]
    read = [steering.reading.answers(part).sum() for part in (states, moved)]  # type: ignore[union-attr]
    return {
        "units": len(answer),
        "kl": float((own.exp() * (own - new)).sum()),
        "loss": float((own - new).gather(1, answer).sum()),
        "words": float(odds[1] - odds[0]),
        "reading": float(read[1] - read[0]),
    }


@pytest.mark.parametrize("side", ["right", "left"])
def test_steering_is_what_a_hook_of_ones_own_does(steering: Steering, side: str) -> None:
    found = steering.sums(batch(side=side))
    for d, one in enumerate(steering.directions):
        for text in (0, 1, 4):
            expected = by_hand(steering, TEXTS[text], one, ALPHAS[2])
            for name, value in expected.items():
                assert float(found[name][d, 2, text]) == pytest.approx(value, rel=1e-4, abs=2e-5), (one.name, name)


def test_texts_alone_and_in_a_batch_agree(steering: Steering) -> None:
    together = steering.sums(batch())
    alone = [steering.sums(batch((text,))) for text in TEXTS]
    for name, values in together.items():
        torch.testing.assert_close(values, torch.cat([each[name] for each in alone], -1), atol=1e-4, rtol=1e-4)


def test_nothing_added_changes_nothing_bit_for_bit(model: FrozenModel, steering: Steering) -> None:
    inputs, one = batch().inputs, steering.directions[0]
    moved = model.front(inputs, [1])[0] + steering.vector(one, 0.0)
    assert torch.equal(model.tail_through(inputs, 1, moved, 3)[0], model.logits(inputs))
    assert 0.0 not in Steering(model, [one], (0, 1), ASKED).alphas


def test_what_is_written_is_what_teacher_forcing_would_say(model: FrozenModel, steering: Steering) -> None:
    one, prompt = steering.directions[0], tokenised(TEXTS[:1])["input_ids"]
    vector = steering.vector(one, 2.0)
    written = generate(model, prompt, Added(1, vector), new_tokens=8)
    n = int((written >= 0).sum())
    whole = {"input_ids": torch.cat([prompt, written[:, :n]], 1)}
    logits = model.tail(whole, 1, model.front(whole, [1])[0] + vector)[0, prompt.shape[1] - 1 : -1]
    assert torch.equal(logits.argmax(-1)[:n], written[0, :n])


def test_a_unit_is_the_typical_deviation_whatever_single_tokens_do(model: FrozenModel, steering: Steering) -> None:
    states = model.front(batch().inputs, [1])[0][batch().inputs["attention_mask"].bool()]
    around = states - states.median(0).values
    assert steering.units[1] == pytest.approx(float(around.norm(dim=1).median()), rel=1e-6)
    assert float(steering.vector(steering.directions[0], 2.0).norm()) == pytest.approx(2 * steering.units[1], rel=1e-5)


def test_effects_at_equal_cost_are_read_off_the_curves(steering: Steering) -> None:
    table = steering.sums(batch())
    rows, level = curve(steering, table, seed=0), 0.2
    equal = {
        (row["method"], row["site"], row["effect"]): row for row in at_equal_cost(steering, table, [level], seed=0)
    }
    line = [row for row in rows if (row["method"], row["site"]) == ("theirs", 1) and row["alpha"] > 0]
    costs, effects = ([0, *(row[name] for row in line)] for name in ("kl", "words"))
    expected = np.interp(level**0.5, np.sqrt(np.maximum.accumulate(costs)), effects)
    theirs, mine = equal["theirs", 1, "words"], equal["mine", 1, "words"]
    assert theirs["value"] == pytest.approx(expected, rel=1e-6)
    assert theirs["share"] == pytest.approx(theirs["value"] / mine["value"])
    assert theirs["value_low"] <= theirs["value"] <= theirs["value_high"]
    assert (mine["share_low"], mine["share"], mine["share_high"]) == (1, 1, 1)
    drawn = equal["random", 1, "words"]
    assert drawn["value_low"] < drawn["value"] < drawn["value_high"]
    assert all(row["kl_low"] <= row["kl"] <= row["kl_high"] for row in rows)
    nowhere = at_equal_cost(steering, table, [1e6], seed=0)
    assert {row["value"] for row in nowhere} == {None}


def test_a_cost_that_falls_again_counts_where_it_was_first_reached() -> None:
    costs = np.array([[1.0], [4.0], [2.0], [9.0]])
    found = crossings(costs, np.array([[1.0], [2.0], [7.0], [8.0]]), 4.0)
    assert float(found) in (2.0, 7.0)
    assert float(crossings(costs, costs, 2.25)) == pytest.approx(2.5)  # half way between roots 1 and 2


def test_random_directions_follow_from_the_seed(model: FrozenModel) -> None:
    known = [Direction("a", site, torch.ones(16)) for site in (1, 2)]
    a, b, c = (random_directions(known, 2, seed) for seed in (0, 0, 1))
    assert [(one.name, one.site, one.role) for one in a] == [
        (f"random {n}", site, "random") for site in (1, 2) for n in (1, 2)
    ]
    assert all(torch.equal(x.vector, y.vector) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0].vector, c[0].vector)
    assert not torch.equal(a[0].vector, a[2].vector)


def test_words_are_tokens_inside_a_text(model: FrozenModel) -> None:
    assert first_tokens(model, ["good", "bad"]) == ([*GOOD, *BAD], [])
    ids, cautions = first_tokens(model, ["good film"])
    assert (ids, cautions) == (GOOD, [f"'good film' is 2 tokens of {model.name}: the first, 'good', stands for it."])
    with pytest.raises(ValueError, match="has no token for 'marvellous'"):
        first_tokens(model, ["marvellous"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": lambda: tiny_frozen("bert")}, "Expected a causal language model"),
        ({"words": ((), ())}, "Expected words for and against, or a `reading`"),
        ({"words": (["good"], [])}, "or neither, but got only one"),
        ({"alphas": (0, -1)}, "`alphas` with a positive number"),
        ({"directions": [Direction("a", 5, torch.ones(16))]}, "Expected `site` between 0 and 4, but got 5"),
        ({"directions": [Direction("a", 2, torch.ones(15))]}, "a has width 15"),
        ({"reading": SimpleNamespace(site=1, answers=torch.abs)}, "at no later site than the reading"),
    ],
)
def test_bad_input_is_refused(model: FrozenModel, changes: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"model": lambda: model, "directions": [Direction("a", 2, torch.ones(16))]}
    given = usual | {"alphas": (1.0,), "words": ASKED} | changes
    with pytest.raises(ValueError, match=said):
        Steering(**given | {"model": given["model"]()})
