from itertools import product
from typing import Any

import pytest
import torch
from tests.tiny import tiny_frozen

from aligners.injection.routes import build_routes, check_routes
from aligners.models import FrozenModel

LABELS = torch.tensor([0, 1])


def models(*depths: int) -> list[FrozenModel]:
    return [tiny_frozen(seed=seed, layers=layers) for seed, layers in enumerate(depths)]


def check(source: FrozenModel, target: FrozenModel, labels: Any = LABELS, **options: Any) -> None:
    routes = build_routes([source, target], [1], options.pop("routes", "forward"))
    check_routes(routes, labels, "some.csv", **{"allow_mixed": False, "gradients": True} | options)


def test_every_ordered_pair_and_the_baselines_last() -> None:
    a, b, c = models(3, 3, 3)
    found = build_routes([a, b, c], "blocks", "all")
    assert [route.key for route in found] == ["0_1", "0_2", "1_0", "1_2", "2_0", "2_1", "0_0", "1_1", "2_2"]
    assert [route.same for route in found] == [False] * 6 + [True] * 3
    assert (found[3].source, found[3].target) == (b, c)
    assert {route.pairs for route in found} == {((1, 1), (2, 2), (3, 3))}
    assert [route.key for route in build_routes([a, b, c], [1], "different")] == [r.key for r in found[:6]]
    assert [route.key for route in build_routes([a, b, c], [1], "forward")] == ["0_1", "0_2"]


NAMED = ["1:2", "3:2", "0:1"]


@pytest.mark.parametrize(
    ("depths", "sites", "key", "expected"),
    [
        ((3, 2), NAMED, "0_1", ((1, 2), (3, 2), (0, 1))),
        ((3, 2), NAMED, "1_0", ((2, 1), (2, 3), (1, 0))),  # turned on the way back
        ((3, 2), NAMED, "0_0", ((1, 1), (3, 3), (0, 0))),  # a baseline has the model's own ends
        ((3, 2), NAMED, "1_1", ((2, 2), (1, 1))),
        ((3, 3, 3), ["1:2"], "1_2", ((1, 2),)),
        ((3, 3, 3), ["1:2"], "2_1", ((2, 1),)),
        ((3, 3, 3), ["1:2"], "2_2", ((2, 2),)),  # that with the first of the others
        ((3, 2), "grid", "1_0", tuple(product((1, 2), (1, 2, 3)))),
        ((3, 2), "grid", "1_1", tuple(product((1, 2), (1, 2)))),
    ],
)
def test_sites_are_those_of_the_route(depths: tuple[int, ...], sites: Any, key: str, expected: Any) -> None:
    assert {route.key: route.pairs for route in build_routes(models(*depths), sites, "all")}[key] == expected


def test_a_model_that_is_named_twice_is_one_and_no_route_comes_twice() -> None:
    (a,) = models(3)
    (route,) = build_routes([a, a], "blocks", "all")
    assert (route.key, route.same, len(route.pairs)) == ("0_1", True, 3)
    found = build_routes([a, a], ["1:2", 3], "all")
    pairs = {route.key: route.pairs for route in found}
    assert pairs == {"0_1": ((1, 2), (3, 3)), "1_0": ((2, 1),), "0_0": ((1, 1),), "1_1": ((2, 2),)}
    everywhere = [(r.source, r.target, pair) for r in found for pair in r.pairs]
    assert len(set(everywhere)) == len(everywhere)


def test_what_can_be_stitched_is_not_refused() -> None:
    bare, classifier = tiny_frozen(n_labels=None), tiny_frozen(seed=1)
    causal, reader = tiny_frozen("gpt2", task="causal"), tiny_frozen("gpt2")
    check(bare, classifier)
    check(causal, causal, labels=None, routes="all")
    check(causal, tiny_frozen(task="masked"), labels=None)
    check(classifier, causal, labels=None, allow_mixed=True)
    check(classifier, reader)  # no label is among the tokens that it sees
    check(reader, classifier)


@pytest.mark.parametrize(
    ("source", "target", "options", "says"),
    [
        ({}, {"n_labels": None}, {}, r"stitch into, but tiny-bert has no .*Name another model, with its head"),
        ({}, {}, {"labels": None}, r"needs labels, but the texts of 'some.csv' have none.*`label_column`"),
        ({}, {}, {"labels": torch.tensor([0, 2])}, r"labels 0\.\.1.*some\.csv' have labels 0\.\.2"),
        (
            {"architecture": "gpt2", "task": "causal"}, {"task": "masked"}, {"labels": None, "routes": "all"},
            r"same task.*tiny-bert: masked, tiny-gpt2: causal.*`routes` 'forward'",
        ),
        ({}, {}, {"routes": "backward"}, "`routes` to be one of all, different, forward, but got 'backward'"),
        (
            {}, {"architecture": "gpt2", "task": "causal"}, {"labels": None},
            r"tiny-bert sees the whole text .* reveal to tiny-gpt2 the tokens that it.*`allow_mixed` to true",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_stitched_is_refused(
    source: dict[str, Any], target: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        check(tiny_frozen(**source), tiny_frozen(**target), **options)


def test_quantised_weights_are_refused_where_gradients_must_pass() -> None:
    x, y = models(3, 3)
    y.quantised = "bitsandbytes"
    check(x, y, gradients=False)
    check(y, x)  # nothing passes through what is read
    with pytest.raises(ValueError, match=r"gradients can pass.*tiny-bert is quantised \(bitsandbytes\).*`data.dtype`"):
        check(x, y)
