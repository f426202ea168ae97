from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor

from aligners.cli.table import evaluate
from aligners.fitting.alignment import Alignment
from aligners.fitting.price import (
    NAMES,
    BijectionPrice,
    factory,
    floor,
    gelbrich,
    jacobian,
    parameters_of,
    stretches,
)
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.reports.publishing import write
from aligners.reports.runs.bijection import report
from aligners.similarity.algebra.moments import moments_of
from datamodules.rows.reading import Plan
from datamodules.states import States
from datamodules.text.sources import TextSource
from tests.references.maps import fvu
from tests.runs import activations, quiet_trainer, related_rows
from tests.tiny import tiny_folder
from tests.world import World, sentences, write_texts

QUIET = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
SITES, STEPS, SEEDS, SIZE = [(1, 1), (3, 3)], [3, 6], 2, 6000


# ---------------------------------------------------------------------- the floor


def test_the_bound_is_the_distance_between_gaussians() -> None:
    x, y = related_rows(2, 500, 4, 4)
    found = gelbrich(x, y)
    for s in range(2):
        (a, b), (mean_a, mean_b) = zip(*((torch.cov(r[s].T, correction=0), r[s].mean(0)) for r in (x, y)), strict=True)
        root = sqrtm(a.numpy())
        cross = sqrtm(root @ b.numpy() @ root)
        expected = (mean_a - mean_b).square().sum() + a.trace() + b.trace() - 2 * float(cross.real.trace())
        assert found[s].item() == pytest.approx(expected.item(), rel=1e-6)
    assert gelbrich(x, x).abs().max() < 1e-6


@pytest.mark.parametrize("explained", [0.5, 0.9])
def test_the_floor_of_a_gaussian_pair_is_known(explained: float) -> None:
    draw = torch.Generator().manual_seed(0)
    best = explained**0.5 * torch.randn(1, 100_000, 3, generator=draw)
    y = best + (1 - explained) ** 0.5 * torch.randn(1, 100_000, 3, generator=draw)
    found = floor(best, y, torch.zeros(1, 3, dtype=torch.float64))
    # the best map with Y's covariance stretches the prediction by 1/√R²
    expected = 2 * (1 - explained**0.5)
    assert found.item() == pytest.approx(expected, rel=0.02)
    stretched = best / explained**0.5
    assert (stretched - y).square().mean() / y.square().mean() == pytest.approx(expected, rel=0.02)


# ---------------------------------------------------------------------- stretches


def test_the_jacobian_is_that_of_autograd() -> None:
    x = related_rows(2, 3, 4, 4)[0]
    bank = INN(2, 4, 4, couplings=2, hidden=5).double()
    with torch.no_grad():
        for weight in bank.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    found = jacobian(bank, x)
    every = torch.autograd.functional.jacobian(bank, x)
    for s in range(2):
        for n in range(3):
            torch.testing.assert_close(found[s, n], every[s, n, :, s, n])


def test_a_rotation_between_scaled_spaces_stretches_nothing() -> None:
    x = related_rows(1, 20, 4, 4)[0]
    turn = 3 * torch.linalg.qr(torch.randn(1, 4, 4, dtype=torch.float64)).Q
    torch.testing.assert_close(stretches(lambda rows: rows @ turn, x, torch.tensor([1 / 3])).float(), torch.ones(3, 1))
    assert stretches(lambda rows: rows * torch.inf, x, torch.ones(1)).isnan().all()


# ---------------------------------------------------------------------- training and sizes


