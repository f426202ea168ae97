"""Models that compute what another computes, in other coordinates of the residual stream: what every map must find."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel, PreTrainedModel

from aligners.models.loading.model_files import quiet, save_model

__all__ = ["permute_bert", "permuted", "rotate_llama", "rotated"]

READERS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
WRITERS = "self_attn.o_proj", "mlp.down_proj"


def permute_bert(model: PreTrainedModel, order: Tensor) -> None:
    """Put the features of a BERT's states in another order, everywhere; its answers stay.

    Args:
        model: a bare BERT, changed in place.
        order: (d,), the old number of each new feature.
    """
    inputs = ("query.weight", "key.weight", "value.weight", "intermediate.dense.weight")
    outputs = (
        "output.dense.weight",
        "output.dense.bias",
        "LayerNorm.weight",
        "LayerNorm.bias",
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(inputs) or "_embeddings." in name:
                weight.copy_(weight[:, order])
            elif name.endswith(outputs):
                weight.copy_(weight[order])


def rotate_llama(model: PreTrainedModel, rotation: Tensor) -> None:
    """Rotate the states of a Llama, x becoming x @ rotation; its answers stay, to rounding.

    The gains of its norms go into the matrices that read what they give, since a norm with equal gains commutes with
    rotations. The embeddings are then no longer those of the head.

    Args:
        model: with a language modelling head of its own weights, float64, changed in place.
        rotation: (d, d), orthogonal.
    """
    stack = model.model
    with torch.no_grad():
        stack.embed_tokens.weight.copy_(stack.embed_tokens.weight @ rotation)
        for block in stack.layers:
            norms = (block.input_layernorm, block.post_attention_layernorm)
            for norm, readers in zip(norms, READERS, strict=True):
                for reader in map(block.get_submodule, readers):
                    reader.weight.copy_(reader.weight * norm.weight @ rotation)
                norm.weight.fill_(1)
            for writer in map(block.get_submodule, WRITERS):
                writer.weight.copy_(rotation.T @ writer.weight)
        model.lm_head.weight.copy_(model.lm_head.weight * stack.norm.weight @ rotation)
        stack.norm.weight.fill_(1)


def permuted(source: Path, folder: Path) -> None:
    """Write a BERT with its features in a random order."""
    with quiet():
        model = BertModel.from_pretrained(source, add_pooling_layer=False)
    permute_bert(
        model,
        torch.randperm(
            model.config.hidden_size, generator=torch.Generator().manual_seed(0)
        ),
    )
    save_model(folder, model, AutoTokenizer.from_pretrained(source))


def rotated(source: Path, folder: Path) -> None:
    """Write a Llama with its states turned by a random rotation."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    width, generator = model.config.hidden_size, torch.Generator().manual_seed(0)
    rotate_llama(
        model,
        torch.linalg.qr(
            torch.randn(width, width, generator=generator, dtype=torch.float64)
        ).Q,
    )
    save_model(folder, model.float(), AutoTokenizer.from_pretrained(source))
