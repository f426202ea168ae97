"""A fit on recorded states that is stopped anywhere goes on to the same bits, and not on other states."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.interrupting import Interrupt, strike
from tests.runs import quiet_trainer, state

from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import SaveAligners
from aligners.cli.table import evaluate
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.rows.read_rows import PairReader
from aligners.datamodules.text import recorded_texts
from aligners.datamodules.text.sources import TextSource
from aligners.errors import UserError
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import ALIGNMENT, load_bank
from aligners.maps.by_rows.nearest_neighbours import NearestNeighbours
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP

MAPS = {"linear": Linear, "near": partial(NearestNeighbours, rows=100), "mlp": partial(MLP, hidden=[8])}
N, EPOCHS = 300, 2


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two recordings of the same rows, in orders of their own; some rows of the second do not count."""
    folder = tmp_path_factory.mktemp("states")
    draw = np.random.default_rng(0)
    hidden = draw.normal(size=(2, N, 6))
    names = []
    for side in "xy":
        states = np.tanh(hidden @ draw.normal(size=(6, 5))) + draw.normal(size=(2, N, 5)) / 10
        order = draw.permutation(N)
        np.save(folder / f"{side}.npy", states[:, order].astype(np.float32))
        np.save(folder / f"{side}_key.npy", order)
        np.save(folder / f"{side}_group.npy", order // 3)
        np.save(folder / f"{side}_mask.npy", order % 11 > 0)
        columns = ",".join(f"{column}={side}_{column}.npy" for column in ("key", "group", "mask"))
        names.append(f"states:{folder}/{side}.npy:{columns}")
    return names


def run(names: list[str], folder: Path, *callbacks: Any, resume: Path | None = None, **options: Any) -> None:
    module = Alignment(MAPS, both_directions=True, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    data = pair_states(*names, batch_size=13, text=TextSource(validation_share=0.2, test_share=0.2), **options)
    watching = [*callbacks, BestPerSite(), SaveAligners(folder)]
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=watching)
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)


@pytest.fixture(scope="module")
def whole(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run(names, folder := tmp_path_factory.mktemp("whole"))
    return (folder / "aligners.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (PairReader, "read", 3),  # of the moments
        (Alignment, "training_step", 1),
        (torch.optim.AdamW, "step", 7),
        (Alignment, "validation_step", 2),
    ],
)
def test_a_signal_anywhere_changes_nothing(
    names: list[str], whole: bytes, tmp_path: Path, owner: type, method: str, call: int
) -> None:
    with strike(owner, method, call), pytest.raises(SystemExit):
        run(names, tmp_path)
    assert not (tmp_path / "aligners.safetensors").exists()
    run(names, tmp_path, resume=tmp_path / "last.ckpt")
    assert (tmp_path / "aligners.safetensors").read_bytes() == whole


def test_another_epoch_goes_on_where_the_first_ended(names: list[str], whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(names, tmp_path, Interrupt("on_train_epoch_end", 1))
    run(names, tmp_path, resume=tmp_path / "last.ckpt")
    assert (tmp_path / "aligners.safetensors").read_bytes() == whole


@pytest.mark.parametrize("what", ["states", "group", "mask"])
def test_other_states_groups_or_masks_are_refused(names: list[str], tmp_path: Path, what: str) -> None:
    with strike(Alignment, "training_step", 2), pytest.raises(SystemExit):
        run(names, tmp_path)
    last = tmp_path / "last.ckpt"
    assert state(last)[ALIGNMENT]["moments"]
    file = Path(names[0].removeprefix("states:").partition(":")[0])
    if what != "states":
        file = file.with_name(f"x_{what}.npy")
    before = np.load(file)
    changed = before.copy()
    counts = np.flatnonzero(np.load(file.with_name("x_mask.npy")))
    row = counts[-1]
    if what == "states":
        changed[1, row] = 0
    else:
        changed[row] = {"group": 500, "mask": False}[what]
    try:
        np.save(file, changed)
        with pytest.raises(UserError, match=r"last\.ckpt|groups"):
            run(names, tmp_path, resume=last)
    finally:
        np.save(file, before)


def test_runs_of_earlier_versions_with_options_that_were_ignored_load_and_go_on(
    names: list[str], whole: bytes, tmp_path: Path
) -> None:
    ignored = {"max_length": 64, "held_out_types": 0.3, "attn_implementation": "sdpa", "dtype": "bfloat16"}
    old, cut = tmp_path / "old", tmp_path / "cut"
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(recorded_texts, "OF_READING", {})
        run(names, old, **ignored)
        assert load_bank(old / "aligners.safetensors").data_config["max_length"] == 64
        with strike(Alignment, "training_step", 1), pytest.raises(SystemExit):
            run(names, cut, **ignored)
    run(names, cut, resume=cut / "last.ckpt")
    stored = load_bank(old / "aligners.safetensors")
    assert load_bank(cut / "aligners.safetensors").data_config == stored.data_config
    assert (cut / "aligners.safetensors").read_bytes() == whole

    config = dict(stored.data_config)
    again = pair_states(config.pop("model_x"), config.pop("model_y"), **config | {"text": TextSource(**config["text"])})
    assert again.config() == stored.data_config
    words = ["inject", "--checkpoints", str(old / "aligners.safetensors"), "--closed_form", "[]"]
    quiet = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    with pytest.raises(UserError, match=r"no `max_length` with recorded states, but got 64"):
        evaluate([*words, *quiet, "--data.max_length", "64", "--run", str(tmp_path / "refused")])
    evaluate([*words, *quiet, "--run", str(tmp_path / "run")])
    assert "linear" in (tmp_path / "run" / "report.json").read_text()
