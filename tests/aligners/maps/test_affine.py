from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.rows import fitted
from tests.runs import related_rows
from torch import Tensor
from torch.nn.functional import layer_norm

from aligners.maps.affine import AffineLayer, LowRank, Orthogonal
from aligners.maps.base import Aligner
from aligners.maps.canonical import CCA
from aligners.maps.linear import Affine, Identity, Linear, Permutation, Procrustes
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import moments_of

SITES, ROWS, WIDTH = 2, 400, 12


def rows(d_x: int = WIDTH, d_y: int = WIDTH) -> tuple[Tensor, Tensor]:
    return related_rows(SITES, ROWS, d_x, d_y)


def fvu(mapped: Tensor, y: Tensor) -> Tensor:
    return (mapped - y).square().sum((1, 2)) / (y - y.mean(1, keepdim=True)).square().sum((1, 2))


STARTS: list[tuple[Any, type[Aligner]]] = [("linear", Linear), ("procrustes", Procrustes), ("identity", Identity)]


def test_a_start_is_the_closed_form_of_its_name_and_without_moments_the_identity_is_exact() -> None:
    x, y = rows()
    cases = [*((AffineLayer, *start, WIDTH) for start in STARTS), *((AffineLayer, *start, 7) for start in STARTS[:2])]
    for kind, start, like, d_y in (*cases, *((Orthogonal, *start, WIDTH) for start in STARTS[1:])):
        layer = fitted(kind(SITES, WIDTH, d_y, start=start), x, y[..., :d_y])
        torch.testing.assert_close(layer(x), fitted(like(SITES, WIDTH, d_y), x, y[..., :d_y])(x))
    for kind in (AffineLayer, Orthogonal):
        assert torch.equal(kind(SITES, WIDTH, WIDTH, start="identity")(x.float()), x.float())  # type: ignore[operator]


def test_a_random_start_stays_what_was_drawn() -> None:
    for kind, options in ((AffineLayer, {}), (LowRank, {"rank": 3}), (Orthogonal, {})):
        layer = kind(SITES, WIDTH, WIDTH, start="random", **options)
        drawn = {name: value.clone() for name, value in layer.named_parameters()}
        layer.fit(moments_of(*rows()))
        assert all(torch.equal(value, drawn[name]) for name, value in layer.named_parameters())


def test_random_rotations_turn_both_ways() -> None:
    signs = set()
    for seed in range(12):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            rotation = Orthogonal(1, 5, 5, start="random").rotation()[0]
        torch.testing.assert_close(rotation @ rotation.T, torch.eye(5))
        signs.add(round(torch.linalg.det(rotation).item()))
    assert signs == {-1, 1}


# ---------------------------------------------------------------------- norm


def test_behind_a_norm_a_start_is_nearly_the_closed_form() -> None:
    """What is lost: two directions out of 48, of little variance in Y, and rows of unusual length."""
    x, y = related_rows(SITES, 600, 48, 48)
    for start, like in STARTS:
        layer = fitted(AffineLayer(SITES, 48, 48, start=start, norm=True), x, y)
        assert (fvu(layer(x), fitted(like(SITES, 48, 48), x, y)(x)) < 0.07).all()
        level = layer.affine.bias[:, 0]
        torch.testing.assert_close(level.amax(-1), level.abs().amax(-1))  # an eigenvector's sign is not left to chance


def test_states_of_a_layer_norm_are_copied_almost_exactly() -> None:
    x, _ = related_rows(SITES, 600, 48, 48)
    gain, shift = torch.linspace(0.5, 2, 48).double(), torch.linspace(-1, 1, 48).double()
    x = layer_norm(x, (48,)) * gain + shift
    layer = fitted(AffineLayer(SITES, 48, 48, start="identity", norm=True), x, x)
    assert (fvu(layer(x), x) < 0.02).all()
    # and the family holds them exactly, as it holds nothing whose rows differ in length
    with torch.no_grad():
        layer.affine.weight.copy_(torch.diag(1 / gain))
        layer.affine.bias.copy_((layer.scaling.mean_x - shift) / layer.scaling.scale_x / gain)
        layer.gain.copy_(gain / layer.scaling.scale_y)
        layer.shift.copy_((shift - layer.scaling.mean_y) / layer.scaling.scale_y)
    assert (fvu(layer(x), x) < 1e-6).all()


