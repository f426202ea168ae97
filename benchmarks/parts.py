"""What several benchmarks run on: models of random weights, and a Trainer that does nothing besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import BertConfig, LlamaConfig

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["bare_trainer", "bert_config", "llama_config"]


def bert_config(
    vocabulary: int, layers: int, width: int, *, head: int = 64, factor: int = 4
) -> BertConfig:
    """A BERT of this size.

    Args:
        vocabulary: number of tokens.
        layers: number of blocks.
        width: of the states.
        head: width of an attention head.
        factor: width of the hidden layers, in units of `width`.
    """
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // head),
        intermediate_size=factor * width,
    )


def llama_config(
    vocabulary: int, layers: int, width: int, *, head: int = 64
) -> LlamaConfig:
    """A Llama of this size, a key and a value for every four heads, without a cache."""
    heads = max(1, width // head)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        intermediate_size=11 * width // 4,
        pad_token_id=0,
        use_cache=False,
    )


def bare_trainer(device: str = "cpu", **changes: Any) -> pl.Trainer:
    """A Trainer on one device, without a logger, checkpoints or anything on the screen."""
    import lightning.pytorch as pl  # not every machine that runs benchmarks has it

    silent = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary"), False
    )
    callbacks = changes.get("callbacks", ())
    saving = any(
        isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks
    )
    own = {"accelerator": device, "devices": 1, "enable_checkpointing": saving}
    return pl.Trainer(**{**own, **silent, **changes})
