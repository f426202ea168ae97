"""Front of X and tail of Y against one full forward, and against running both models in full under hooks."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.models import FrozenModel
from benchmarks.harness import Figures, interleaved, parser_with_sizes, ratio
from benchmarks.parts import bert_config


def build(width: int, layers: int, seed: int, device: str) -> FrozenModel:
    """A random BERT classifier of the usual proportions."""
    torch.manual_seed(seed)
    return FrozenModel(
        BertForSequenceClassification(bert_config(4096, layers, width)),
        name=f"bert-{width}-{seed}",
    ).to(device)


def with_plain_hooks(
    x: FrozenModel, y: FrozenModel, inputs: dict[str, Tensor], site: int
) -> Tensor:
    """Stitching as hooks alone do it: both models run in full. Returns the logits."""
    read: list[Tensor] = []

    def keep(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        read.append(output)

    def replace(block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return read[0]

    handles = [
        x.blocks[site - 1].register_forward_hook(keep),
        y.blocks[site - 1].register_forward_hook(replace),
    ]
    try:
        x.model(**inputs)
        return y.model(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()


def main() -> None:
    """Run the benchmark."""
    arguments = parser_with_sizes(__doc__, layers=12, batch=16)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)

    x, y = (
        build(options.width, options.layers, seed, options.device) for seed in (0, 1)
    )
    lengths = torch.linspace(options.tokens // 2, options.tokens, options.batch).round()
    mask = torch.arange(options.tokens) < lengths[:, None]
    inputs = {
        "input_ids": torch.randint(5, 4096, mask.shape).to(options.device),
        "attention_mask": mask.long().to(options.device),
    }
    site = options.layers // 2

    def stitched() -> Tensor:
        return y.tail(inputs, site, x.front(inputs, [site])[0])

    with torch.inference_mode():
        if not torch.equal(stitched(), with_plain_hooks(x, y, inputs, site)):
            raise RuntimeError(
                "The stitched forward and plain hooks disagree: their times mean nothing."
            )
        seconds = interleaved(
            {
                "full forward": lambda: y.model(**inputs),
                "head + tail": stitched,
                "plain hooks": lambda: with_plain_hooks(x, y, inputs, site),
            },
            rounds=options.rounds,
            device=options.device,
        )
    figures = Figures(options.device)
    figures.add_times(seconds)
    figures.add(
        "head + tail / full forward",
        ratio(seconds, "head + tail", "full forward"),
        bar=1.15,
    )
    figures.add(
        "plain hooks / full forward", ratio(seconds, "plain hooks", "full forward")
    )
    figures.write(options.json)


if __name__ == "__main__":
    main()
