"""Universes of models whose widths differ: what is shared comes back exactly, what is completed, who joins."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.aligners.fitting.universe.test_universe import QUICK, SMALL, Found, held_out, joining, measured, states
from tests.runs import quiet_trainer
from tests.tiny import tiny_folder
from tests.world import World

from aligners.cli.table import train
from aligners.fitting.saved_bank import FORWARD, load_bank
from aligners.fitting.universe.joint import JointMoments, maxvar, paired_rows, shared_variance
from aligners.fitting.universe.shared_part import SharedPart
from aligners.fitting.universe.through import ThroughSpace, TwoLinear
from aligners.fitting.universe.universe import Universe, load_universe, universes_of
from aligners.fitting.universe.universe_alignment import Joining, UniverseAlignment, kind_like
from aligners.fitting.universe.universe_evaluation import UniverseEvaluation
from aligners.injection.methods import between_two_models
from aligners.maps.inn import INN
from aligners.maps.linear import Procrustes
from aligners.reports.finished_runs import make_report
from aligners.similarity.algebra.moments import moments_of

WIDTHS = [16, 8, 16, 12]
PAIR = Path("pairs", "x--w8", "aligners.safetensors")


@pytest.fixture(scope="module")
def models(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("widths")
    return [world.model_x, *(str(tiny_folder(folder / f"w{w}", seed=w, width=w)) for w in (8,)), world.model_y,
            str(tiny_folder(folder / "w12", seed=12, width=12))]  # fmt: skip


@pytest.fixture(scope="module")
def found(world: World, models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return measured(world, models, tmp_path_factory.mktemp("universe"), PAIR, shared=6)


@pytest.mark.slow
def test_states_of_narrower_models_end_in_zeros(found: Found) -> None:
    module, _, _ = found
    x = held_out(module.stream)
    assert x.ne(0).any(1).any(1).sum(-1).tolist() == WIDTHS
    assert module.stream.describe()["widths"] == WIDTHS


def test_cycles_are_exact_on_what_is_shared(found: Found) -> None:
    module, evaluation, folder = found
    x, space = held_out(module.stream), universes_of(load_universe(folder / "universe.safetensors"))["universe"]
    assert isinstance(space.maps, SharedPart)
    own = [states[..., :width] for states, width in zip(x, WIDTHS, strict=True)]
    direct = space.map(0, 3)(own[0])
    over_two = space.map(2, 3)(space.map(1, 2)(space.map(0, 1)(own[0])))
    torch.testing.assert_close(over_two, direct, atol=1e-3, rtol=0)
    back = space.map(3, 0)(direct)
    assert float((back - own[0]).detach().abs().max()) > 0.1  # what is not shared does not come back
    torch.testing.assert_close(space.map(0, 3)(back), direct, atol=1e-3, rtol=0)
    rows = [row for row in evaluation.rows if row["method"] == "universe"]
    assert 0 < max(row["cycle"] for row in rows) < 1e-3
    assert len(rows) == 4 * 3 * 2


def test_every_map_has_the_error_of_its_own_width(found: Found) -> None:
    module, evaluation, folder = found
    x, names = held_out(module.stream), [model.name for model in module.stream.reader.models]
    mean = module.means(module.fits()[0])[0].unflatten(0, (4, 2))
    spaces = universes_of(load_universe(folder / "universe.safetensors"))
    for row in (row for row in evaluation.rows if row["method"] in spaces):
        i, j, s = names.index(row["model_x"]), names.index(row["model_y"]), [1, 3].index(row["site_x"])
        y = x[j, s, :, : WIDTHS[j]]
        left = (spaces[row["method"]].map(i, j)(x[i, ..., : WIDTHS[i]])[s] - y).detach().square()
        assert row["fvu"] == pytest.approx(float(left.sum() / (x[j, s] - mean[j, s]).square().sum()), rel=1e-4)
        assert row["mse"] == pytest.approx(float(left.mean()), rel=1e-4)


def test_training_goes_on_from_its_start_and_holds_a_part_of_every_model(found: Found, world: World) -> None:
    module, evaluation, _ = found
    assert all(step > 0 for step in module.training_record["0_1.universe"]["best_step"])
    held = {(row["site"], row["model"]): row["held"] for row in evaluation.report_tables["shared"]}
    assert all(0.1 < value < 1 for value in held.values())


def test_files_of_pairs_are_those_of_a_fit(found: Found) -> None:
    _, evaluation, folder = found
    bank = load_bank(folder / PAIR)
    aligner = bank.maps[FORWARD]["universe"]
    assert (aligner.d_x, aligner.d_y) == (16, 8)
    assert bank.moments is not None
    assert (bank.moments.xx.shape[-1], bank.moments.yy.shape[-1]) == (16, 8)
    between_two_models(bank)
    by_place = [
        {(r["model_x"], r["model_y"], r["site_x"]): r["fvu"] for r in evaluation.rows if r["method"] == method}
        for method in ("pairwise_universe", "universe")
    ]
    assert len(by_place[0]) == 4
    assert by_place[0] == pytest.approx({place: by_place[1][place] for place in by_place[0]}, rel=1e-4)


@pytest.mark.slow
def test_a_model_of_another_width_joins(found: Found, tmp_path: Path) -> None:
    four = found[2] / "universe.safetensors"
    fifth = str(tiny_folder(tmp_path / "w20", seed=20, width=20))
    train([*joining(four, fifth), "--run", str(tmp_path / "five"), *QUICK])
    before, after = (load_universe(path) for path in (four, tmp_path / "five" / "universe.safetensors"))
    x = torch.randn(8, 30, 16)
    then, now = (universes_of(bank)["universe"] for bank in (before, after))
    assert now.widths == [*WIDTHS, 20]
    wider = torch.nn.functional.pad(torch.cat([x, x[:2]]), (0, 4))
    torch.testing.assert_close(now.embed(wider)[:8], then.embed(x), rtol=0, atol=1e-5)
    rows = json.loads((tmp_path / "five" / "universe.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"universe", "gcca"}  # the linear one of all five
    of_network = [row for row in rows if row["method"] == "universe"]
    into_new, members = (
        [row["fvu"] for row in of_network if (fifth in (row["model_x"], row["model_y"])) == new]
        for new in (True, False)
    )
    assert (len(into_new), len(members)) == (16, 24)
    assert sum(into_new) / 16 < 1.25 * sum(members) / 24


def test_more_is_shared_than_the_narrowest_model_has(world: World, models: list[str]) -> None:
    module = UniverseAlignment(SMALL, shared=9)
    with pytest.raises(ValueError, match=r"`shared` to be 1 to 8, the smallest width, but got 9"):
        quiet_trainer(max_epochs=1).fit(module, datamodule=states(world, models))
    with pytest.raises(ValueError, match="Expected `shared` to be at least 1"):
        UniverseAlignment(shared=0)
    with pytest.raises(ValueError, match="Expected `shared` to be 1 to 8, the smallest width, but got 0"):
        SharedPart(3, 12, 0, widths=[12, 12, 8], networks={})


def test_who_has_which_directions() -> None:
    """Of three models' variance, made of one direction of all, one of two models, and one of its own."""
    draw = torch.Generator().manual_seed(0)
    common, two, own = (torch.randn(n, 20_000, 1, generator=draw) for n in (1, 1, 3))
    x = torch.cat([common.expand(3, -1, -1) * 2, two.expand(3, -1, -1), own], -1)
    x[2, :, 1] = torch.randn(20_000, generator=draw)  # the third has a direction of its own instead
    groups, held = shared_variance(JointMoments.of(moments_of(*paired_rows(x, 3)), 3))
    expected = torch.tensor([[4, 4, 4], [1, 1, 0], [1, 1, 2]]) / 6
    torch.testing.assert_close(groups[..., 0], expected.double(), atol=0.02, rtol=0)
    torch.testing.assert_close(held[:, 0, 0], torch.full((3,), 4 / 6).double(), atol=0.02, rtol=0)
    torch.testing.assert_close(held[:, 0, -1], torch.ones(3).double(), atol=1e-6, rtol=0)


