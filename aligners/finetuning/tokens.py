"""What a model is fine-tuned for besides classes: spans that answer questions, and dependency trees."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchmetrics.functional.text import squad
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.model_texts import ModelTexts
from aligners.datamodules.text.annotated.sentence import ANSWERS, sentences_in
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError
from aligners.injection.scoring.scores import interval, named

NOTHING = -100  # where there is no answer, which PyTorch's cross-entropy ignores
LONGEST = 30  # tokens of an answer, as in the code released with BERT
ARC, RELATION, DROPOUT = 500, 100, 0.33  # Dozat and Manning 2017, Table 1
COUNTS = (
    "correct",
    "loss",
    "other",
    "weight",
)  # of each text: see `TokenTask.measures`


class TokenTask(ABC):
    """A task whose answers are tokens of the text.

    Args:
        data: the texts.
        place: index of the model among the data module's.

    Attributes:
        score: name of its score.
        loader: of a model with a head that answers every token.
        outputs: of that head, for each token.

    Raises:
        ValueError: the tokenizer does not say where in a text its tokens lie.
    """

    score: ClassVar[str]
    loader: ClassVar[Any]
    outputs: int

    def __init__(self, data: ModelTexts, place: int) -> None:
        self.data = data
        self.place = place
        self.tokenizer = cast(Any, data.frozen[place].tokenizer)
        if not self.tokenizer.is_fast:
            raise UserError(
                f"Expected a fast tokenizer, which says where in a text its tokens lie, but {data.models[place]} has "
                f"a {type(self.tokenizer).__name__}. Name another model."
            )

    def finish(self, model: PreTrainedModel) -> PreTrainedModel:
        """Add what the head of `loader` lacks."""
        return model

    @abstractmethod
    def losses(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> Tensor:
        """The loss of each text, (B,), from the outputs of the head, (B, T, outputs)."""

    @abstractmethod
    def measures(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> dict[str, Tensor]:
        """`COUNTS` of each text, (B,): the score is Σ correct / Σ weight, the accuracy Σ other / Σ weight."""

    def _read(self, batch: TextBatch, split: Split) -> tuple[dict[str, list[Any]], Any]:
        """The rows of a batch, and where their tokens lie, padded as the batch is."""
        rows = getattr(self.data.texts, split)[list(batch.text_numbers)]
        parts = [rows[name] for name in ("text", "text_pair") if name in rows]
        tokens = self.tokenizer(
            *parts, truncation=True, max_length=self.data.max_length
        )
        longest = batch.inputs[self.place]["input_ids"].shape[1]
        for encoding in tokens.encodings:
            encoding.pad(longest, direction=self.tokenizer.padding_side)
        return rows, tokens


class Spans(TokenTask):
    """The answer to a question as a span of its passage: SQuAD, with a start and an end for each token.

    Scores are F1 and, as accuracy, exact match, both against the best of a question's answers. A passage is cut at
    `max_length`: it is not read in windows.

    References:
        Devlin et al. 2019, BERT, §4.2; Rajpurkar et al. 2016, SQuAD, §6.
    """

    score = "span_f1"
    loader = AutoModelForQuestionAnswering
    outputs = 2

    def losses(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> Tensor:
        """Cross-entropy of the first answer's ends, their mean; an answer that was cut off costs nothing."""
        rows, tokens = self._read(batch, split)
        ends = []
        for number, answers in enumerate(rows[ANSWERS]):
            start = answers["answer_start"][0]
            length = len(answers["text"][0])
            first = tokens.char_to_token(number, start, 1)
            last = tokens.char_to_token(number, start + max(0, length - 1), 1)
            cut_off = first is None or last is None
            ends.append([NOTHING, NOTHING] if cut_off else [first, last])
        padding = batch.inputs[self.place]["attention_mask"][..., None] == 0
        logits = outputs.masked_fill(padding, torch.finfo(outputs.dtype).min)
        true = torch.tensor(ends, device=outputs.device)
        return nn.functional.cross_entropy(logits, true, reduction="none").mean(1)

    def measures(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> dict[str, Tensor]:
        """As in `TokenTask`, of the most likely span of the passage."""
        rows, tokens = self._read(batch, split)
        longest = outputs.shape[1]
        spans = self._spans(outputs, tokens)
        scores = []
        for number, best in enumerate(spans.flatten(1).argmax(1).tolist()):
            first, last = divmod(best, longest)
            start = tokens.token_to_chars(number, first)
            end = tokens.token_to_chars(number, last)
            given = ""
            if start is not None and end is not None:
                given = rows["text_pair"][number][start.start : end.end]
            right = squad(
                [{"prediction_text": given, "id": ""}],
                [{"answers": rows[ANSWERS][number], "id": ""}],
            )
            scores.append([float(right["f1"]) / 100, float(right["exact_match"]) / 100])
        f1, exact = torch.tensor(scores, device=outputs.device).unbind(1)
        losses = self.losses(model, outputs, batch, split)
        return {
            "correct": f1,
            "loss": losses,
            "other": exact,
            "weight": torch.ones_like(f1),
        }

    def _spans(self, outputs: Tensor, tokens: Any) -> Tensor:
        """Scores of all spans of the passages by first and last token, (B, T, T); -inf of those that cannot be."""
        outside = []
        for number in range(len(outputs)):
            outside.append([part != 1 for part in tokens.sequence_ids(number)])
        mask = torch.tensor(outside, device=outputs.device)[..., None]
        start, end = outputs.masked_fill(mask, -torch.inf).unbind(-1)
        longest = outputs.shape[1]
        every = torch.ones(longest, longest, dtype=torch.bool, device=outputs.device)
        short = every.triu().tril(LONGEST - 1)
        return (start[:, :, None] + end[:, None]).masked_fill(~short, -torch.inf)


class Biaffine(nn.Module):
    """Scores of arcs between the words of a sentence, and of the relation of each arc.

    Args:
        relations: R, their number.

    References:
        Dozat and Manning 2017, "Deep biaffine attention for neural dependency parsing", ICLR, eqs. 2, 3 and 6.
    """

    def __init__(self, relations: int) -> None:
        super().__init__()
        self.arc = nn.Parameter(torch.zeros(1, ARC + 1, ARC))
        self.relation = nn.Parameter(torch.zeros(relations, RELATION + 1, RELATION + 1))

    def forward(self, features: Tensor) -> Tensor:
        """Features of words (B, W, 2 · 500 + 2 · 100) to scores of the arc from i to its head j, and of its relations.

        Returns:
            (B, W, W, 1 + R)
        """
        hidden = nn.functional.leaky_relu(features, 0.1)
        hidden = nn.functional.dropout(hidden, DROPOUT, self.training)
        word, head, of_word, of_head = hidden.split([ARC, ARC, RELATION, RELATION], -1)
        arcs = torch.einsum("bid,rde,bje->bijr", _with_one(word), self.arc, head)
        of_word = _with_one(of_word)
        of_head = _with_one(of_head)
        relations = torch.einsum("bid,rde,bje->bijr", of_word, self.relation, of_head)
        return torch.cat([arcs, relations], -1)


def _with_one(states: Tensor) -> Tensor:
    """One more feature that is 1, so that a product with a matrix has an offset."""
    return nn.functional.pad(states, (0, 1), value=1.0)


class Trees(TokenTask):
    """The head of each word and its relation to it, read off the word's first token by a biaffine classifier.

    A root is its own head. Heads are chosen word by word, so they need not make a tree. The score is LAS, the accuracy
    UAS, over all words, punctuation included; a word that was cut off is wrong.
    """

    score = "las"
    loader = AutoModelForTokenClassification
    outputs = 2 * (ARC + RELATION)

    def __init__(self, data: ModelTexts, place: int) -> None:
        super().__init__(data, place)
        names: set[str] = set()
        for sentence in sentences_in(data.texts.fit):
            names.update(sentence.labels("dependencies").values())
        self.names = sorted(names)

    def finish(self, model: PreTrainedModel) -> PreTrainedModel:
        """Add the biaffine classifier, whose weights begin at zero."""
        model.parser = Biaffine(len(self.names)).to(model.device)
        model.config.update({"relations": self.names})
        return model

    def losses(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> Tensor:
        """Cross-entropy of each word's head, and of its relation at the true head; mean over words."""
        return self._losses(*self._scores(model, outputs, batch, split))

    def measures(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> dict[str, Tensor]:
        """As in `TokenTask`."""
        scores, heads, relations, there = self._scores(model, outputs, batch, split)
        given = scores[..., 0].argmax(-1)
        right = (given == heads) & there
        named = _at(scores[..., 1:], given).argmax(-1) == relations
        return {
            "loss": self._losses(scores, heads, relations, there),
            "correct": (right & named).sum(1).float(),
            "other": right.sum(1).float(),
            "weight": (heads != NOTHING).sum(1).float(),
        }

    def _losses(
        self, scores: Tensor, heads: Tensor, relations: Tensor, there: Tensor
    ) -> Tensor:
        cross_entropy = partial(nn.functional.cross_entropy, reduction="none")
        heads = heads.where(there, NOTHING)
        relations = relations.where(there, NOTHING)
        of_head = cross_entropy(scores[..., 0].mT, heads)
        at_head = _at(scores[..., 1:], heads.clamp(min=0))
        of_relation = cross_entropy(at_head.mT, relations)
        words = (heads != NOTHING).sum(1).clamp(min=1)
        return torch.stack([of_head, of_relation]).sum((0, 2)) / words

    def _scores(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> tuple[Tensor, ...]:
        """Scores (B, W, W, 1 + R); heads and relations, -100 where there is none, and whether word and head were read.

        The latter three are (B, W).
        """
        rows, tokens = self._read(batch, split)
        first, heads, relations = self._true(rows, tokens).to(outputs.device)
        words = outputs.gather(
            1, first.clamp(min=0)[..., None].expand(-1, -1, outputs.shape[-1])
        )
        scores = cast(nn.Module, model.parser)(words).float()
        arc = torch.arange(scores.shape[-1], device=first.device) == 0
        read = first >= 0
        unread_heads = ~read[:, None, :, None] & arc
        scores = scores.masked_fill(unread_heads, torch.finfo(scores.dtype).min)
        return scores, heads, relations, read & read.gather(1, heads.clamp(min=0))

    def _true(self, rows: dict[str, list[Any]], tokens: Any) -> Tensor:
        """The first token, the head and the relation of each word, (3, B, W); -100 where there is none."""
        sentences = sentences_in(rows)
        longest = max(len(sentence.words) for sentence in sentences)
        found = torch.full((3, len(sentences), longest), NOTHING)
        first, heads, relations = found
        numbers = {name: number for number, name in enumerate(self.names)}
        for number, sentence in enumerate(sentences):
            named = sentence.labels("dependencies")
            char = 0
            for word, string in enumerate(sentence.words):
                token = tokens.char_to_token(number, char)
                if token is not None:
                    first[number, word] = token
                relations[number, word] = numbers.get(named.get(word, ""), NOTHING)
                char += len(string) + 1
            for word, head in enumerate(sentence.heads):
                heads[number, word] = (
                    head - 1 if head else word
                )  # a root is its own head
        return found


def _at(values: Tensor, heads: Tensor) -> Tensor:
    """values[b, i, heads[b, i]] for (B, W, W, R) and (B, W): (B, W, R)."""
    return values.gather(2, heads[..., None, None].expand(-1, -1, 1, values.shape[-1]))[
        :, :, 0
    ]


def token_task(data: ModelTexts, place: int) -> TokenTask | None:
    """The task of texts without classes: answers or trees; None for classes, and for numbers to predict."""
    kinds: dict[str, Any] = {"spans": Spans, "trees": Trees}
    if data.targets not in kinds:
        return None
    return kinds[data.targets](data, place)


def token_columns(scores: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Score, accuracy and loss, with intervals over texts, each (1,).

    Args:
        scores: `COUNTS` of each text, (1, 1, n).
        seed: of the resampling.
    """
    weight = scores["weight"][0]
    columns = named("accuracy", interval(scores["other"][0], weight, seed=seed))
    columns |= named("score", interval(scores["correct"][0], weight, seed=seed))
    return {**columns, "loss": scores["loss"][0].mean(1)}
