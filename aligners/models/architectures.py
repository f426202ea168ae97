"""Model families, as architectures.yaml lists them: what reading and replacing their states requires."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForTextEncoding, PreTrainedConfig
from transformers.activations import ACT2FN

from aligners.errors import UserError, did_you_mean
from aligners.files.yaml_tables import table_beside


def solu(x: Tensor) -> Tensor:
    """LayerNorm(x · softmax(x)) over the last axis, without gain and bias; x (..., d), the result likewise.

    Elhage et al. 2022 (Softmax Linear Units, Transformer Circuits Thread) put a LayerNorm after the activation, because
    x · softmax(x) alone is small and costs performance. Where an affine map follows, as in the MLP of GPT-2, it absorbs
    a gain γ and a bias β exactly (W(γ·z + β) + b = (Wγ)z + (Wβ + b)), so that nothing is lost by leaving them out.
    """
    product = x * torch.softmax(x, -1)
    return nn.functional.layer_norm(product, x.shape[-1:])


class SoLU(nn.Module):
    """`solu` as a module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """LayerNorm(x · softmax(x)), (..., d) to (..., d)."""
        return solu(x)


def register_solu() -> None:
    """Register the activation with `transformers` as "solu", so that configs can name it."""
    ACT2FN["solu"] = SoLU


Task = Literal["classification", "causal", "masked"]
Component = Literal["residual", "attention", "mlp"]
# what a block returns besides its states, from the block and the arguments that it is called with
Beside = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class SubLayer:
    """The module whose output a sub-layer adds to the stream, before the addition and any norm that follows it.

    Attributes:
        path: from the block, dotted.
        calls: number of calls by a block in one run; the last output counts.
        without: config settings under which several modules make up the output.
    """

    path: str
    calls: int = 1
    without: Sequence[str] = ()


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps its blocks, and how they pass states on.

    A block takes its states as first argument or as `hidden_states`, and answers with a tensor or with a
    sequence whose first item they are.

    Attributes:
        blocks: path of the list of blocks from the trunk, dotted.
        trunk: path from the base model of the part that runs the blocks, dotted; empty: the base model itself.
        returns: length of the tuple that a block returns, its states first; None: it returns a bare tensor.
        beside: what a block that is not run returns besides its states, from the block and the arguments that
            it is called with; None: nothing, `returns - 1` times.
        causal: whether these are decoders, whose heads predict the next token and whose classifiers read the last one.
            Whether a position sees those after it is asked of each model: `FrozenModel.causal`.
        shared: whether the listed blocks are run several times each, one after another, `num_hidden_layers`
            times in all.
        sequence_first: whether the states between the blocks are (T, B, d) instead of (B, T, d).
        padding: the side on which padding is harmless: the other end of a row is where positions are counted
            from or what the classifier reads.
        rereads: whether what lies above the blocks reads the text again, as a decoder does. Its answer does not
            follow from the states alone, so no head is supported.
        token_types: whether to pass token types; a family may accept them without having embeddings for them.
        bare: arguments that build the bare encoder without the modules above the last site, which are never used
            and which a checkpoint without them would leave randomly initialised.
        bare_class: the class that loads the bare encoder.
        settings: name of the part of the config that describes the trunk; empty: the config itself.
        without: config settings for which this entry does not hold, and why.
        attention: what a block's attention adds to the stream; None if unknown.
        mlp: what its feed-forward layer adds; None if unknown.
        norm: path from the trunk of the final norm, which a head may follow but no block; empty: there is none.
    """

    blocks: str
    trunk: str = ""
    returns: int | None = None
    beside: Beside | None = None
    causal: bool = False
    shared: bool = False
    sequence_first: bool = False
    padding: Literal["left", "right"] = "right"
    rereads: bool = False
    token_types: bool = True
    bare: Mapping[str, Any] = field(default_factory=dict)
    bare_class: Any = AutoModel
    settings: str = ""
    without: Mapping[str, str] = field(default_factory=dict)
    attention: SubLayer | None = None
    mlp: SubLayer | None = None
    norm: str = ""

    def task(self, kind: str, config: PreTrainedConfig) -> Task | None:
        """Return the task of a model class's head; None if it has no supported head.

        A next-token head counts on decoders alone.

        Args:
            kind: name of the class.
            config: configuration of the model. An encoder may be made to be a decoder by it.
        """
        if self.rereads:
            return None
        decoder = self.causal or getattr(self.settings_of(config), "is_decoder", False)
        for end, task in _HEADS.items():
            if kind.endswith(end):
                return None if task == "causal" and not decoder else task
        return None

    def answer(
        self,
        block: nn.Module,
        states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what `block`, called with these arguments, would return if its states were `states`."""
        if self.returns is None:
            return states
        if self.beside is None:
            return (states, *[None] * (self.returns - 1))
        return (states, *self.beside(block, args, kwargs))

    def settings_of(self, config: PreTrainedConfig) -> Any:
        """Return the part of a config that describes the trunk: of a model of text and images, the language model's."""
        if not self.settings:
            return config
        return getattr(config, self.settings)

    def check(self, config: PreTrainedConfig) -> None:
        """Raise if the entry does not hold for a config.

        Raises:
            ValueError: naming the setting.
        """
        settings = self.settings_of(config)
        for name, reason in self.without.items():
            if getattr(settings, name, None):
                raise UserError(
                    f"Expected a {config.model_type!r} model without `{name}`, but got one with {name} = "
                    f"{getattr(settings, name)}: {reason}. Name another model."
                )

    def sub_layer(self, component: Component, config: PreTrainedConfig) -> SubLayer:
        """Where to find the output of a component other than the residual stream.

        Raises:
            ValueError: there is no such component, or its place is not known for this family or config.
        """
        if component not in ("attention", "mlp"):
            raise UserError(
                f"Expected `component` to be residual, attention or mlp, but got {component!r}."
            )
        place: SubLayer | None = getattr(self, component)
        if place is None:
            raise UserError(
                f"Expected a `component` that is known for {config.model_type!r} models, but got {component!r}. Say "
                f"in the family's entry where it is: Architecture(..., {component}=SubLayer('path.from.block'))."
            )
        for setting in place.without:
            value = getattr(config, setting, None) or 0
            if value <= _SINGLE[setting]:
                continue
            raise UserError(
                f"Expected a `component` that one module of a block computes, but got {component!r} of a "
                f"{config.model_type!r} model with {setting} = {value}, which computes it in parts. "
                f"Set {setting} to {_SINGLE[setting]}, or read the residual stream."
            )
        return place


