"""Names of models, sites and scores for readers, and numbers and lists in words."""

import json
import math
import re
from collections.abc import Iterable, Sequence

from aligners.files.yaml_tables import table_beside
from aligners.fitting.training_status import mark
from aligners.reports.report import MODELS, Row, models_in

WORDS: dict[str, Row] = table_beside(__file__, "words.yaml")
MOST_LETTERS = 40  # two such names fit in a title of 120 columns


def short_names(models: Iterable[str]) -> dict[str, str]:
    """Return a short name for each model, such as `seed-0` for `runs/tuned/none/seed-0`.

    The short name is the part after the last slash, with as many of the parts before it as distinguish the model
    from all others. A name of more than 40 letters is cut in the middle, unless two names would then be equal.

    Args:
        models: names of all models of a report; equal names are the same model.

    Returns:
        Full name -> short name.
    """
    every = list(dict.fromkeys(models))
    ends = [_end(name, [other for other in every if other != name]) for name in every]
    cut = [_cut(end) for end in ends]
    return {
        name: short if cut.count(short) == 1 else end
        for name, short, end in zip(every, cut, ends, strict=True)
    }


def file_names(models: Iterable[str]) -> dict[str, str]:
    """Return a different name for each model's files or folders, of letters, digits and `_.=-` only."""
    names: dict[str, str] = {}
    for model, short in short_names(models).items():
        slug = re.sub(r"[^\w.=-]+", "-", short.replace("…", "--")).strip("-.") or "model"
        free = (slug, *(f"{slug}-{number}" for number in range(2, len(names) + 2)))
        names[model] = next(name for name in free if name not in names.values())
    return names


def with_short_names(rows: Sequence[Row]) -> list[Row]:
    """Copy rows with short model names, for readers. Files keep the full names, which identify a model."""
    names = short_names(models_in(rows))
    return [
        row | {column: names[row[column]] for column in MODELS if column in row} for row in rows
    ]


def names_in_full(rows: Sequence[Row]) -> str:
    """Return lines, to stand below a Markdown table, that explain short names; empty if no name was shortened."""
    names = short_names(models_in(rows))
    lines = []
    for name, short in names.items():
        if short != name:
            quote = "``" if "`" in name else "`"
            lines.append(f"- {short}: {quote}{name}{quote}\n")
    return "\n" + "".join(lines) if lines else ""


def site_name(pair: tuple[int, int]) -> str:
    """`2`, or `2→3` where source and target differ."""
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}→{pair[1]}"


def _end(name: str, others: Sequence[str]) -> str:
    """Return the fewest last parts that no other name ends with, or the whole name if there are none."""
    parts = name.rstrip("/").split("/")
    ends = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
    return next(
        (
            end
            for end in ends
            if not any(f"/{other.rstrip('/')}".endswith(f"/{end}") for other in others)
        ),
        name,
    )


def _cut(name: str) -> str:
    if len(name) <= MOST_LETTERS:
        return name
    last = (MOST_LETTERS - 1) // 2
    return f"{name[: MOST_LETTERS - 1 - last]}…{name[-last:]}"


# ---------------------------------------------------------------------- scores and numbers


def score_name(rows: Sequence[Row]) -> str:
    """Return the name of the first score in the rows, or `accuracy` if there is none."""
    return next((row["score_name"] for row in rows if row.get("score_name")), "accuracy")


def score_words(rows: Sequence[Row]) -> str:
    """Name the score for an axis or a title, such as "accuracy in %" or "Matthews correlation × 100"."""
    return WORDS["scores"][score_name(rows)][0]


def score_heading(rows: Sequence[Row]) -> str:
    """Name the score for the heading of a column, such as "acc. %"."""
    return WORDS["scores"][score_name(rows)][1]


def floor_words(rows: Sequence[Row]) -> str:
    """Name the floor that gives every text the same answer: the majority class, or the mean number."""
    return "mean number" if score_name(rows) in ("pearson", "spearman") else "majority class"


def held_out_name(text: Row) -> str | None:
    """The file or the split that the held-out texts of a report are, where they are not drawn from those to fit on."""
    match = re.match("test: (.*?)(;|$)", str(text.get("split", "")))
    return match and match[1]


def fixed(value: float, form: str) -> str:
    """Format a number, whose rounding to zero has no sign: 0.000, not -0.000."""
    if not form or form[-1] not in "eEfFgG%":
        return format(value, form)
    sign = form[: len(form) - len(form.lstrip("+- "))]
    return format(value, form if "z" in form else f"{sign}z{form.removeprefix(sign)}")


def interval_of(row: Row, column: str, form: str, scale: float = 1) -> str:
    """` [low, high]`, where a row has them; else nothing."""
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    if low is None or high is None:
        return ""
    return f" [{fixed(scale * low, form)}, {fixed(scale * high, form)}]"


def with_interval(row: Row, column: str, form: str, scale: float = 1) -> str:
    """A value of a row ± half the width of its interval, as far as they are known, with the mark of `mark`."""
    value, low, high = (row.get(column + end) for end in ("", "_low", "_high"))
    if value is None:
        return ""
    text = mark(format(scale * value, form), row)
    return (
        text
        if low is None or high is None
        else f"{text} ±{scale * (high - low) / 2:{form.removeprefix('z')}}"
    )


def plain_number(value: float, digits: int = 3) -> str:
    """A number as people write it: 12,345, 546, 1.25, 0.071; scientific below 0.0001 alone: 1.3e-06.

    Args:
        value: the number.
        digits: how many of them are shown, beside all of a whole number.
    """
    whole = isinstance(value, int) or abs(value) >= 10 ** (digits - 1)
    return f"{value:z,.0f}" if whole else f"{value:z.{digits}g}"


def percentage(share: float) -> str:
    """A share in per cent: 31.0%, 4.2%, and below 0.1% two digits, 0.012%, so that no small one reads as none."""
    return fixed(share, ".1%") if share >= 0.001 or share == 0 else f"{100 * share:.2g}%"


def quoted(token: object) -> str:
    """A token, or what else stands in a sentence as it was read, in quotation marks, on one line."""
    return json.dumps(str(token), ensure_ascii=False)


def four_digits(value: object) -> str:
    """A value of a row for readers; empty where there is none."""
    if value is None or value != value:
        return ""
    return (
        plain_number(value, 4)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else str(value)
    )


def value_range(values: Sequence[float], form: str) -> str:
    """`0.100 to 0.200`, or one number if both ends read the same."""
    low, high = fixed(min(values), form), fixed(max(values), form)
    return low if low == high else f"{low} to {high}"


def aligned(value: float | None, places: int = 3) -> str:
    """A number of a column of the screen, with as many decimals as the others, or whole from 100 on; empty for none."""
    if value is None or math.isnan(value):
        return ""
    return (
        f"{value:z.{places}f}"
        if abs(value) < 100
        else f"{value:,.0f}"
        if abs(value) < 1e7
        else f"{value:.0e}"
    )


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
