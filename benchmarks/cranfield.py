"""Writes the Cranfield collection in BEIR's files, for queries that people asked: `train.py migrate --queries`.

1,400 abstracts on aerodynamics and 225 questions that authors of papers had, with what they judged relevant (Cleverdon
1967, The Cranfield tests on index language devices). Its three files, cran.all.1400, cran.qry and cranqrel, are in many
places on the net, and not in this project. cranqrel numbers questions in their order in cran.qry.

`python -m benchmarks.cranfield CRANFIELD FOLDER`
"""

import argparse
import json
import re
from pathlib import Path

LEAST = 5  # code of a document without any interest; 1: it answers the whole question


def fields(path: Path) -> list[dict[str, str]]:
    """Return the fields of each record: `.I 3`, then a line `.T` before the title and `.W` before the text."""
    whole = path.read_text(encoding="utf-8")
    records = []
    for record in re.split(r"^\.I ", whole, flags=re.M)[1:]:
        number, *parts = re.split(r"^\.([A-Z])\s*$", record, flags=re.M)
        found = {"I": number.strip()}
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            found[name] = " ".join(text.split())
        records.append(found)
    return records


def documents(path: Path) -> list[dict[str, str]]:
    """Return id, title and text of each abstract; its text begins with the title, which is left out of it."""
    rows = []
    for record in fields(path):
        title = record["T"]
        text = record["W"].removeprefix(title).strip()
        rows.append({"_id": record["I"], "title": title, "text": text})
    return rows


def questions(path: Path) -> list[dict[str, str]]:
    """Return number and text of each question."""
    rows = []
    for place, record in enumerate(fields(path)):
        rows.append({"_id": str(place + 1), "text": record["W"]})
    return rows


def judgements(path: Path, known: set[str]) -> list[str]:
    """Return the lines of qrels.tsv, with gains of 4 for a whole answer to 1 for little interest."""
    lines = ["query\tdocument\tscore"]
    for line in path.read_text(encoding="utf-8").splitlines():
        question, document, code = line.split()
        if document in known and 0 < int(code) < LEAST:
            gain = LEAST - int(code)
            lines.append(f"{question}\t{document}\t{gain}")
    return lines


def write(cranfield: Path, folder: Path) -> None:
    """Write corpus.jsonl, queries.jsonl and qrels.tsv."""
    corpus = documents(cranfield / "cran.all.1400")
    asked = questions(cranfield / "cran.qry")
    known = {row["_id"] for row in corpus if row["text"]}
    judged = judgements(cranfield / "cranqrel", known)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "corpus.jsonl": [json.dumps(row) for row in corpus],
        "queries.jsonl": [json.dumps(row) for row in asked],
        "qrels.tsv": judged,
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines))


def main() -> None:
    """Read the arguments, and write."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("cranfield", type=Path, help="folder of the three files")
    arguments.add_argument("folder", type=Path, help="to write to")
    given = arguments.parse_args()
    write(given.cranfield, given.folder)


if __name__ == "__main__":
    main()
