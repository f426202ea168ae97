"""Names of models, sites and scores for readers, and numbers and lists in words."""

import json
import math
import re
from collections.abc import Iterable, Sequence

from aligners.files.yaml_tables import table_beside
from aligners.fitting.training_status import mark
from aligners.models.recorded.source_names import is_recorded, split_name
from aligners.reports.report import MODELS, Row, distinct, known, models_in, values

WORDS: dict[str, Row] = table_beside(__file__, "words.yaml")
MOST_LETTERS = 40  # two such names fit in a title of 120 columns


def short_names(models: Iterable[str]) -> dict[str, str]:
    """Return a short name for each model, such as `seed-0` for `runs/tuned/none/seed-0`.

    The short name is the part after the last slash, with as many of the parts before it as distinguish the model
    from all others. A name of more than 40 letters is cut in the middle, unless two names would then be equal.
    Recorded states go without the options of their names where their paths are different.

    Args:
        models: names of all models of a report; equal names are the same model.

    Returns:
        Full name -> short name.
    """
    every = list(dict.fromkeys(models))
    places = _places(every)
    ends = [_end(place, places) for place in places]
    cut = list(map(_cut, ends))
    names = {}
    for name, end, short in zip(every, ends, cut, strict=True):
        names[name] = end
        if cut.count(short) == 1:
            names[name] = short
    return names


def file_names(models: Iterable[str]) -> dict[str, str]:
    """Return a different name for each model's files or folders, of letters, digits and `_.=-` only."""
    names: dict[str, str] = {}
    for model, short in short_names(models).items():
        slug = (
            re.sub(r"[^\w.=-]+", "-", short.replace("…", "--")).strip("-.") or "model"
        )
        name = slug
        count = 1
        while name in names.values():
            count += 1
            name = f"{slug}-{count}"
        names[model] = name
    return names


def with_short_names(rows: Iterable[Row]) -> list[Row]:
    """Copy rows with short model names, for readers. Files keep the full names, which identify a model."""
    renamed = list(map(dict, rows))
    names = short_names(models_in(renamed))
    for row in renamed:
        for column in MODELS:
            if column in row:
                row[column] = names[row[column]]
    return renamed


def names_in_full(rows: Sequence[Row]) -> str:
    """Return lines, to stand below a Markdown table, that explain short names; empty if no name was shortened."""
    lines = []
    for name, short in short_names(models_in(rows)).items():
        if short != name:
            quote = "``" if "`" in name else "`"
            lines.append(f"- {short}: {quote}{name}{quote}\n")
    return "\n" + "".join(lines) if lines else ""


def site_name(pair: tuple[int, int]) -> str:
    """`2`, or `2→3` where source and target differ."""
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}→{pair[1]}"


def site_names(pairs: Iterable[tuple[int, int]]) -> list[str]:
    """Return the names of site pairs."""
    return list(map(site_name, pairs))


def site_of(row: Row) -> str:
    """Return the name of a row's site pair."""
    return site_name((row["site_x"], row["site_y"]))


def route_name(row: Row) -> str:
    """`X → Y`, the models of a row."""
    return f"{row['model_x']} → {row['model_y']}"


def _places(names: Sequence[str]) -> list[str]:
    """Return names without the options of recorded states, or as they are where some would then be equal."""
    places = []
    for name in names:
        places.append(split_name(name)[0] if is_recorded(name) else name)
    if len(set(places)) < len(names):
        return list(names)
    return places


def _end(name: str, every: Sequence[str]) -> str:
    """Return the fewest last parts that no other name ends with, or the whole name if there are none."""
    parts = name.rstrip("/").split("/")
    others = ["/" + other.rstrip("/") for other in every if other != name]
    for count in range(1, len(parts) + 1):
        end = "/".join(parts[-count:])
        if not any(other.endswith("/" + end) for other in others):
            return end
    return name


def _cut(name: str) -> str:
    if len(name) <= MOST_LETTERS:
        return name
    last = (MOST_LETTERS - 1) // 2
    return f"{name[: MOST_LETTERS - 1 - last]}…{name[-last:]}"


# ---------------------------------------------------------------------- scores


def score_name(rows: Iterable[Row]) -> str:
    """Return the name of the first score in the rows, or `accuracy` if there is none."""
    for row in rows:
        if row.get("score_name"):
            return str(row["score_name"])
    return "accuracy"


def score_words(rows: Iterable[Row]) -> str:
    """Name the score for an axis or a title, such as "accuracy in %" or "Matthews correlation × 100"."""
    return WORDS["scores"][score_name(rows)][0]


def score_heading(rows: Iterable[Row]) -> str:
    """Name the score for the heading of a column, such as "acc. %"."""
    return WORDS["scores"][score_name(rows)][1]


def plain_score(rows: Iterable[Row]) -> str:
    """Name the score without its unit, such as "accuracy"."""
    return re.split(" in | × ", score_words(rows))[0]