def test_training_in_memory_leads_somewhere_and_the_seed_decides() -> None:
    x, _ = related_rows(2, 400, 6, 6)
    x = (x - x.mean(1, keepdim=True)).float()
    y = x + x.square()

    def trained(seed: int) -> MLP:
        torch.manual_seed(0)
        bank = MLP(2, 6, 6)
        bank.fit(moments_of(x, y))
        before = bank.loss(x, y)
        assert not Alignment().train_on_rows(bank, x, y, 300, 64, seed).any()
        assert (bank.loss(x, y) < 0.7 * before).all()
        return bank

    one, again, other = (trained(seed)(x) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_training_in_memory_is_clipped_site_by_site() -> None:
    x, y = (rows[:, :, :6].float() for rows in related_rows(2, 400, 6, 6))
    norms: list[Tensor] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            gradients = [weight.grad for group in self.param_groups for weight in group["params"]]
            norms.append(torch.stack([each.flatten(1).square().sum(1) for each in gradients]).sum(0).sqrt())
            return super().step(closure)

    for clip in (0.0, 1e-3):
        torch.manual_seed(0)
        bank = MLP(2, 6, 6)
        bank.fit(moments_of(x, y))
        Alignment(optimizer=partial(Watched, lr=1e-3), gradient_clip=clip).train_on_rows(bank, x, y, 1, 64, 0)
    free, clipped = norms
    assert (free > 1e-3).all()
    torch.testing.assert_close(clipped, torch.full((2,), 1e-3))


def test_a_site_that_diverges_is_named() -> None:
    x, y = related_rows(2, 400, 6, 6)
    bank = MLP(2, 6, 6)
    bank.fit(moments_of(x, y))
    y[1, 200:] = torch.nan
    diverged = Alignment().train_on_rows(bank, x.float(), y.float(), 5, 64, 0)
    assert diverged.tolist() == [0, 1]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "linear"])
def test_all_maps_have_the_size_that_is_asked_for(name: str) -> None:
    for size in (60_000, 111_872):
        assert abs(parameters_of(factory(name, size)(1, 64, 64)) / size - 1) < 0.02, name
    with pytest.raises(ValueError, match="`parameters`"):
        factory(name, 100)(1, 64, 64)


# ---------------------------------------------------------------------- the experiment


def run(data: States, *given: Any, **options: Any) -> BijectionPrice:
    """As the command does."""
    price = BijectionPrice(*given, **options)
    quiet_trainer(inference_mode=False).test(price, datamodule=data, verbose=False)
    price.run()
    return price


@pytest.fixture(scope="module")
def found(world: World) -> tuple[BijectionPrice, States]:
    data = activations(world, sites=[1, 3], held_out_types=0.2)
    return run(data, NAMES, STEPS, [SIZE], SEEDS, rows_a_step=50, stretched_rows=4), data


def test_every_map_is_measured_in_both_directions_at_every_point(found: tuple[BijectionPrice, Any]) -> None:
    rows = found[0].rows
    keys = ("method", "direction", "steps", "seed", "site_x")
    seen = [tuple(row[key] for key in keys) for row in rows]
    assert len(seen) == len(set(seen))
    trained = {*NAMES, "floor"} - {"linear"}
    expected = {
        (method, way, steps, seed, i)
        for way in ("X to Y", "Y to X")
        for i, _ in SITES
        for method, steps, seed in [("linear", 0, 0)]
        + [(name, steps, seed) for name in trained for steps in STEPS for seed in range(SEEDS)]
    }
    assert set(seen) == expected
    for row in rows:
        if row["method"] != "floor":
            assert min(row["fvu_seen"], row["fvu_unseen"]) <= row["fvu"] <= max(row["fvu_seen"], row["fvu_unseen"])
            assert row["stretch_low"] <= row["stretch_median"] <= row["stretch_high"]
        assert (row["round_trip"] is None) == (row["method"] in ("linear", "mlp", "floor"))


def test_errors_of_the_linear_map_are_those_of_its_own_fit(found: tuple[BijectionPrice, States]) -> None:
    rows = [row for row in found[0].rows if row["method"] == "linear"]
    x, y = (torch.cat([getattr(batch, side) for batch in found[1].paired("fit")], 1) for side in "xy")
    held = [torch.cat([getattr(batch, side) for batch in found[1].paired("test")], 1) for side in "xy"]
    for way, (source, target), (other, wanted) in (("X to Y", (x, y), held), ("Y to X", (y, x), held[::-1])):
        linear = Linear(2, source.shape[-1], target.shape[-1])
        moments = moments_of(source, target)
        linear.fit(moments)
        mapped = linear(other).double().numpy()
        own = [row["fvu"] for row in rows if row["direction"] == way]
        for s, value in enumerate(own):
            expected = fvu(mapped[s], wanted[s].double().numpy(), moments.mean_y[s].numpy())
            assert value == pytest.approx(expected, rel=1e-3)


