"""The parser of a command's options, and its errors in plain words: what was expected, where, and what came."""

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
from aligners.cli.words import KINDS, unknown_option
from aligners.errors import UserError, did_you_mean

TYPES = {**KINDS, "str": "a text", "dict": "names and values such as {a: b}", "NoneType": ""}
LIST = "a list such as [a, b]"  # any other type
TYPE = re.compile(r"Expected an? (?:<class '(?:[\w.]+\.)?(\w+)'>|typing\.Literal\[(.*?)\])")
VALUE = re.compile(
    r"(?:Got|Given) value: (?:NestedArg\(.*val=)?'?(.*?)(?:'?\)?$|\. Got value)", re.MULTILINE
)
UNKNOWN = re.compile(
    r"(?:unrecognized arguments:|Option|Group '([\w.]+)' does not accept option) '?([^\s']+)"
)


class OptionParser(ArgumentParser):
    """jsonargparse's parser; what the user can mend is a `UserError`."""

    def add_class_arguments(self, *given: Any, **options: Any) -> list[str]:
        """Add the arguments of a class, those that may be int or float read as int first, so that 3 is not 3.0.

        `typing` gives equal unions the order of the one that any package has named first, and jsonargparse goes by it.
        """
        added = super().add_class_arguments(*given, **options)
        actions: list[Any] = self._actions
        for action in actions:
            hint = getattr(action, "_typehint", None)
            if get_origin(hint) in (Union, UnionType) and {int, float} <= {*get_args(hint)}:
                others = (kind for kind in get_args(hint) if kind not in (int, float))
                action._typehint = reduce(or_, others, int | float)
        return added

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *given: Any, **options: Any
    ) -> Namespace:
        """Parse a command line. What it names may be imported; what a file of options names may not.

        Raises:
            UserError: an option is wrong, or is to run code that the command line does not name.
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
        if not getattr(self, "_inner_parser", False):
            check_classes(parsed)
        return parsed

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise.

        Raises:
            UserError: always, unless it parses for another parser, which words the error then.
        """
        if getattr(self, "_inner_parser", False):
            super().error(message, ex)
        options = [
            option[2:]
            for action in self._actions
            for option in action.option_strings
            if option[-1] != "+"
        ]
        raise UserError(in_plain_words(message, self.prog, options)) from ex


def in_plain_words(message: str, program: str, options: Collection[str]) -> str:
    """An error of jsonargparse, in our words.

    Args:
        message: jsonargparse's.
        program: what the user typed up to the command.
        options: names of all options of the command.
    """
    keys = re.findall(r'Parser key "([^"]+)"', message)
    if "Expected `" in message:  # ours, from a check of a value
        return message[message.find("Expected `") :]
    if denied := DENIED.search(message):
        return str(refuse_class(f"`--{keys[0]}`" if keys else "options", denied[1]))
    if unknown := UNKNOWN.match(message):
        in_file = f"--{'.'.join(filter(None, unknown.groups()))}"
        return str(
            unknown_option(
                program, unknown[2] if message.startswith("unrecognized") else in_file, options
            )
        )
    if missing := re.match(r"the following arguments are required: (.*)", message):
        return f"Expected a value of `{missing[1]}`, but got none. `{program} --help` explains it."
    if not keys:
        return message
    place = f"`--{keys[0]}`" if keys[-1] == keys[0] else f"`{keys[-1]}` of `--{keys[0]}`"
    if unknown := re.search(r"Option '([^']+)' is not accepted", message):
        return f"Expected an argument that {place} has, but got {unknown[1]}. `{program} --{keys[0]}.help` lists them."
    if several := re.search(r"Multiple subclasses with name (\S+)\. .*: (.*)\.", message):
        called, paths = several.groups()
        return f"Expected {place} to give the full path of a class, as several are called {called}: {paths}."
    types = [
        literal.replace("'", "") or TYPES.get(kind, LIST) for kind, literal in TYPE.findall(message)
    ]
    name = re.search(r"Expected a dot import path string: (\S+)", message)
    if name and not set(types) & set(KINDS.values()):
        from aligners.cli.known.describe_options import known_names  # which needs this module

        known = known_names().get(keys[0], ["the full paths of classes"])
        return f"Expected {place} out of {', '.join(known)}, but got {name[1]}.{did_you_mean([name[1]], known)}"
    got = VALUE.findall(message) or [message.splitlines()[-1].strip()]
    if any(types):
        return f"Expected {place} to be {' or '.join(filter(None, dict.fromkeys(types)))}, but got {got[0]!r}."
    what = re.sub(r'.*Parser key ".*?": ', "", got[-1])
    return f"Expected another value of {place}: {what}"
