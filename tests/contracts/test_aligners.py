"""What every aligner must keep, whatever it is: one suite over the registry."""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runs import related_rows
from torch import Tensor

import aligners.fitting.universe.universe  # which registers the maps through a space before any test begins
from aligners.fitting.saved_bank import build_aligner, describe_aligner
from aligners.fitting.steps import clip_per_site
from aligners.maps.base import Aligner
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.maps.mlp import FreeForm
from aligners.similarity.algebra.moments import moments_of

SITES, ROWS, WIDTH, OTHER = 3, 96, 6, 5
CLIP = 0.02

# Every aligner, in every form that differs in more than size.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "identity": ("Identity", {}),
    "mean": ("Mean", {}),
    "linear": ("Linear", {"ridge": 1e-4}),
    "ridge": ("Ridge", {}),
    "procrustes": ("Procrustes", {}),
    "procrustes, scaled": ("Procrustes", {"scale": True}),
    "permutation": ("Permutation", {}),
    "permutation, signed": ("Permutation", {"signed": True}),
    "reduced rank": ("ReducedRank", {"rank": 2, "ridge": 1e-4}),
    "reduced rank, by share": ("ReducedRank", {"share": 0.9}),
    "soft matching": ("SoftMatching", {}),
    "nearest neighbours": ("NearestNeighbours", {"k": 3, "rows": 64}),
    "nearest neighbours, weighted": ("NearestNeighbours", {"k": 5, "weighted": True, "rows": 80, "seed": 1}),
    "kernel ridge": ("KernelRidge", {"landmarks": 24, "rows": 80}),
    "relative": ("Relative", {"anchors": 16, "rows": 80}),
    "relative, inverted": ("Relative", {"anchors": 16, "rows": 80, "decode": "inverse"}),
    "cca": ("CCA", {}),
    "cca, some directions": ("CCA", {"directions": 3, "tolerance": 1e-8}),
    "cca, shrunk": ("CCA", {"shrink": True}),
    "svcca": ("SVCCA", {"share": 0.9}),
    "svcca, shrunk": ("SVCCA", {"directions": 2, "shrink": True, "tolerance": 1e-8}),
    "pwcca": ("PWCCA", {"share": 0.8}),
    "pwcca, shrunk": ("PWCCA", {"share": 0.8, "shrink": True, "tolerance": 1e-8}),
    "mlp": ("MLP", {}),
    "mlp of the paper": ("MLP", {"skip": False}),
    "mlp of a size": ("MLP", {"parameters": 200}),
    "free form": ("FreeForm", {"parameters": 300, "cycle": 0.5}),
    "free form without cycles": ("FreeForm", {"parameters": 300, "cycle": 0.0}),
    "inn of the paper": (
        "INN",
        {"couplings": 3, "hidden": 7, "mixing": "none", "start": "identity", "both_ways": False},
    ),
    "inn": ("INN", {"couplings": 2, "hidden": 7}),
    "inn, learned matrices": ("INN", {"couplings": 2, "hidden": 7, "mixing": "linear", "start": "procrustes"}),
    "inn, started linear": ("INN", {"couplings": 2, "hidden": 7, "start": "linear", "both_ways": False}),
    # started where steps can still lead somewhere: `tests/aligners/maps/test_affine.py` has the other starts
    "affine": ("AffineLayer", {"start": "procrustes"}),
    "affine, drawn": ("AffineLayer", {"start": "random"}),
    "affine and norm": ("AffineLayer", {"norm": True}),
    "affine and norm, drawn": ("AffineLayer", {"norm": True, "start": "random"}),
    "low rank": ("LowRank", {"rank": 3, "start": "procrustes"}),
    "low rank, drawn": ("LowRank", {"rank": 2, "start": "random"}),
    "orthogonal": ("Orthogonal", {"start": "identity"}),
    "orthogonal, drawn": ("Orthogonal", {"start": "random"}),
    "sparse": ("SparseAligner", {"latents": 24, "active": 3}),
    "sparse, own": ("SparseAligner", {"latents": 24, "active": 3, "own": 0.25, "dead_after": 64}),
    "sparse, l1": ("SparseAligner", {"latents": 24, "selection": "l1", "penalty": 0.1, "active": 3}),
    "sparse, of x": ("SparseAligner", {"latents": 24, "active": 3, "of": "x"}),
    "through a space": ("ThroughSpace", {"network": {"class": "INN", "options": {"couplings": 2, "hidden": 7}}}),
    "shared part": (
        "SharedPart",
        {"widths": [6], "networks": {"6": {"class": "INN", "options": {"couplings": 2, "hidden": 7}}}},
    ),
    "two linear": ("TwoLinear", {}),
    "through a linear space": ("ThroughSpace", {"network": {"class": "Procrustes", "options": {"scale": True}}}),
}
BY_GRADIENT = (
    *("inn", "through a space", "shared part", "mlp", "free form"),
    *("affine", "low rank", "orthogonal", "sparse"),
)


