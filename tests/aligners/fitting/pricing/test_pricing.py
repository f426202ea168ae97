from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from scipy.linalg import sqrtm
from tests.references.maps import fvu
from tests.runs import activations, quiet_trainer, related_rows
from tests.tiny import tiny_folder
from tests.world import World, sentences, write_texts
from torch import Tensor

from aligners.cli.table import evaluate
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.fitting.bijection.map_measures import floor, gelbrich, stretches
from aligners.fitting.bijection.price import NAMES, BijectionPrice, factory
from aligners.fitting.map_errors import parameters_of
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import write
from aligners.reports.runs.bijection_report import report
from aligners.similarity.algebra.moments import moments_of

STEPS, SEEDS, SIZE, MOST = [3, 6], 2, 6000, 1000


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


def test_the_floor_of_a_gaussian_pair_is_known() -> None:
    explained, draw = 0.5, torch.Generator().manual_seed(0)
    best = explained**0.5 * torch.randn(1, 100_000, 3, generator=draw)
    y = best + (1 - explained) ** 0.5 * torch.randn(1, 100_000, 3, generator=draw)
    found = floor(best, y, torch.zeros(1, 3, dtype=torch.float64))
    # the best map with Y's covariance stretches the prediction by 1/√R²
    expected = 2 * (1 - explained**0.5)
    assert found.item() == pytest.approx(expected, rel=0.02)
    stretched = best / explained**0.5
    assert (stretched - y).square().mean() / y.square().mean() == pytest.approx(expected, rel=0.02)


def test_stretches_are_quantiles_of_the_singular_values_of_the_jacobian() -> None:
    x = related_rows(2, 20, 4, 4)[0]
    turn = torch.linalg.qr(torch.randn(2, 4, 4, dtype=torch.float64)).Q
    found = stretches(lambda rows: (rows.square() / 2) @ turn, x, torch.tensor([1.0, 1 / 3]))
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    torch.testing.assert_close(found[:, 0], torch.quantile(x[0].abs(), levels))
    torch.testing.assert_close(found[:, 1], torch.quantile(x[1].abs(), levels) / 3)
    assert stretches(lambda rows: rows * torch.inf, x, torch.ones(2)).isnan().all()


