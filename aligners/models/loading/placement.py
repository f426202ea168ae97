"""Placement of a model's weights: on one device, or block by block on several."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from aligners.errors import UserError, check_extra
from aligners.models.hooks import Blocks

DeviceMap = str | Mapping[str, int | str | torch.device]
_CHOSEN = (
    "auto",
    "balanced",
    "balanced_low_0",
    "sequential",
)  # by transformers, from what fits


def check_device(name: str | int | torch.device, argument: str) -> torch.device:
    """Return the device of this name.

    Raises:
        ValueError: it is not a device, weights cannot be read there, or this machine lacks it. Names `argument`.
    """
    try:
        device = torch.device("meta" if name == "disk" else name)  # neither computes
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"Expected `{argument}` to name devices such as cpu or cuda:1, but got {name!r}."
        ) from error
    if device.type == "meta":
        raise UserError(_not_there(argument, str(name)))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"Expected `{argument}` to name devices of this machine, but got {name!r}: it has "
            f"{torch.cuda.device_count()} CUDA devices, counted from 0. Name another, such as cpu."
        )
    return device


def check_device_map(
    device_map: DeviceMap, model: PreTrainedModel, blocks: Blocks
) -> None:
    """Raise if a device map cannot be followed, before any weight is read.

    Args:
        device_map: as it will be passed to transformers.
        model: the model without its weights, which may be on the device "meta".
        blocks: its blocks.

    Raises:
        ValueError: accelerate is missing, a device is unknown or only offloads weights, or a block is split.
    """
    check_extra("sharded", "accelerate", f"A `device_map` ({device_map!r})")
    if isinstance(device_map, str):
        if device_map not in _CHOSEN:
            check_device(device_map, "device_map")
        return
    devices = {
        module: check_device(name, "device_map") for module, name in device_map.items()
    }
    kinds = {device.type for device in devices.values()}
    if "cpu" in kinds and len(kinds) > 1:
        raise UserError(
            _not_there(
                "device_map", f"cpu beside {' and '.join(sorted(kinds - {'cpu'}))}"
            )
        )
    placed: dict[int, torch.device] = {}
    for name, weight in model.named_parameters():
        parts = name.split(
            "."
        )  # from the weight itself over its modules to the whole model
        around = next(
            (
                path
                for n in range(len(parts), -1, -1)
                if (path := ".".join(parts[:n])) in devices
            ),
            None,
        )
        if around is None:
            raise UserError(
                f"Expected a `device_map` with a place for every weight, but got none for {name}. Name its module, or "
                "'' for all that is not named."
            )
        placed[id(weight)] = devices[around]
    _check_whole(blocks, lambda weight: placed[id(weight)])


def check_placement(model: PreTrainedModel, blocks: Blocks) -> None:
    """Raise if the weights of a model are not where they are used.

    Raises:
        ValueError: a block is split between devices, or weights are kept elsewhere until they are needed.
    """
    absent = next(
        (name for name, weight in model.named_parameters() if weight.is_meta), None
    )
    if absent is not None:
        raise UserError(_not_there("device_map", f"one that leaves {absent} there"))
    _check_whole(blocks, lambda weight: weight.device)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether accelerate has placed the parts of the model, and moves their inputs."""
    return any("_hf_hook" in vars(part) for part in model.modules())


def place_like(fresh: PreTrainedModel, model: PreTrainedModel) -> PreTrainedModel:
    """Place a model like another one of the same structure."""
    if not is_sharded(model):
        return cast(Any, fresh).to(model.device)
    from accelerate import dispatch_model  # an extra: only what is sharded needs it

    return dispatch_model(
        fresh,
        device_map=model.hf_device_map,
        skip_keys=model._skip_keys_device_placement,
        force_hooks=True,
    )


def _check_whole(
    blocks: Blocks, device_of: Callable[[nn.Parameter], torch.device]
) -> None:
    for number, block in enumerate(blocks, start=1):
        placed = {name: device_of(weight) for name, weight in block.named_parameters()}
        first = next(iter(placed))
        other = next((name for name in placed if placed[name] != placed[first]), None)
        if other is not None:
            raise UserError(
                "Expected a `device_map` that keeps every block on one device, but got one that splits block "
                f"{number}: {first} is on {placed[first]}, {other} on {placed[other]}. Name the blocks as a whole."
            )


def _not_there(argument: str, received: str) -> str:
    return (
        f"Expected `{argument}` to put every weight on a device that computes with it, but got {received}. That keeps "
        "weights elsewhere until they are used, where they cannot be read or replaced. Use more devices or a smaller "
        "`dtype`."
    )
