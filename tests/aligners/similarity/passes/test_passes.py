"""Whatever the passes, tiles, ranks and interruptions, a comparison finds the same."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from aligners.similarity import evaluation
from aligners.similarity.evaluation import SimilarityEvaluation
from aligners.similarity.outcome import TileFigures
from aligners.similarity.passes.plan import Needs, Tile
from aligners.similarity.passes.run import PassRun
from aligners.similarity.passes.saved import SavedPasses
from datamodules.layers import LayerActivations
from datamodules.store.keeping import save_tensors
from datamodules.text.sources import TextSource
from tests.ranks import two_ranks
from tests.runs import quiet_trainer
from tests.tiny import tiny_folder
from tests.world import World

MEASURES = ["cka", "unbiased_cka", "minibatch_cka", "rbf_cka", "svcca", "pwcca", "r2", "neuronsim", "rsa"]
ON_HEADS = ["attnsim_js", "attention_cka", "attention_pwcca"]


class LayerPairs:
    """Memory that counts layer pairs: `memory` of 10e-9 is ten of them in a pass."""

    fixed = 0

    def __init__(self, *given: object) -> None:
        pass

    def of(self, tile: Tile) -> Needs:
        return Needs({}, tile.x.size * tile.y.size, 0)


def compared(
    world: World, models: list[str], at_once: int | None, ranks: int = 1, **options: Any
) -> SimilarityEvaluation:
    """A comparison with so many layer pairs in a pass."""
    text = TextSource(world.fit, held_out=world.test)
    data = LayerActivations(models, text=text, max_length=60, batch_size=3, attention=True)
    found = SimilarityEvaluation(share=0.9, memory=None if at_once is None else at_once / 1e9, **options)
    settings = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    with pytest.MonkeyPatch.context() as patch:
        if at_once is not None:
            patch.setattr(evaluation, "PassCosts", LayerPairs)
        quiet_trainer(use_distributed_sampler=False, **settings).test(found, datamodule=data, verbose=False)
    return found


def tables(found: SimilarityEvaluation) -> list[dict[str, Any]]:
    return [*found.rows, *found.report_tables["layers"], *found.report_tables["distances"]]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        named = {name: value for name, value in other.items() if not isinstance(value, float)}
        assert {name: row[name] for name in named} == named
        for name in other.keys() - named.keys():
            assert row[name] == pytest.approx(other[name], rel=1e-6, abs=1e-8), (other, name)


@pytest.mark.parametrize(("at_once", "passes"), [(30, 3), (5, 18)])
def test_several_passes_find_what_one_does(world: World, models: list[str], at_once: int, passes: int) -> None:
    whole, some = (compared(world, models, size, measures=MEASURES) for size in (None, at_once))
    assert (len(whole.passes), len(some.passes)) == (1, passes)
    assert any(not tile.whole for this in some.passes for tile in this.tiles) == (at_once < 16)
    same(tables(some), tables(whole))
    assert whole.refusals == some.refusals == {}
    assert whole.cautions == some.cautions


def test_controls_and_attention_are_the_same_over_passes(world: World, models: list[str]) -> None:
    options = {"measures": ["cka", "svcca", "rsa", *ON_HEADS], "controls": True, "groups": 3, "permutations": 2}
    whole, some = (compared(world, models[:2], size, **options) for size in (None, 8))
    assert len(some.passes) > len(some.pairs)
    same(tables(some), tables(whole))
    assert whole.refusals == some.refusals == {}


def test_a_pass_reads_the_models_that_it_needs(
    world: World, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, ...]] = []
    step = SimilarityEvaluation.test_step

    def noted(self: SimilarityEvaluation, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        read.append((dataloader_idx, *(len(states) for states in batch.states)))
        step(self, batch, batch_idx, dataloader_idx)

    monkeypatch.setattr(SimilarityEvaluation, "test_step", noted)
    found = compared(world, models, 16, measures=["cka"])
    assert sorted(set(read)) == [
        (place, *(len(this.positions(m)) for m in range(3))) for place, this in enumerate(found.passes)
    ]
    assert any(0 in layers[1:] for layers in read)


def test_what_a_tile_refuses_its_pair_does_not_have(
    world: World, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "PassCosts", LayerPairs)
    text = TextSource(world.fit, held_out=world.test)
    data = LayerActivations(models[:2], text=text, max_length=60, batch_size=5, rows="cls")
    found = SimilarityEvaluation(["cka"], memory=4e-9)  # the embedding of [CLS] is the same in all texts
    with pytest.raises(ValueError, match=r"No measure .* Of positions 0-1 and 0-0, each counted from 0: .* vary"):
        quiet_trainer().test(found, datamodule=data, verbose=False)


def on_two_ranks(rank: int, world: World, models: list[str]) -> Any:
    options = {"measures": ["cka", "svcca", "rsa", "minibatch_cka", "attention_cka"], "controls": True, "groups": 3}
    with patch.object(TileFigures, "of", side_effect=TileFigures.of) as measured:
        found = compared(world, models, 12 if rank >= 0 else None, 2 if rank >= 0 else 1, **options)
    return tables(found), found.refusals, measured.call_count


def test_two_ranks_share_the_tiles_of_every_pass(world: World, models: list[str], tmp_path: Path) -> None:
    expected, refusals, every = on_two_ranks(-1, world, models[:2])
    ranks = two_ranks(partial(on_two_ranks, world=world, models=models[:2]), tmp_path, meet=False)
    for found, refused, tiles in ranks:
        same(found, expected)
        assert refused == refusals == {}
        assert tiles > 0
    assert sum(tiles for *_, tiles in ranks) > every


def test_too_little_memory_is_refused_before_anything_is_read(world: World, models: list[str], tmp_path: Path) -> None:
    text, store = TextSource(world.fit, held_out=world.test), tmp_path / "store"
    data = LayerActivations(models[:2], text=text, max_length=60, store=store)
    with pytest.raises(ValueError, match=r"Expected `memory` for at least one layer"):
        quiet_trainer().test(SimilarityEvaluation(["cka"], memory=1e-6), datamodule=data, verbose=False)
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(ValueError, match="`memory` to be above 0 and below inf, but got -1"):
        SimilarityEvaluation(memory=-1)


def with_own_passes(rank: int, world: World, models: list[str], kept: Path) -> Any:
    """The tables, the numbers of the passes that this rank made, and what was read of the texts."""
    text, own = TextSource(world.fit, held_out=world.test), {"devices": 2, "strategy": "ddp"} if rank >= 0 else {}
    data = LayerActivations(models, text=text, max_length=60, batch_size=3)
    found = SimilarityEvaluation(["cka", "svcca", "rsa", "minibatch_cka"], controls=True, groups=3, memory=12e-9)
    found.keep_passes(kept)
    with patch.object(evaluation, "PassCosts", LayerPairs), patch.object(PassRun, "end", autospec=True) as end:
        end.side_effect = ENDED
        quiet_trainer(use_distributed_sampler=False, **own).test(found, datamodule=data, verbose=False)
        runs = [call.args[0] for call in end.call_args_list]
    return repr(tables(found)), [found.passes.index(run.this) for run in runs], {int(run.rows) for run in runs}


ENDED = PassRun.end


def test_ranks_have_passes_of_their_own_and_find_the_same_bits(world: World, models: list[str], tmp_path: Path) -> None:
    own: dict[str, Any] = {"world": world, "models": models[:2]}
    expected, every, rows = with_own_passes(-1, **own, kept=tmp_path / "one")
    (tmp_path / "ranks").mkdir()
    work = partial(with_own_passes, **own, kept=tmp_path / "two")
    ranks = two_ranks(work, tmp_path / "ranks", meet=False)
    assert [found for found, *_ in ranks] == [expected, expected]
    assert [made for _, made, _ in ranks] == [every[::2], every[1::2]]
    assert [read for *_, read in ranks] == [rows, rows]
    assert len(list((tmp_path / "two").glob("*.safetensors"))) == len(every)


# ---------------------------------------------------------------------- stopped, and gone on with


class Stopped(BaseException):
    """Stands for a signal that nobody can catch."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The passes that are begun."""
    monkeypatch.setattr(evaluation, "PassCosts", LayerPairs)
    numbers: list[int] = []

    class Counted(PassRun):
        def __init__(self, *given: Any) -> None:
            numbers.append(len(numbers))
            super().__init__(*given)

    monkeypatch.setattr(evaluation, "PassRun", Counted)
    return numbers


