"""Reads the groups of rows, such as the texts that they are of."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from aligners.errors import UserError

__all__ = ["Groups", "numbered"]

# (N,): the text of each row, by number or by name; a tensor, a NumPy array or what NumPy makes one of
Groups = Any


def numbered(groups: Groups | None, n: int) -> Tensor | None:
    """Return the number of the group of each row, (N,) int64, in the order of their first rows.

    Args:
        groups: names or numbers of groups; None: there are none.
        n: number of rows.

    Raises:
        ValueError: `groups` has another shape, or missing values.
    """
    if groups is None:
        return None
    if isinstance(groups, Tensor):
        groups = groups.detach().cpu()
    names = np.asarray(groups)
    if names.shape != (n,):
        raise UserError(
            f"Expected `groups` with the text of each of the {n} rows, but got an array of shape {names.shape}."
        )
    if names.dtype.kind == "f" and np.isnan(names).any():
        raise UserError(
            f"Expected `groups` to name the text of each row, but {int(np.isnan(names).sum())} are NaN."
        )
    if names.dtype.kind == "O":
        names = names.astype(str)
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    places = np.empty_like(first)
    places[np.argsort(first)] = np.arange(len(first))
    return torch.from_numpy(places[inverse])
