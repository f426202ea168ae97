"""The LightningDataModule of states: columns, each a model at a site, and pairings over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torch.utils.data import DataLoader

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.far_marks import FarMarks
from aligners.datamodules.module import WITHOUT_GRADIENTS, TextModule
from aligners.datamodules.rows.far import FarRows
from aligners.datamodules.rows.policies import (
    PAIRS_TOKENS,
    RowKind,
    RowPolicy,
    TokenPairs,
    check_rows,
    policy_of,
)
from aligners.datamodules.rows.read_rows import Link, PairedBatch, PairReader, Plan, Prepared
from aligners.datamodules.rows.row_types import RowTypes, SeenTypes, types_of
from aligners.datamodules.tokens.splits import Split, TokenisedSplits
from aligners.datamodules.tokens.tokenised import Marks, TokenisedTexts
from aligners.errors import UserError, check_known, check_range
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel

if TYPE_CHECKING:
    from datasets import Dataset

Links = Callable[[Sequence[int], Component], list[Link]]


@dataclass(frozen=True)
class Pairing:
    """What `PairedActivations` pairs: the columns, and the options that name them; `datamodules.pairings` makes them.

    Attributes:
        named: name and revision of each model.
        links: from the depths of the models and the component to what stands along the leading axis.
        options: by their names, for `PairedActivations.config`.
        hidden: options of `PairedActivations` that are not a user's.
        pairs: numbers of the two models of each pair, known before the models are.
        check: raises unless the loaded models can be paired.
        about: what `PairedActivations.describe` says of this pairing alone.
        token_pairs: from the data module to the rows, where attention weights are read.
        transform: what becomes of every batch.
        padded: the widths of the models may differ: states of narrower ones end in zeros.
    """

    named: list[tuple[str, str | None]]
    links: Links
    options: dict[str, Any]
    hidden: tuple[str, ...] = ()
    pairs: Sequence[tuple[int, int]] = ((0, 1),)
    check: Callable[[Sequence[FrozenModel]], None] = lambda models: None
    about: Callable[[PairedActivations], dict[str, Any]] = lambda data: {}
    token_pairs: Callable[[PairedActivations], TokenPairs] | None = None
    transform: Callable[[PairedActivations, PairedBatch], PairedBatch] | None = None
    padded: bool = False


class PairedActivations(TextModule):
    """Turns text into paired rows of frozen models, read on the device where the aligner is.

    A batch is a `PairedBatch`: x (S, N, d_x) and y (S, N, d_y), for each link of the pairing its rows.

    Args:
        pairing: see there.
        rows: `tokens`: every real token, for models of equal tokenizers; `mean`: the mean over a text's tokens;
            `cls`: its first token; `last`: its last; `words`, `words_first`, `words_mean`: the last piece, the
            first, or the mean over the pieces of every word, for any models. A word is a run of characters without
            white space, and a row where all models have it in full.
        special_tokens: whether [CLS], [SEP] and the like count as rows. Injection replaces them too. Words have none.
        component: what is read at a site: `residual`, the stream between the blocks; `attention` or `mlp`, what that
            sub-layer of block l adds to it. Sub-layers have no site 0.
        held_out_types: share of the token types (of the word types, where rows are words) whose rows no map is fitted
            on, so that an evaluation can tell a general map from memorised words. A hash of the type's name with
            `text.seed` chooses them; special tokens are never among them. The states of the words around them are still
            fitted on, and depend on them through the context. Rows of whole texts have no types.
        far_rows: `leave_out`: rows that any of the models, at any site that is read, sets more than five times as far
            from the median row as it does half of the rows (ten times for what sub-layers add) are left out of
            fitting and of errors, and injection leaves them as they are. Language models do so with the first token of
            a text; a few such rows hold nearly all of the variance. `keep`: they count like any other. Errors with and
            without them are reported either way.
        options: of `TextModule` and `FrozenModels`, by their names: `text`, `batch_size`, `max_length`, `packed`,
            `seed`, `workers`, `store`, `store_dtype`, `store_rows`, `dtype`, `attn_implementation`,
            `trust_remote_code`, `cache`, `devices`, `device_map`.

    Attributes:
        models: as the user named them.
        numbers: of the two models of each pair.

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
        alike = PAIRS_TOKENS if rows == "tokens" else None
        super().__init__(pairing.named, policy_of(rows).types == "words", alike, **options)
        self.pairing, self.chosen, self.hidden = pairing, pairing.options, pairing.hidden
        self.rows, self.special_tokens, self.component = rows, special_tokens, component
        self.far_rows, self.far = far_rows, FarMarks(self)
        self.held_out_types, self.labels = held_out_types, pairing.options.get("labels")
        self.models, self.numbers = [name for name, _ in pairing.named], list(pairing.pairs)
        self.storable = pairing.token_pairs is None  # attention weights are not kept
        check_rows(rows, component, self.packed)
        self._plan = Plan()
        self._other: TokenisedSplits | None = None

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The sites of each model."""
        chosen: list[set[int]] = [set() for _ in depths]
        for link in self.pairing.links(depths, self.component):
            chosen[link.x].add(link.site_x)
            chosen[link.y].add(link.site_y)
        return [sorted(sites) for sites in chosen]

    @property
    def kinds_read(self) -> Sequence[RowKind]:  # type: ignore[override]
        """Those of `rows`, and those that an evaluation has planned."""
        return [self.reader.kind, *self._plan.kinds]

    @cached_property
    def reader(self) -> PairReader:
        """The models and what is paired, loaded on first use."""
        pairing, models = self.pairing, self.frozen
        pairing.check(models)
        links = pairing.links([model.depth for model in models], self.component)
        pairs = None if pairing.token_pairs is None else pairing.token_pairs(self)
        transform = None if pairing.transform is None else partial(pairing.transform, self)
        kind = RowKind(self.rows, self.special_tokens)
        return PairReader(
            models,
            links,
            kind,
            self.component,
            token_pairs=pairs,
            transform=transform,
            padded=pairing.padded,
            leave_out_far=self.far_rows == "leave_out",
        )

    def keep_far(self) -> None:
        """Keep far rows from now on, for what needs every row of a text."""
        self.far_rows = "keep"
        self.reader.leave_out_far = False

    def plan(self, plan: Plan) -> None:
        """Choose what an evaluation reads from now on.

        Raises:
            ValueError: as `TextModule.other_texts` does.
        """
        self._plan = replace(plan, kinds=[kind for kind in plan.kinds if kind != self.reader.kind])
        kinds = (self.reader.kind, *self._plan.kinds)
        words = any(kind.types == "words" for kind in kinds)
        if words != self._words:
            self._words, self._tokenised = words, None
        self._other = None
        if plan.other is not None:
            other = self.other_texts(plan.other)
            unlabelled = [name for name in other.test.column_names if name != "label"]
            self._other = self.tokenise(replace(other, test=other.test.select_columns(unlabelled)))
        further: dict[Split, bool] = {"other": plan.other is not None, "fit": plan.fitting}
        self.splits = ("test", *(split for split, wanted in further.items() if wanted))

    def describe_other(self) -> dict[str, Any]:
        """Describe the other source of text for a report, as plain values."""
        if self._other is None:
            return {}
        described = self._other.texts.describe()
        dropped = described.get("left_out", {"texts": 0})["texts"]
        return {
            "other_text": {
                **described,
                "dropped_as_fitted_on": dropped,
                "n_texts": described["n_texts"]["test"],
            }
        }

    def split(self, name: Split) -> TokenisedTexts:
        """A split, tokenised for all models."""
        return (
            super().split(name) if self._other is None or name != "other" else self._other["test"]
        )

    def describe(self) -> dict[str, Any]:
        """Describe texts, models and rows for a report, as plain values."""
        reader, types = self.reader, policy_of(self.rows).types
        return {
            "models": {"x": reader.model_x.identity(), "y": reader.model_y.identity()},
            "sites": [list(pair) for pair in reader.sites],
            **{
                name: getattr(self, name)
                for name in ("component", "rows", "special_tokens", "far_rows")
            },
            **super().describe(),
            "types": types or f"rows {self.rows!r} have no types, and none are held out",
            "held_out_types": self.held_out_types if types else 0.0,
            **self.pairing.about(self),
        }

    def described_pair(self, a: int, b: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the `pair_states` of two models would say of itself, where they are among many.

        Args:
            a: number of X in `models`.
            b: number of Y.

        Returns:
            Its `describe()` and its `config()`.
        """
        described, config = self.describe(), self.config()
        for values, name in (
            (described, "pairs"),
            (config, "pairs"),
            (config, "models"),
            (config, "revisions"),
        ):
            values.pop(name, None)
        (model_x, revision_x), (model_y, revision_y) = self.named()[a], self.named()[b]
        chosen = {
            "model_x": model_x,
            "model_y": model_y,
            "revision_x": revision_x,
            "revision_y": revision_y,
        }
        sites = [
            [link.site_x, link.site_y] for link in self.reader.links if (link.x, link.y) == (a, b)
        ]
        if not sites:  # of a universe
            sites = self.sites_together((a, b))
            config["sites"] = ",".join(f"{i}:{j}" for i, j in sites)
        described |= {
            "models": {"x": described["models"][a], "y": described["models"][b]},
            "sites": sites,
        }
        return described, {**config, **chosen, "labels": None}

    def sites_together(self, models: Iterable[int]) -> list[list[int]]:
        """The sites of some models of a universe that belong together, by the models' numbers."""
        links = self.reader.links
        by_model = ([link.site_x for link in links if link.x == m] for m in models)
        return [list(sites) for sites in zip(*by_model, strict=True)]

    def described_pairs(self) -> list[tuple[list[int], dict[str, Any], dict[str, Any]]]:
        """For each pair its places along the leading axis, and its `described_pair`."""
        places = [
            [s for s, link in enumerate(self.reader.links) if (link.x, link.y) == pair]
            for pair in self.numbers
        ]
        return [
            (group, *self.described_pair(a, b))
            for group, (a, b) in zip(places, self.numbers, strict=True)
        ]

    # ------------------------------------------------------------------ types

    @cached_property
    def seen(self) -> SeenTypes:
        """The types of the fitting rows."""
        types = self.types("fit")
        return (
            types.seen(self.held_out_types, self.text.seed)
            if types
            else SeenTypes(None, frozenset())
        )

    def types(self, split: Literal["fit", "test"]) -> RowTypes | None:
        """The types of a split's rows, if rows of this kind have any."""
        texts = self.texts.fit if split == "fit" else self.texts.test
        return types_of(
            self.reader.kind, self.split(split), texts, self.frozen_models.tokenizers[0]
        )

    def without_far(self, split: Split, kind: RowKind) -> TokenisedTexts:
        """A split whose batches say which of its rows of a kind are far, if far rows are left out."""
        far = self.far.of(split, [kind])
        return self.split(split).marked(
            {}, leave_out=False, far=far if self.far_rows == "leave_out" else {}
        )

    def _marked(self, split: Split, texts: Dataset, *, leave_out: bool) -> TokenisedTexts:
        """Mark the rows of unseen types, and those that are far from all others, in the batches of a split.

        Args:
            split: which texts.
            texts: the same as text.
            leave_out: whether the texts are to be fitted on, without such rows.
        """
        data, kinds = self.split(split), [self.reader.kind] if leave_out else list(self.kinds_read)
        seen = self.seen if self._plan.measured is None or leave_out else self._plan.measured
        marks: dict[RowKind, Marks] = {}
        for kind in kinds:
            if seen.kind is not None and kind.types == seen.kind:
                types = cast(
                    RowTypes, types_of(kind, data, texts, self.frozen_models.tokenizers[0])
                )
                marks[kind] = types.unseen(seen)
        far = self.far.of(split, kinds) if self.storable else {}
        if not leave_out:
            return data.marked(marks, leave_out=False, far=far)
        if self.far_rows == "leave_out":
            for kind, apart in far.items():
                flat = apart.flat | marks[kind].flat if kind in marks else apart.flat
                marks[kind] = Marks(flat, apart.counts)
        return data.marked(marks, leave_out=True)

    # ------------------------------------------------------------------ Lightning's hooks

    def on_before_batch_transfer(self, batch: TextBatch, dataloader_idx: int) -> Prepared:
        """Choose the rows while the batch is still on the CPU."""
        held_out = self.splits[dataloader_idx : dataloader_idx + 1] == ("test",)
        targets_of = self._plan.targets_of if held_out else None
        return self.reader.prepare(batch, self._plan.kinds, targets_of)

    def on_after_batch_transfer(self, batch: Prepared, dataloader_idx: int) -> PairedBatch:
        """Run the models where the batch is now."""
        return self.reader.read(batch)

    def loader(self, split: Split, *, shuffle: bool = False, **options: Any) -> DataLoader:
        """Make a loader of one split's texts, with this rank's share of each batch.

        Fitting texts come without the rows of held-out types, and a text with no other rows does not come at all.

        Args:
            split: which texts.
            shuffle: a new order every epoch, the same for every number of ranks.
            options: `only`, `batch_size` and `first_epoch` of `load`.
        """
        texts = (
            cast(TokenisedSplits, self._other).texts.test
            if split == "other"
            else getattr(self.texts, split)
        )
        data = self._marked(split, texts, leave_out=split == "fit")
        if data.leave_out and any(bool(marks.flat.all()) for marks in data.marks.values()):
            raise UserError(
                f"Expected `held_out_types` to leave rows to fit on, but {self.held_out_types:g} of the types hold out "
                "all of them. Give a smaller share, or more text."
            )
        return self.load(data, shuffle=shuffle, sites=self.wanted_sites(), **options)

    def paired(self, split: Split, **options: Any) -> Iterator[PairedBatch]:
        """Iterate over the paired rows of a split, batch by batch, on the device of the first model.

        Args:
            split: which texts.
            options: of `loader`.

        Examples:
            >>> data = pair_states("embedded:0", "embedded:1", sites="blocks")  # doctest: +SKIP
            >>> for batch in data.paired("fit", only=100):  # doctest: +SKIP
            ...     print(batch.x.shape, batch.y.shape)  # (S, N, d_x) and (S, N, d_y)
        """
        return self.batches(split, **options)

    def train_dataloader(self) -> DataLoader:
        """The fitting texts; after an interruption, from the batch that was next.

        Their moments have been read in the order of epoch 0: training begins with that of epoch 1.
        """
        return self.resumable(self.loader("fit", shuffle=True, first_epoch=1))

    def val_dataloader(self) -> Sequence[DataLoader]:
        """The validation texts, and as many of the fitting texts to set beside them.

        Under a `trainer.limit_val_batches` of so many batches, these have the first texts, not the longest.
        """
        larger, count = WITHOUT_GRADIENTS * self.batch_size, len(self.split("validation"))
        limit = getattr(self.trainer, "limit_val_batches", 1.0)
        if isinstance(limit, int) and limit:
            count = min(count, limit * larger)
        return [
            self.loader(split, only=count, batch_size=larger) for split in ("validation", "fit")
        ]

    def test_dataloader(self) -> list[DataLoader]:
        """The texts of `splits`; of the fitting texts as many as are held out."""
        self.complete_store(self.splits)
        count = len(self.split("test"))
        return [self.loader(split, only=count if split == "fit" else None) for split in self.splits]
