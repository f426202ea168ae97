"""Which map of a table is closest, trained or not, and how much variance it leaves unexplained, in words."""

import math
from collections.abc import Mapping, Sequence

from aligners.fitting.training_status import is_trained
from aligners.reports.names import fixed, listed, site_of, value_range
from aligners.reports.report import Row, grouped, mean, values

Lines = Mapping[str, Sequence[Row]]  # of methods: name -> rows
LEAST_SHARE = (
    0.0005  # of a variance: less reads as 0.0%, and is said to be less than 0.1%
)
LEAST_NATS = 0.0005  # less reads as 0.000, and is said to be less than 0.001 nats


def known_lines(rows: Sequence[Row], column: str) -> dict[str, list[Row]]:
    """Return the methods whose rows all have a finite value in a column, trained or not, with these rows."""
    lines = grouped(rows, "method")
    return {
        name: line for name, line in lines.items() if math.isfinite(mean(line, column))
    }


def closest(lines: Lines, column: str) -> str | None:
    """Return the method with the smallest mean of a column; None if there are no methods."""
    return min(lines, key=lambda name: mean(lines[name], column), default=None)


def trained(lines: Lines) -> dict[str, Sequence[Row]]:
    """Return the methods that are trained in all of their rows."""
    return {name: line for name, line in lines.items() if all(map(is_trained, line))}


def with_training(name: str, line: Sequence[Row]) -> str:
    """Return a method's name and, if it kept its start or diverged, where: `mlp (untrained at site 2)`."""
    untrained = [row for row in line if not is_trained(row)]
    if not untrained:
        return name
    if len(untrained) == len(line):
        return f"{name} (untrained)"
    sites = list(dict.fromkeys(map(site_of, untrained)))
    if len(sites) == 1:
        return f"{name} (untrained at site {sites[0]})"
    return f"{name} (untrained at sites {listed(sites)})"


def unexplained(line: Sequence[Row], column: str = "fvu", of: str = "") -> str:
    """`leaves 10.0% to 12.0%`, or that it is no better than the mean; where that reads as nothing, less than 0.1%.

    Args:
        line: rows of a method.
        column: column of an FVU.
        of: what follows the share, such as " of the variance".
    """
    fvus = values(line, column)
    if min(fvus) >= 1:
        return f"is no better than the mean: its FVU is {value_range(fvus, '.3g')}"
    return f"leaves {share_range(line, column)}{of}"


def beside(name: str, lines: Lines, best: str) -> str:
    """`linear 42.5% to 43.0%`, beside the closest map; `linear as much` where that reads the same."""
    own = share_range(lines[name])
    return f"{name} as much" if own == share_range(lines[best]) else f"{name} {own}"


def share_range(line: Sequence[Row], column: str = "fvu") -> str:
    """`10.0% to 12.0%`; `up to 3.4%` where the least reads as nothing, `less than 0.1%` where all do."""
    shares = values(line, column)
    if max(shares) < LEAST_SHARE:
        return "less than 0.1%"
    if min(shares) < LEAST_SHARE:
        return f"up to {fixed(max(shares), '.1%')}"
    return value_range(shares, ".1%")
