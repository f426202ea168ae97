"""A universe fitted on the tiny world: its maps, its files, its report, and who may not be in it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aligners.fitting.bank import FORWARD, StoredBank, load_bank
from aligners.fitting.training import make_optimizer
from aligners.fitting.universe.evaluation import UniverseEvaluation
from aligners.fitting.universe.fitting import UniverseAlignment
from aligners.fitting.universe.joint import paired_rows
from aligners.fitting.universe.universe import Universe, fit_network, load_universe, universes_of
from aligners.injection.methods import between_two_models
from aligners.maps.inn import INN
from aligners.reports.finished import make_report
from aligners.reports.publishing import write
from aligners.similarity.algebra.moments import moments_of
from callbacks.best import BestPerSite
from callbacks.checkpoint import SaveAligners
from datamodules.pairings import universe_states
from datamodules.states import States
from datamodules.text.sources import TextSource
from tests.runs import quiet_trainer
from tests.tiny import tiny_folder
from tests.world import World

SMALL = partial(INN, couplings=2, hidden=8)


@pytest.fixture(scope="module")
def models(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    third = tiny_folder(tmp_path_factory.mktemp("third") / "z", seed=2)
    return [world.model_x, world.model_y, str(third)]


def states(world: World, models: list[str], **options: Any) -> States:
    given: dict[str, Any] = {"sites": [1, 3], "batch_size": 16, "max_length": 64, "held_out_types": 0.1}
    return universe_states(models, text=TextSource(world.fit, held_out=world.test), **{**given, **options})


Found = tuple[States, UniverseAlignment, UniverseEvaluation, Path]


@pytest.fixture(scope="module")
def found(world: World, models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("universe")
    data, module = states(world, models), UniverseAlignment(SMALL)
    saving = SaveAligners(folder)
    trainer = quiet_trainer(max_epochs=3, callbacks=[BestPerSite(), saving])
    trainer.fit(module, datamodule=data)
    against = [load_bank(folder / "pairs" / "x--y" / "aligners.ckpt")]
    evaluation = UniverseEvaluation(load_universe(folder / "universe.ckpt"), against)
    quiet_trainer().test(evaluation, datamodule=data, verbose=False)
    return data, module, evaluation, folder


def universe(folder: Path) -> Universe:
    return universes_of(load_universe(folder / "universe.ckpt"))["universe"]


def rows_of(data: States) -> torch.Tensor:
    return torch.cat([batch.x for batch in data.batches("test")], 1)


def test_every_ordered_pair_and_site_has_its_row(found: Found) -> None:
    rows = found[2].rows
    for method in ("universe", "procrustes", "gcca"):
        places = {(r["model_x"], r["model_y"], r["site_x"]) for r in rows if r["method"] == method}
        assert len(places) == 3 * 2 * 2 == sum(r["method"] == method for r in rows)
        assert all(x != y for x, y, _ in places)


def test_a_row_is_the_error_of_the_map_between_its_models(found: Found) -> None:
    data, module, evaluation, folder = found
    x = rows_of(data).unflatten(0, (3, 2))
    names = [model.name for model in data.reader.models]
    mean = module.means(module.fits()[0])[0].unflatten(0, (3, 2))
    with torch.no_grad():
        for row in evaluation.rows:
            if row["method"] == "universe":
                i, j, s = names.index(row["model_x"]), names.index(row["model_y"]), [1, 3].index(row["site_x"])
                left = (universe(folder).map(i, j)(x[i])[s] - x[j, s]).square().sum()
                assert row["fvu"] == pytest.approx(float(left / (x[j, s] - mean[j, s]).square().sum()), rel=1e-4)


def test_maps_between_pairs_are_read_as_those_of_a_fit(found: Found) -> None:
    _, _, evaluation, folder = found
    bank = load_bank(folder / "pairs" / "x--y" / "aligners.ckpt")
    assert bank.command == "fit"
    assert set(bank.maps[FORWARD]) == {"universe", "procrustes", "gcca"}
    assert set(bank.maps["1_0"]) == {"gcca"}  # the others are their own way back

    def fvu(method: str) -> dict[Any, float]:
        return {(r["model_x"], r["model_y"], r["site_x"]): r["fvu"] for r in evaluation.rows if r["method"] == method}

    for name in bank.maps[FORWARD]:
        pairwise, own = fvu(f"pairwise_{name}"), fvu(name)
        assert len(pairwise) == 4
        for place, value in pairwise.items():
            assert value == pytest.approx(own[place], rel=1e-4)


def test_maps_compose(found: Found) -> None:
    data, _, evaluation, folder = found
    x, space = rows_of(data).unflatten(0, (3, 2)), universe(folder)
    with torch.no_grad():
        over = space.map(1, 2)(space.map(0, 1)(x[0]))
        torch.testing.assert_close(over, space.map(0, 2)(x[0]), atol=2e-3, rtol=0)
    own = [row for row in evaluation.rows if row["method"] == "universe"]
    assert 0 < max(row["cycle"] for row in own) < 1e-3
    assert max(row["round_trip"] for row in own) < 1e-3


def test_training_beats_the_start_and_the_space_keeps_scale_and_rank(found: Found) -> None:
    _, module, evaluation, _ = found
    record = module.training_record["0_1.universe"]
    assert all(step > 0 for step in record["best_step"])
    assert len(set(record["best_step"][:2])) <= 2
    assert record["best_step"] == record["best_step"][:2] * 3  # the maps of a site are of one step
    for site in (1, 3):
        variance = [row["variance"] for row in evaluation.report_tables["directions"] if row["site"] == site]
        assert 0.1 < sum(variance) / len(variance) < 3
        assert min(variance[:-1]) > 1e-3 * max(variance)  # the last: states after a LayerNorm lie on a hyperplane


def test_the_loss_is_the_error_from_single_models_and_from_the_mean_of_the_others(found: Found) -> None:
    data, module, _, _ = found
    space = module.universes()["universe"]
    x = next(iter(data.batches("validation"))).x
    turns = torch.randint(1000, (x.shape[1],), generator=torch.Generator().manual_seed(0))
    space.turns = turns
    with torch.no_grad():
        loss, mapped, embedded = space.loss(x, x), space(x), space.embed(x)
        one, two = (space.predicted(embedded, shift) for shift in (1, 2))
        others = embedded.unflatten(0, (3, 2))
        mean = torch.stack([others[[1, 2]].mean(0), others[[0, 2]].mean(0), others[[0, 1]].mean(0)])
        from_mean = space.maps.inverse(mean.flatten(0, 1))
    each = torch.stack([one, two, from_mean, from_mean])  # half of the rows from single models
    picked = each[turns % 4, :, torch.arange(len(turns))].movedim(0, 1)
    own = (picked - x).square().mean((1, 2)) / space.variance
    torch.testing.assert_close(loss, own.unflatten(0, (3, 2)).mean(0).repeat(3))
    expected = torch.stack([one, two])[turns % 2, :, torch.arange(len(turns))].movedim(0, 1)
    torch.testing.assert_close(mapped, expected)


def test_the_report_has_its_figures(found: Found, tmp_path: Path) -> None:
    evaluation = found[2]
    report = make_report("universe", evaluation.meta, evaluation.rows, **evaluation.report_tables)
    write(report, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "universe.json", "universe.csv", "directions.csv", "directions.png", "universe_site_1.png",
        "universe_site_3.png",
    }  # fmt: skip
    assert any("times as much" in sentence for sentence in report.sentences)


def test_a_file_of_all_models_is_none_of_two(found: Found) -> None:
    with pytest.raises(ValueError, match=r"holds a universe of 3. Name one of the files pairs/X--Y/aligners.ckpt"):
        between_two_models(load_bank(found[3] / "universe.ckpt"))
    with pytest.raises(
        ValueError, match=r"Expected a universe.ckpt of `train.py universe`, but .* is of `train.py fit`"
    ):
        load_universe(found[3] / "pairs" / "x--y" / "aligners.ckpt")


def test_maps_at_more_sites_are_measured_at_those_of_the_universe(found: Found, world: World) -> None:
    """Site 3 alone of a universe, beside maps that were fitted at sites 1 and 3."""
    data, _, whole, folder = found
    one = states(world, data.models, sites=[3])
    module = UniverseAlignment(SMALL)
    quiet_trainer(max_epochs=1).fit(module, datamodule=one)
    evaluation = UniverseEvaluation(module.stored().freeze(), [load_bank(folder / "pairs" / "x--y" / "aligners.ckpt")])
    quiet_trainer().test(evaluation, datamodule=one, verbose=False)
    cut, both = ([r for r in each.rows if r["method"] == "pairwise_universe"] for each in (evaluation, whole))
    assert {row["site_x"] for row in cut} == {3}
    expected = {(r["model_x"], r["model_y"]): r["fvu"] for r in both if r["site_x"] == 3}
    assert {(r["model_x"], r["model_y"]): r["fvu"] for r in cut} == pytest.approx(expected, rel=1e-4)


def test_maps_of_other_models_or_sites_are_refused(found: Found, world: World, tmp_path: Path) -> None:
    stored: StoredBank = load_universe(found[3] / "universe.ckpt")
    other = load_bank(found[3] / "pairs" / "x--y" / "aligners.ckpt")
    other.pairs = {FORWARD: [(2, 2)]}
    with pytest.raises(ValueError, match=r"`against` to name maps between two models of the universe at its sites"):
        UniverseEvaluation(stored, [other])


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"models": slice(0, 2)}, "at least 3 models, but got 2"),
        ({"sites": "1:2"}, "`sites` of one depth in all models, but got 1:2"),
    ],
)
def test_what_is_no_universe_is_refused(world: World, models: list[str], chosen: dict[str, Any], said: str) -> None:
    own = models[chosen.pop("models", slice(None))]
    with pytest.raises(ValueError, match=said):
        _ = states(world, own, **chosen).reader


def test_models_that_differ_in_width_or_depth_or_not_at_all_are_refused(
    world: World, models: list[str], tmp_path: Path
) -> None:
    wide, deep = (str(tiny_folder(tmp_path / name, **{name: size})) for name, size in (("width", 8), ("layers", 2)))
    with pytest.raises(ValueError, match=r"`models` of one width, but .* has 16 and .* 8: there is no bijection"):
        _ = states(world, [*models[:2], wide]).reader
    with pytest.raises(ValueError, match=r"the same `sites` of one depth in all models, but .* has 3 blocks, .* has 2"):
        _ = states(world, [*models[:2], deep], sites="blocks").reader
    with pytest.raises(ValueError, match=r"different `models`, but got .* more than once"):
        states(world, [*models, models[0]])


def test_the_start_is_a_rotation_however_little_some_directions_vary() -> None:
    draw = torch.Generator().manual_seed(0)
    spread = torch.tensor([3.0, 1.0, 1e-3, 0.0])
    x = torch.randn(6, 200, 4, generator=draw) * spread @ torch.linalg.qr(torch.randn(6, 4, 4, generator=draw)).Q
    space = Universe(SMALL(6, 4, 4), 3, fit_network)
    space.fit(moments_of(*paired_rows(x, 3)))
    with torch.no_grad():
        found = space.embed(x)
    torch.testing.assert_close(found.var(1, correction=0).mean(1), torch.ones(6))
    scaled = x / space.variance.sqrt()[:, None, None]
    distances = [torch.cdist(rows, rows) for rows in (found, scaled)]
    torch.testing.assert_close(*distances, atol=5e-3, rtol=0)


def test_matrices_between_couplings_learn_at_a_quarter_of_the_rate() -> None:
    space = Universe(SMALL(3, 64, 64), 3, fit_network)
    optimizer = make_optimizer(lambda groups: torch.optim.AdamW(groups, lr=1.0), [space])
    assert optimizer is not None
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in space.named_parameters():
        assert rates[id(parameter)] == (0.25 if ".pairs." in name else 1.0), name


def test_a_universe_that_is_not_trained_is_compared_with_no_pair(found: Found) -> None:
    evaluation = found[2]
    rows = [r | {"training": "diverged at step 3"} if r["method"] == "universe" else r for r in evaluation.rows]
    made = make_report("universe", evaluation.meta, rows, **evaluation.report_tables)
    assert not any("times as much" in sentence for sentence in made.sentences)
    assert any(sentence.startswith("* universe at sites 1, 3: diverged") for sentence in made.sentences)
