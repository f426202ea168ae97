"""A user's own modules, which define maps and measures outside this package, imported before they are named."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Self

from jsonargparse.typing import register_type

from aligners.errors import UserError


class Imported(str):
    """The name of a module, or the path of its file, which is imported when an option gets it as its value.

    A file is imported once in a process, under its own name without `.py`.

    Raises:
        ValueError: there is no such file or module, or another module has the file's name.
        RuntimeError: the module raised an error, which is this one's cause.
    """

    def __new__(cls, name: str) -> Self:
        """Import it."""
        if name.endswith(".py"):
            _check_file(Path(name))
        try:
            _import_file(Path(name)) if name.endswith(".py") else import_module(name)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                raise RuntimeError(f"{name} raised an error when it was imported: see above.") from error
            raise UserError(
                f"Expected `imports` to name Python files or modules, but there is no module {name!r}. Write a file as "
                f"{name}.py, with its folder."
            ) from error
        return super().__new__(cls, name)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"Expected `imports` to name Python files or modules, but there is no file {path}.")
    other = sys.modules.get(path.stem)
    if other is not None and Path(getattr(other, "__file__", None) or "").resolve() != path.resolve():
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
