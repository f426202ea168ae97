import math
from typing import Any

import pytest
import torch
from tests.runs import related_rows
from torch import Tensor

from aligners.fitting.alignment import Alignment
from aligners.maps.couplings import AffineCoupling
from aligners.maps.inn import INN
from aligners.maps.linear import Procrustes
from aligners.maps.solvers import RIDGES, ridge_regression
from aligners.maps.starting_maps import feature_deviations
from aligners.similarity.algebra.moments import Moments, moments_of

SITES, ROWS = 2, 40
PLAIN: dict[str, Any] = {"mixing": "none", "start": "identity", "both_ways": False}
LEARNED: dict[str, Any] = {"mixing": "linear", "start": "procrustes"}
FORMS = [PLAIN, {}, {"couplings": 3, "depth": 2, "start": "linear", "both_ways": False}, LEARNED]
NAMES = ["plain", "ours", "started linear", "learned matrices"]

every_form = pytest.mark.parametrize("options", FORMS, ids=NAMES)
every_width = pytest.mark.parametrize("width", [2, 7])


def rows(width: int, sites: int = SITES) -> tuple[Moments, Tensor, Tensor]:
    x, y = related_rows(sites, ROWS, width, width)
    return moments_of(x, y), x, y


def moved(width: int, options: dict[str, Any], by: float = 0.1) -> INN:
    """Fitted, in float64, and every weight off its starting point."""
    torch.manual_seed(0)
    aligner = INN(SITES, width, width, **options).double()
    aligner.fit(rows(width)[0])
    with torch.no_grad():
        for weight in aligner.parameters():
            weight += by * torch.randn_like(weight)
    return aligner


