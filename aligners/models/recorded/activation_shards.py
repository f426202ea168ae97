"""Activation folders of dictionary_learning, as its `ActivationCache` writes them.

A folder for each submodule holds `shard_0.memmap`, `shard_0.meta` and so on, and `config.json`. The fork for
crosscoders (science-of-finetuning/dictionary_learning) also writes data types and, beside the folders, the
token of each row, and in which row each sequence begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.models.recorded.files import Opened, choose_sites, natural
from aligners.models.recorded.row_arrays import RowArray, as_tensor, numpy_type
from aligners.models.recorded.source_names import StatesSource

TOKENS = "tokens.pt"
SEQUENCES = (
    "sequence_ranges.pt"  # the first row of each sequence, and the number of rows
)


def open_shards(source: StatesSource, folders: Sequence[Path]) -> Opened:
    """Open the shards of some submodules, each a site.

    Raises:
        ValueError: the shards were shuffled, or one is not as long as it says.
    """
    sites = []
    arrays = []
    for folder in sorted(folders, key=lambda folder: natural(folder.name)):
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if settings.get("shuffle_shards"):
            raise UserError(
                f"Expected the rows of {folder} in the order of their texts, but its shards were shuffled, so that no "
                "row has a partner. Collect them again with `shuffle_shards` false."
            )
        shards = sorted(
            folder.glob("shard_*.meta"), key=lambda file: natural(file.stem)
        )
        sites.append(folder.name)
        arrays.append(RowArray([_shard(file) for file in shards]))
    opened = Opened(sites, arrays, of_tokens=True)
    tokens = _beside(source, TOKENS)
    if tokens is not None:
        opened.tokens = tokens
        opened.columns = {"tokens": tokens}
    ranges = _beside(source, SEQUENCES)
    if ranges is not None:
        lengths = np.diff(ranges)
        opened.sequence = np.arange(len(lengths)).repeat(lengths)
        opened.of_tokens = False  # it is known whose they are
        rows = opened.arrays[0].rows
        if len(opened.sequence) != rows:
            raise UserError(
                f"Expected the sequences in {SEQUENCES} of {source.path} to have its {rows} rows, but they have "
                f"{len(opened.sequence)}. Collect the activations again."
            )
    return choose_sites(source, opened)


def _beside(source: StatesSource, name: str) -> np.ndarray | None:
    """Read numbers that `torch.save` wrote beside the folders of the submodules; None: there are none."""
    for folder in (source.path, source.path.parent):
        file = folder / name
        if file.is_file():
            values = torch.load(file, map_location="cpu", weights_only=True)
            return values.flatten().numpy()
    return None


def _shard(meta: Path) -> Tensor:
    """Map a shard into memory."""
    about = json.loads(meta.read_text(encoding="utf-8"))
    shape = tuple(about["shape"])
    dtype = getattr(torch, str(about.get("dtype", "float32")).removeprefix("torch."))
    stored = dtype
    if dtype == torch.bfloat16:  # which NumPy lacks
        stored = torch.int16
    mapped = np.memmap(
        meta.with_suffix(".memmap"), dtype=numpy_type(stored), mode="r", shape=shape
    )
    return as_tensor(mapped).view(dtype)