def test_a_report_says_where_a_linear_space_is_better(found: Found) -> None:
    _, evaluation, _ = found

    def said(trained: float) -> list[str]:
        fvu = {"universe": trained, "gcca": 0.5}
        rows = [row | {"fvu": fvu.get(row["method"], 0.9)} for row in evaluation.rows]
        sentences = make_report("universe", evaluation.meta, rows, **evaluation.report_tables).sentences
        return [sentence for sentence in sentences if "would pay" in sentence]

    assert len(said(0.7)) == 4
    assert "gcca of all models has the lower FVU, .50 against .70" in said(0.7)[0]
    assert said(0.52) == []


def test_closed_forms_that_are_refused_are_said(found: Found) -> None:
    _, evaluation, folder = found
    stored = load_universe(folder / "universe.safetensors")
    assert stored.moments is not None
    stored.moments = stored.moments._replace(n=torch.tensor(20.0))  # of 52 dimensions
    again = UniverseEvaluation(stored)
    again._refit()
    assert list(again.left_out) == ["gcca"]
    meta = {**evaluation.meta, "left_out": again.left_out}
    said = make_report("universe", meta, evaluation.rows, **evaluation.report_tables).sentences
    assert any("The linear gcca of all models is left out. MAXVAR expects more fitting rows" in s for s in said)


def test_padding_takes_no_rows() -> None:
    x = torch.randn(3, 23, 8, generator=torch.Generator().manual_seed(0))
    x[1, :, 5:] = 0
    maxvar(JointMoments.of(moments_of(*paired_rows(x, 3)), 3))
    with pytest.raises(ValueError, match="the 3 models have dimensions together, 21, but got 21"):
        maxvar(JointMoments.of(moments_of(*paired_rows(x[:, :21], 3)), 3))


