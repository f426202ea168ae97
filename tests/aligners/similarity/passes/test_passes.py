"""Whatever the passes, tiles and ranks, a comparison finds the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from aligners.similarity import evaluation
from aligners.similarity.evaluation import SimilarityEvaluation
from aligners.similarity.outcome import TileFigures
from aligners.similarity.passes.plan import Needs, Tile
from aligners.similarity.passes.run import PassRun
from datamodules.layers import LayerActivations
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [
        str(tiny_folder(folder / "x", layers=3, width=16)),
        str(tiny_folder(folder / "y", "roberta", seed=1, layers=2, width=12)),
        str(tiny_folder(folder / "z", seed=2, layers=2, width=12)),
    ]


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
