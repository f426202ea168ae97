"""What a W&B run was made from and what it leaves, as artifacts: W&B then draws which run led to which.

Nothing is uploaded unless the user asks for it. An artifact holds references: the names, sizes, checksums and places of
files, and what describes them. It has the same name wherever its file lies, after the models that it is about.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from aligners.reports.names import file_names

__all__ = ["Made", "described", "log_inputs", "log_outputs", "states"]

LONGEST_NAME = 128  # of an artifact, in letters
MANIFEST = "manifest.json"
SHARED = "model.safetensors"  # the same file in a shared folder, and its name in every artifact
FILES = ("aligners.ckpt", "stitching.ckpt", "universe.ckpt", "probes.safetensors", SHARED)
KINDS = {"fit": "maps", "stitch": "stitching", "universe": "universe"}  # command that made a bank -> type of artifact


class Made(NamedTuple):
    """Something that one run makes and others use.

    Attributes:
        path: file; of stored states their manifest, which has the checksums of all.
        kind: type of its artifact.
        about: what describes it, as plain values.
    """

    path: Path
    kind: str
    about: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of its artifact: kind and models; for states the name of their folder, which says what they are of."""
        ends = [self.path.parent.name] if self.kind == "states" else file_names(self.about["models"]).values()
        return f"{self.kind}-{'--'.join(ends)}"[:LONGEST_NAME]

    def artifact(self, *, upload: bool = False) -> Any:
        """Make the artifact.

        Args:
            upload: whether W&B gets the file itself. States are never uploaded.
        """
        import wandb

        made, states = wandb.Artifact(self.name, self.kind, metadata=self.about), self.kind == "states"
        name = MANIFEST if states else SHARED  # whatever the file is called: equal files are one artifact
        if upload and not states:
            made.add_file(str(self.path), name=name)
        else:
            made.add_reference(self.path.resolve().as_uri(), name=name)
        return made


def described(path: Path) -> Made | None:
    """What a file of maps, layers or probes is, or a shared folder with one; None for anything else.

    Args:
        path: of the file. Only its header is read.
    """
    path = path / SHARED if path.is_dir() else path
    if path.name not in FILES or not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            header = {name: json.loads(held) for name, held in file.metadata().items()}
    except (OSError, SafetensorError, ValueError, AttributeError):  # of an earlier version, or none of ours
        return None
    if "banks" in header:
        return Made(path, "probes", _of_probes(header["banks"]))
    return Made(path, KINDS[header["bank"]["command"]], _of_maps(header["bank"])) if "bank" in header else None


def states(folder: Path) -> Made:
    """What a folder of stored states is."""
    held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    about = {**held["about"], **held["identity"], "sites": sorted(held["sites"], key=int)}
    return Made(folder / MANIFEST, "states", about)


def log_outputs(run: Any, folder: Path, *, upload: bool = False) -> list[str]:
    """Log what a run has left in its folder, and return the names of the artifacts.

    Args:
        run: at W&B.
        folder: of the run.
        upload: whether W&B gets the files themselves.
    """
    found = [described(path) for path in sorted(folder.rglob("*")) if path.name in FILES]
    made = [each for each in found if each is not None]
    for each in made:
        run.log_artifact(each.artifact(upload=upload))
    return [each.name for each in made]


def log_inputs(run: Any, used: Iterable[Made]) -> None:
    """Log what a run has used, and list it in the run's config under `inputs`."""
    named = []
    for each in used:
        # What `use_artifact` does, which refuses offline runs and waits for the server. Equal artifacts are one there.
        artifact = each.artifact()
        run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
        named.append({"name": each.name, "type": each.kind, "path": str(each.path), "digest": artifact.digest})
    if named:
        run.config.update({"inputs": named}, allow_val_change=True)


def _of_maps(header: Mapping[str, Any]) -> dict[str, Any]:
    """Command, models with their fingerprints, sites, maps and texts of a bank."""
    data = header["data"]
    models = data["models"].values() if isinstance(data["models"], dict) else data["models"]
    texts = data.get("text", {})
    return {
        "command": header["command"],
        "models": {model["name"]: model.get("fingerprint") for model in models},
        "pairs": {route: str(pairs) for route, pairs in header["pairs"].items()},
        "maps": {route: sorted(maps) for route, maps in header["maps"].items()},
        "rows": data.get("rows"),
        "text": {name: texts[name] for name in ("source", "subset", "seed", "hashes") if name in texts},
    }


def _of_probes(header: Mapping[str, Any]) -> dict[str, Any]:
    """Models and tasks of banks of probes."""
    every = [bank["about"] for bank in header.values()]
    return {
        "models": {about["model"]: about.get("fingerprint") for about in every},
        "tasks": sorted({about["task"] for about in every}),
    }