def known() -> dict[str, type[Aligner]]:
    """The registry once every module is imported, without what tests and other aligners' bases add to it."""
    for module in pkgutil.iter_modules(aligners.__path__, "aligners."):
        importlib.import_module(module.name)
    return {
        name: cls
        for name, cls in Aligner.registry.items()
        if cls.__module__.startswith("aligners.") and not inspect.isabstract(cls)
    }


def build(case: str, sites: int = SITES, d_x: int = WIDTH, d_y: int = WIDTH, seed: int = 0) -> Aligner:
    name, options = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return known()[name](sites, d_x, d_y, **options)


def rows(d_y: int = WIDTH) -> tuple[Tensor, Tensor]:
    return related_rows(SITES, ROWS, WIDTH, d_y)


def fit(aligner: Aligner, x: Tensor, y: Tensor) -> None:
    """From the moments, and from rows where the map needs them."""
    moments = moments_of(x, y)
    if isinstance(aligner, ByRows):
        aligner.fit(moments, PairedRows.drawn(x, y, aligner.rows, aligner.seed))
    else:
        aligner.fit(moments)


def ready(case: str, d_y: int = WIDTH) -> Aligner:
    """Fitted, in float64, and moved off its starting point as training would."""
    aligner = build(case, d_y=d_y).double()
    fit(aligner, *rows(d_y))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in aligner.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=draw, dtype=torch.float64)
    return aligner


def trained(aligner: Aligner, x: Tensor, y: Tensor) -> tuple[Aligner, list[Tensor]]:
    """A few dozen steps as `Alignment` takes them; also the gradients' norms."""
    aligner = aligner.double()
    fit(aligner, x, y)
    optimizer = torch.optim.AdamW(aligner.parameters(), lr=2e-3, weight_decay=1e-2)
    norms = []
    for step in range(36):
        part = slice(step % 3 * 32, step % 3 * 32 + 32)
        optimizer.zero_grad()
        aligner.loss(x[:, part], y[:, part]).sum().backward()
        norms.append(clip_per_site(aligner, CLIP))
        optimizer.step()
        aligner.settle(x[:, part], y[:, part])
    return aligner, norms


every = pytest.mark.parametrize("case", list(CASES))
gradient_trained = pytest.mark.parametrize("case", [case for case in CASES if case.startswith(BY_GRADIENT)])


def test_the_table_covers_the_registry() -> None:
    assert {name for name, _ in CASES.values()} == set(known())
    by_gradient = {case for case in CASES if not build(case).closed_form}
    assert by_gradient == set(gradient_trained.args[1])


@every
@pytest.mark.parametrize("d_y", [WIDTH, OTHER])
def test_shapes_or_a_refusal_of_unequal_widths(case: str, d_y: int) -> None:
    if known()[CASES[case][0]].needs_equal_width and d_y != WIDTH:
        with pytest.raises(ValueError, match=rf"`d_x` is {WIDTH} and `d_y` is {d_y}.*Linear or MLP"):
            build(case, d_y=d_y)
        return
    aligner = build(case, d_y=d_y)
    x, y = rows(d_y)
    fit(aligner, x, y)
    mapped = aligner(x.float())
    assert mapped.shape == y.shape
    assert mapped.dtype == torch.float32
    assert mapped.isfinite().all()
    assert (aligner.sites, aligner.d_x, aligner.d_y) == (SITES, WIDTH, d_y)
    if aligner.invertible:
        assert aligner.inverse(y.float()).shape == x.shape
    elif d_y == WIDTH:
        with pytest.raises(NotImplementedError, match=CASES[case][0]):
            aligner.inverse(y.float())


