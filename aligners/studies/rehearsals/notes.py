"""What a rehearsal could not know, and what it cut."""

import json
from collections.abc import Sequence
from pathlib import Path

REHEARSAL, NOTES = "rehearsal", "rehearsal.json"
ASSUMED = "assumed:"
MEANINGLESS = "This was a rehearsal, with tiny models and few texts and steps: none of its numbers is a result."


def words(folder: Path) -> list[str]:
    """What a rehearsal could not know and what it cut, a line each; nothing where there was none.

    Args:
        folder: of a study.
    """
    if not (folder / NOTES).is_file():
        return []
    notes = json.loads((folder / NOTES).read_text(encoding="utf-8"))
    missing = folder / "report" / "missing.json"
    why = json.loads(missing.read_text(encoding="utf-8")) if missing.is_file() else {}
    stood_in = [f"{line['what']} {line['name']}: {line['by']}" for line in notes["stood_in"]]
    return [
        MEANINGLESS,
        *_listed("In the place of", [line for line in stood_in if ASSUMED not in line]),
        *_listed(
            "Nothing is known of these; check them by hand",
            [line for line in stood_in if ASSUMED in line],
        ),
        *_listed("What was cut", notes["cut"]),
        *_listed(
            "Tables and figures that were not made",
            [f"{name}: {reason}" for name, reason in why.items()],
        ),
    ]


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)] if lines else []
