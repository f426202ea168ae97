from functools import partial
from typing import Any

import pytest
import torch
from tests.references.planted import planted_rows
from tests.rows import fitted
from tests.runs import related_rows
from torch import Tensor

from aligners.fitting.alignment import Alignment
from aligners.fitting.map_errors import MapErrors
from aligners.fitting.steps import make_optimizer
from aligners.maps.base import Aligner
from aligners.maps.solvers import RIDGES, ridge_regression
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.similarity.algebra.moments import moments_of

SITES, ROWS = 2, 300


def rows(d_x: int = 8, d_y: int = 6) -> tuple[Tensor, Tensor]:
    return related_rows(SITES, ROWS, d_x, d_y)


def made(d_x: int = 8, d_y: int = 6, **options: Any) -> SparseAligner:
    torch.manual_seed(0)
    return SparseAligner(SITES, d_x, d_y, **{"latents": 32, "active": 4} | options)


def predicted(x: Tensor, y: Tensor) -> Tensor:
    """What regression on x says of y."""
    moments = moments_of(x, y)
    weight, _ = ridge_regression(moments, RIDGES)
    return (x - moments.mean_x[:, None]) @ weight + moments.mean_y[:, None]


def test_as_a_map_the_missing_model_is_predicted() -> None:
    x, y = rows()
    aligner = fitted(made(), x, y)
    of_both = aligner.decode(aligner.codes(x, predicted(x, y)))
    torch.testing.assert_close(aligner(x), of_both[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(aligner.codes(x), aligner.codes(x, predicted(x, y)), rtol=1e-9, atol=1e-9)
    alone = fitted(made(of="x"), x, y)
    (again,) = alone.decode(alone.codes(x))
    moments = moments_of(x, y)
    weight, _ = ridge_regression(moments, RIDGES)
    expected = (again - moments.mean_x[:, None]) @ weight + moments.mean_y[:, None]
    torch.testing.assert_close(alone(x), expected)


@pytest.mark.parametrize("options", [{}, {"of": "x"}, {"selection": "l1"}])
def test_errors_are_those_of_what_is_given_back(options: dict[str, Any]) -> None:
    x, y = rows()
    aligner = fitted(made(**options), x, y)
    given = [x, y][: len(aligner.crosscoder.widths)]
    shares = []
    for states, again in zip(given, aligner.decode(aligner.codes(x, y)), strict=True):
        total = (states - states.mean(1, keepdim=True)).square().sum((1, 2))
        shares.append((states - again).square().sum((1, 2)) / total)
    fvu = torch.stack(shares).mean(0)
    torch.testing.assert_close(aligner.reconstruction_errors(x, y).mean(1), fvu)
    moments = moments_of(x, y)
    errors = MapErrors(moments.mean_x, moments.mean_y)
    for part in (slice(0, 100), slice(100, ROWS)):
        errors.update(aligner, x[:, part], y[:, part])
    torch.testing.assert_close(errors.compute()["fvu_reconstruction"], fvu)


def test_neither_scales_nor_means_of_the_models_change_a_code() -> None:
    x, y = rows()
    codes = fitted(made(), x, y).codes(x, y)
    moved_x, moved_y = x / 50 + 3, 200 * y - 7
    aligner = fitted(made(), moved_x, moved_y)
    torch.testing.assert_close(aligner.codes(moved_x, moved_y), codes)
    torch.testing.assert_close(aligner.loss(moved_x, moved_y), fitted(made(), x, y).loss(x, y))


def test_rates_of_weights_go_with_the_root_of_the_width() -> None:
    rates = {}
    for width in (64, 256, 1024):
        aligner = SparseAligner(1, width, 16, latents=32)
        optimizer = make_optimizer(partial(torch.optim.AdamW, lr=1e-2), [aligner])
        assert optimizer is not None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rates[width, tuple(parameter.shape)] = group["lr"]
        assert rates[width, (1, width, 32)] == rates[width, (1, 32, 16)] == pytest.approx(0.08 / width**0.5)
        assert rates[width, (1, 1, 32)] == 1e-2


def test_fitting_twice_is_fitting_once() -> None:
    x, y = rows()
    once, twice = fitted(made(), x, y), fitted(fitted(made(), x, y), x, y)
    for name, value in once.state_dict().items():
        assert torch.equal(value, twice.state_dict()[name]), name


def test_the_rows_of_a_planted_dictionary_give_it_back() -> None:
    planted = planted_rows(d_x=24, d_y=16, features=32, own=4, rows=12_000, seed=0)
    x, y, of_x, of_y = planted
    torch.manual_seed(0)
    aligner = fitted(SparseAligner(1, 24, 16, latents=64, active=3), x, y).float()
    diverged = Alignment().train_on_rows(aligner, x.float(), y.float(), 400, 128, seed=0)
    assert diverged.tolist() == [0]
    decoders = [decoder[0].detach().double() for decoder in aligner.crosscoder.decoders]
    norms = [decoder.norm(dim=1) for decoder in decoders]
    cosines = []
    for truth, decoder, norm in zip((of_x, of_y), decoders, norms, strict=True):
        cosines.append(truth @ (decoder / norm[:, None]).T)
    both = torch.minimum(*cosines).amax(1)
    assert (both[8:] > 0.9).double().mean() >= 0.9
    alone_x = cosines[0] * (norms[1] < 0.15 * norms[0])
    alone_y = cosines[1] * (norms[0] < 0.15 * norms[1])
    assert (alone_x[:4].amax(1) > 0.9).sum() + (alone_y[4:8].amax(1) > 0.9).sum() >= 7

    held_out = planted_rows(d_x=24, d_y=16, features=32, own=4, rows=2000, seed=0, rows_seed=9)
    active = aligner.eval().codes(held_out[0].float(), held_out[1].float()) > 0
    assert active.double().sum(2).mean().item() == pytest.approx(3, rel=0.1)
    errors = aligner.reconstruction_errors(held_out[0].float(), held_out[1].float())
    assert errors.mean() < 0.15


def test_the_threshold_suits_averaged_weights_and_last_ones() -> None:
    x, y = related_rows(1, 4000, 12, 12)
    y = y + 0.5 * y.square()
    for averaging in (True, False):
        aligner = fitted(SparseAligner(1, 12, 12, latents=96, active=4), x, y).float()
        Alignment(averaging=averaging).train_on_rows(aligner, x.float(), y.float(), 200, 128, seed=0)
        active = aligner.codes(x.float(), y.float()) > 0
        assert active.double().sum(2).mean().item() == pytest.approx(4, rel=0.1)


def test_a_map_is_not_invertible_and_says_what_is_dead() -> None:
    x, y = rows()
    aligner: Aligner = fitted(made(), x, y)
    with pytest.raises(NotImplementedError, match="SparseAligner has no inverse"):
        aligner.inverse(y)
    assert aligner.findings() == {"dead_latents": [0.0, 0.0]}
    made_dead = made()
    made_dead.crosscoder.since[1, :8] = made_dead.dead_after
    assert made_dead.findings() == {"dead_latents": [0.0, 0.25]}


def test_a_paired_dictionary_gives_back_what_the_map_does() -> None:
    x, y = rows()
    aligner = fitted(made(own=0.25), x, y)
    with torch.no_grad():
        for shift in aligner.crosscoder.shifts:
            shift += 0.3
    codes = aligner.codes(x, y)
    paired = aligner.paired()
    again_x, again_y = aligner.decode(codes)
    torch.testing.assert_close(codes @ paired.decoder_x + paired.bias_x[:, None], again_x)
    torch.testing.assert_close(codes @ paired.decoder_y + paired.bias_y[:, None], again_y)
    with pytest.raises(ValueError, match="of both models, but got one of x alone"):
        made(of="x").paired()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(made, of="y"), "`of` to be one of both, x, but got 'y'"),
        (partial(made, of="x", own=0.2), r"`own`.*at most 0.*got 0\.2"),
        (partial(made, active=33), r"`active`.*at most 32.*got 33"),
    ],
)
def test_options_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