def test_another_text_is_measured_beside_the_held_out_one(world: World, tmp_path: Path) -> None:
    other = TextSource(write_texts(tmp_path / "other.csv", sentences(260)[200:]))
    options = {"rows_a_step": 50, "stretched_rows": 0, "other_text": other}
    row = run(activations(world, sites=[1]), ["linear", "mlp"], [2], [SIZE], 1, **options).rows[0]
    data = activations(world, sites=[1])
    data.plan(Plan(other=other))
    x, y = (torch.cat([getattr(batch, side) for batch in data.paired("fit")], 1) for side in "xy")
    there, wanted = (torch.cat([getattr(batch, side) for batch in data.paired("other")], 1) for side in "xy")
    linear = Linear(1, x.shape[-1], y.shape[-1])
    linear.fit(moments_of(x, y))
    expected = fvu(linear(there)[0].double().numpy(), wanted[0].double().numpy(), y[0].double().mean(0).numpy())
    assert row["method"] == "linear"
    assert row["fvu_other"] == pytest.approx(expected, rel=1e-3)


def test_a_bijection_comes_back_and_a_free_pair_does_not(found: tuple[BijectionPrice, Any]) -> None:
    trips: dict[str, list[float]] = {}
    for row in found[0].rows:
        trips.setdefault(row["method"], []).append(row["round_trip"])
    assert max(trips["inn"]) < 1e-4 < 1e-2 < min(trips["free_form"])


def test_the_floor_lies_above_the_free_network(found: tuple[BijectionPrice, Any]) -> None:
    key = ("direction", "steps", "seed", "site_x")
    of = {
        method: {tuple(row[k] for k in key): row["fvu"] for row in found[0].rows if row["method"] == method}
        for method in ("mlp", "floor")
    }
    assert all(of["floor"][place] > value for place, value in of["mlp"].items())


def test_the_report_states_the_price(found: tuple[BijectionPrice, Any], tmp_path: Path) -> None:
    made, _ = found
    shown = report(made.meta, made.rows)

    def mean(method: str) -> float:
        own = [
            r["fvu"] for r in made.rows if (r["method"], r["direction"], r["steps"]) == (method, "X to Y", STEPS[-1])
        ]
        return sum(own) / len(own)

    price = mean("inn") / mean("mlp")
    assert any(said.startswith(f"INN, both ways: {price:.2f} times") for said in shown.sentences)
    assert "On rows of unseen token types" in shown.sentences[-1]
    assert [path.name for path in write(shown, tmp_path)] == ["bijection.png"]
    doubled = [*made.rows, *(row | {"size": 2 * SIZE} for row in made.rows if row["size"])]
    assert set(report(made.meta, doubled).figures) == {"bijection", "bijection_sizes"}
    report(made.meta, doubled).figures["bijection_sizes"]()


def test_more_rows_than_memory_holds_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="Expected `most_rows` rows at 2 site pairs"):
        run(activations(world, sites=[1, 3]), most_rows=10**12)


def test_unequal_widths_are_refused_before_anything_is_read(world: World, tmp_path: Path) -> None:
    wider = str(tiny_folder(tmp_path / "wide", seed=0, width=48))
    with pytest.raises(ValueError, match="INN expects equal widths"):
        evaluate(
            ["bijection", "--data.model_x", world.model_x, "--data.model_y", wider, "--run", str(tmp_path / "run")]
        )
    assert not (tmp_path / "run").exists()


def test_a_map_that_diverged_has_no_price(found: tuple[BijectionPrice, Any]) -> None:
    rows = [r | {"training": "diverged at step 3"} if r["method"] == "inn" else r for r in found[0].rows]
    said = report(found[0].meta, rows).sentences
    assert not any(line.startswith("INN, both ways:") for line in said)
    assert any(line.startswith("* INN, both ways (") and line.endswith("diverged at step 3.") for line in said)
    free = [r | {"training": "diverged at step 3"} if r["method"] in ("mlp", "floor") else r for r in found[0].rows]
    made = report(found[0].meta, free)
    assert not any(" times" in line for line in made.sentences)
    made.figures["bijection"]()
