"""Targets of fine-tuning besides classes: spans that answer questions, and dependency trees."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

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

NOTHING = -100  # where there is no answer; PyTorch's cross-entropy ignores it
LONGEST = 30  # tokens of an answer, as in the code released with BERT
# Widths and dropout of Dozat and Manning 2017, Table 1.
ARC = 500
RELATION = 100
DROPOUT = 0.33
COUNTS = ("correct", "loss", "other", "weight")  # see `TokenTask.measures`


Measures = dict[str, Tensor]  # of texts, by name
Rows = dict[str, list[Any]]  # of texts, by column


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
        """Add what the head of `loader` lacks to the model that is trained, and remember it."""
        return model

    @abstractmethod
    def losses(self, outputs: Tensor, batch: TextBatch, split: Split) -> Tensor:
        """Return the loss of each text, (B,), from the outputs of the head, (B, T, outputs)."""

    @abstractmethod
    def measures(self, outputs: Tensor, batch: TextBatch, split: Split) -> Measures:
        """Return `COUNTS` of each text, (B,): the score is Σ correct / Σ weight, the accuracy Σ other / Σ weight."""

    def _read(self, batch: TextBatch, split: Split) -> tuple[Rows, Any]:
        """Return the rows of a batch, and where their tokens lie, padded as the batch is."""
        texts = getattr(self.data.texts, split)
        rows = texts[list(batch.text_numbers)]
        parts = [rows["text"]]
        if "text_pair" in rows:
            parts.append(rows["text_pair"])
        tokens = self.tokenizer(
            *parts, truncation=True, max_length=self.data.max_length
        )
        longest = batch.inputs[self.place]["input_ids"].shape[1]
        for encoding in tokens.encodings:
            encoding.pad(longest, direction=self.tokenizer.padding_side)
        return rows, tokens


class Spans(TokenTask):
    """Extractive question answering, as in SQuAD: each token is scored as the start and as the end of the answer.

    Scores are F1 and, as accuracy, exact match, both against the best of a question's answers. A passage is cut at
    `max_length`: it is not read in windows.

    References:
        Devlin et al. 2019, BERT, §4.2; Rajpurkar et al. 2016, SQuAD, §6.
    """

    score = "span_f1"
    loader = AutoModelForQuestionAnswering
    outputs = 2

    def losses(self, outputs: Tensor, batch: TextBatch, split: Split) -> Tensor:
        """Return the cross-entropy of the first answer's ends, averaged; an answer that was cut off has no loss."""
        rows, tokens = self._read(batch, split)
        true = _first_and_last(rows, tokens).to(outputs.device)
        mask = batch.inputs[self.place]["attention_mask"]
        padding = mask[..., None] == 0
        least = torch.finfo(outputs.dtype).min
        logits = outputs.masked_fill(padding, least)
        losses = nn.functional.cross_entropy(logits, true, reduction="none")
        return losses.mean(1)

    def measures(self, outputs: Tensor, batch: TextBatch, split: Split) -> Measures:
        """Measure as in `TokenTask`, for the most probable span of the passage."""
        rows, tokens = self._read(batch, split)
        spans = self._spans(outputs, tokens)
        longest = outputs.shape[1]
        scores = []
        for number, best in enumerate(spans.flatten(1).argmax(1).tolist()):
            characters = _characters(tokens, number, *divmod(best, longest))
            given = rows["text_pair"][number][characters]
            scores.append(_squad_scores(given, rows[ANSWERS][number]))
        f1, exact = torch.tensor(scores, device=outputs.device).unbind(1)
        return {
            "correct": f1,
            "loss": self.losses(outputs, batch, split),
            "other": exact,
            "weight": torch.ones_like(f1),
        }

    def _spans(self, outputs: Tensor, tokens: Any) -> Tensor:
        """Score all spans of the passages by first and last token, (B, T, T); -inf for impossible ones."""
        number, longest, _ = outputs.shape
        parts = map(tokens.sequence_ids, range(number))  # 1: the passage
        passage = torch.tensor([[part == 1 for part in ids] for ids in parts])
        passage = passage.to(outputs.device)
        start, end = outputs.unbind(-1)
        start = start.where(passage, -torch.inf)
        end = end.where(passage, -torch.inf)
        scores = start[:, :, None] + end[:, None]

        short = torch.ones(longest, longest, dtype=torch.bool)
        short = short.triu().tril(LONGEST - 1)
        return scores.where(short.to(outputs.device), -torch.inf)


