"""Tuned lenses (Belrose et al. 2023) as maps, and affine maps as tuned lenses, in the files of the package tuned-lens.

Translator l takes the state at site l of a model to what its last site may hold: h ↦ h + A h + b. An affine map to the
last site of any model of equal width is one, too: it reads another model in this one's vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aligners.errors import UserError
from aligners.files.atomic import whole_folder
from aligners.maps.base import Aligner
from aligners.maps.linear import Linear
from aligners.probing.artefacts.kinds import affine_parts

CONFIG = "config.json"
PARAMETERS = "params.pt"
KIND = "linear_tuned_lens"


class TunedLens(NamedTuple):
    """The translators of a model.

    Attributes:
        model: name of the model in whose vocabulary they are read.
        maps: a bank of one map for each site, from the state at this site to the last.
    """

    model: str
    maps: Mapping[int, Linear]


def read_tuned_lens(place: Path | str) -> TunedLens:
    """Read a folder with config.json and params.pt, which is read as plain tensors: no code in it is run.

    Raises:
        ValueError: the files are missing, are damaged, or hold another kind of lens.
    """
    folder = Path(place)
    try:
        told = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = torch.load(folder / PARAMETERS, map_location="cpu", weights_only=True)
        kind = told.get("lens_type", KIND)
        width = int(told["d_model"])
        maps = {}
        for site in range(int(told["num_hidden_layers"])):
            bias = tensors.get(f"{site}.bias", torch.zeros(width))
            maps[site] = _translator(tensors[f"{site}.weight"], bias)
        model = str(told["base_model_name_or_path"])
    except Exception as error:  # torch raises of its own kinds
        raise UserError(
            f"Expected {CONFIG} and {PARAMETERS} of a tuned lens in {folder}, but they cannot be read: {error!r}"
        ) from error
    if kind != KIND:
        raise UserError(
            f"Expected `lens_type` {KIND!r} in {folder / CONFIG}, but got {kind!r}."
        )
    return TunedLens(model, maps)


def _translator(weight: torch.Tensor, bias: torch.Tensor) -> Linear:
    """H + A h + b as a bank of one map."""
    width = len(bias)
    same = torch.eye(width)
    bank = Linear(1, width, width)
    bank.weight.copy_(same + weight.float().T)
    bank.mean_y.copy_(bias.float())
    bank.invertible = False  # nobody has formed the way back
    return bank


@torch.no_grad()
def write_tuned_lens(
    maps: Mapping[int, Aligner], folder: Path | str, *, model: str
) -> None:
    """Write affine maps to the last site as a tuned lens, into a new folder, whole or not at all.

    Args:
        maps: for each site 0, 1, ..., L - 1 a bank of one map to the last site.
        folder: a folder that is new or empty.
        model: name of the model whose last site the maps lead to.

    Raises:
        ValueError: a site is missing, a map is not affine, or its widths differ.
        OSError: a file cannot be written.
    """
    depth = len(maps)
    if set(maps) != set(range(depth)) or not depth:
        raise UserError(
            f"Expected `maps` of the sites 0, 1, ..., L - 1, as a tuned lens has them, but got {sorted(maps)}."
        )
    tensors = {}
    widths = set()
    for site, bank in sorted(maps.items()):
        parts = None
        if bank.sites == 1 and bank.d_x == bank.d_y:
            parts = affine_parts(bank)
        if parts is None:
            raise UserError(
                f"Expected `maps` to be affine, one for each site and of one width, as translators are, but that of "
                f"site {site} is a {type(bank).__name__} of {bank.sites} from {bank.d_x} to {bank.d_y}."
            )
        weight, bias = parts
        same = torch.eye(bank.d_x, dtype=weight.dtype)
        tensors[f"{site}.weight"] = (weight - same).T.float().contiguous()
        tensors[f"{site}.bias"] = bias.float()
        widths.add(bank.d_x)
    if len(widths) > 1:
        raise UserError(f"Expected `maps` of one width, but got {sorted(widths)}.")

    told: dict[str, Any] = {
        "base_model_name_or_path": model,
        "d_model": widths.pop(),
        "num_hidden_layers": depth,
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": None,
        "lens_type": KIND,
    }
    with whole_folder(Path(folder)) as unfinished:
        content = json.dumps(told, indent=2) + "\n"
        (unfinished / CONFIG).write_text(content, encoding="utf-8")
        torch.save(tensors, unfinished / PARAMETERS)
