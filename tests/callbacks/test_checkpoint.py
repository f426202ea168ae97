import errno
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from safetensors.torch import load_file
from tests.interrupting import Interrupt, strike
from tests.runs import activations, quiet_trainer, state
from tests.world import World

from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import Interruption, SaveAligners, WholeCheckpoints
from aligners.datamodules.rows.read_rows import PairReader
from aligners.fitting.alignment import Alignment
from aligners.fitting.read_moments import MomentsSoFar
from aligners.fitting.saved_bank import ALIGNMENT, load_bank
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.maps.sparse.sparse_aligner import SparseAligner

BATCHES, EPOCHS = 6, 2


def run(
    world: World, folder: Path, *callbacks: pl.Callback, resume: Path | None = None, steps: int = -1,
    minutes: float = 10.0, order: int = 1, trainer: dict[str, Any] | None = None, saving: dict[str, Any] | None = None,
    **options: Any,
) -> pl.Trainer:  # fmt: skip
    module = Alignment(
        {
            "linear": Linear,
            "mlp": partial(MLP, hidden=[8]),
            "inn": partial(INN, couplings=2, hidden=8),
            "sparse": partial(SparseAligner, latents=32, active=4, dead_after=200),
        },
        both_directions=True,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )
    watching = [BestPerSite(), SaveAligners(folder, every_n_minutes=minutes, **(saving or {}))]
    watching = [*callbacks, *watching][::order]
    quiet = quiet_trainer(**{"max_epochs": EPOCHS, "max_steps": steps, "callbacks": watching} | (trainer or {}))
    data = activations(world, **{"sites": [1, 3], "batch_size": 29} | options)
    quiet.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    assert quiet.num_training_batches == BATCHES
    return quiet


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    run(world, folder := tmp_path_factory.mktemp("whole"))
    return folder


def same_end(folder: Path, expected: Path) -> None:
    """Equal maps, and an equal record of their training."""
    assert (folder / "aligners.safetensors").read_bytes() == (expected / "aligners.safetensors").read_bytes()


def test_a_run_interrupted_by_ctrl_c_ends_where_it_would_have(world: World, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(world, tmp_path, Interrupt("on_train_batch_end", BATCHES))
    last = tmp_path / "last.ckpt"
    assert not (tmp_path / "aligners.safetensors").exists()
    with pytest.raises(ValueError, match=r"last\.ckpt is a checkpoint to resume from: `train\.py fit --ckpt_path"):
        load_bank(last)
    assert state(last)["global_step"] == BATCHES
    trainer = run(world, tmp_path, resume=last)
    assert trainer.global_step == EPOCHS * BATCHES
    same_end(tmp_path, whole)


@pytest.mark.parametrize(
    ("owner", "method", "call", "order"),
    [
        (Alignment, "training_step", 1, 1),
        (torch.optim.AdamW, "step", 3, 1),
        (torch.optim.lr_scheduler.LambdaLR, "step", 1 + BATCHES, 1),
        (Alignment, "validation_step", 2, 1),  # before any step
        (BestPerSite, "_compare", 5, -1),
        (Alignment, "on_validation_epoch_start", 1 + EPOCHS, 1),  # of the last validation
    ],
)
def test_a_signal_anywhere_changes_nothing_nor_does_the_order_of_callbacks(
    world: World, whole: Path, tmp_path: Path, owner: type, method: str, call: int, order: int
) -> None:
    with strike(owner, method, call), pytest.raises(SystemExit):
        run(world, tmp_path, order=order)
    assert not (tmp_path / "aligners.safetensors").exists()
    run(world, tmp_path, resume=tmp_path / "last.ckpt", order=order)
    same_end(tmp_path, whole)


def test_a_checkpoint_of_an_earlier_format_is_refused(world: World, tmp_path: Path) -> None:
    with strike(Alignment, "training_step", 4), pytest.raises(SystemExit):
        run(world, tmp_path)
    content = state(tmp_path / "last.ckpt")
    content[ALIGNMENT]["format"] = 3
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="Expected a checkpoint of this version"):
        run(world, tmp_path, resume=tmp_path / "last.ckpt")


