from __future__ import annotations

import torch

from aligners.fitting.training import Divergence

NAN, INF = float("nan"), float("inf")


def after(*losses: list[float]) -> list[int]:
    watched = Divergence()
    for step, loss in enumerate(losses, start=1):
        watched.watch("map", torch.tensor(loss), torch.ones(len(loss)), step)
    return watched.step["map"].tolist()


def test_a_loss_that_is_no_number_or_far_above_its_start_has_diverged() -> None:
    assert after([0.5, 0.5, 0.5, 0.5], [0.4, NAN, INF, 0.6], [0.3, 0.1, 0.1, 5.1]) == [0, 2, 2, 3]
    assert after([NAN, 0.5], [0.1, 0.5]) == [1, 0]  # at once


def test_what_is_harmless_or_was_large_from_the_start_has_not() -> None:
    assert after([0.01, 30.0, 2.0], [1.9, 200.0, 19.0]) == [0, 0, 0]
    assert after([0.01, 30.0, 2.0], [2.1, 301.0, 21.0]) == [2, 2, 2]


def test_a_gradient_that_is_no_number_stops_its_site_for_good() -> None:
    watched = Divergence()
    for step, norms in enumerate(([1.0, 1.0], [INF, 1.0], [1.0, 1.0]), start=1):
        alive = watched.watch("map", torch.ones(2), torch.tensor(norms), step)
    assert alive.tolist() == [False, True]
    again = Divergence()
    again.load_state_dict(watched.state_dict(), torch.device("cpu"))
    again.watch("map", torch.tensor([1.0, 11.0]), torch.ones(2), 4)
    assert again.step["map"].tolist() == [2, 4]
