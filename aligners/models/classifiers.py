"""Classifiers to be trained: a base model with a new head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from aligners.errors import UserError
from aligners.models.architectures import Architecture, architecture_of
from aligners.models.fresh import drawn, head_parts
from aligners.models.loading.files import dtype_of, listed, quiet, read_config, read_tokenizer, read_weights


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
        _check_family(architecture, config.model_type)
        config.num_labels = n_labels
        config.problem_type = "regression" if n_labels == 1 else "single_label_classification"
        if label_names is not None:
            config.id2label = dict(enumerate(label_names))
            config.label2id = {label: number for number, label in enumerate(label_names)}
        options: dict[str, Any] = {**source, "dtype": dtype_of(dtype), "config": config}
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        model, unfit = read_weights(str(name), AutoModelForSequenceClassification, options)
        tokenizer = read_tokenizer(str(name), source, config)
    _check_body(model, unfit, str(name))
    for path, part in drawn(model, _undetermined(model, unfit), seed).items():
        model.set_submodule(path, part)
    if architecture.causal and model.config.pad_token_id is None:
        _set_padding(model, tokenizer, str(name))
    return model.eval(), tokenizer


def _undetermined(model: PreTrainedModel, unfit: Sequence[str]) -> list[str]:
    """List what the checkpoint does not provide: the head, and a pooler if it has none."""
    inside = f"{model.base_model_prefix}."
    return [
        name
        for name in head_parts(model)
        if not name.startswith(inside) or any(key.startswith(f"{name}.") for key in unfit)
    ]


def _check_labels(n_labels: int, label_names: Sequence[str] | None) -> None:
    if n_labels < 1:
        raise UserError(f"Expected `n_labels` of 2 or more classes, or 1 for a number, but got {n_labels}.")
    if label_names is not None and (len(label_names) != n_labels or len(set(label_names)) != n_labels):
        raise UserError(
            f"Expected `label_names` to be {n_labels} different names, but got {', '.join(label_names) or 'none'}."
        )


def _check_family(architecture: Architecture, model_type: str) -> None:
    if architecture.rereads:
        raise UserError(
            f"Expected a model whose classification head reads its states, but got a {model_type!r} model: its "
            "classifier reads the text a second time, and could not be truncated, injected or stitched. Name another."
        )


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
    model.config.pad_token_id = tokenizer.pad_token_id