def compare(world: World, models: list[str], folder: Path | None, **changes: Any) -> SimilarityEvaluation:
    data = {"max_length": 60, "seed": 0} | {name: changes.pop(name) for name in {"max_length", "seed"} & changes.keys()}
    measures = ["cka", "svcca", "pwcca", "rsa", "minibatch_cka", "attnsim_js"]
    options = {"measures": measures, "controls": True, "groups": 3, "memory": 9e-9, **changes}
    found = SimilarityEvaluation(**options)
    if folder is not None:
        found.keep_passes(folder)
    text = TextSource(world.fit, held_out=world.test)
    activations = LayerActivations(models[:2], text=text, batch_size=3, attention=True, **data)
    quiet_trainer(use_distributed_sampler=False).test(found, datamodule=activations, verbose=False)
    return found


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    save = SavedPasses.save

    def stopped(self: SavedPasses, number: int, figures: Any) -> None:
        if number == count:
            raise Stopped
        save(self, number, figures)

    monkeypatch.setattr(SavedPasses, "save", stopped)


def test_it_goes_on_after_the_last_finished_pass_to_the_same_bits(
    world: World, models: list[str], tmp_path: Path, begun: list[int]
) -> None:
    whole = compare(world, models, None)
    every = len(begun)
    assert every == len(whole.passes) > 3
    for stop in (2, every - 1):
        begun.clear()
        with pytest.MonkeyPatch.context() as patch:
            stop_after(stop, patch)
            with pytest.raises(Stopped):
                compare(world, models, tmp_path)
        begun.clear()
    assert len(list(tmp_path.glob("*.safetensors"))) == every - 1
    resumed = compare(world, models, tmp_path)
    assert len(begun) == 1
    assert repr(tables(resumed)) == repr(tables(whole))
    assert {**resumed.meta, "seconds": 0} == {**whole.meta, "seconds": 0}
    assert (resumed.refusals, resumed.cautions) == (whole.refusals, whole.cautions)
    again = compare(world, models, tmp_path)  # killed between the last pass and the report
    assert repr(tables(again)) == repr(tables(whole))


