"""The words of a command line before anything is imported: help on one screen, and short forms of lists and files.

aligners.cli.known keeps what the parser of a command says. Only values that the parser would certainly refuse are
refused here, at once; unknown options and names are passed on to the parser.
"""

import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from os.path import exists, isfile
from pathlib import Path
from types import NoneType
from typing import Any

from aligners.errors import UserError, did_you_mean

CONFIGS = (
    Path(__file__).parents[1] / "configs"
)  # the YAML files that the package brings
# Kinds of values in words, and as YAML reads them. One that begins with = is a choice; of others nothing is checked.
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}
TYPES: dict[str, list[type]] = {
    "int": [int],
    "float": [int, float],
    "bool": [bool],
    "null": [NoneType],
}
# Values for argparse, those also that begin as options do: numbers, words with a space, and a dash alone.
VALUE = re.compile(r"(?!-).*|-\d+|-\d*\.\d+|-(?!-[\w.]+\+?=).* .*|-", re.DOTALL)
BASE_60 = re.compile(
    r"(?<![\w:\"'])\d+:[0-5]?\d(?![\w:\"'])"
)  # not within quotation marks
# Numbers as the parser reads them; YAML has texts for some, such as 1e3.
FLOAT = re.compile(r"[-+]?[\d._]+([eE][-+]?\d+)?")


def help_of(program: str, about: Mapping[str, Any]) -> str:
    """Return the help of a command on one screen: what it does, an example, and the options that people use.

    Args:
        program: what the user typed up to the command.
        about: the command, as `aligners.cli.known.describe_options.describe` describes it.
    """
    width = min(100, shutil.get_terminal_size().columns)
    typed = f"python {program}" if ".py " in program else program
    lines = []
    for indent, text in about["help"]:
        line = text.replace("PROGRAM", typed)
        lines.append(textwrap.fill(line, width, subsequent_indent=" " * indent))
    return "\n".join(lines)


def as_parsed(about: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Return the words in the parser's form: brackets around lists, braces around maps, and paths of files.

    Args:
        about: the command, as `aligners.cli.known.describe_options.describe` describes it.
        words: after the command.

    Raises:
        UserError: a value is missing or of the wrong kind, or there is no such file of options.
    """
    parsed, rest = list[str](), list(words)
    while rest:
        word = re.sub(r"^-c(?=$|=)", "--config", rest.pop(0))
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").removesuffix("+")
        kinds = about["options"].get(name) if option.startswith("--") else None
        if not kinds:  # a flag, a word of its own, or for the parser to decide
            parsed.append(word)
            continue
        values = [value]
        if not equals:
            several = kinds[0].startswith(("maps", "list")) and not about["positional"]
            values = _take_values(rest, several=several)
        if not values:
            raise UserError(f"Expected a value after `{option}`, but got none.")
        value = _as_one_value(
            values, kinds, about["names"].get(name), added=option.endswith("+")
        )
        if name == "config":
            value = _config(value, about["configs"])
        _check_kind(option, value, kinds)
        if name.endswith(".sites"):
            _check_base_60(option, value)
        parsed.append(f"{option}={value}")
    return parsed


def _take_values(rest: list[str], *, several: bool) -> list[str]:
    """Take the values of an option from the words after it."""
    values = list[str]()
    while rest and VALUE.fullmatch(rest[0]) and (several or not values):
        values.append(rest.pop(0))
    return values


def _as_one_value(
    values: list[str], kinds: Sequence[str], known: Sequence[str] | None, *, added: bool
) -> str:
    """Return `a b` as `["a", "b"]` if the option takes a list, and as `{"a": "A", "b": "B"}` if it takes maps.

    Names may be separated by commas, but names of models and files may contain commas.
    """
    for value in values:
        if re.search(r"[\[{]|^null$", value):
            return " ".join(values)
    if known is not None and not any(":" in value for value in values):
        values = ",".join(values).split(",")
    if kinds[0] == "maps" and known is not None:
        classes = {name.lower(): name for name in known}
        return json.dumps(
            {value.lower(): classes.get(value.lower(), value) for value in values}
        )
    alone_is_one = added or "str" in kinds or "int" in kinds
    if kinds[0].startswith("list") and not (len(values) == 1 and alone_is_one):
        return (
            f"[{', '.join(values)}]" if kinds[0] == "list[int]" else json.dumps(values)
        )
    return " ".join(values)


def _config(value: str, brought: Mapping[str, str]) -> str:
    """Return the path of a file of options, perhaps of the package (`--config demo`); options in YAML stay.

    Raises:
        UserError: there is no such file.
    """
    if value in brought and not isfile(value):
        return str(CONFIGS / brought[value])
    if exists(value) or not re.fullmatch(r"[\w./+-]+", value):
        return value
    listed = f" or one of {', '.join(brought)}" if brought else ""
    like = did_you_mean([value], brought)
    raise UserError(
        f"Expected `--config` to be a YAML file{listed}, but there is no {value}.{like}"
    )


def _check_kind(option: str, value: str, kinds: Sequence[str]) -> None:
    """Raise if a value is of none of these kinds, as far as all of them are known.

    Raises:
        UserError: it is.
    """
    wanted, choices = list[str](), list[str]()
    loaded = type(_loaded(value))
    for kind in kinds:
        if kind.startswith("="):
            choices.append(kind[1:])
        elif kind not in KINDS or loaded in TYPES[kind]:
            return
        else:
            wanted.append(KINDS[kind])
    if value not in choices:
        expected = " or ".join([*wanted, *choices])
        like = did_you_mean([value], choices)
        raise UserError(
            f"Expected `{option}` to be {expected}, but got {value!r}.{like}"
        )


def _check_base_60(option: str, value: str) -> None:
    """Raise if YAML would read a pair of sites as one number.

    Raises:
        UserError: it would.
    """
    pair = BASE_60.search(value) if value.lstrip().startswith("[") else None
    if pair:
        raise UserError(
            f"Expected `{option}` to be 'all', 'blocks', 'grid', or layers and pairs as one text, but got {value}: "
            f"within brackets, YAML reads {pair[0]} as a number of base 60. Write {value.strip('[] ')!r}."
        )


def _loaded(value: str) -> Any:
    """Return a value as YAML and the parser read it."""
    import yaml

    try:
        loaded = yaml.safe_load(value)
        if isinstance(loaded, str) and FLOAT.fullmatch(value):
            return float(value)
    except (
        yaml.YAMLError,
        ValueError,
    ):  # the second: of what looks like a date, or like a number
        return value
    return loaded
