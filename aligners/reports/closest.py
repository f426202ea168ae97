"""Which map of a table is closest, trained or not, and how much it leaves unexplained, in words."""

import math
from collections.abc import Mapping, Sequence

from aligners.fitting.training_status import is_trained
from aligners.reports.names import fixed, listed, site_name, value_range
from aligners.reports.report import Row, grouped, mean

Lines = Mapping[str, Sequence[Row]]  # of methods: name -> rows
LEAST_SHARE = 0.0005  # of a variance: less reads as 0.0%, and is said to be less than 0.1%
LEAST_NATS = 0.0005  # less reads as 0.000, and is said to be less than 0.001 nats


def known_lines(rows: Sequence[Row], column: str) -> dict[str, list[Row]]:
    """The methods whose rows all have a finite value in a column, trained or not, with these rows."""
    found = {}
    for name, line in grouped(rows, "method").items():
        if math.isfinite(mean(line, column)):
            found[name] = line
    return found


def closest(lines: Lines, column: str) -> str | None:
    """The method with the least mean of a column; None of no methods."""
    return min(lines, key=lambda name: mean(lines[name], column), default=None)


def trained(lines: Lines) -> dict[str, Sequence[Row]]:
    """Those that are trained in all of their rows."""
    return {name: line for name, line in lines.items() if all(map(is_trained, line))}


def with_training(name: str, line: Sequence[Row]) -> str:
    """A method's name and, if it kept its start or diverged, where: `mlp (untrained at site 2)`."""
    untrained = [row for row in line if not is_trained(row)]
    if not untrained:
        return name
    sites = list(dict.fromkeys(site_name((row["site_x"], row["site_y"])) for row in untrained))
    where = (
        "" if len(untrained) == len(line) else f" at site{'s' * (len(sites) > 1)} {listed(sites)}"
    )
    return f"{name} (untrained{where})"


def unexplained(line: Sequence[Row], column: str = "fvu", of: str = "") -> str:
    """`leaves 10.0% to 12.0%`, or that it is no better than the mean; where that reads as nothing, less than 0.1%.

    Args:
        line: rows of a method.
        column: of an FVU.
        of: what follows the share, such as " of the variance".
    """
    values = [row[column] for row in line]
    if min(values) >= 1:
        return f"is no better than the mean: its FVU is {value_range(values, '.3g')}"
    return f"leaves {share_range(values)}{of}"


def beside(name: str, lines: Lines, best: str, column: str = "fvu") -> str:
    """`linear 42.5% to 43.0%`, beside the closest map; `linear as much` where that reads the same."""
    own, others = (share_range([row[column] for row in lines[method]]) for method in (name, best))
    return f"{name} as much" if own == others else f"{name} {own}"


def share_range(values: Sequence[float]) -> str:
    """`10.0% to 12.0%`; `up to 3.4%` where the least reads as nothing, `less than 0.1%` where all do."""
    if max(values) < LEAST_SHARE:
        return "less than 0.1%"
    if min(values) < LEAST_SHARE:
        return f"up to {fixed(max(values), '.1%')}"
    return value_range(values, ".1%")