def first_site(component: Component) -> int:
    """The lowest site of a component: 0 for the stream, whose input is a site; 1 for a sub-layer."""
    return 0 if component == "residual" else 1


def register(model_type: str, architecture: Architecture) -> None:
    """Register a family under the `model_type` of its configs, in place of any earlier entry."""
    _ARCHITECTURES[model_type] = architecture


def known_architectures() -> list[str]:
    """The registered values of `model_type`, sorted."""
    return sorted(_ARCHITECTURES)


def architecture_of(model_type: str) -> Architecture:
    """Look a family up.

    Raises:
        ValueError: `model_type` is not registered.
    """
    if model_type in REFUSED and model_type not in _ARCHITECTURES:
        raise UserError(
            f"Expected a model whose states can be replaced, but got a {model_type!r} model: {REFUSED[model_type]}."
        )
    if model_type not in _ARCHITECTURES:
        raise UserError(
            f"Expected a model of a known family, but got one of `model_type` {model_type!r}."
            f"{did_you_mean([model_type], _ARCHITECTURES)} If its blocks are a list, register the family in one line "
            f"of a file that `--imports+` names: aligners.models.architectures.register({model_type!r}, "
            "Architecture('layers', causal=True)), with the path of that list from the base model, and `causal` of "
            "decoders only; `FrozenModel.self_test` then checks whether its states can be replaced. Known are "
            f"{', '.join(known_architectures())}."
        )
    return _ARCHITECTURES[model_type]


def _position_bias(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor | None, None]:
    """Return the position bias that T5's first block computes from the length alone, and the others pass on."""
    states, _, bias = args[:3]
    attention = block.layer[0].SelfAttention
    if bias is None and attention.has_relative_attention_bias:
        length = states.shape[1]
        bias = attention.compute_bias(length, length, device=states.device)
    return bias, None


# Settings that split a sub-layer into several calls, and the largest value at which they do not.
_SINGLE = {"chunk_size_feed_forward": 0, "inner_group_num": 1}


def _entry(about: Mapping[str, Any]) -> Architecture:
    """Make the architecture that a row of the table describes."""
    about = dict(about)
    for name in ("attention", "mlp"):
        if about.get(name):
            about[name] = SubLayer(**about[name])
    entry = Architecture(**about)
    if not entry.rereads:
        return entry
    beside = _position_bias if entry.returns else None
    return replace(entry, beside=beside, bare_class=AutoModelForTextEncoding)


_TABLE = table_beside(__file__, "architectures.yaml")
_HEADS: dict[str, Task] = _TABLE["heads"]
_ARCHITECTURES: dict[str, Architecture] = {}
for _name, _about in _TABLE["families"].items():
    register(_name, _entry(_about))
REFUSED: dict[str, str] = _TABLE["refused"]  # `model_type` -> why
FAMILIES = tuple(_ARCHITECTURES)  # the `model_type` of each
