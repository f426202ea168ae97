"""A universe on the tiny world: maps, files and report, runs stopped and on two ranks, a newcomer, what is refused."""

import json
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interrupting import strike
from tests.ranks import two_ranks
from tests.runs import quiet_trainer
from tests.tiny import tiny_folder
from tests.world import World, sentences, write_texts
from torch import Tensor

from aligners.api import retrieval
from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import SaveAligners
from aligners.cli.table import train
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import universe_states
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.fits import seeded
from aligners.fitting.saved_bank import FORWARD, load_bank, save_bank
from aligners.fitting.steps import make_optimizer
from aligners.fitting.universe.joint import JointMoments, directions, linear_universe, paired_rows, shared_rotations
from aligners.fitting.universe.through import TwoLinear
from aligners.fitting.universe.universe import RIVALS, TEMPERATURE, Universe, load_universe, pair_banks, universes_of
from aligners.fitting.universe.universe_alignment import UniverseAlignment
from aligners.fitting.universe.universe_evaluation import UniverseEvaluation
from aligners.injection.methods import between_two_models
from aligners.maps.inn import INN
from aligners.maps.linear import Procrustes
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import write
from aligners.similarity.algebra.moments import moments_of

SMALL = partial(INN, couplings=2, hidden=8)
EPOCHS = 8
PAIR = Path("pairs", "x--y", "aligners.safetensors")


