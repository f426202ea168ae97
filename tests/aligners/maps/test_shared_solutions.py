"""Maps fitted to the same moments decompose what they share once, in both directions, and are the same maps."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.runs import related_rows
from tests.tiny import tiny_frozen

from aligners.fitting.fits import Fit, fit_map
from aligners.fitting.saved_bank import BACKWARD, FORWARD, StoredBank
from aligners.injection import methods
from aligners.injection.methods import CLOSED_FORMS, ClosedForms, route_methods
from aligners.injection.routes import Route, build_routes
from aligners.maps import shared_solutions
from aligners.maps.base import Aligner
from aligners.maps.canonical import CCA, PWCCA, SVCCA
from aligners.maps.shared_solutions import SharedMoments
from aligners.similarity.algebra.moments import Moments, moments_of

SITES, D_X, D_Y = 2, 6, 7
FACTORIES: dict[str, Callable[..., Aligner]] = {
    "cca": CCA,
    "few": partial(CCA, directions=3),
    "pwcca": partial(PWCCA, share=0.9),
    "svcca": partial(SVCCA, share=0.8),
    "shrunk": partial(SVCCA, share=0.8, shrink=True),
    "whole": partial(SVCCA, share=1.0),
    "coarse": partial(CCA, tolerance=0.05),
}


def moments(n: int = 200) -> Moments:
    return moments_of(*related_rows(SITES, n, D_X, D_Y))


def made(name: str, route: str) -> Fit:
    sizes = (D_X, D_Y) if route == FORWARD else (D_Y, D_X)
    return Fit(name, route, FACTORIES[name](SITES, *sizes).double())


def test_maps_that_share_are_those_that_do_not() -> None:
    given = moments()
    shared = SharedMoments.of(given)
    with patch.object(shared_solutions, "canonical", side_effect=shared_solutions.canonical) as solved:
        for route in (BACKWARD, FORWARD):
            for name in FACTORIES:
                fit, alone = made(name, route), made(name, route)
                fit_map(name, fit.aligner, *fit.moments(shared))
                before = solved.call_count
                fit_map(name, alone.aligner, *alone.moments(given))
                assert solved.call_count == before + 1
                for key, value in alone.aligner.state_dict().items():
                    there = fit.aligner.state_dict()[key]
                    torch.testing.assert_close(
                        there, value, rtol=1e-10, atol=1e-11, equal_nan=True, msg=f"{name} {key}"
                    )
    # of share 1, of share .8, and of another tolerance
    assert solved.call_count == 3 + 2 * len(FACTORIES)


def test_what_is_made_of_shared_moments_remembers_nothing_of_them() -> None:
    shared = SharedMoments.of(moments())
    shared.canonical(1.0, 1e-10)
    other = moments(60)
    changed = shared._replace(n=other.n, xx=other.xx, yy=other.yy, xy=other.xy)
    found, _, _ = changed.canonical(1.0, 1e-10)
    alone = shared_solutions.canonical_solution(other, 1.0, 1e-10).found
    torch.testing.assert_close(found.rho, alone.rho, rtol=0, atol=0)


def test_each_map_is_refused_on_its_own() -> None:
    shared = SharedMoments.of(moments(10))
    for _ in range(2):
        with pytest.raises(ValueError, match="Expected at least 14 fitting rows"):
            SVCCA(SITES, D_X, D_Y, share=1.0).fit(shared)
    SVCCA(SITES, D_X, D_Y, share=0.3).fit(shared)


def two_routes() -> list[Route]:
    models = [tiny_frozen(seed=seed) for seed in (0, 1)]
    return build_routes(models, [1, 2], "different")


def stored(routes: list[Route], n: int = 300) -> StoredBank:
    width = routes[0].source.width
    rows = related_rows(2, n, width, width)
    data = {"rows": "tokens", "special_tokens": True}
    return StoredBank("fit", {}, {}, data, {}, moments_of(*rows))


def test_closed_forms_before_an_injection_share_too() -> None:
    routes = two_routes()
    bank = stored(routes)
    shared = SharedMoments.of(bank.moments)  # type: ignore[arg-type]
    for given, solves in ((None, 2), (shared, 1)):  # of CCA and PWCCA, and of SVCCA; of both routes together
        count = 0
        for route in routes:
            with patch.object(shared_solutions, "canonical", side_effect=shared_solutions.canonical) as solved:
                found, refusals = route_methods(route, [bank], list(CLOSED_FORMS), None, given)
            count += solved.call_count
            assert refusals == {}
            check(found, route, bank)
        assert count == 2 * solves


def check(found: list[methods.Method], route: Route, bank: StoredBank) -> None:
    """Each is the closed form alone."""
    assert [method.name for method in found] == list(CLOSED_FORMS)
    own = bank.moments if route.key == FORWARD else bank.moments.swap()  # type: ignore[union-attr]
    for method in found:
        alone = CLOSED_FORMS[method.name](*route.sizes)
        fit_map(method.name, alone, own)
        for key, value in alone.state_dict().items():
            there = method.aligner.state_dict()[key]  # type: ignore[union-attr]
            torch.testing.assert_close(there, value, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"{method.name} {key}")


def test_closed_forms_before_an_injection_are_solved_on_the_device() -> None:
    route, _ = two_routes()
    bank = stored([route])
    met: list[str] = []

    def noted(name: str, aligner: Aligner, *given: Any, **rows: Any) -> None:
        for moments in given:
            met.extend(part.device.type for part in moments)
        met.extend(part.device.type for part in aligner.state_dict().values())

    validation = bank.moments
    there = SharedMoments.of(bank.moments.to("meta"))  # type: ignore[union-attr]
    with patch.object(methods, "fit_map", noted):
        route_methods(route, [bank], ["procrustes"], validation, there)
    assert len(met) == 2 * 6 + 4
    assert set(met) == {"meta"}


def test_those_of_a_fit_are_shared_too() -> None:
    run = ClosedForms({"cca": CCA, "pwcca": PWCCA}, both_directions=True)
    run.build(SITES, D_X, D_Y)
    given = moments()
    with patch.object(shared_solutions, "canonical", side_effect=shared_solutions.canonical) as solved:
        run.fit_moments(given, None)
    assert solved.call_count == 1
    assert type(run.moments) is Moments  # what is kept remembers nothing
