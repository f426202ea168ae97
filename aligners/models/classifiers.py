"""Classifiers to be trained: a base model with a new head, drawn by its own recipe; fewer blocks, and frozen ones."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from aligners.errors import UserError
from aligners.models.architectures import architecture_of
from aligners.models.hooks import Blocks, blocks_of, read, trunk_of
from aligners.models.loading.model_files import (
    listed,
    quiet,
    read_config,
    read_tokenizer,
    read_weights,
    weight_options,
)


def drawn(
    model: PreTrainedModel, names: Iterable[str], seed: int
) -> dict[str, nn.Module]:
    """Copy parts of a model, with weights drawn from `seed` on the CPU and then moved to the devices of the parts.

    No other random number is affected.

    Args:
        model: the model, which stays unchanged.
        names: paths of the parts, in the order of drawing.
        seed: seed of the weights.
    """
    originals = {name: model.get_submodule(name) for name in names}
    fresh = {name: copy.deepcopy(part).cpu() for name, part in originals.items()}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # A copied weight has lost transformers' mark of a loaded one, which would keep it as it is.
        for part in fresh.values():
            part.apply(model._init_weights)
    for mine, theirs in zip(_tensors(fresh), _tensors(originals), strict=True):
        mine.data = mine.data.to(theirs.device)
    return fresh


def _tensors(parts: Mapping[str, nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters and buffers of all parts."""
    for part in parts.values():
        yield from part.parameters()
        yield from part.buffers()


