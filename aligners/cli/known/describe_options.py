"""Describes a command's options as its parser has them: `aligners.cli.words` makes help and checks of words of that.

What `--help` shows of a command is its docstring with an example, the options of its own function, and those of
often.yaml.
"""

import re
from argparse import SUPPRESS
from collections.abc import Sequence
from inspect import isclass, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from aligners import maps
from aligners.cli.command import Command
from aligners.cli.words import CONFIGS
from aligners.datamodules.rows.policies import POLICIES
from aligners.files.yaml_tables import table_beside
from aligners.fitting.bijection.price import NAMES
from aligners.injection.comparing import comparison as compared
from aligners.injection.methods import CLOSED_FORMS
from aligners.maps.base import Aligner
from aligners.models.recipes import EMBEDDED
from aligners.probing.artefacts import carrying_maps as carried
from aligners.similarity.catalogue import catalogue

MODELS = {
    "models",
    *(f"data.{name}" for name in ("model", "model_x", "model_y", "models", "bases")),
}
OFTEN: dict[str, str] = table_beside(__file__, "often.yaml")


def describe(command: Command, script: str, name: str) -> dict[str, Any]:
    """Describe a command.

    Args:
        command: the command.
        script: that has it.
        name: of the command.

    Returns: `help`: its lines, each with the indent of what does not fit; `positional`: how many words it takes without
        an option's name; `configs`: name -> path of the files of options that come along; `options`: name -> the kinds
        of its values; `names`: option -> the names that it takes.
    """
    parser = command.parser()
    options = {}
    for action in parser._actions:
        if action.option_strings and _name(action) != "help":
            options[_name(action)] = action
    folder = CONFIGS / (name if (CONFIGS / name).is_dir() else script)
    configs = sorted(folder.glob("*.yaml")) if "config" in options else []
    names = known_names()
    kinds_of_models = [kind.rstrip(":") for kind in EMBEDDED]
    for option in sorted(MODELS & options.keys()):
        names[option] = kinds_of_models
    return {
        "help": _help(command, parser, options),
        "positional": sum(not action.option_strings for action in parser._actions),
        "configs": {path.stem: f"{folder.name}/{path.name}" for path in configs},
        "options": {option: _kind(action) for option, action in options.items()},
        "names": names,
    }


def known_names() -> dict[str, list[str]]:
    """The names of maps, measures and so on that options take."""
    classes = [
        name
        for name in maps.__all__
        if issubclass(getattr(maps, name), Aligner) and name != "Aligner"
    ]
    return {
        "closed_form": list(CLOSED_FORMS),
        "data.rows": list(POLICIES),
        "maps": list(
            dict.fromkeys([*NAMES, *compared.MAPS, *carried.MAPS])
        ),  # each command refuses those of others
        "measures": [*catalogue(0.99), "all"],
        "model.aligners": classes,
        "model.layers": classes,
    }


def _help(command: Command, parser: Any, options: dict[str, Any]) -> list[list[Any]]:
    """The lines of a help, each with the indent of what does not fit: see `aligners.cli.words.help_of`."""
    positional = [action for action in parser._actions if not action.option_strings]
    own = [
        action.dest
        for action in parser._actions
        if action.dest in list(signature(command.work).parameters)[1:]
    ]
    names = [name for name in dict.fromkeys([*own, *OFTEN]) if _is_used(options.get(name), command)]
    shown = {a.dest: _sentence(a) for a in positional} | {
        f"--{name}": _sentence(options[name]) for name in names
    }
    files = (
        "A file of options, yours or the package's: --config NAME. " if "config" in options else ""
    )
    about = [" ".join(part.split()) for part in parser.description.split("\n\n")]
    plain = [
        f"usage: PROGRAM {command.usage}",
        *(line for part in about for line in ("", part)),
        "",
    ]
    example = example_of(command)
    shown_example = [[0, "example:"], [4, f"  PROGRAM {example}"], [0, ""]] if example else []
    return [
        *([0, line] for line in plain),
        *shown_example,
        *([26, f"  {option:<23} {sentence}"] for option, sentence in shown.items()),
        *([0, ""], [0, f"{files}All options: PROGRAM --help all"]),
    ]


def example_of(command: Command) -> str:
    """The words of the example in a command's docstring; none: an empty text."""
    found = re.search(r"\n\n *Example: `(.*?)`", command.work.__doc__ or "")
    return found[1] if found else ""


def _name(action: Any) -> str:
    return str(next(option for option in action.option_strings if option.startswith("--")))[2:]


def _is_used(action: Any, command: Command) -> bool:
    """Whether a command has an option, and makes use of it; one that evaluates counts no epochs."""
    if (
        not hasattr(action, "_typehint") or get_origin(action._typehint) is dict
    ):  # such as the tasks of a study
        return False
    return not action.dest.startswith("trainer.") or action.dest in command.defaults


def _sentence(action: Any) -> str:
    """What often.yaml says of an option, or else the first sentence of its help; and its default."""
    first = re.split(r"(?<=[.:;]) ", " ".join(action.help.split()), maxsplit=1)[0].rstrip(".:;")
    sentence = OFTEN.get(action.dest, first) if action.option_strings else first
    plain = isinstance(action.default, (str, int, float)) and action.default != SUPPRESS
    default = str(action.default).lower() if isinstance(action.default, bool) else action.default
    return f"{sentence[0].upper()}{sentence[1:]}" + (f" [{default}]" if plain else "")


def _kind(action: Any) -> str:
    """The kinds of values that an option takes, the one with brackets or braces first: see `words.KINDS`."""
    if action.nargs in (0, "?") or action.dest == "print_config":
        return "flag"
    kinds = _kinds(action._typehint) if hasattr(action, "_typehint") else ["file"]
    if action.dest.startswith("trainer.") and any(kind.startswith("=") for kind in kinds):
        return "any"  # Lightning takes more than its hints say
    return "|".join(
        sorted(dict.fromkeys(kinds), key=lambda kind: not kind.startswith(("list", "maps")))
    )


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
        kind = "list[file]" if args[0] is Path else "list[int]" if entries == ["int"] else "list"
        return [kind] if plain else ["any"]
    if hint in (int, float, bool, NoneType):
        return ["null" if hint is NoneType else hint.__name__]
    return ["str"] if isclass(hint) and issubclass(hint, (str, Path)) else ["any"]
