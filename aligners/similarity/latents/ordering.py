"""Orders of entries by several keys, and the rank of each among its own kind."""

import torch
from torch import Tensor


def sorted_by(*keys: Tensor) -> Tensor:
    """Return the order of entries by keys (E,) each, the first one first; entries equal in all stay in order."""
    first = keys[0]
    order = torch.arange(len(first), device=first.device)
    for key in reversed(keys):
        ordered = key[order]
        moved = ordered.argsort(stable=True)
        order = order[moved]
    return order


def first_of_runs(*keys: Tensor) -> Tensor:
    """Tell which entries differ from the one before in any of the keys (E,) each: (E,) bool."""
    first = torch.ones_like(keys[0], dtype=torch.bool)
    first[1:] = False
    for key in keys:
        before = key[:-1]
        first[1:] |= key[1:] != before
    return first


def ranks_within(owner: Tensor) -> Tensor:
    """Number the entries of each owner 0, 1, ...: owner (E,), of which equal ones are neighbours."""
    _, counts = owner.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    starts = ends - counts
    numbers = torch.arange(len(owner), device=owner.device)
    start = starts.repeat_interleave(counts)
    return numbers - start
