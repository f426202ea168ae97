"""One command at a time has a run's folder."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from lightning.pytorch.demos.boring_classes import BoringDataModule
from lightning.pytorch.utilities import rank_zero_only
from tests.processes import PROCESSES

from aligners.cli import folders, run_loggers
from aligners.cli.command import Command, Run
from aligners.cli.folders import CONFIG, RANKS_SHARE, claim, claim_checkpoints, is_begun, new_run_folder, try_run_folder
from aligners.cli.log import RUN_LOG, end_log


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RANKS_SHARE, "")
    monkeypatch.setattr(rank_zero_only, "rank", 0)


def claims_at_once(wanted: Sequence[Path | None], count: int = 10) -> list[list[str]]:
    """What each of `count` processes says that begin the same runs at the same time, one run after the other."""
    ready, said = PROCESSES.Barrier(count), PROCESSES.Queue()
    each = [PROCESSES.Process(target=_claims, args=(wanted, ready, said)) for _ in range(count)]
    for process in each:
        process.start()
    found = [said.get() for _ in each]
    for process in each:
        process.join()
    return found


def _claims(wanted: Sequence[Path | None], ready: Any, said: Any) -> None:
    found = []
    for folder in wanted:
        made = new_run_folder(folder, "fit")
        ready.wait()  # everybody has found it empty
        try:
            claim(made, "some: options")
            found.append(f"has {made}")
        except ValueError as error:
            found.append(str(error))
    ready.wait()  # nobody has ended yet
    said.put(found)


@pytest.mark.slow
def test_of_ten_commands_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    new, empty = tmp_path / "new", tmp_path / "empty"
    empty.mkdir()
    said = claims_at_once([new, empty, None])
    for place, folder in enumerate((new, empty)):
        lost = [each[place] for each in said if each[place] != f"has {folder}"]
        assert len(lost) == 9
        assert all("Expected `run` to be a" in message for message in lost)
        assert sorted(path.name for path in folder.iterdir()) == [CONFIG, RUN_LOG]
    assert len({each[2] for each in said}) == 10  # default folders
    assert all(each[2].startswith("has runs/fit-") for each in said)


def let_go(file: Path) -> int:
    """As if the process that has claimed it were another."""
    return folders._claimed.pop(file.resolve())


def test_a_run_in_progress_is_not_gone_on_with(tmp_path: Path) -> None:
    claim(tmp_path, "a: 1")
    os.close(let_go(tmp_path / CONFIG))  # it has ended
    claim(tmp_path, "a: 2", begun=True)
    assert yaml.safe_load((tmp_path / CONFIG).read_text()) == {"a": 1}
    held = let_go(tmp_path / CONFIG)
    with pytest.raises(ValueError, match="another command is at work"):
        claim(tmp_path, "a: 3", begun=True)
    os.close(held)


def test_a_folder_of_checkpoints_belongs_to_one_run(tmp_path: Path) -> None:
    place, owner = tmp_path / "maps", tmp_path / "maps" / folders.OWNER
    claim_checkpoints(place, tmp_path / "one")
    assert owner.read_text() == f"{tmp_path / 'one'}\n"
    with pytest.raises(ValueError, match=r"`checkpoint\.folder` to be a folder of its own, but another command is at"):
        claim_checkpoints(place, tmp_path / "two")
    os.close(let_go(owner))  # its process has ended
    (place / "aligners.safetensors").touch()
    with pytest.raises(ValueError, match=r"to hold no checkpoints.*holds aligners.safetensors. Name"):
        claim_checkpoints(place, tmp_path / "two")
    (place / "aligners.safetensors").rename(place / "last.ckpt")
    for resumed in (None, tmp_path / "last.ckpt"):
        with pytest.raises(ValueError, match=r"`checkpoint.folder` to hold no checkpoints.*holds last.ckpt. Name"):
            claim_checkpoints(place, tmp_path / "two", resumed)
    assert owner.read_text() == f"{tmp_path / 'one'}\n"
    claim_checkpoints(place, tmp_path / "two", place / "last.ckpt")
    assert owner.read_text() == f"{tmp_path / 'two'}\n"
    os.close(let_go(owner))


def test_what_a_killed_command_left_is_removed_but_not_what_another_is_writing(tmp_path: Path) -> None:
    killed, other = tmp_path / "killed", tmp_path / "other"
    for folder in (killed, other):
        claim(new_run_folder(folder, "fit"), "a: 1")
        (folder / ".last.ckpt.unfinished").touch()
    os.close(let_go(killed / CONFIG))
    for folder in (killed, other, tmp_path):
        folders.tidy(folder)
    assert not (killed / ".last.ckpt.unfinished").exists()
    assert (other / ".last.ckpt.unfinished").exists()


@pytest.mark.parametrize("named", ["file", "file/below"])
def test_what_is_no_folder_is_refused(named: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for refuses in (lambda path: new_run_folder(path, "fit"), try_run_folder):
        with pytest.raises(ValueError, match=r"`run` to be a folder that can be written to.*Not a directory. Name"):
            refuses(tmp_path / named)
    try_run_folder(tmp_path / "new" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_given_back_only_if_nothing_was_written(tmp_path: Path) -> None:
    used, unused = tmp_path / "used", tmp_path / "unused"
    for folder in (used, unused):
        (folder / "wandb" / "run").mkdir(parents=True)
        claim(new_run_folder(folder, "fit"), "a: 1")
    (used / "metrics.csv").touch()
    folders.release_unused()
    assert is_begun(used)
    assert (used / CONFIG).resolve() in folders._claimed
    claim(new_run_folder(unused, "fit"), "a: 2")
    with pytest.raises(ValueError, match="holds files"):
        new_run_folder(unused, "fit")


def test_a_run_leaves_what_it_prints_and_appends_when_it_is_resumed(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    print("before")
    claim(new_run_folder(one, "fit"), "a: 1")
    print("first")
    assert (one / RUN_LOG).read_text() == "first\n"  # at once: a run may be killed
    folders.release(one)
    print("between")
    claim(one, "a: 1", begun=True)
    print("resumed", file=sys.stderr)
    claim(new_run_folder(two, "fit"), "a: 1")  # in the same process, whose run before has not been let go
    print("another")
    end_log(RUN_LOG)
    print("after")
    assert (one / RUN_LOG).read_text() == "first\nresumed\n"
    assert (two / RUN_LOG).read_text() == "another\n"


def test_a_full_disk_leaves_no_half_begun_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write_text", full)
    with pytest.raises(ValueError, match="No space left on device"):
        claim(tmp_path, "a: 1")
    assert not is_begun(tmp_path)


@pytest.mark.filterwarnings("error")  # nothing is said of a folder that holds config.yaml alone
def test_the_options_are_kept_before_wandb_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_loggers, "start_run", killed)
    command = Command(lambda run: None, "boring", data=BoringDataModule)
    with pytest.raises(KeyboardInterrupt):
        Run(command, command.parser(), command.parser().parse_args(["--run", "here"])).start()
    assert is_begun(Path("here"))


def test_wandb_without_a_key_says_how_to_log_in_and_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.setup()  # which keeps what it finds in the environment for all later runs of this process
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "nothing"))
    with caplog.at_level("WARNING"):
        _, logger = run_loggers.run_loggers(tmp_path / "run", "fit")
    assert re.search(r"no key: run `wandb login`.*logged offline", caplog.text)
    assert logger.experiment.settings._offline
    wandb.finish()


def test_further_ranks_share_the_folder_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_run_folder(None, "inject")
    assert os.environ[RANKS_SHARE] == str(folder)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert new_run_folder(None, "inject") == folder
    monkeypatch.setenv(RANKS_SHARE, "")
    new_run_folder(None, "inject")  # a rank that somebody else started makes none
    assert len(list(Path("runs").iterdir())) == 1


def test_a_run_that_goes_on_keeps_its_folder() -> None:
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("as it was")
    assert new_run_folder(Path("mine"), "finetune", begun=True) == Path("mine")
    assert os.environ[RANKS_SHARE] == "mine"
