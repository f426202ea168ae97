from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aligners.maps import starting_maps
from aligners.maps.couplings import ShuffledHadamard, TriangularPair
from aligners.maps.inn import INN, Mixing
from aligners.maps.solvers import RIDGES, least_squares, ridge_path, ridge_regression
from aligners.maps.starting_maps import START_NAMES, Start, calm_space, invertible_start, thinned
from aligners.similarity.algebra.moments import Moments, moments_of

SITES, WIDTH = 2, 5


def moved(width: int = WIDTH, size: float = 0.3) -> TriangularPair:
    torch.manual_seed(0)
    pair = TriangularPair(SITES, width).double()
    torch.nn.init.normal_(pair.entries, std=size)
    return pair


@pytest.mark.parametrize("width", [2, 5, 96])
def test_it_is_one_matrix_and_its_inverse(width: int) -> None:
    pair, one = moved(width, 0.5 / width), torch.eye(width, dtype=torch.float64).expand(SITES, -1, -1)
    matrix = pair(one)
    upper = pair.entries.triu(1) + torch.diag_embed(pair.entries.diagonal(dim1=1, dim2=2).exp())
    torch.testing.assert_close(matrix, (pair.entries.tril(-1) + one) @ upper)
    torch.testing.assert_close(pair.inverse(one), torch.linalg.inv(matrix))
    torch.testing.assert_close(pair.log_det(), torch.linalg.slogdet(matrix).logabsdet)
    x = torch.randn(SITES, 7, width, dtype=torch.float64)
    torch.testing.assert_close(pair(x), x @ matrix)
    torch.testing.assert_close(pair.inverse(pair(x)), x)


def test_it_starts_at_the_identity_and_can_move_anywhere() -> None:
    pair, x = TriangularPair(SITES, WIDTH), torch.randn(SITES, 9, WIDTH)
    assert torch.equal(pair(x), x)
    assert torch.equal(pair.inverse(x), x)
    pair(x).square().sum().backward()
    assert pair.entries.grad is not None
    assert (pair.entries.grad != 0).all()