def test_the_start_agrees_where_models_are_rotations_of_what_they_share() -> None:
    draw, widths = torch.Generator().manual_seed(0), [7, 5, 9]
    common = torch.randn(400, 4, generator=draw) * torch.tensor([3.0, 2.0, 1.5, 1.0])
    turns = [torch.linalg.qr(torch.randn(width, width, generator=draw)).Q[:4] for width in widths]
    x = torch.stack([torch.nn.functional.pad(common @ turn, (0, 9 - turn.shape[1])) for turn in turns])
    maps = UniverseAlignment(SMALL, shared=4).network(3, widths)
    space = Universe(maps, 3, widths)
    space.fit(moments_of(*paired_rows(x, 3)))
    with torch.no_grad():
        embedded = space.embed(x)
        for shift in (0, 1, 2):
            torch.testing.assert_close(space.predicted(embedded, shift), x, atol=1e-2, rtol=0)  # it expects some noise


def test_a_linear_space_has_two_regressions() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(1, 500, 3, generator=draw), torch.randn(1, 500, 2, generator=draw)
    y = y + x[..., :2]
    bank = TwoLinear(1, 3, 2)
    bank.fit(moments_of(x, y))
    expected = torch.linalg.lstsq(y - y.mean(1), x - x.mean(1)).solution
    torch.testing.assert_close(bank.weight_back, expected, atol=1e-4, rtol=0)
    assert not ThroughSpace.of(bank, bank).bijective
    wide = Procrustes(1, 3, 3)
    assert not ThroughSpace.of(wide, Procrustes(1, 2, 3)).bijective  # the way out loses a dimension


def test_matrices_between_couplings_of_a_shared_part_learn_slowly() -> None:
    space = Universe(UniverseAlignment(SMALL, shared=4).network(2, [64, 64]), 2, [64, 64])
    for name, parameter in space.named_parameters():
        inputs = parameter.shape[-2] if parameter.ndim > 2 else 1
        assert space.fan_in(name, parameter) == inputs * (4 if ".pairs." in name else 1), name


def test_equal_widths_may_share_less() -> None:
    module = UniverseAlignment(SMALL, shared=6)
    assert isinstance(module.network(3, [8, 8, 8]), SharedPart)
    assert isinstance(UniverseAlignment(SMALL).network(3, [8, 8, 8]), INN)


def test_the_default_network_has_half_of_a_lone_one_s_couplings_and_wider_layers() -> None:
    network = UniverseAlignment().network(3, [8] * 3)
    assert isinstance(network, INN)
    options = network.options()
    assert (options["couplings"], options["hidden"]) == (INN(1, 8, 8).options()["couplings"] // 2, 24)


def test_a_newcomer_has_hidden_layers_of_its_own_width() -> None:
    members = UniverseAlignment(partial(INN, couplings=2), shared=4).network(2, [8, 6])
    hidden = {width: kind_like(members, width)["options"].get("hidden") for width in (8, 6, 20)}
    assert hidden == {8: 12, 6: 9, 20: None}


def test_a_newcomer_may_see_other_texts_but_is_measured_on_the_same(found: Found) -> None:
    module, _, folder = found
    stored, told = load_universe(folder / "universe.safetensors"), module.stream.describe()
    told["models"] = [*told["models"], {"name": "new", "revision": None, "fingerprint": "new"}]

    def with_other(split: str) -> Any:
        hashes = {**told["text"]["hashes"], split: "other"}
        return SimpleNamespace(describe=lambda: {**told, "text": {**told["text"], "hashes": hashes}})

    Joining().refuse_other_members(stored, with_other("fit"))
    with pytest.raises(ValueError, match="holds out other texts"):
        Joining().refuse_other_members(stored, with_other("test"))


def test_the_curve_is_that_of_the_moments(found: Found) -> None:
    _, evaluation, _ = found
    _, held = shared_variance(evaluation.joint)
    names = [model["name"] for model in evaluation.stored.data["models"]]
    for row in evaluation.report_tables["curve"]:
        site = [1, 3].index(row["site"])
        expected = held[:, site, row["directions"] - 1].tolist()
        assert [row[name] for name in names] == pytest.approx(expected, abs=1e-9)


def test_one_large_feature_of_a_model_leaves_the_others_as_they_are() -> None:
    draw, widths = torch.Generator().manual_seed(0), [7, 5, 9]
    common = torch.randn(400, 4, generator=draw)
    mixed = [torch.randn(4, width, generator=draw) for width in widths]
    x = torch.stack([torch.nn.functional.pad(common @ mix, (0, 9 - mix.shape[1])) for mix in mixed])
    x[1, :, 4] = 300 * torch.randn(400, generator=draw)  # as language models have them
    maps = UniverseAlignment(SMALL, shared=4).network(3, widths)
    space = Universe(maps, 3, widths)
    space.fit(moments_of(*paired_rows(x, 3)))
    with torch.no_grad():
        errors = (space.map(1, 2)(x[1:2, :, :5])[0] - x[2]).square().sum() / (x[2] - x[2].mean(0)).square().sum()
    assert float(errors) < 0.05
