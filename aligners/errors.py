"""Errors that a user can fix, checks of numbers and names that raise them, and numbers that JSON can hold."""

import math
import operator
import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, SupportsFloat

# Control characters but tabs and line ends, and those that turn the direction of what follows.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

LIMITS = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}


class UserError(ValueError):
    """An error that the user can fix; commands show its message without a traceback."""


def check_range(
    *, least: float | None = None, above: float | None = None, most: float | None = None, below: float | None = None,
    **given: Any,
) -> None:  # fmt: skip
    """Raise unless every number is within the limits that are given.

    Args:
        least: every number is at least this.
        above: every number is greater than this.
        most: every number is at most this.
        below: every number is less than this.
        given: name of an argument -> its value, or a list of values. None is an argument left out, and passes.

    Raises:
        UserError: names the first argument with a value outside the limits, which NaN is, or with an empty list.

    >>> check_range(least=0, below=1, warmup=0.1, share=None)
    >>> check_range(least=1, steps=[100, 0])
    Traceback (most recent call last):
    aligners.errors.UserError: Expected `steps` to be at least 1, but got [100, 0].
    """
    limits = []
    expected = []
    for word, limit in zip(LIMITS, (least, above, most, below), strict=True):
        if limit is not None:
            limits.append((LIMITS[word], limit))
            expected.append(f"{word} {limit}")
    for name, value in given.items():
        values = list(value) if isinstance(value, Iterable) else [value]
        wrong = not values
        for number in values:
            for holds, limit in limits:
                if number is not None and not holds(number, limit):
                    wrong = True
        if wrong:
            raise UserError(
                f"Expected `{name}` to be {' and '.join(expected)}, but got {value}."
            )


def check_known(known: Iterable[str], **given: str | Iterable[str] | None) -> None:
    """Raise unless every name is a known one.

    Args:
        known: all names that there are.
        given: name of an argument -> its value, or several. None is an argument left out, and passes.

    Raises:
        UserError: says which are unknown, and what is known.

    >>> check_known(["linear", "mlp"], maps=["mlp", "cca"])
    Traceback (most recent call last):
    aligners.errors.UserError: Expected `maps` out of linear, mlp, but got cca.
    >>> check_known(["linear", "mlp"], map="lineal")
    Traceback (most recent call last):
    aligners.errors.UserError: Expected `map` to be one of linear, mlp, but got 'lineal'. Did you mean linear?
    """
    known = list(known)
    for name, value in given.items():
        if isinstance(value, str):
            if value not in known:
                like = did_you_mean([value], known)
                raise UserError(
                    f"Expected `{name}` to be one of {', '.join(known)}, but got {value!r}.{like}"
                )
            continue
        unknown = [entry for entry in value or () if entry not in known]
        if unknown:
            like = did_you_mean(unknown, known)
            raise UserError(
                f"Expected `{name}` out of {', '.join(known) or 'none'}, but got {', '.join(unknown)}.{like}"
            )


def check_file_names(**names: str) -> None:
    """Raise if a name could not be that of a file or a folder.

    Args:
        names: what the name is of -> the name.

    Raises:
        UserError: it is empty, leads to another folder, or has invisible characters.
    """
    for what, name in names.items():
        slashes = {"/", "\\"} & set(name)
        if slashes or not name.isprintable() or not name.strip(". "):
            raise UserError(
                f"Expected `{what}` to be a name as of a file, without slashes or control characters, but got {name!r}."
            )


def visible(text: str) -> str:
    r"""A text to print, with its control characters spelt out, as `\x1b` is here."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """A question to end an error with: the known names that are most like unknown ones; empty if none is."""
    by_lower = {str(name).lower(): str(name) for name in known}
    like: dict[str, None] = {}
    for name in unknown:
        for close in get_close_matches(str(name).lower(), by_lower, 2):
            like[by_lower[close]] = None
    if not like:
        return ""
    return f" Did you mean {' or '.join(like)}?"


def check_extra(extra: str, package: str, user: str) -> None:
    """Raise unless an optional package is installed.

    Args:
        extra: of this project, which brings the package.
        package: as it is imported.
        user: what needs it, as a sentence begins: `The executor 'ray'`.

    Raises:
        UserError: says how to install the extra.
    """
    if find_spec(package) is None:
        name = package.replace("_", "-")
        raise UserError(
            f"{user} needs the package {name}, which is not installed. Run: pip install 'aligners[{extra}]' (in a "
            f"clone: pip install '.[{extra}]')"
        )


def finite(value: SupportsFloat | None) -> float | None:
    """A number as JSON can hold it; None if there is none, or it is not finite."""
    if value is None or not math.isfinite(float(value)):
        return None
    return float(value)
