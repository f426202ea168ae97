"""Files as an earlier version wrote them: without a checksum."""

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from aligners.files.sealed import NAME


def without_checksum(path: Path) -> None:
    """Take the checksum out of a safetensors file or of an archive of torch."""
    if path.suffix == ".ckpt":
        content = path.read_bytes()
        end = content.rindex(NAME.encode())
        path.write_bytes(content[: end - 2] + b"\0\0")
        return
    with safe_open(path, "pt") as file:
        metadata = {name: value for name, value in (file.metadata() or {}).items() if name != NAME}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    save_file(tensors, path, metadata)
