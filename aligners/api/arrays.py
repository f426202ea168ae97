"""Converts arrays (N, d), of one site or of several, to the tensors that banks and measures work on, and back."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aligners.errors import UserError

__all__ = [
    "Array",
    "as_given",
    "by_site",
    "check_paired",
    "column_names",
    "of_kind",
    "rows",
    "rows_of_both",
]

# (N, d): a tensor, a NumPy array, or what NumPy makes one of, such as a data frame or a list of rows. Of several sites:
# a tensor or an array (S, N, d), or a list or a dictionary of S of (N, d).
Array = Any

SPARSE = "A sparse matrix has `toarray()`."


def by_site(given: Array) -> tuple[list[Hashable] | None, list[Any]]:
    """Return the keys of several sites (numbers, if they have no others) and their arrays; no keys for one site."""
    if isinstance(given, Mapping):
        return list(given), list(given.values())
    if _axes(given) == 3:
        return list(range(len(given))), list(given)
    if isinstance(given, (list, tuple)) and {_axes(part) for part in given} == {2}:
        return list(range(len(given))), list(given)
    return None, [given]


def _axes(given: Array) -> int:
    return len(getattr(given, "shape", ()))


def column_names(given: Array) -> list[str]:
    """Return the names of a data frame's columns, of the first site if there are several; none for other arrays."""
    _, parts = by_site(given)
    if not parts:
        return []
    return [str(name) for name in getattr(parts[0], "columns", ())]


def rows(
    given: Array,
    name: str,
    width: int | None = None,
    sites: Sequence[Hashable] | None = None,
) -> Tensor:
    """Return rows as a detached tensor (S, N, d); half precision becomes float32, and whole numbers float64.

    A vector `y` is a column.

    Args:
        given: rows of one site or of several.
        name: name of the argument, for error messages.
        width: d, where it is known.
        sites: the keys of a dictionary, in the order of the result; default: as they come.

    Raises:
        ValueError: `given` has another shape or other keys, is not of real numbers, or not finite.
    """
    _, parts = by_site(given)
    if sites is not None and isinstance(given, Mapping):
        if set(given) != set(sites):
            raise UserError(
                f"Expected `{name}` with rows of the sites {list(sites)}, but got {list(given)}."
            )
        parts = [given[site] for site in sites]
    tensors = []
    for part in parts:
        tensor = _tensor(part, name)
        if name == "y" and tensor.ndim == 1:
            tensor = tensor[:, None]
        tensors.append(tensor)

    found_width = _width_of(tensors, name)
    if width not in (None, found_width):
        raise UserError(
            f"Expected `{name}` of width {width}, that of the rows that the map was fitted on, but got "
            f"{found_width}. Give states of the same model and site."
        )
    stacked = torch.stack(tensors)
    _check_finite(stacked, name)
    if stacked.dtype in (torch.float16, torch.bfloat16):
        return stacked.float()
    return stacked


def _width_of(tensors: Sequence[Tensor], name: str) -> int:
    """Return the width d of rows (N, d), which must have one shape at all sites."""
    shapes = list(dict.fromkeys(tuple(tensor.shape) for tensor in tensors))
    if len(shapes) != 1 or len(shapes[0]) != 2 or 0 in shapes[0]:
        raise UserError(
            f"Expected `{name}` of shape (N, d), one row for each token or text, equal at all sites if there are "
            f"several, but got {' and '.join(map(str, shapes)) or 'no site'}. Reshape your data: `{name}[None]` makes "
            f"a row of a vector. {SPARSE}"
        )
    return shapes[0][1]


def _check_finite(stacked: Tensor, name: str) -> None:
    """Raise if rows (S, N, d) hold NaN or infinity."""
    bad = int((~stacked.isfinite()).any(-1).sum())
    if not bad:
        return
    found = []
    if stacked.isnan().any():
        found.append("NaN")
    if stacked.isinf().any():
        found.append("infinite values")
    raise UserError(
        f"Expected `{name}` to be finite, but {bad} of its {stacked.shape[:2].numel()} rows hold "
        f"{' and '.join(found)}. Leave these rows out on both sides."
    )


def rows_of_both(x: Array, y: Array) -> tuple[Tensor, Tensor]:
    """Return paired rows (S, N, d_x) and (S, N, d_y), on the device of `x` and of one data type.

    Raises:
        ValueError: as `rows`, or they have different numbers of sites or rows.
    """
    of_x, of_y = rows(x, "x"), rows(y, "y", sites=by_site(x)[0])
    check_paired(of_x, of_y)
    both = torch.promote_types(of_x.dtype, of_y.dtype)
    return of_x.to(both), of_y.to(of_x.device, both)


def check_paired(x: Tensor, y: Tensor) -> None:
    """Raise unless `x` and `y` have equal numbers of sites and rows."""
    for axis, what in enumerate(("site", "row")):
        if x.shape[axis] != y.shape[axis]:
            raise UserError(
                f"Expected as many {what}s in `y` as in `x`, which are paired one by one, but got "
                f"{y.shape[axis]} and {x.shape[axis]}."
            )


def as_given(
    result: Tensor, given: Array, sites: Sequence[Hashable] | None = None
) -> Any:
    """Return a result (S, N, d) in the form, kind, data type and device of the input.

    Args:
        result: result of each site.
        given: what `rows` was called with.
        sites: the `sites` that it was called with.
    """
    if isinstance(given, Mapping):
        keyed = zip(sites or given, result, strict=True)
        return {site: of_kind(part, given[site]) for site, part in keyed}
    keys, parts = by_site(given)
    if isinstance(given, (list, tuple)) and keys is not None:
        return [of_kind(part, like) for part, like in zip(result, parts, strict=True)]
    if keys is None:
        return of_kind(result[0], given)
    return of_kind(result, given)


def of_kind(result: Tensor, given: Array) -> Tensor | np.ndarray:
    """Return a result as a tensor or a NumPy array, in the precision of the input; other kinds become NumPy arrays."""
    if isinstance(given, Tensor):
        if given.is_floating_point():
            return result.to(given.device, given.dtype)
        return result.to(given.device)
    values = result.cpu().numpy()
    if isinstance(given, np.ndarray) and given.dtype.kind == "f":
        return values.astype(given.dtype)
    return values


def _tensor(given: Array, name: str) -> Tensor:
    try:
        if isinstance(given, Tensor):
            tensor = given.detach()
            if tensor.is_complex():
                raise TypeError(f"{tensor.dtype} has an imaginary part")
        else:
            if np.ma.is_masked(given):
                raise TypeError("some of its values are masked, and would be used")
            tensor = _from_numpy(np.asarray(given))
    except (TypeError, ValueError) as error:
        kind = f"a {type(given).__name__}"
        if isinstance(given, np.ndarray):
            kind = f"an array of {given.dtype}"
        raise UserError(
            f"Expected `{name}` to be a tensor or an array of real numbers, but got {kind}: {error}. {SPARSE}"
        ) from error
    if tensor.is_floating_point():
        return tensor
    return tensor.double()


def _from_numpy(values: np.ndarray) -> Tensor:
    if values.dtype.kind not in "biuOf" or values.dtype.itemsize > 8:
        raise TypeError(
            f"{values.dtype} is not float16, float32, float64 or a type of whole numbers"
        )
    dtype: Any = np.float64
    if values.dtype.kind == "f":
        dtype = values.dtype.newbyteorder("=")
    numbers = values.astype(dtype, copy=False)
    return torch.from_numpy(np.require(numbers, dtype, ["C", "W"]))
