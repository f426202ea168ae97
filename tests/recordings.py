"""The states of the tiny world, recorded in every format that can be read."""

from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from safetensors.numpy import save_file
from tests.world import World, read_texts

from aligners.datamodules.text.sources import TextSource
from aligners.models.loading.load_models import load_frozen

SOURCE = {"validation_share": 0.2, "test_share": 0.3}


class Recorded(NamedTuple):
    """States of every token of some texts, text by text, at all sites of two models."""

    x: np.ndarray  # (L, N, d)
    y: np.ndarray
    group: list[str]  # (N,) the text itself, so that it falls into the split that it has as a text

    @property
    def key(self) -> np.ndarray:
        """(N,) a running number, not counted from 0."""
        return np.arange(len(self.group)) * 3 + 7


def world_text(world: World) -> TextSource:
    """The texts that are recorded, divided as recorded groups are."""
    return TextSource(world.fit, **SOURCE)


def recorded_world(world: World) -> Recorded:
    """Read each text by itself."""
    texts, _ = read_texts(world.fit)
    of_models = []
    counts: list[int] = []
    for path in (world.model_x, world.model_y):
        model = load_frozen(path)
        parts, counts = [], []
        for text in texts:
            inputs: Any = model.tokenizer([text], return_tensors="pt")  # type: ignore[misc]
            with torch.no_grad():
                states = torch.stack(model.front(inputs, range(model.depth + 1)))
            parts.append(states[:, 0].numpy())
            counts.append(states.shape[2])
        of_models.append(np.concatenate(parts, 1))
    group = [text for text, count in zip(texts, counts, strict=True) for _ in range(count)]
    return Recorded(*of_models, group)


def shuffled(recorded: Recorded, seed: int) -> np.ndarray:
    """Another order of the rows."""
    return np.random.default_rng(seed).permutation(len(recorded.group))


def write(folder: Path, states: np.ndarray, recorded: Recorded, kind: str, order: np.ndarray | None = None) -> str:
    """Write the states of one model in a format, in an order of the rows; return the name that reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.arange(states.shape[1]) if order is None else order
    states = np.ascontiguousarray(states[:, rows])
    group = [recorded.group[row] for row in rows]
    key = recorded.key[rows]
    (folder / "group.txt").write_text("\n".join(group))
    np.save(folder / "key.npy", key)
    beside = ":group=group.txt,key=key.npy"
    if kind == "npy":
        np.save(folder / "states.npy", states)
        return f"states:{folder}/states.npy{beside}"
    if kind == "folder":
        for site, of_site in enumerate(states):
            np.save(folder / f"layer_{site + 9}.npy", of_site)
        return f"states:{folder}:group=group.txt,key=key"
    named = {f"layer_{site + 9}": of_site for site, of_site in enumerate(states)}  # layer_10 is not before layer_9
    if kind == "safetensors":
        save_file({**named, "key": key}, folder / "states.safetensors")
        return f"states:{folder}/states.safetensors:group=group.txt,key=key"
    if kind == "pt":
        torch.save({name: torch.from_numpy(part) for name, part in named.items()}, folder / "states.pt")
        return f"states:{folder}/states.pt{beside}"
    columns = {name: list(part) for name, part in named.items()}
    table = datasets.Dataset.from_dict({**columns, "group": group, "key": key})
    end = ":group=group,key=key"
    if kind == "parquet":
        table.to_parquet(folder / "states.parquet", batch_size=100)
        return f"states:{folder}/states.parquet{end}"
    if kind == "feather":
        from pyarrow import feather

        feather.write_feather(table.data.table, folder / "states.feather", chunksize=100)
        return f"states:{folder}/states.feather{end}"
    assert kind == "saved"
    table.save_to_disk(folder / "saved", num_shards=3)
    return f"states:{folder}/saved{end}"


FORMATS = ("npy", "folder", "safetensors", "pt", "parquet", "feather", "saved")
