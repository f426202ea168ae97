"""Tensors that were computed from stored states, kept beside them in a file with a checksum."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligners.errors import UserError
from aligners.files.whole import whole_file


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of the CPU, whole or not at all.

    Raises:
        OSError: they cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value.contiguous() for name, value in tensors.items()}
    with whole_file(path) as unfinished:
        save_file(kept, unfinished, metadata={"crc32": str(_checksum(kept))})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors, and note that they are used.

    Raises:
        ValueError: they are not those that were written.
    """
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            expected = (file.metadata() or {}).get("crc32")
    except Exception as error:  # safetensors has errors of its own
        raise UserError(_damaged(path)) from error
    if str(_checksum(found)) != expected:
        raise UserError(_damaged(path))
    if os.access(path, os.W_OK):
        path.touch()
    return found


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), crc))
    return crc


def _damaged(path: Path) -> str:
    return f"{path} is damaged: it is not what was written. Remove the file: it is then computed again."
