"""What an offline W&B run has written. The package has no reader of its own: a file is a log in LevelDB's format."""

import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

PATIENCE = 300  # seconds; W&B takes one
BLOCK, FILE_HEADER, HEADER = 32768, 7, struct.Struct("<IHB")  # bytes; checksum, length and kind of a part
WHOLE, LAST = 1, 4


def run_numbers(folder: Path) -> list[str]:
    """The numbers of the W&B runs below a folder, the earliest first."""
    return [path.name.split("-", 3)[-1] for path in sorted(folder.rglob("offline-run-*"))]


def records(folder: Path, kind: str) -> Iterator[Any]:
    """The records of a kind of all W&B runs below a folder, which have ended."""
    for run in sorted(folder.rglob("offline-run-*")):
        for record in _whole(run / f"run-{run.name.split('-', 3)[-1]}.wandb"):
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)


def artifacts(folder: Path) -> list[Any]:
    """The artifacts that were logged, made and used."""
    return list(records(folder, "artifact"))


def _whole(path: Path) -> list[Any]:
    """All records of a run that has ended; W&B's service writes the last ones after `finish` has returned."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = [Record.FromString(entry) for entry in (_logged(path.read_bytes()) if path.is_file() else ())]
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        signal.sigtimedwait([], 0.05)
    raise TimeoutError(f"{path} has no end")


def _logged(content: bytes) -> Iterator[bytes]:
    """The entries of a log, each of one or more parts; no part begins in the last bytes of a block."""
    place, entry = FILE_HEADER, b""
    while place < len(content):
        if BLOCK - place % BLOCK < HEADER.size:
            place += BLOCK - place % BLOCK
            continue
        if place + HEADER.size > len(content):  # it is being written
            return
        _, length, kind = HEADER.unpack_from(content, place)
        entry += content[place + HEADER.size : place + HEADER.size + length]
        place += HEADER.size + length
        if kind in (WHOLE, LAST):
            yield entry
            entry = b""
