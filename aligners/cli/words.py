"""The words of a command line: help on one screen, and errors that need no import of torch.

aligners.cli.known keeps what the parser of a command says. What is refused here, the parser or the command would refuse
too; everything else is left to them.
"""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from os.path import exists, isfile
from pathlib import Path
from types import NoneType
from typing import Any

from aligners.errors import UserError, check_known, did_you_mean
from aligners.files.shared_folder import is_shared, shared_file

CONFIGS = Path(__file__).parents[1] / "configs"  # the YAML files that the package brings
# Kinds of values in words, and as YAML reads them. One that begins with = is a choice; of all others nothing is checked
# here.
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "null": "null"}
TYPES: dict[str, list[type]] = {
    "int": [int],
    "float": [int, float],
    "bool": [bool],
    "null": [NoneType],
}
# Values for argparse, those also that begin as options do: numbers, words with a space, and a dash alone.
VALUE = re.compile(r"(?!-).*|-\d+|-\d*\.\d+|-(?!-[\w.]+\+?=).* .*|-", re.DOTALL)
BASE_60 = re.compile(r"(?<![\w:\"'])\d+:[0-5]?\d(?![\w:\"'])")  # not within quotation marks
FLOAT = re.compile(
    r"[-+]?[\d._]+([eE][-+]?\d+)?"
)  # as the parser reads them; YAML has texts for some, such as 1e3


def help_of(program: str, about: Mapping[str, Any]) -> str:
    """The help of a command, on one screen: what it does, an example, and the options that people use.

    Args:
        program: what the user typed up to the command.
        about: the command, as `aligners.cli.known.describe_options.describe` describes it.
    """
    width = min(100, shutil.get_terminal_size().columns)
    typed = f"python {program}" if ".py " in program else program
    lines = ((text.replace("PROGRAM", typed), " " * indent) for indent, text in about["help"])
    return "\n".join(textwrap.fill(text, width, subsequent_indent=indent) for text, indent in lines)