@pytest.mark.parametrize("width", [2, 3, 7, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_orthogonal_without_rounding(width: int, dtype: torch.dtype) -> None:
    one = torch.eye(width, dtype=dtype)
    matrix = ShuffledHadamard(width, 3)(one)
    assert matrix.dtype == dtype
    torch.testing.assert_close(matrix @ matrix.mT, one, rtol=0, atol=0)
    torch.testing.assert_close(ShuffledHadamard(width, 3).inverse(one), matrix.mT, rtol=0, atol=0)


def test_features_are_mixed_each_number_mixes_others_and_no_checkpoint_holds_it() -> None:
    first, again, second = (ShuffledHadamard(128, number)(torch.eye(128)) for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert ((first != 0).sum(0) == 64).all()
    assert (first != second).float().mean() > 0.4
    assert not ShuffledHadamard(8, 0).state_dict()


# ---------------------------------------------------------------------- starts


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(n: int, d: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Y a turned and stretched X with noise, both of unit variance on average, centred."""
    x = draws(1, n, d, seed=seed) * torch.linspace(0.2, 2, d, dtype=torch.float64)
    turn = torch.linalg.qr(draws(d, d, seed=99)).Q
    y = x @ turn @ torch.diag(torch.linspace(2, 0.3, d, dtype=torch.float64)) + noise * draws(1, n, d, seed=seed + 1)
    x, y = (part - part.mean(1, keepdim=True) for part in (x, y))
    return x / x.square().mean().sqrt(), y / y.square().mean().sqrt()


def errors(x: Tensor, y: Tensor, weight: Tensor, inverse: Tensor) -> tuple[float, float]:
    forward = (x @ weight - y).square().sum() / y.square().sum()
    return forward.item(), ((y @ inverse - x).square().sum() / x.square().sum()).item()


@pytest.mark.parametrize("start", START_NAMES)
def test_the_inverse_is_the_inverse(start: Start) -> None:
    weight, inverse, taken, _ = invertible_start(moments_of(*pair(500, 6, 0.5)), start, both_ways=True)
    torch.testing.assert_close(weight @ inverse, torch.eye(6).double()[None], atol=1e-9, rtol=0)
    assert START_NAMES[int(taken)] == start


def test_covariance_keeps_the_covariance_and_is_the_best_of_those() -> None:
    x, y = pair(4000, 6, 0.6)
    weight, inverse, *_ = invertible_start(moments_of(x, y), "covariance", both_ways=True)
    torch.testing.assert_close(weight.mT @ (x.mT @ x) @ weight, y.mT @ y, rtol=1e-8, atol=1e-8)
    best = sum(errors(x, y, weight, inverse))
    values, vectors = torch.linalg.eigh(x.mT @ x / x.shape[1])
    root = vectors * values.sqrt()[:, None] @ vectors.mT
    for seed in range(20):  # the same covariance, other rotations
        skew = 0.003 * draws(1, 6, 6, seed=seed)
        turned = torch.linalg.inv(root) @ torch.linalg.matrix_exp(skew - skew.mT) @ root @ weight
        torch.testing.assert_close(turned.mT @ (x.mT @ x) @ turned, y.mT @ y, rtol=1e-8, atol=1e-8)
        assert sum(errors(x, y, turned, torch.linalg.inv(turned))) > best


def test_the_best_start_is_the_one_that_is_best_on_other_rows() -> None:
    for n, noise, both_ways in ((5000, 0.3, True), (5000, 0.3, False), (9, 0.3, True), (5000, 3.0, True)):
        fitting, other = moments_of(*pair(n, 8, noise)), pair(5000, 8, noise, seed=7)
        found: dict[str, float] = {}
        for name in START_NAMES:
            forward, back = errors(*other, *invertible_start(fitting, name, both_ways)[:2])
            found[name] = forward + back * both_ways
        taken = START_NAMES[int(invertible_start(fitting, "best", both_ways)[2])]
        assert found[taken] <= 1.1 * min(found.values()), (n, noise, both_ways, taken, found)


def test_a_start_is_not_judged_on_the_rows_that_it_was_solved_on() -> None:
    """Few rows, which come twice, and noise: a map that turns one covariance into the other fits its own rows best."""
    x, y = (part.repeat(1, 2, 1) for part in pair(48, 24, 0.8))
    fitting, other = moments_of(x, y), pair(3000, 24, 0.8, seed=90)
    own, found = {}, {}
    for name in START_NAMES:
        weight, inverse, *_ = invertible_start(fitting, name, both_ways=True)
        own[name], found[name] = sum(errors(x, y, weight, inverse)), sum(errors(*other, weight, inverse))
    assert min(own, key=own.__getitem__) == "covariance"
    assert found["covariance"] > 1.2 * found["procrustes"]
    assert START_NAMES[int(invertible_start(fitting, "best", both_ways=True)[2])] == "procrustes"


@pytest.mark.parametrize("n", [2, 9, 400])
def test_thinned_moments_are_those_of_two_sets_of_rows(n: int) -> None:
    x, y = pair(n, 6, 0.5)
    x, y = torch.cat((x, y)), torch.cat((y, x))
    moments = moments_of(x, y)
    first, second = thinned(moments, 0.25)
    for whole, one, other in zip(moments[3:], first[3:], second[3:], strict=True):
        torch.testing.assert_close(one + other, whole, rtol=0, atol=1e-9)
    joint = torch.cat((torch.cat((second.xx, second.xy), 2), torch.cat((second.xy.mT, second.yy), 2)), 1)
    values = torch.linalg.eigvalsh(joint)
    assert values.min() > -1e-9
    assert int((values > 1e-9)[0].sum()) == min(12, max(1, (n - 1) // 4))  # of no more rows than it has
    if n == 400:
        shares = second.xx.diagonal(dim1=1, dim2=2) / moments.xx.diagonal(dim1=1, dim2=2)
        assert 0.15 < shares.min() < shares.max() < 0.35


def test_each_site_has_its_own_best_start() -> None:
    x, y = pair(400, 5, 0.3)
    x, y = torch.cat((x, x)), torch.cat((y, x + 0.01 * y))
    taken = invertible_start(moments_of(x, y), "best", both_ways=True).taken
    assert START_NAMES[int(taken[0])] == "covariance"
    one = invertible_start(moments_of(x[1:], y[1:]), "best", both_ways=True).weight
    both = invertible_start(moments_of(x, y), "best", both_ways=True).weight
    torch.testing.assert_close(both[1:], one)


def test_only_the_start_that_a_site_takes_is_solved_on_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pair(400, 5, 0.3)
    x, y = torch.cat((x, x)), torch.cat((y, x + 0.01 * y))
    sites: list[tuple[str, int]] = []

    def counted(name: Start, solve: Callable[[Moments], Tensor]) -> Callable[[Moments], Tensor]:
        def solved(moments: Moments) -> Tensor:
            sites.append((name, len(moments.xx)))
            return solve(moments)

        return solved

    for name, solve in starting_maps._SOLVERS.items():
        monkeypatch.setitem(starting_maps._SOLVERS, name, counted(name, solve))
    taken = invertible_start(moments_of(x, y), "best", both_ways=True).taken
    names = [START_NAMES[place] for place in taken.tolist()]
    assert sites[: len(START_NAMES)] == [(name, len(x)) for name in START_NAMES]
    assert sorted(sites[len(START_NAMES) :]) == sorted((name, names.count(name)) for name in set(names))


def test_ridges_adapt_to_the_number_of_rows() -> None:
    x, y = pair(4000, 12, 0.5)
    many = moments_of(x, y)
    found = ridge_regression(many, RIDGES)[0]
    torch.testing.assert_close(found, least_squares(many, 1e-6), rtol=0, atol=1e-2)
    tried = [weight for common in (False, True) for weight in ridge_path(many, RIDGES, common=common)]
    assert min((found - weight).abs().max().item() for weight in tried) < 1e-10  # it is that of one of the ridges
    few, other = moments_of(x[:, :14], y[:, :14]), (x[:, 2000:], y[:, 2000:])
    error, plain = (
        (other[0] @ weight - other[1]).square().sum() / other[1].square().sum()
        for weight in (ridge_regression(few, RIDGES)[0], least_squares(few, 1e-6))
    )
    assert error < 0.9
    assert error < 0.5 * plain
    fewer = ridge_regression(moments_of(x[:, :5], y[:, :5]), RIDGES)[0]  # fewer rows than directions
    assert (other[0] @ fewer - other[1]).square().sum() / other[1].square().sum() < 1.05


def test_steps_move_the_map_and_its_inverse_least_in_the_calm_space() -> None:
    moments = moments_of(*pair(500, 6, 0.5))
    start = invertible_start(moments, "covariance", both_ways=True).weight
    into, out_of = calm_space(moments, start, torch.zeros(len(start), dtype=torch.bool))
    covariance = moments.xx / moments.xx.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    both = torch.eye(6) + start @ start.mT

    def moves(into: Tensor, out_of: Tensor) -> Tensor:
        """Mean variance there, times what noise of unit size there becomes in both models' spaces."""
        return (into * (covariance @ into)).sum((1, 2)) * (out_of.mT * (both @ out_of.mT)).sum((1, 2))

    torch.testing.assert_close(into @ out_of, torch.eye(6).to(into).expand_as(into))
    torch.testing.assert_close((into * (covariance @ into)).sum((1, 2)), torch.full((len(into),), 6.0).to(into))
    least = torch.linalg.eigvals(covariance @ both).real.sqrt().sum(-1).square()
    torch.testing.assert_close(moves(into, out_of), least)
    assert (least < 0.9 * moves(*(torch.eye(6).to(into) for _ in range(2)))).all()


def test_a_start_that_only_turns_needs_no_calm_space() -> None:
    moments = moments_of(*pair(500, 6, 0.5))
    for start, same in (("procrustes", True), ("covariance", False)):
        inn = INN(moments.mean_x.shape[0], 6, 6, start=start)
        inn.fit(moments)
        for matrix in (inn.first, inn.first_inverse):
            assert all(torch.equal(one, torch.eye(6)) is same for one in matrix)


@pytest.mark.parametrize("mixing", ["rotation", "linear", "none"])
def test_what_is_computed_again_is_the_same_and_takes_less_memory(mixing: Mixing) -> None:
    x, y = torch.randn(2, 2, 200, 24)
    gradients, kept = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        aligner = INN(2, 24, 24, couplings=4, mixing=mixing, recompute=recompute)
        for parameter in aligner.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        own = {parameter.data_ptr() for parameter in aligner.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = aligner.loss(x, y).sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in aligner.parameters()])
        kept.append(sum(size for place, size in sizes.items() if place not in own))
        assert "recompute" not in aligner.options()  # it may change when a run goes on
    assert kept[1] < kept[0] / 2
    for again, gradient in zip(*gradients, strict=True):
        assert again is not None
        assert torch.equal(again, gradient)
    plain, recomputed = INN(1, 24, 24), INN(1, 24, 24, recompute=True)
    assert recomputed.kept_floats() < plain.kept_floats() / 3
