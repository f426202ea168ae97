"""Signs that figures cannot be trusted: texts that a tokenizer does not know, and models that know no texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aligners.datamodules.task_targets import (
    Targets,
    mask_tokens,
    masked_targets,
    next_token_targets,
)
from aligners.datamodules.tokens.splits import Split
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.models.loading.known import SleepingModel
from aligners.models.model import FrozenModel

UNKNOWN, COMMONEST, REPEATED = 0.1, 0.5, 0.1  # shares beyond which texts are doubtful
READ_TEXTS = 64  # how a language model is compared with token frequencies alone
AT_ONCE = 4  # texts of a batch
MASKED_SHARE = 0.15
NAMES = {
    "fit": "fitting",
    "validation": "validation",
    "test": "held-out",
    "other": "other",
}


def text_doubts(
    ids: Tensor, special: Tensor, lengths: Tensor, unknown: int | None
) -> list[str]:
    """List, in words, what is wrong with texts after tokenising.

    Args:
        ids: (T,) tokens of all texts, end to end.
        special: (T,) which tokens are special, such as those that begin a text.
        lengths: (n,) tokens of each text.
        unknown: number of the token that stands for everything unknown to the tokenizer; None: it has none.
    """
    doubts = []
    plain = ids[~special].long()
    if not len(plain):
        return []
    share = 0.0 if unknown is None else float((plain == unknown).float().mean())
    if share > UNKNOWN:
        doubts.append(f"{share:.0%} of their tokens are unknown to it")
    counts = plain.bincount()
    commonest = float(counts.max()) / len(plain)
    if commonest > COMMONEST:
        distinct = int((counts > 0).sum())
        doubts.append(
            f"{commonest:.0%} of their {len(plain):,} tokens are the same one, out of {distinct:,} different ones"
        )
    different = {part.numpy().tobytes() for part in ids.split(lengths.tolist())}
    repeated = 1 - len(different) / max(len(lengths), 1)
    if repeated > REPEATED:
        doubts.append(f"{repeated:.0%} of them are the same tokens as another text")
    return doubts


def short_name(model: FrozenModel) -> str:
    """The name of a model without the folders that it is in."""
    return model.name.rstrip("/").rpartition("/")[2]


class Doubts:
    """Looks at the texts and models of a data module, and warns of what makes figures doubtful.

    Args:
        data: the data module, a `TextModule`.

    Attributes:
        compared_on: the split whose first texts language models are compared on with token frequencies; None before its
            setup.
    """

    compared_on: Split | None = None

    def __init__(self, data: Any) -> None:
        self.data = data
        self._seen: WeakSet[TokenisedTexts] = WeakSet()
        self._compared = False

    def look_at_texts(self, split: Split, texts: TokenisedTexts) -> None:
        """Check a split as each model's tokens, once."""
        if texts in self._seen:
            return
        self._seen.add(texts)
        if self.data.frozen_models.recorded is not None:
            return  # their tokens are numbers of rows
        models = self.data.frozen
        for number, tokenizer in enumerate(self.data.frozen_models.tokenizers):
            if texts.first_with(number) != number:
                continue  # the same tokens as those of an earlier model
            unknown = getattr(tokenizer, "unk_token_id", None)
            doubts = text_doubts(*texts.tokens_of(number), unknown)
            if doubts:
                name = short_name(models[number])
                self.data.caution(
                    f"Caution: the {NAMES.get(split, split)} texts are hardly texts to the tokenizer of {name}: "
                    f"{'; '.join(doubts)}. On such texts maps and models look far better than they are."
                )

    def look_at_models(self) -> None:
        """Compare each language model's loss on some texts, once, with the loss of token frequencies alone."""
        if self._compared or self.compared_on is None:
            return
        self._compared = True
        texts = self.data.split(self.compared_on)
        for number, model in enumerate(self.data.frozen):
            if self.data.frozen.index(model) == number and _can_predict(model):
                with self.data.frozen_models.running(model, self.data.run_device):
                    self._compare(model, number, texts)

    def _compare(self, model: FrozenModel, number: int, texts: TokenisedTexts) -> None:
        """Warn if a model predicts tokens worse than their frequencies do."""
        ids, special, _ = texts.tokens_of(number)
        counted = ids if model.task == "causal" else ids[~special]
        vocabulary = int(model.model.config.get_text_config().vocab_size)
        counts = counted.long().bincount(minlength=vocabulary).double()
        # Each token's count is increased by one, and the token being predicted is not counted.
        others = counts.sum() - 1 + vocabulary
        own = unigram = 0.0
        units = 0
        for inputs, targets in _targets(model, number, texts):
            with torch.no_grad():
                logits = model.logits(inputs).flatten(0, -2)[targets.index].float()
            own += float(cross_entropy(logits, targets.answer, reduction="sum"))
            frequencies = counts[targets.answer.cpu()] / others
            unigram -= float(frequencies.log().sum())
            units += len(targets)
        if own > unigram:
            self.data.caution(
                f"Caution: {short_name(model)} predicts these texts worse than the frequencies of their tokens alone: "
                f"its loss is {own / units:.2f} nats a token, theirs {unigram / units:.2f}. It has not learned them, "
                "and what holds for its states need not hold for those of a model that has."
            )


def _can_predict(model: FrozenModel) -> bool:
    """Tell whether a model predicts tokens. One whose states come from a store is not loaded for this."""
    if isinstance(model, SleepingModel) or model.task not in ("causal", "masked"):
        return False
    if model.task == "causal":
        return True
    return cast(Any, model.tokenizer).mask_token_id is not None


def _targets(
    model: FrozenModel, number: int, texts: TokenisedTexts
) -> Iterator[tuple[Mapping[str, Tensor], Targets]]:
    """Return some texts and the tokens to predict, on the model's device."""
    count = min(READ_TEXTS, len(texts))
    for first in range(0, count, AT_ONCE):
        batch = texts[list(range(first, min(first + AT_ONCE, count)))]
        inputs: Any = batch.inputs[number]
        if model.task == "causal":
            targets = next_token_targets(inputs)
        else:
            special = batch.special[number]
            inputs, answers = mask_tokens(
                inputs, special, batch.text, model.tokenizer, MASKED_SHARE, 0, 0
            )
            targets = masked_targets(answers)
        if len(targets):
            placed = {name: part.to(model.device) for name, part in inputs.items()}
            yield placed, targets.to(model.device)
