"""Free space, in memory and on a disk."""

import shutil
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo")
    if not lines.is_file():  # not Linux: the free memory is unknown, and not limited
        return 2**62
    sizes = dict(line.split(":") for line in lines.read_text().splitlines())
    return 1024 * int(sizes["MemAvailable"].split()[0])


def free_disk(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def in_words(size: float) -> str:
    """Write a number of bytes like `1.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