@every
def test_sites_are_independent(case: str) -> None:
    aligner, (x, y) = ready(case), rows()
    maps: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [(aligner, x)]
    if aligner.invertible:
        maps.append((aligner.inverse, y))
    for function, states in maps:
        changed = states.clone()
        changed[1] = torch.nan
        before, after = function(states), function(changed)
        assert torch.equal(before[[0, 2]], after[[0, 2]])
        torch.testing.assert_close(function(states[:, :7]), before[:, :7])  # and so are rows


@gradient_trained
def test_gradients_reach_every_parameter_of_every_site(case: str) -> None:
    aligner = ready(case)
    loss = aligner.loss(*rows())
    assert loss.shape == (SITES,)
    loss.sum().backward()
    for name, weight in aligner.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad.flatten(1).abs().amax(1) > 0).all(), name


@every
def test_closed_forms_have_nothing_to_train(case: str) -> None:
    aligner = build(case)
    assert aligner.closed_form == (not any(weight.requires_grad for weight in aligner.parameters()))
    if aligner.closed_form:
        with pytest.raises(NotImplementedError, match="closed form"):
            aligner.loss(*rows())


@pytest.mark.parametrize("case", [case for case in gradient_trained.args[1] if not case.startswith("sparse")])
def test_loss_is_the_fvu(case: str) -> None:
    aligner, (x, y) = ready(case), rows()

    def fvu(mapped: Tensor, target: Tensor) -> Tensor:
        total = (target - target.mean(1, keepdim=True)).square().sum((1, 2))
        return (mapped - target).square().sum((1, 2)) / total

    expected = fvu(aligner(x), y)
    if aligner.both_ways:
        expected = expected + fvu(aligner.inverse(y), x)
    if isinstance(aligner, FreeForm):
        round_trips = fvu(aligner.inverse(aligner(x)), x) + fvu(aligner(aligner.inverse(y)), y)
        expected = expected + aligner.cycle * round_trips
    torch.testing.assert_close(aligner.loss(x, y), expected)


@gradient_trained
def test_rows_that_only_fill_a_batch_up_count_for_nothing(case: str) -> None:
    aligner, (x, y) = ready(case), rows()
    through = ("through a space", "shared part", "sparse")
    assert ("real" in inspect.signature(aligner.loss).parameters) == (not case.startswith(through))
    if case.startswith(through):
        return
    expected = aligner.loss(x, y)
    wanted = torch.autograd.grad(expected.sum(), list(aligner.parameters()))
    real = torch.ones(ROWS + 32, dtype=torch.float64)
    real[ROWS:] = 0
    wider = [torch.cat((rows, 9 * rows[:, :32]), 1) for rows in (x, y)]
    loss: Any = aligner.loss
    found = loss(*wider, real)
    gradients = torch.autograd.grad(found.sum(), list(aligner.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient - want).norm() <= 1e-12 * want.norm()


@every
def test_an_exact_inverse_is_exact(case: str) -> None:
    aligner, (x, y) = ready(case), rows()
    assert aligner.invertible or not aligner.bijective
    if aligner.bijective:
        torch.testing.assert_close(aligner.inverse(aligner(x)), x, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(aligner(aligner.inverse(y)), y, rtol=1e-8, atol=1e-8)


@every
def test_a_described_aligner_is_built_again_and_takes_the_state(case: str) -> None:
    aligner, (x, y) = ready(case), rows()
    description = json.loads(json.dumps(describe_aligner(aligner)))
    again = build_aligner(description).double()
    again.load_state_dict(aligner.state_dict())
    assert torch.equal(again(x), aligner(x))
    if aligner.invertible:
        assert torch.equal(again.inverse(y), aligner.inverse(y))
    assert describe_aligner(again) == describe_aligner(aligner)
    assert (again.bijective, again.both_ways) == (aligner.bijective, aligner.both_ways)
    json.dumps(again.findings())


@gradient_trained
def test_a_bank_gives_each_site_what_it_would_get_alone(case: str) -> None:
    x, y = rows()
    y = y + 0.6 * y.square()  # so that no start is already the best
    bank, norms = trained(build(case), x, y)
    assert max(norm.min().item() for norm in norms) > CLIP  # clipping acted, at every site
    start = build(case).double()
    fit(start, x, y)
    assert (bank.eval().loss(x, y) < start.loss(x, y)).all()  # and the steps led somewhere
    for site in range(SITES):
        one = slice(site, site + 1)
        alone, _ = trained(build(case, sites=1), x[one], y[one])
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(bank.state_dict()[name][one], value, rtol=1e-6, atol=1e-8, msg=name)


@every
def test_closed_forms_and_starting_points_know_only_their_site(case: str) -> None:
    x, y = rows()
    bank = build(case).double()
    fit(bank, x, y)
    for site in range(SITES):
        one = slice(site, site + 1)
        alone = build(case, sites=1).double()
        fit(alone, x[one], y[one])
        torch.testing.assert_close(bank(x)[one], alone(x[one]))


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith((*BY_GRADIENT, "identity"))])
def test_means_a_thousand_deviations_away_cost_a_closed_form_nothing(case: str) -> None:
    x, y = rows()
    far_x, far_y = x + 1000 * x.std(), y - 1000 * y.std()
    near, far = build(case).double(), build(case).double()
    fit(near, x, y)
    fit(far, far_x, far_y)
    torch.testing.assert_close(far(far_x) - far_y, near(x) - y, rtol=0, atol=1e-7)


