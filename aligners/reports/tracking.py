"""Runs at W&B: how they begin and resume, what they used and left, and a view of them all."""

import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from aligners.files.atomic import write_text
from aligners.files.shared_folder import RUN_FILES
from aligners.reports.names import file_names

logger = logging.getLogger(__name__)
PROJECT = "aligners"
NUMBER = "wandb/unfinished.txt"  # in a run's folder, until the run is complete: its number at W&B
LONGEST_NAME = 128  # of an artifact, in letters
MANIFEST = "manifest.json"
SHARED = "model.safetensors"  # the same file in a shared folder, and its name in every artifact
FILES = (*RUN_FILES, SHARED)
# command that made a bank -> type of artifact
KINDS = {"fit": "maps", "stitch": "stitching", "universe": "universe"}

# ---------------------------------------------------------------------- runs


def unfinished(folder: Path) -> str | None:
    """Return the number of the W&B run of a folder whose command has not ended; None if there is none."""
    path = folder / NUMBER
    if not path.is_file():
        return None
    return path.read_text(encoding="utf-8").strip() or None


def new_number(folder: Path, before: str | None = None) -> str:
    """Choose the number of a run, and keep it in the run's folder until the run is complete.

    It is kept before W&B starts, so that a process that is killed at any time goes on with the same run.

    Args:
        folder: folder of the run.
        before: number of the interrupted run that it goes on with. WANDB_RUN_ID, as an agent of a sweep sets it, has
            precedence.
    """
    number = os.environ.get("WANDB_RUN_ID") or before or secrets.token_hex(4)
    write_text(folder / NUMBER, f"{number}\n")
    return number


def complete(folder: Path) -> None:
    """Record that the run of a folder is complete: a command that uses its files is another run."""
    (folder / NUMBER).unlink(missing_ok=True)


