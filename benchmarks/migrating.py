"""What becomes of an index when its embedding model is replaced, and a map stands between: the study of `migrate`.

Texts are beginnings of IMDB reviews and halves of Rotten Tomatoes sentences. A query is the longest words of a
document, which alone is relevant to it: a known-item search, made and not asked by people. Maps are fitted on other
reviews; sentences are a domain that no map is fitted on. With `--judged` queries are those of a folder of BEIR's files,
and maps are fitted on its documents. A model is a folder or a name; its vectors are kept in FOLDER and read again.

`python -m benchmarks.migrating FOLDER OLD NEW [OLD NEW ...]`
"""

import json
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.text.loading import TextSource, load_texts
from aligners.fitting.migration.migration import Migration
from aligners.fitting.migration.text_rows import read_judged, read_texts
from aligners.fitting.migration.vector_maps import DEFAULT
from aligners.fitting.migration.vector_sources import VectorSource
from benchmarks.harness import Figures, parser

WORDS = 40  # of a document
ASKED = 5  # words of a query, out of the first `SEEN` of its document
SEEN = 25
SOURCES = {"reviews": "imdb", "sentences": "rotten_tomatoes"}
E5 = {"query": "query: ", "document": "passage: "}
MARKS = ".,!?()\"'"
JUDGED = ("corpus.jsonl", "queries.jsonl", "qrels.tsv")
Rows = list[dict[str, str]]


def document_of(text: str, domain: str) -> str:
    """The beginning of a review without its second long sentence, or the second half of a sentence."""
    words = re.sub(r"<[^>]*>", " ", text).split()
    if domain == "sentences":
        if len(words) < 2 * (ASKED + 1):
            return ""
        return " ".join(words[len(words) // 2 :])
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(words))
    long_ones = [place for place, one in enumerate(sentences) if len(one.split()) > 5]
    if len(long_ones) < 3:
        return ""
    del sentences[long_ones[1]]
    return " ".join(" ".join(sentences).split()[:WORDS])


def query_of(document: str) -> str:
    """The longest words of a document, in their order."""
    words = [word.strip(MARKS) for word in document.split()[:SEEN]]
    order = sorted(range(len(words)), key=lambda place: -len(words[place]))
    return " ".join(words[place] for place in sorted(order[:ASKED]))


def documents_of(domain: str) -> list[str]:
    """Return all documents of a domain that are long enough for a query."""
    split = load_texts(TextSource(SOURCES[domain], seed=0)).fit
    found = []
    for text in split["text"][:]:
        document = document_of(text, domain)
        if len(document.split()) > ASKED:
            found.append(document)
    return found


def write_texts(folder: Path, documents: int, fitting: int) -> None:
    """Write texts.jsonl to fit on, and corpus.jsonl, queries.jsonl and qrels.tsv.

    Args:
        folder: created if need be.
        documents: reviews that are searched, and half as many sentences; every second document has a query.
        fitting: other reviews to fit on.
    """
    corpus: Rows = []
    queries: Rows = []
    texts: Rows = []
    sizes = {"reviews": documents, "sentences": documents // 2}
    for domain, size in sizes.items():
        rows = []
        for number, document in enumerate(documents_of(domain)):
            name = f"{domain}-{number}"
            rows.append({"_id": name, "text": document, "domain": domain})
        corpus += rows[:size]
        if domain == "reviews":
            texts += rows[size : size + fitting]
        for row in rows[: size // 2]:
            asked = {"_id": f"q-{row['_id']}", "text": query_of(row["text"])}
            queries.append(asked | {"domain": domain})
    judged = ["query\tdocument\tscore"]
    for query in queries:
        name = query["_id"]
        judged.append(f"{name}\t{name.removeprefix('q-')}\t1")
    folder.mkdir(parents=True, exist_ok=True)
    files = {"corpus": corpus, "queries": queries, "texts": texts}
    for file, of_file in files.items():
        lines = [json.dumps(row) for row in of_file]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    (folder / "qrels.tsv").write_text("\n".join(judged))


def copy_judged(judged: Path, folder: Path) -> None:
    """Copy queries, documents and judgements; the documents are what maps are fitted on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in JUDGED:
        shutil.copy(judged / name, folder / name)
    shutil.copy(judged / "corpus.jsonl", folder / "texts.jsonl")


def source(name: str, kept: Path, tokens: int) -> VectorSource:
    """The vectors of a model, if they are kept, or the model."""
    place = kept / Path(name).name
    if (place / "pieces.npy").is_file():
        return VectorSource(str(place))
    prompts = E5 if "e5" in Path(name).name else None
    return VectorSource(name, prompts=prompts, max_tokens=tokens)


def measure(figures: Figures, folder: Path, old: str, new: str, tokens: int) -> None:
    """Run the study of a pair, and record what it found."""
    before, after = (source(name, folder / "vectors", tokens) for name in (old, new))
    texts = read_texts(folder / "texts.jsonl")
    judged = read_judged(folder)
    held_out = ["sentences"] if judged.queries.domains else []
    study = Migration(
        before,
        after,
        texts,
        judged,
        maps=DEFAULT,
        pairs=[500, 1000, 2000, 5000, 10_000, 50_000],
        held_out=held_out,
    )
    pair = f"{Path(old).name} to {Path(new).name}"
    new_vectors = folder / "vectors" / pair.replace(" ", "-")
    study.run(new_vectors)
    for side, name in (("old", old), ("new", new)):
        made = new_vectors / side
        place = folder / "vectors" / Path(name).name
        if made.is_dir() and not place.exists():
            made.rename(place)
    record(figures, pair, study)


def record(figures: Figures, pair: str, study: Migration) -> None:
    """Record recall@10 of the chosen maps, of what they are compared with, and as it was predicted."""
    for row in study.rows:
        if row["route"] is None and row["domain"] == "all":
            figures.add(f"{pair}: {row['map']}, recall@10", row["recall10"])
        if row["chosen"]:
            what = f"{row['route']}, {row['pairs']} pairs, {row['domain']}"
            share = row["relative_recall10"]
            figures.add(f"{pair}: {what}, {row['map']}, relative", share)
    for row in study.report_tables["forecasts"]:
        what = f"{row['route']}, {row['pairs']} pairs, predicted"
        for end in ("", "_low", "_high"):
            value = row[f"predicted_recall10{end}"]
            figures.add(f"{pair}: {what}{end}", value)


def main() -> None:
    """Write the texts, and measure every pair."""
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="for texts and vectors")
    arguments.add_argument("models", nargs="+", help="OLD NEW, for each pair")
    arguments.add_argument("--texts", type=int, default=2500, help="to fit maps on")
    arguments.add_argument(
        "--documents", type=int, default=1200, help="reviews that are searched"
    )
    arguments.add_argument(
        "--judged", type=Path, help="folder of queries and documents instead"
    )
    arguments.add_argument("--tokens", type=int, default=32, help="of a text")
    given = arguments.parse_args()
    figures = Figures(given.device)
    if not (given.folder / "qrels.tsv").is_file():
        if given.judged is not None:
            copy_judged(given.judged, given.folder)
        else:
            write_texts(given.folder, given.documents, given.texts)
    pairs = zip(given.models[::2], given.models[1::2], strict=True)
    for old, new in pairs:
        measure(figures, given.folder, old, new, given.tokens)
    figures.write(given.json)


if __name__ == "__main__":
    main()
