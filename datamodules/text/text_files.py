"""Opens texts on this machine: files, folders of files, and data sets that `save_to_disk` wrote."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligners.datamodules.text.annotated import annotated_files as annotated
from aligners.datamodules.text.labels import Say
from aligners.datamodules.text.separated import reader_options
from aligners.errors import UserError
from aligners.files.yaml_tables import table_beside

logger = logging.getLogger(__name__)

PLAIN = ".txt"
READERS: dict[str, tuple[str, dict[str, Any]]] = table_beside(__file__, "sources.yaml")[
    "readers"
]
ENDINGS = (*READERS, annotated.TREEBANK)
SPLITS = {"train", "dev", "validation", "test"}
SAVED = (
    "state.json",
    "dataset_dict.json",
)  # files in a folder that `save_to_disk` wrote: of one split, of several


def is_local(source: str) -> bool:
    """Tell whether a source that is not a known name is a file or a folder, and not on the Hub."""
    path = Path(source).expanduser()
    return path.exists() or path.suffix in ENDINGS or source.startswith((".", "/", "~"))


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk` of `datasets`."""
    return any((path / name).is_file() for name in SAVED)


def open_local(
    path: Path, streaming: bool, say: Say, like: Path | None = None
) -> dict[str, Any]:
    """Open a file, as the split "train", or a folder with its splits.

    Args:
        path: path of the file or the folder.
        streaming: whether to read only as far as needed.
        say: receives cautions about what is in the files.
        like: the file that names the task of labelled spans; default: each file names its own.

    Raises:
        ValueError: there is no such file, or it cannot be read.
    """
    if is_saved(path):
        return _open_saved(path, streaming)
    files = _files(path)
    if not files:
        raise UserError(
            f"Expected `source` or `held_out` to be a file, or a folder of files, ending in {', '.join(ENDINGS)}, or a "
            f"folder that `save_to_disk` wrote, but {str(path)!r} {_instead(path)}."
        )
    return {
        split: _open_split(parts, streaming, say, like)
        for split, parts in files.items()
    }


def _files(path: Path) -> dict[str, list[Path]]:
    """List the files of each split. Plain text beside files of another kind, such as a README, is left out."""
    if path.is_file():
        return {"train": [path]} if path.suffix in ENDINGS else {}
    if not path.is_dir():
        return {}
    candidates = [file for file in sorted(path.iterdir()) if file.suffix in ENDINGS]
    others = [file for file in candidates if file.suffix != PLAIN]
    files: dict[str, list[Path]] = {}
    for file in others or candidates:
        files.setdefault(_split_of(file.name), []).append(file)
    return files


def _instead(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    if path.is_file():
        return f"ends in {path.suffix!r}"
    names = sorted(file.name for file in path.iterdir())
    return (
        f"holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        if names
        else "is empty"
    )


def _split_of(name: str) -> str:
    parts = re.split(r"[-.]", name)
    return next((part for part in parts if part in SPLITS), parts[0])


def _open_saved(path: Path, streaming: bool) -> dict[str, Any]:
    from datasets import Dataset, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read as a data set that `save_to_disk` wrote: {error}"
        ) from error
    splits = {"train": saved} if isinstance(saved, Dataset) else dict(saved)
    if streaming:
        return {name: split.to_iterable_dataset() for name, split in splits.items()}
    return splits


def _open_split(
    parts: Sequence[Path], streaming: bool, say: Say, like: Path | None
) -> Any:
    """Open the files of a split, which are of one kind."""
    if annotated.holds_answers(parts[0]):
        return annotated.open_answers(parts)
    reader = annotated.annotated_reader(parts[0], like)
    if reader is not None:
        if streaming:
            raise UserError(
                f"`streaming` does not work with annotated sentences, such as those of {parts[0]}. Leave it out."
            )
        return annotated.open_annotated(reader, parts)
    kind, options = READERS[parts[0].suffix]
    if kind == "csv":
        options = {
            **options,
            **_separated_options(parts, options.get("sep", ","), streaming, say),
        }
    table = _read_split(kind, parts, streaming, options)
    return _without_blank_lines(table, parts[0], streaming) if kind == "text" else table


def _separated_options(
    parts: Sequence[Path], usual: str, streaming: bool, say: Say
) -> dict[str, Any]:
    """Find out how to read the files of a split, which must be written alike."""
    every = [reader_options(part, usual, say, streaming=streaming) for part in parts]
    for part, options in zip(parts, every, strict=True):
        if options != every[0]:
            raise UserError(
                f"Expected the files of a split to be written alike, but {parts[0]} and {part} differ in the separator "
                "between their columns, or in what their quotation marks mean. Write them alike."
            )
    return every[0]


def _read_split(
    kind: str, parts: Sequence[Path], streaming: bool, options: dict[str, Any]
) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    patterns = [
        glob.escape(str(part)) for part in parts
    ]  # `datasets` takes paths for patterns
    try:
        return load_dataset(
            kind, data_files=patterns, split="train", streaming=streaming, **options
        )
    except (
        DatasetGenerationError,
        ValueError,
        StopIteration,
    ) as error:  # the last of empty JSON
        if kind not in ("parquet", "arrow"):
            _check_not_empty(parts)
        raise UserError(
            f"{parts[0]} cannot be read as {kind}: {error.__cause__ or error}"
        ) from error


def _check_not_empty(parts: Sequence[Path]) -> None:
    """Raise if files have nothing but blank lines, or a line that is not UTF-8."""
    lines = [line for part in parts for _, line in annotated.numbered_lines(part)]
    if not any(map(str.strip, lines)):
        raise UserError(f"Expected texts in {parts[0]}, but it is empty.")


def _without_blank_lines(table: Any, path: Path, streaming: bool) -> Any:
    texts = table.filter(lambda row: bool(row["text"].strip()))
    blank = 0 if streaming else len(table) - len(texts)
    if blank:
        logger.warning("%d blank lines of %s are skipped.", blank, path)
    return texts
