"""Writes aligners/cli/known_options.json, of which `aligners.cli.words` makes help and the first check of options.

What `--help` shows of a command is its docstring with an example, the options of its own function, and those of
often.yaml.

`python -m website.known_options` renews it. A test compares it with the parsers.
"""

import json
import re
from argparse import SUPPRESS
from collections.abc import Iterable, Sequence
from inspect import isclass, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from aligners import maps
from aligners.cli.run import Command
from aligners.cli.table import COMMANDS, find, quiet
from aligners.cli.words import KNOWN
from aligners.fitting.price import NAMES
from aligners.fitting.universe.universe import CLOSED_UNIVERSES
from aligners.injection.methods import CLOSED_FORMS
from aligners.maps.base import Aligner
from aligners.models.recipes import EMBEDDED
from aligners.similarity.catalogue import catalogue
from datamodules.rows.policies import POLICIES

OFTEN: dict[str, str] = yaml.safe_load(Path(__file__).with_name("often.yaml").read_text(encoding="utf-8"))


def known() -> dict[str, Any]:
    """What known_options.json should hold."""
    classes = [name for name in maps.__all__ if issubclass(getattr(maps, name), Aligner) and name != "Aligner"]
    names: dict[str, Iterable[str]] = {
        "closed_form": CLOSED_FORMS,
        "data.rows": POLICIES,
        "maps": NAMES,
        "measures": [*catalogue(0.99), "all"],
        "model.aligners": classes,
        "model.closed_form": CLOSED_UNIVERSES,
        "model.layers": classes,
        "models": [kind.rstrip(":") for kind in EMBEDDED],
    }
    commands = {f"{script} {name}": _about(find(script, name)) for script, each in COMMANDS.items() for name in each}
    return {"names": {option: list(each) for option, each in names.items()}, "commands": commands}


def _about(command: Command) -> dict[str, Any]:
    parser = command.parser()
    options = {_name(action): action for action in parser._actions if action.option_strings and _name(action) != "help"}
    positional = [action for action in parser._actions if not action.option_strings]
    own = [action.dest for action in parser._actions if action.dest in list(signature(command.work).parameters)[1:]]
    shown = [name for name in dict.fromkeys([*own, *OFTEN]) if _is_used(options.get(name), command)]
    return {
        "about": parser.description,
        "example": re.findall(r"\n\n *Example: `(.*?)`", command.work.__doc__ or "")[0],
        "usage": command.usage,
        "positional": len(positional),
        "shown": {a.dest: _help(a) for a in positional} | {f"--{name}": _help(options[name]) for name in shown},
        "options": {name: _kind(action) for name, action in options.items()},
    }


def _name(action: Any) -> str:
    return str(next(option for option in action.option_strings if option.startswith("--")))[2:]


def _is_used(action: Any, command: Command) -> bool:
    """Whether a command has an option, and makes use of it; one that evaluates counts no epochs."""
    return hasattr(action, "_typehint") and (not action.dest.startswith("trainer.") or action.dest in command.defaults)


def _help(action: Any) -> str:
    """What often.yaml says of an option, or else the first sentence of its help; and its default."""
    first = re.split(r"(?<=[.:;]) ", " ".join(action.help.split()), maxsplit=1)[0].rstrip(".:;")
    sentence = OFTEN.get(action.dest, first)
    plain = isinstance(action.default, (str, int, float)) and action.default != SUPPRESS
    default = str(action.default).lower() if isinstance(action.default, bool) else action.default
    return f"{sentence[0].upper()}{sentence[1:]}" + (f" [{default}]" if plain else "")


def _kind(action: Any) -> str:
    """The kinds of values that an option takes, the one with brackets or braces first: see `KINDS`."""
    if action.nargs in (0, "?") or action.dest == "print_config":
        return "flag"
    kinds = _kinds(action._typehint) if hasattr(action, "_typehint") else ["file"]
    return "|".join(sorted(dict.fromkeys(kinds), key=lambda kind: not kind.startswith(("list", "maps"))))


def _kinds(hint: Any) -> list[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [kind for arg in args for kind in _kinds(arg)]
    if origin is Literal:
        return [f"={arg}" for arg in args]
    if origin is dict and get_args(args[1])[1:] == (Aligner,):
        return ["maps"]
    if origin in (list, Sequence):
        entries = _kinds(args[0])
        plain = all(kind in ("int", "str", "null") or kind.startswith("=") for kind in entries)
        return ["list[int]" if entries == ["int"] else "list"] if plain else ["any"]
    if hint in (int, float, bool, NoneType):
        return ["null" if hint is NoneType else hint.__name__]
    return ["str"] if isclass(hint) and issubclass(hint, (str, Path)) else ["any"]


if __name__ == "__main__":
    quiet()
    KNOWN.write_text(json.dumps(known(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
