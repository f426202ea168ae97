"""Finds the far rows of a data module's texts, and says what they do to its figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.doubts import NAMES, short_name
from aligners.datamodules.rows.far import SAMPLE_ROWS, SAMPLE_TEXTS, FarSample
from aligners.datamodules.rows.policies import RowKind, Rows, rows_of_each
from aligners.datamodules.rows.read_rows import read_each
from aligners.datamodules.tokens.splits import Split
from aligners.datamodules.tokens.tokenised import Marks, TokenisedTexts
from aligners.models.model import FrozenModel
from aligners.progress import hidden, track

AT_ONCE = 4  # training batches that are read at a time
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
        known = self._found.setdefault(self.data.split(split), {})
        typed = [kind for kind in dict.fromkeys(kinds) if kind.types is not None]
        wanted = [kind for kind in typed if kind not in known]
        if wanted:
            self._sample(split, wanted)
            known |= self._mark(split, wanted)
            become = f"{KEPT[self.data.far_rows]} (`data.far_rows`)"
            self._caution(known[wanted[0]].flat, f"{NAMES[split]} rows", wanted[0], become)
        for kind in kinds:
            if kind.policy == "mean" and self.data.store is None:  # a store may have only means
                tokens = RowKind("tokens", kind.special_tokens)
                self.note(split, tokens, IN_MEANS, "tokens")
        return {kind: known[kind] for kind in typed if known[kind].flat.any()}

    def any(self) -> bool:
        """Whether there are far rows in the splits that were read so far."""
        every: list[Marks] = []
        for found in self._found.values():
            every += found.values()
        return any(bool(marks.flat.any()) for marks in every)

    # ------------------------------------------------------------------ reading

    def _models(self) -> list[tuple[int, FrozenModel, list[int]]]:
        """Each model that is read once, with its first number and the sites that are read under all of its numbers."""
        models = self.data.frozen
        wanted = self.data.wanted_sites()
        sites: dict[int, set[int]] = {}
        for model, of_model in zip(models, wanted, strict=True):
            sites.setdefault(models.index(model), set()).update(of_model)
        return [(number, models[number], sorted(read)) for number, read in sites.items() if read]

    def _load(self, split: Split, number: int, sites: list[int], **options: Any) -> Any:
        """A loader of a split's texts, all of them for every rank, with one model's states if there is a store."""
        every: list[list[int]] = [[] for _ in self.data.frozen]
        every[number] = sites
        return self.data.load(split, alone=True, sites=every, **options)

    def _read(
        self, number: int, sites: list[int], batch: TextBatch, kinds: Sequence[RowKind]
    ) -> list[tuple[RowKind, Rows, Tensor]]:
        """The rows of a model: for each kind where they are, on the CPU, and their states (S, N, d)."""
        model = self.data.frozen[number]
        rows = [rows_of_each(batch, kind)[number] for kind in kinds]
        placed = batch.to(model.device)
        states = read_each(
            model,
            placed.inputs[number],
            sites,
            [of_kind.to(model.device) for of_kind in rows],
            self.data.component,
            placed.stored.get(model),
        )
        return list(zip(kinds, rows, states, strict=True))

    def _sample(self, split: Split, kinds: Sequence[RowKind]) -> None:
        """Measure what is far, for the kinds of which that is not known, on the split that the run reads first."""
        trainer = self.data.trainer
        if trainer is not None:
            stage = getattr(getattr(trainer, "state", None), "fn", "fit")
            split = self.data.splits[0]
            if stage in ("fit", "validate"):
                split = "fit"
        for number, model, sites in self._models():
            missing = [kind for kind in kinds if (number, kind) not in self._samples]
            if not missing:
                continue
            size = SAMPLE_TEXTS // AT_ONCE
            batches = self._load(split, number, sites, only=SAMPLE_TEXTS, batch_size=size)
            with self.data.frozen_models.running(model, self.data.run_device):
                self._sample_model(number, sites, batches, missing)

    def _sample_model(
        self, number: int, sites: list[int], batches: Any, kinds: Sequence[RowKind]
    ) -> None:
        """Look at the first `SAMPLE_ROWS` rows of a model."""
        states: dict[RowKind, list[Tensor]] = defaultdict(list)
        first: dict[RowKind, list[Tensor]] = defaultdict(list)
        rows_so_far = 0
        for batch in batches:
            for kind, rows, read in self._read(number, sites, batch, kinds):
                states[kind].append(read.cpu())
                first[kind].append(rows.place == 0)
            rows_so_far += len(first[kinds[0]][-1])
            if rows_so_far >= SAMPLE_ROWS:
                break
        for kind, parts in states.items():
            every = torch.cat(parts, 1)
            if every.shape[1]:
                self._samples[number, kind] = FarSample.of(
                    every, torch.cat(first[kind]), sites, self.data.component
                )

    def _mark(self, split: Split, kinds: Sequence[RowKind]) -> dict[RowKind, Marks]:
        """Mark what is far for any model, in all texts of a split."""
        found: dict[RowKind, dict[int, Tensor]] = defaultdict(dict)  # marks of each text
        for number, model, sites in self._models():
            if not any(self._has_far(number, kind) for kind in kinds):
                continue
            loader = self._load(split, number, sites, batch_size=AT_ONCE * self.data.batch_size)
            said = f"Looking for far rows of {model.name}"
            batches = track(loader, said, disable=hidden(self.data.trainer))
            with self.data.frozen_models.running(model, self.data.run_device):
                for texts, batch in zip(loader.sampler, batches, strict=True):
                    for kind, rows, states in self._read(number, sites, batch, kinds):
                        far = self._far(number, kind, states).split(rows.counts)
                        for text, part in zip(texts, far, strict=True):
                            found[kind][text] = part | found[kind].get(text, part)
        return {kind: self._joined(found[kind], len(self.data.split(split))) for kind in kinds}

    def _far(self, number: int, kind: RowKind, states: Tensor) -> Tensor:
        """Which rows of a kind are far for a model, (N,) on the CPU."""
        if self._has_far(number, kind):
            return self._samples[number, kind].reach.beyond(states).cpu()
        return torch.zeros(states.shape[1], dtype=torch.bool)

    def _joined(self, by_text: dict[int, Tensor], texts: int) -> Marks:
        """The marks of all texts of a split; of none if no model has far rows."""
        no_rows = torch.zeros(0, dtype=torch.bool)
        parts = [by_text.get(text, no_rows) for text in range(texts)]
        return Marks(torch.cat(parts), torch.tensor(list(map(len, parts))))

    def _has_far(self, number: int, kind: RowKind) -> bool:
        """Whether a model has far rows of a kind among those that were looked at."""
        sample = self._samples.get((number, kind))
        return sample is not None and bool(sample.far.any())

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
        if not every:
            return
        far = every[0]
        for other in every[1:]:
            if len(other) == len(far):  # the same rows, as models of one tokenizer have
                far = far | other
        self._caution(far, f"{NAMES[split]} {what} that were looked at", kind, become)

    def _caution(self, far: Tensor, which: str, kind: RowKind, become: str) -> None:
        """Say how many rows are far, and what they do, once: of the texts that are read first."""
        count = int(far.sum())
        rows = len(far)
        said = any("far from all others" in caution for caution in self.data.cautions)
        if not count or said:
            return
        each = []
        for number, model, _ in self._models():
            if self._has_far(number, kind):
                each.append(self._samples[number, kind].words(short_name(model)))
        self.data.caution(
            f"Caution: {count:,} of {rows:,} {which} ({count / rows:.1%}) are far from all others: "
            f"{'; '.join(each)}. {become}."
        )