def test_training_in_memory_leads_somewhere_the_seed_decides_and_a_site_that_diverges_is_named() -> None:
    x, _ = related_rows(2, 400, 6, 6)
    x = (x - x.mean(1, keepdim=True)).float()
    y = x + x.square()
    spoilt = y.clone()
    spoilt[1, 200:] = torch.nan

    def trained(seed: int, steps: int, y: Tensor = y) -> MLP:
        torch.manual_seed(0)
        bank = MLP(2, 6, 6)
        bank.fit(moments_of(x, x + x.square()))
        diverged = Alignment().train_on_rows(bank, x, y, steps, 64, seed)
        assert diverged.tolist() == [0, int(y is spoilt)]
        return bank

    assert (trained(0, 200).loss(x, y) < 0.7 * trained(0, 1).loss(x, y)).all()
    one, again, other, _ = (trained(seed, 5, rows)(x) for seed, rows in ((0, y), (0, y), (1, y), (0, spoilt)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_training_in_memory_is_clipped_site_by_site() -> None:
    x, y = (rows[:, :, :6].float() for rows in related_rows(2, 400, 6, 6))
    bank = MLP(2, 6, 6)
    bank.fit(moments_of(x, y))
    before = torch.cat([weight.detach().clone().flatten(1) for weight in bank.parameters()], 1)
    plain = {"optimizer": partial(torch.optim.SGD, lr=1.0), "schedule": "constant", "warmup": 0.0}
    Alignment(**plain, gradient_clip=1e-3).train_on_rows(bank, x, y, 1, 64, 0)  # type: ignore[arg-type]
    moved = torch.cat([weight.detach().flatten(1) for weight in bank.parameters()], 1) - before
    torch.testing.assert_close(moved.norm(dim=1), torch.full((2,), 1e-3), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "linear"])
def test_all_maps_have_the_size_that_is_asked_for(name: str) -> None:
    for size in (60_000, 111_872):
        assert abs(parameters_of(factory(name, size)(1, 64, 64)) / size - 1) < 0.02, name
    with pytest.raises(ValueError, match="`parameters`"):
        factory(name, 100)(1, 64, 64)


def run(data: PairedActivations, *given: Any, **options: Any) -> BijectionPrice:
    """As the command does."""
    price = BijectionPrice(*given, **options)
    quiet_trainer(inference_mode=False).test(price, datamodule=data, verbose=False)
    price.run()
    return price


Found = tuple[BijectionPrice, PairedActivations]


@pytest.fixture(scope="module")
def found(world: World, tmp_path_factory: pytest.TempPathFactory) -> Found:
    data = activations(world, sites=[1, 3], held_out_types=0.2)
    options: dict[str, Any] = {"rows_a_step": 50, "most_rows": MOST, "stretched_rows": 4}
    options["other_text"] = TextSource(
        write_texts(tmp_path_factory.mktemp("other") / "other.csv", sentences(260)[200:])
    )
    return run(data, NAMES, STEPS, [SIZE], SEEDS, **options), data


def test_every_map_is_measured_in_both_directions_at_every_point(found: Found) -> None:
    rows = found[0].rows
    seen = [tuple(row[key] for key in ("method", "direction", "steps", "seed", "site_x")) for row in rows]
    assert len(seen) == len(set(seen))
    trained = product({*NAMES, "floor"} - {"linear"}, STEPS, range(SEEDS))
    assert set(seen) == {
        (method, way, steps, seed, i)
        for (method, steps, seed), way, i in product([("linear", 0, 0), *trained], ("X to Y", "Y to X"), (1, 3))
    }
    for row in rows:
        if row["method"] != "floor":
            assert min(row["fvu_seen"], row["fvu_unseen"]) <= row["fvu"] <= max(row["fvu_seen"], row["fvu_unseen"])
            assert row["stretch_low"] <= row["stretch_median"] <= row["stretch_high"]
        assert (row["round_trip"] is None) == (row["method"] in ("linear", "mlp", "floor"))


def test_errors_of_the_linear_map_are_those_of_its_own_fit_on_each_text(found: Found) -> None:
    price, data = found
    splits = {
        split: [torch.cat([getattr(batch, side) for batch in batches], 1)[:, :MOST] for side in "xy"]
        for split in ("fit", "test", "other")
        if (batches := list(data.paired(split, shuffle=split == "fit")))
    }
    assert splits["fit"][0].shape[1] == MOST > splits["test"][0].shape[1] == price.meta["n_rows"]
    whole, unseen = slice(None), torch.cat([batch.rows.unseen for batch in data.paired("test")])
    figures = (("fvu", "test", whole), ("fvu_seen", "test", ~unseen), ("fvu_unseen", "test", unseen))
    for way, turn in (("X to Y", 1), ("Y to X", -1)):
        source, target = splits["fit"][::turn]
        linear, moments = Linear(2, source.shape[-1], target.shape[-1]), moments_of(source, target)
        linear.fit(moments)
        rows = [row for row in price.rows if (row["method"], row["direction"]) == ("linear", way)]
        for column, split, part in (*figures, ("fvu_other", "other", whole)):
            x, y = (states[:, part] for states in splits[split][::turn])
            mapped = linear(x).double().numpy()
            for s, row in enumerate(rows):
                expected = fvu(mapped[s], y[s].double().numpy(), moments.mean_y[s].numpy())
                assert row[column] == pytest.approx(expected, rel=1e-3)


def test_a_bijection_comes_back_a_free_pair_does_not_and_the_floor_lies_above_the_free_network(found: Found) -> None:
    def of(method: str, column: str) -> list[float]:
        return [row[column] for row in found[0].rows if row["method"] == method]

    assert max(of("inn", "round_trip")) < 1e-4 < 1e-2 < min(of("free_form", "round_trip"))
    assert all(bound > free for bound, free in zip(of("floor", "fvu"), of("mlp", "fvu"), strict=True))


def test_the_report_states_the_price(found: Found, tmp_path: Path) -> None:
    price = found[0]
    shown = report(price.meta, price.rows)

    def mean(method: str) -> float:
        keys = ("method", "direction", "steps")
        return fmean(r["fvu"] for r in price.rows if [r[key] for key in keys] == [method, "X to Y", STEPS[-1]])

    times = mean("inn") / mean("mlp")
    assert f"(INN, both ways) is {times:.2f} times" in make_report("bijection", price.meta, price.rows).lead
    assert "on rows of unseen token types" in shown.sentences[-2]
    assert "on the other text" in shown.sentences[-1]
    assert [path.name for path in write(shown, tmp_path)] == ["bijection.png"]


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


def test_a_map_that_diverged_has_no_price(found: Found) -> None:
    rows = [r | {"training": "diverged at step 3"} if r["method"] == "inn" else r for r in found[0].rows]
    said = report(found[0].meta, rows).sentences
    assert not any(line.startswith("INN, both ways:") for line in said)
    assert any(line.startswith("* INN, both ways (") and line.endswith("diverged at step 3.") for line in said)
    free = [r | {"training": "diverged at step 3"} if r["method"] in ("mlp", "floor") else r for r in found[0].rows]
    made = report(found[0].meta, free)
    assert not any(" times" in line for line in made.sentences)
    made.figures["bijection"]()
