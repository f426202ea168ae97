"""Files of a fitted map: safetensors, from which it is loaded again, a function of NumPy alone, and ONNX."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aligners.errors import UserError, check_known
from aligners.files.atomic import whole_file, write_text
from aligners.files.sealed import check_sealed, save_sealed
from aligners.files.user_files import refusing
from aligners.fitting.migration.vector_maps import MAPS, NETWORKS, VectorMap

MAP_FILE = "map.safetensors"
NUMPY = '''"""Maps vectors from width {d_x} to {d_y}: {name}, {what}. Needs NumPy and map.npz beside this file."""

from pathlib import Path

import numpy as np

HELD = np.load(Path(__file__).with_name("map.npz"))


def migrate(vectors: np.ndarray) -> np.ndarray:
    """(N, {d_x}) -> (N, {d_y})."""
    mapped = np.asarray(vectors, np.float32) @ HELD["weight"] + HELD["offset"]
    if HELD["normalised"]:
        mapped /= np.maximum(np.linalg.norm(mapped, axis=-1, keepdims=True), 1e-12)
    return mapped
'''


def save_map(fitted: VectorMap, folder: Path, what: str, *, onnx: bool = False) -> None:
    """Write a map: map.safetensors, migrate_map.py with map.npz for NumPy alone, and map.onnx if asked for.

    A network has no migrate_map.py: the error function in its GELU is not in NumPy.

    Args:
        fitted: the map.
        folder: created if need be.
        what: it maps, for whoever reads the file.
        onnx: whether to write map.onnx as well.

    Raises:
        OSError: a file cannot be written.
    """
    tensors = {}
    for name, tensor in fitted.state_dict().items():
        tensors[name] = tensor.detach().contiguous().clone()
    about = {"map": fitted.name, "what": what, "normalised": str(fitted.normalised)}
    with whole_file(folder / MAP_FILE) as unfinished:
        save_sealed(save_file, tensors, unfinished, about)
    if fitted.bank is None:
        _save_numpy(fitted, folder, what)
    if onnx:
        with whole_file(folder / "map.onnx") as unfinished:
            _export(fitted, unfinished)


def _save_numpy(fitted: VectorMap, folder: Path, what: str) -> None:
    """Write the function and the arrays that it reads."""
    arrays: dict[str, Any] = {
        "weight": fitted.weight.numpy(),
        "offset": fitted.offset.numpy(),
        "normalised": np.array(fitted.normalised),
    }
    with whole_file(folder / "map.npz") as unfinished, unfinished.open("wb") as file:
        np.savez(file, **arrays)
    code = NUMPY.format(d_x=fitted.d_x, d_y=fitted.d_y, name=fitted.name, what=what)
    write_text(folder / "migrate_map.py", code)


def _export(fitted: VectorMap, path: Path) -> None:
    """Write ONNX for any number of vectors."""
    example = torch.zeros(2, fitted.d_x)
    shapes = ({0: torch.export.Dim("vectors")},)
    program = torch.onnx.export(
        fitted,
        (example,),
        input_names=["vectors"],
        output_names=["mapped"],
        dynamic_shapes=shapes,
        verbose=False,
        dynamo=True,
    )
    assert program is not None
    program.save(str(path))


def load_map(path: Path | str) -> VectorMap:
    """Load the map that `save_map` wrote, as a torch module.

    Args:
        path: the folder, or map.safetensors in it.

    Raises:
        ValueError: there is no such file, it is damaged, or holds no such map.
    """
    path = Path(path)
    if path.is_dir():
        path = path / MAP_FILE
    if not path.is_file():
        raise UserError(f"Expected a map at {path}, but there is no such file.")
    check_sealed(path)
    with refusing(f"Expected {path} to be a map of `train.py migrate`, but it is not"):
        return _loaded(path)


def _loaded(path: Path) -> VectorMap:
    """Build the map that a file describes, and give it the tensors there."""
    with safe_open(path, "pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = about["map"]
    check_known(MAPS, map=name)
    if "weight" in tensors:
        d_x, d_y = tensors["weight"].shape
    else:
        d_x = tensors["bank.scaling.mean_x"].shape[-1]
        d_y = tensors["bank.scaling.mean_y"].shape[-1]
    with torch.random.fork_rng(devices=[]):
        bank = MAPS[name](1, d_x, d_y)
    made = VectorMap(name, bank, normalised=about["normalised"] == "True")
    made.load_state_dict(tensors)
    return made


def not_in_numpy(chosen: Mapping[str, str], onnx: bool) -> list[str]:
    """Say of which routes' maps there is no function of NumPy alone, why, and what serves them.

    Args:
        chosen: route -> name of its map.
        onnx: whether map.onnx is written.
    """
    serves = (
        "In torch, `load_map` reads map.safetensors; `--outputs onnx` writes map.onnx"
    )
    if onnx:
        serves = "Serve it by map.onnx, or in torch by `load_map`"
    said = []
    for route, name in chosen.items():
        if name not in NETWORKS:
            continue
        said.append(
            f"The map of {route} ({name}) has no migrate_map.py: it is a network, and the error function in its GELU "
            f"is not in NumPy. {serves}."
        )
    return said
