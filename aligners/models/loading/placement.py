"""Placement of a model's weights: on one device, or block by block on several."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from aligners.errors import UserError, check_extra
from aligners.models.hooks import Blocks

DeviceMap = str | Mapping[str, int | str | torch.device]
# how transformers chooses, from what fits
_CHOSEN = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device(name: str | int | torch.device, argument: str) -> torch.device:
    """Return the device of this name.

    Raises:
        ValueError: it is not a device, weights cannot be read there, or this machine lacks it. Names `argument`.
    """
    try:
        # neither "meta" nor "disk" computes
        device = torch.device("meta" if name == "disk" else name)
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
    devices = {}
    for module, name in device_map.items():
        devices[module] = check_device(name, "device_map")
    kinds = {device.type for device in devices.values()}
    others = sorted(kinds - {"cpu"})
    if "cpu" in kinds and others:
        raise UserError(_not_there("device_map", f"cpu beside {' and '.join(others)}"))

    placed: dict[nn.Parameter, torch.device] = {}
    for name, weight in model.named_parameters():
        placed[weight] = _place_of(name, devices)
    _check_whole(blocks, placed.__getitem__)


def _place_of(weight: str, devices: Mapping[str, torch.device]) -> torch.device:
    """Return the device of the smallest module around a weight that a device map names.

    Raises:
        ValueError: it names none.
    """
    path = weight
    while path and path not in devices:
        path = path.rpartition(".")[0]
    if path not in devices:
        raise UserError(
            f"Expected a `device_map` with a place for every weight, but got none for {weight}. Name its module, or "
            "'' for all that is not named."
        )
    return devices[path]


def check_placement(model: PreTrainedModel, blocks: Blocks) -> None:
    """Raise if the weights of a model are not where they are used.

    Raises:
        ValueError: a block is split between devices, or weights are kept elsewhere until they are needed.
    """
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise UserError(_not_there("device_map", f"one that leaves {name} there"))
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
    """Raise if a block is split between devices."""
    for number, block in enumerate(blocks, start=1):
        (first, weight), *others = block.named_parameters()
        device = device_of(weight)
        for name, weight in others:
            if device_of(weight) == device:
                continue
            raise UserError(
                "Expected a `device_map` that keeps every block on one device, but got one that splits block "
                f"{number}: {first} is on {device}, {name} on {device_of(weight)}. Name the blocks as a whole."
            )


def _not_there(argument: str, received: str) -> str:
    """Return the error for weights on a device that does not compute."""
    return (
        f"Expected `{argument}` to put every weight on a device that computes with it, but got {received}. That keeps "
        "weights elsewhere until they are used, where they cannot be read or replaced. Use more devices or a smaller "
        "`dtype`."
    )
