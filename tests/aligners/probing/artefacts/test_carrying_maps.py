"""The maps that artefacts are carried with."""

import numpy as np
import pytest
import torch
from tests.aligners.probing.artefacts.made import ARTEFACTS, WIDTH, draw, head, paired

from aligners.maps.solvers import STRENGTHS
from aligners.probing.artefacts.carrying_maps import MAPS, PairedRows, answers_missed, fit_maps, forward_map


def test_a_ridge_towards_the_identity_is_the_textbook_one() -> None:
    """Against NumPy: argmin ‖YW − X‖² + λ Σ_i ‖Y_i‖² ‖W_i − I_i‖² on centred rows."""
    fitting, validation = paired("rotated", noise=0.5), paired("rotated", noise=0.5, seed=7)
    (fitted,) = fit_maps(head(), fitting, validation, ["ridge_identity"])
    assert fitted.strength in STRENGTHS
    x, y = fitting.old.double().numpy(), fitting.new.double().numpy()
    x_mean, y_mean = x.mean(0), y.mean(0)
    sizes = np.linalg.norm(y - y_mean, axis=0)
    if fitted.common:
        sizes = np.full_like(sizes, np.sqrt(np.square(sizes).mean()))
    penalty = np.sqrt(fitted.strength) * np.diag(sizes)
    system = np.vstack([y - y_mean, penalty])
    target = np.vstack([x - x_mean, penalty])
    expected = np.linalg.lstsq(system, target, rcond=None)[0]
    got = fitted.back(validation.new[None])[0].double().numpy()
    np.testing.assert_allclose(got, (validation.new.numpy() - y_mean) @ expected + x_mean, atol=1e-4)


def test_a_chosen_map_is_fitted_on_all_rows_with_its_strength() -> None:
    fitting, validation = paired("rotated", noise=0.5), paired("rotated", noise=0.5, seed=7)
    (chosen,) = fit_maps(head(), fitting, validation, ["ridge"])
    both = [torch.cat([getattr(part, name) for part in (fitting, validation)]) for name in ("old", "new", "text")]
    again, rows = chosen.refitted(fitting, validation), PairedRows(*both).moments
    sizes = rows.xx[0].diagonal()
    if chosen.common:
        sizes = sizes.mean().expand(WIDTH)
    system = rows.xx[0] + chosen.strength * sizes.diag()
    torch.testing.assert_close(
        again.back.weight[0].double(), torch.linalg.solve(system, rows.xy[0]), rtol=1e-4, atol=1e-5
    )
    assert (again.name, again.strength, again.error) == ("ridge", chosen.strength, chosen.error)


def test_few_rows_of_a_small_update_leave_the_artefact_nearly_as_it_is() -> None:
    """Where ridge towards 0 forgets, ridge towards the identity does not."""
    old, noise = draw(400, WIDTH), 0.05 * draw(400, WIDTH, seed=5)
    rows = PairedRows(old, old + noise, torch.arange(400))
    few, rest = rows.at(rows.text[:11]), rows.at(rows.text[11:])
    errors = {fitted.name: fitted.error for fitted in fit_maps(head(), few, rest)}
    assert errors["ridge_identity"] < 1.1 * errors["identity"]
    assert errors["ridge_identity"] < errors["ridge"] / 2
    assert "linear" not in errors
    (shifted,) = fit_maps(head(), few, rest, ["ridge_identity"])
    assert shifted.strength == STRENGTHS[-1]  # the shift alone would do


@pytest.mark.parametrize("update", ["rotated", "permuted", "wider"])
def test_the_best_map_is_exact_where_there_is_one(update: str) -> None:
    fitted = fit_maps(ARTEFACTS["network"], paired(update), paired(update, seed=8))
    assert fitted[0].error < 1e-6
    assert [entry.error for entry in fitted] == sorted(entry.error for entry in fitted)
    assert ("identity" in [entry.name for entry in fitted]) == (update != "wider")


def test_forward_maps_lead_the_other_way() -> None:
    fitting, validation = paired("rotated"), paired("rotated", seed=8)
    for name in set(MAPS) - {"identity", "shift"}:
        there = forward_map(name, fitting, validation)
        torch.testing.assert_close(there(validation.old[None])[0], validation.new, rtol=1e-2, atol=1e-2)


def test_forward_maps_do_not_see_a_few_huge_states() -> None:
    """As those of first tokens, hundreds of times as far from all others as these from one another."""
    fitting, validation = paired("rotated"), paired("rotated", seed=8)
    fitting.new[::20] += 1e4 * draw(1, WIDTH)
    there = forward_map("ridge", fitting, validation)
    torch.testing.assert_close(there(validation.old[None])[0], validation.new, rtol=1e-2, atol=1e-2)


def test_a_constant_misses_all_of_the_variance() -> None:
    answers = draw(50, 3) + 100
    assert answers_missed(answers, answers.mean(0).expand(50, 3)) == pytest.approx(1)
    assert answers_missed(answers, answers) == 0


def test_too_few_rows_and_impossible_maps() -> None:
    few = paired("wider", n=8)
    with pytest.raises(ValueError, match="at least 18 fitting rows"):
        fit_maps(head(), few, few, ["linear"])
    with pytest.raises(ValueError, match="leads from width 16 to width 12"):
        fit_maps(head(), few, few, ["identity"])
    with pytest.raises(ValueError, match="Expected `maps` out of"):
        fit_maps(head(), few, few, ["lineal"])
