import copy
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import activations, quiet_trainer, state
from tests.stitches import train
from tests.world import World, sentences, write_texts

from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import SaveAligners, SaveStitching
from aligners.datamodules.run_identity import identity, refuse_other_run
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import load_bank
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP

MAPS = {"linear": Linear, "mlp": partial(MLP, hidden=[8])}


def fit(world: World, folder: Path, resume: Path | None = None, *, maps: Any = MAPS, **given: Any) -> Alignment:
    own = ("both_directions", "most_steps", "schedule", "optimizer", "seed")
    options = {"optimizer": partial(torch.optim.AdamW, lr=1e-2)} | {n: given.pop(n) for n in own if n in given}
    callbacks = [SaveAligners(folder), BestPerSite(**given.pop("best", {}))]
    trainer = quiet_trainer(**{"max_epochs": 1} | given.pop("trainer", {}), callbacks=callbacks)
    data, module = activations(world, **{"sites": [1, 3]} | given), Alignment(maps, **options)
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return module


@pytest.fixture(scope="module")
def last(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fit(world, folder := tmp_path_factory.mktemp("begun"))
    return folder / "last.ckpt"


@pytest.fixture(scope="module")
def twice(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fit(world, folder := tmp_path_factory.mktemp("twice"), trainer={"max_epochs": 2})
    return folder / "last.ckpt"


OTHER_DATA = {"batch_size": 15, "sites": [1, 2], "rows": "mean", "max_length": 60, "component": "mlp"}
OTHER_TRAINING = {"seed": 1, "most_steps": 3, "optimizer": torch.optim.SGD, "schedule": "linear"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: {"held_out_types": 0.1}, [r": `data\.held_out_types` was 0\.0 and is 0\.1\. To resume it"]),
        (
            lambda w: {"text": replace(w.text, seed=7, validation_share=0.2), **OTHER_DATA},
            [
                r"`data\.text\.seed` was 0 and is 7; .*fitting texts were 1\d\d ",
                r"`data\.text\.validation_share` was 0\.05 and is 0\.2",
                r"`data\.batch_size` was 16 and is 15;",
                r"`data\.sites` was \[\[1, 1\], \[3, 3\]\] and is \[\[1, 1\], \[2, 2\]\]",
                r'`data\.rows` was "tokens" and is "mean"',
                r"`data\.max_length` was 64 and is 60",
                r"`data\.component` was",
            ],
        ),
        (
            lambda w: {
                "maps": {**MAPS, "mlp": partial(MLP, hidden=[4])}, "both_directions": True,
                "trainer": {"limit_train_batches": 3}, **OTHER_TRAINING,
            },
            [
                r"`model\.seed` was 0 and is 1",
                r"`model\.most_steps` was 2000 and is 3",
                r'`model\.optimizer\.class` was "AdamW" and is "SGD"',
                r'`model\.schedule` was "trapezoid" and is "linear"',
                r"`model\.aligners\.1_0\.linear` was null",
                r"`model\.aligners\.0_1\.mlp\.options\.hidden` was \[8\] and is \[4\]",
                r"`trainer\.limit_train_batches` was 1\.0 and is 3",
            ],
        ),
        (
            lambda w: {"trainer": {"limit_train_batches": 1}, "maps": {"linear": Linear}},
            [r'limit_train_batches` was 1\.0 and is "1 batch"', r"`model\.aligners\.0_1\.mlp` was .*and is null"],
        ),
    ],
)  # fmt: skip
def test_a_run_does_not_go_on_with_other_data_or_options(
    world: World, last: Path, tmp_path: Path, change: Any, says: list[str]
) -> None:
    with pytest.raises(ValueError, match="is of a run with other data or options") as raised:
        fit(world, tmp_path, last, **change(world))
    assert [pattern for pattern in says if not re.search(pattern, str(raised.value))] == []
    assert list(tmp_path.iterdir()) == []


def test_it_goes_on_elsewhere_and_for_longer(world: World, last: Path, tmp_path: Path) -> None:
    moved = {name: str(shutil.copy(getattr(world, name), tmp_path)) for name in ("fit", "test")}
    text = TextSource(moved["fit"], held_out=moved["test"], test_share=0.3)  # without effect: the test texts are given
    fit(world, tmp_path, last, text=text, cache=tmp_path, workers=1, trainer={"max_epochs": 2})
    steps = [state(path)["global_step"] for path in (last, tmp_path / "last.ckpt")]
    assert steps[1] == 2 * steps[0]


