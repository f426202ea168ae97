"""Finds the far rows of a data module's texts, and reports their effect on its figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
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
IN_MEANS = "They enter the means of their texts: leave out special tokens, if these are the far ones, or read words"
KEPT = {
    "leave_out": "They are left out of fits, errors and measures, and injection leaves Y's own states in their place",
    "keep": "They are kept",
}


Found = WeakKeyDictionary[TokenisedTexts, dict[RowKind, Marks]]
Kinds = Sequence[RowKind]
Read = tuple[RowKind, Rows, Tensor]
ByText = dict[RowKind, dict[int, Tensor]]  # the marks of each text's rows


class FarModel:
    """A model that is read, and which of its rows are far.

    Args:
        data: the data module.
        number: number of the model.
        sites: sites at which it is read.

    Attributes:
        samples: findings about its rows, for each kind.
    """

    def __init__(self, data: Any, number: int, sites: list[int]) -> None:
        self.data = data
        self.number = number
        self.sites = sites
        self.model: FrozenModel = data.frozen[number]
        self.samples: dict[RowKind, FarSample] = {}

    def has_far(self, kind: RowKind) -> bool:
        """Whether any sampled row of a kind is far."""
        sample = self.samples.get(kind)
        return sample is not None and bool(sample.far.any())

    def far(self, kind: RowKind, states: Tensor) -> Tensor:
        """Return which rows (S, N, d) of a kind are far, (N,) on the CPU."""
        if self.has_far(kind):
            reach = self.samples[kind].reach
            return reach.beyond(states).cpu()
        count = states.shape[1]
        return torch.zeros(count, dtype=torch.bool)

    def load(self, split: Split, **options: Any) -> Any:
        """Make a loader of a split's texts, all of them on every rank, with the model's states if there is a store."""
        sites: list[list[int]] = [[] for _ in self.data.frozen]
        sites[self.number] = self.sites
        return self.data.load(split, alone=True, sites=sites, **options)

    def running(self) -> Any:
        """Return a context in which the model is on the device where it runs."""
        return self.data.frozen_models.running(self.model, self.data.run_device)

    def read(self, batch: TextBatch, kinds: Kinds) -> list[Read]:
        """Return for each kind where its rows are, on the CPU, and their states (S, N, d)."""
        device = self.model.device
        chosen = []
        placed = []
        for kind in kinds:
            rows = rows_of_each(batch, kind)[self.number]
            chosen.append(rows)
            placed.append(rows.to(device))
        there = batch.to(device)
        states = read_each(
            self.model,
            there.inputs[self.number],
            self.sites,
            placed,
            self.data.component,
            there.stored.get(self.model),
        )
        return list(zip(kinds, chosen, states, strict=True))

    def sample(self, split: Split, kinds: Kinds) -> None:
        """Find out what is far, for the kinds where that is not yet known, on the first `SAMPLE_ROWS` rows."""
        kinds = [kind for kind in kinds if kind not in self.samples]
        if not kinds:
            return
        states: dict[RowKind, list[Tensor]] = defaultdict(list)
        first: dict[RowKind, list[Tensor]] = defaultdict(list)
        for read in self._first_rows(split, kinds):
            for kind, rows, of_kind in read:
                states[kind].append(of_kind.cpu())
                first[kind].append(rows.place == 0)
        for kind, parts in states.items():
            every = torch.cat(parts, 1)
            if not every.shape[1]:
                continue
            starts = torch.cat(first[kind])
            component = self.data.component
            sample = FarSample.of(every, starts, self.sites, component)
            self.samples[kind] = sample

    def _first_rows(self, split: Split, kinds: Kinds) -> Iterator[list[Read]]:
        """Read batches of a split's first texts until they hold `SAMPLE_ROWS` rows of the first kind."""
        size = SAMPLE_TEXTS // AT_ONCE
        loader = self.load(split, only=SAMPLE_TEXTS, batch_size=size)
        count = 0
        with self.running():
            for batch in loader:
                read = self.read(batch, kinds)
                yield read
                _, rows, _ = read[0]
                count += len(rows)
                if count >= SAMPLE_ROWS:
                    return

    def mark(self, split: Split, kinds: Kinds, marks: ByText) -> None:
        """Add the rows that are far for this model to the marks of a split."""
        size = AT_ONCE * self.data.batch_size
        loader = self.load(split, batch_size=size)
        said = f"Looking for far rows of {self.model.name}"
        batches = track(loader, said, disable=hidden(self.data.trainer))
        with self.running():
            for texts, batch in zip(loader.sampler, batches, strict=True):
                for kind, rows, states in self.read(batch, kinds):
                    of_kind = marks[kind]
                    parts = self.far(kind, states).split(rows.counts)
                    for text, part in zip(texts, parts, strict=True):
                        of_kind[text] = part | of_kind.get(text, part)


