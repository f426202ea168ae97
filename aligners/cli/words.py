"""The words of a command line: help on one screen, and errors that need no import of torch.

known_options.json, which `python -m website.known_options` writes from the parsers, has the options of every
command. What is refused here, the parser would refuse too; everything else is left to it.
"""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from os.path import exists
from pathlib import Path
from typing import Any

from aligners.errors import UserError, check_known, did_you_mean

KNOWN = Path(__file__).with_name("known_options.json")
# Kinds of values in words. A kind that begins with = is a choice; of all others nothing is checked here.
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "null": "null"}
MODELS = ("model", "model_x", "model_y", "models", "bases")
NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # argparse's: a value, although it begins as an option does


@cache
def known_options() -> dict[str, Any]:
    """The commands with their options, and the names of maps, measures and so on, as known_options.json has them."""
    content: dict[str, Any] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return content


def help_of(program: str, about: Mapping[str, Any]) -> str:
    """The help of a command, on one screen: what it does, an example, and the options that people use.

    Args:
        program: what the user typed up to the command.
        about: the command's entry in known_options.json.
    """
    width = min(100, shutil.get_terminal_size().columns)
    example = f"{'python ' if '.py ' in program else ''}{program} {about['example']}"
    lines = [f"usage: {program} {about['usage']}", ""]
    for part in about["about"].split("\n\n"):
        lines += [*textwrap.wrap(part, width), ""]
    lines += ["example:", *textwrap.wrap(example, width, initial_indent="  ", subsequent_indent="    "), ""]
    for option, words in about["shown"].items():
        lines += textwrap.wrap(words, width, initial_indent=f"  {option:<23} ", subsequent_indent=" " * 26)
    files = "A file of options, yours or the package's: --config NAME. " if "config" in about["options"] else ""
    return "\n".join([*lines, "", f"{files}All options: {program} --help all"])