def test_rows_of_other_lengths_pass_a_norm_at_the_start() -> None:
    """As in a residual stream before its norm: a LayerNorm by itself would give every row one length."""
    x, _ = related_rows(SITES, 600, 48, 48)
    x = x - x.mean(1, keepdim=True)
    x = x * torch.exp(0.5 * torch.randn(1, 600, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    layer = fitted(AffineLayer(SITES, 48, 48, start="identity", norm=True), x, x)
    alone = layer_norm(x, (48,))
    alone = alone * (x * alone).sum((1, 2), keepdim=True) / alone.square().sum((1, 2), keepdim=True)
    assert (fvu(layer(x), x) < 0.3 * fvu(alone, x)).all()


def test_a_feature_that_never_varies_is_no_obstacle_to_a_norm() -> None:
    x, y = rows()
    y[..., 3] = 2.0
    layer = fitted(AffineLayer(SITES, WIDTH, WIDTH, norm=True), x, y)
    assert layer(x).isfinite().all()
    assert (layer(x)[..., 3] - 2).abs().max() < 0.05
    plain = fitted(AffineLayer(SITES, WIDTH, WIDTH), x, y)
    torch.testing.assert_close(plain(x)[..., 3], y[..., 3])


# ---------------------------------------------------------------------- low rank


def numpy_reduced_rank(x: Tensor, y: Tensor, rank: int) -> np.ndarray:
    """Fitted values of reduced-rank regression: the projection of Y on X, cut to its leading singular directions."""
    a, b = x.numpy() - x.numpy().mean(0), y.numpy() - y.numpy().mean(0)
    fitted = a @ np.linalg.lstsq(a, b, rcond=None)[0]
    u, s, vh = np.linalg.svd(fitted, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank] + y.numpy().mean(0)


@pytest.mark.parametrize(
    ("start", "d_y", "rank"), [("linear", 12, 5), ("linear", 7, 7), ("linear", 15, 12), ("identity", 12, 4)]
)
def test_a_start_of_low_rank_is_reduced_rank_regression(start: Any, d_y: int, rank: int) -> None:
    x, y = rows(WIDTH, d_y)
    layer = fitted(LowRank(SITES, WIDTH, d_y, rank=rank, ridge=0.0, start=start), x, y)
    target = x if start == "identity" else y  # the leading principal components
    for site, mapped in enumerate(layer(x).detach().numpy()):
        np.testing.assert_allclose(mapped, numpy_reduced_rank(x[site], target[site], rank), atol=1e-6)


# ---------------------------------------------------------------------- orthogonal


def test_every_step_keeps_the_map_orthogonal() -> None:
    x, y = rows()
    layer = Orthogonal(SITES, WIDTH, WIDTH, start="random")
    layer.fit(moments_of(x, y))
    x, y = x.float(), y.float()
    before = fvu(layer(x), y)
    sign = torch.linalg.det(layer.rotation())
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        layer.loss(x, y).sum().backward()
        optimizer.step()
    rotation = layer.rotation()
    assert layer.skew.abs().max() > 0.5  # it went far
    assert layer.skew[0].numel() == WIDTH * (WIDTH - 1) // 2
    assert layer.fan_in("skew", layer.skew) == WIDTH
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(WIDTH).expand(SITES, -1, -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.linalg.det(rotation), sign, rtol=0, atol=1e-4)
    assert (fvu(layer(x), y) < before).all()
    torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- adopt


@pytest.mark.parametrize(("kind", "d_y"), [(Linear, 7), (Procrustes, 12), (Permutation, 12), (CCA, 7)])
def test_a_fitted_map_is_taken_over(kind: type[Affine], d_y: int) -> None:
    x, y = rows(WIDTH, d_y)
    closed_form = fitted(kind(SITES, WIDTH, d_y), x, y)
    others = moments_of(x[:, :200] + 0.5, y[:, :200] * 2)  # of rows with other means and scales
    layer = AffineLayer(SITES, WIDTH, d_y, start="random").double()
    layer.adopt(closed_form, others)
    torch.testing.assert_close(layer(x), closed_form(x))
    if d_y == WIDTH:
        rotation = Orthogonal(SITES, WIDTH, WIDTH).double()
        rotation.adopt(closed_form, others)
        torch.testing.assert_close(rotation(x), closed_form(x))
        torch.testing.assert_close(rotation.inverse(y), closed_form.inverse(y))


def test_what_is_taken_over_with_a_loss_is_what_a_start_gives() -> None:
    x, y = rows()
    moments = moments_of(x, y)
    closed_form = fitted(Linear(SITES, WIDTH, WIDTH), x, y)
    for make in (lambda: LowRank(SITES, WIDTH, WIDTH, rank=5), lambda: AffineLayer(SITES, WIDTH, WIDTH, norm=True)):
        layer, adopted = fitted(make(), x, y), make().double()
        adopted.adopt(closed_form, moments)
        torch.testing.assert_close(adopted(x), layer(x))
        torch.testing.assert_close(adopted.loss(x, y), layer.loss(x, y))


def test_what_cannot_be_taken_over_is_refused() -> None:
    x, y = rows()
    linear = fitted(Linear(SITES, WIDTH, WIDTH), x, y)
    for layer, aligner, says in (
        (AffineLayer(SITES, WIDTH, WIDTH), MLP(SITES, WIDTH, WIDTH), r"`aligner`.*closed form.*but got MLP with"),
        (AffineLayer(SITES, WIDTH, WIDTH), Identity(SITES, WIDTH, WIDTH), r"but got Identity.*set `start`"),
        (AffineLayer(3, WIDTH, WIDTH), linear, r"= \(3, 12, 12\).*Linear with \(2, 12, 12\)"),
        (Orthogonal(SITES, WIDTH, WIDTH), linear, r"keeps lengths.*`aligner`'s WᵀW differs.*Use an AffineLayer"),
    ):
        with pytest.raises(ValueError, match=says):
            layer.adopt(aligner, moments_of(x, y))


# ---------------------------------------------------------------------- what is refused


def test_impossible_options_are_refused() -> None:
    for make, says in (
        (lambda: AffineLayer(1, 4, 4, start="pca"), r"Expected `start`.*identity, linear.*'pca'"),  # type: ignore[arg-type]
        (lambda: AffineLayer(1, 4, 5, start="identity"), r"`d_x` is 4 and `d_y` is 5.*Set `start` to \"linear\""),
        (lambda: LowRank(1, 4, 5, rank=2, start="identity"), r"LowRank can start at the identity only.*equal widths"),
        (lambda: AffineLayer(1, 4, 4, ridge=-1.0), r"`ridge`.*-1"),
        (lambda: Orthogonal(1, 4, 5), r"`d_x` is 4 and `d_y` is 5"),
        (lambda: Orthogonal(1, 4, 4, start="linear"), r"Expected `start`.*identity, procrustes, random.*'linear'"),
        *((partial(LowRank, 1, 8, 7, rank=rank), rf"`rank`.*at least 1.*at most 7.*got {rank}") for rank in (0, -1, 8)),
    ):
        with pytest.raises(ValueError, match=says):
            make()


def test_constant_states_are_refused_and_a_linear_start_needs_more_rows_than_unknowns() -> None:
    x, y = rows()
    for layer in (AffineLayer(SITES, WIDTH, WIDTH), Orthogonal(SITES, WIDTH, WIDTH, start="random")):
        with pytest.raises(ValueError, match=r"states of X to vary.*12 of 12 neurons.*site pair number 0"):
            layer.fit(moments_of(torch.ones_like(x), y))
    assert AffineLayer(1, 9, 9).rows_needed == 10
    assert AffineLayer(1, 9, 9, start="identity").rows_needed == 2
