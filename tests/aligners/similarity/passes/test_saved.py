"""A comparison that was stopped goes on after its last finished pass, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aligners.similarity import evaluation
from aligners.similarity.evaluation import SimilarityEvaluation
from aligners.similarity.passes.run import PassRun
from aligners.similarity.passes.saved import SavedPasses
from datamodules.layers import LayerActivations
from datamodules.store.keeping import save_tensors
from datamodules.text.sources import TextSource
from tests.aligners.similarity.passes.test_passes import LayerPairs, tables
from tests.runs import quiet_trainer
from tests.tiny import tiny_folder
from tests.world import World

MEASURES = ["cka", "svcca", "pwcca", "rsa", "minibatch_cka", "attnsim_js"]


class Stopped(BaseException):
    """Stands for a signal that nobody can catch."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [
        str(tiny_folder(folder / "x", layers=3, width=16)),
        str(tiny_folder(folder / "y", "roberta", seed=1, layers=2, width=12)),
    ]


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The passes that are begun."""
    monkeypatch.setattr(evaluation, "PassCosts", LayerPairs)
    begun: list[int] = []

    class Counted(PassRun):
        def __init__(self, *given: Any) -> None:
            begun.append(len(begun))
            super().__init__(*given)

    monkeypatch.setattr(evaluation, "PassRun", Counted)
    return begun


def compare(world: World, models: list[str], folder: Path | None, **changes: Any) -> SimilarityEvaluation:
    options: dict[str, Any] = {"measures": MEASURES, "controls": True, "groups": 3, "memory": 4e-9}
    text = TextSource(world.fit, held_out=world.test)
    given = {name: changes.pop(name) for name in ("max_length", "seed") if name in changes}
    data = LayerActivations(models, text=text, batch_size=3, attention=True, **{"max_length": 60, **given})
    found = SimilarityEvaluation(**{**options, **changes})
    if folder is not None:
        found.keep_passes(folder)
    quiet_trainer(use_distributed_sampler=False).test(found, datamodule=data, verbose=False)
    return found


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    save = SavedPasses.save

    def stopped(self: SavedPasses, number: int, figures: Any) -> None:
        if number == count:
            raise Stopped
        save(self, number, figures)

    monkeypatch.setattr(SavedPasses, "save", stopped)


def test_it_goes_on_after_the_last_finished_pass_to_the_same_bits(
    world: World, models: list[str], tmp_path: Path, passes: list[int]
) -> None:
    whole = compare(world, models, None)
    every = len(passes)
    assert every == len(whole.passes) > 4
    for stop in (2, every - 1):
        passes.clear()
        with pytest.MonkeyPatch.context() as patch:
            stop_after(stop, patch)
            with pytest.raises(Stopped):
                compare(world, models, tmp_path)
        passes.clear()
    assert len(list(tmp_path.glob("*.safetensors"))) == every - 1
    resumed = compare(world, models, tmp_path)
    assert len(passes) == 1
    assert repr(tables(resumed)) == repr(tables(whole))
    assert {**resumed.meta, "seconds": 0} == {**whole.meta, "seconds": 0}
    assert (resumed.refusals, resumed.cautions) == (whole.refusals, whole.cautions)
    again = compare(world, models, tmp_path)  # killed between the last pass and the report
    assert repr(tables(again)) == repr(tables(whole))


def test_another_comparison_is_refused_by_name(
    world: World, models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        ({"memory": 7e-9}, "`memory` was 4 and is 7"),
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