def as_parsed(program: str, about: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """The words as the parser takes them: it wants brackets around lists, and braces around maps.

    Args:
        program: what the user typed up to the command.
        about: the command's entry in known_options.json.
        words: after the command.

    Raises:
        UserError: an option is unknown, or its value is of the wrong kind; or a map, a measure or the like is unknown.
    """
    options, names, taken, rest = about["options"], known_options()["names"], list[str](), list(words)
    foreign = _may_define_names(words)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if not option.startswith("--") or " " in option:
            taken += [word, *(rest.pop(0) for _ in rest[:1] if word == "-c")]
            continue
        name = option[2:].removesuffix("+")
        kinds = _kinds(name, options)
        if kinds is None:
            raise unknown_option(program, option, options)
        if kinds == ["flag"]:
            taken.append(word)
            continue
        several = not about["positional"] and kinds[0] in ("maps", "list", "list[int]")
        values = [value] if equals else _values(rest, len(rest) if several else 1)
        if not values and (not rest or rest[0].startswith("--")):
            raise UserError(f"Expected a value after `{option}`, but got none.")
        above, _, last = name.rpartition(".")
        known = names["models"] if last in MODELS else names.get(name) or names.get(above) or []
        if values:
            value = _as_one_value(values, kinds, option, known)
            _check_kind(option, value, kinds)
            if known and not foreign and not exists(value):
                check_known(known, **{option: _names_in(value, kinds, known)})
        taken += [f"{option}={value}"] if equals else [option, value] if values else [option]
    return taken


def unknown_option(program: str, option: str, options: Collection[str]) -> UserError:
    """The error of an option that a command does not have."""
    ends = [f"--{name}" for name in options if name.endswith(f".{option[2:]}")][:3]
    like = f" Did you mean {' or '.join(ends)}?" if ends else did_you_mean([option], [f"--{name}" for name in options])
    return UserError(f"Expected options of `{program}`, but got {option}.{like} `{program} --help all` lists them.")


def _may_define_names(words: Sequence[str]) -> bool:
    """Whether modules of the user's own may define maps and measures, or have done so in this process."""
    files = [Path(word.removeprefix("--config=")) for word in words if word.endswith((".yaml", ".yml"))]
    imported = any("imports" in file.read_text(encoding="utf-8") for file in files if file.is_file())
    return imported or any(word.startswith("--imports") for word in words) or "aligners.maps.base" in sys.modules


def _kinds(name: str, options: Mapping[str, str]) -> list[str] | None:
    """The kinds of values that an option takes; None: there is no such option, nor one that it could be a part of."""
    if name in options:
        return options[name].split("|")
    above = [options.get(name[: dot.start()], "") for dot in re.finditer(r"\.", name)]
    return ["any"] if name.startswith("trainer.") or any(re.search("any|maps", kinds) for kinds in above) else None


def _values(rest: list[str], most: int) -> list[str]:
    """Take the values that stand first, at most so many."""
    count = 0
    while count < min(most, len(rest)) and (not rest[count].startswith("-") or NUMBER.fullmatch(rest[count])):
        count += 1
    values, rest[:count] = rest[:count], []
    return values


def _as_one_value(values: list[str], kinds: Sequence[str], option: str, known: Sequence[str]) -> str:
    """`a b` as `["a", "b"]` where the option takes a list, and as `{"a": "A", "b": "B"}` where it takes maps."""
    bare = not any(re.search(r"[\[{]|^null$", value) for value in values)
    if bare and kinds[0] == "maps" and not exists(values[0]):
        classes = {name.lower(): name for name in known}
        names = [name for value in values for name in value.split(",")]
        return json.dumps({name.lower(): classes.get(name.lower(), name) for name in names})
    if bare and kinds[0].startswith("list"):
        parted = [name for value in values for name in _parts(value, known)]
        if len(parted) > 1 or (not option.endswith("+") and set(kinds) <= {"list", "list[int]", "null"}):
            return f"[{', '.join(parted)}]" if kinds[0] == "list[int]" else json.dumps(parted)
    return " ".join(values)


def _parts(value: str, known: Sequence[str]) -> list[str]:
    """The names between commas, where what is listed are names; those of embedded models and files may hold commas."""
    return value.split(",") if known and ":" not in value and not exists(value) else [value]


def _check_kind(option: str, value: str, kinds: Sequence[str]) -> None:
    """Raise if a value is of none of these kinds.

    Raises:
        UserError: it is.
    """
    choices = [kind[1:] for kind in kinds if kind.startswith("=")]
    if len(choices) + len(KINDS.keys() & kinds) < len(kinds) or (choices and option.startswith("--trainer.")):
        return
    loaded = _loaded(value)
    of = {int: {"int", "float"}, float: {"float"}, bool: {"bool"}, type(None): {"null"}}.get(type(loaded), set[str]())
    if value not in choices and not of & set(kinds):
        expected = [*(KINDS[kind] for kind in kinds if kind in KINDS), *choices]
        like = did_you_mean([value], choices)
        raise UserError(f"Expected `{option}` to be {' or '.join(expected)}, but got {value!r}.{like}")


def _names_in(value: str, kinds: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names in a value: of classes, where it gives maps; of kinds of embedded models, where it gives models."""
    loaded = _loaded(value)
    entries = list(loaded.values()) if isinstance(loaded, dict) else loaded if isinstance(loaded, list) else [loaded]
    names = [entry.get("class_path") if isinstance(entry, dict) else entry for entry in entries]
    plain = [name for name in names if isinstance(name, str)]
    if "embedded" in known:
        before = [name.partition(":")[0] for name in plain if ":" in name and not exists(name)]
        return [kind for kind in before if did_you_mean([kind], known)]
    return [name for name in plain if "." not in name] if kinds[0] != "maps" or isinstance(loaded, dict) else []


def _loaded(value: str) -> Any:
    """A value as YAML and the parser read it."""
    import yaml

    try:
        return float(value) if re.fullmatch(r"[-+]?\d+\.?\d*[eE][-+]?\d+", value) else yaml.safe_load(value)
    except yaml.YAMLError:
        return value