def start_run(
    folder: Path,
    name: str,
    kind: str,
    group: str | None = None,
    number: str | None = None,
) -> Any:
    """Start a W&B run, or resume one. It follows WANDB_MODE, but is online only for a user who is logged in.

    It never prompts.

    Args:
        folder: where its files are kept.
        name: name of the run.
        kind: kind of job.
        group: of runs that belong together; default: WANDB_RUN_GROUP, or none.
        number: its id; a run of this id goes on. Default: WANDB_RUN_ID, or a new one.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    options: dict[str, Any] = {
        "dir": folder.resolve(),  # its service has a working directory of its own
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": name,
        "job_type": kind,
        "group": group,
        "id": number,
        "resume": "allow",
        "settings": wandb.Settings(init_timeout=30),
    }
    try:  # not through Lightning, which would pass an argument that W&B warns about
        return wandb.init(mode=_mode(), **options)
    except Exception as error:
        # the service's own error, which it does not export
        if number is not None and "is in use" in str(error):
            logger.warning(
                "At W&B the run `%s` cannot go on, as it has not ended. This is a new run.",
                number,
            )
            return start_run(folder, name, kind, group)
        if not isinstance(
            error, wandb.errors.CommError | wandb.errors.AuthenticationError
        ):
            raise
        logger.warning(
            "W&B cannot be reached (%s). This run is logged offline; `wandb sync` uploads it later.",
            error,
        )
        return wandb.init(mode="offline", **options)


def turned_off() -> bool:
    """Tell whether WANDB_MODE is disabled."""
    return os.environ.get("WANDB_MODE") == "disabled"


def logged_in() -> bool:
    """Tell whether there is a key for W&B. It never prompts."""
    import wandb

    return bool(wandb.login(prompt=False))


def _mode() -> Any:
    """Return WANDB_MODE, or offline for a user who would be online and is not logged in."""
    mode = os.environ.get("WANDB_MODE")
    if mode and mode != "online":
        return mode
    if logged_in():
        return "online"
    if mode:
        logger.warning(
            "WANDB_MODE is online, but W&B has no key: run `wandb login`, or set WANDB_API_KEY. This run is logged "
            "offline; `wandb sync` uploads it later."
        )
    return "offline"


# ---------------------------------------------------------------------- what runs use and leave


class RunArtifact(NamedTuple):
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
        """Name of its artifact: kind and models; for states the name of their folder, which identifies them.

        W&B takes 128 letters, digits and `_.-`. A name that has to be changed for it ends in a hash of the whole.
        """
        if self.kind == "states":
            models = self.path.parent.name
        else:
            models = "--".join(file_names(self.about["models"]).values())
        name = f"{self.kind}-{models}"
        legal = re.sub(r"[^a-zA-Z0-9_.-]", "-", name)
        if legal == name and len(name) <= LONGEST_NAME:
            return name
        digest = blake2b(name.encode(), digest_size=4).hexdigest()
        return f"{legal[: LONGEST_NAME - len(digest) - 1]}-{digest}"

    def artifact(self, *, upload: bool = False) -> Any:
        """Make the artifact.

        Args:
            upload: whether W&B gets the file itself. States are never uploaded.
        """
        import wandb

        artifact = wandb.Artifact(self.name, self.kind, metadata=self.about)
        # whatever the file is called: equal files are one artifact
        name = SHARED
        if self.kind == "states":
            name, upload = MANIFEST, False
        if upload:
            artifact.add_file(str(self.path), name=name)
        else:
            artifact.add_reference(self.path.resolve().as_uri(), name=name)
        return artifact


def described(path: Path) -> RunArtifact | None:
    """Describe a file of maps, layers or probes, or a shared folder with one; None for anything else.

    Args:
        path: path of the file. Only its header is read.
    """
    if path.is_dir():
        path = path / SHARED
    if path.name not in FILES or not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
        if "banks" in header:
            return RunArtifact(path, "probes", _of_probes(json.loads(header["banks"])))
        if "bank" in header:
            bank = json.loads(header["bank"])
            return RunArtifact(path, KINDS[bank["command"]], _of_maps(bank))
    except (
        OSError,
        SafetensorError,
        ValueError,
    ):  # of an earlier version, or none of ours
        return None
    return None


def _of_maps(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return command, models with their fingerprints, sites, maps and texts of a bank."""
    data = header["data"]
    models = data["models"]
    if isinstance(models, dict):
        models = models.values()
    texts = data.get("text", {})
    known = [name for name in ("source", "subset", "seed", "hashes") if name in texts]
    return {
        "command": header["command"],
        "models": {model["name"]: model.get("fingerprint") for model in models},
        "pairs": {route: str(pairs) for route, pairs in header["pairs"].items()},
        "maps": {route: sorted(maps) for route, maps in header["maps"].items()},
        "rows": data.get("rows"),
        "text": {name: texts[name] for name in known},
    }


def _of_probes(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return models and tasks of banks of probes."""
    models, tasks = {}, set()
    for bank in header.values():
        about = bank["about"]
        models[about["model"]] = about.get("fingerprint")
        tasks.add(about["task"])
    return {"models": models, "tasks": sorted(tasks)}


def states(folder: Path) -> RunArtifact:
    """Describe a folder of stored states."""
    held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    about = {
        **held["about"],
        **held["identity"],
        "sites": sorted(held["sites"], key=int),
    }
    return RunArtifact(folder / MANIFEST, "states", about)


def log_outputs(run: Any, folder: Path, *, upload: bool = False) -> list[str]:
    """Log what a run has left in its folder, and return the names of the artifacts.

    Args:
        run: at W&B.
        folder: folder of the run.
        upload: whether W&B gets the files themselves.
    """
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        found = described(path)
        if found is not None:
            run.log_artifact(found.artifact(upload=upload))
            names.append(found.name)
    return names


def log_inputs(run: Any, used: Iterable[RunArtifact]) -> None:
    """Log what a run has used, and list it in the run's config under `inputs`."""
    named = []
    for entry in used:
        # What `use_artifact` does, which refuses offline runs and waits for the server. Equal artifacts are one there.
        artifact = entry.artifact()
        run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
        named.append(
            {
                "name": entry.name,
                "type": entry.kind,
                "path": str(entry.path),
                "digest": artifact.digest,
            }
        )
    if named:
        run.config.update({"inputs": named}, allow_val_change=True)