def as_parsed(program: str, about: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """The words as the parser takes them: it wants brackets around lists, braces around maps, and paths of files.

    Args:
        program: what the user typed up to the command.
        about: the command, as `aligners.cli.known.describe_options.describe` describes it.
        words: after the command.

    Raises:
        UserError: an option is unknown, also in a file of options, or its value is of the wrong kind; or a file, a
            map, a measure or the like is unknown.
    """
    options, names, parsed, rest = about["options"], about["names"], list[str](), list(words)
    # Modules of the user's own may define maps and measures, or have defined some.
    foreign = "aligners.maps.base" in sys.modules or any(
        re.match(r"--imports\b", word) for word in words
    )
    while rest:
        word = rest.pop(0)
        word = "--config" if word == "-c" else re.sub("^-c=?", "--config=", word)
        option, equals, value = word.partition("=")
        name = option[2:].removesuffix("+")
        kinds = _kinds(name, options) if name and option.startswith("--") else ["flag"]
        if kinds is None:
            raise unknown_option(program, option, options)
        if kinds == ["flag"]:
            parsed.append(word)
            continue
        several = kinds[0].startswith(("maps", "list")) and not about["positional"]
        values = (
            [value] if equals else list(takewhile(VALUE.fullmatch, rest if several else rest[:1]))
        )
        if not values:
            raise UserError(f"Expected a value after `{option}`, but got none.")
        del rest[: 0 if equals else len(values)]
        known = names.get(name) or names.get(name.rpartition(".")[0]) or []
        value = _as_one_value(values, kinds, known, added=option.endswith("+"))
        value = _file(option, value, about) if kinds == ["file"] else value
        _check_kind(option, value, kinds)
        if name.endswith(".sites"):
            _check_base_60(option, value)
        if name == "config":
            _check_names(program, _loaded(_options_in(value)), options)
        if kinds == ["list[file]"]:
            _check_there(option, _loaded(value))
        if known and not foreign and not exists(value):
            check_known(known, **{option: _names_in(value, known)})
        parsed.append(f"{option}={value}")
    return parsed


def unknown_option(program: str, option: str, options: Collection[str]) -> UserError:
    """The error of an option that a command does not have."""
    ends = [f"--{name}" for name in options if name.endswith(f".{option[2:]}")][:3]
    like = (
        f" Did you mean {' or '.join(ends)}?"
        if ends
        else did_you_mean([option], [f"--{name}" for name in options])
    )
    return UserError(
        f"Expected options of `{program}`, but got {option}.{like} `{program} --help all` lists them."
    )


def _kinds(name: str, options: Mapping[str, str]) -> list[str] | None:
    """The kinds of values that an option takes; None: there is no such option, nor one that it could be a part of."""
    if name in options:
        return options[name].split("|")
    above = [options.get(name[: dot.start()], "") for dot in re.finditer(r"\.", name)]
    return (
        ["any"]
        if name.startswith("trainer.") or any(re.search("any|maps", kinds) for kinds in above)
        else None
    )


def _as_one_value(
    values: list[str], kinds: Sequence[str], known: Sequence[str], *, added: bool
) -> str:
    """`a b` as `["a", "b"]` where the option takes a list, and as `{"a": "A", "b": "B"}` where it takes maps.

    What is listed are also the parts between commas, where names are known; embedded models and files may hold commas.
    """
    if any(re.search(r"[\[{]|^null$", value) for value in values):
        return " ".join(values)
    classes = {name.lower(): name for name in known}
    names = known and not any(
        ":" in value or (exists(value) and value.lower() not in classes) for value in values
    )
    parts = ",".join(values).split(",") if names else values
    if names and kinds[0] == "maps":
        return json.dumps({part.lower(): classes.get(part.lower(), part) for part in parts})
    if kinds[0].startswith("list") and (
        len(parts) > 1 or (not added and {"str", "int"}.isdisjoint(kinds))
    ):
        return f"[{', '.join(parts)}]" if kinds[0] == "list[int]" else json.dumps(parts)
    return " ".join(values)


def _file(option: str, value: str, about: Mapping[str, Any]) -> str:
    """The path of a file of options, which may come along: `--config demo`; options in YAML stay as they are.

    Raises:
        UserError: there is no such file.
    """
    brought = about["configs"] if option == "--config" else {}
    if value in brought and not isfile(value):
        return str(CONFIGS / brought[value])
    if exists(value) or value == "-" or not re.fullmatch(r"[\w./+-]+", value):
        return value
    parts = [f"--{name}" for name in about["options"] if name.startswith(f"{option[2:]}.")][:3]
    listed = brought or parts
    there = (
        f" {'or one of' if brought else 'of options such as'} {', '.join(listed)}" if listed else ""
    )
    like = did_you_mean([value], brought)
    raise UserError(f"Expected `{option}` to be a YAML file{there}, but there is no {value}.{like}")


def _options_in(value: str) -> str:
    """The options that `--config` gives: in a file, or as they are."""
    return Path(value).read_text(encoding="utf-8", errors="replace") if isfile(value) else value


def _check_names(program: str, given: Any, options: Mapping[str, str], above: str = "") -> None:
    """Raise if a file of options has one that the command does not have.

    Raises:
        UserError: it has.
    """
    for key, value in given.items() if isinstance(given, dict) else ():
        name = f"{above}{key}".removesuffix("+")
        if isinstance(value, dict) and any(option.startswith(f"{name}.") for option in options):
            _check_names(program, value, options, f"{name}.")
        elif _kinds(name, options) is None:
            raise unknown_option(program, f"--{name}", options)


def _check_there(option: str, given: Any) -> None:
    """Raise if a file of maps is not there; one on the Hub is asked for later.

    Raises:
        UserError: it is not.
    """
    for place in map(str, given if isinstance(given, list) else [given]):
        if not is_shared(place) and not shared_file(place).is_file():
            like = did_you_mean(
                [Path(place).name], [path.name for path in Path(place).parent.glob("*")]
            )
            raise UserError(
                f"Expected `{option.removesuffix('+')}` to name files, but there is no {place}.{like}"
            )


def _check_kind(option: str, value: str, kinds: Sequence[str]) -> None:
    """Raise if a value is of none of these kinds.

    Raises:
        UserError: it is.
    """
    choices, others = (
        [kind[1:] for kind in kinds if kind[0] == "="],
        [kind for kind in kinds if kind in KINDS],
    )
    known = len(choices) + len(others) == len(kinds)
    if (
        known
        and value not in choices
        and not any(type(_loaded(value)) in TYPES[kind] for kind in others)
    ):
        wanted = " or ".join([*(KINDS[kind] for kind in others), *choices])
        raise UserError(
            f"Expected `{option}` to be {wanted}, but got {value!r}.{did_you_mean([value], choices)}"
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


def _names_in(value: str, known: Sequence[str]) -> list[str]:
    """The names in a value: of classes, where it gives maps; of kinds of embedded models, where it gives models."""
    loaded = _loaded(value)
    entries = (
        list(loaded.values())
        if isinstance(loaded, dict)
        else loaded
        if isinstance(loaded, list)
        else [loaded]
    )
    names = [entry.get("class_path") if isinstance(entry, dict) else entry for entry in entries]
    plain = [name for name in names if isinstance(name, str)]
    if "embedded" in known:
        before = [name.partition(":")[0] for name in plain if ":" in name and not exists(name)]
        return [kind for kind in before if did_you_mean([kind], known)]
    return [name for name in plain if "." not in name]


def _loaded(value: str) -> Any:
    """A value as YAML and the parser read it."""
    import yaml

    try:
        loaded = yaml.safe_load(value)
        return float(value) if isinstance(loaded, str) and FLOAT.fullmatch(value) else loaded
    except (yaml.YAMLError, ValueError):  # the second: of what looks like a date, or like a number
        return value
