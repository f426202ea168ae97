"""Processes of their own that need not import what takes long: split off one that has, and has done nothing else."""

from __future__ import annotations

from multiprocessing import get_context

__all__ = ["HANGS", "PROCESSES"]

HANGS = 3600  # seconds after which a process is given up, on however slow a machine
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["wandb.sdk.launch.inputs.internal", "lightning.pytorch", "transformers", "datasets", "matplotlib.pyplot"]
)
