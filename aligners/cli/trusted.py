"""Which options a file may set, and which only the command line may: those that run code of their own.

A file of options, or a study's, may be somebody else's. It may name classes of this package, of torch's optimisers and
of Lightning, and those of modules that the command line names. No other path is imported, let alone called.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from inspect import isclass
from os import PathLike
from typing import Any, NamedTuple

import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from aligners.errors import UserError
from aligners.maps.base import Aligner

BASES = (
    Aligner,
    Optimizer,
    LRScheduler,
    Callback,
    Logger,
    Profiler,
    Strategy,
    Accelerator,
    Precision,
    ClusterEnvironment,
    CheckpointIO,
    LayerSync,
)
HOMES = ("aligners", "torch.optim", "lightning.pytorch", "lightning.fabric")
WANTED = (
    "a map of aligners, an optimizer of torch.optim, a part of Lightning's Trainer, or a class of a module that "
    "`--imports` names on the command line"
)
# Options beside `imports` that run code of others, or commands: a file of options cannot set them.
RISKY = ("trust_remote_code", "executor_options")
DENIED = re.compile(
    r"Importing '([^']+)' is not allowed"
)  # how jsonargparse refuses a path
_modules: set[str] = (
    set()
)  # names, as the command line gives them, of what `--imports` may import

set_parsing_settings(
    import_path_denylist=["*"],
    import_path_allowlist=[*HOMES],
    instantiate_subclass_spec_in_any=False,
)


def refuse_class(place: str, path: str) -> UserError:
    """Return the error for a class or a function that no option may name."""
    return UserError(
        f"Expected {place} to name {WANTED}, but got {path}. Nothing of it was run."
    )


def let_import(words: Sequence[str]) -> None:
    """Allow from now on the import of modules that a command line names.

    Args:
        words: words of the command line, after the command.
    """
    for value in _values("imports", words):
        given = _loaded(value)
        names = given if isinstance(given, list) else [given]
        _modules.update(map(str, names))


def check_may_import(name: str) -> None:
    """Raise unless the command line names a module.

    Raises:
        UserError: only a file does.
    """
    if name not in _modules:
        raise UserError(
            f"Expected `imports` on the command line alone, as it runs code, but a file of options names {name}. If "
            f"you trust it, add `--imports {name}`."
        )


def let_name(module: Any) -> None:
    """Allow options to name the maps, callbacks and the like of a user's module from now on."""
    names = [module.__name__]
    for value in vars(module).values():
        if isclass(value) and issubclass(value, BASES):
            names.append(f"{value.__module__}.{value.__qualname__}")
    set_parsing_settings(
        import_path_allowlist=[name for name in names if _is_path(name)]
    )


def let_name_maps() -> None:
    """Allow options to name every map that this process has defined, from now on."""
    names = [
        f"{kind.__module__}.{kind.__qualname__}" for kind in Aligner.registry.values()
    ]
    set_parsing_settings(
        import_path_allowlist=[name for name in names if _is_path(name)]
    )


def _is_path(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def check_classes(options: Any, place: str = "") -> None:
    """Raise if options name a class of another kind than those that they may name, or a function that nobody trusts.

    Args:
        options: as they were parsed, not yet instantiated.
        place: the option that they are part of.

    Raises:
        UserError: they do.
    """
    if isinstance(options, Namespace):
        path = options.get("class_path")
        if isinstance(path, str) and not _is_trusted(_found(path)):
            raise refuse_class(f"`--{place}`", path)
        for name, value in vars(options).items():
            check_classes(value, f"{place}.{name}".strip("."))
    elif isinstance(options, Mapping):
        for name, value in options.items():
            check_classes(value, f"{place}.{name}".strip("."))
    elif isinstance(options, list | tuple):
        for value in options:
            check_classes(value, place)
    elif (
        callable(options)
        and not isinstance(options, PathLike)
        and not _is_trusted(options)
    ):
        raise refuse_class(
            f"`--{place}`", getattr(options, "__qualname__", str(options))
        )


def _is_trusted(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    own = sys.modules.get(str(module)) in _imported()
    return own or (isclass(value) and issubclass(value, BASES))


def _imported() -> Iterator[Any]:
    """Return the modules that `--imports` has imported."""
    for name in _modules:
        stem = name.removesuffix(".py").rpartition("/")[2]
        if stem in sys.modules:
            yield sys.modules[stem]


def _found(path: str) -> Any:
    """Return what a path names in the imported modules; None: nothing."""
    *folders, name = path.split(".")
    module = sys.modules.get(".".join(folders))
    return getattr(module, name, None)


def check_typed(options: Mapping[str, Any], words: Sequence[str]) -> None:
    """Raise if a file of options sets what only the command line may set.

    Args:
        options: by their dotted names, as plain values.
        words: words of the command line.

    Raises:
        UserError: it does.
    """
    for name, value in options.items():
        if not value or set(RISKY).isdisjoint(name.split(".")):
            continue
        if value not in _typed(name, words):
            raise UserError(
                f"Expected `{name}` on the command line alone, as it can run the code of others, but a file of options "
                f"sets it. If you trust that code, add `--{name} {str(value).lower()}`."
            )


def _typed(option: str, words: Sequence[str]) -> Iterator[Any]:
    """Return the values that a command line gives an option, directly or as part of a larger value.

    Args:
        option: its dotted name.
        words: words of the command line; a file that they name gives nothing.
    """
    parts = option.split(".")
    for first in range(1, len(parts) + 1):
        for value in _values(".".join(parts[:first]), words):
            given = _loaded(value)
            for part in parts[first:]:
                given = given.get(part) if isinstance(given, dict) else None
            yield given


def _loaded(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


class Trust(NamedTuple):
    """What a study's command line trusts, and its cells with it.

    Attributes:
        imports: modules that each cell imports.
        remote_code: whether a cell whose options say so may run the code of its models.
    """

    imports: tuple[str, ...] = ()
    remote_code: bool = False

    def words(self, options: Mapping[str, Any]) -> list[str]:
        """Return what this trust adds to the command line of a cell with these options."""
        added = []
        if self.imports:
            added.append(f"--imports={json.dumps(self.imports)}")
        if self.remote_code and options.get("data", {}).get("trust_remote_code"):
            added.append("--data.trust_remote_code=true")
        return added


NOBODY = Trust()


def trust_of(options: Mapping[str, Any]) -> Trust:
    """Return what the options of a study trust, once `check_typed` has compared them with its command line.

    Args:
        options: by their dotted names, as plain values.
    """
    remote_code = any(
        value
        for name, value in options.items()
        if name.split(".")[-1] == "trust_remote_code"
    )
    return Trust(tuple(map(str, options.get("imports") or ())), remote_code)


def _values(option: str, words: Sequence[str]) -> Iterator[str]:
    """Return all values that a command line gives an option."""
    gives = False
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            gives = name.removeprefix("--").removesuffix("+") == option
            if gives and equals:
                yield value
        elif gives:
            yield word
