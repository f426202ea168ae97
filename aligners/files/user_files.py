"""Reads files that users give, or may have edited: whatever is wrong with one is an error that names it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from aligners.errors import UserError, finite

NOT_ONLY_TENSORS = "it holds more than tensors, and only tensors are read, as anything else could run code"


@contextmanager
def refusing(what: str, advice: str = "") -> Iterator[None]:
    """Context in which any error that a file's content raises becomes one that says what is wrong with it.

    Readers of other packages, and our code for files of our own, raise almost anything for a file that is damaged or
    was edited. Errors that the user can fix, and those of the disk and of memory, stay as they are.

    Args:
        what: which file is it and what fails: the beginning of a sentence.
        advice: what to do.

    Raises:
        UserError: in place of any other error, of which it shows the first line.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if (
            isinstance(error, OSError)
            and error.errno is not None
            and error.filename is not None
        ):
            raise
        raise UserError(f"{what} ({reason(error)}). {advice}".strip()) from error


def reason(error: Exception) -> str:
    """Return the kind and the first line of an error, without torch's advice on `weights_only`."""
    if "weights_only" in str(error):
        return NOT_ONLY_TENSORS
    if "not a valid JSON file" in str(error) and ".gguf" in str(error):
        return "it ends too early"
    lines = str(error).strip().splitlines()
    first = (
        "".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    )
    first = first.replace("\t", " ")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def read_json(path: Path, what: str, advice: str) -> dict[str, Any]:
    """Read names and values from a JSON file; numbers that JSON does not have, such as NaN, are None.

    Args:
        path: path of the file.
        what: it is, such as "a report".
        advice: what to do if it is damaged.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    with _as_expected(path, what, advice):
        text = path.read_text(encoding="utf-8")
        return dict(
            json.loads(
                text,
                parse_constant=lambda _: None,
                parse_float=lambda number: finite(float(number)),
            )
        )


def read_yaml(path: Path, what: str, advice: str) -> dict[str, Any]:
    """Read names and values from a YAML file, as `read_json` does; none from an empty one. Tags are refused."""
    with _as_expected(path, what, advice):
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})


@contextmanager
def _as_expected(path: Path, what: str, advice: str) -> Iterator[None]:
    if not path.is_file():
        raise UserError(
            f"Expected {path} to be {what}, but there is no such file. {advice}"
        )
    with refusing(
        f"Expected {path} to be {what}, but it cannot be read as one", advice
    ):
        yield
