"""A file is written whole or not at all."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aligners.errors import UserError
from aligners.files.atomic import (
    confined,
    let_write,
    lock,
    open_own,
    remove_unfinished,
    whole_file,
    whole_folder,
    write_text,
)

KILLED = """
import os, signal, sys
from pathlib import Path
from aligners.files.atomic import whole_file, whole_folder
with {writer}(Path(sys.argv[1])) as unfinished:
    ({place}).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_half_way(writing: AbstractContextManager[Path], name: str) -> None:
    with pytest.raises(RuntimeError), writing as unfinished:  # noqa: PT012
        (unfinished / name).write_text("half")
        raise RuntimeError


def test_the_new_content_replaces_the_old_and_an_error_leaves_it_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    write_text(tmp_path / "file", "neu €")
    fail_half_way(whole_file(tmp_path / "file"), "")
    fail_half_way(whole_folder(tmp_path / "new"), "file")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "neu €"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "write",
    [torch.save, lambda value, path: save_file({"x": value}, path), lambda value, path: path.write_bytes(bytes(10**6))],
)
def test_a_full_disk_is_named_and_leaves_the_old_content(write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for whole, name, place in ((whole_file, "file", ""), (whole_folder, "folder", "inside")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as failed, whole(tmp_path / name) as unfinished:
                write(torch.ones(10**6), unfinished / place)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert failed.value.filename == str(tmp_path / name)
        assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize(("writer", "place"), [("whole_file", "unfinished"), ("whole_folder", "unfinished / 'file'")])
def test_what_a_killed_process_left_is_written_over(tmp_path: Path, writer: str, place: str) -> None:
    code = KILLED.format(writer=writer, place=place)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "name")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".name.unfinished"]
    if writer == "whole_file":
        write_text(tmp_path / "name", "whole")
        assert (tmp_path / "name").read_text() == "whole"
    else:
        with whole_folder(tmp_path / "name") as unfinished:
            assert names(unfinished) == []
            (unfinished / "other").write_text("whole")
        assert names(tmp_path / "name") == ["other"]
    assert names(tmp_path) == ["name"]


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, "644", "755"), (0o007, "660", "770")])
def test_the_umask_says_who_may_read_what_is_written(tmp_path: Path, umask: int, file: str, folder: str) -> None:
    (tmp_path / ".weights.unfinished").touch(0o600)  # left by a process that was killed
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "weights") as unfinished:
            save_file({"x": torch.ones(1)}, unfinished)
        with whole_folder(tmp_path / "model") as unfinished:
            save_file({"x": torch.ones(1)}, unfinished / "weights")
        write_text(tmp_path / "text", "text")
        os.close(lock(tmp_path / "lock") or -1)
    finally:
        os.umask(before)
    modes = {str(path.relative_to(tmp_path)): f"{path.stat().st_mode & 0o777:o}" for path in tmp_path.rglob("*")}
    assert modes == {"model": folder, **dict.fromkeys(("weights", "model/weights", "text", "lock"), file)}


@pytest.mark.parametrize("of_folders", [True, False])
def test_a_filesystem_that_cannot_sync_folders_still_syncs_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_folders: bool
) -> None:
    def sync(place: int) -> None:
        if stat.S_ISDIR(os.fstat(place).st_mode) == of_folders:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", sync)
    if of_folders:
        with whole_folder(tmp_path / "folder") as unfinished:
            write_text(unfinished / "file", "whole")
        assert (tmp_path / "folder" / "file").read_text() == "whole"
    else:
        with pytest.raises(OSError, match="Invalid argument"):
            write_text(tmp_path / "file", "half")
        assert names(tmp_path) == []


def test_left_overs_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "below" / ".folder.unfinished").mkdir(parents=True)
    (tmp_path / "below" / ".folder.unfinished" / "file").write_text("half")
    (tmp_path / ".file.unfinished").write_text("half")
    (tmp_path / "kept").write_text("whole")
    remove_unfinished(tmp_path)
    assert [os.path.relpath(path, tmp_path) for path in sorted(tmp_path.rglob("*"))] == ["below", "kept"]


@pytest.mark.parametrize("name", ["../out", "x/../../out", "inside/../../out", "/tmp/out-of-a-run", "link/out"])
def test_a_command_writes_in_its_folders_alone(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "inside").mkdir(parents=True)
    (run / "link").symlink_to(tmp_path)
    with confined():
        let_write(run)
        write_text(run / "inside" / "file", "text")
        with whole_folder(run / "folder") as unfinished:
            write_text(unfinished / "file", "text")
        for write in (write_text, lambda path, text: open_own(path, "w").write(text)):
            with pytest.raises(UserError, match=f"Expected to write in {run}, but a name, or a link, leads to"):
                write(run / name, "text")
    assert names(tmp_path) == ["run"]
    assert not Path("/tmp/out-of-a-run").exists()
    write_text(tmp_path / "free", "text")  # no command runs


def test_nothing_is_written_where_no_folder_is_named(tmp_path: Path) -> None:
    with confined(), pytest.raises(UserError, match="in no folder at all"):
        write_text(tmp_path / "file", "text")


def test_logs_and_locks_are_no_links(tmp_path: Path) -> None:
    write_text(tmp_path / "mine", "mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for write in (lambda path: open_own(path, "a"), lambda path: open_own(path, "w"), lock):
        with pytest.raises(OSError, match="symbolic links"):
            write(tmp_path / "link")
    assert (tmp_path / "mine").read_text() == "mine"
    with open_own(tmp_path / "log", "a") as log:
        log.write("a")
    with open_own(tmp_path / "log", "a") as log:
        log.write("b")
    assert (tmp_path / "log").read_text() == "ab"
