"""Generated texts: data sets with the columns of those that they stand in for, and files."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, load_dataset
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.parquet.parquet import Parquet

from datamodules.text.annotated.files import TREEBANK
from datamodules.text.annotated.grammar import Lexicon, sentences
from datamodules.text.annotated.sentence import Sentence

STEMS, MOST_WORDS = 60, 14  # few words, so that a small tokenizer knows them, and short sentences
Columns = Mapping[str, str | Sequence[str]]
TEXTS = {"text": 1, "texts": 4}  # of a row


def drawn_sentences(count: int, seed: int = 0) -> list[Sentence]:
    """Different short sentences of the project's grammar."""
    drawn: dict[str, Sentence] = {}
    for sentence in sentences(100 * count, seed, Lexicon(0, STEMS)):
        if len(sentence.words) <= MOST_WORDS:
            drawn[sentence.text] = sentence
        if len(drawn) == count:
            break
    return list(drawn.values())


def generated(columns: Columns, rows: int, seed: int) -> Dataset:
    """Rows of a data set.

    Args:
        columns: name -> `text`, `texts` (a list), `number`, `score` (in [0, 5)), `truth`, `answer` (the first word of
            `context`, which stands before it), or the names of classes.
        rows: how many.
        seed: of the texts.
    """
    texts = iter(drawn_sentences(rows * sum(TEXTS.get(str(kind), 0) for kind in columns.values()), seed))
    kinds: dict[str, Callable[[int], Any]] = {
        "text": lambda _: next(texts).text,
        "texts": lambda _: [next(texts).text for _ in range(TEXTS["texts"])],
        "number": lambda row: row,
        "score": lambda row: row * 7 % 50 / 10,
        "truth": lambda row: row * 7 % 5 < 3,
        "answer": lambda row: {"text": [values["context"][row].split()[0]], "answer_start": [0]},
    }
    values = dict[str, list[Any]]()
    for name, kind in columns.items():
        values[name] = [kinds[kind](row) if isinstance(kind, str) else row * 7 % 11 % len(kind) for row in range(rows)]
    table = Dataset.from_dict(values)
    classes = {name: ClassLabel(names=list(kind)) for name, kind in columns.items() if not isinstance(kind, str)}
    return table.cast(Features({**table.features, **classes}))


def first_rows(name: str, subset: str | None, rows: int) -> dict[str, Dataset] | None:
    """The first rows of every split of a data set on the Hub; None if it cannot be reached."""
    try:
        splits = dict(load_dataset(name, subset, streaming=True))
        return {split: Dataset.from_list(list(of.take(rows)), features=of.features) for split, of in splits.items()}
    except (OSError, ValueError):  # no such data set, gated, offline
        return None


def put_dataset(cache: Path, name: str, subset: str | None, splits: Mapping[str, Dataset]) -> None:
    """Write a data set where `load_dataset` finds it without a network.

    Args:
        cache: what HF_DATASETS_CACHE will name.
        name: its id on the Hub.
        subset: its configuration.
        splits: by their names.
    """
    *owner, short = name.split("/")
    config, short = subset or "default", camelcase_to_snakecase(short)
    place = cache / "___".join([*owner, short]) / config / "0.0.0"
    place.mkdir(parents=True, exist_ok=True)
    files = {split: str(place / f"{split}.parquet") for split in splits}
    for split, table in splits.items():
        table.to_parquet(files[split])
    builder = Parquet(str(cache), short, config, data_files=files)
    builder.download_and_prepare(str(place / "rehearsal"))


def put_file(path: Path, columns: Columns, rows: int, seed: int, *, annotated: bool) -> None:
    """Write a file of texts, of the kind that its name ends in.

    Args:
        path: of the file.
        columns: of a table, as for `generated`.
        rows: texts.
        seed: of the texts.
        annotated: whether JSON lines are sentences with labelled spans.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = drawn_sentences(rows, seed)
    if path.suffix == TREEBANK:
        path.write_text("\n".join(map(_tree, lines)), encoding="utf-8")
    elif path.suffix == ".txt":
        path.write_text("".join(f"{sentence.text}\n" for sentence in lines), encoding="utf-8")
    elif annotated and path.suffix in (".json", ".jsonl"):
        path.write_text("".join(f"{json.dumps(_spans(sentence))}\n" for sentence in lines), encoding="utf-8")
    else:
        writers = {".parquet": Dataset.to_parquet, ".csv": Dataset.to_csv, ".tsv": partial(Dataset.to_csv, sep="\t")}
        writers.get(path.suffix, Dataset.to_json)(generated(columns, rows, seed), path)


def _tree(sentence: Sentence) -> str:
    """A sentence as CoNLL-U."""
    pos, relations = sentence.labels("pos"), sentence.labels("dependencies")
    words = enumerate(zip(sentence.words, sentence.heads, strict=True))
    fields = (
        [n + 1, word, "_", pos[n], "_", "_", head, relations.get(n, "root"), "_", "_"] for n, (word, head) in words
    )
    return "".join("\t".join(map(str, line)) + "\n" for line in fields)


def _spans(sentence: Sentence) -> dict[str, Any]:
    """A sentence with its roles as labelled pairs of spans."""
    targets = [target for target in sentence.targets if target.task == "roles"]
    return {
        "text": sentence.text,
        "targets": [{"span1": t.span1, "span2": t.span2, "label": t.labels[0]} for t in targets],
    }
