"""What has to be known about a model family to read and replace its states: one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedConfig

__all__ = ["Architecture", "Task", "architecture_of", "known_architectures", "register"]

Task = Literal["classification", "causal", "masked"]
_HEADS: dict[str, Task] = {
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "masked",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
}


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps its blocks and how they talk to each other.

    A block takes its states as first argument or as `hidden_states`, and answers with a tensor or with a
    sequence whose first item they are.

    Attributes:
        blocks: path of the list of blocks from the trunk, dotted.
        trunk: path from the base model of the part that runs the blocks, dotted; empty: the base model itself.
        returns: length of the tuple that a block returns, its states first; None: it returns a bare tensor.
        beside: what a block that is not run returns beside its states, from the block and the arguments that
            it is called with; None: nothing, `returns - 1` times.
        causal: whether a position sees only those before it.
        shared: whether the listed blocks are run several times each, one after another, `num_hidden_layers`
            times in all.
        sequence_first: whether the states between the blocks are (T, B, d) instead of (B, T, d).
        padding: the side on which padding is harmless: the other end of a row is where positions are counted
            from or what the classifier reads.
        rereads: whether what lies above the blocks reads the text again, as a decoder does. No answer then
            follows from the states alone, and no head counts.
        token_types: whether token types are passed on; a family may take them and have none of its own.
        bare: arguments that build the bare encoder without the modules above the last site. Nobody reads
            them, and a checkpoint that lacks them would have them filled with noise.
        bare_class: what loads the bare encoder.
        reserved_positions: how many rows of the position embeddings no token ever takes.
        without: settings of a config with which this entry does not hold.
    """

    blocks: str
    trunk: str = ""
    returns: int | None = None
    beside: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, ...]] | None = None
    causal: bool = False
    shared: bool = False
    sequence_first: bool = False
    padding: Literal["left", "right"] = "right"
    rereads: bool = False
    token_types: bool = True
    bare: Mapping[str, Any] = field(default_factory=dict)
    bare_class: Any = AutoModel
    reserved_positions: int = 0
    without: tuple[str, ...] = ()

    def task(self, kind: str) -> Task | None:
        """What the head of a model class of this family answers; None: it has none that is supported.

        A next-token head on blocks that see the next token predicts nothing: it does not count as one.
        """
        task = next((task for end, task in _HEADS.items() if kind.endswith(end)), None)
        return None if self.rereads or (task == "causal" and not self.causal) else task

    def answer(self, block: nn.Module, states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `block`, called with these arguments, would return if its states were `states`."""
        if self.returns is None:
            return states
        if self.beside is None:
            return (states, *[None] * (self.returns - 1))
        return (states, *self.beside(block, args, kwargs))

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse a config for which the entry does not hold.

        Raises:
            ValueError: naming the setting.
        """
        for name in self.without:
            if getattr(config, name, None):
                raise ValueError(
                    f"Expected a {config.model_type!r} model without `{name}`, received one with {name} = "
                    f"{getattr(config, name)}: with it, what frozen/architectures.py says of the family does not hold. "
                    "Name another model."
                )


_ARCHITECTURES: dict[str, Architecture] = {}


def register(model_type: str, architecture: Architecture) -> None:
    """Make a family known under the `model_type` of its configs; a known one is replaced."""
    _ARCHITECTURES[model_type] = architecture


def known_architectures() -> list[str]:
    """The registered values of `model_type`, sorted."""
    return sorted(_ARCHITECTURES)


def architecture_of(model_type: str) -> Architecture:
    """Look a family up.

    Raises:
        ValueError: if nobody has registered `model_type`.
    """
    if model_type not in _ARCHITECTURES:
        raise ValueError(
            f"Expected a `model_type` out of {', '.join(known_architectures())}, received {model_type!r}. "
            "Register it in one line: "
            f"frozen.architectures.register({model_type!r}, Architecture(blocks='path.to.blocks')); "
            "`FrozenModel.self_test` then says whether its states can be replaced."
        )
    return _ARCHITECTURES[model_type]


def _position_bias(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, None]:
    """T5's first block makes the position bias, from the length alone, and all others hand it on."""
    states, _, bias = args[:3]
    attention = block.layer[0].SelfAttention
    if bias is None and attention.has_relative_attention_bias:
        bias = attention.compute_bias(states.shape[1], states.shape[1], device=states.device)
    return bias, None


_NO_POOLER = {"add_pooling_layer": False}
_ENCODER = ("is_decoder",)

register("albert", Architecture("encoder.albert_layer_groups", shared=True, bare=_NO_POOLER))
register("bert", Architecture("encoder.layer", bare=_NO_POOLER, without=_ENCODER))
# With a convolution beside block 1, what it answers is not all that reaches block 2.
register("deberta-v2", Architecture("encoder.layer", returns=2, without=("conv_kernel_size",)))
register("distilbert", Architecture("transformer.layer"))
register("electra", Architecture("encoder.layer", without=_ENCODER))
register("gemma2", Architecture("layers", causal=True))
register("gemma3_text", Architecture("layers", causal=True, without=("use_bidirectional_attention",)))
# These two would look token types up among the words.
register("gpt2", Architecture("h", causal=True, token_types=False))
register("openai-gpt", Architecture("h", returns=1, causal=True, token_types=False))
register("gpt_neox", Architecture("layers", causal=True))
register("llama", Architecture("layers", causal=True))
register("mistral", Architecture("layers", causal=True))
register("modernbert", Architecture("layers"))
register("opt", Architecture("decoder.layers", causal=True))
register("phi", Architecture("layers", causal=True))
register("qwen2", Architecture("layers", causal=True))
register("qwen3", Architecture("layers", causal=True))
# These three number positions from one past the padding index, which is 1.
register("mpnet", Architecture("encoder.layer", returns=1, bare=_NO_POOLER, reserved_positions=2))
register("roberta", Architecture("encoder.layer", bare=_NO_POOLER, reserved_positions=2, without=_ENCODER))
register("xlm-roberta", Architecture("encoder.layer", bare=_NO_POOLER, reserved_positions=2, without=_ENCODER))
register(
    "t5",
    Architecture(
        "block",
        trunk="encoder",
        returns=3,
        beside=_position_bias,
        rereads=True,
        bare_class=AutoModelForTextEncoding,
    ),
)
# Positions are relative; the classifier reads the end of the row.
register("xlnet", Architecture("layer", returns=2, sequence_first=True, padding="left"))
