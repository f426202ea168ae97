"""Coverage of the papers: `python -m website.coverage` writes docs/papers/coverage.md from website/coverage.yaml."""

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

__all__ = ["items", "page"]

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "docs" / "papers" / "coverage.md"
STATUSES = ("complete", "partly", "missing", "not possible")
INTRODUCTION = """# Coverage

Every table and figure of the five papers, what makes it here, and how far.

*Complete*: the command makes the whole item from the papers' models and data, under the definition of the paper's
text, with the numbers that the paper prints beside ours; where our definition is another, both are in the report, and
where the released code departs from the text, the column *definition* says so. Data that may not be passed on are
read from files of yours, named in the command. *Partly*: so does some of it; the last column says why the rest is not
made, and what stands in its place. No status says that the command has been run: these models need the Hub and GPUs,
and [none has been run here](index.md). Names in the column *report* are [tables and figures of a
study](../study_reports.md#names); a line without one is the report of a single run.

Of {count} items, {counts}.
"""


def items() -> dict[str, list[dict[str, Any]]]:
    """Paper -> its tables and figures, in its order."""
    table: dict[str, list[dict[str, Any]]] = yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text("utf-8")
    )
    return table


def page() -> str:
    """The page: a table for each paper."""
    papers = items()
    statuses = Counter(item["status"] for lines in papers.values() for item in lines)
    counts = ", ".join(f"{status}: {statuses[status]}" for status in STATUSES)
    parts = [INTRODUCTION.format(count=statuses.total(), counts=counts)]
    for paper, lines in papers.items():
        parts.append(
            f"## [{paper[:-4].capitalize()} et al. {paper[-4:]}]({paper}.md)\n"
        )
        parts.append(
            "| item | status | command and report | definition | what is lacking |\n|---|---|---|---|---|"
        )
        parts.extend(_line(item) for item in lines)
        parts.append("")
    return "\n".join(parts)


def _line(item: dict[str, Any]) -> str:
    made = [
        f"`{name}`"
        for name in ([item["run"]] if "run" in item else []) + item.get("report", [])
    ]
    definitions = [
        f"{whose}: {item[whose]}" for whose in ("paper", "ours") if whose in item
    ]
    cells = (
        f"**{item['item']}** {item['shows']}",
        item["status"],
        "<br>".join(made),
        "<br>".join(definitions),
    )
    return f"| {' | '.join([*cells, item.get('note', '')])} |"


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
