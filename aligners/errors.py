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
    known = [(operator.ge, "at least", least), (operator.gt, "above", above)]
    known += [(operator.le, "at most", most), (operator.lt, "below", below)]
    limits = [(holds, word, limit) for holds, word, limit in known if limit is not None]
    for name, value in given.items():
        values = list(value) if isinstance(value, Iterable) else [value]
        if not values or not all(
            v is None or holds(v, limit) for v in values for holds, _, limit in limits
        ):
            expected = " and ".join(f"{word} {limit}" for _, word, limit in limits)
            raise UserError(f"Expected `{name}` to be {expected}, but got {value}.")


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
        if isinstance(value, str) and value not in known:
            like = did_you_mean([value], known)
            raise UserError(
                f"Expected `{name}` to be one of {', '.join(known)}, but got {value!r}.{like}"
            )
        unknown = (
            []
            if isinstance(value, str)
            else [entry for entry in value or () if entry not in known]
        )
        if unknown:
            got = f"{', '.join(unknown)}.{did_you_mean(unknown, known)}"
            raise UserError(
                f"Expected `{name}` out of {', '.join(known) or 'none'}, but got {got}"
            )


def check_file_names(**names: str) -> None:
    """Raise if a name could not be that of a file or a folder.

    Args:
        names: what the name is of -> the name.

    Raises:
        UserError: it is empty, leads to another folder, or has letters that nobody sees.
    """
    for what, name in names.items():
        if (
            not name.strip(". ")
            or not name.isprintable()
            or not {"/", "\\"}.isdisjoint(name)
        ):
            raise UserError(
                f"Expected `{what}` to be a name as of a file, without slashes or control characters, but got {name!r}."
            )


def visible(text: str) -> str:
    r"""A text to print, whose control characters do nothing: they are shown as `\x1b` is here."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """A question that follows an error: the known names that are most like unknown ones; empty if none is."""
    cases = {str(name).lower(): str(name) for name in known}
    like = [
        cases[close]
        for name in unknown
        for close in get_close_matches(str(name).lower(), cases, 2)
    ]
    return f" Did you mean {' or '.join(dict.fromkeys(like))}?" if like else ""


def check_extra(extra: str, package: str, user: str) -> None:
    """Raise unless a package that only some need is installed.

    Args:
        extra: of this project, which brings the package.
        package: as it is imported.
        user: what needs it: the beginning of a sentence.

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
    return None if value is None or not math.isfinite(float(value)) else float(value)
