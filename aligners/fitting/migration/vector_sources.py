"""Where the vectors of a model come from: the model itself, a file of vectors, or a folder of such files."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aligners.errors import UserError
from aligners.files.atomic import whole_file
from aligners.fitting.migration.text_rows import TextRows
from aligners.fitting.migration.vector_files import (
    are_unit,
    check_vectors,
    in_order,
    is_vector_file,
    lengths,
    read_vectors,
    vector_file,
)
from aligners.models.sentence_pipeline import SentencePipeline
from aligners.progress import track

WIDTH = re.compile(r"(.+):width=(\d+)")


class VectorSource:
    """The vectors of one model.

    Args:
        place: a model, as `SentencePipeline` takes it, with `:width=N` for the first N numbers of its vectors; a file
            of vectors of the texts; or a folder with texts, corpus and queries, and pieces if there are any, each .npy
            or .parquet.
        prompts: role -> words before each text, in place of the model's own.
        max_tokens: cut texts after so many tokens.
        batch_size: texts at a time.
        device: where the model runs.

    Attributes:
        place: as it was given.
        pipeline: the model; None for vectors.
        seconds: time that embedding took.
        embedded: number of texts that were embedded.

    Raises:
        ValueError: there is no such model, or no such file.
    """

    def __init__(
        self,
        place: str,
        *,
        prompts: Mapping[str, str] | None = None,
        max_tokens: int | None = None,
        batch_size: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.place = place
        self.batch_size = batch_size
        self.seconds = 0.0
        self.embedded = 0
        self.pipeline: SentencePipeline | None = None
        self._notes: list[str] = []
        found = WIDTH.fullmatch(place)
        name = found[1] if found else place
        self._cut = int(found[2]) if found else None
        self._file = Path(name) if is_vector_file(name) else None
        self._folder = Path(name) if vector_file(Path(name), "texts") else None
        if self._file is None and self._folder is None:
            self.pipeline = SentencePipeline(
                name,
                width=self._cut,
                max_tokens=max_tokens,
                prompts=prompts,
                device=device,
            )

    def has(self, part: str) -> bool:
        """Say whether there are vectors of a part, or a model that makes them."""
        if self.pipeline is not None:
            return True
        return self._folder is not None and vector_file(self._folder, part) is not None

    def vectors(
        self, part: str, rows: TextRows, role: str, keep: Path | None = None
    ) -> np.ndarray:
        """Return the vectors of texts, (N, d).

        Args:
            part: what the texts are: `texts`, `pieces`, `corpus` or `queries`.
            rows: the texts.
            role: `query` or `document`, for the model's prompts.
            keep: folder in which new vectors are kept, to be read in place of the model another time.

        Raises:
            ValueError: there are no vectors of this part, they do not fit the texts, or are not finite.
        """
        if self.pipeline is not None:
            return self._embed(self.pipeline, part, rows, role, keep)
        path = self._file
        if self._folder is not None:
            path = vector_file(self._folder, part)
        elif part != "texts":
            path = None
        if path is None:
            raise UserError(
                f"Expected the vectors of the {part} beside those of the texts, but {self.place} has none. Name a "
                f"folder with texts.npy, corpus.npy and queries.npy, or Parquet files of these names."
            )
        found = in_order(read_vectors(path), rows.ids, len(rows), str(path))
        if self._cut is not None:
            if self._cut > found.shape[1]:
                raise UserError(
                    f"Expected a width of at most {found.shape[1]} in {path}, but got {self._cut}."
                )
            found = found[:, : self._cut]
        return found

    def _embed(
        self,
        pipeline: SentencePipeline,
        part: str,
        rows: TextRows,
        role: str,
        keep: Path | None,
    ) -> np.ndarray:
        begin = time.perf_counter()
        vectors = np.empty((len(rows), pipeline.width), np.float32)
        batches = pipeline.batches(rows.texts, role, batch_size=self.batch_size)
        total = -(-len(rows) // self.batch_size)
        what = f"Embedding {part} with {Path(self.place).name}"
        for places, found in track(batches, what, total):
            vectors[places] = found
        check_vectors(vectors, f"the vectors of {self.place}")
        self.seconds += time.perf_counter() - begin
        self.embedded += len(rows)
        if keep is not None:
            with (
                whole_file(keep / f"{part}.npy") as unfinished,
                unfinished.open("wb") as file,
            ):
                np.save(file, vectors)
        return vectors

    @property
    def rate(self) -> float | None:
        """Texts a second, as they were embedded here; None for vectors."""
        if not self.embedded:
            return None
        return self.embedded / self.seconds

    def kind(self) -> tuple[Any, ...] | None:
        """Return what models of one family share: architecture, width and vocabulary; None for vectors."""
        if self.pipeline is None:
            return None
        config: Any = self.pipeline.transformer.config
        text = config.get_text_config()
        return config.model_type, text.hidden_size, text.vocab_size

    def about(self) -> dict[str, Any]:
        """Return what a report says of the source, as plain values."""
        about: dict[str, Any] = {"place": self.place, "texts_a_second": self.rate}
        if self.pipeline is not None:
            about["max_tokens"] = self.pipeline.max_tokens
            about["query_prompt"] = self.pipeline.prompt("query")
            about["document_prompt"] = self.pipeline.prompt("document")
            about["assumed"] = self.pipeline.assumed
        return about


def cautions_of(old: np.ndarray, new: np.ndarray) -> list[str]:
    """Say where one side is normalised and the other is not, and how many rows are zero."""
    cautions = []
    units = {"old": are_unit(old), "new": are_unit(new)}
    if units["old"] != units["new"]:
        unit, raw = ("old", "new") if units["old"] else ("new", "old")
        cautions.append(
            f"The {unit} vectors all have length 1, and the {raw} ones have not: lengths mean nothing to the one, so "
            "compare by the cosine."
        )
    for side, rows in (("old", old), ("new", new)):
        zero = int((lengths(rows) == 0).sum())
        if zero:
            cautions.append(
                f"{zero} of {len(rows)} {side} vectors are zero; pairs with one are left out."
            )
    return cautions
