"""What a file of maps must not carry from one machine to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["for_others"]

# Options of the machine, and what they are where nothing was chosen. The first would run somebody else's code.
OF_A_MACHINE: dict[str, Any] = {
    "trust_remote_code": False, "cache": None, "store": None, "devices": None, "device_map": None, "workers": 0,
}  # fmt: skip


def for_others(data_config: Mapping[str, Any]) -> dict[str, Any]:
    """A data module's options without those that are about one machine."""
    return {name: OF_A_MACHINE.get(name, value) for name, value in data_config.items()}
