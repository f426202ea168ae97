"""Whatever is wrong with a file that a user gives is an error that names it."""

import errno
import pickle
from pathlib import Path

import pytest

from aligners.errors import UserError
from aligners.files.user_files import NOT_ONLY_TENSORS, read_json, read_yaml, refusing


@pytest.mark.parametrize("error", [KeyError("a"), AssertionError(), ZeroDivisionError("by zero\nmore"), TypeError("x")])
def test_any_error_becomes_one_of_the_user(error: Exception) -> None:
    with pytest.raises(UserError, match=rf"^It fails \({type(error).__name__}.*\)\. Mend it\.$") as found, \
         refusing("It fails", "Mend it."):  # fmt: skip
        raise error
    assert found.value.__cause__ is error


def test_what_the_user_or_the_disk_has_said_stays() -> None:
    with pytest.raises(UserError, match=r"^mine$"), refusing("It fails"):
        raise UserError("mine")
    with pytest.raises(MemoryError), refusing("It fails"):
        raise MemoryError
    with pytest.raises(OSError, match="full"), refusing("It fails"):
        raise OSError(errno.ENOSPC, "full", "/some/file")
    with pytest.raises(UserError, match=NOT_ONLY_TENSORS), refusing("It fails"):
        raise pickle.UnpicklingError("Re-running `torch.load` with `weights_only` set to `False` will likely succeed")


def test_numbers_that_json_does_not_have_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": NaN, "b": [Infinity, 1e400, 0.5, 3]}')
    assert read_json(tmp_path / "a.json", "one", "") == {"a": None, "b": [None, None, 0.5, 3]}


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff\xfe", b'"x"', b"!!python/object/apply:os.getcwd []", None])
def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    for read, name in ((read_json, "a.json"), (read_yaml, "a.yaml")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"Expected .*{name} to be a report, but .*\. Run it again\."):
            read(tmp_path / name, "a report", "Run it again.")
