"""The LightningDataModule that streams paired activations of two frozen models over labelled text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader

from aligners.models.architectures import Component
from datamodules.batches import TextBatch
from datamodules.frozen_models import Wanted
from datamodules.module import PAIRS_TOKENS, WITHOUT_GRADIENTS, TextModule, check_rows
from datamodules.pipeline import TextPipeline
from datamodules.rows.policies import RowPolicy, policy_of
from datamodules.rows.reading import PairedBatch, PairReader, Plan, Prepared
from datamodules.rows.sites import parse_sites
from datamodules.rows.types import RowTypes, SeenTypes, types_of
from datamodules.store.stores import Reads
from datamodules.text.label_names import LabelsOption
from datamodules.text.texts import Texts
from datamodules.tokens.splits import Split, TokenisedSplits
from datamodules.tokens.tokenised import TokenisedTexts

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["PairedActivations"]


class PairedActivations(TextModule):
    """Turns text into paired rows of two frozen models, read on the device where the aligner is.

    Args:
        model_x: X: a Hub id, a local folder, or `embedded:SEED` for a small BERT that is trained on the fitting
            texts when it is first needed and kept in `cache`; `embedded:SEED:layers=6,width=96` for one that departs
            from `recipe`. `embedded-gpt:SEED` and `embedded-mlm:SEED` are small causal and masked language
            models, which need no labels; `embedded-gpt:SEED:activation=solu` is one with SoLU.
        model_y: Y, likewise.
        sites: `all` (0..L), `blocks` (1..L), or layers and pairs: `1,3:5` is site 1 of both and X's 3 with Y's 5.
            Site 0 is the embedding output, site l the output of block l before any final norm.
        rows: `tokens`: every real token, for models of equal tokenizers; `mean`: the mean over a text's tokens;
            `cls`: its first token; `words`, `words_first`, `words_mean`: the last piece, the first, or the mean over
            the pieces of every word, for any two models. A word is a run of characters without white space.
        special_tokens: whether [CLS], [SEP] and the like count as rows. Injection replaces them too. Words have none.
        revision_x: revision of X on the Hub.
        revision_y: revision of Y on the Hub.
        labels: which classes of a head answer each class of the texts, where their names do not say, by number or name:
            {"entailment": 0, "not_entailment": [1, 2]}. Several are added. One map, or a list of one for each model.
        component: what is read at a site: `residual`, the stream between the blocks; `attention` or `mlp`, what that
            sub-layer of block l adds to it. Sub-layers have no site 0.
        held_out_types: share of the token types (of the word types, where rows are words) whose rows no map is fitted
            on, so that an evaluation can tell a map from a vocabulary. A hash of the type's name with `text.seed`
            chooses them; special tokens are never among them. Their neighbours' states are still fitted on, and these
            have seen them in context. Means and first tokens of texts have no types.
        options: of `TextPipeline` and `FrozenModels`, by their names: `text`, `batch_size`, `max_length`, `packed`,
            `seed`, `workers`, `store`, `store_dtype`, `dtype`, `attn_implementation`, `trust_remote_code`, `recipe`,
            `cache`, `devices`, `device_map`.

    Raises:
        ValueError: an option is out of its range.
    """

    option = "sites"

    def __init__(
        self,
        model_x: str = "embedded:0",
        model_y: str = "embedded:1",
        sites: str | list[str | int] = "all",
        rows: RowPolicy = "tokens",
        special_tokens: bool = True,
        revision_x: str | None = None,
        revision_y: str | None = None,
        labels: LabelsOption = None,
        component: Component = "residual",
        held_out_types: float = 0.1,
        **options: Any,
    ) -> None:
        if not 0 <= held_out_types < 1:
            raise ValueError(f"Expected `held_out_types` to be a share in [0, 1), but got {held_out_types}.")
        super().__init__()
        self.model_x, self.model_y = model_x, model_y
        self.revision_x, self.revision_y = revision_x, revision_y
        self.sites, self.rows, self.special_tokens, self.component = sites, rows, special_tokens, component
        self.labels, self.held_out_types = labels, held_out_types
        wanted = Wanted(self._named(), one_tokenizer=PAIRS_TOKENS if rows == "tokens" else None)
        self.pipeline = TextPipeline(wanted, policy_of(rows).types == "words", **options)
        check_rows(rows, component, self.pipeline.packed)
        self._seen: SeenTypes | None = None
        self._reader: PairReader | None = None
        self._plan = Plan()
        self._other: Texts | None = None
        self._tokenised_other: TokenisedSplits | None = None

    def _named(self) -> list[tuple[str, str | None]]:
        """Name and revision of each model."""
        return [(self.model_x, self.revision_x), (self.model_y, self.revision_y)]

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The sites of X and of Y."""
        pairs = parse_sites(self.sites, depths[0], depths[1], self.component)
        return [sorted({pair[m] for pair in pairs}) for m in (0, 1)]

    def reads(self) -> Reads | None:
        """The states at all sites of both models."""
        return Reads(self.wanted([model.depth for model in self.frozen]), self.component)

    @property
    def reader(self) -> PairReader:
        """The two models and the site pairs, loaded on first use."""
        if self._reader is None:
            model_x, model_y = self.frozen
            pairs = parse_sites(self.sites, model_x.depth, model_y.depth, self.component)
            self._reader = PairReader(model_x, model_y, pairs, self.rows, self.special_tokens, self.component)
        return self._reader

    def check_models(self) -> None:
        """Load the models, with every check that can be made before reading."""
        _ = self.reader

    def plan(self, plan: Plan) -> None:
        """Choose what an evaluation reads from now on.

        Raises:
            ValueError: as `TextPipeline.other` does.
        """
        self._plan = replace(plan, kinds=[kind for kind in plan.kinds if kind != self.reader.kind])
        kinds = (self.reader.kind, *self._plan.kinds)
        self.pipeline.read_words(any(kind.types == "words" for kind in kinds))
        self._other, self._tokenised_other = None, None
        if plan.other is not None:
            other = self.pipeline.other(plan.other)
            unlabelled = [name for name in other.test.column_names if name != "label"]
            self._other = replace(other, test=other.test.select_columns(unlabelled))
        further: dict[Split, bool] = {"other": plan.other is not None, "fit": plan.fitting}
        self.splits = ("test", *(split for split, wanted in further.items() if wanted))

    def describe_other(self) -> dict[str, Any]:
        """Describe the other source of text for a report, as plain values."""
        if self._other is None:
            return {}
        described = self._other.describe()
        dropped = described.get("left_out", {"texts": 0})["texts"]
        return {"other_text": {**described, "dropped_as_fitted_on": dropped, "n_texts": len(self._other.test)}}

    def split(self, name: Split) -> TokenisedTexts:
        """A split, tokenised for both models."""
        if name != "other":
            return super().split(name)
        if self._tokenised_other is None:
            self._tokenised_other = self.pipeline.tokenise(cast(Texts, self._other))
        return self._tokenised_other["test"]

    def _as_text(self, split: Split) -> Dataset:
        return cast(Texts, self._other).test if split == "other" else getattr(self.texts, split)

    def describe(self) -> dict[str, Any]:
        """Describe texts, models and rows for a report, as plain values."""
        reader, types = self.reader, policy_of(self.rows).types
        return {
            "models": {"x": reader.model_x.identity(), "y": reader.model_y.identity()},
            "sites": [list(pair) for pair in reader.sites],
            "component": self.component,
            "rows": self.rows,
            "special_tokens": self.special_tokens,
            **self.pipeline.describe(),
            "types": types or f"rows {self.rows!r} have none, and none are held out",
            "held_out_types": self.held_out_types if types else 0.0,
        }

    # ------------------------------------------------------------------ types

    @property
    def seen(self) -> SeenTypes:
        """The types of the fitting rows."""
        if self._seen is None:
            types = types_of(self.reader.kind, self.split("fit"), self.texts.fit, self.pipeline.models.tokenizers[0])
            self._seen = types.seen(self.held_out_types, self.text.seed) if types else SeenTypes(None, frozenset())
        return self._seen

    def mark(self, data: TokenisedTexts, texts: Dataset, *, leave_out: bool = False) -> TokenisedTexts:
        """Mark the rows of unseen types in the batches of a split.

        Args:
            data: tokenised as the splits of this module are.
            texts: the same as text.
            leave_out: whether the texts are to be fitted on, without such rows.
        """
        seen = self.seen if self._plan.measured is None or leave_out else self._plan.measured
        marks = {}
        for kind in [self.reader.kind] if leave_out else [self.reader.kind, *self._plan.kinds]:
            if seen.kind is not None and kind.types == seen.kind:
                types = cast(RowTypes, types_of(kind, data, texts, self.pipeline.models.tokenizers[0]))
                marks[kind] = types.unseen(seen)
        return data.marked(marks, leave_out=leave_out)

    # ------------------------------------------------------------------ Lightning's hooks

    def on_before_batch_transfer(self, batch: TextBatch, dataloader_idx: int) -> Prepared:
        """Choose the rows while the batch is still on the CPU."""
        held_out = self.splits[dataloader_idx : dataloader_idx + 1] == ("test",)
        asking = self._plan.asking if held_out else None
        return self.reader.prepare(batch, self._plan.kinds, asking)

    def on_after_batch_transfer(self, batch: Prepared, dataloader_idx: int) -> PairedBatch:
        """Run the models where the batch is now."""
        return self.reader.read(batch)

    def loader(
        self,
        split: Split,
        *,
        shuffle: bool = False,
        only: int | None = None,
        batch_size: int | None = None,
        first_epoch: int = 0,
    ) -> DataLoader:
        """Make a loader of one split's texts, with this rank's share of each batch.

        Fitting texts come without the rows of held-out types, and a text with no other rows does not come at all.

        Args:
            split: which texts.
            shuffle: a new order every epoch, the same for every number of ranks.
            only: how many texts, from the first on; default: all.
            batch_size: texts a step; default: that of the data module.
            first_epoch: the first epoch has the order of this number.
        """
        data = self.mark(self.split(split), self._as_text(split), leave_out=split == "fit")
        if data.leave_out and any(bool(marks.flat.all()) for marks in data.marks.values()):
            raise ValueError(
                f"Expected `held_out_types` to leave rows to fit on, but {self.held_out_types:g} of the types hold out "
                "all of them. Give a smaller share, or more text."
            )
        given: dict[str, Any] = {"only": only, "batch_size": batch_size, "first_epoch": first_epoch}
        given["reads"] = self.reads()
        return self.pipeline.loader(data, self.trainer, shuffle=shuffle, **given)

    def paired(self, split: Split, **options: Any) -> Iterator[PairedBatch]:
        """Iterate over the paired rows of a split, batch by batch, on the device of X.

        Args:
            split: which texts.
            options: of `loader`.

        Example:
            >>> data = PairedActivations("embedded:0", "embedded:1", sites="blocks")  # doctest: +SKIP
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
        """The validation texts, and as many of the fitting texts to set beside them."""
        larger = WITHOUT_GRADIENTS * self.batch_size
        count = len(self.split("validation"))
        return [self.loader("validation", batch_size=larger), self.loader("fit", only=count, batch_size=larger)]

    def test_dataloader(self) -> list[DataLoader]:
        """The texts of `splits`; of the fitting texts as many as are held out."""
        self.complete_store(self.splits)
        count = len(self.split("test"))
        return [self.loader(split, only=count if split == "fit" else None) for split in self.splits]
