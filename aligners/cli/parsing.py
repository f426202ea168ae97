"""The parser of a command's options, and its errors in plain words: what was expected, where, and what was received.

Everything that this package uses of argparse's and jsonargparse's private parts is here: `_actions`, the options of a
parser, and `_typehint`, the type of one, which are the only way to them; and `_inner_parser`, which marks a parser that
parses for another. `tests/aligners/cli/test_words.py` fails if a version no longer has them.
"""

import re
import sys
from collections.abc import Collection, Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from aligners.cli.options import flat
from aligners.cli.trusted import (
    DENIED,
    check_classes,
    check_typed,
    let_import,
    let_name_maps,
    refuse_class,
)
from aligners.cli.words import KINDS
from aligners.errors import UserError, did_you_mean

TYPES = {
    **KINDS,
    "str": "a text",
    "dict": "names and values such as {a: b}",
    "NoneType": "",
}
LIST = "a list such as [a, b]"  # any other type
TYPE = re.compile(
    r"Expected an? (?:<class '(?:[\w.]+\.)?(\w+)'>|typing\.Literal\[(.*?)\])"
)
VALUE = re.compile(
    r"(?:Got|Given) value: (?:NestedArg\(.*val=)?'?(.*?)(?:'?\)?$|\. Got value)",
    re.MULTILINE,
)
UNKNOWN = re.compile(
    r"(?:unrecognized arguments:|Option|Group '([\w.]+)' does not accept option) '?([^\s']+)"
)


def actions_of(parser: ArgumentParser) -> list[Any]:
    """Return the options and words that a parser takes."""
    return list(parser._actions)


def hint_of(action: Any) -> Any:
    """Return the type of an option; None if it has none."""
    return getattr(action, "_typehint", None)


class OptionParser(ArgumentParser):
    """jsonargparse's parser; what the user can fix is a `UserError`."""

    def add_class_arguments(self, *given: Any, **options: Any) -> list[str]:
        """Add the arguments of a class, those that may be int or float read as int first, so that 3 is not 3.0.

        `typing` orders equal unions like the first one that any package has named, and jsonargparse follows this order.
        """
        added = super().add_class_arguments(*given, **options)
        for action in actions_of(self):
            hint = hint_of(action)
            if get_origin(hint) in (Union, UnionType) and {int, float} <= {
                *get_args(hint)
            }:
                others = [kind for kind in get_args(hint) if kind not in (int, float)]
                action._typehint = reduce(or_, others, int | float)
        return added

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *given: Any, **options: Any
    ) -> Namespace:
        """Parse a command line. The command line may name code to import; files of options may not.

        Raises:
            UserError: an option is wrong, or would run code that the command line does not name.
        """
        words = sys.argv[1:] if args is None else list(args)
        let_import(words)
        let_name_maps()
        parsed = super().parse_args(words, *given, **options)
        check_typed(flat(parsed.as_dict()), words)
        check_classes(parsed)
        return parsed

    def parse_object(self, *given: Any, **options: Any) -> Namespace:
        """Parse values, such as those of a study's cell.

        Raises:
            UserError: an option is wrong, or names a class that it may not name.
        """
        let_name_maps()
        parsed = super().parse_object(*given, **options)
        if not self._is_inner():
            check_classes(parsed)
        return parsed

    def _is_inner(self) -> bool:
        return getattr(self, "_inner_parser", False)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise.

        Raises:
            UserError: always, unless it parses for another parser, which words the error then.
        """
        if self._is_inner():
            super().error(message, ex)
        options = [action.dest for action in actions_of(self) if action.option_strings]
        raise UserError(in_plain_words(message, self.prog, options)) from ex


def in_plain_words(message: str, program: str, options: Collection[str]) -> str:
    """Return an error of jsonargparse in our words.

    Args:
        message: jsonargparse's message.
        program: what the user typed up to the command.
        options: names of all options of the command.
    """
    keys = re.findall(r'Parser key "([^"]+)"', message)
    if "Expected `" in message:  # our own error, from a check of a value
        return message[message.find("Expected `") :]
    if denied := DENIED.search(message):
        return str(refuse_class(f"`--{keys[0]}`" if keys else "options", denied[1]))
    if unknown := UNKNOWN.match(message):
        option = unknown[2]
        if not message.startswith("unrecognized"):  # in a file of options
            option = f"--{'.'.join(filter(None, unknown.groups()))}"
        return _unknown_option(program, option, options)
    if missing := re.match(r"the following arguments are required: (.*)", message):
        return f"Expected a value of `{missing[1]}`, but got none. `{program} --help` explains it."
    if not keys:
        return message
    return _wrong_value(message, program, keys)


def _unknown_option(program: str, option: str, options: Collection[str]) -> str:
    ends = [f"--{name}" for name in options if name.endswith(f".{option[2:]}")][:3]
    like = did_you_mean([option], [f"--{name}" for name in options])
    if ends:
        like = f" Did you mean {' or '.join(ends)}?"
    return f"Expected options of `{program}`, but got {option}.{like} `{program} --help all` lists them."


def _wrong_value(message: str, program: str, keys: Sequence[str]) -> str:
    """Return the error for a wrong value.

    Args:
        message: jsonargparse's.
        program: what the user typed up to the command.
        keys: names in the message, that of the option first, the one that is wrong last.
    """
    place = f"`--{keys[0]}`"
    if keys[-1] != keys[0]:
        place = f"`{keys[-1]}` of `--{keys[0]}`"
    if unknown := re.search(r"Option '([^']+)' is not accepted", message):
        return f"Expected an argument that {place} has, but got {unknown[1]}. `{program} --{keys[0]}.help` lists them."
    if several := re.search(
        r"Multiple subclasses with name (\S+)\. .*: (.*)\.", message
    ):
        called, paths = several.groups()
        return f"Expected {place} to give the full path of a class, as several are called {called}: {paths}."
    types = []
    for kind, literal in TYPE.findall(message):
        types.append(literal.replace("'", "") or TYPES.get(kind, LIST))
    name = re.search(r"Expected a dot import path string: (\S+)", message)
    if name and not set(types) & set(KINDS.values()):
        from aligners.cli.known.describe_options import (
            known_names,
        )  # which needs this module

        known = known_names().get(keys[0], ["the full paths of classes"])
        return f"Expected {place} out of {', '.join(known)}, but got {name[1]}.{did_you_mean([name[1]], known)}"
    got = VALUE.findall(message) or [message.splitlines()[-1].strip()]
    expected = list(filter(None, dict.fromkeys(types)))
    if expected:
        return f"Expected {place} to be {' or '.join(expected)}, but got {got[0]!r}."
    what = re.sub(r'.*Parser key ".*?": ', "", got[-1])
    return f"Expected another value of {place}: {what}"
