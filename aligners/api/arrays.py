"""From arrays (N, d) to the tensors that banks and measures work on, and back."""

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from aligners.errors import UserError

__all__ = ["Array", "as_given", "rows", "rows_of_both"]

Array = TypeVar("Array", np.ndarray, Tensor)


def rows(given: Any, name: str, width: int | None = None) -> Tensor:
    """The rows of an array as a tensor (N, d), detached; half precision becomes float32.

    Args:
        given: a NumPy array or a tensor.
        name: of the argument, for error messages.
        width: d, where it is known.

    Raises:
        ValueError: `given` is neither, has another shape, is not of floating-point numbers, or not finite.
    """
    tensor = _tensor(given, name)
    if tensor.ndim != 2 or not tensor.numel():
        raise UserError(
            f"Expected `{name}` of shape (N, d), one row for each token or text, but got shape {tuple(tensor.shape)}. "
            "Give the rows of one site at a time."
        )
    if width is not None and tensor.shape[1] != width:
        raise UserError(
            f"Expected `{name}` of width {width}, that of the rows that the map was fitted on, but got "
            f"{tensor.shape[1]}. Give states of the same model and site."
        )
    if not tensor.is_floating_point():
        raise UserError(f"Expected `{name}` of floats, but got {tensor.dtype}. Convert it, as by `{name} * 1.0`.")
    bad = int((~tensor.isfinite()).any(1).sum())
    if bad:
        raise UserError(
            f"Expected `{name}` to be finite, but {bad} of its {len(tensor)} rows hold NaN or infinite values. Leave "
            "these rows out, of its partner too."
        )
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def rows_of_both(x: Any, y: Any, width_x: int | None = None, width_y: int | None = None) -> tuple[Tensor, Tensor]:
    """Paired rows (N, d_x) and (N, d_y), on one device and of one data type.

    Raises:
        ValueError: as `rows`, or they have different numbers of rows, devices or kinds.
    """
    if isinstance(x, Tensor) != isinstance(y, Tensor):
        raise UserError(f"Expected `x` and `y` of one kind, but got {_kind(x)} and {_kind(y)}. Convert one of them.")
    of_x, of_y = rows(x, "x", width_x), rows(y, "y", width_y)
    if len(of_x) != len(of_y):
        raise UserError(
            f"Expected as many rows in `y` as in `x`, which it is paired with row by row, but got {len(of_y)} and "
            f"{len(of_x)}."
        )
    if of_x.device != of_y.device:
        raise UserError(f"Expected `x` and `y` on one device, but got {of_x.device} and {of_y.device}. Move one.")
    both = torch.promote_types(of_x.dtype, of_y.dtype)
    return of_x.to(both), of_y.to(both)


def as_given(found: Tensor, given: Array) -> Array:
    """What was computed, as the kind of array and with the data type that was given."""
    if isinstance(given, Tensor):
        return found.to(given.dtype)
    return found.numpy().astype(given.dtype)


def _tensor(given: Any, name: str) -> Tensor:
    if isinstance(given, Tensor):
        return given.detach()
    if isinstance(given, np.ndarray) and given.dtype.kind in "fiu" and given.dtype.itemsize <= 8:
        return torch.from_numpy(given.astype(given.dtype.newbyteorder("="), order="C", copy=True))
    raise UserError(f"Expected `{name}` to be a NumPy array or a tensor of numbers, but got {_kind(given)}.")


def _kind(given: Any) -> str:
    return f"an array of {given.dtype}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