def outside(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules outside the base model, by path."""
    parts = {}
    for name, part in model.named_children():
        if part is not model.base_model:
            parts[name] = part
    return parts


def pooler_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the module between the last state and the head, by path; empty if there is none."""
    pooler = getattr(model.base_model, "pooler", None)
    if not isinstance(pooler, nn.Module):
        return {}
    return {f"{model.base_model_prefix}.pooler": pooler}


def head_parts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that turn states at the last site into classes, by path: the pooler and all outside the base.

    A final norm is not among them; it belongs to the body, as in the papers.
    """
    return outside(model) | pooler_of(model)


@contextmanager
def with_head(model: PreTrainedModel, parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Context in which these parts replace the model's own at the same paths."""
    originals = {name: model.get_submodule(name) for name in parts}
    try:
        for name, part in parts.items():
            model.set_submodule(name, part)
        yield
    finally:
        for name, part in originals.items():
            model.set_submodule(name, part)


def new_classifier(
    name: str | Path,
    n_labels: int,
    seed: int,
    *,
    label_names: Sequence[str] | None = None,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    loader: Any = AutoModelForSequenceClassification,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a base model under a classification head drawn from `seed`, in eval mode, with all weights trainable.

    The body has exactly the checkpoint's weights. The modules outside the base model are new, whichever head the
    checkpoint has, and so is the pooler if the checkpoint has none. They are drawn by the model's own recipe, on the
    CPU; no other random number is affected. A causal model without a padding token gets that of its tokenizer, or its
    end-of-text token.

    Args:
        name: Hub id, or a folder that `save_pretrained` wrote: a bare, masked or causal model, or a classifier.
        n_labels: number of classes, C; 1 for regression, which predicts a number.
        seed: the seed of the head.
        label_names: names of the classes, kept in the config; default: LABEL_0, LABEL_1, ...
        revision: branch, tag or commit on the Hub.
        dtype: data type of the weights: float32, bfloat16 or float16.
        attn_implementation: "sdpa", "eager", ...; None: what transformers prefers.
        trust_remote_code: whether code from the Hub may run.
        loader: class of `transformers` for another head, of `n_labels` outputs.

    Raises:
        ValueError: `n_labels` is less than 1, or `label_names` are not as many; the family's classification head does
            not read its states; or a weight of the body or the tokenizer is missing, as in `load_frozen`.
    """
    _check_labels(n_labels, label_names)
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    path = str(name)
    with quiet(), torch.random.fork_rng(devices=[]):
        config = _classifier_config(read_config(path, source), n_labels, label_names)
        options = {
            **source,
            **weight_options(dtype, attn_implementation),
            "config": config,
            "merge_adapters": True,
        }
        model, unfit = read_weights(path, loader, options)
        tokenizer = read_tokenizer(path, source, model.config)
    _check_body(model, unfit, path)
    for place, part in drawn(model, _missing_parts(model, unfit), seed).items():
        model.set_submodule(place, part)
    _set_padding(model, tokenizer, path)
    return model.eval(), tokenizer


def _check_labels(n_labels: int, label_names: Sequence[str] | None) -> None:
    """Raise unless there are classes, or one number, and as many names."""
    if n_labels < 1:
        raise UserError(
            f"Expected `n_labels` of 2 or more classes, or 1 for a number, but got {n_labels}."
        )
    if label_names is None:
        return
    if len(label_names) != n_labels or len(set(label_names)) != n_labels:
        raise UserError(
            f"Expected {n_labels} different `label_names`, but got {', '.join(label_names) or 'none'}."
        )


def _classifier_config(
    config: PreTrainedConfig, n_labels: int, label_names: Sequence[str] | None
) -> PreTrainedConfig:
    """Return the config of a base model under a new classification head.

    Raises:
        ValueError: the family's classification head does not read its states.
    """
    architecture = architecture_of(config.model_type)
    architecture.check(config)
    if architecture.rereads:
        raise UserError(
            f"Expected a model whose classification head reads its states, but got a {config.model_type!r} model: "
            "its classifier reads the text a second time, and could not be truncated, injected or stitched. Name "
            "another."
        )
    config.num_labels = n_labels
    config.problem_type = "single_label_classification"
    if n_labels == 1:
        config.problem_type = "regression"
    if label_names is not None:
        config.id2label = dict(enumerate(label_names))
        config.label2id = dict(zip(label_names, range(n_labels), strict=True))
    return config


def _missing_parts(model: PreTrainedModel, unfit: Sequence[str]) -> list[str]:
    """Return the paths of what a checkpoint lacks: the head, and the pooler if the model has one."""
    parts = list(outside(model))
    for pooler in pooler_of(model):
        if any(key.startswith(f"{pooler}.") for key in unfit):
            parts.append(pooler)
    return parts


def _check_body(model: PreTrainedModel, unfit: Sequence[str], name: str) -> None:
    """Raise if weights below the head are random."""
    parts = tuple(f"{part}." for part in head_parts(model))
    missing = [key for key in unfit if not key.startswith(parts)]
    if missing:
        raise UserError(
            f"Expected all weights below the head of a {type(model).__name__} in {name!r}, but got none, or none of "
            f"the right shape, for {listed(missing)}. They would be random: name a checkpoint that has them."
        )


def _set_padding(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Give a causal model without a padding token that of its tokenizer, or its end-of-text token."""
    architecture = architecture_of(model.config.model_type)
    settings = architecture.settings_of(model.config)
    if not architecture.causal or settings.pad_token_id is not None:
        return
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"Expected a padding or an end-of-text token in the tokenizer of {name!r}, but got neither: a "
                f"{type(model).__name__} reads the last token that is not padding. Give the tokenizer one."
            )
        tokenizer.pad_token = tokenizer.eos_token
    settings.pad_token_id = tokenizer.pad_token_id


KeptLayers = Literal["bottom", "top", "layers"]


def shortened(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Copy a model with its bottom `layers` blocks only, and a config that says so, to be trained, saved and loaded.

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
    if _shapes(expected) != _shapes(short):
        raise UserError(
            f"A config of {layers} layers does not describe a {type(model).__name__} whose upper blocks are left out: "
            "saved, it could not be loaded again. `evaluate.py surgery` truncates models without a config."
        )
    return short


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each weight."""
    return {name: weight.shape for name, weight in model.state_dict().items()}


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
    if kind == "bottom":
        for weight in _below(model, blocks, count):
            weight.requires_grad_(False)
        return
    for block in blocks[len(blocks) - count :]:
        block.requires_grad_(False)


def freeze_unused(model: PreTrainedModel, logits: Tensor) -> None:
    """Freeze weights that have no part in the answer, in place, by `requires_grad`.

    XLNet has such weights: its mask embedding, and its segments if the tokenizer gives none. They never get a
    gradient, for which several ranks would wait.

    Args:
        model: the model.
        logits: its output, with gradients, for a batch like those that it will be trained on.
    """
    used = _reached(logits, _trainable(model))
    model.requires_grad_(False)
    for weight in used:
        weight.requires_grad_(True)


def check_count(model: PreTrainedModel, kind: KeptLayers, count: int) -> None:
    """Raise what `freeze` and `shortened` would, before anything is changed.

    Raises:
        ValueError: `count` is out of range, or blocks are shared.
    """
    blocks = blocks_of(model)
    least = 1 if kind == "layers" else 0
    if not least <= count <= len(blocks):
        raise UserError(
            f"Expected `{kind}` between {least} and L = {len(blocks)}, the blocks of this {type(model).__name__}, "
            f"but got {count}."
        )
    if len(blocks.listed) == len(blocks):
        return
    if kind != "layers" and count not in (0, len(blocks)):
        raise UserError(
            f"Expected `{kind}` of 0 or {len(blocks)}, but got {count}: a {type(model).__name__} runs the same block "
            "several times, so that either all of its layers train or none."
        )
    if kind == "layers" and len(blocks.listed) > 1:
        raise UserError(
            f"Expected one shared block, but got a {type(model).__name__} with {len(blocks.listed)}: the order in "
            "which they run depends on the number of layers, so fewer layers would be another model."
        )


def _below(model: PreTrainedModel, blocks: Blocks, site: int) -> list[nn.Parameter]:
    """Return the parameters that the state at `site` depends on, and all parameters of the blocks up to there.

    Autograd finds them, because families keep relative positions and projections of embeddings in different places.
    """
    trunk = trunk_of(model)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.enable_grad():
        states = read(blocks, [site], lambda: trunk(input_ids=tokens))
    weights = _reached(states[site], _trainable(model.base_model))
    for block in blocks[:site]:
        weights.extend(block.parameters())
    return weights


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def _reached(answer: Tensor, weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the weights that `answer` depends on, according to its graph."""
    if not answer.requires_grad:
        return []
    total = answer.float().sum()
    gradients = torch.autograd.grad(total, weights, allow_unused=True)
    reached = []
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            reached.append(weight)
    return reached