def test_another_comparison_is_refused_by_name(
    world: World, models: list[str], tmp_path: Path, begun: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(Stopped):
            compare(world, models, tmp_path)
    for changes, says in (
        ({"measures": ["cka"]}, "`measures` was .* and is"),
        ({"max_length": 6}, "`data.max_length` was 60 and is 6"),
        ({"seed": 5}, "`data.seed` was 0 and is 5"),
        ({"share": 0.5}, "`share` was 0.99 and is 0.5"),
        ({"memory": 7e-9}, "`memory` was 9 and is 7"),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path}, but this is another: .*{says}.*new `run`"):
            compare(world, models, tmp_path, **changes)
    other = tiny_folder(tmp_path / "other", layers=3, width=16, seed=9)
    with pytest.raises(ValueError, match=r"`data.models` was .*fingerprint"):
        compare(world, [str(other), models[1]], tmp_path)
    path = tmp_path / "00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        compare(world, models, tmp_path)


def test_a_pass_that_an_earlier_version_kept_is_made_again(tmp_path: Path) -> None:
    save_tensors(tmp_path / "00000.safetensors", {"about": torch.zeros(3), "0/cka/value/both": torch.ones(2, 2)})
    assert SavedPasses(tmp_path).load(0) is None
    assert SavedPasses(tmp_path).load(1) is None
