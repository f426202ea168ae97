"""Tiny language models whose first token's states are some hundred times as large as all others."""

from pathlib import Path

import torch
from tests.tiny import tiny_model, tiny_tokenizer

SIZE = 300.0  # of the first position's embedding, where the others have a length of about 1


def sink_folder(folder: Path, *, seed: int, layers: int = 3, width: int = 16) -> Path:
    """A causal GPT-2 with a sink, and its tokenizer, saved as a model folder."""
    model = tiny_model("gpt2", seed=seed, layers=layers, width=width, task="causal")
    positions = model.get_submodule("transformer.wpe")
    draw = torch.Generator().manual_seed(seed)
    positions.weight.data[0] = SIZE * torch.nn.functional.normalize(torch.randn(width, generator=draw), dim=0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