class FarMarks:
    """The rows of a data module's splits that are far from all others, for any of its models at any site that is read.

    What is far is measured once, on `SAMPLE_TEXTS` texts of the split that the run reads first. Models without far rows
    among these are taken to have none.

    Args:
        data: the data module, a `TextModule`.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._found: Found = WeakKeyDictionary()

    @cached_property
    def _models(self) -> list[FarModel]:
        """Return each model that is read, once, with all sites at which it is read."""
        models = self.data.frozen
        sites: dict[int, set[int]] = defaultdict(set)
        wanted = self.data.wanted_sites()
        for model, of_model in zip(models, wanted, strict=True):
            sites[models.index(model)].update(of_model)
        read = []
        for number, chosen in sites.items():
            if chosen:
                model = FarModel(self.data, number, sorted(chosen))
                read.append(model)
        return read

    def of(self, split: Split, kinds: Kinds) -> Mapping[RowKind, Marks]:
        """Return a split's far rows for each kind that has some: kinds of tokens or words, never of whole texts.

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
            known |= self._mark(split, wanted)
            first = wanted[0]
            become = f"{KEPT[self.data.far_rows]} (`data.far_rows`)"
            self._caution(known[first].flat, f"{NAMES[split]} rows", first, become)
        if self.data.store is None:  # a store may have only means
            self._note_means(split, kinds)
        far = {}
        for kind in typed:
            if known[kind].flat.any():
                far[kind] = known[kind]
        return far

    def _note_means(self, split: Split, kinds: Kinds) -> None:
        """Warn of far tokens that enter the means of their texts."""
        for kind in kinds:
            if kind.policy == "mean":
                tokens = RowKind("tokens", kind.special_tokens)
                self.note(split, tokens, IN_MEANS, "tokens")

    def any(self) -> bool:
        """Tell whether there are far rows in the splits read so far."""
        for of_kinds in self._found.values():
            for marks in of_kinds.values():
                if marks.flat.any():
                    return True
        return False

    def _sample(self, split: Split, kinds: Kinds) -> None:
        """Find out what is far for each model, on the split that the run reads first."""
        trainer = self.data.trainer
        if trainer is not None:
            stage = getattr(getattr(trainer, "state", None), "fn", "fit")
            split = self.data.splits[0]
            if stage in ("fit", "validate"):
                split = "fit"
        for model in self._models:
            model.sample(split, kinds)

    def _mark(self, split: Split, kinds: Kinds) -> dict[RowKind, Marks]:
        """Mark the rows of a split's texts that are far for any model."""
        by_text: ByText = defaultdict(dict)
        for model in self._models:
            if any(map(model.has_far, kinds)):
                model.mark(split, kinds, by_text)
        count = len(self.data.split(split))
        return {kind: _joined(by_text[kind], count) for kind in kinds}

    def note(
        self, split: Split, kind: RowKind, become: str, what: str = "rows"
    ) -> None:
        """Warn of far rows where nothing leaves them out, judging by some texts of a split.

        Args:
            split: which texts.
            kind: kind of rows.
            become: what happens to far rows, in words.
            what: what the rows are called.
        """
        self._sample(split, [kind])
        far: Tensor | None = None
        for model in self._models:
            if kind not in model.samples:
                continue
            own = model.samples[kind].far
            if far is None:
                far = own
            elif len(own) == len(far):  # the same rows, as with models of one tokenizer
                far = far | own
        if far is not None:
            which = f"{NAMES[split]} {what} that were checked"
            self._caution(far, which, kind, become)

    def _caution(self, far: Tensor, which: str, kind: RowKind, become: str) -> None:
        """Report how many rows are far and what they do; once, for the texts that are read first."""
        count = int(far.sum())
        said = "far from all others" in " ".join(self.data.cautions)
        if not count or said:
            return
        each = []
        for model in self._models:
            if model.has_far(kind):
                name = short_name(model.model)
                each.append(model.samples[kind].words(name))
        self.data.caution(
            f"Caution: {count:,} of {len(far):,} {which} ({count / len(far):.1%}) are far from all others: "
            f"{'; '.join(each)}. {become}."
        )


def _joined(by_text: dict[int, Tensor], texts: int) -> Marks:
    """Return the marks of all texts of a split; none if no model has far rows."""
    no_rows = torch.zeros(0, dtype=torch.bool)
    parts = [by_text.get(text, no_rows) for text in range(texts)]
    counts = torch.tensor(list(map(len, parts)))
    return Marks(torch.cat(parts), counts)
