"""Describes a command's options as its parser has them; `aligners.cli.words` makes help and checks from it.

What `--help` shows of a command is its docstring with an example, the options of its own function, and those of
often.yaml.
"""

import re
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from inspect import isclass, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from aligners import maps
from aligners.cli.command import Command
from aligners.cli.parsing import actions_of, hint_of
from aligners.cli.words import CONFIGS
from aligners.files.yaml_tables import table_beside
from aligners.fitting.bijection.price import NAMES
from aligners.injection.comparing import comparison as compared
from aligners.injection.methods import ALL_CLOSED_FORMS
from aligners.maps.base import Aligner
from aligners.probing.artefacts import carrying_maps as carried
from aligners.similarity.catalogue import catalogue

OFTEN: dict[str, str] = table_beside(__file__, "often.yaml")


def describe(command: Command, script: str, name: str) -> dict[str, Any]:
    """Describe a command.

    Args:
        command: the command.
        script: the script that has it.
        name: name of the command.

    Returns: `help`: its lines, each with the indent of what does not fit; `positional`: how many words it takes without
        an option's name; `configs`: name -> path of the files of options that come along; `options`: name -> the kinds
        of its values, none of a flag; `names`: option -> the names that it takes.
    """
    parser = command.parser()
    options, positional = {}, []
    for action in actions_of(parser):
        if not action.option_strings:
            positional.append(action)
        elif action.dest.rpartition(".")[2] not in ("help", "print_config"):
            options[action.dest] = action
    configs = {}
    if "config" in options:
        folder = CONFIGS / (name if (CONFIGS / name).is_dir() else script)
        for path in sorted(folder.glob("*.yaml")):
            configs[path.stem] = f"{folder.name}/{path.name}"
    return {
        "help": _help(command, positional, options),
        "positional": len(positional),
        "configs": configs,
        "options": {option: _kinds_of(action) for option, action in options.items()},
        "names": known_names(),
    }


def known_names() -> dict[str, list[str]]:
    """The names of maps, measures and so on that options take."""
    classes = []
    for name in maps.__all__:
        if getattr(maps, name) is not Aligner:
            classes.append(name)
    of_maps = dict.fromkeys([*NAMES, *compared.MAPS, *carried.MAPS])
    return {
        "closed_form": list(ALL_CLOSED_FORMS),
        "maps": list(of_maps),  # each command refuses those of others
        "measures": [*catalogue(0.99), "all"],
        "model.aligners": classes,
        "model.layers": classes,
    }


def example_of(command: Command) -> str:
    """Return the words of the example in a command's docstring, or an empty text."""
    found = re.search(r"\n\n *Example: `(.*?)`", command.work.__doc__ or "")
    return found[1] if found else ""


def _help(
    command: Command, positional: Sequence[Any], options: Mapping[str, Any]
) -> list[list[Any]]:
    """Return the lines of a help, each with the indent of its continuation; see `aligners.cli.words.help_of`."""
    lines: list[list[Any]] = [[0, f"usage: PROGRAM {command.usage}"]]
    for part in command.about().split("\n\n"):
        lines += [[0, ""], [0, " ".join(part.split())]]
    example = example_of(command)
    if example:
        lines += [[0, ""], [0, "example:"], [4, f"  PROGRAM {example}"]]
    lines.append([0, ""])
    for action in positional:
        lines.append([26, f"  {action.dest:<23} {_sentence(action)}"])
    own = list(signature(command.work).parameters)[1:]
    for name in dict.fromkeys([*own, *OFTEN]):
        if name in options and _is_used(options[name], command):
            lines.append([26, f"  {'--' + name:<23} {_sentence(options[name])}"])
    files = ""
    if "config" in options:
        files = "A file of options, yours or the package's: --config NAME. "
    return [*lines, [0, ""], [0, f"{files}All options: PROGRAM --help all"]]


def _is_used(action: Any, command: Command) -> bool:
    """Tell whether a command uses an option that people would type; a command that evaluates counts no epochs."""
    hint = hint_of(action)
    if hint is None or get_origin(hint) is dict:  # such as the tasks of a study
        return False
    return not action.dest.startswith("trainer.") or action.dest in command.defaults


def _sentence(action: Any) -> str:
    """Return what often.yaml says of an option, or else the first sentence of its help, with its default."""
    text = " ".join((action.help or "").split())
    sentence = re.split(r"(?<=[.:;]) ", text, maxsplit=1)[0].rstrip(".:;")
    if action.option_strings:
        sentence = OFTEN.get(action.dest, sentence)
    default = ""
    if isinstance(action.default, bool):
        default = f" [{str(action.default).lower()}]"
    elif isinstance(action.default, (str, int, float)) and action.default != SUPPRESS:
        default = f" [{action.default}]"
    return f"{sentence[:1].upper()}{sentence[1:]}{default}"


def _kinds_of(action: Any) -> list[str]:
    """Return the kinds of values that an option takes, the one with brackets or braces first; see `words.KINDS`."""
    if action.nargs in (0, "?"):
        return []
    hint = hint_of(action)
    kinds = ["any"] if hint is None else list(dict.fromkeys(_kinds(hint)))
    if action.dest.startswith("trainer.") and any(
        kind.startswith("=") for kind in kinds
    ):
        return ["any"]  # Lightning takes more than its hints say
    return sorted(kinds, key=lambda kind: not kind.startswith(("list", "maps")))


def _kinds(hint: Any) -> list[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [kind for arg in args for kind in _kinds(arg)]
    if origin is Literal:
        return [f"={arg}" for arg in args]
    if origin is dict and get_args(args[1])[1:] == (Aligner,):
        return ["maps"]
    if origin in (list, Sequence):
        return [_list_of(args[0])]
    if hint is NoneType:
        return ["null"]
    if hint in (int, float, bool):
        return [hint.__name__]
    return ["str"] if isclass(hint) and issubclass(hint, (str, Path)) else ["any"]


def _list_of(entry: Any) -> str:
    kinds = _kinds(entry)
    for kind in kinds:
        if kind not in ("int", "str", "null") and not kind.startswith("="):
            return "any"
    return "list[int]" if kinds == ["int"] else "list"
