"""Checksums in the files that are read again: a byte that changed on the disk is noticed when they are loaded.

A safetensors file has its checksum in its metadata, an archive of torch in its comment, a JSON object under one more
name. It covers every other byte of the file. Files of earlier versions have no checksum, and are not checked.
"""

import json
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from aligners.errors import UserError

NAME, KIND = (
    "aligners-checksum",
    "blake2b:",
)  # a file with one of the two has, or had, a checksum
UNKNOWN = KIND + "0" * 32  # in its place while it is computed
_SEAL = re.compile(rb"aligners-checksum\W{1,3}blake2b:([0-9a-f]{32})")
_COMMENT = f"{NAME} {UNKNOWN}".encode()
_TAIL = 4 * len(
    _COMMENT
)  # bytes at the end of an archive in which its comment is looked for
Save = Callable[[dict[str, Any], Path, dict[str, str]], None]
SUMS = "checksums.json"  # of a model's folder: the files that decide what it computes, config.json aside
WEIGHTS, WORDS = (
    (".safetensors",),
    ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt"),
)


def save_sealed(
    save: Save, tensors: Mapping[str, Any], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file with its checksum. Equal tensors and metadata make equal files.

    Args:
        save: `save_file` of safetensors.
        tensors: by name.
        path: path of the file.
        metadata: what else it says.
    """
    save(dict(tensors), path, {**metadata, NAME: UNKNOWN})
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        # safetensors writes them in another order every time
        ordered = {
            **header,
            "__metadata__": dict(sorted(header["__metadata__"].items())),
        }
        written = (
            json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
            .encode()
            .ljust(size)
        )
        if len(written) != size:
            raise RuntimeError(
                f"The header of {path} has {size} bytes, but {len(written)} once it is sorted."
            )
        file.seek(8)
        file.write(written)
    _enter(path)


def seal_archive(path: Path) -> None:
    """Enter the checksum as the comment of a zip archive, as `torch.save` has just written it."""
    with path.open("r+b") as file:
        file.seek(-2, 2)
        if file.read(2) != b"\0\0":
            raise RuntimeError(f"{path} is no archive, or has a comment already.")
        file.seek(-2, 2)
        file.write(len(_COMMENT).to_bytes(2, "little") + _COMMENT)
    _enter(path)


def check_sealed(path: Path) -> None:
    """Raise if a file that has a checksum is not what was written.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    place = _find(path)
    if place is None:
        return
    first, told = place
    if told is None or _digest(path, first) != told:
        raise UserError(
            f"{path} is damaged: its bytes are not those that were written. Copy or make it again."
        )


def sealed_json(plain: Mapping[str, Any]) -> str:
    """Write a dictionary of plain values as JSON, with its checksum."""
    return json.dumps({**plain, NAME: _digest_of(plain)}, indent=1) + "\n"


def read_sealed_json(text: str) -> dict[str, Any]:
    """Read what `sealed_json` wrote; of an earlier version, JSON without a checksum.

    Raises:
        ValueError: it is damaged.
    """
    held = json.loads(text)
    if not isinstance(held, dict):
        raise ValueError("it is no JSON object")
    told = held.pop(NAME, None)
    claims = told is not None or any(
        str(value).startswith(KIND) for value in held.values()
    )
    if claims and told != _digest_of(held):
        raise ValueError("its bytes are not those that were written")
    return held


def seal_model(folder: Path) -> None:
    """Write the checksums of a model's weights and tokenizer beside them."""
    sums = {
        path.name: _digest(path)
        for path in sorted(folder.iterdir())
        if path.name.endswith(WEIGHTS + WORDS)
    }
    (folder / SUMS).write_text(sealed_json(sums), encoding="utf-8")


def check_model(folder: Path, endings: tuple[str, ...]) -> None:
    """Raise if files of a model are not those that `seal_model` saw, where it was called.

    Args:
        folder: folder of the model.
        endings: of the files that are checked: `WEIGHTS` or `WORDS`.

    Raises:
        ValueError: one of them is damaged.
    """
    try:
        sums = read_sealed_json((folder / SUMS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UserError(
            f"{folder / SUMS} is damaged: {error}. Make the model in {folder} anew."
        ) from error
    for name, told in sums.items():
        path = folder / name
        if name.endswith(endings) and path.is_file() and _digest(path) != told:
            raise UserError(
                f"{path} is damaged: its bytes are not those that were written. Make the model again, or remove "
                f"{folder / SUMS} if you have changed the file yourself."
            )


def _enter(path: Path) -> None:
    """Compute the checksum of a file, and write it in place of `UNKNOWN`."""
    place = _find(path)
    if place is None:
        raise RuntimeError(
            f"Expected a place for a checksum in {path}, but there is none."
        )
    told = _digest(path, place[0])
    with path.open("r+b") as file:
        file.seek(place[0])
        file.write(told.encode())


def _find(path: Path) -> tuple[int, str | None] | None:
    """Return where in a file its checksum is, and the checksum; None: it has none.

    Returns:
        The place of its first byte, and None instead of the checksum where that is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(
            file.read(8), "little"
        )  # of the header, if it is a safetensors file
        begin = file.read(length) if length <= size else b""
        last = max(0, size - _TAIL)
        file.seek(last)
        end = file.read()
    for start, part in ((8, begin), (last, end)):
        found = _SEAL.search(part)
        if found is not None:
            return start + found.start(1) - len(KIND), KIND + found[1].decode()
        if NAME.encode() in part or KIND.encode() in part:
            return start, None
    return None


def _digest(path: Path, place: int | None = None) -> str:
    """Return the checksum of a file, with its own place in the file counted as `UNKNOWN`."""
    with path.open("rb") as file:
        if place is None:
            return KIND + file_digest(file, _new).hexdigest()
        digest = _new(file.read(place))
        digest.update(UNKNOWN.encode())
        file.seek(place + len(UNKNOWN))
        while block := file.read(2**20):
            digest.update(block)
    return KIND + digest.hexdigest()


def _new(content: bytes = b"") -> Any:
    return blake2b(content, digest_size=16)


def _digest_of(plain: Mapping[str, Any]) -> str:
    """Return the checksum of plain values, as they come back from JSON."""
    return KIND + _new(json.dumps(plain, sort_keys=True).encode()).hexdigest()
