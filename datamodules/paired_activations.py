"""The LightningDataModule of paired states: columns, each a model at a site, and pairings over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.far_marks import FarMarks
from aligners.datamodules.module import WITHOUT_GRADIENTS, TextModule
from aligners.datamodules.rows.far import FarRows
from aligners.datamodules.rows.policies import (
    RowKind,
    RowPolicy,
    check_rows,
    one_tokenizer_for,
    policy_of,
    rows_of_kind,
)
from aligners.datamodules.rows.read_rows import (
    Link,
    PairedBatch,
    PairReader,
    Plan,
    Prepared,
)
from aligners.datamodules.rows.row_types import RowTypes, SeenTypes, types_of
from aligners.datamodules.rows.shown_rows import ShownRows, shown_rows
from aligners.datamodules.rows.token_pairs import TokenPairs
from aligners.datamodules.text.recorded_texts import check_reading
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.splits import Split, TokenisedSplits
from aligners.datamodules.tokens.tokenised import Marks, TokenisedTexts
from aligners.errors import UserError, check_known, check_range
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel
from aligners.models.recorded.source_names import all_recorded


class Pairing:
    """What `PairedActivations` pairs. A subclass decides which columns are linked; `datamodules.pairings` has ours.

    Args:
        named: name and revision of each model.
        options: the options that the user set, by name, for `PairedActivations.config`.
        pairs: numbers of the two models of each pair.

    Attributes:
        hidden: options of `PairedActivations` that users cannot set.
        padded: whether the models may differ in width: states of narrower ones are then padded with zeros.
        of_attention: whether attention weights are read, whose rows are pairs of tokens.
    """

    hidden: tuple[str, ...] = ()
    padded = False
    of_attention = False

    def __init__(
        self,
        named: list[tuple[str, str | None]],
        options: Mapping[str, Any],
        pairs: Sequence[tuple[int, int]] = ((0, 1),),
    ) -> None:
        self.named = named
        self.options = dict(options)
        self.pairs = list(pairs)

    def links(self, depths: Sequence[int], component: Component) -> list[Link]:
        """Return the links along the leading axis, given the depths of the models and the component that is read."""
        raise NotImplementedError

    def check(self, models: Sequence[FrozenModel]) -> None:
        """Raise unless the loaded models can be paired."""

    def describe(self, data: PairedActivations) -> dict[str, Any]:
        """Return what a report says of this pairing in particular, as plain values."""
        return {}

    def token_pairs(self, data: PairedActivations) -> TokenPairs | None:
        """The pairs of tokens that are rows, where attention weights are read."""
        return None

    def transform(self, data: PairedActivations, batch: PairedBatch) -> PairedBatch:
        """Change a batch after it was read."""
        return batch


class PairedActivations(TextModule):
    """Turns text into paired rows of frozen models, read on the device where the aligner is.

    A batch is a `PairedBatch`: x (S, N, d_x) and y (S, N, d_y), with the rows of each link of the pairing.

    Args:
        pairing: which models and sites are paired.
        rows: `tokens`: every real token, for models of equal tokenizers; `mean`: the mean over a text's tokens; `cls`:
            its first token; `last`: its last; `words`, `words_first`, `words_mean`: the last piece, the first piece, or
            the mean over all pieces of every word, for any models. A word is a run of characters without white space;
            it becomes a row if all models have it in full.
        special_tokens: whether [CLS], [SEP] and the like count as rows. Injection replaces them too. Words have none.
        component: what is read at a site: `residual`, the stream between the blocks; `attention` or `mlp`, what that
            sub-layer of block l adds to it. Sub-layers have no site 0.
        held_out_types: share of the token types (of the word types, where rows are words) whose rows no map is fitted
            on, so that an evaluation can tell a general map from memorised words. A hash of the type's name with
            `text.seed` chooses them; special tokens are never among them. The states of neighbouring words, which
            depend on them through the context, are still fitted on. Rows of whole texts have no types.
        far_rows: `leave_out`: leave a row out of fitting and errors if, for any model and site read, it is more than
            five times as far from the median row as half of the rows are (ten times for what sub-layers add); injection
            does not replace its state. In language models the first token of a text is such a row; a few of them hold
            nearly all of the variance. `keep`: they count like any other. Errors with and without them are reported
            either way.
        options: options of `TextModule` and `FrozenModels`, by their names: `text`, `batch_size`, `max_length`,
            `packed`, `seed`, `workers`, `store`, `store_dtype`, `store_rows`, `dtype`, `attn_implementation`,
            `trust_remote_code`, `cache`, `devices`, `device_map`.

    Attributes:
        models: names of the models, as the user wrote them.
        numbers: numbers of the two models of each pair.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        pairing: Pairing,
        *,
        rows: RowPolicy = "tokens",
        special_tokens: bool = True,
        component: Component = "residual",
        held_out_types: float = 0.1,
        far_rows: FarRows = "leave_out",
        **options: Any,
    ) -> None:
        check_range(least=0, below=1, held_out_types=held_out_types)
        check_known(get_args(FarRows), far_rows=far_rows)
        self.models = [name for name, _ in pairing.named]
        recorded = all_recorded(self.models)
        if recorded and pairing.of_attention:
            raise UserError(
                f"Attention weights are read from models, but {self.models[0]} is recorded states. Name the model."
            )
        check_reading(pairing.named, {**options, "held_out_types": held_out_types})
        rows = rows_of_kind(rows, recorded=recorded)
        words = policy_of(rows).types == "words"
        super().__init__(pairing.named, words, one_tokenizer_for(rows), **options)
        check_rows(rows, component, self.packed)
        self.pairing = pairing
        self.rows = rows
        self.special_tokens = special_tokens
        self.component = component
        self.far_rows = far_rows
        self.held_out_types = held_out_types
        self.labels = pairing.options.get("labels")
        self.numbers = pairing.pairs
        self.storable = not (pairing.of_attention or recorded)
        self.far = FarMarks(self)
        self._plan = Plan()
        self._other: TokenisedSplits | None = None

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The sites of each model."""
        chosen: dict[int, set[int]] = defaultdict(set)
        for link in self.pairing.links(depths, self.component):
            chosen[link.x].add(link.site_x)
            chosen[link.y].add(link.site_y)
        numbers = range(len(depths))
        return [sorted(chosen[number]) for number in numbers]

    @property
    def kinds_read(self) -> Sequence[RowKind]:
        """The kinds of rows read: the one of `rows`, and those that an evaluation has planned."""
        return [self.reader.kind, *self._plan.kinds]

    @cached_property
    def reader(self) -> PairReader:
        """Reads the models and pairs their rows; loaded on first use."""
        models = self.frozen
        self.pairing.check(models)
        depths = [model.depth for model in models]
        links = self.pairing.links(depths, self.component)
        kind = RowKind(self.rows, self.special_tokens)
        return PairReader(
            models,
            links,
            kind,
            self.component,
            token_pairs=self.pairing.token_pairs(self),
            transform=partial(self.pairing.transform, self),
            padded=self.pairing.padded,
            leave_out_far=self.far_rows == "leave_out",
        )

    # ------------------------------------------------------------------ what an evaluation reads

    def plan(self, plan: Plan) -> None:
        """Choose what is read from now on. Whatever is run calls this once, in its `setup`.

        This is no option of the data module: it follows from the evaluated maps and the loaded models, and any number
        of evaluations may reuse the data module of a fit with other maps.

        Raises:
            ValueError: as `TextModule.other_texts` does.
        """
        kind = self.reader.kind
        others = [other for other in plan.kinds if other != kind]
        self._plan = replace(plan, kinds=others)
        words = "words" in {read.types for read in self.kinds_read}
        if words != self._words:
            self._words = words
            self._tokenised = None
        self._other = None
        splits: list[Split] = ["test"]
        if plan.other is not None:
            self._other = self._unlabelled(plan.other)
            splits.append("other")
        if plan.fitting:
            splits.append("fit")
        if plan.parts:
            splits = ["test"] * len(plan.parts)
        self.splits = tuple(splits)

    def _unlabelled(self, source: TextSource) -> TokenisedSplits:
        """Return the held-out texts of another source, without their labels."""
        other = self.other_texts(source)
        columns = [name for name in other.test.column_names if name != "label"]
        unlabelled = other.test.select_columns(columns)
        return self.tokenise(replace(other, test=unlabelled))

    def split(self, name: Split) -> TokenisedTexts:
        """Return a split, tokenised for all models."""
        if name == "other" and self._other is not None:
            return self._other["test"]
        return super().split(name)

    def _plain_texts(self, split: Split) -> Any:
        """Return a split as text, a `Dataset`: its name here would let the parser of options import `datasets`."""
        if split == "other" and self._other is not None:
            return self._other.texts.test
        return getattr(self.texts, split)

    # ------------------------------------------------------------------ what reports say

    def config(self) -> dict[str, Any]:
        """Return the options as plain values, from which an equal data module can be made."""
        config = {**self.pairing.options, **self._options(), **super().config()}
        config["held_out_types"] = self.held_out_types
        for name in self.pairing.hidden:
            config.pop(name)
        return config

    def _options(self) -> dict[str, Any]:
        """What is read, as the user says it."""
        return {
            "rows": self.rows,
            "special_tokens": self.special_tokens,
            "component": self.component,
            "far_rows": self.far_rows,
        }

    def describe(self) -> dict[str, Any]:
        """Describe texts, models and rows for a report, as plain values."""
        reader = self.reader
        described = {
            "models": {"x": reader.model_x.identity(), "y": reader.model_y.identity()},
            "sites": list(map(list, reader.sites)),
            **self._options(),
            **super().describe(),
        }
        types = policy_of(self.rows).types
        described["types"] = types
        described["held_out_types"] = self.held_out_types
        if types in (None, "states"):
            said = f"rows {self.rows!r} have no types, so that none can be held out"
            described |= {"types": said, "held_out_types": 0.0}
        return {**described, **self.pairing.describe(self)}

    def describe_other(self) -> dict[str, Any]:
        """Describe the other source of text for a report, as plain values."""
        if self._other is None:
            return {}
        described = self._other.texts.describe()
        left_out = described.get("left_out", {"texts": 0})
        described["dropped_as_fitted_on"] = left_out["texts"]
        described["n_texts"] = described["n_texts"]["test"]
        return {"other_text": described}

    def described_pair(self, a: int, b: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Describe one pair of many as the `pair_states` of its two models would describe itself.

        Args:
            a: number of X in `models`.
            b: number of Y.

        Returns:
            Its `describe()` and its `config()`.
        """
        described = self.describe()
        config = self.config()
        places = self._places_of((a, b))
        sites = [described["sites"][place] for place in places]
        if not sites:  # a model of a universe, paired with itself
            sites = self.sites_together((a, b))
            config["sites"] = ",".join(f"{i}:{j}" for i, j in sites)
        models = described["models"]
        described["models"] = {"x": models[a], "y": models[b]}
        described["sites"] = sites
        described.pop("pairs", None)
        for name in ("pairs", "models", "revisions"):
            config.pop(name, None)
        config["model_x"], config["revision_x"] = self.named()[a]
        config["model_y"], config["revision_y"] = self.named()[b]
        config["labels"] = None
        return described, config

    def sites_together(self, models: Iterable[int]) -> list[list[int]]:
        """Return the sites of some models of a universe that belong together, given the models' numbers."""
        by_model: dict[int, list[int]] = {model: [] for model in models}
        for link in self.reader.links:
            if link.x in by_model:
                by_model[link.x].append(link.site_x)
        together = zip(*by_model.values(), strict=True)
        return list(map(list, together))

    def described_pairs(self) -> list[tuple[list[int], dict[str, Any], dict[str, Any]]]:
        """Return, for each pair, its places along the leading axis and its `described_pair`."""
        described = []
        for pair in self.numbers:
            places = self._places_of(pair)
            described.append((places, *self.described_pair(*pair)))
        return described

    def _places_of(self, pair: tuple[int, int]) -> list[int]:
        """Return the places of a pair along the leading axis; none for two models of a universe."""
        links = enumerate(self.reader.links)
        return [place for place, link in links if (link.x, link.y) == pair]

    # ------------------------------------------------------------------ types and far rows

    @cached_property
    def seen(self) -> SeenTypes:
        """The types of the fitting rows."""
        types = self.types("fit")
        if types is None:
            return SeenTypes(None, frozenset())
        return types.seen(self.held_out_types, self.text.seed)

    def types(self, split: Literal["fit", "test"]) -> RowTypes | None:
        """Return the types of a split's rows, if rows of this kind have types."""
        return self._types(self.reader.kind, split)

    def shown(self, split: Split) -> ShownRows:
        """Return what the rows of a split read."""
        tokenizer = self.frozen_models.tokenizers[0]
        texts = self._plain_texts(split)
        return shown_rows(self.reader.kind, self.split(split), texts, tokenizer)

    def _types(self, kind: RowKind, split: Split) -> RowTypes | None:
        tokenizer = self.frozen_models.tokenizers[0]
        data = self.split(split)
        return types_of(kind, data, self._plain_texts(split), tokenizer)

    def without_far(self, split: Split, kind: RowKind) -> TokenisedTexts:
        """Return a split whose batches mark its far rows of a kind, if far rows are left out."""
        far = self.far.of(split, [kind])
        if self.far_rows == "keep":
            far = {}
        return self.split(split).marked({}, leave_out=False, far=far)

    def _marked(self, split: Split) -> TokenisedTexts:
        """Return a split whose batches mark rows of unseen types and far rows, or leave them out, if it is `fit`."""
        if split == "fit":
            return self._fitting_texts()
        seen = self._plan.measured or self.seen
        marks = self._unseen(split, self.kinds_read, seen)
        far = self._far(split, self.kinds_read)
        return self.split(split).marked(marks, leave_out=False, far=far)

    def _fitting_texts(self) -> TokenisedTexts:
        """Return the fitting texts, without rows of held-out types and, if they are left out, without far rows."""
        kind = self.reader.kind
        marks = self._unseen("fit", [kind], self.seen)
        far = self._far("fit", [kind]).get(kind)
        if far is not None and self.far_rows == "leave_out":
            unseen = marks.get(kind, far)
            marks[kind] = Marks(far.flat | unseen.flat, far.counts)
        return self.split("fit").marked(marks, leave_out=True)

    def _unseen(
        self, split: Split, kinds: Sequence[RowKind], seen: SeenTypes
    ) -> dict[RowKind, Marks]:
        """Mark the rows of unseen types, of the kinds of rows that have such types."""
        marks: dict[RowKind, Marks] = {}
        for kind in kinds:
            if kind.types != seen.kind:
                continue
            types = self._types(kind, split)
            if types is not None:
                marks[kind] = types.unseen(seen)
        return marks

    def _far(self, split: Split, kinds: Sequence[RowKind]) -> Mapping[RowKind, Marks]:
        """Return the far rows of a split; attention weights have none."""
        if self.pairing.of_attention:
            return {}
        return self.far.of(split, kinds)

    # ------------------------------------------------------------------ Lightning's hooks

    def on_before_batch_transfer(
        self, batch: TextBatch, dataloader_idx: int
    ) -> Prepared:
        """Choose the rows while the batch is still on the CPU."""
        held_out = self.splits[dataloader_idx : dataloader_idx + 1] == ("test",)
        prepared = self.reader.prepare(batch, self._plan.kinds)
        if held_out and self._plan.targets_of is not None:
            prepared.task = self._plan.targets_of(batch)
        return prepared

    def on_after_batch_transfer(
        self, batch: Prepared, dataloader_idx: int
    ) -> PairedBatch:
        """Run the models where the batch is now."""
        return self.reader.read(batch)

    def loader(
        self, split: Split, *, shuffle: bool = False, **options: Any
    ) -> DataLoader:
        """Make a loader of one split's texts, with this rank's share of each batch.

        Fitting texts come without the rows of held-out types, and texts with no other rows are skipped.

        Args:
            split: texts to load.
            shuffle: whether every epoch has a new order, the same for any number of ranks.
            options: further arguments of `load`.
        """
        data = self._marked(split)
        without_rows = [marks for marks in data.marks.values() if marks.flat.all()]
        if data.leave_out and without_rows:
            raise UserError(
                f"Expected `held_out_types` to leave rows to fit on, but holding out {self.held_out_types:g} of the "
                "types leaves none. Give a smaller share, or more text."
            )
        return self.load(data, shuffle=shuffle, sites=self.wanted_sites(), **options)

    def paired(self, split: Split, **options: Any) -> Iterator[PairedBatch]:
        """Iterate over the paired rows of a split, batch by batch, on the device of the first model.

        Args:
            split: texts to read.
            options: options of `loader`.

        Examples:
            >>> data = pair_states("embedded:0", "embedded:1", sites="blocks")  # doctest: +SKIP
            >>> for batch in data.paired("fit", only=100):  # doctest: +SKIP
            ...     print(batch.x.shape, batch.y.shape)  # (S, N, d_x) and (S, N, d_y)
        """
        return self.batches(split, **options)

    def train_dataloader(self) -> DataLoader:
        """Load the fitting texts; after an interruption, from the batch that comes next.

        The moments were read in the order of epoch 0, so training begins with the order of epoch 1.
        """
        return self.resumable(self.loader("fit", shuffle=True, first_epoch=1))

    def val_dataloader(self) -> Sequence[DataLoader]:
        """Load the validation texts, and as many fitting texts for comparison.

        `trainer.limit_val_batches` takes the first texts, not the longest.
        """
        larger = WITHOUT_GRADIENTS * self.batch_size
        count = len(self.split("validation"))
        limit = getattr(self.trainer, "limit_val_batches", 1.0)
        if isinstance(limit, int) and limit:
            count = min(count, limit * larger)
        splits: tuple[Split, ...] = ("validation", "fit")
        return [self.loader(split, only=count, batch_size=larger) for split in splits]

    def test_dataloader(self) -> list[DataLoader]:
        """Load the texts of `splits`; of the fitting texts, as many as are held out."""
        self.complete_store(self.splits)
        loaders = []
        for part in self._plan.parts:
            loader = self.loader(
                "test", chosen=part, whole=True, group=self._plan.group
            )
            loaders.append(loader)
        if loaders:
            return loaders
        for split in self.splits:
            only = None
            if split == "fit":
                only = len(self.split("test"))
            loaders.append(self.loader(split, only=only))
        return loaders