def test_texts_that_have_changed_in_the_same_file_are_others(tmp_path: Path, world: World) -> None:
    texts = sentences(120)
    source = TextSource(write_texts(tmp_path / "texts.csv", texts))
    then = identity(activations(world, text=source))
    refuse_other_run(then, identity(activations(world, text=source)), "The run")
    labels = [int(number == 3) for number in range(120)]
    for changed in ((texts[::-1],), (texts[1:],), ([*texts[:-1], "a film"],), (texts, labels)):
        write_texts(tmp_path / "texts.csv", *changed)
        with pytest.raises(ValueError, match=r"The run is of a run with other data or options: the .* texts were \d+ "):
            refuse_other_run(then, identity(activations(world, text=source)), "The run")
    old = copy.deepcopy(then)
    del old["data"]["text"]["hashes"], old["data_config"]["held_out_types"], old["options"]
    write_texts(tmp_path / "texts.csv", texts[::-1])
    refuse_other_run(old, identity(activations(world, text=source)), "The run")  # all that it kept is the same
    write_texts(tmp_path / "texts.csv", texts[40:])
    with pytest.raises(ValueError, match=re.compile(r"the fitting texts were \d+ and are \d+")):
        refuse_other_run(old, identity(activations(world, text=source)), "The run")


def test_stitching_does_not_go_on_with_other_data_or_options(world: World, tmp_path: Path) -> None:
    train(world, trainer={"max_steps": 2, "callbacks": [SaveStitching(tmp_path)]}, routes="forward")
    with pytest.raises(ValueError, match=r"`data\.max_length` was 60 and is 50; `model\.gradient_clip` was"):
        train(world, resume=tmp_path / "last.ckpt", routes="forward", max_length=50, gradient_clip=2.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"best": {"patience": 3}}, "`early_stopping.patience` was null and is 3"),
        ({"best": {"min_delta": 0.1}}, "`early_stopping.min_delta` was 0.0 and is 0.1"),
        ({"trainer": {"max_epochs": 1}}, "`trainer.max_epochs` was 2 and is 1"),
        ({"trainer": {"max_steps": 2}}, "`trainer.max_steps` was -1 and is 2"),
        ({"trainer": {"val_check_interval": 2}}, "`trainer.val_check_interval` was 1.0 and is 2"),
        (
            {"attn_implementation": "eager"},
            r'`data.attn_implementation` was ["sdpa", "sdpa"] and is ["eager", "eager"]',
        ),
    ],
)
def test_what_changes_the_result_is_refused(
    twice: Path, world: World, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        fit(world, tmp_path, twice, **{"trainer": {"max_epochs": 2}, **change})


def test_what_an_earlier_version_did_not_keep_is_not_asked_for(twice: Path, world: World, tmp_path: Path) -> None:
    held = torch.load(twice, weights_only=True)
    kept = held["alignment"]
    del kept["early_stopping"]
    kept["trainer"] = {name: kept["trainer"][name] for name in ("precision", "limit_train_batches")}
    for model in kept["data"]["models"].values():
        for name in ("settings", "attention", "code"):
            del model[name]
    torch.save(held, tmp_path / "old.ckpt")
    other = {"best": {"patience": 3}, "attn_implementation": "eager"}
    fit(world, tmp_path, tmp_path / "old.ckpt", trainer={"max_epochs": 2, "val_check_interval": 3}, **other)


def test_a_model_whose_config_has_changed_is_another(last: Path, world: World, tmp_path: Path) -> None:
    shutil.copytree(world.model_x, tmp_path / "x")
    config = (tmp_path / "x" / "config.json").read_text()
    (tmp_path / "x" / "config.json").write_text(config.replace('"gelu"', '"relu"'))
    said = r'X was .*, whose weights are the same, but its hidden_act was "gelu" and is "relu"\. Name the same models'
    with pytest.raises(ValueError, match=said):
        fit(world, tmp_path / "more", last, model_x=str(tmp_path / "x"))
    maps = load_bank(last.parent / "aligners.safetensors")
    data = activations(world, model_x=str(tmp_path / "x"), sites=[1, 3])
    module = Alignment(MAPS)
    module.adopt(maps)
    with pytest.raises(ValueError, match=said):
        quiet_trainer().validate(module, datamodule=data)
