"""A GPU and what only a GPU can be asked, or the CPU in its place."""

import gc
import math
import resource
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

WAITS = "called a synchronizing CUDA operation"  # what torch warns where the host waits for the GPU
# fmt: off
PACKAGES = (
    "transformers", "tokenizers", "numpy", "scipy", "lightning", "pytorch-lightning", "torchmetrics", "pyarrow",
    "torch-cka", "flash-attn",
)
# fmt: on


class Skipped(Exception):
    """A part does not run here, for the reason that the message gives."""


class Device:
    """Where the parts run.

    Args:
        name: "cuda", "cuda:1" or "cpu".

    Attributes:
        name: likewise.
        gpu: whether it is a GPU.
    """

    def __init__(self, name: str) -> None:
        self.name, self.gpu = name, torch.device(name).type == "cuda"

    @property
    def label(self) -> str:
        """What the device is called."""
        return torch.cuda.get_device_name(self.name) if self.gpu else "cpu"

    @property
    def uuid(self) -> str:
        """What nvidia-smi calls the GPU."""
        return f"GPU-{torch.cuda.get_device_properties(self.name).uuid}"

    @property
    def tf32(self) -> bool:
        """Whether it multiplies in TF32, as NVIDIA's GPUs of compute capability 8.0 or higher do."""
        if torch.device(self.name).type != "cuda" or torch.version.cuda is None:
            return False
        return torch.cuda.get_device_capability(self.name) >= (8, 0)

    def describe(self) -> dict[str, object]:
        """What a result should say of the device and of the packages beside `machine`."""
        about: dict[str, object] = {
            "packages": {name: _version(name) for name in PACKAGES}
        }
        if self.gpu:
            free, total = torch.cuda.mem_get_info(self.name)
            about |= {
                "cuda": torch.version.cuda,
                "capability": list(torch.cuda.get_device_capability(self.name)),
            }
            about |= {
                "devices": torch.cuda.device_count(),
                "memory": total,
                "free_memory": free,
            }
        return about

    def wait(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.gpu:
            torch.cuda.synchronize(self.name)

    def clear(self) -> None:
        """Give memory that is no longer used back, so that a part begins as if it were the first."""
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()

    def free(self) -> float:
        """Bytes that are free on a GPU; infinite on a CPU, whose sizes are small."""
        if not self.gpu:
            return math.inf
        return float(torch.cuda.mem_get_info(self.name)[0])

    def seconds(self, run: Callable[[], object]) -> float:
        """How long some work takes, once."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def waits(self, run: Callable[[], object]) -> int:
        """How often the host waits for the device during some work; on a CPU never."""
        if not self.gpu:
            run()
            return 0
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        self.wait()
        return sum(WAITS in str(warning.message) for warning in caught)

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that some work takes at most beyond what is held before; on a CPU, by how much the peak rises."""
        if not self.gpu:
            before = _largest()
            run()
            return _largest() - before
        self.clear()
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.name)
        held = torch.cuda.memory_allocated(self.name)
        run()
        self.wait()
        return torch.cuda.max_memory_allocated(self.name) - held


def _largest() -> int:
    """Peak memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