@every
def test_single_precision_is_the_double_one_to_its_own_accuracy(case: str) -> None:
    aligner, (x, y) = ready(case), rows()
    single = build(case)
    single.load_state_dict(aligner.state_dict())
    assert aligner(x).dtype == torch.float64
    torch.testing.assert_close(single(x.float()).double(), aligner(x), rtol=1e-3, atol=1e-3)
    if aligner.bijective:
        torch.testing.assert_close(single.inverse(y.float()).double(), aligner.inverse(y), rtol=1e-2, atol=1e-2)


@every
def test_the_seed_alone_decides(case: str) -> None:
    one, again, other = (build(case, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name].nan_to_num(), again[name].nan_to_num()) for name in one)
    kind, options = CASES[case]
    networks = ("INN", "MLP", "FreeForm", "SharedPart", "SparseAligner")
    drawn = options.get("network", {}).get("class", kind) in networks or options.get("start") == "random"
    if not drawn:
        assert all(torch.equal(one[name].nan_to_num(), other[name].nan_to_num()) for name in one)
    else:
        assert any(not torch.equal(one[name], other[name]) for name in one)


def test_what_a_fit_from_moments_reaches() -> None:
    x, y = rows()
    total = (y - y.mean(1, keepdim=True)).square().sum((1, 2))
    fvu = {}
    for case in CASES:
        aligner = build(case).double()
        fit(aligner, x, y)
        fvu[case] = (aligner(x) - y).square().sum((1, 2)) / total
    torch.testing.assert_close(fvu["mean"], torch.ones(SITES).double())
    for better, worse in (
        ("linear", "procrustes, scaled"), ("ridge", "procrustes, scaled"), ("procrustes, scaled", "procrustes"),
        ("procrustes, scaled", "mean"), ("procrustes", "permutation, signed"),  # which is one of the rotations
        ("linear", "reduced rank"), ("linear", "reduced rank, by share"), ("reduced rank", "mean"),
        ("cca, shrunk", "linear"), ("cca, shrunk", "ridge"),  # it is least squares without a ridge
        ("cca, shrunk", "cca"), ("cca, shrunk", "svcca, shrunk"), ("cca, shrunk", "pwcca, shrunk"),
        ("pwcca, shrunk", "pwcca"), ("mean", "identity"),
    ):  # fmt: skip
        assert (fvu[better] < fvu[worse]).all(), (better, worse)
    # an INN starts at the closed form after which its start is named, up to scaling and a floor
    torch.testing.assert_close(fvu["inn, started linear"], fvu["linear"], rtol=0.05, atol=0.01)
    assert (fvu["inn"] < 1).all()
