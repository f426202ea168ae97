"""Models of random weights and texts of random tokens: nothing to download."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)

from aligners.datamodules.batches import LengthBatches, TextBatch
from aligners.datamodules.rows.policies import RowKind, Rows, select_rows
from aligners.datamodules.rows.read_rows import Link, PairReader, Prepared
from aligners.models import FrozenModel
from benchmarks.activations import batch_of, texts
from benchmarks.on_gpu.device import Device
from benchmarks.parts import bert_config, llama_config

VOCABULARY = 4_096  # of `texts`


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
        config: from the vocabulary, the number of blocks and the width.
        bare: the model without a head.
        headed: with one.
    """

    config: Callable[..., Any]
    bare: Callable[..., Any]
    headed: Callable[..., Any]


KINDS = {
    "BERT": Kind(
        bert_config,
        partial(BertModel, add_pooling_layer=False),
        BertForSequenceClassification,
    ),
    "Llama": Kind(llama_config, LlamaModel, LlamaForCausalLM),
}
FULL = {"BERT": (12, 768), "Llama": (16, 2048)}  # blocks and width
SMALL = {"BERT": (2, 32), "Llama": (2, 64)}


def made(
    kind: str,
    small: bool,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    headed: bool = False,
    layers: int | None = None,
    seed: int = 0,
) -> FrozenModel:
    """A model whose weights are drawn from the seed, on its device: drawing a billion on a CPU takes long."""
    torch.manual_seed(seed)
    about, (usual, width) = KINDS[kind], (SMALL if small else FULL)[kind]
    config = about.config(VOCABULARY, layers or usual, width, head=16 if small else 64)
    with torch.device(device):
        model = (about.headed if headed else about.bare)(config)
    return FrozenModel(rounded(model, dtype), name=f"{kind} of width {width}")


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights in this data type, and all else in float32, as `from_pretrained` loads it."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


class Reading:
    """Reads all sites of a model on batches of texts, as a command does.

    Args:
        model: on this device.
        device: where.
        count: texts.
        size: texts of a batch.
        longest: tokens of a text.
    """

    def __init__(
        self,
        model: FrozenModel,
        device: Device,
        count: int,
        size: int,
        longest: int = 128,
    ) -> None:
        self.model, self.device = model, device
        links = [Link(0, 0, site, site) for site in range(model.depth + 1)]
        self._reader = PairReader([model], links, RowKind("tokens"))
        every = texts(count, longest)
        order = LengthBatches([len(text) for text in every], size, shuffle=True)
        groups = [[every[i] for i in rows] for rows in order]
        on_cpu = [batch_of(group, max(map(len, group)), "cpu") for group in groups]
        self.batches = (
            [batch.pin_memory() for batch in on_cpu] if device.gpu else on_cpu
        )
        self.there = [batch.to(device.name) for batch in self.batches]

    def _moved(self, batch: TextBatch) -> Prepared:
        return self._reader.prepare(batch).to(
            self.device.name, non_blocking=self.device.gpu
        )

    def read(self) -> None:
        """Read every batch and keep nothing."""
        for batch in self.batches:
            self._reader.read(self._moved(batch))

    def states(self) -> Tensor:
        """The rows of all batches, (S, N, d) float32."""
        found = torch.cat(
            [self._reader.read(self._moved(batch)).x for batch in self.batches], 1
        )
        self._reader.check.flush()
        return found

    @torch.inference_mode()
    def bare(self) -> None:
        """The model's own forward pass of every batch, which is on the device already."""
        for batch in self.there:
            self.model.model(**batch.inputs_x)


def padded(
    model: FrozenModel, count: int, longest: int, shortest: int
) -> tuple[dict[str, Tensor], Rows]:
    """Texts of these lengths, the same for every model, on its device; and their real tokens."""
    ids = torch.randint(
        5, VOCABULARY, (count, longest), generator=torch.Generator().manual_seed(0)
    )
    mask = (
        torch.arange(longest) < torch.linspace(shortest, longest, count)[:, None]
    ).long()
    rows = select_rows(mask, torch.zeros_like(mask).bool(), "tokens").to(model.device)
    return {
        "input_ids": ids.to(model.device),
        "attention_mask": mask.to(model.device),
    }, rows


def unlike(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected − its mean‖ over the rows (S, N, d) of the site where this is largest."""
    a, b = found.double(), expected.double()
    lost = (a - b).square().sum((1, 2)) / (b - b.mean(1, keepdim=True)).square().sum(
        (1, 2)
    )
    return float(lost.max().sqrt())
