"""What runs have trained, shared: saved to a folder, loaded from it, uploaded to the Hugging Face Hub."""

from aligners.reports.sharing.pretrained import (
    Shared,
    SharedMaps,
    SharedProbes,
    SharedStitching,
    SharedUniverse,
)

__all__ = ["Shared", "SharedMaps", "SharedProbes", "SharedStitching", "SharedUniverse"]
