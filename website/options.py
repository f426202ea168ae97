"""The options of every command, from the parsers that the commands use."""

import re
from typing import Any

from jsonargparse import ArgumentParser

from aligners.cli.table import COMMANDS, find

__all__ = ["nav", "pages"]

FOLDER = "reference/options"
HIDDEN = "==SUPPRESS=="
CODE = re.compile(r"(`[^`]*`)")


def nav() -> list[Any]:
    """The pages in the navigation, script by script."""
    scripts = (
        {f"{script}.py": [{name: _place(script, name)} for name in names]}
        for script, names in COMMANDS.items()
    )
    return [f"{FOLDER}/index.md", *scripts]


def pages() -> dict[str, str]:
    """A page for each command, and one that lists them."""
    lines = [
        "# Options",
        "",
        "Every option may stand in a YAML file as well: `--config FILE`.",
        "",
    ]
    made: dict[str, str] = {}
    for script, names in COMMANDS.items():
        lines += [f"## {script}.py", "", "| command | what it does |", "|---|---|"]
        for name, (_, said) in names.items():
            made[_place(script, name)] = _page(script, name)
            lines.append(f"| [`{name}`]({script}/{name}.md) | {said} |")
        lines.append("")
    return {f"{FOLDER}/index.md": "\n".join(lines), **made}


def _place(script: str, name: str) -> str:
    return f"{FOLDER}/{script}/{name}.md"


def _page(script: str, name: str) -> str:
    parser = find(script, name).parser()
    lines = [f"# `{script}.py {name}`", "", _escaped(parser.description or ""), ""]
    for group in parser._action_groups:
        entries = [
            entry
            for action in group._group_actions
            if (entry := _entry(action, parser))
        ]
        if entries:
            lines += [f"## {_escaped(_title(group))}", "", *entries]
    return "\n".join(lines)


def _title(group: Any) -> str:
    title = str(group.title or "options").rstrip(".:")
    return title[0].upper() + title[1:]


def _entry(action: Any, parser: ArgumentParser) -> str | None:
    """An option as an entry of a definition list; None for one that only shows help or loads a part of a file."""
    shown = [
        each
        for each in action.option_strings
        if each.startswith("--") and not each.endswith("+")
    ] or [action.dest]
    if (
        action.help in (None, HIDDEN)
        or shown[0] == "--help"
        or type(action).__name__ in _ASIDE
    ):
        return None
    said = _escaped(" ".join(action.help.split()).rstrip("."))
    default = (
        ""
        if action.default is None or action.default == HIDDEN
        else f" Default: `{_written(action.default)}`."
    )
    return f"`{shown[0]}`\n:   {said[:1].upper() + said[1:]}.{default}\n"


_ASIDE = ("_ActionHelpClassPath", "_ActionConfigLoad", "_ActionPrintConfig")


def _written(default: Any) -> str:
    """A default as one would type it."""
    if isinstance(default, bool):
        return str(default).lower()
    return str(list(default) if isinstance(default, tuple) else default)


def _escaped(text: str) -> str:
    """Text in which nothing but what stands in backticks is markup."""
    parts = CODE.split(text)
    plain = re.compile(r"([*_\[\]|])")
    return "".join(
        part if CODE.fullmatch(part) else plain.sub(r"\\\1", part).replace("<", "&lt;")
        for part in parts
    )
