"""Makes a later version of a sentence model: some contrastive steps on halves of IMDB reviews.

    python -m benchmarks.contrastive MODEL FOLDER --steps 40

Each step brings the vectors of the two halves of 16 reviews together and those of different reviews apart (InfoNCE,
temperature 0.05). The reviews are the last ones, which `benchmarks/migrating.py` does not use.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.text.loading import TextSource, load_texts
from aligners.files.atomic import whole_folder
from aligners.models.loading.model_files import quiet, save_model

REVIEWS = 16  # a step
WORDS = 40  # of each half
TOKENS = 48
TEMPERATURE = 0.05


def halves(count: int) -> list[tuple[str, str]]:
    """The beginnings of both halves of the last reviews, so many of them."""
    texts = load_texts(TextSource("imdb", seed=0)).fit["text"]
    pairs = []
    for text in texts[-count:]:
        words = text.split()
        middle = len(words) // 2
        first = " ".join(words[: min(WORDS, middle)])
        second = " ".join(words[middle : middle + WORDS])
        pairs.append((first, second))
    return pairs


def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Mean states of texts, scaled to length 1: (N, d)."""
    inputs = tokenizer(
        texts, truncation=True, max_length=TOKENS, padding=True, return_tensors="pt"
    )
    states = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None]
    means = (states * real).sum(1) / real.sum(1)
    return normalize(means, dim=1)


def train(model: Any, tokenizer: Any, steps: int, rate: float) -> None:
    """Take the steps, with dropout on."""
    pairs = halves(steps * REVIEWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for step in range(steps):
        batch = pairs[step * REVIEWS : (step + 1) * REVIEWS]
        firsts, seconds = map(list, zip(*batch, strict=True))
        first = embed(model, tokenizer, firsts)
        second = embed(model, tokenizer, seconds)
        logits = first @ second.T / TEMPERATURE
        loss = cross_entropy(logits, torch.arange(REVIEWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"  step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    model.eval()


def main() -> None:
    """Make the model, unless its folder exists."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a sentence model")
    parser.add_argument("folder", type=Path, help="where the later version goes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-4, help="of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="of dropout")
    options = parser.parse_args()
    if options.folder.is_dir():
        return
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with quiet():
        model = AutoModel.from_pretrained(options.model)
    train(model, tokenizer, options.steps, options.rate)
    with whole_folder(options.folder) as unfinished:
        save_model(unfinished, model, tokenizer)


if __name__ == "__main__":
    main()
