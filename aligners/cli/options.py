"""Options that commands share, checks of them, and how those of an earlier run are compared."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type

from aligners.cli.folders import CONFIG
from aligners.cli.trusted import check_may_import, let_name
from aligners.errors import UserError
from aligners.files.sealed import check_sealed
from aligners.studies.executors import cpu_cores

logger = logging.getLogger(__name__)
# Options, or prefixes of them, that may differ when a run is resumed: they do not change what the result means.
FREE = tuple(
    yaml.safe_load(
        Path(__file__).with_name("free_options.yaml").read_text(encoding="utf-8")
    )
)


class Imported(str):
    """The name of a module or file, which is imported when an option gets it as its value.

    A file is imported once in a process, under its own name without `.py`.

    Raises:
        ValueError: the command line does not name it, there is no such file or module, or another module has the
            file's name.
        RuntimeError: the module raised an error, which is this one's cause.
    """

    def __new__(cls, name: str) -> Self:
        """Import it."""
        check_may_import(name)
        if name.endswith(".py"):
            _check_file(Path(name))
        try:
            _import_file(Path(name)) if name.endswith(".py") else import_module(name)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                raise RuntimeError(
                    f"{name} raised an error when it was imported: see above."
                ) from error
            raise UserError(
                f"Expected `imports` to name Python files or modules, but there is no module {name!r}. Write a file as "
                f"{name}.py, with its folder."
            ) from error
        let_name(sys.modules[Path(name).stem if name.endswith(".py") else name])
        return super().__new__(cls, name)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(
            f"Expected `imports` to name Python files or modules, but there is no file {path}."
        )
    other = sys.modules.get(path.stem)
    if (
        other is not None
        and Path(getattr(other, "__file__", None) or "").resolve() != path.resolve()
    ):
        raise UserError(
            f"Expected a file in `imports` whose name no other module has, but {path.stem!r} is one already. Rename "
            f"{path}."
        )


def _import_file(path: Path) -> None:
    name = path.stem
    if name not in sys.modules:
        spec: Any = spec_from_file_location(name, path)
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception:
            del sys.modules[name]
            raise


register_type(Imported, str, Imported, fail_already_registered=False)


@dataclass
class RunOptions:
    """The run.

    Args:
        imports: Python files or modules with maps, measures or model families of your own, imported before options that
            name these: give them first, on the command line. They are run: name only what you trust.
        upload: Upload the maps, layers or probes that the run leaves, as artifacts of its W&B run. By default W&B gets
            only their names, sizes, checksums and places.
    """

    imports: list[Imported] = field(default_factory=list)
    upload: bool = False


@dataclass
class TrainingOptions:
    """The start of training.

    Args:
        seed_everything: Seed for Python, NumPy and torch. `true` draws one, `false` sets none.
        ckpt_path: The last.ckpt of an interrupted run, to resume it; for `validate`, an aligners.safetensors.
    """

    seed_everything: bool | int = 0
    ckpt_path: str | None = None


def check_trains(options: Namespace) -> None:
    """Raise if the Trainer would stop before it begins, without saving anything.

    Raises:
        ValueError: an option is 0.
    """
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if options.trainer[name] == 0:
            raise UserError(
                f"Expected `trainer.{name}` to be at least 1, but got 0: nothing would be trained."
            )


def check_machine(trainer: Namespace) -> None:
    """Raise if this machine does not have the accelerator; warn if processes share its CPU cores.

    Args:
        trainer: options of the Trainer.

    Raises:
        ValueError: there is no such accelerator here.
    """
    from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator

    wanted = trainer.accelerator
    kinds = {"gpu": ["cuda", "mps"]}.get(wanted, [wanted])
    known = [kind for kind in kinds if kind in AcceleratorRegistry]
    if known and not any(map(_is_there, known)):
        raise UserError(
            f"Expected `trainer.accelerator` to be one that this machine has, but got {wanted!r}, and torch finds none "
            "here. Give `--trainer.accelerator cpu`, or repair the driver or the installation of torch."
        )
    if wanted == "auto" and not any(
        _is_there(kind) for kind in AcceleratorRegistry if kind != "cpu"
    ):
        wanted = "cpu"
    cores = cpu_cores()
    if wanted == "cpu" and str(trainer.devices).isdigit():
        processes = CPUAccelerator.parse_devices(int(trainer.devices))
        if processes > cores and "LOCAL_RANK" not in os.environ:
            logger.warning(
                "%d processes (`trainer.devices`) share %d CPU cores: that is slower than %d.",
                processes,
                cores,
                cores,
            )


def _is_there(accelerator: str) -> bool:
    """Whether this machine has an accelerator of Lightning's."""
    from lightning.pytorch.accelerators import AcceleratorRegistry

    return AcceleratorRegistry[accelerator]["accelerator"].is_available()


def check_goes_on(path: str | None, command: str | None, key: str) -> None:
    """Raise if a run cannot be resumed from a file. Nothing has been loaded for the run yet.

    Args:
        path: the checkpoint; None for a run that begins anew.
        command: the command of `train.py` that writes such checkpoints.
        key: an entry that they all have.

    Raises:
        ValueError: there is no such file, or it is something else.
    """
    if path is None:
        return
    wanted = f"Expected `ckpt_path` to be a last.ckpt of `train.py {command}`, but"
    if not Path(path).is_file():
        raise UserError(f"{wanted} there is no such file: {path}.")
    check_sealed(Path(path))
    try:
        content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # reading any other file can raise anything
        raise UserError(f"{wanted} {path} cannot be read as one.") from error
    if key not in content:
        raise UserError(f"{wanted} {path} is of another kind of run.")


def check_begun(folder: Path, options: Mapping[str, Any]) -> None:
    """Raise unless the run in a folder was begun with the options that it is resumed with.

    Args:
        folder: folder of the run.
        options: as plain values.

    Raises:
        ValueError: config.yaml is damaged, or says something else; options that change no result may differ.
    """
    try:
        written = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except yaml.YAMLError:
        written = None
    if not isinstance(written, dict):
        raise UserError(
            f"Expected the options of a run in {folder / CONFIG}, but got none. Name a new `--run`."
        )
    begun, now = flat(written), flat(options)
    names = [name for name in {**begun, **now} if not name.startswith(FREE)]
    differences = [name for name in names if begun.get(name) != now.get(name)]
    if differences:
        listed = "; ".join(
            f"{name} was {begun.get(name)!r} and is {now.get(name)!r}"
            for name in differences[:4]
        )
        raise UserError(
            f"Expected the options with which {folder} was begun, but got others: {listed}. Give the same options to "
            "go on, or name a new folder with `--run`."
        )


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested options to dotted names; a map of labels remains one value."""
    flattened: dict[str, Any] = {}
    for name, value in options.items():
        nested = isinstance(value, dict) and name != "labels"
        flattened |= (
            flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
        )
    return flattened
