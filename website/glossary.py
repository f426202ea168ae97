"""The glossary: `python -m website.glossary` writes docs/glossary.md from the words that report pages explain."""

from pathlib import Path

import yaml

__all__ = ["page"]

ROOT = Path(__file__).parents[1]
WORDS = ROOT / "aligners" / "reports" / "glossary.yaml"
PLACE = ROOT / "docs" / "glossary.md"
INTRODUCTION = """---
search:
  boost: 4
---

# Glossary

The words of reports, options and messages, one sentence each. [Concepts](concepts.md) has a picture of eight of them.
"""


def page() -> str:
    """The page: a heading for each word, so that a search leads to it."""
    words = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    return INTRODUCTION + "".join(
        f"\n## {word}\n\n{words[word]}\n" for word in sorted(words, key=str.casefold)
    )


if __name__ == "__main__":
    PLACE.write_text(page(), encoding="utf-8")
