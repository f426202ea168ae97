"""What a model is fine-tuned for besides classes: spans that answer questions, and dependency trees."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
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

NOTHING = (
    -100
)  # in the place of an answer where there is none, which PyTorch's cross-entropy ignores
LONGEST = 30  # tokens of an answer, as in the code released with BERT
ARC, RELATION, DROPOUT = 500, 100, 0.33  # Dozat and Manning 2017, Table 1
COUNTS = ("correct", "loss", "other", "weight")  # of each text: see `TokenTask.measures`


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
        self.data, self.place, self.tokenizer = data, place, cast(Any, data.frozen[place].tokenizer)
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
        tokens = self.tokenizer(*parts, truncation=True, max_length=self.data.max_length)
        for encoding in tokens.encodings:
            encoding.pad(
                batch.inputs[self.place]["input_ids"].shape[1],
                direction=self.tokenizer.padding_side,
            )
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
            first, length = answers["answer_start"][0], len(answers["text"][0])
            places = [
                tokens.char_to_token(number, char, 1)
                for char in (first, first + max(0, length - 1))
            ]
            ends.append([NOTHING] * 2 if None in places else places)
        padding = batch.inputs[self.place]["attention_mask"][..., None] == 0
        logits = outputs.masked_fill(padding, torch.finfo(outputs.dtype).min)
        asked = torch.tensor(ends, device=outputs.device)
        return nn.functional.cross_entropy(logits, asked, reduction="none").mean(1)

    def measures(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> dict[str, Tensor]:
        """As in `TokenTask`, of the most likely span of the passage."""
        rows, tokens = self._read(batch, split)
        count, longest = outputs.shape[:2]
        outside = torch.tensor(
            [[part != 1 for part in tokens.sequence_ids(number)] for number in range(count)]
        )
        start, end = outputs.masked_fill(outside.to(outputs.device)[..., None], -torch.inf).unbind(
            -1
        )
        short = (
            torch.ones(longest, longest, dtype=torch.bool, device=outputs.device)
            .triu()
            .tril(LONGEST - 1)
        )
        spans = (start[:, :, None] + end[:, None]).masked_fill(~short, -torch.inf)
        scores = []
        for number, best in enumerate(spans.flatten(1).argmax(1).tolist()):
            ends = [tokens.token_to_chars(number, place) for place in divmod(best, longest)]
            given = "" if None in ends else rows["text_pair"][number][ends[0].start : ends[1].end]
            right = squad(
                [{"prediction_text": given, "id": ""}],
                [{"answers": rows[ANSWERS][number], "id": ""}],
            )
            scores.append([float(right["f1"]) / 100, float(right["exact_match"]) / 100])
        f1, exact = torch.tensor(scores, device=outputs.device).unbind(1)
        losses = self.losses(model, outputs, batch, split)
        return {"correct": f1, "loss": losses, "other": exact, "weight": torch.ones_like(f1)}


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
        hidden = nn.functional.dropout(
            nn.functional.leaky_relu(features, 0.1), DROPOUT, self.training
        )
        word, head, of_word, of_head = hidden.split([ARC, ARC, RELATION, RELATION], -1)
        word, of_word, of_head = (
            nn.functional.pad(states, (0, 1), value=1.0) for states in (word, of_word, of_head)
        )
        scores = [(word, self.arc, head), (of_word, self.relation, of_head)]
        return torch.cat([torch.einsum("bid,rde,bje->bijr", *factors) for factors in scores], -1)


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
        known = (sentence.labels("dependencies") for sentence in sentences_in(data.texts.fit))
        self.names = sorted({name for relations in known for name in relations.values()})

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
        counts = {
            "correct": (right & named).sum(1),
            "other": right.sum(1),
            "weight": (heads != NOTHING).sum(1),
        }
        losses = self._losses(scores, heads, relations, there)
        return {"loss": losses, **{name: n.float() for name, n in counts.items()}}

    def _losses(self, scores: Tensor, heads: Tensor, relations: Tensor, there: Tensor) -> Tensor:
        heads, relations = (values.where(there, NOTHING) for values in (heads, relations))
        asked = (scores[..., 0], heads), (_at(scores[..., 1:], heads.clamp(min=0)), relations)
        losses = [
            nn.functional.cross_entropy(logits.mT, answers, reduction="none")
            for logits, answers in asked
        ]
        return torch.stack(losses).sum((0, 2)) / (heads != NOTHING).sum(1).clamp(min=1)

    def _scores(
        self, model: PreTrainedModel, outputs: Tensor, batch: TextBatch, split: Split
    ) -> tuple[Tensor, ...]:
        """Scores (B, W, W, 1 + R); heads and relations, -100 where there is none, and whether word and head were read.

        The latter three are (B, W).
        """
        rows, tokens = self._read(batch, split)
        sentences = sentences_in(rows)
        known = torch.full(
            (3, len(sentences), max(len(sentence.words) for sentence in sentences)), NOTHING
        )
        first, heads, relations = known
        for number, sentence in enumerate(sentences):
            named, char = sentence.labels("dependencies"), 0
            for word, string in enumerate(sentence.words):
                token = tokens.char_to_token(number, char)
                char += len(string) + 1
                first[number, word] = NOTHING if token is None else token
                relations[number, word] = (
                    self.names.index(named[word]) if named.get(word) in self.names else NOTHING
                )
            true = [head - 1 if head else word for word, head in enumerate(sentence.heads)]
            heads[number, : len(true)] = torch.tensor(true)
        first, heads, relations = known.to(outputs.device)
        words = outputs.gather(1, first.clamp(min=0)[..., None].expand(-1, -1, outputs.shape[-1]))
        scores = cast(nn.Module, model.parser)(words).float()
        lost, read = torch.arange(scores.shape[-1], device=first.device) == 0, first >= 0
        scores = scores.masked_fill(~read[:, None, :, None] & lost, torch.finfo(scores.dtype).min)
        return scores, heads, relations, read & read.gather(1, heads.clamp(min=0))


def _at(values: Tensor, heads: Tensor) -> Tensor:
    """values[b, i, heads[b, i]] for (B, W, W, R) and (B, W): (B, W, R)."""
    return values.gather(2, heads[..., None, None].expand(-1, -1, 1, values.shape[-1]))[:, :, 0]


def token_task(data: ModelTexts, place: int) -> TokenTask | None:
    """The task of texts without classes: answers or trees; None for classes, and for numbers to predict."""
    kinds: dict[str, Any] = {"spans": Spans, "trees": Trees}
    return kinds[data.targets](data, place) if data.targets in kinds else None


def token_columns(scores: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Score, accuracy and loss, with intervals over texts, each (1,).

    Args:
        scores: `COUNTS` of each text, (1, 1, n).
        seed: of the resampling.
    """
    weight, columns = scores["weight"][0], dict[str, Tensor]()
    for name, counted in (("accuracy", scores["other"][0]), ("score", scores["correct"][0])):
        columns |= named(name, interval(counted, weight, seed=seed))
    return {**columns, "loss": scores["loss"][0].mean(1)}
