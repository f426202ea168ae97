"""Makes the updates of a sentence model that `updates.yaml` lists: model folders.

    python -m benchmarks.updates.models REAL --folder UPDATES [--only NAME ...]

REAL is what `benchmarks/real/models.py` made. UPDATES/NAME are then ordinary model folders; what exists stays.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers import get_linear_schedule_with_warmup as warmed_up

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.files.atomic import whole_folder
from aligners.models.loading.model_files import quiet, save_model
from benchmarks.updates.texts import GENRES, SETTINGS, Text, divided

CLASSES = {"sst2": 2, "genre": len(GENRES)}


def batches(
    texts: Sequence[Text], seed: int, recipe: dict[str, Any]
) -> Iterator[list[Text]]:
    """Every text once an epoch, in an order of the seed."""
    for epoch in range(recipe["epochs"]):
        order = torch.randperm(
            len(texts), generator=torch.Generator().manual_seed(seed + 1000 * epoch)
        ).tolist()
        for start in range(0, len(order), recipe["batch"]):
            yield [texts[i] for i in order[start : start + recipe["batch"]]]


def train(
    model: nn.Module,
    texts: list[Text],
    loss: Callable[[list[Text]], Tensor],
    update: dict,
    recipe: dict,
) -> None:
    """AdamW with a warm-up over a tenth of the steps and a linear decay, dropout on."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe["rate"], weight_decay=0.01)
    steps = recipe["epochs"] * -(-len(texts) // recipe["batch"])
    schedule = warmed_up(optimizer, steps // 10, steps)
    model.train()
    for step, batch in enumerate(batches(texts, update["seed"], recipe)):
        value = loss(batch)
        value.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"  step {step} of {steps}: loss {value.item():.3f}", flush=True)
    model.eval()


def finetuned(
    base: Path, tokenizer: Any, parts: dict[str, list[Text]], update: dict[str, Any]
) -> Any:
    """All weights, or adapters that are merged into them, trained to classify."""
    task, recipe = update["task"], SETTINGS[update["kind"]]
    with quiet():
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=CLASSES[task]
        )
    if update["kind"] == "lora":
        adapter = LoraConfig(
            task_type="SEQ_CLS",
            r=recipe["rank"],
            lora_alpha=recipe["alpha"],
            target_modules=recipe["modules"],
        )
        model = get_peft_model(model, adapter)

    def loss(batch: list[Text]) -> Tensor:
        inputs = tokenizer(
            [text["text"] for text in batch], padding=True, return_tensors="pt"
        )
        return model(
            **inputs, labels=torch.tensor([text["labels"][task] for text in batch])
        ).loss

    train(model, parts[f"finetune_{task}"], loss, update, recipe)
    return model.merge_and_unload() if update["kind"] == "lora" else model


def pretrained(
    base: Path, tokenizer: Any, parts: dict[str, list[Text]], update: dict[str, Any]
) -> Any:
    """Masked words predicted on other text, under a fresh head."""
    recipe = SETTINGS["pretrain"]
    with quiet():
        model: Any = AutoModelForMaskedLM.from_pretrained(base)
    drawn = torch.Generator().manual_seed(update["seed"])

    def loss(batch: list[Text]) -> Tensor:
        inputs = tokenizer(
            [text["text"] for text in batch], padding=True, return_tensors="pt"
        )
        ids = inputs["input_ids"]
        free = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
        hidden = (torch.rand(ids.shape, generator=drawn) < recipe["masked"]) & free
        kind = torch.rand(ids.shape, generator=drawn)
        seen = ids.masked_fill(hidden & (kind < 0.8), tokenizer.mask_token_id)
        anything = torch.randint(len(tokenizer), ids.shape, generator=drawn)
        seen = torch.where(hidden & (kind > 0.9), anything, seen)
        states = model.bert(
            input_ids=seen, attention_mask=inputs["attention_mask"]
        ).last_hidden_state
        return cross_entropy(model.cls(states[hidden]), ids[hidden])

    train(model, parts["pretrain"], loss, update, recipe)
    return model


@torch.no_grad()
def rounded(
    base: Path, tokenizer: Any, parts: dict[str, list[Text]], update: dict[str, Any]
) -> Any:
    """Weights as bfloat16 keeps them; or matrices as int8 does, with one scale a row."""
    model = AutoModel.from_pretrained(base)
    for weight in model.parameters():
        if update["kind"] == "bfloat16":
            weight.copy_(weight.bfloat16().float())
        elif weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            weight.copy_((weight / scale).round() * scale)
    return model


@torch.no_grad()
def edited(
    base: Path, tokenizer: Any, parts: dict[str, list[Text]], update: dict[str, Any]
) -> Any:
    """One matrix of one block plus the product of two random directions, as large as its largest singular value."""
    model, edit = AutoModel.from_pretrained(base), SETTINGS["edit"]
    weight = model.encoder.layer[edit["block"] - 1].output.dense.weight
    drawn = torch.Generator().manual_seed(update["seed"])
    out, into = (torch.randn(size, generator=drawn) for size in weight.shape)
    size = edit["strength"] * torch.linalg.matrix_norm(weight, 2)
    weight += size * torch.outer(out / out.norm(), into / into.norm())
    return model


MAKERS = {
    "full": finetuned,
    "lora": finetuned,
    "pretrain": pretrained,
    "int8": rounded,
    "bfloat16": rounded,
}


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("real", type=Path, help="folder of benchmarks.real.models")
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the updates go"
    )
    parser.add_argument(
        "--only", nargs="+", default=list(SETTINGS["updates"]), help="names of updates"
    )
    options = parser.parse_args()
    parts = divided(options.real / "data", options.folder / "texts.json")
    base = options.real / "models" / "minilm"
    tokenizer = AutoTokenizer.from_pretrained(base)
    for name in options.only:
        if not (options.folder / name).is_dir():
            print(name, flush=True)
            update = SETTINGS["updates"][name]
            torch.manual_seed(update.get("seed", 0))
            with whole_folder(options.folder / name) as unfinished:
                save_model(
                    unfinished,
                    MAKERS.get(update["kind"], edited)(base, tokenizer, parts, update),
                    tokenizer,
                )


if __name__ == "__main__":
    main()