def _first_and_last(rows: Rows, tokens: Any) -> Tensor:
    """Return the first and the last token of each first answer, (B, 2); -100 where one of them was cut off."""
    ends = []
    for number, answers in enumerate(rows[ANSWERS]):
        start = answers["answer_start"][0]
        length = len(answers["text"][0])
        end = start + max(0, length - 1)
        first = tokens.char_to_token(number, start, 1)
        last = tokens.char_to_token(number, end, 1)
        if first is None or last is None:
            first = last = NOTHING
        ends.append([first, last])
    return torch.tensor(ends)


def _characters(tokens: Any, number: int, first: int, last: int) -> slice:
    """Return the characters of a passage from one token to another; empty if one of them stands for none."""
    start = tokens.token_to_chars(number, first)
    end = tokens.token_to_chars(number, last)
    if start is None or end is None:
        return slice(0, 0)
    return slice(start.start, end.end)


def _squad_scores(given: str, answers: Any) -> list[float]:
    """Return F1 and exact match of an answer, against the closest correct answer."""
    prediction = {"prediction_text": given, "id": ""}
    target = {"answers": answers, "id": ""}
    scores = squad([prediction], [target])
    f1 = float(scores["f1"])
    exact = float(scores["exact_match"])
    return [f1 / 100, exact / 100]


class Biaffine(nn.Module):
    """Scores arcs between the words of a sentence, and the relation of each arc.

    Args:
        relations: R, their number.

    References:
        Dozat and Manning 2017, "Deep biaffine attention for neural dependency parsing", ICLR, eqs. 2, 3 and 6.
    """

    def __init__(self, relations: int) -> None:
        super().__init__()
        arc = torch.zeros(1, ARC + 1, ARC)
        relation = torch.zeros(relations, RELATION + 1, RELATION + 1)
        self.arc = nn.Parameter(arc)
        self.relation = nn.Parameter(relation)

    def forward(self, features: Tensor) -> Tensor:
        """Map words' features (B, W, 2 · 500 + 2 · 100) to scores of the arc from i to its head j and its relations.

        Returns:
            (B, W, W, 1 + R)
        """
        hidden = nn.functional.leaky_relu(features, 0.1)
        hidden = nn.functional.dropout(hidden, DROPOUT, self.training)
        widths = [ARC, ARC, RELATION, RELATION]
        word, head, of_word, of_head = hidden.split(widths, -1)
        word = _with_one(word)
        of_word = _with_one(of_word)
        of_head = _with_one(of_head)
        arcs = _biaffine(word, self.arc, head)
        relations = _biaffine(of_word, self.relation, of_head)
        return torch.cat([arcs, relations], -1)


def _biaffine(words: Tensor, matrices: Tensor, heads: Tensor) -> Tensor:
    """wᵀ M h for every word, every head and every matrix, (B, W, W, R)."""
    return torch.einsum("bid,rde,bje->bijr", words, matrices, heads)


def _with_one(states: Tensor) -> Tensor:
    """Append a feature that is 1, so that a product with a matrix includes an offset."""
    return nn.functional.pad(states, (0, 1), value=1.0)


class TrueTrees(NamedTuple):
    """The true trees of B sentences of up to W words.

    Attributes:
        heads: heads of each word, (B, W); -100 where there is none.
        relations: of each word to its head, likewise.
        read: whether the model has read the word and its head, (B, W) bool.
    """

    heads: Tensor
    relations: Tensor
    read: Tensor


