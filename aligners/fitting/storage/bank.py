"""The file of a finished run: its maps, what describes them, and the moments of the rows that they were fitted on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligners.files.shared import is_shared, shared_file
from aligners.files.whole import whole_file
from aligners.fitting.storage.describing import describe_aligner, restore_aligner
from aligners.fitting.storage.earlier import is_earlier, read_earlier
from aligners.fitting.storage.others import for_others
from aligners.maps.base import Aligner
from aligners.similarity.algebra.moments import Moments
from datamodules.rows.types import SeenTypes
from datamodules.text.fitted import FittedTexts

__all__ = ["BACKWARD", "FORWARD", "StoredBank", "load_bank", "save_bank"]

FORWARD, BACKWARD = "0_1", "1_0"  # the routes between the two models of a fit
HEADER = "bank"  # the one entry of the file's metadata, as JSON


@dataclass
class StoredBank:
    """The maps of a run, and what another process has to know of them.

    Routes have the numbers of their two models for keys: `0_1` leads from the first model of the run into the second.

    Attributes:
        command: of `train.py`, which made it.
        maps: route -> name -> bank, one map for each site pair.
        pairs: route -> site pairs (l, m) in the order of the banks.
        data: what the data module was, by its `describe()`.
        data_config: the data module's options as they were given, enough to make it again.
        moments: of the fitting rows of route `0_1`; None where only some were read, for a start.
        seen: the types of the fitting rows; None where types are not told apart.
        fitted: hashes of the fitting and validation texts; None in files that were written before they were kept.
        training: route.name -> at which step each site was best and whether it diverged: see
            `aligners.fitting.outcomes.outcomes`.
        spread: route -> mean (S, d_y) and variance (S,) of the target's states, where they were read.
        curves: points of the learning curves of stitching layers.
        loss: weights of the loss of stitching layers.
        path: the file, the shared folder, or its name on the Hub.
    """

    command: Literal["fit", "stitch", "universe"]
    maps: dict[str, dict[str, Aligner]]
    pairs: dict[str, list[tuple[int, int]]]
    data: dict[str, Any]
    data_config: dict[str, Any]
    moments: Moments | None = None
    seen: SeenTypes | None = None
    fitted: FittedTexts | None = None
    training: dict[str, dict[str, Any]] = field(default_factory=dict)
    spread: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    curves: list[dict[str, Any]] = field(default_factory=list)
    loss: dict[str, float] | None = None
    path: Path = Path()

    def freeze(self) -> Self:
        """Keep the maps from training, as those are that come from a file."""
        for maps in self.maps.values():
            for aligner in maps.values():
                aligner.requires_grad_(False).eval()
        return self


PLAIN = ("command", "pairs", "data", "data_config", "training", "curves", "loss")  # attributes that JSON can hold


def save_bank(bank: StoredBank, path: Path) -> None:
    """Write a bank as safetensors, whole or not at all. Equal banks make equal files.

    Raises:
        OSError: the file cannot be written; what was there before is still there.
    """
    described: dict[str, Any] = {name: getattr(bank, name) for name in PLAIN}
    described["maps"] = {
        route: {name: describe_aligner(aligner) for name, aligner in maps.items()} for route, maps in bank.maps.items()
    }
    described["seen"] = None if bank.seen is None else bank.seen.state()
    described["fitted"] = None if bank.fitted is None else bank.fitted.origins
    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in _tensors(bank)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        save_file(tensors, unfinished, {HEADER: json.dumps(described)})


def _tensors(bank: StoredBank) -> Iterator[tuple[str, Tensor]]:
    for route, maps in bank.maps.items():
        for name, aligner in maps.items():
            for key, value in aligner.state_dict().items():
                yield f"maps/{route}/{name}/{key}", value
    if bank.moments is not None:
        yield from ((f"moments/{name}", value) for name, value in bank.moments._asdict().items())
    if bank.fitted is not None:
        yield "fitted/keys", bank.fitted.state()["keys"]
    for route, values in bank.spread.items():
        yield from ((f"spread/{route}/{name}", value) for name, value in values.items())


def load_bank(path: Path | str) -> StoredBank:
    """Read the file of a finished run of `train.py fit` or `train.py stitch`. Nothing in it is run.

    Files that were written before there was this format are Lightning's checkpoints; their tensors and plain values
    are read and nothing else. What others share is never such a checkpoint.

    Args:
        path: the file, a folder of `evaluate.py share`, or the name of one on the Hub.

    Raises:
        ValueError: the file is not there, cannot be read, or is a last.ckpt to go on from; or as `shared_file`.
    """
    shared, file, path = is_shared(path), shared_file(path), Path(path)
    with _refusing(path):
        described, tensors = read_earlier(file) if not shared and is_earlier(file) else _read(file)
    if described.pop("unfinished", False):
        raise ValueError(
            f"Expected the file of a finished run, but {path} is one to go on from: `train.py {described['command']} "
            f"--ckpt_path {path}` goes on, and leaves the finished file beside its report."
        )
    if shared:
        described["data_config"] = for_others(described["data_config"])
    with _refusing(path):
        return _bank(described, tensors, path)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"Expected a checkpoint at {path}, but there is no such file.") from None
    except Exception as error:
        raise ValueError(
            f"Expected {path} to be a checkpoint written by `train.py fit` or `train.py stitch`, but it cannot be read "
            f"as one: {error}"
        ) from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        described = (file.metadata() or {}).get(HEADER)
        if described is None:
            raise ValueError("it holds no maps")
        return json.loads(described), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _bank(described: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> StoredBank:
    plain = {name: described[name] for name in PLAIN if name in described}
    plain["pairs"] = {route: [(i, j) for i, j in each] for route, each in described["pairs"].items()}
    maps = {
        route: {name: restore_aligner(about, tensors, f"maps/{route}/{name}/") for name, about in each.items()}
        for route, each in described["maps"].items()
    }
    found = [tensors.get(f"moments/{name}") for name in Moments._fields]
    moments = None if found[0] is None else Moments(*found)  # type: ignore[arg-type]
    spread: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("spread/"):
            _, route, key = name.split("/")
            spread.setdefault(route, {})[key] = value
    seen = None if described["seen"] is None else SeenTypes.from_state(described["seen"])
    origins = described.get("fitted")
    fitted = FittedTexts.from_state({"keys": tensors["fitted/keys"], "origins": origins}) if origins else None
    return StoredBank(**plain, maps=maps, moments=moments, seen=seen, fitted=fitted, spread=spread, path=path)