@pytest.fixture(scope="module")
def models(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    third = tiny_folder(tmp_path_factory.mktemp("third") / "z", seed=2)
    return [world.model_x, world.model_y, str(third)]


def states(world: World, models: list[str], **options: Any) -> PairedActivations:
    given: dict[str, Any] = {"sites": [1, 3], "batch_size": 32, "max_length": 64, "held_out_types": 0.1}
    return universe_states(models, text=TextSource(world.fit, held_out=world.test), **{**given, **options})


def fitted(
    world: World,
    models: list[str],
    folder: Path | None = None,
    resume: Path | None = None,
    trainer: dict[str, Any] | None = None,
    shared: int | None = None,
    **options: Any,
) -> UniverseAlignment:
    module = UniverseAlignment(SMALL, shared=shared)
    watching = [BestPerSite(), *([SaveAligners(folder)] if folder else [])]
    settings = {"max_epochs": EPOCHS, "callbacks": watching} | (trainer or {})
    data = states(world, models, **options)
    quiet_trainer(**settings).fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return module


Found = tuple[UniverseAlignment, UniverseEvaluation, Path]


@pytest.fixture(scope="module")
def found(world: World, models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return measured(world, models, tmp_path_factory.mktemp("universe"), PAIR)


def measured(
    world: World, models: list[str], folder: Path, pair: Path, shared: int | None = None, **options: Any
) -> Found:
    module = fitted(world, models, folder, shared=shared, **options)
    evaluation = UniverseEvaluation(load_universe(folder / "universe.safetensors"), [load_bank(folder / pair)])
    quiet_trainer().test(evaluation, datamodule=module.stream, verbose=False)
    return module, evaluation, folder


def held_out(data: PairedActivations) -> Tensor:
    """(k, S, N, d), where states of narrower models end in zeros."""
    return torch.cat([batch.x for batch in data.batches("test")], 1).unflatten(0, (len(data.models), 2))


@pytest.mark.slow
def test_every_ordered_pair_and_site_has_the_error_of_its_map(found: Found) -> None:
    module, evaluation, folder = found
    x = held_out(module.stream)
    names = [model.name for model in module.stream.reader.models]
    mean = module.means(module.fits()[0])[0].unflatten(0, (3, 2))
    for method in ("universe", "gcca"):
        rows = [row for row in evaluation.rows if row["method"] == method]
        assert len({(row["model_x"], row["model_y"], row["site_x"]) for row in rows}) == 3 * 2 * 2 == len(rows)
        maps = universes_of(load_universe(folder / "universe.safetensors"))[method]
        for row in rows:
            i, j, s = names.index(row["model_x"]), names.index(row["model_y"]), [1, 3].index(row["site_x"])
            left = (maps.map(i, j)(x[i])[s] - x[j, s]).detach().square().sum()
            assert row["fvu"] == pytest.approx(float(left / (x[j, s] - mean[j, s]).square().sum()), rel=1e-4)


def test_maps_between_pairs_are_read_as_those_of_a_fit(found: Found) -> None:
    _, evaluation, folder = found
    bank = load_bank(folder / PAIR)
    assert bank.command == "fit"
    assert set(bank.maps[FORWARD]) == {"universe", "gcca"}
    assert set(bank.maps["1_0"]) == {"gcca"}  # the other is its own way back

    def by_place(method: str, column: str) -> dict[Any, float]:
        return {(r["model_x"], r["model_y"], r["site_x"]): r[column] for r in evaluation.rows if r["method"] == method}

    for name in bank.maps[FORWARD]:
        for column in ("fvu", "mrr", "top1_all_centred"):
            pairwise, whole = by_place(f"pairwise_{name}", column), by_place(name, column)
            assert len(pairwise) == 4
            assert pairwise == pytest.approx({place: whole[place] for place in pairwise}, rel=1e-4)


def test_every_map_is_scored_by_retrieval(found: Found) -> None:
    module, evaluation, folder = found
    x, maps = held_out(module.stream), universes_of(load_universe(folder / "universe.safetensors"))["universe"]
    names = [model.name for model in module.stream.reader.models]
    for row in (row for row in evaluation.rows if row["method"] == "universe"):
        i, j, s = names.index(row["model_x"]), names.index(row["model_y"]), [1, 3].index(row["site_x"])
        expected = retrieval(maps.map(i, j)(x[i])[s].detach(), x[j, s])
        assert (row["top1_all"], row["mrr_all"]) == pytest.approx((expected.top1, expected.mrr), abs=2e-3)


def test_maps_compose(found: Found) -> None:
    module, evaluation, folder = found
    x, space = held_out(module.stream), universes_of(load_universe(folder / "universe.safetensors"))["universe"]
    over = space.map(1, 2)(space.map(0, 1)(x[0]))
    torch.testing.assert_close(over, space.map(0, 2)(x[0]), atol=2e-3, rtol=0)
    rows = [row for row in evaluation.rows if row["method"] == "universe"]
    assert 0 < max(row["cycle"] for row in rows) < 1e-3
    assert max(row["round_trip"] for row in rows) < 1e-3


def test_training_beats_the_start_and_the_space_keeps_scale_and_rank(found: Found) -> None:
    module, evaluation, _ = found
    best = module.training_record["0_1.universe"]["best_step"]
    assert all(step > 0 for step in best)
    assert best == best[:2] * 3  # the maps of a site are of one step
    states = evaluation.spaces["universe"].embed(held_out(module.stream).flatten(0, 1))
    _, explained = directions(JointMoments.of(moments_of(*paired_rows(states, 3)), 3))
    for s, site in enumerate((1, 3)):
        rows = [row for row in evaluation.report_tables["directions"] if row["site"] == site]
        found = torch.tensor([[row[model.name] for row in rows] for model in module.stream.reader.models])
        torch.testing.assert_close(found[:, :-1], explained[:, s, :-1].float(), rtol=0, atol=1e-3)
        variance = [row["variance"] for row in rows]
        assert 0.1 < sum(variance) / len(variance) < 3
        assert min(variance[:-1]) > 1e-3 * max(variance)  # the last: states after a LayerNorm lie on a hyperplane


def test_the_loss_is_the_error_from_single_models_and_from_the_mean_of_the_others(found: Found) -> None:
    module, _, _ = found
    space = module.universes()["universe"]
    assert space.contrastive == 0.02
    batch = next(iter(module.stream.batches("validation")))
    x = batch.x
    turns = torch.randint(1000, (x.shape[1],), generator=torch.Generator().manual_seed(0))
    space.turns, space.rivals = turns, None
    with torch.no_grad():
        loss, mapped, embedded = space.loss(x, x), space(x), space.embed(x)
        one, two = (space.predicted(embedded, shift) for shift in (1, 2))
        others = embedded.unflatten(0, (3, 2))
        mean = torch.stack([others[[1, 2]].mean(0), others[[0, 2]].mean(0), others[[0, 1]].mean(0)])
        from_mean = space.maps.inverse(mean.flatten(0, 1))
    each = torch.stack([one, two, from_mean, from_mean])  # half of the rows from single models
    picked = each[turns % 4, :, torch.arange(len(turns))].movedim(0, 1)
    own = (picked - x).square().mean((1, 2)) / space.variance
    cosines = torch.cosine_similarity(picked[:, :, None], x[:, None], dim=-1) / TEMPERATURE
    same = turns[:, None] == turns  # not told apart, but for a row and itself
    cosines[:, same & ~torch.eye(len(turns), dtype=torch.bool)] = -torch.inf
    own += 0.02 * (cosines.logsumexp(2) - cosines.diagonal(dim1=1, dim2=2)).mean(1)
    torch.testing.assert_close(loss, own.unflatten(0, (3, 2)).mean(0).repeat(3))
    expected = torch.stack([one, two])[turns % 2, :, torch.arange(len(turns))].movedim(0, 1)
    torch.testing.assert_close(mapped, expected)


def test_the_report_has_its_figures_and_compares_what_is_trained(found: Found, tmp_path: Path) -> None:
    evaluation = found[1]
    report = make_report("universe", evaluation.meta, evaluation.rows, **evaluation.report_tables)
    write(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "universe.json", "universe.csv", "directions.csv", "directions.png", "universe_site_1.png",
        "universe_site_3.png", "shared.csv", "shared.png", "curve.csv", "types.csv",
        "universe.md",
    }  # fmt: skip
    assert "; other maps of the same models: " in report.lead
    rows = [r | {"training": "diverged at step 3"} if r["method"] == "universe" else r for r in evaluation.rows]
    report = make_report("universe", evaluation.meta, rows, **evaluation.report_tables)
    assert "compared with no other maps" in report.lead
    assert any(sentence.startswith("* universe at sites 1, 3: diverged") for sentence in report.sentences)


def test_a_file_of_all_models_is_none_of_two(found: Found) -> None:
    with pytest.raises(ValueError, match=r"holds a universe of 3. Name one of the files pairs/X--Y/"):
        between_two_models(load_bank(found[2] / "universe.safetensors"))
    with pytest.raises(ValueError, match=r"Expected a file of `train.py universe`, but .* is of `train.py fit`"):
        load_universe(found[2] / PAIR)


def test_maps_at_more_sites_are_measured_at_those_of_the_universe(found: Found, world: World) -> None:
    """Site 3 alone of a universe, beside maps that were fitted at sites 1 and 3; those of other sites are refused."""
    module, whole, folder = found
    one = fitted(world, module.stream.models, trainer={"max_epochs": 1, "limit_val_batches": 0}, sites=[3])
    pair = load_bank(folder / PAIR)
    evaluation = UniverseEvaluation(one.stored().freeze(), [pair])
    quiet_trainer().test(evaluation, datamodule=one.stream, verbose=False)
    cut, both = (
        {(r["model_x"], r["model_y"], r["site_x"]): r["fvu"] for r in run.rows if r["method"] == "pairwise_universe"}
        for run in (evaluation, whole)
    )
    assert cut == pytest.approx({place: value for place, value in both.items() if place[2] == 3}, rel=1e-4)
    pair.pairs = {FORWARD: [(2, 2)]}
    with pytest.raises(ValueError, match=r"`against` to name maps between two models of the universe at its sites"):
        UniverseEvaluation(load_universe(folder / "universe.safetensors"), [pair])


def test_models_that_differ_in_depth_or_are_too_few_are_refused(
    world: World, models: list[str], tmp_path: Path
) -> None:
    deep = str(tiny_folder(tmp_path / "layers", layers=2))
    refused: list[tuple[list[str], dict[str, Any], str]] = [
        (models[:2], {}, "at least 3 models, but got 2"),
        (models, {"sites": "1:2"}, "of one layer for each of the 3 models"),
        ([*models[:2], deep], {"sites": "blocks"}, r"`sites` 'blocks' pairs equal sites, but .* 3 and 3 and 2 "),
        ([*models, models[0]], {}, r"different `models`, but got .* more than once"),
        ([*models, models[0]], {"revisions": [None] * 4}, r"different `models`: .* have equal weights"),
    ]
    for chosen, options, said in refused:
        with pytest.raises(ValueError, match=said):
            _ = states(world, chosen, **options).reader


def test_the_start_is_a_better_universe_than_rotations_however_little_some_directions_vary() -> None:
    draw = torch.Generator().manual_seed(0)
    spread = torch.tensor([3.0, 1.0, 1e-3, 0.0])
    shared, noise = torch.randn(2, 200, 4, generator=draw), torch.randn(6, 200, 4, generator=draw)
    mixed = torch.randn(6, 4, 4, generator=draw)  # no rotation takes one model into another
    x = (shared.repeat(3, 1, 1) @ mixed + 0.1 * noise) * spread @ torch.linalg.qr(mixed).Q
    moments = moments_of(*paired_rows(x, 3))
    space = Universe(SMALL(6, 4, 4), 3)
    space.fit(moments)
    with torch.no_grad():
        embedded = space.embed(x)
        torch.testing.assert_close(space.maps.inverse(embedded), x, atol=1e-3, rtol=0)
        each = torch.stack([space.predicted(embedded, shift) - x for shift in (1, 2)])
        errors = each.square().mean((0, 2, 3)) / space.variance
    joint = JointMoments.of(moments, 3)
    rotations = shared_rotations(joint.scaled(), [4] * 3, 4).flatten(0, 1)
    rows = (x.double() - joint.mean.flatten(0, 1)[:, None]) / joint.variance.flatten()[:, None, None].sqrt()
    turned = rows @ rotations
    of_others = [turned.roll(-2 * shift, 0) @ rotations.mT - rows for shift in (1, 2)]
    assert float(errors.mean()) < 0.6 * float(torch.stack(of_others).square().mean())
    assert float(errors.max()) < 1


def test_a_file_with_the_linear_universes_of_earlier_versions_is_read(found: Found, tmp_path: Path) -> None:
    bank = load_bank(found[2] / "universe.safetensors")
    bank.maps[FORWARD] |= {"procrustes": Procrustes(6, 16, 16), "gcpa": TwoLinear(6, 16, 16)}
    save_bank(bank, tmp_path / "universe.safetensors")
    evaluation = UniverseEvaluation(load_universe(tmp_path / "universe.safetensors"))
    quiet_trainer().test(evaluation, datamodule=found[0].stream, verbose=False)
    assert {row["method"] for row in evaluation.rows} == {"universe", "gcca", "procrustes", "gcpa"}
    assert {row["cycle"] is None for row in evaluation.rows if row["method"] == "procrustes"} == {False}
    one_way = [set(pair.maps["1_0"]) for _, _, pair in pair_banks(load_universe(tmp_path / "universe.safetensors"))]
    assert one_way == [{"gcca", "gcpa"}] * 3


def test_the_best_linear_universe_is_a_minimum_and_its_space_weighs_errors_alike() -> None:
    draw = torch.Generator().manual_seed(0)
    shared = torch.randn(1, 300, 4, generator=draw).double()
    mixed, noise = torch.randn(6, 4, 4, generator=draw).double(), torch.randn(6, 300, 4, generator=draw).double()
    joint = JointMoments.of(moments_of(*paired_rows(shared @ mixed + 0.3 * noise, 3)), 3)
    scaled, weights = joint.scaled(), linear_universe(joint, [4] * 3, 4)
    back = torch.linalg.inv(weights)
    alike = (back @ back.mT).mean(0)
    torch.testing.assert_close(alike, torch.eye(4).double().expand_as(alike))

    def error(w: Tensor) -> Tensor:
        found = w.new_zeros(2)
        for i, j in permutations(range(3), 2):
            map_ij = w[i] @ torch.linalg.inv(w[j])
            own = scaled.scatter[i, i] / scaled.n
            own = own + 1e-3 * torch.diag_embed(own.diagonal(dim1=-2, dim2=-1))
            squares = (map_ij * (own @ map_ij) - 2 * map_ij * scaled.scatter[i, j] / scaled.n).sum((1, 2))
            found = found + squares
        return found

    moved = weights.clone().requires_grad_()
    error(moved).sum().backward()
    assert moved.grad is not None
    assert float(moved.grad.norm()) < 1e-4 * float(error(weights).abs().sum())
    for site in range(2):  # each by itself
        one = joint._replace(mean=joint.mean[:, [site]], scatter=joint.scatter[:, :, [site]])
        torch.testing.assert_close(linear_universe(one, [4] * 3, 4)[:, 0], weights[:, site])


def test_a_batch_is_cut_into_parts_each_with_a_step_and_turns_of_its_own(found: Found) -> None:
    module = UniverseAlignment(SMALL)
    assert [module.parts_of(rows) for rows in (None, 10, 191, 192, 5_000)] == [1, 1, 1, 2, 2]
    module = found[0]
    assert module.parts == 2
    batch = next(iter(module.stream.batches("fit")))
    parts = [module.part_of(batch, part)[0] for part in range(2)]
    turns = module.universes()["universe"].turns
    assert turns is not None
    assert len(turns.unique()) == len(turns) == parts[1].shape[1]  # of every row, not of its text
    assert abs(parts[0].shape[1] - parts[1].shape[1]) <= len(batch.texts.text)
    assert torch.equal(*(rows.sum((0, 2)).sort().values for rows in (torch.cat(parts, 1), batch.x)))
    assert (module.trainer.current_epoch, module.global_step) == (EPOCHS, EPOCHS * module.trainer.num_training_batches)


def test_a_mapped_state_is_told_apart_from_the_rows_with_the_smallest_turns(found: Found) -> None:
    module = found[0]
    turns = torch.randperm(3 * RIVALS, generator=torch.Generator().manual_seed(0))
    states = turns.float()[None, :, None].expand(6, -1, 4)
    chosen, rivals = module._rivals(turns, states)
    assert chosen.tolist() == list(range(RIVALS))
    assert torch.equal(rivals, chosen.float()[None, :, None].expand(6, -1, 4))
    module.part_of(next(iter(module.stream.batches("fit"))), 0)
    space = module.universes()["universe"]
    assert space.turns is not None
    assert space.rivals is not None
    assert torch.equal(space.rivals[0], space.turns.sort().values[:RIVALS])


def test_where_few_rows_hold_most_variance_the_contrastive_loss_finds_more_of_the_right_rows() -> None:
    def top1(weight: float) -> float:
        draw = torch.Generator().manual_seed(0)
        mixed = torch.randn(3, 16, 16, generator=draw) / 4
        fitting, held_out = torch.randn(2, 400, 16, generator=draw)[:, None] @ mixed
        for x in (fitting, held_out):
            x.add_(torch.randn(x.shape, generator=draw), alpha=0.3).tanh_()
            x[:, ::16] *= 30  # as the first words of texts in language models
        space = Universe(seeded(SMALL, 0, 3, 16, 16), 3)
        space.fit(moments_of(*paired_rows(fitting, 3)))
        space.contrastive = weight
        optimizer = torch.optim.Adam(space.parameters(), 1e-2)
        for _ in range(40):
            space.turns = torch.randperm(400, generator=draw)
            optimizer.zero_grad()
            space.loss(fitting, fitting).sum().backward()
            optimizer.step()
        with torch.no_grad():
            found = [retrieval(space.map(i, j)(held_out[[i]])[0], held_out[j]) for i, j in permutations(range(3), 2)]
        return sum(score.top1 for score in found) / len(found)

    assert top1(0.02) > 1.5 * top1(0)


def test_a_rank_without_rows_of_a_part_adds_nothing(found: Found) -> None:
    space, nothing = found[0].universes()["universe"], found[0].stream.reader.widths[0]
    space.turns = torch.zeros(0, dtype=torch.long)
    loss = space.loss(*[torch.zeros(6, 0, nothing)] * 2)
    assert torch.equal(loss, torch.zeros(6))


def test_matrices_between_couplings_learn_at_a_quarter_of_the_rate() -> None:
    space = Universe(SMALL(3, 64, 64), 3)
    optimizer = make_optimizer(lambda groups: torch.optim.AdamW(groups, lr=1.0), [space])
    assert optimizer is not None
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in space.named_parameters():
        assert rates[id(parameter)] == (0.25 if ".pairs." in name else 1.0), name


@pytest.mark.slow
def test_an_interrupted_run_ends_where_it_would_have(
    world: World, models: list[str], found: Found, tmp_path: Path
) -> None:
    with strike(UniverseAlignment, "training_step", 10), pytest.raises(SystemExit):
        fitted(world, models, tmp_path)
    assert not (tmp_path / "universe.safetensors").exists()
    fitted(world, models, tmp_path, resume=tmp_path / "last.ckpt")
    for path in ("universe.safetensors", PAIR):
        assert (tmp_path / path).read_bytes() == (found[2] / path).read_bytes()


def trained(rank: int, world: World, models: list[str]) -> dict[str, Tensor]:
    """Held-out states in the shared space, and the validation FVU, of a run on one rank (-1) or on two."""
    two = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False} if rank >= 0 else {}
    module = fitted(world, models, trainer={"max_epochs": 1, **two})
    x = next(iter(states(world, models).batches("test"))).x
    figures = {fit.name: module.validation_figures[fit]["fvu"] for fit in module.fits()}
    with torch.no_grad():  # not the weights: what a model's null direction does is decided by the last digit
        return {**figures, **{f"{name} of x": space.embed(x) for name, space in module.universes().items()}}


@pytest.mark.slow
def test_two_ranks_fit_what_one_does(world: World, models: list[str], tmp_path: Path) -> None:
    alone = trained(-1, world, models)
    for both in two_ranks(partial(trained, world=world, models=models), tmp_path, meet=False):
        assert set(both) == set(alone)
        for name, value in alone.items():
            torch.testing.assert_close(both[name], value, rtol=1e-3, atol=1e-3, msg=name)


NAMES, SUMMED = ("model_x", "model_y", "type"), ("fvu", "fvu_unseen", "top1", "top10_all", "rows", "times")


def report_of(rank: int, world: World, models: list[str], path: Path) -> tuple[Any, Any]:
    two: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False} if rank >= 0 else {}
    evaluation = UniverseEvaluation(load_universe(path))
    quiet_trainer(**two).test(evaluation, datamodule=states(world, models), verbose=False)
    return evaluation.rows, evaluation.report_tables


