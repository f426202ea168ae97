"""Paired rows per second: our reading, the two bare forwards over the same batches, and padding to one length.

Reading is every site of both models, gathered into (S, N, d). The bare forwards give nothing but the time that
the two models themselves need. Padding to one length is what an extraction loop with `padding="max_length"` and
`output_hidden_states=True` does. Texts are random tokens with the lengths of sentences.
"""

import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.batches import LengthBatches, TextBatch
from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.rows.read_rows import Link, PairReader
from aligners.models import FrozenModel
from benchmarks.harness import Figures, interleaved, parser, ratio
from benchmarks.stitched_forward import build


def texts(count: int, longest: int) -> list[Tensor]:
    """Random texts whose lengths are spread as those of film-review sentences: about 27 tokens, up to 70."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.gamma(5.0, 5.4, count).round(), 4, longest).astype(int)
    return [torch.from_numpy(draw.integers(5, 4096, n)) for n in lengths]


def batch_of(chosen: list[Tensor], width: int, device: str) -> TextBatch:
    """The texts as one batch, padded to `width`."""
    ids = torch.stack(
        [torch.nn.functional.pad(text, (0, width - len(text))) for text in chosen]
    )
    mask = torch.stack([torch.arange(width) < len(text) for text in chosen])
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
    return TextBatch((inputs, inputs), (~mask, ~mask), torch.arange(len(chosen)))


def padded(models: list[FrozenModel], batch: TextBatch, mask: Tensor) -> list[Tensor]:
    """The rows of both models by way of `output_hidden_states`."""
    found = []
    for model in models:
        states = model.model.base_model(
            **batch.inputs_x, output_hidden_states=True
        ).hidden_states
        found.append(torch.stack([state[mask] for state in states]))
    return found


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--batches", type=int, default=6)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)

    models = [
        build(options.width, options.layers, seed, options.device) for seed in (0, 1)
    ]
    reader = PairReader(
        models,
        [Link(0, 1, site, site) for site in range(options.layers + 1)],
        RowKind("tokens"),
    )
    every = texts(options.batch * options.batches, 128)
    order = LengthBatches([len(text) for text in every], options.batch, shuffle=True)
    groups = [[every[i] for i in rows] for rows in order]
    on_cpu = [batch_of(group, max(map(len, group)), "cpu") for group in groups]
    prepared = [reader.prepare(batch).to(options.device) for batch in on_cpu]
    wide = [
        batch_of([every[i] for i in rows], 128, options.device)
        for rows in np.array_split(range(len(every)), options.batches)
    ]
    masks = [batch.inputs_x["attention_mask"].bool() for batch in wide]

    def read() -> None:
        for batch in on_cpu:
            reader.read(reader.prepare(batch).to(options.device))

    @torch.inference_mode()
    def bare() -> None:
        for ready in prepared:
            for model in models:
                model.model.base_model(**ready.texts.inputs_x)

    @torch.inference_mode()
    def one_length() -> None:
        for batch, mask in zip(wide, masks, strict=True):
            padded(models, batch, mask)

    ours = torch.cat([reader.read(parts).x for parts in prepared], 1)
    theirs = torch.cat(
        [
            padded(models, batch, mask)[0]
            for batch, mask in zip(wide, masks, strict=True)
        ],
        1,
    )
    if ours.shape != theirs.shape or not torch.allclose(
        ours.double().sum(1), theirs.double().sum(1), atol=1e-2
    ):
        raise RuntimeError(
            "Reading and padding to one length give different rows: their times mean nothing."
        )

    seconds = interleaved(
        {"reading": read, "bare forwards": bare, "padded to 128": one_length},
        rounds=options.rounds,
        device=options.device,
    )
    figures = Figures(options.device)
    figures.add_times(seconds)
    figures.add(
        "paired rows per second and site",
        ours.shape[1] / statistics.median(seconds["reading"]),
    )
    figures.add(
        "rows/s, reading / bare forwards",
        ratio(seconds, "bare forwards", "reading"),
        bar=0.90,
        sense=">=",
    )
    figures.add(
        "rows/s, reading / padded to 128",
        ratio(seconds, "padded to 128", "reading"),
        bar=2.0,
        sense=">=",
    )
    figures.write(options.json)


if __name__ == "__main__":
    main()
