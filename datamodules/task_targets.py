"""The targets of a task on a batch of texts: a class, a number, masked tokens or next tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from aligners.datamodules.batches import Movable, TextBatch
from aligners.datamodules.rows.policies import Rows, select_rows
from aligners.errors import UserError, check_range
from aligners.models.model import FrozenModel

UNASKED = -100  # marks positions without a target, as in PyTorch's cross-entropy


@dataclass
class Targets(Movable):
    """The U units to predict in a batch of B texts, in the order of the texts.

    Attributes:
        index: (U,) row of each unit in the logits, all of whose axes but the last are flattened.
        answer: (U,) the right class or token, int64; or the right number, float32.
        owner: (U,) text of the batch that each unit belongs to, 0..B-1, ascending.
        texts: B.
    """

    index: Tensor
    answer: Tensor
    owner: Tensor
    texts: int

    def __len__(self) -> int:
        """U, the number of units."""
        return len(self.index)

    def split(self, size: int) -> Iterator["Targets"]:
        """Split into parts of `size` units; the last may be smaller. Without units there is one empty part."""
        index = self.index.split(size)
        answer = self.answer.split(size)
        owner = self.owner.split(size)
        for part in zip(index, answer, owner, strict=True):
            yield Targets(*part, texts=self.texts)


def classification_targets(labels: Tensor) -> Targets:
    """Make one unit for each text: its class, or the number to predict; labels (B,)."""
    every = torch.arange(len(labels), device=labels.device)
    return Targets(every, labels, every, len(labels))


def among_answers(logits: Tensor, answers: Tensor | None) -> Tensor:
    """Turn a head's only logit for each answer (..., B, 1) into logits over a question's answers, (..., Q, A) float32.

    Args:
        logits: (..., B, C) logits of B texts.
        answers: `TextBatch.answers`; None: the texts are no answers, and `logits` are returned as they are.
    """
    if answers is None:
        return logits
    return logits.float()[..., 0][..., answers].masked_fill(
        answers < 0, torch.finfo(torch.float32).min
    )


def next_token_targets(inputs: Mapping[str, Tensor]) -> Targets:
    """Make one unit for each real token followed by another: the target of position t is token t + 1.

    Args:
        inputs: `input_ids` (B, T) and, where there is padding on either side, `attention_mask` (B, T). A text of
            one token has no unit.
    """
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask", torch.ones_like(ids)) != 0
    following = torch.full_like(ids, UNASKED)
    both_real = real[:, :-1] & real[:, 1:]
    following[:, :-1] = ids[:, 1:].where(both_real, UNASKED)
    return masked_targets(following)


def masked_targets(answers: Tensor) -> Targets:
    """Make one unit for each position that has a target: answers (B, T), -100 where there is none."""
    owner, position = (answers != UNASKED).nonzero(as_tuple=True)
    index = owner * answers.shape[1] + position
    return Targets(index, answers[owner, position], owner, len(answers))


_MASKED, _RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest stay as they are


def mask_tokens(
    inputs: Mapping[str, Tensor],
    special: Tensor,
    text: Tensor,
    tokenizer: Any,
    share: float,
    seed: int,
    epoch: int,
    vocabulary: int | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Mask a batch by BERT's recipe (Devlin et al. 2019, §3.1 and A.1), on the CPU.

    In each text, a share of the tokens that are neither special nor padding is chosen, rounded, but at least one. Each
    becomes the mask token with probability .8, a random token of the vocabulary with probability .1, and stays
    otherwise. The draw depends only on the seed, the epoch and the text's number, so it is the same in any batch and on
    any number of ranks.

    Args:
        inputs: inputs of the model: `input_ids` (B, T) int64 and others, which stay. None of them is changed in place.
        special: True at special tokens and padding, (B, T).
        text: number of each text in its split, (B,).
        tokenizer: tokenizer with the mask token and the vocabulary.
        share: share of the tokens to choose, in (0, 1]; BERT's is .15.
        seed: seed, zero or positive.
        epoch: number of the epoch, zero or positive; each epoch chooses other tokens.
        vocabulary: number of tokens that the model knows, if the tokenizer has more.

    Returns:
        The inputs with other `input_ids`, and the answers (B, T) int64: the original token where one was chosen, else
        -100.
    """
    check_range(above=0, most=1, share=share)
    ids = inputs["input_ids"].clone()
    vocabulary = min(vocabulary or len(tokenizer), len(tokenizer))
    answers = torch.full_like(ids, UNASKED)
    for row, number in enumerate(text.tolist()):
        draw = np.random.default_rng([seed, epoch, number])
        places = (~special[row]).nonzero()[:, 0].numpy()
        if not len(places):
            continue
        places = draw.permutation(places)[: max(1, round(share * len(places)))]
        chosen = ids[row, places]
        answers[row, places] = chosen
        ids[row, places] = _masked(chosen, tokenizer.mask_token_id, vocabulary, draw)
    return {**inputs, "input_ids": ids}, answers


def _masked(
    chosen: Tensor, mask: int, vocabulary: int, draw: np.random.Generator
) -> Tensor:
    """Return the tokens that replace the chosen ones of a text."""
    fate = draw.random(len(chosen))
    others = draw.integers(vocabulary, size=len(chosen))
    replaced = np.where(fate < _MASKED + _RANDOM, others, chosen)
    return torch.from_numpy(np.where(fate < _MASKED, mask, replaced))


@dataclass
class TaskBatch(Movable):
    """B texts for models of one tokenizer, with the positions that are rows, and the targets.

    Attributes:
        texts: the tokenised batch; with a masked task its inputs are masked already.
        rows: positions of every real token, (N,).
        targets: targets of the task.
    """

    texts: TextBatch
    rows: Rows
    targets: Targets

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs, which are the same for all models."""
        return self.texts.inputs_x


def check_mask(model: FrozenModel) -> None:
    """Raise if a masked language model has no mask token."""
    if model.task == "masked" and cast(Any, model.tokenizer).mask_token_id is None:
        raise UserError(
            f"Expected a tokenizer with a mask token for a masked language model, but that of {model.name} has none. "
            "Set its `mask_token`."
        )


def task_batch(
    texts: TextBatch,
    model: FrozenModel,
    *,
    masked_share: float = 0.15,
    seed: int = 0,
    epoch: int = 0,
) -> TaskBatch:
    """Add to a batch, on the CPU, its rows and the targets of a head's task; mask the tokens if that is the task.

    Args:
        texts: a batch on the CPU, tokenised for the model.
        model: the model whose task it is.
        masked_share: share of the tokens that a masked language model must predict.
        seed: seed of the masks.
        epoch: number of the epoch; each one masks a text anew.

    Raises:
        ValueError: the task is a classification and the texts have no labels.
    """
    inputs = texts.inputs_x
    special = texts.special[0]
    rows = select_rows(inputs["attention_mask"], special, "tokens")
    if model.task == "causal":
        return TaskBatch(texts, rows, next_token_targets(inputs))
    if model.task == "masked":
        masked, answers = mask_tokens(
            inputs,
            special,
            texts.text,
            model.tokenizer,
            masked_share,
            seed,
            epoch,
            model.vocabulary,
        )
        every = (masked,) * len(texts.inputs)
        texts = TextBatch(
            every, texts.special, texts.text, texts.labels, number=texts.number
        )
        return TaskBatch(texts, rows, masked_targets(answers))
    if texts.labels is None:
        raise UserError(
            "Classification needs labels, but these texts have none. Name a `label_column`."
        )
    labels = texts.labels
    if model.regression:
        labels = labels.float()
    return TaskBatch(texts, rows, classification_targets(labels))
