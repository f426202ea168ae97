"""The LightningDataModule that streams all layers of any number of frozen models over the same text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.far_marks import FarMarks
from aligners.datamodules.frozen_models import with_revisions
from aligners.datamodules.module import TextModule
from aligners.datamodules.rows.far import FarRows
from aligners.datamodules.rows.policies import (
    RowKind,
    RowPolicy,
    Rows,
    check_rows,
    one_tokenizer_for,
    policy_of,
    rows_of_kind,
)
from aligners.datamodules.rows.read_rows import (
    Prepared,
    choose_rows,
    gather_rows,
    read_rows,
)
from aligners.datamodules.rows.sites import parse_layers
from aligners.datamodules.text.recorded_texts import check_reading
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError, check_known
from aligners.models.architectures import Component
from aligners.models.calling import FiniteCheck
from aligners.models.model import FrozenModel, Inputs
from aligners.models.recorded.source_names import all_recorded


@dataclass
class LayerBatch:
    """All layers of M models on one batch of B texts, and where the N rows came from.

    Attributes:
        texts: the tokenised batch: inputs and words of each model.
        rows: where the rows of each model came from.
        states: for each model (L_m, N, d_m), float32; row n is the same word, token or text in all of them. A model
            that is named twice has the same object twice; one whose layers are not wanted has (0, N, d_m).
        attention: for each model the weights of its blocks 1, 2, ..., each (B, H_m, T_m, T_m), from the token of the
            third axis to that of the fourth, zero at padding; none for a model whose layers are not wanted; None unless
            they are read.
        whole: where rows that are far from all others are left out, the same batch with them, marked in `rows[0].far`.
    """

    texts: TextBatch
    rows: tuple[Rows, ...]
    states: list[Tensor]
    attention: list[list[Tensor]] | None = None
    whole: "LayerBatch | None" = None

    @property
    def text(self) -> Tensor:
        """Id of the text of each row, (N,); the rows of a text are adjacent."""
        return self.texts.text[self.rows[0].owner]

    @property
    def token(self) -> Tensor:
        """Number of each row among those of its text, 0, 1, ..., (N,): the same for any batching and padding.

        Words are counted among those that all models have, tokens among those that count; a text's only row is 0.
        """
        return self.rows[0].place

    @property
    def counterpart(self) -> "LayerBatch":
        """The batch with far rows, if they were left out, or without them, if kept; itself, if it has none."""
        far = self.rows[0].far
        if self.whole is not None:
            return self.whole
        if far is None:
            return self
        rows = tuple(of_model.without(far) for of_model in self.rows)
        return self.only((~far).nonzero()[:, 0], rows)

    def only(self, numbers: Tensor, rows: tuple[Rows, ...]) -> "LayerBatch":
        """Return some of the rows, by their numbers (N',); what was one object stays one."""
        selected: dict[int, Tensor] = {}
        for states in self.states:
            if id(states) not in selected:
                selected[id(states)] = states.index_select(1, numbers)
        by_model = [selected[id(states)] for states in self.states]
        return LayerBatch(self.texts, rows, by_model, self.attention)


@dataclass(eq=False)
class LayerReader:
    """Reads the same rows of M frozen models at all wanted layers, running each model's blocks once.

    Args:
        models: the models; one may be listed several times and is read once.
        layers: layers of each model.
        kind: kind of the rows.
        attention: also read the attention weights of every block.
        component: states of the residual stream, or what the attention or the feed-forward layer of a block adds.
        leave_out_far: whether rows that are far from all others are left out; otherwise they are marked.

    Raises:
        ValueError: a model does not have a layer.
    """

    models: Sequence[FrozenModel]
    layers: Sequence[Sequence[int]]
    kind: RowKind
    attention: bool = False
    component: Component = "residual"
    leave_out_far: bool = True

    def __post_init__(self) -> None:
        for model, wanted in zip(self.models, self.layers, strict=True):
            for layer in wanted:
                model.check_site(layer, "layers", self.component)
        self.check = FiniteCheck()

    def prepare(self, texts: TextBatch) -> Prepared:
        """Choose the rows of each model while the batch is on the CPU."""
        rows = choose_rows(texts, self.kind, leave_out_far=self.leave_out_far)
        return Prepared(texts, rows)

    def read(
        self, prepared: Prepared, layers: Sequence[Sequence[int]] | None = None
    ) -> LayerBatch:
        """Run the models on the batch's device, if their states do not come from a store, and gather the rows.

        Args:
            prepared: the batch.
            layers: layers to read of each model, none for a model that is not needed; default: all wanted ones.

        Raises:
            ValueError: the states of an earlier batch were not finite; `check.flush()` looks at the last one.
        """
        chosen = prepared.chosen
        texts = prepared.texts
        results: dict[tuple[int, tuple[int, ...]], tuple[Tensor, list[Tensor]]] = {}
        states = []
        attention = []
        for number, wanted in enumerate(layers or self.layers):
            model = self.models[number]
            key = id(model), tuple(wanted)
            if key not in results:
                rows = chosen.read[number]
                results[key] = self._read_model(model, texts, number, rows, wanted)
            of_model, weights = results[key]
            states.append(of_model)
            attention.append(weights)

        batch = LayerBatch(texts, chosen.read, states)
        if self.attention:
            batch.attention = attention
        if chosen.near is None:
            return batch
        near = batch.only(chosen.near, chosen.rows)
        near.whole = batch
        return near

    def read_model(
        self,
        model: FrozenModel,
        batch: LayerBatch,
        m: int,
        layers: Sequence[int] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Read another model in place of one, for example its untrained twin.

        Args:
            model: has the tokenizer of model m, and is on the batch's device.
            batch: a batch that was read.
            m: number of the model whose inputs it gets.
            layers: layers to read; default: all that are wanted of model m.

        Returns:
            Its rows at the layers (L_m, N, d), and the attention weights (B, H, T, T) of each block, if they are read.

        Raises:
            ValueError: the model does not have a layer; or as in `read`.
        """
        if layers is None:
            layers = self.layers[m]
        return self._read_model(model, batch.texts, m, batch.rows[m], layers)

    def _with_attention(
        self, model: FrozenModel, inputs: Inputs, layers: Sequence[int], rows: Rows
    ) -> tuple[Tensor, list[Tensor]]:
        """Run a model, and return its rows at some layers (L, N, d), and its attention weights."""
        wanted = sorted(set(layers))
        with torch.no_grad():
            weights, read = model.attention(inputs, wanted, self.component)
        by_layer = dict(zip(wanted, read, strict=True))
        return gather_rows(by_layer, layers, rows, model.width), weights

    def _read_model(
        self,
        model: FrozenModel,
        texts: TextBatch,
        number: int,
        rows: Rows,
        layers: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Read some rows of a model at some layers, and its attention weights if they are wanted."""
        weights: list[Tensor] = []
        if not layers:
            device = rows.index.device
            return torch.empty(0, len(rows), model.width, device=device), weights
        inputs = texts.inputs[number]
        if self.attention:
            states, weights = self._with_attention(model, inputs, layers, rows)
        else:
            stored = texts.stored.get(model)
            states = read_rows(model, inputs, layers, rows, self.component, stored)
        names = [f"layer {layer} of {model.name}" for layer in layers]
        self.check.watch(states, names, "states", texts.number)
        return states, weights


class LayerActivations(TextModule):
    """Turns text into the same rows of all layers of M frozen models, read on the device that computes the measures.

    A batch is a `LayerBatch`: `states` (L_m, N, d_m) of each model, `text` and `token` of each row, the batch's
    `number`, with `attention=True` also the attention weights and the words of all tokens. The batches of a split, and
    their numbers, are the same for any number of ranks: rank r of w reads the whole batches r, r + w, ... `seed` draws
    their texts, as far as similar lengths in a batch allow. Minibatch measures depend on `batch_size`.

    Args:
        models: Hub ids, local folders, or `embedded:SEED` for small BERTs that are trained on the fitting texts the
            first time they are needed and kept in `cache`; `embedded:SEED:layers=6,width=96` is of another size.
            `embedded-gpt:SEED`, `embedded-mlm:SEED` and `embedded-sentences:SEED` are small language models, causal,
            masked, and masked text by text, which need no labels. `states:FILE` are recorded states. One or more;
            widths, depths and tokenizers may differ.
        layers: which layers of every model: `all` (0..L), `blocks` (1..L), or a list of numbers. 0 is the embedding
            output, l the output of block l before any final norm, L + 1 the output of the final norm.
        rows: `words`: the last piece of every word of a text, `words_first`: its first, `words_mean`: the mean over its
            pieces; a word is a run of characters without white space, and a row only where every model has it in
            full. The default, because it works for any models. `tokens`: every real token, for models of equal
            tokenizers; `mean`: the mean over a text's tokens; `cls`: its first token.
        special_tokens: whether [CLS], [SEP] and the like count as rows, for `tokens` and `mean`. Words have none.
        attn_implementation: eager, sdpa, flash_attention_2; default: what transformers chooses, eager for attention.
        revisions: revision of each model on the Hub.
        attention: also read the attention weights of all blocks.
        component: what is read at a layer: `residual`, the stream between the blocks; `attention` or `mlp`, what that
            sub-layer of block l adds to it. Sub-layers have no layer 0.
        far_rows: `leave_out`: leave out a row if, for any model and layer read, it is more than five times as far from
            the median row as half of the rows are (ten times for what sub-layers add). In language models the first
            token of a text is such a row; a few of them hold nearly all of the variance, and make all models look
            alike. `keep`: they count like any other. Values with and without them are reported either way.
        options: options of `TextModule` and `FrozenModels`, by their names.

    Raises:
        ValueError: an option is out of its range, or attention is to be read from an implementation that has none.
    """

    option = "layers"

    def __init__(
        self,
        models: list[str] = ["embedded:0", "embedded:1"],  # noqa: B006  (copied)
        layers: str | list[int] = "all",
        rows: RowPolicy = "words",
        special_tokens: bool = False,
        attn_implementation: str | None = None,
        revisions: list[str | None] | None = None,
        attention: bool = False,
        component: Component = "residual",
        far_rows: FarRows = "leave_out",
        **options: Any,
    ) -> None:
        check_known(get_args(FarRows), far_rows=far_rows)
        if attention and attn_implementation not in (None, "eager"):
            raise UserError(
                f"Expected `attn_implementation` 'eager' where `attention` is read, but got {attn_implementation!r}: "
                "other implementations never compute the weights. Leave it out."
            )
        if attention:
            attn_implementation = "eager"
        recorded = all_recorded(models)
        if attention and recorded:
            raise UserError(
                f"`attention` is read from models, but {models[0]} is recorded states. Leave it out."
            )
        rows = rows_of_kind(rows, recorded=recorded)
        words = attention or policy_of(rows).types == "words"
        named = with_revisions(models, revisions)
        check_reading(named, {**options, "attn_implementation": attn_implementation})
        alike = one_tokenizer_for(rows)
        super().__init__(
            named, words, alike, attn_implementation=attn_implementation, **options
        )
        check_rows(rows, component, self.packed)
        if attention and self.packed:
            raise UserError(
                "`attention` is read between whole words, but a sequence of `packed` text has no whole "
                "words. Leave one of them out."
            )
        self.models = list(models)
        self.revisions = revisions
        self.layers = layers
        self.rows = rows
        self.special_tokens = special_tokens
        self.attention = attention
        self.component = component
        self.far_rows = far_rows
        self.storable = not (attention or recorded)
        self.far = FarMarks(self)
        self._planned: list[Sequence[Sequence[int]] | None] = [None]
        self._placed_for: int | None = None

    def wanted(self, depths: Sequence[int]) -> list[list[int]]:
        """The layers to read of each model."""
        return [parse_layers(self.layers, depth, self.component) for depth in depths]

    @property
    def kinds_read(self) -> Sequence[RowKind]:
        """The kinds of rows that are read: the one of `rows`."""
        return [RowKind(self.rows, self.special_tokens)]

    @cached_property
    def reader(self) -> LayerReader:
        """The models and their layers, loaded on first use."""
        (kind,) = self.kinds_read
        leave_out = self.far_rows == "leave_out"
        return LayerReader(
            self.frozen,
            self.wanted_sites(),
            kind,
            self.attention,
            self.component,
            leave_out,
        )

    def config(self) -> dict[str, Any]:
        """Return the options as plain values, from which an equal data module can be made."""
        return {
            "models": self.models,
            "layers": self.layers,
            "revisions": self.revisions,
            **self._options(),
            **super().config(),
        }

    def describe(self) -> dict[str, Any]:
        """Describe texts, models and rows for a report, as plain values."""
        return {
            "models": self.identities(),
            "layers": self.reader.layers,
            **self._options(),
            **super().describe(),
        }

    def _options(self) -> dict[str, Any]:
        """What is read, as the user says it."""
        return {
            "attention": self.attention,
            "component": self.component,
            "rows": self.rows,
            "special_tokens": self.special_tokens,
            "far_rows": self.far_rows,
        }

    def keep_far(self) -> None:
        """Keep far rows from now on, for evaluations that need every row of a text."""
        self.far_rows = "keep"
        self.reader.leave_out_far = False

    def plan(
        self,
        splits: Sequence[Split] = ("test",),
        layers: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """Choose the splits that `test_dataloader` loads, one after the other, and the layers read on each.

        Args:
            splits: splits to load; one may come several times.
            layers: for each split, the layers to read of each model, none for a model that is not needed: on a GPU it
                then waits on the CPU. Default: all wanted layers of all models.
        """
        self.splits = tuple(splits)
        self._placed_for = None
        self._planned = [None] * len(splits) if layers is None else list(layers)

    def loader(
        self,
        split: Split,
        *,
        shuffle: bool = True,
        layers: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> DataLoader:
        """Make a loader of this rank's batches of a split, in the same order every time.

        Args:
            split: which texts.
            shuffle: whether `seed` draws the order; otherwise the longest texts come first.
            layers: layers of each model whose states come along from a store; default: all wanted ones.
            options: `only` and `batch_size` of `load`.
        """
        sites = layers or self.wanted_sites()
        data = self.split(split)
        if any(sites):
            far = self.far.of(split, self.kinds_read)
            data = data.marked({}, leave_out=False, far=far)
        return self.load(data, shuffle=shuffle, whole=True, sites=sites, **options)

    def test_dataloader(self) -> list[DataLoader]:
        """Load the texts of `splits`, as planned for each."""
        self.complete_store(self.splits)
        planned = zip(self.splits, self._planned, strict=True)
        return [self.loader(split, layers=layers) for split, layers in planned]

    # ------------------------------------------------------------------ Lightning's hooks

    def place_models(self, device: torch.device | str) -> None:
        """Leave each model where it is until a batch needs it: the models of a plan may not all fit on a GPU."""

    def on_before_batch_transfer(
        self, batch: TextBatch, dataloader_idx: int
    ) -> Prepared:
        """Choose the rows while the batch is still on the CPU."""
        self._place(dataloader_idx)
        return self.reader.prepare(batch)

    def on_after_batch_transfer(
        self, batch: Prepared, dataloader_idx: int
    ) -> LayerBatch:
        """Run the models where the batch is now."""
        return self.reader.read(batch, self._planned[dataloader_idx])

    def _place(self, dataloader_idx: int) -> None:
        """Move the models that a split of the plan reads to their devices, and the others to the CPU."""
        if self.trainer is None or self._placed_for == dataloader_idx:
            return
        planned = self._planned[dataloader_idx]
        needed = None
        if planned is not None:
            needed = [m for m, layers in enumerate(planned) if layers]
        self.frozen_models.place(self.trainer.strategy.root_device, needed)
        self._placed_for = dataloader_idx