class Trees(TokenTask):
    """The head of each word and its relation to it, read off the word's first token by a biaffine classifier.

    A root is its own head. Heads are chosen word by word, so they need not make a tree. The score is LAS, the accuracy
    UAS, over all words, punctuation included; a word that was cut off is wrong.
    """

    score = "las"
    loader = AutoModelForTokenClassification
    outputs = 2 * (ARC + RELATION)
    parser: nn.Module

    def __init__(self, data: ModelTexts, place: int) -> None:
        super().__init__(data, place)
        names: set[str] = set()
        for sentence in sentences_in(data.texts.fit):
            names.update(sentence.labels("dependencies").values())
        self.names = sorted(names)

    def finish(self, model: PreTrainedModel) -> PreTrainedModel:
        """Add the biaffine classifier, whose weights begin at zero."""
        parser = Biaffine(len(self.names))
        model.parser = self.parser = parser.to(model.device)
        model.config.update({"relations": self.names})
        return model

    def losses(self, outputs: Tensor, batch: TextBatch, split: Split) -> Tensor:
        """Return the cross-entropy of each word's head, and of its relation at the true head; mean over words."""
        scores, true = self._scores(outputs, batch, split)
        return tree_losses(scores, true)

    def measures(self, outputs: Tensor, batch: TextBatch, split: Split) -> Measures:
        """As in `TokenTask`."""
        scores, true = self._scores(outputs, batch, split)
        heads = scores[..., 0].argmax(-1)
        at_head = _at(scores[..., 1:], heads)
        relations = at_head.argmax(-1)
        right = (heads == true.heads) & true.read
        both = right & (relations == true.relations)
        words = true.heads != NOTHING
        return {
            "loss": tree_losses(scores, true),
            "correct": both.sum(1).float(),
            "other": right.sum(1).float(),
            "weight": words.sum(1).float(),
        }

    def _scores(
        self, outputs: Tensor, batch: TextBatch, split: Split
    ) -> tuple[Tensor, TrueTrees]:
        """Return scores (B, W, W, 1 + R) of arcs and their relations, and the true trees."""
        rows, tokens = self._read(batch, split)
        true = self._true(rows, tokens).to(outputs.device)
        first, heads, relations = true
        at = first.clamp(min=0).unsqueeze(-1)
        words = torch.take_along_dim(outputs, at, 1)
        scores = self.parser(words).float()

        read = first >= 0
        least = torch.finfo(scores.dtype).min
        arcs = scores[..., :1]
        arcs = arcs.where(read[:, None, :, None], least)
        scores = torch.cat([arcs, scores[..., 1:]], -1)
        head_read = read.gather(1, heads.clamp(min=0))
        return scores, TrueTrees(heads, relations, read & head_read)

    def _true(self, rows: Rows, tokens: Any) -> Tensor:
        """Return the first token, the head and the relation of each word, (3, B, W); -100 where there is none."""
        sentences = sentences_in(rows)
        longest = max([len(sentence.words) for sentence in sentences])
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
                relation = named.get(word, "")
                relations[number, word] = numbers.get(relation, NOTHING)
                char += len(string) + 1
            for word, head in enumerate(sentence.heads):
                # a root, whose head is 0, is its own head here
                heads[number, word] = head - 1 if head else word
        return found


def tree_losses(scores: Tensor, true: TrueTrees) -> Tensor:
    """Return the cross-entropy of heads and of relations at the true heads, mean over each sentence's words, (B,).

    Args:
        scores: of arcs and relations, (B, W, W, 1 + R).
        true: the trees.
    """
    cross_entropy = partial(nn.functional.cross_entropy, reduction="none")
    heads = true.heads.where(true.read, NOTHING)
    relations = true.relations.where(true.read, NOTHING)
    arcs = scores[..., 0]
    of_head = cross_entropy(arcs.mT, heads)
    at_head = _at(scores[..., 1:], heads.clamp(min=0))
    of_relation = cross_entropy(at_head.mT, relations)
    both = torch.stack([of_head, of_relation])
    words = (heads != NOTHING).sum(1)
    sums = both.sum((0, 2))
    return sums / words.clamp(min=1)


def _at(values: Tensor, heads: Tensor) -> Tensor:
    """values[b, i, heads[b, i]] for (B, W, W, R) and (B, W): (B, W, R)."""
    at = heads[..., None, None]
    found = torch.take_along_dim(values, at, 2)
    return found.squeeze(2)


def token_task(data: ModelTexts, place: int) -> TokenTask | None:
    """Return the task of texts without classes: answers or trees; None for classes, and for numbers to predict."""
    kinds: dict[str, Any] = {"spans": Spans, "trees": Trees}
    if data.targets not in kinds:
        return None
    return kinds[data.targets](data, place)


def token_columns(scores: Measures, seed: int) -> Measures:
    """Return score, accuracy and loss, with intervals over texts, each (1,).

    Args:
        scores: `COUNTS` of each text, (1, 1, n).
        seed: seed of the resampling.
    """
    weight = scores["weight"][0]
    accuracy = interval(scores["other"][0], weight, seed=seed)
    score = interval(scores["correct"][0], weight, seed=seed)
    columns = named("accuracy", accuracy) | named("score", score)
    columns["loss"] = scores["loss"][0].mean(1)
    return columns