@every_form
@every_width
def test_inverse_is_exact_on_both_sides_and_in_low_precision_as_exact(options: dict[str, Any], width: int) -> None:
    aligner, (_, x, y) = moved(width, options), rows(width)
    torch.testing.assert_close(aligner.inverse(aligner(x)), x, rtol=0, atol=1e-10)
    torch.testing.assert_close(aligner(aligner.inverse(y)), y, rtol=0, atol=1e-10)
    # the map is not a trivial one
    assert (aligner(2 * x) - 2 * aligner(x) + aligner(0 * x)).abs().max() > 1e-3
    aligner, x = aligner.float(), x.float()
    torch.testing.assert_close(aligner.inverse(aligner(x)), x, rtol=0, atol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mapped = aligner(x)
        torch.testing.assert_close(mapped, aligner(x), rtol=0, atol=0)
        torch.testing.assert_close(aligner.inverse(mapped), x, rtol=0, atol=1e-3)
    assert mapped.dtype == aligner(x.bfloat16()).dtype == torch.float32


@every_form
@every_width
def test_log_det_is_that_of_the_jacobian(options: dict[str, Any], width: int) -> None:
    aligner, (_, x, _) = moved(width, options), rows(width)
    found = aligner.log_det(x)
    assert found.shape == (SITES, ROWS)
    for row in range(3):
        jacobian = torch.autograd.functional.jacobian(lambda v: aligner(v[:, None])[:, 0], x[:, row])
        for site in range(SITES):
            expected = torch.linalg.slogdet(jacobian[site, :, site]).logabsdet
            assert found[site, row].item() == pytest.approx(expected.item(), abs=1e-9)


@every_width
@pytest.mark.parametrize("mixing", ["rotation", "linear"])
def test_starts_exactly_at_the_closed_form_map(width: int, mixing: Any) -> None:
    x = rows(width)[1]
    near_identity = torch.eye(width, dtype=torch.float64) + 0.3 * torch.linalg.qr(x[:, :width]).Q
    moments = moments_of(x, x @ near_identity + 2)  # well conditioned, so that nothing is raised
    procrustes = Procrustes(SITES, width, width).double()
    ours = INN(SITES, width, width, mixing=mixing, start="procrustes").double()
    procrustes.fit(moments)
    ours.fit(moments)
    assert ours.start_names() == ["procrustes"] * SITES
    scale = ours.scaling.scale_y / ours.scaling.scale_x
    rotated = (procrustes(x) - procrustes.mean_y) * scale + procrustes.mean_y
    torch.testing.assert_close(ours(x), rotated, rtol=0, atol=1e-10)
    linear = INN(SITES, width, width, mixing=mixing, start="linear").double()
    linear.fit(moments)
    weight = ridge_regression(moments, RIDGES)[0]
    fitted = (x - moments.mean_x[:, None]) @ weight + moments.mean_y[:, None]
    torch.testing.assert_close(linear(x), fitted, rtol=0, atol=1e-10)
    linear.fit(moments.swap())  # and again, wherever an earlier fit has left it
    linear.fit(moments)
    torch.testing.assert_close(linear(x), fitted, rtol=0, atol=1e-9)
    plain = INN(SITES, width, width, **PLAIN).double()
    plain.fit(moments)
    torch.testing.assert_close(plain.scaling.scale_target(plain(x)), plain.scaling.scale(x), rtol=0, atol=1e-10)


def test_the_linear_start_raises_what_regression_shrinks_to_nothing() -> None:
    x, y = torch.randn(2, 1, 400, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y[..., :2] = x[..., :2]
    aligner = INN(1, 5, 5, start="linear").double()
    moments = moments_of(x, torch.cat((y[..., :4], torch.zeros(1, 400, 1)), -1))
    aligner.fit(moments)
    jacobian = aligner(torch.eye(5, dtype=torch.float64)[None])[0] - aligner(torch.zeros(1, 1, 5).double())[0]
    of_x, of_y = (feature_deviations(scatter)[0] for scatter in (moments.xx, moments.yy))
    singular = torch.linalg.svdvals(jacobian * of_x[:, None] / of_y)
    assert (singular[-1] / singular[0]).item() == pytest.approx(0.03, rel=1e-6)


@every_form
def test_states_on_a_hyperplane_leave_a_start_that_can_be_inverted(options: dict[str, Any]) -> None:
    """Behind a LayerNorm the covariance is exactly singular."""
    x, y = (torch.nn.functional.layer_norm(part, (8,)) for part in related_rows(SITES, 200, 8, 8))
    aligner = INN(SITES, 8, 8, **options)
    aligner.fit(moments_of(x, y))
    x = x.float()
    torch.testing.assert_close(aligner.inverse(aligner(x)), x, rtol=0, atol=1e-4)
    assert aligner.inverse(y.float()).abs().max() < 100


@pytest.mark.parametrize("way", ["forward", "inverse"])
def test_gradients_of_a_coupling_are_those_of_finite_differences(way: str) -> None:
    torch.manual_seed(0)
    coupling = AffineCoupling(SITES, 3, 2, hidden=4, depth=1).double()
    torch.nn.init.normal_(coupling.conditioner.last.weight)
    kept = torch.randn(SITES, 5, 3, dtype=torch.float64, requires_grad=True)
    changed = torch.randn(SITES, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(getattr(coupling, way), (kept, changed))


def test_nothing_overflows() -> None:
    coupling = AffineCoupling(1, 4, 4, hidden=8, depth=1)
    torch.nn.init.normal_(coupling.conditioner.last.weight, std=100)
    kept, changed = 1e6 * torch.randn(1, 50, 4), torch.randn(1, 50, 4)
    log_scale = coupling.log_scale(kept)
    assert log_scale.abs().max() <= 1
    assert log_scale.abs().max() > 0.99
    assert coupling(kept, changed).isfinite().all()
    stretched = (coupling(kept, changed + 1e9) - coupling(kept, changed)) / 1e9
    assert stretched.max() < math.e * 1.01


def test_what_makes_no_network_is_refused() -> None:
    for width, options, message in (
        (1, {}, "`d_x` is 1"),
        (4, {"couplings": 0}, "`couplings`.*0"),
        (4, {"hidden": 0}, "`hidden`.*0"),
        (4, {"depth": 0}, "`depth`.*0"),
        (4, {"mixing": "lu"}, "`mixing`.*none, rotation, linear.*'lu'"),
        (4, {"start": "cca"}, "`start`.*identity, procrustes, linear, covariance, best.*'cca'"),
        (4, {"mixing": "none", "start": "procrustes"}, "`start` is 'procrustes'"),
    ):
        with pytest.raises(ValueError, match=message):
            INN(SITES, width, width, **options)  # type: ignore[arg-type]


def test_few_rows_a_step_do_not_throw_training_off() -> None:
    draw = torch.Generator().manual_seed(0)
    spread = 0.7 ** torch.arange(16.0)
    turn, other = torch.linalg.qr(torch.randn(2, 16, 16, generator=draw)).Q
    latent = torch.randn(2000, 16, generator=draw)
    x, y = (latent * spread @ turn)[None], ((latent + 0.3 * latent.roll(1, -1).square()) * spread @ other)[None]
    torch.manual_seed(0)
    aligner = INN(1, 16, 16, couplings=2)
    aligner.fit(moments_of(x, y))
    with torch.no_grad():
        start = aligner.loss(x, y)
    assert Alignment().train_on_rows(aligner, x, y, 60, 4, seed=0).tolist() == [0]
    assert aligner.loss(x, y) < start


def test_a_network_of_an_earlier_version_maps_as_it_did() -> None:
    aligner, x = moved(7, {}), rows(7)[1]
    assert (aligner.first - torch.eye(7)).abs().max() > 0.01
    for matrix in (aligner.first, aligner.first_inverse):
        matrix.copy_(torch.eye(7))
    kept = {name: value for name, value in aligner.state_dict().items() if not name.startswith("first")}
    again = INN(SITES, 7, 7).double()
    again.fit(rows(7)[0])
    again.load_state_dict(kept)
    torch.testing.assert_close(again(x), aligner(x), rtol=0, atol=0)
    torch.testing.assert_close(again.inverse(x), aligner.inverse(x), rtol=0, atol=0)
