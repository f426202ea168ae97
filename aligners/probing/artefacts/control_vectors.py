"""Control vectors of llama.cpp and repeng: one direction to steer by for each block, in a GGUF file.

`direction.N` is added to the output of block N, counted from 0: site N + 1 here. Both libraries count so.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aligners.errors import UserError, check_extra
from aligners.files.atomic import whole_file
from aligners.probing.artefacts.kinds import Direction

GGUF = "gguf"
ARCHITECTURE = "controlvector"
TENSOR = re.compile(r"direction\.(\d+)")


def read_control_vector(
    path: Path | str, *, model: str, **about: Any
) -> list[Direction]:
    """Read the directions of a control vector, in the order of their sites.

    Args:
        path: a .gguf file.
        model: name or folder of the model that they steer: the file names only its family.
        about: further fields of each; see `Artefact.about`.

    Raises:
        ValueError: it is no control vector, or a direction is no vector of finite numbers; or `gguf` is not installed.
    """
    check_extra("formats", GGUF, "A control vector")
    from gguf import GGUFReader

    path = Path(path)
    expected = f"Expected {path} to be a control vector in GGUF"
    try:
        reader = GGUFReader(path)
        architecture = _text(reader, "general.architecture")
        hint = _text(reader, f"{ARCHITECTURE}.model_hint")
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{expected}, but it cannot be read: {error!r}") from error
    if architecture != ARCHITECTURE:
        raise UserError(
            f"{expected}, but its `general.architecture` is {architecture!r}. A model is named as `model_x`."
        )

    by_site = {}
    for tensor in reader.tensors:
        number = TENSOR.fullmatch(tensor.name)
        values = np.array(tensor.data)
        if number is None or values.ndim != 1 or values.dtype.kind != "f":
            raise UserError(
                f"{expected} with tensors direction.N of one axis, but {tensor.name} is {values.dtype} of shape "
                f"{values.shape}."
            )
        by_site[int(number[1]) + 1] = torch.from_numpy(values)
    if not by_site:
        raise UserError(f"{expected}, but it holds no direction.")

    directions = []
    for site, vector in sorted(by_site.items()):
        told = {"name": f"{path.stem}-{site}", "model": model, "site": site}
        told |= {"model_hint": hint, **about}
        directions.append(Direction({"vector": vector}, told))
    return directions


def _text(reader: Any, name: str) -> str | None:
    """Return the text of a field, if there is one."""
    field = reader.get_field(name)
    if field is None:
        return None
    return bytes(field.parts[-1]).decode("utf-8")


def write_control_vector(
    directions: Iterable[Direction], path: Path | str, model_hint: str | None = None
) -> None:
    """Write directions as one control vector, whole or not at all: what each adds, in float32.

    Args:
        directions: at most one at each site from 1 on.
        path: a .gguf file.
        model_hint: family of the model, such as `llama`; default: that of the file that the directions come from.

    Raises:
        ValueError: two directions are at one site, or one is at the embeddings, where llama.cpp adds nothing; there are
            none, or their widths differ; nothing says the family; or `gguf` is not installed.
        OSError: the file cannot be written.
    """
    check_extra("formats", GGUF, "A control vector")
    from gguf import GGUFWriter

    by_site: dict[int, Direction] = {}
    for direction in directions:
        model_hint = model_hint or direction.about.get("model_hint")
        if direction.site in by_site or direction.site < 1:
            raise UserError(
                "Expected `directions` with one at each site from 1 on, as a control vector adds one to the output of "
                f"a block, but got {direction.name} at site {direction.site}."
            )
        by_site[direction.site] = direction
    widths = {direction.own_width for direction in by_site.values()}
    if len(widths) != 1:
        raise UserError(
            f"Expected `directions` of one width, but got {sorted(widths) or 'none'}."
        )
    if model_hint is None:
        raise UserError(
            "Expected a `model_hint`, the family of the model as llama.cpp names it, such as 'llama', but got none."
        )

    with whole_file(Path(path)) as unfinished:
        writer = GGUFWriter(unfinished, ARCHITECTURE)
        writer.add_string(f"{ARCHITECTURE}.model_hint", model_hint)
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(by_site))
        for site, direction in sorted(by_site.items()):
            vector = direction.tensors["vector"].float()
            writer.add_tensor(f"direction.{site - 1}", vector.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
