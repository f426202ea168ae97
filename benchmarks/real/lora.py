"""Fine-tunes a language model by LoRA on the film reviews, from several seeds: adapters beside an unchanged base.

    python -m benchmarks.real.lora MODEL --run FOLDER --seeds 2

writes FOLDER/seed-0, FOLDER/seed-1, ...: adapters as peft saves them, which name the folder of their base.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.files.atomic import whole_folder

UNREAD = -100  # what transformers' losses leave out


def tuned(base: Path, seed: int, steps: int, rows: int, rate: float) -> PeftModel:
    """A model with an adapter that has seen `steps` batches of `rows` texts."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=16, task_type="CAUSAL_LM"),
    )
    texts = list(load_texts(TextSource("rotten_tomatoes")).fit["text"])
    order = torch.randperm(
        len(texts), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=rate
    )
    for step in range(steps):
        drawn = [texts[i] for i in order[step * rows : (step + 1) * rows]]
        ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in drawn]
        labels = pad_sequence(ids, batch_first=True, padding_value=UNREAD)
        read = labels != UNREAD
        loss = model(
            input_ids=labels.where(read, 0), attention_mask=read.long(), labels=labels
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(
                f"seed {seed}, step {step} of {steps}: loss {loss.item():.3f}",
                flush=True,
            )
    return model


def main() -> None:
    """Fine-tune what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of the adapters"
    )
    parser.add_argument("--seeds", type=int, default=2, help="how many adapters")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=8, help="texts a step")
    parser.add_argument(
        "--rate", type=float, default=5e-4, help="learning rate of AdamW"
    )
    options = parser.parse_args()
    for seed in range(options.seeds):
        folder = options.run / f"seed-{seed}"
        if not folder.is_dir():
            model = tuned(
                options.model.resolve(), seed, options.steps, options.rows, options.rate
            )
            with whole_folder(folder) as unfinished:
                model.save_pretrained(str(unfinished))


if __name__ == "__main__":
    main()
