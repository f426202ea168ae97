"""How far an implementation of attention, or bfloat16, moves the states of a model.

Each model reads the same sentences with eager attention in float32, each by itself: that is the reference. Then with
other implementations and precisions, alone and in batches that are padded on the right and on the left. At each site,
the largest difference of an entry from the reference, and the root of the mean squared difference, are taken over the
deviation of all entries there; the largest over the sites is printed. FlashAttention needs a GPU, and is left out
without one.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.frozen_models import FrozenModels
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.errors import UserError
from aligners.models import FrozenModel
from benchmarks.harness import Figures, parser


def rows(
    model: FrozenModel, sentences: list[str], batch: int, side: str
) -> list[Tensor]:
    """The states of all real tokens at each site, (N, d) each, from batches of so many sentences."""
    found: list[list[Tensor]] = [[] for _ in range(model.depth + 1)]
    tokenizer = model.tokenizer
    assert tokenizer is not None
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for start in range(0, len(sentences), batch):
        inputs = tokenizer(
            sentences[start : start + batch],
            padding=True,
            padding_side=side,
            return_tensors="pt",
            truncation=True,
        )
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            for site, states in enumerate(model.front(given, range(model.depth + 1))):
                found[site].append(states[given["attention_mask"].bool()].float())
    return [torch.cat(states) for states in found]


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "models",
        nargs="*",
        default=["embedded:0", "embedded-gpt:0"],
        help="names or folders",
    )
    arguments.add_argument("--source", default="rotten_tomatoes")
    arguments.add_argument("--texts", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=32)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    texts, figures = TextSource(options.source), Figures(options.device)
    sentences = list(
        load_texts(TextSource(options.source, max_texts=options.texts)).fit["text"]
    )
    kinds = [
        "eager",
        "sdpa",
        *(["flash_attention_2"] if options.device != "cpu" else []),
    ]
    for name in options.models:
        reference: list[Tensor] = []
        for dtype in ("float32", "bfloat16"):
            for kind in kinds if dtype == "bfloat16" else kinds[:2]:
                named, load = [(name, None)], partial(load_texts, texts)
                try:
                    loading = FrozenModels(
                        named,
                        None,
                        load,
                        max_length=2,
                        dtype=dtype,
                        attn_implementation=kind,
                    )
                    model = loading.loaded[0].to(options.device)
                except (
                    UserError
                ) as error:  # a family that transformers has no such implementation for
                    print(f"{Path(name).name}, {kind}: {str(error)[:160]} ...")
                    continue
                for side, batch in (
                    ("alone", 1),
                    ("right", options.batch),
                    ("left", options.batch),
                ):
                    found = rows(
                        model, sentences, batch, "right" if side == "alone" else side
                    )
                    if not reference:
                        reference = found
                        continue
                    moved = [
                        (a - b, b.std()) for a, b in zip(found, reference, strict=True)
                    ]
                    what = f"{Path(name).name}, {kind}, {dtype}, {'alone' if batch == 1 else f'padded on the {side}'}"
                    figures.add(
                        f"{what}: largest",
                        max(float(each.abs().max() / scale) for each, scale in moved),
                    )
                    figures.add(
                        f"{what}: mean",
                        max(
                            float(each.square().mean().sqrt() / scale)
                            for each, scale in moved
                        ),
                    )
    figures.write(options.json)


if __name__ == "__main__":
    main()
