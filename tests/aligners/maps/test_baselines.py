from __future__ import annotations

import torch

from aligners.maps.baselines import GaussianStates, random_labels
from aligners.similarity.algebra.moments import Moments, moments_of
from tests.runs import related_rows

SITES, WIDTH = 2, 5


def moments() -> Moments:
    """With an exactly singular covariance of Y, as behind a LayerNorm."""
    x, y = related_rows(SITES, 400, 3, WIDTH)
    return moments_of(x, torch.nn.functional.layer_norm(y, (WIDTH,)))


def test_a_text_draws_the_same_in_any_batch() -> None:
    states = GaussianStates(moments(), seed=0)
    together = states([4, 2, 9], [3, 1, 2])
    assert together.shape == (SITES, 6, WIDTH)
    apart = states([9, 4], [2, 3])
    torch.testing.assert_close(apart, together[:, [4, 5, 0, 1, 2]], rtol=0, atol=1e-6)
    other = GaussianStates(moments(), seed=1)([9, 4], [2, 3])
    assert (other - apart).abs().min() > 1e-4


def test_texts_draw_independently() -> None:
    rows = GaussianStates(moments(), seed=0)(range(3000), [1] * 3000)
    near = torch.corrcoef(torch.stack([rows[0, :-1, 0], rows[0, 1:, 0]]))[0, 1]
    assert abs(near) < 0.06


def test_mean_and_covariance_are_those_of_the_fitting_rows() -> None:
    given = moments()
    drawn = GaussianStates(given, seed=0)(range(200), [200] * 200).double()
    found = moments_of(drawn, drawn)
    expected = given.yy / given.n
    variance = expected.diagonal(dim1=1, dim2=2)
    mean_error = (variance / found.n).sqrt()
    error = ((variance[:, :, None] * variance[:, None] + expected.square()) / found.n).sqrt()
    assert ((found.mean_x - given.mean_y).abs() < 5 * mean_error).all()
    assert ((found.xx / found.n - expected).abs() < 5 * error).all()
    # the direction in which Y never varies stays empty
    assert (drawn.sum(-1) - given.mean_y.sum(-1)[:, None]).abs().max() < 1e-4


def test_random_labels_are_uniform_and_repeatable() -> None:
    labels = random_labels(6000, 3, seed=0)
    assert labels.shape == (6000,)
    assert (labels.bincount() - 2000).abs().max() < 150
    assert torch.equal(labels, random_labels(6000, 3, seed=0))
    assert not torch.equal(labels, random_labels(6000, 3, seed=1))
