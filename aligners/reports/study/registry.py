"""Every table and figure of a study's report by name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from aligners.errors import check_known
from aligners.reports.study import updates
from aligners.reports.study.contents import Content, Figure, Table
from aligners.reports.study.frames import Frames, Missing
from aligners.reports.study.papers import brown, merchant, phang, ren, wu
from aligners.reports.study.papers.shared import DESCRIBED

PAPERS = {"brown": brown, "merchant": merchant, "phang": phang, "ren": ren, "updates": updates, "wu": wu}


# Name -> the function that makes a table or a figure of what was collected, or raises `Missing`.
CONTENTS: dict[str, Callable[[Frames], Table | Figure]] = {
    name: partial(getattr(PAPERS[paper], function), name=name, **about.get("with", {}))
    for name, about in DESCRIBED.items()
    for paper, _, function in [about.get("from", "").partition(".")]
    if function
}


class ReportContents(NamedTuple):
    """What a study's report consists of.

    Attributes:
        tables: in the order of the registry.
        figures: likewise.
        missing: name -> why it could not be made.
    """

    tables: list[Table]
    figures: list[Figure]
    missing: dict[str, str]

    def findings(self) -> list[Content]:
        """The tables and figures that say something, each with the sentences that none before it says."""
        before, contents = set[str](), list[Content]()
        for item in (*self.tables, *self.figures):
            sentences = [sentence for sentence in item.findings if sentence and sentence not in before]
            before.update(sentences)
            contents += [replace(item, findings=sentences)] if sentences else []
        return contents


def make(frames: Frames, names: Sequence[str] | None = None) -> ReportContents:
    """Make tables and figures.

    Args:
        frames: of the study.
        names: which; default: all that can be made.

    Raises:
        ValueError: a name is unknown.
    """
    check_known(CONTENTS, report=names)
    items, missing = list[Table | Figure](), dict[str, str]()
    for name in names or CONTENTS:
        try:
            items.append(CONTENTS[name](frames))
        except Missing as reason:
            missing[name] = str(reason)
    tables = [item for item in items if isinstance(item, Table)]
    return ReportContents(tables, [item for item in items if isinstance(item, Figure)], missing)
