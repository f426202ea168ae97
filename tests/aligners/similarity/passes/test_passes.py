"""Whatever the passes, tiles, ranks and interruptions, a comparison finds the same."""

import io
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.pickled import Code
from tests.ranks import two_ranks
from tests.runs import quiet_trainer
from tests.tiny import tiny_folder
from tests.world import World

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.store.keeping import save_tensors
from aligners.datamodules.text.sources import TextSource
from aligners.similarity import similarity_evaluation
from aligners.similarity.algebra.pairs import CentredRows
from aligners.similarity.catalogue import DEFAULT
from aligners.similarity.functional import cca
from aligners.similarity.functional.cca import pwcca, svcca
from aligners.similarity.outcome import TileFigures
from aligners.similarity.passes.one_pass import PassRun
from aligners.similarity.passes.pass_plan import Pass, Tile
from aligners.similarity.passes.saved import SavedPasses
from aligners.similarity.similarity_evaluation import SimilarityEvaluation

MEASURES = ["cka", "unbiased_cka", "minibatch_cka", "rbf_cka", "svcca", "pwcca", "r2", "neuronsim", "rsa"]
ON_HEADS = ["attnsim_js", "attention_cka", "attention_pwcca"]
CONTROLLED = {"measures": ["cka", "svcca", "rsa", "minibatch_cka", "attention_cka"], "controls": True, "groups": 3}


class LayerPairs:
    """Memory that counts layer pairs: `memory` of 10e-9 is ten of them in a pass."""

    def __init__(self, *given: object) -> None:
        pass

    def of(self, tiles: Sequence[Tile]) -> int:
        return sum(tile.x.size * tile.y.size for tile in tiles)


def compared(
    world: World, models: list[str], at_once: int | None, ranks: int = 1, kept: Path | None = None, **options: Any
) -> SimilarityEvaluation:
    """A comparison with so many layer pairs in a pass."""
    data = {"max_length": 60, "batch_size": 3, "attention": True}
    data |= {name: options.pop(name) for name in ("max_length", "batch_size", "rows") if name in options}
    memory = None if at_once is None else at_once / 1e9
    found = SimilarityEvaluation(**{"share": 0.9, "memory": memory, **options})
    if kept is not None:
        found.saved = SavedPasses(kept)
    activations = LayerActivations(models, text=TextSource(world.fit, held_out=world.test), **data)
    settings = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        if at_once is not None:
            monkeypatch.setattr(similarity_evaluation, "PassMemory", LayerPairs)
        quiet_trainer(use_distributed_sampler=False, **settings).test(found, datamodule=activations, verbose=False)
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


def test_several_passes_find_what_one_does(world: World, models: list[str]) -> None:
    whole = compared(world, models, None, measures=MEASURES)
    assert len(whole.passes) == 1
    for at_once, passes in ((30, 3), (9, 9)):
        some = compared(world, models, at_once, measures=MEASURES)
        assert len(some.passes) == passes
        assert any(not tile.whole for this in some.passes for tile in this.tiles) == (at_once < 16)
        same(tables(some), tables(whole))
        assert whole.refusals == some.refusals == {}
        assert whole.cautions == some.cautions


@pytest.mark.slow
def test_controls_and_attention_are_the_same_over_passes(world: World, models: list[str]) -> None:
    options = {"measures": ["cka", "svcca", "rsa", *ON_HEADS], "controls": True, "groups": 3, "permutations": 2}
    whole, some = (compared(world, models[:2], size, **options) for size in (None, 14))
    assert len(some.passes) == 3
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


