"""Writes a file or a folder whole or not at all, on any filesystem."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Literal, TextIO

from aligners.errors import UserError

UNFINISHED = ".unfinished"
_below: list[Path] | None = (
    None  # folders in which a command may write; None: no command runs, and nothing is checked
)


@contextmanager
def confined() -> Iterator[None]:
    """Context in which files are written only in the folders of `let_write`, wherever their names may lead."""
    global _below
    before, _below = _below, []
    try:
        yield
    finally:
        _below = before


def let_write(folder: Path) -> None:
    """Let the command that runs write in a folder."""
    place = folder.resolve()
    if _below is not None and not any(place.is_relative_to(other) for other in _below):
        _below.append(place)


def _check_place(path: Path) -> None:
    """Raise if a command would write outside its folders.

    Raises:
        ValueError: it would.
    """
    place = path.parent.resolve() / path.name
    if _below is None or any(place.is_relative_to(folder) for folder in _below):
        return
    folders = ", ".join(map(str, _below)) or "no folder at all"
    raise UserError(
        f"Expected to write in {folders}, but a name, or a link, leads to {place}. Nothing was written there: look at "
        "the names in the files that this command has read."
    )


def open_own(path: Path, mode: Literal["a", "w"]) -> TextIO:
    """Open a text file to write to, which is no link to another.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    _check_place(path)
    add = os.O_APPEND if mode == "a" else os.O_TRUNC
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | add, 0o666)
    return open(file, mode, encoding="utf-8", buffering=1)


def whole_file(path: Path) -> AbstractContextManager[Path]:
    """Context with a temporary file to write to, renamed to `path` once it is complete and on the disk.

    It lies beside `path`, so that the last step is a rename within one filesystem: whatever happens, `path` holds
    either what it held before or everything. Remains of a killed process are overwritten.

    Raises:
        OSError: the file cannot be written; `path` is as it was.
    """
    return _taking_place(path, Path.touch)


def whole_folder(folder: Path) -> AbstractContextManager[Path]:
    """Context with a temporary folder to write to, renamed to `folder` once everything in it is complete on disk.

    Raises:
        OSError: something cannot be written, or `folder` holds files already.
    """
    return _taking_place(folder, Path.mkdir)


@contextmanager
def _taking_place(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Make a temporary file or folder, and rename it to `path` once it is written; after an error, remove it.

    It is readable for everybody whom the umask allows: safetensors would restrict files to their owner.
    """
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    _check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        remove(unfinished)  # left by a process that was killed
        make(unfinished)
        let_write(unfinished)
        mode = unfinished.stat().st_mode & 0o666
        yield unfinished
        for part in [*unfinished.rglob("*"), unfinished]:
            if part.is_file() and part.stat().st_mode & 0o666 != mode:
                part.chmod(mode)
            _sync(part)
        os.replace(unfinished, path)
        _sync(path.parent)
    except Exception as error:
        files = sorted(
            filter(Path.is_file, unfinished.rglob("*")),
            key=lambda file: file.stat().st_size,
        )
        more = unfinished / "more" if unfinished.is_dir() else unfinished
        _blame_disk(files[-1] if files else more, path, error)
        raise
    finally:
        with suppress(OSError):  # which would hide the error that matters
            remove(unfinished)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def lock(path: Path) -> int | None:
    """Lock a file, which is made if need be, against other processes; None if one of them has it.

    Returns:
        The number of the open file, which is locked until it is closed.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:  # the filesystem has no locks
        pass
    return file


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_folder(folder: Path, argument: str) -> None:
    """Make a folder, try to write a file there, and let the command that runs do so.

    Raises:
        ValueError: it cannot be done; names `argument`.
    """
    with refusing_folder(folder, argument):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            let_write(folder)


def check_new_folder(folder: Path, argument: str) -> None:
    """Raise unless a folder is new or empty, and can be made; let the command that runs write it.

    Raises:
        ValueError: it is not; names `argument`.
    """
    with refusing_folder(folder, argument):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"Expected `{argument}` to be a new or empty folder, but {folder} holds files."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        let_write(folder)


@contextmanager
def refusing_folder(folder: Path, argument: str) -> Iterator[None]:
    """Say which argument named a folder in which something could not be written.

    Raises:
        ValueError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Expected `{argument}` to be a folder that can be written to, but got {folder}: {error.strerror}. "
            "Name another, or change its permissions."
        ) from error


def remove_unfinished(folder: Path) -> None:
    """Remove what a process that was killed has left half-written in a folder. Nobody else may be writing there."""
    for path in folder.rglob(f".*{UNFINISHED}"):
        remove(path)


def _blame_disk(unfinished: Path, path: Path, error: Exception) -> None:
    """Raise an OSError that names `path` if it cannot be written: torch and safetensors raise errors of their own."""
    if match := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
    try:
        with unfinished.open("ab") as file:
            file.write(bytes(2**16))
    except OSError as full:
        raise OSError(full.errno, full.strerror, str(path)) from error


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk. Some network filesystems cannot do so for folders."""
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(place)
