"""Finds the far rows of a data module's texts, and says what they do to its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.far import SAMPLE_TEXTS, FarSample, find_far, sample_rows
from aligners.datamodules.rows.policies import RowKind, Rows
from aligners.datamodules.rows.read_rows import read_each
from aligners.datamodules.tokens.splits import Split
from aligners.datamodules.tokens.tokenised import Marks, TokenisedTexts
from aligners.models.model import FrozenModel
from aligners.progress import hidden, track

AT_ONCE = 4  # training batches that are read at a time
NAMES = {"fit": "fitting", "validation": "validation", "test": "held-out", "other": "other"}
IN_MEANS = "They are in the means of their texts: leave out special tokens, if these are far, or read words"
KEPT = {
    "leave_out": "They are left out of fits, errors and measures, and injection leaves Y's own states in their place",
    "keep": "They are kept",
}


class FarMarks:
    """Which rows of a data module's splits are far from all others, for any of its models at any site that is read.

    What is far is measured once, on `SAMPLE_TEXTS` texts of the split that the run reads first. Models without far rows
    among these are taken to have none.

    Args:
        data: the data module, a `TextModule`.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._samples: dict[tuple[int, RowKind], FarSample] = {}
        self._found: WeakKeyDictionary[TokenisedTexts, dict[RowKind, Marks]] = WeakKeyDictionary()

    def of(self, split: Split, kinds: Sequence[RowKind]) -> Mapping[RowKind, Marks]:
        """The far rows of a split, of those of the kinds that have any: of tokens or words, never of whole texts.

        Args:
            split: which texts.
            kinds: of rows.
        """
        texts = self.data.split(split)
        known = self._found.setdefault(texts, {})
        typed = [kind for kind in dict.fromkeys(kinds) if kind.types is not None]
        wanted = [kind for kind in typed if kind not in known]
        if wanted:
            self._sample(split, wanted)
            known |= self._marks(split, texts, wanted)
            self._say(split, known[wanted[0]], wanted[0])
        for kind in kinds:
            if (
                kind.policy == "mean" and self.data.store is None
            ):  # a store may have nothing but means
                self.note(split, RowKind("tokens", kind.special_tokens), IN_MEANS, "tokens")
        return {kind: known[kind] for kind in typed if known[kind].flat.any()}

    # ------------------------------------------------------------------ reading

    def _models(self) -> list[tuple[int, FrozenModel]]:
        """Each model once, with its first number."""
        models = self.data.frozen
        return [
            (number, model) for number, model in enumerate(models) if models.index(model) == number
        ]

    def _layers(self, number: int) -> list[int]:
        """The sites that are read of a model, under all of its numbers."""
        models, wanted = self.data.frozen, self.data.wanted_sites()
        every = [wanted[m] for m, model in enumerate(models) if model is models[number]]
        return sorted({site for sites in every for site in sites})

    def _batches(self, split: Split, number: int, **options: Any) -> Any:
        """A loader of a split's texts, all of them for every rank, with one model's states if there is a store."""
        nothing: list[list[int]] = [[] for _ in self.data.frozen]
        nothing[number] = self._layers(number)
        return self.data.load(self.data.split(split), alone=True, sites=nothing, **options)

    def _reader(self, number: int) -> Any:
        model, layers = self.data.frozen[number], self._layers(number)

        def read(batch: TextBatch, chosen: Sequence[Rows]) -> list[Tensor]:
            placed = batch.to(model.device)
            rows = [some.to(model.device) for some in chosen]
            stored = placed.stored.get(model)
            return read_each(
                model, placed.inputs[number], layers, rows, self.data.component, stored
            )

        return read

    def _sample(self, split: Split, kinds: Sequence[RowKind]) -> None:
        """Measure what is far, for the kinds of which that is not known."""
        trainer = self.data.trainer
        if trainer is not None:
            stage = getattr(getattr(trainer, "state", None), "fn", "fit")
            split = "fit" if stage in ("fit", "validate") else self.data.splits[0]
        for number, model in self._models():
            missing = [kind for kind in kinds if (number, kind) not in self._samples]
            if not missing or not self._layers(number):
                continue
            batches = self._batches(
                split, number, only=SAMPLE_TEXTS, batch_size=SAMPLE_TEXTS // AT_ONCE
            )
            with self.data.frozen_models.running(model, self.data.run_device):
                read, layers = self._reader(number), self._layers(number)
                found = sample_rows(batches, number, missing, layers, self.data.component, read)
            self._samples |= {(number, kind): sample for kind, sample in found.items()}

    def _marks(
        self, split: Split, texts: TokenisedTexts, kinds: Sequence[RowKind]
    ) -> dict[RowKind, Marks]:
        """Mark what is far for any model."""
        nothing = Marks(
            torch.zeros(0, dtype=torch.bool), torch.zeros(len(texts), dtype=torch.int64)
        )
        found = dict.fromkeys(kinds, nothing)
        for number, model in self._models():
            reaches = {}
            for kind in kinds:
                sample = self._samples.get((number, kind))
                if sample is not None and sample.far.any():
                    reaches[kind] = sample.reach
            if not reaches:
                continue
            loader = self._batches(split, number, batch_size=AT_ONCE * self.data.batch_size)
            batches = track(
                loader, f"Looking for far rows of {model.name}", disable=hidden(self.data.trainer)
            )
            numbered = zip(loader.sampler, batches, strict=True)
            with self.data.frozen_models.running(model, self.data.run_device):
                marks = find_far(numbered, len(texts), number, reaches, self._reader(number))
            for kind, own in marks.items():
                before = found[kind]
                flat = own.flat if before is nothing else own.flat | before.flat
                found[kind] = Marks(flat, own.counts)
        return found

    # ------------------------------------------------------------------ words

    def note(self, split: Split, kind: RowKind, become: str, what: str = "rows") -> None:
        """Caution about far rows where nothing leaves them out, by some texts of a split.

        Args:
            split: which texts.
            kind: of rows.
            become: what becomes of far ones, in words.
            what: the rows are called.
        """
        self._sample(split, [kind])
        every = [sample.far for (_, of), sample in self._samples.items() if of == kind]
        if every:
            apart = torch.stack(every).any(0) if len({len(far) for far in every}) == 1 else every[0]
            self._caution(
                int(apart.sum()),
                len(apart),
                f"{NAMES[split]} {what} that were looked at",
                kind,
                become,
            )

    def _say(self, split: Split, marks: Marks, kind: RowKind) -> None:
        """Caution about the far rows of a split."""
        become = f"{KEPT[self.data.far_rows]} (`data.far_rows`)"
        self._caution(int(marks.flat.sum()), len(marks.flat), f"{NAMES[split]} rows", kind, become)

    def _caution(self, count: int, rows: int, which: str, kind: RowKind, become: str) -> None:
        """Say how many rows are far, and what they do, once: of the texts that are read first."""
        if not count or any("far from all others" in caution for caution in self.data.cautions):
            return
        each = []
        for number, model in self._models():
            sample = self._samples.get((number, kind))
            if sample is not None and sample.far.any():
                each.append(sample.words(model.name.rstrip("/").rpartition("/")[2]))
        self.data.caution(
            f"Caution: {count:,} of {rows:,} {which} ({count / rows:.1%}) are far from all others: "
            f"{'; '.join(each)}. {become}."
        )

    def any(self) -> bool:
        """Whether there are far rows in the splits that were read so far."""
        return any(marks.flat.any() for found in self._found.values() for marks in found.values())

    def counts(self) -> dict[str, Any]:
        """How many rows of each kind are far, of how many, over the splits that were read."""
        numbers: dict[str, list[int]] = {}
        for found in self._found.values():
            for kind, marks in found.items():
                far, rows = numbers.get(str(kind), [0, 0])
                numbers[str(kind)] = [far + int(marks.flat.sum()), rows + len(marks.flat)]
        return numbers
