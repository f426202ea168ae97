"""Adds up what several processes have summed, one tensor at a time and in its own memory."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch import distributed as dist


def ranks() -> int:
    """Number of processes that sum together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def this_rank() -> int:
    """Number of this process."""
    if ranks() > 1:
        return dist.get_rank()
    return 0


def summed(value: Tensor, to: int | None = None) -> Tensor:
    """The sum over all ranks, in place.

    Args:
        value: this rank's.
        to: the only rank that needs the sum; what the others get means nothing. Default: all need it.
    """
    if ranks() == 1:
        return value
    value = value.contiguous()
    if to is None:
        dist.all_reduce(value)
    else:
        dist.reduce(value, to)
    return value


def collected(value: Any) -> list[Any]:
    """The objects of all ranks, in their order."""
    if ranks() == 1:
        return [value]
    objects: list[Any] = [None] * ranks()
    dist.all_gather_object(objects, value)
    return objects


def from_first(work: Callable[[], Any]) -> Any:
    """What some work gives, done by the first rank alone.

    Raises:
        ValueError: the first rank's, on all ranks.
    """
    result: Any = None
    if this_rank() == 0:
        try:
            result = work()
        except ValueError as error:
            result = error
    result = collected(result)[0]
    if isinstance(result, ValueError):
        raise result
    return result
