"""What an alignment's checkpoint holds beyond Lightning's own, and how it is read without running its code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from aligners.maps.base import Aligner
from datamodules.row_types import SeenTypes
from similarity.functional.moments import Moments

__all__ = [
    "KEY",
    "StoredAlignment",
    "build_aligner",
    "check_names",
    "describe_aligner",
    "load_alignment",
    "read_checkpoint",
    "refuse_other_component",
    "refuse_other_models",
    "restore_aligners",
]

KEY = "alignment"
StoredT = TypeVar("StoredT")
Identities = Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]  # of models: name, fingerprint, ...
# Options that a class has gained, at what it did before: checkpoints of then do not name them.
EARLIER: dict[str, dict[str, Any]] = {"MLP": {"skip": False}}


def describe_aligner(aligner: Aligner) -> dict[str, Any]:
    """Class, sizes and options of an aligner as plain values: `build_aligner` makes an equal one."""
    return {
        "class": type(aligner).__name__,
        "sites": aligner.sites,
        "d_x": aligner.d_x,
        "d_y": aligner.d_y,
        "options": aligner.options(),
    }


def build_aligner(description: dict[str, Any]) -> Aligner:
    """An aligner as described, not yet fitted.

    Raises:
        ValueError: no aligner of that name is known here.
    """
    known = Aligner.registry
    name = description["class"]
    if name not in known:
        raise ValueError(
            f"The checkpoint holds an aligner of class {name!r}, but only {', '.join(sorted(known))} are known. "
            "Import the module that defines it first."
        )
    with torch.random.fork_rng(devices=[]):
        options = {**EARLIER.get(name, {}), **description["options"]}
        return known[name](description["sites"], description["d_x"], description["d_y"], **options)


def check_names(names: Iterable[str], argument: str) -> None:
    """Refuse names under which a module cannot hold aligners.

    Raises:
        ValueError: naming `argument` and them.
    """
    bad = [name for name in names if not name.replace("_", "").isalnum() or hasattr(nn.ModuleDict, name)]
    if bad:
        raise ValueError(
            f"Expected the names in `{argument}` to be letters, digits and underscores, and not a name that PyTorch "
            f"keeps for itself, but got {', '.join(bad)}."
        )


def restore_aligners(
    described: Mapping[str, dict[str, Any]], state: Mapping[str, Tensor], prefix: str
) -> dict[str, Aligner]:
    """The aligners of a checkpoint as they were, frozen.

    Args:
        described: name -> what `describe_aligner` made of it.
        state: of the module that held them.
        prefix: before their names in `state`.
    """
    restored = {}
    for name, description in described.items():
        own = f"{prefix}{name}."
        aligner = build_aligner(description)
        aligner.load_state_dict({k.removeprefix(own): v for k, v in state.items() if k.startswith(own)})
        restored[name] = aligner.requires_grad_(False).eval()
    return restored


@dataclass
class StoredAlignment:
    """Everything a checkpoint says about a fit.

    Attributes:
        path: the file.
        maps: direction -> name -> fitted aligner, on the CPU.
        moments: of the fitting rows.
        data: `PairedActivations.describe()` of the run.
        data_config: the data module's options as they were given, enough to make it again.
        seen: the types of the fitting rows; None of a checkpoint that was made before they were kept.
        training: direction.name -> at which step each site was best and whether it diverged; see
            `aligners.fitting.outcomes.outcomes`. Empty in earlier checkpoints.
    """

    path: Path
    maps: dict[str, dict[str, Aligner]]
    moments: Moments
    data: dict[str, Any]
    data_config: dict[str, Any]
    seen: SeenTypes | None = None
    training: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def site_pairs(self) -> list[tuple[int, int]]:
        """Site pairs in the order of the banks."""
        return [(i, j) for i, j in self.data["sites"]]


def load_alignment(path: Path | str) -> StoredAlignment:
    """Read a checkpoint that `train.py fit` wrote. Only tensors and plain values are unpickled.

    Raises:
        ValueError: the file is not there, not readable, or not such a checkpoint.
    """
    return read_checkpoint(Path(path), "fit", _stored)


def _stored(path: Path, content: Mapping[str, Any]) -> StoredAlignment:
    """From what a checkpoint holds."""
    stored, state = content[KEY], content["state_dict"]
    described = stored["aligners"].items()
    maps = {direction: restore_aligners(every, state, f"{direction}_maps.") for direction, every in described}
    config = {"held_out_types": 0.0, **stored["data_config"]}  # earlier fits left none out
    seen = SeenTypes.from_state(stored["seen"]) if "seen" in stored else None
    moments, training = Moments(**stored["moments"]), stored.get("training", {})
    return StoredAlignment(path, maps, moments, stored["data"], config, seen, training)


def read_checkpoint(path: Path, command: str, make: Callable[[Path, Mapping[str, Any]], StoredT]) -> StoredT:
    """What `make` makes of a checkpoint. Only tensors and plain values are unpickled.

    Raises:
        ValueError: the file is not there, not readable, or not a checkpoint of that command of `train.py`.
    """
    try:
        return make(path, torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise ValueError(f"Expected a checkpoint at {path}, but there is no such file.") from None
    except Exception as error:
        raise ValueError(
            f"Expected {path} to be a checkpoint written by `train.py {command}`, but it cannot be read as one: {error}"
        ) from error


def refuse_other_models(stored: Identities, present: Identities, what: str) -> None:
    """Compare models by their fingerprints: a name may differ, as of a folder that has moved.

    Args:
        stored: identities in a checkpoint, by side or in the order of the run.
        present: identities of the run's models, likewise.
        what: the checkpoint, for the message.

    Raises:
        ValueError: they are not the same models in the same order; says which differ.
    """
    then, now = (_sides(models) for models in (stored, present))
    missing = {"name": "nothing", "fingerprint": "none"}
    pairs = {side: (then.get(side, missing), now.get(side, missing)) for side in {**then, **now}}
    differing = [
        f"{side} was {a['name']} (fingerprint {a['fingerprint'][:12]}) and is {b['name']} (fingerprint "
        f"{b['fingerprint'][:12]})"
        for side, (a, b) in pairs.items()
        if a["fingerprint"] != b["fingerprint"]
    ]
    if differing:
        raise ValueError(
            f"{what} was fitted on other models: {'; '.join(differing)}. Name the same models in the same order."
        )


def _sides(models: Identities) -> Mapping[str, Any]:
    if isinstance(models, Mapping):
        return {side.upper(): model for side, model in models.items()}
    return {f"model {number}": model for number, model in enumerate(models)}


def refuse_other_component(data: Mapping[str, Any], present: str, what: str) -> None:
    """Compare what a state is.

    Args:
        data: what a checkpoint says of its data.
        present: `data.component` of the run.
        what: the checkpoint, for the message.

    Raises:
        ValueError: it was fitted on another component.
    """
    then = data.get("component", "residual")  # earlier checkpoints know no other
    if then != present:
        raise ValueError(
            f"{what} was fitted on `component` {then!r}, but `data.component` is {present!r}. Leave it out, or set it "
            f"to {then!r}."
        )
