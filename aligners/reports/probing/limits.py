"""What is said of probes whose training reached its limit."""

from __future__ import annotations

from aligners.reports.report import Row

__all__ = ["unfinished_in_words"]


def unfinished_in_words(meta: Row) -> list[str]:
    """Say how many probes were still learning when their training reached its limit, if any were."""
    found, limit = meta.get("unfinished", {}), meta.get("training", {}).get("max_epochs")
    if not found.get("probes"):
        return []
    return [
        f"{found['probes']:,} of {found['of']:,} probes were still learning after {limit} epochs, the limit of "
        "`training.max_epochs`: with a higher one they may read more."
    ]