def test_worker_processes_resume_too(world: World, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(world, tmp_path, Interrupt("on_train_batch_end", BATCHES + 2))
    run(world, tmp_path, resume=tmp_path / "last.ckpt", workers=1)
    expected, found = (load_file(folder / "aligners.safetensors") for folder in (whole, tmp_path))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_run_of_so_many_steps_is_completed_from_its_last_one(world: World, tmp_path: Path) -> None:
    run(world, tmp_path / "whole", steps=BATCHES + 2)
    with strike(Alignment, "on_validation_epoch_start", 3), pytest.raises(SystemExit):
        run(world, tmp_path, steps=BATCHES + 2)
    assert state(tmp_path / "last.ckpt")["global_step"] == BATCHES + 2
    run(world, tmp_path, resume=tmp_path / "last.ckpt", steps=BATCHES + 2)
    same_end(tmp_path, tmp_path / "whole")


def test_what_was_read_of_the_moments_is_kept(
    world: World, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strike(PairReader, "read", 3), pytest.raises(SystemExit):
        run(world, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert state(tmp_path / "last.ckpt")[ALIGNMENT]["reading"]["batches"] == 3
    read: list[Any] = []
    reads = MomentsSoFar.add
    monkeypatch.setattr(MomentsSoFar, "add", lambda self, rows: read.append(rows) or reads(self, rows))
    run(world, tmp_path, resume=tmp_path / "last.ckpt")
    assert len(read) == BATCHES - 3
    same_end(tmp_path, whole)


def test_a_run_that_is_complete_writes_its_maps_again(world: World, whole: Path, tmp_path: Path) -> None:
    trainer = run(world, tmp_path, resume=whole / "last.ckpt")
    assert trainer.global_step == EPOCHS * BATCHES
    same_end(tmp_path, whole)


def test_it_is_saved_every_so_many_minutes(
    world: World, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While moments are read and within epochs, from where the run ends as it would have."""
    kept: list[bytes] = []
    save = WholeCheckpoints.save_checkpoint

    def copied(self: WholeCheckpoints, checkpoint: Any, path: Any, *options: Any, **more: Any) -> None:
        save(self, checkpoint, path, *options, **more)
        kept.append(Path(path).read_bytes())

    monkeypatch.setattr(WholeCheckpoints, "save_checkpoint", copied)
    run(world, tmp_path, minutes=1e-9)
    assert len(kept) == BATCHES + EPOCHS * BATCHES + 1  # and at the end
    (tmp_path / "last.ckpt").write_bytes(kept[3])
    assert state(tmp_path / "last.ckpt")[ALIGNMENT]["reading"]["batches"] == 4
    (tmp_path / "last.ckpt").write_bytes(kept[BATCHES + 4])
    (tmp_path / "aligners.safetensors").unlink()
    run(world, tmp_path, resume=tmp_path / "last.ckpt")
    same_end(tmp_path, whole)


@pytest.mark.parametrize(("saving", "steps"), [({}, [12]), ({"at_end": False}, [])])
def test_it_is_saved_at_the_end_unless_told_otherwise(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saving: dict[str, Any], steps: list[int]
) -> None:
    saved = []
    step = lambda _, kept, *__, **___: saved.append(kept["global_step"])  # noqa: E731
    monkeypatch.setattr(WholeCheckpoints, "save_checkpoint", step)
    run(world, tmp_path, saving=saving)
    assert saved == steps
    assert (tmp_path / "aligners.safetensors").exists()


@pytest.mark.slow
def test_a_run_that_seldom_validates_a_few_texts_resumes_too(world: World, tmp_path: Path) -> None:
    """As the fits of large studies do: every so many steps, whatever the epoch, on the first texts of a split."""
    seldom = {"val_check_interval": 4, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    read: list[int] = []

    class Validated(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
            read.append(trainer.global_step)

    run(world, tmp_path / "whole", Validated(), trainer=seldom)
    assert read == [0, 4, 8, 12]
    for call in (3, 5, 9):
        with strike(Alignment, "training_step", call), pytest.raises(SystemExit):
            run(world, tmp_path / str(call), trainer=seldom)
        run(world, tmp_path / str(call), trainer=seldom, resume=tmp_path / str(call) / "last.ckpt")
        same_end(tmp_path / str(call), tmp_path / "whole")


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`checkpoint\.folder`.*file/below: Not a directory"):
        run(world, tmp_path / "file" / "below")


@pytest.mark.parametrize("name", ["last.ckpt", "aligners.safetensors"])
def test_a_file_that_cannot_be_written_stops_the_run_and_leaves_the_one_before(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).write_bytes(b"before")
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        run(world, tmp_path)
    assert (tmp_path / name).read_bytes() == b"before"
    assert not list(tmp_path.glob(".*"))
    assert f"Saved {tmp_path / name}" not in capsys.readouterr().out


def test_any_other_error_leaves_what_was_saved_before_it(world: World, tmp_path: Path) -> None:
    class Break(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="broken on purpose"):
        run(world, tmp_path, Break(), minutes=1e-9)
    assert state(tmp_path / "last.ckpt")["global_step"] == BATCHES
    with pytest.raises(KeyboardInterrupt):  # from now on Ctrl-C is obeyed at once
        signal.raise_signal(signal.SIGINT)


def test_the_finished_file_holds_the_best_of_each_site(world: World, whole: Path) -> None:
    (best,) = [value for name, value in state(whole / "last.ckpt")["callbacks"].items() if "BestPerSite" in name]
    stored = load_bank(whole / "aligners.safetensors")
    for name, value in best["kept"]["0_1.inn"].items():
        assert torch.equal(value, stored.maps["0_1"]["inn"].state_dict()[name])
    assert set(stored.maps["0_1"]) == {"linear", "mlp", "inn", "sparse"}
    assert set(stored.maps["1_0"]) == {"linear", "mlp", "sparse"}
    assert stored.pairs["0_1"] == [(1, 1), (3, 3)]
    assert stored.data["models"]["x"]["name"] == world.model_x
    assert stored.data_config["batch_size"] == 29


def test_going_on_with_other_models_or_from_an_epoch_of_moments_is_refused(
    world: World, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"fitted on other models: Y was .*/y .*and is .*/x ") as error:
        run(world, tmp_path, resume=whole / "last.ckpt", model_y=world.model_x)
    assert "X was" not in str(error.value)
    content = state(whole / "last.ckpt")
    del content[ALIGNMENT]["format"]
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"a checkpoint of this version.*or fit anew"):
        run(world, tmp_path, resume=tmp_path / "last.ckpt")


# ---------------------------------------------------------------------- signals


ALONE: Any = SimpleNamespace(world_size=1)


class Term(Exception):
    """Raised by the handler of before."""


@pytest.fixture
def holding() -> Iterator[Interruption]:
    """It holds signals back, while SIGTERM has a handler of its own."""

    def handle(*_: object) -> None:
        raise Term

    before = signal.signal(signal.SIGTERM, handle)
    interruption = Interruption()
    interruption.hold()
    yield interruption
    signal.signal(signal.SIGTERM, before)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "error", "before"),
    [(signal.SIGINT, KeyboardInterrupt, KeyboardInterrupt), (signal.SIGTERM, SIGTERMException, Term)],
)
def test_a_signal_is_held_back_until_it_is_asked_for(
    holding: Interruption, number: signal.Signals, error: type[BaseException], before: type[BaseException]
) -> None:
    holding.check(ALONE)
    send(number)
    with pytest.raises(error):
        holding.check(ALONE)
    holding.end()
    with pytest.raises(before):
        send(number)


def test_a_run_that_failed_holds_nothing_back(holding: Interruption) -> None:
    """Although the Trainer sets the handlers again that it found as it began."""
    for _ in range(2):
        holding.hold()
        found = signal.getsignal(signal.SIGTERM)
        holding.end()
        signal.signal(signal.SIGTERM, found)
    with pytest.raises(Term):
        send(signal.SIGTERM)


def test_a_second_signal_ends_the_process_even_while_the_first_is_obeyed(
    holding: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, sent = os.kill, list[Any]()
    send(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        holding.check(ALONE)
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((number, signal.getsignal(number))))
    kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    assert sent == [(signal.SIGTERM, signal.SIG_DFL)]


def test_what_another_handler_would_do_with_a_signal_is_left_out(holding: Interruption) -> None:
    """As Lightning's, which is set while signals are held back, and calls the handler that it found."""
    send(signal.SIGTERM)
    found = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("called"))
    holding.hold()
    with pytest.raises(SIGTERMException):
        holding.check(ALONE)
    assert signal.getsignal(signal.SIGTERM) == found
    with pytest.raises(SIGTERMException):
        holding.release()
    with pytest.raises(Term):
        send(signal.SIGTERM)
