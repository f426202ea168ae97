"""How a model's weights are stored, what storing other weights in the same way changes, and how weights differ."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aligners.models.model import FrozenModel

# Largest relative rounding error of a precision: half of the distance between neighbouring numbers.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
INT8, LEVELS = "int8", 127
ON_GRID = 1e-3  # in steps: how far from a multiple a quantised weight may lie
ALIKE = 1e-5  # largest relative difference of singular values that count as equal
EMBEDDINGS = (
    "embed",
    ".wte.",
    ".wpe.",
)  # parts of weight names that come before the blocks
TIMES = 2.0  # a weight's difference counts as rounding up to this multiple of the old weight's rounding error


def stored_precision(model: FrozenModel) -> str:
    """Return the coarsest precision that holds all weights exactly, whatever precision they are computed in.

    Returns:
        "bfloat16", "float16", "int8" (quantised, or all matrices of the blocks multiples of a step for each output or
        input, from -127 to 127), or "float32".
    """
    for name in ("bfloat16", "float16") if model.quantised is None else ():
        if all(
            torch.equal(w, w.to(getattr(torch, name)).to(w.dtype))
            for w in model.model.parameters()
        ):
            return name
    matrices = [w for block in model.blocks for w in block.parameters() if w.ndim == 2]
    whole = model.quantised is not None or all(
        _grid_axis(w) is not None for w in matrices
    )
    return INT8 if matrices and whole else "float32"


def _steps(weight: Tensor, axis: int) -> Tensor:
    """Return the step of each row (`axis` 1) or column (0) of a matrix in symmetric int8."""
    return (
        weight.abs().amax(axis, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        / LEVELS
    )


def _grid_axis(weight: Tensor) -> int | None:
    """Return the axis along which a matrix consists of multiples of its steps; None if neither."""
    counts = {axis: weight / _steps(weight, axis) for axis in (1, 0)}
    return next(
        (
            axis
            for axis, n in counts.items()
            if bool(((n - n.round()).abs() < ON_GRID).all())
        ),
        None,
    )


def with_weights(
    model: FrozenModel, change: Callable[[str, Tensor], Tensor], name: str = ""
) -> FrozenModel:
    """Copy a model, changing each floating-point weight.

    Args:
        model: the model, which stays unchanged.
        change: takes a weight's name and the weight, and returns another of the same shape.
        name: name of the copy; default: the model's.
    """
    changed = FrozenModel(
        copy.deepcopy(model.model),
        model.tokenizer,
        name=name or model.name,
        revision=model.revision,
    )
    changed.class_map = model.class_map
    with torch.no_grad():
        for place, weight in changed.model.named_parameters():
            weight.copy_(
                change(place, weight) if weight.is_floating_point() else weight
            )
    return changed


def rounded(weight: Tensor, precision: str, like: Tensor | None = None) -> Tensor:
    """Round a weight to a precision. int8 rounds only matrices, along the axis on which `like` is quantised."""
    if precision in ("bfloat16", "float16"):
        return weight.to(getattr(torch, precision)).to(weight.dtype)
    told = like is not None and like.shape == weight.shape and like.is_floating_point()
    axis = (
        None
        if precision != INT8 or weight.ndim != 2
        else _grid_axis(like)
        if told and like is not None
        else 1
    )
    return (
        weight
        if axis is None
        else (weight / _steps(weight, axis)).round() * _steps(weight, axis)
    )


def saved_elsewhere(model: FrozenModel, precision: str, seed: int) -> FrozenModel:
    """Copy a model as if its weights were rounded in other coordinates: each is off by a random part of half a step."""
    draw = torch.Generator().manual_seed(seed)

    def change(_: str, weight: Tensor) -> Tensor:
        off = 2 * torch.rand(weight.shape, generator=draw).to(weight) - 1
        if precision == INT8:
            return weight + _steps(weight, 1) / 2 * off if weight.ndim == 2 else weight
        return weight * (1 + ROUNDING[precision] * off)

    return with_weights(model, change)


def _weights(model: FrozenModel) -> dict[str, Tensor]:
    """Return all weights by name, shared ones under each of their names: another model may not share them."""
    return dict(model.model.named_parameters(remove_duplicate=False))


def weight_changes(
    old: FrozenModel, new: FrozenModel, precision: str
) -> list[dict[str, Any]]:
    """Measure the difference of each weight; empty where architectures differ, or weights are quantised.

    If the heads differ, only the weights below them are compared. Here, other coordinates of the same function count as
    differences.

    Returns:
        For each weight its block (0: embeddings, L + 1: what comes after the blocks), name, difference
        ‖W' − W‖ / max(‖W‖, ‖W'‖), the tolerance for rounding to `precision`, and whether it is exceeded.
    """
    mine, theirs = _compared_weights(old, new)
    floating = all(w.is_floating_point() for w in (*mine.values(), *theirs.values()))
    if (old.depth, old.width) != (new.depth, new.width) or not floating:
        return []
    places = _block_numbers(old)
    found = []
    for name, weight in mine.items():
        if name not in theirs or theirs[name].shape != weight.shape:
            continue
        outside = 0 if any(part in name for part in EMBEDDINGS) else old.depth + 1
        row: dict[str, Any] = {"block": places.get(id(weight), outside), "weight": name}
        row |= _weight_change(weight.detach(), theirs[name].detach(), precision)
        found.append(row | {"changed": row["difference"] > row["tolerance"]})
    return found


def _compared_weights(
    old: FrozenModel, new: FrozenModel
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of both models by name; without those of the heads if these differ."""
    mine, theirs = _weights(old), _weights(new)
    if mine.keys() == theirs.keys():
        return mine, theirs
    below = [dict(model.model.base_model.named_parameters()) for model in (old, new)]
    return below[0], below[1]


def _block_numbers(model: FrozenModel) -> dict[int, int]:
    """Return the block of each weight that is in one, by the weight's id; the first block is 1."""
    return {
        id(w): number
        for number, block in enumerate(model.blocks, 1)
        for w in block.parameters()
    }


def _weight_change(old: Tensor, new: Tensor, precision: str) -> dict[str, float]:
    """Return the relative difference of two weights, and the tolerance for rounding the old one to a precision."""
    before = old.double()
    after = new.double().to(old.device)
    least = torch.finfo(torch.float64).tiny
    size = max(float(before.norm()), float(after.norm()), least)
    off = rounded(old, precision, new).double() - before
    rounding = float(off.norm()) / size
    return {
        "difference": float((after - before).norm()) / size,
        "tolerance": TIMES * rounding + 2.0**-23,
    }


def equal_spectra(old: FrozenModel, new: FrozenModel, names: list[str]) -> bool:
    """Tell whether weights kept their singular values, as if hidden units were reordered or heads rotated."""

    def values(model: FrozenModel, name: str) -> Tensor:
        weight = _weights(model)[name].detach().double().cpu()
        return torch.linalg.svdvals(weight.reshape(-1, weight.shape[-1]))

    pairs = ((values(old, name), values(new, name)) for name in names)
    return all(
        float((after - before).norm()) <= ALIKE * float(before.norm())
        for before, after in pairs
    )
