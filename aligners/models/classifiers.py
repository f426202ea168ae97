"""Classifiers to be trained: a base model with a new head, and models drawn anew by their own recipe."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from aligners.errors import UserError
from aligners.models.architectures import architecture_of
from aligners.models.loading.files import listed, quiet, read_config, read_tokenizer, read_weights, weight_options


def drawn(model: PreTrainedModel, names: Iterable[str], seed: int) -> dict[str, nn.Module]:
    """Copy parts of a model, with weights drawn from `seed` on the CPU and then moved to the devices of the parts.

    No other random number is affected.

    Args:
        model: the model, which stays unchanged.
        names: paths of the parts, in the order of drawing.
        seed: of the weights.
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
    return chain.from_iterable(chain(part.parameters(), part.buffers()) for part in parts.values())


def outside(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules outside the base model, by path."""
    return {name: part for name, part in model.named_children() if part is not model.base_model}


def pooler_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The module between the last state and the head, by path; empty if there is none."""
    pooler = getattr(model.base_model, "pooler", None)
    return {f"{model.base_model_prefix}.pooler": pooler} if isinstance(pooler, nn.Module) else {}


def head_parts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that turn states at the last site into classes, by path: the pooler, and all outside the base model.

    A final norm is not among them; it belongs to the body, as in the papers.
    """
    return outside(model) | pooler_of(model)


@contextmanager
def with_head(model: PreTrainedModel, parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within it, these parts replace the model's own at the same paths."""
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
    with quiet(), torch.random.fork_rng(devices=[]):
        config = read_config(str(name), source)
        architecture = architecture_of(config.model_type)
        architecture.check(config)
        if architecture.rereads:
            raise UserError(
                f"Expected a model whose classification head reads its states, but got a {config.model_type!r} model: "
                "its classifier reads the text a second time, and could not be truncated, injected or stitched. Name "
                "another."
            )
        config.num_labels = n_labels
        config.problem_type = "regression" if n_labels == 1 else "single_label_classification"
        if label_names is not None:
            config.id2label = dict(enumerate(label_names))
            config.label2id = {label: number for number, label in enumerate(label_names)}
        options = {**source, **weight_options(dtype, attn_implementation), "config": config, "merge_adapters": True}
        model, unfit = read_weights(str(name), loader, options)
        tokenizer = read_tokenizer(str(name), source, config)
    _check_body(model, unfit, str(name))
    for path, part in drawn(model, _undetermined(model, unfit), seed).items():
        model.set_submodule(path, part)
    if architecture.causal and architecture.settings_of(model.config).pad_token_id is None:
        _set_padding(model, tokenizer, str(name))
    return model.eval(), tokenizer


def _undetermined(model: PreTrainedModel, unfit: Sequence[str]) -> list[str]:
    """List what the checkpoint does not provide: the head, and a pooler if it has none."""
    head = outside(model)
    return [name for name in head_parts(model) if name in head or any(key.startswith(f"{name}.") for key in unfit)]


def _check_labels(n_labels: int, label_names: Sequence[str] | None) -> None:
    if n_labels < 1:
        raise UserError(f"Expected `n_labels` of 2 or more classes, or 1 for a number, but got {n_labels}.")
    if label_names is not None and (len(label_names) != n_labels or len(set(label_names)) != n_labels):
        raise UserError(f"Expected {n_labels} different `label_names`, but got {', '.join(label_names) or 'none'}.")


def _check_body(model: PreTrainedModel, unfit: Sequence[str], name: str) -> None:
    parts = tuple(f"{part}." for part in head_parts(model))
    missing = [key for key in unfit if not key.startswith(parts)]
    if missing:
        raise UserError(
            f"Expected all weights below the head of a {type(model).__name__} in {name!r}, but got none, or none of "
            f"the right shape, for {listed(missing)}. They would be random: name a checkpoint that has them."
        )


def _set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"Expected a padding or an end-of-text token in the tokenizer of {name!r}, but got neither: a "
                f"{type(model).__name__} reads the last token that is not padding. Give the tokenizer one."
            )
        tokenizer.pad_token = tokenizer.eos_token
    architecture_of(model.config.model_type).settings_of(model.config).pad_token_id = tokenizer.pad_token_id
