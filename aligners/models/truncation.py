"""Surgery on blocks: smaller models, and frozen weights.

Merchant et al. 2020, section 5.2; Wu et al. 2020, Table 1.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aligners.errors import UserError
from aligners.models.architectures import architecture_of
from aligners.models.hooks import Blocks, blocks_of, read, trunk_of

KeptLayers = Literal["bottom", "top", "layers"]


def shortened(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A copy with the bottom `layers` blocks only, and a config that says so: to be trained, saved and loaded.

    What lies above the blocks (final norm, pooler, head) comes along unchanged. A shared block is run fewer times.

    Raises:
        ValueError: `layers` is outside 1..L, or the family does not let the number of blocks alone be changed: several
            shared blocks, or a config from which another model would follow.
    """
    check_count(model, "layers", layers)
    # Parameters that do not train and those that do are copied alike.
    short = copy.deepcopy(model)
    architecture = architecture_of(model.config.model_type)
    settings = architecture.settings_of(short.config)
    settings.num_hidden_layers = layers
    if getattr(settings, "layer_types", None):
        with suppress(AttributeError):  # which follow from other settings
            settings.layer_types = settings.layer_types[:layers]
    if not architecture.shared:
        del blocks_of(short).listed[layers:]
    with torch.device("meta"):
        expected = type(short)(copy.deepcopy(short.config))
    shapes = [{name: value.shape for name, value in kind.state_dict().items()} for kind in (expected, short)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"A config of {layers} layers does not describe a {type(model).__name__} whose upper blocks are left out: "
            "saved, it could not be loaded again. `evaluate.py surgery` truncates models without a config."
        )
    return short


def freeze(model: PreTrainedModel, kind: KeptLayers, count: int) -> None:
    """Freeze blocks in place, by `requires_grad`. Their dropout stays on, as in the papers.

    Args:
        model: the model, its other parameters left as they are.
        kind: `bottom`: the bottom blocks, with all that the states up to there depend on: the embeddings, and what
            blocks share (Merchant et al., Figure 3). `top`: the top blocks; what lies above them trains (Wu et al.,
            Table 1).
        count: how many blocks. 0 bottom ones: the embeddings alone.

    Raises:
        ValueError: the number is outside 0..L, or it would freeze a part of what shared blocks run.
    """
    check_count(model, kind, count)
    blocks = blocks_of(model)
    for part in _below(model, blocks, count) if kind == "bottom" else blocks[len(blocks) - count :]:
        part.requires_grad_(False)


def freeze_unused(model: PreTrainedModel, logits: Tensor) -> None:
    """Freeze weights that have no part in the answer, in place, by `requires_grad`.

    XLNet has such weights: its mask embedding, and its segments if the tokenizer gives none. They never get a
    gradient, for which several ranks would wait.

    Args:
        model: the model.
        logits: its output, with gradients, for a batch like those of the training.
    """
    used = _reached(logits, [weight for weight in model.parameters() if weight.requires_grad])
    model.requires_grad_(False)
    for weight in used:
        weight.requires_grad_(True)


def check_count(model: PreTrainedModel, kind: KeptLayers, count: int) -> None:
    """Raise what `freeze` and `shortened` would, before anything is changed.

    Raises:
        ValueError: `count` is out of range, or blocks are shared.
    """
    blocks, least = blocks_of(model), 1 if kind == "layers" else 0
    if not least <= count <= len(blocks):
        raise UserError(
            f"Expected `{kind}` between {least} and L = {len(blocks)}, the blocks of this {type(model).__name__}, "
            f"but got {count}."
        )
    shared = len(blocks.listed) < len(blocks)
    if shared and kind != "layers" and count not in (0, len(blocks)):
        raise UserError(
            f"Expected `{kind}` of 0 or {len(blocks)}, but got {count}: a {type(model).__name__} runs the same block "
            "several times, so that either all of its layers train or none."
        )
    if shared and kind == "layers" and len(blocks.listed) > 1:
        raise UserError(
            f"Expected one shared block, but got a {type(model).__name__} with {len(blocks.listed)}: which one is run "
            "when follows from the number of layers, so that fewer layers are another model."
        )


def _below(model: PreTrainedModel, blocks: Blocks, site: int) -> list[nn.Parameter]:
    """The parameters that the state at `site` depends on, and all parameters of the blocks up to there.

    Autograd finds them, because families keep relative positions and projections of embeddings in different places.
    """
    weights = [weight for weight in model.base_model.parameters() if weight.requires_grad]
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.enable_grad():
        state = read(blocks, [site], lambda: trunk_of(model)(input_ids=tokens))[site]
    return _reached(state, weights) + [weight for block in blocks[:site] for weight in block.parameters()]


def _reached(answer: Tensor, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The weights that `answer` depends on, by its graph."""
    if not answer.requires_grad:
        return []
    gradients = torch.autograd.grad(answer.float().sum(), weights, allow_unused=True)
    return [weight for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None]