def test_a_tile_keeps_one_copy_of_everything_and_is_decomposed_once(world: World, models: list[str]) -> None:
    measures = ["cka", "svcca", "pwcca", "rsa", "attention_cka"]
    of_heads = {"svcca": svcca, "pwcca": pwcca}
    measures += [f"attention_{name}{kind}" for name in of_heads for kind in ("", "_standardised")]
    with (
        patch.object(TileFigures, "of", side_effect=TileFigures.of) as measured,
        patch.object(cca, "_decomposed", side_effect=cca._decomposed) as decomposed,
    ):
        found = compared(world, models[:2], None, measures=measures, share=0.5)
    assert decomposed.call_count == 3  # states, and heads, standardised or not
    sums, of = measured.call_args.args[2]["value"], {measure.name: measure for measure in found.measures}
    heads = sums.of(of["attention_cka"]).moments
    for name, function in of_heads.items():
        plain, scaled = (sums.of(one) for one in (of[f"attention_{name}"], of[f"attention_{name}_standardised"]))
        values = of[f"attention_{name}"].compute(plain), of[f"attention_{name}_standardised"].compute(scaled)
        torch.testing.assert_close(values[0], function(heads, share=0.5))
        torch.testing.assert_close(values[1], function(heads, share=0.5, standardised=True))
        assert not torch.allclose(*values)
    x, y, cross = sums.moments
    for name, own in (("xx", x.xx), ("yy", y.xx), ("xy", cross.xy)):
        assert getattr(sums.of(of["cka"]).moments, name).data_ptr() == own.data_ptr()
    sample = sums.of(of["rsa"]).x
    assert sample.data_ptr() == sums.x.samples[of["rsa"].budget].data_ptr()
    rows = CentredRows(sample)
    with torch.profiler.profile(profile_memory=True) as profile:
        rows[:, :10]
    assert max(event.cpu_memory_usage for event in profile.events()) < sample.nbytes / 2


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many matrices each decomposition was called with."""
    counts: Counter[str] = Counter()

    def noted(name: str, decompose: Callable[..., Any], matrix: torch.Tensor, **options: Any) -> Any:
        counts[name] += math.prod(matrix.shape[:-2])
        return decompose(matrix, **options)

    for name in ("eigh", "eigvalsh", "svd", "svdvals"):
        monkeypatch.setattr(torch.linalg, name, partial(noted, name, getattr(torch.linalg, name)))
    return counts


def test_default_measures_decompose_a_layer_twice_and_a_pair_twice(
    world: World, models: list[str], counted: Counter[str]
) -> None:
    found = compared(world, models[:2], None)
    assert [measure.name for measure in found.measures] == list(DEFAULT)
    layers_x, layers_y = map(len, found.places)
    pairs = layers_x * layers_y
    # layers standardised, for CCA and regression, and as they are, for SVCCA, PWCCA and the nuclear norm; CCA needs
    # correlations alone, PWCCA directions, which serve SVCCA
    assert counted == {"eigh": 2 * (layers_x + layers_y), "svdvals": pairs, "svd": pairs}


def test_a_layer_is_decomposed_once_for_all_pairs_and_measures(
    world: World, models: list[str], counted: Counter[str]
) -> None:
    found = compared(world, models, None, measures=["cca", "r2_cca", "r2", "mixedsim", "svcca", "pwcca"])
    assert len(found.pairs) == 6
    assert counted["eigh"] == 2 * sum(map(len, found.places))  # standardised or not
    assert counted["eigvalsh"] == 0
    of_components, more = (
        compared(world, models[:2], None, measures=["svcca", "r2_svcca", "pwcca", *further])
        for further in ([], ["svcca_standardised", "pwcca_standardised"])
    )
    whitenings = 8 * (4 * 16**2 + 3 * 12**2)  # bytes, one of each layer
    assert more.passes[0].bytes - of_components.passes[0].bytes == whitenings
    options = {"controls": True, "groups": 3, "batch_size": 8}
    counted.clear()
    some = compared(world, models[:2], None, measures=["cca"], **options)
    alone = counted["eigh"]
    counted.clear()
    more = compared(world, models[:2], None, measures=["cca", "r2", "mixedsim", "r2_cca"], **options)
    assert counted["eigh"] == alone  # of every control and of what the jackknife leaves out, too
    assert some.refusals == more.refusals == {}


def test_what_a_tile_refuses_its_pair_does_not_have(world: World, models: list[str]) -> None:
    options = {"measures": ["cka"], "rows": "cls"}  # the embedding of [CLS] is the same in all texts
    with pytest.raises(ValueError, match=r"No measure .* Of positions 0-1 and 0-0, each counted from 0: .* vary"):
        compared(world, models[:2], 4, **options)


def test_too_little_memory_is_refused_before_anything_is_read(world: World, models: list[str], tmp_path: Path) -> None:
    text, store = TextSource(world.fit, held_out=world.test), tmp_path / "store"
    data = LayerActivations(models[:2], text=text, max_length=60, store=store)
    with pytest.raises(ValueError, match=r"Expected `memory` for at least one layer"):
        quiet_trainer().test(SimilarityEvaluation(["cka"], memory=1e-6), datamodule=data, verbose=False)
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(ValueError, match="`memory` to be above 0 and below inf, but got -1"):
        SimilarityEvaluation(memory=-1)


def on_a_rank(rank: int, world: World, models: list[str], kept: Path) -> Any:
    """Passes whose texts and tiles the ranks share; a process alone has all."""
    with patch.object(TileFigures, "of", side_effect=TileFigures.of) as measured:
        found = compared(world, models, 14, 2 if rank >= 0 else 1, kept, **CONTROLLED)
    return tables(found), found.refusals, measured.call_count


@pytest.mark.slow
def test_two_ranks_share_the_tiles_of_passes(world: World, models: list[str], tmp_path: Path) -> None:
    given: dict[str, Any] = {"world": world, "models": models[:2]}
    expected, _, tiles = on_a_rank(-1, **given, kept=tmp_path / "one")
    (tmp_path / "ranks").mkdir()
    both = two_ranks(partial(on_a_rank, **given, kept=tmp_path / "two"), tmp_path / "ranks", meet=False)
    for found, refusals, measured in both:
        same(found, expected)
        assert refusals == {}
        assert 0 < measured < tiles
    assert sum(measured for *_, measured in both) == tiles
    kept = [{path.name for path in (tmp_path / name).glob("*.safetensors")} for name in ("one", "two")]
    assert kept[0] == kept[1]


# ---------------------------------------------------------------------- stopped, and gone on with

NONE = Pass((), 0)
RESUMED = {**CONTROLLED, "measures": ["cka", "svcca", "pwcca", "rsa", "minibatch_cka", "attnsim_js"]}


@pytest.fixture(scope="module")
def finished(
    world: World, models: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SimilarityEvaluation, Path]:
    """A comparison, and the folder where its five passes are kept."""
    folder = tmp_path_factory.mktemp("passes")
    return compared(world, models[:2], 9, kept=folder, **RESUMED), folder


def test_it_goes_on_after_the_last_finished_pass_to_the_same_bits(
    world: World, models: list[str], finished: tuple[SimilarityEvaluation, Path], tmp_path: Path
) -> None:
    whole, folder = finished
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for path in sorted(tmp_path.glob("*.safetensors"))[2:]:  # as where the third is not finished
        path.unlink()
    for missing in (3, 1):  # the second time as if killed between the last pass and the report
        with patch.object(similarity_evaluation, "PassRun", side_effect=PassRun) as begun:
            resumed = compared(world, models[:2], 9, kept=tmp_path, **RESUMED)
        assert begun.call_count == missing
        assert repr(tables(resumed)) == repr(tables(whole))
        assert {**resumed.meta, "seconds": 0} == {**whole.meta, "seconds": 0}
        assert (resumed.refusals, resumed.cautions) == (whole.refusals, whole.cautions)


def test_another_comparison_is_refused_by_name(
    world: World, models: list[str], finished: tuple[SimilarityEvaluation, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(finished[1], tmp_path / "passes")
    other = str(tiny_folder(tmp_path / "other", layers=3, width=16, seed=9))
    for changes, says in (
        ({"measures": ["cka"]}, "`measures` was .* and is"),
        ({"max_length": 6}, "`data.max_length` was 60 and is 6"),
        ({"share": 0.5}, "`share` was 0.9 and is 0.5"),
        ({"memory": 7e-9}, "`memory` was 9 and is 7"),
        ({"models": [other, models[1]]}, r"`data\.models\.1\.fingerprint` was "),
    ):
        options = {"models": models[:2], **RESUMED, **changes}
        with pytest.raises(ValueError, match=f"{folder}, but this is another: .*{says}.*new `run`"):
            compared(world, at_once=9, kept=folder, **options)
    path = folder / "00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        compared(world, models[:2], 9, kept=folder, **RESUMED)


def test_an_earlier_version_is_made_again_and_its_memory_kept_unless_another_is_given(tmp_path: Path) -> None:
    kept = SavedPasses(tmp_path)
    assert kept.begin({"seed": 0}, 10, given=True) == kept.begin({"seed": 0}, 20, given=False) == 10
    save_tensors(tmp_path / "00000.safetensors", {"about": torch.zeros(3), "0/cka/value/both": torch.ones(2, 2)})
    assert kept.load(0, NONE) is kept.load(1, NONE) is None


def test_a_pass_that_brings_code_is_refused_and_not_run(tmp_path: Path) -> None:
    written = io.BytesIO()
    torch.save(Code(tmp_path / "trace"), written)
    save_tensors(tmp_path / "00000.safetensors", {"figures": torch.frombuffer(written.getbuffer(), dtype=torch.uint8)})
    with pytest.raises(UnpicklingError):
        SavedPasses(tmp_path).load(0, NONE)
    assert not (tmp_path / "trace").exists()