@pytest.mark.slow
def test_two_ranks_report_what_one_does(world: World, models: list[str], found: Found, tmp_path: Path) -> None:
    work = partial(report_of, world=world, models=models, path=found[2] / "universe.safetensors")
    rows, tables = work(-1)
    assert tables["types"]
    for own_rows, own_tables in two_ranks(work, tmp_path, meet=False):
        for mine, other in zip(own_rows + own_tables["types"], rows + tables["types"], strict=True):
            assert [mine.get(name) for name in NAMES] == [other.get(name) for name in NAMES]
            figures = [{name: row[name] for name in SUMMED if name in row} for row in (mine, other)]
            assert figures[0] == pytest.approx(figures[1], rel=1e-4, abs=1e-6)


QUICK = ("--trainer.max_epochs", "2", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false",
         "--trainer.accelerator", "cpu")  # fmt: skip


def joining(stored: Path, *newcomers: str) -> list[str]:
    return ["join", "--universe", str(stored), "--data.models", json.dumps(newcomers)]


@pytest.mark.slow
def test_a_fourth_model_joins_and_the_members_stay_as_they_are(found: Found, models: list[str], tmp_path: Path) -> None:
    three, fourth = found[2] / "universe.safetensors", str(tiny_folder(tmp_path / "m3", seed=3))
    train([*joining(three, fourth), "--run", str(tmp_path / "four"), *QUICK])
    before, after = load_universe(three), load_universe(tmp_path / "four" / "universe.safetensors")
    assert [model["name"] for model in after.data["models"]] == [*models, fourth]
    then, now = (bank.maps[FORWARD]["universe"] for bank in (before, after))
    assert (then.sites, now.sites) == (6, 8)
    for name, value in then.state_dict().items():
        assert torch.equal(now.state_dict()[name][:6], value), name
    assert after.moments is not None
    rows = json.loads((tmp_path / "four" / "universe.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"universe", "gcca"}  # the linear one of all four
    rows = [row for row in rows if row["method"] == "universe"]
    with_new = [row["fvu"] for row in rows if fourth in (row["model_x"], row["model_y"])]
    members = [row["fvu"] for row in rows if fourth not in (row["model_x"], row["model_y"])]
    assert (len(with_new), len(members)) == (12, 12)
    assert sum(with_new) < 1.25 * sum(members)
    pair = load_bank(tmp_path / "four" / "pairs" / "x--m3" / "aligners.safetensors")
    assert pair.data["models"]["y"]["name"] == fourth
    assert pair.moments is not None


def test_who_cannot_join(found: Found, models: list[str], tmp_path: Path) -> None:
    three, fourth = found[2] / "universe.safetensors", str(tiny_folder(tmp_path / "m3", seed=3))
    other = ["--data.text.held_out", write_texts(tmp_path / "other.csv", sentences(60))]
    refused = [
        (joining(three, models[0]), "is in it already"),
        (joining(three, models[2], fourth), "the one model that joins, but got"),
        (["join", "--data.models", json.dumps([fourth])], "Expected `universe` to name a file"),
        (joining(three, str(tiny_folder(tmp_path / "narrow", width=8))), "at least the width 16, which the members"),
        ([*joining(three, fourth), *other, *QUICK], "holds out other texts than"),
    ]
    for number, (words, said) in enumerate(refused):
        with pytest.raises(ValueError, match=said):
            train([*words, "--run", str(tmp_path / str(number))])