def score_form(rows: Iterable[Row]) -> str:
    """Write a score for a sentence: a percentage, or a number."""
    return ".1%" if score_name(rows) == "accuracy" else ".3f"


def score_in_words(row: Row) -> str:
    """Write a row's score with its interval for a sentence."""
    return in_words(row, "score", score_form([row]))


def floor_words(rows: Iterable[Row]) -> str:
    """Name the floor that gives every text the same answer: the majority class, or the mean number."""
    return (
        "mean number"
        if score_name(rows) in ("pearson", "spearman")
        else "majority class"
    )


def held_out_name(text: Row) -> str | None:
    """Return the file or split of a report's held-out texts, if they are not drawn from those to fit on."""
    match = re.match("test: (.*?)(;|$)", str(text.get("split", "")))
    return match and match[1]


# ---------------------------------------------------------------------- numbers


def fixed(value: float, form: str) -> str:
    """Format a number, whose rounding to zero has no sign: 0.000, not -0.000."""
    if not form or form[-1] not in "eEfFgG%":
        return format(value, form)
    sign = form[: len(form) - len(form.lstrip("+- "))]
    if "z" not in form:
        form = f"{sign}z{form.removeprefix(sign)}"
    return format(value, form)


def interval_of(row: Row, column: str, form: str, scale: float = 1) -> str:
    """` [low, high]`, where a row has them; else nothing."""
    low = row.get(f"{column}_low")
    high = row.get(f"{column}_high")
    if low is None or high is None:
        return ""
    return f" [{fixed(scale * low, form)}, {fixed(scale * high, form)}]"


def in_words(row: Row, column: str, form: str, scale: float = 1) -> str:
    """`0.120 [0.100, 0.140]`: a value of a row with its interval, where it has one."""
    return fixed(scale * row[column], form) + interval_of(row, column, form, scale)


def with_interval(row: Row, column: str, form: str, scale: float = 1) -> str:
    """Write a value of a row ± half the width of its interval, as far as they are known, with the mark of `mark`."""
    value = row.get(column)
    low = row.get(f"{column}_low")
    high = row.get(f"{column}_high")
    if value is None:
        return ""
    text = mark(format(scale * value, form), row)
    if low is None or high is None:
        return text
    return f"{text} ±{scale * (high - low) / 2:{form.removeprefix('z')}}"


def plain_number(value: float, digits: int = 3) -> str:
    """Write a number as people do: 12,345, 546, 1.25, 0.071; in scientific notation only below 0.0001: 1.3e-06.

    Args:
        value: the number.
        digits: how many of them are shown, beside all of a whole number.
    """
    whole = isinstance(value, int) or abs(value) >= 10 ** (digits - 1)
    if whole:
        return f"{value:z,.0f}"
    return f"{value:z.{digits}g}"


def percentage(share: float) -> str:
    """Write a share in per cent: 31.0%, 4.2%, and below 0.1% with two digits, 0.012%, so that none looks like zero."""
    if 0 < share < 0.001:
        return f"{100 * share:.2g}%"
    return fixed(share, ".1%")


def four_digits(value: object) -> str:
    """Write a value of a row with four digits; empty where there is none."""
    if value is None or value != value:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return plain_number(value, 4)
    return str(value)


def aligned(value: float | None, places: int = 3) -> str:
    """Write a number of a screen column with as many decimals as the others, or whole from 100 on; empty for none."""
    if value is None or math.isnan(value):
        return ""
    if abs(value) < 100:
        return f"{value:z.{places}f}"
    if abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.0e}"


def blank(value: float | None, form: str) -> str:
    """Return a value of a table; empty where there is none."""
    if value is None or math.isnan(value):
        return ""
    return format(value, form)


def value_range(found: Sequence[float], form: str) -> str:
    """`0.100 to 0.200`, or one number if both ends read the same."""
    low = fixed(min(found), form)
    high = fixed(max(found), form)
    return low if low == high else f"{low} to {high}"


def span(rows: Sequence[Row], column: str, form: str) -> str:
    """Return the range of a column's values, leaving out rows without one."""
    return value_range(values(known(rows, column), column), form)


# ---------------------------------------------------------------------- words


def quoted(token: object) -> str:
    """Quote a token, or whatever else a sentence repeats verbatim, on one line."""
    return json.dumps(str(token), ensure_ascii=False)


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]


def counted(count: int, what: str) -> str:
    """`1 site`, `1,200 sites`."""
    if count != 1:
        what += "s"
    return f"{count:,} {what}"


def models_in_words(rows: Iterable[Row]) -> str:
    """`from x to y`, `between x and y, both ways,` or of how many pairs."""
    pairs = distinct(rows, "model_x", "model_y")
    x, y = pairs[0]
    if len(pairs) == 1:
        return f"from {x} to {y}"
    if pairs == [(x, y), (y, x)]:
        return f"between {x} and {y}, both ways,"
    return f"of {len(pairs)} pairs of models"
