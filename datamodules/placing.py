"""Where each model of a run is: on the run's device, on one of its own, or on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frozen.loading.placement import DeviceMap, check_device

__all__ = ["Placing", "check_placings", "placings"]


@dataclass(frozen=True)
class Placing:
    """Where a model goes; with neither, to the device of the run.

    Attributes:
        device: all of it.
        device_map: which part goes where.
    """

    device: str | None = None
    device_map: DeviceMap | None = None

    @property
    def given(self) -> bool:
        """Whether anything was asked for."""
        return self.device is not None or self.device_map is not None


def check_placings(devices: Sequence[str | None] | None) -> None:
    """Refuse devices that are not there.

    Raises:
        ValueError: naming the device.
    """
    for name in devices or ():
        if name is not None:
            check_device(name, "devices")


def placings(
    named: Sequence[Any], devices: Sequence[str | None] | None, device_maps: Sequence[DeviceMap | None] | None
) -> list[Placing]:
    """Where each model goes.

    Args:
        named: what says which models are one and the same, one entry for each.
        devices: one for each, or nothing.
        device_maps: one for each, or nothing.

    Raises:
        ValueError: there is not one entry for each model, two for a model, or different ones for the same model.
    """
    for option, given in (("devices", devices), ("device_map", device_maps)):
        if given is not None and len(given) != len(named):
            raise ValueError(
                f"Expected `{option}` to have one entry for each of {len(named)} models, but got {len(given)}. "
                "Write null for a model that goes where the run is."
            )
    nothing = [None] * len(named)
    found = [Placing(*each) for each in zip(devices or nothing, device_maps or nothing, strict=True)]
    for number, placing in enumerate(found, start=1):
        if placing.device is not None and placing.device_map is not None:
            raise ValueError(
                f"Expected `devices` or `device_map` for a model, but model {number} has both: {placing.device} and "
                f"{placing.device_map}. Write null in one of them."
            )
        first = named.index(named[number - 1])
        if placing != found[first]:
            raise ValueError(
                f"Expected `devices` and `device_map` to put a model in one place, but models {first + 1} and {number} "
                "are the same. Give both entries the same place."
            )
    return found
