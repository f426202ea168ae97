"""How held-out texts go on: continuations by a model itself and with changed states, and how these differ."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.fitting.bank import DIRECTIONS
from aligners.injection.generation.generating import (
    Added,
    Generated,
    Replaced,
    check_cache,
    check_generates,
    check_room,
    generate,
)
from aligners.injection.methods import Method
from aligners.injection.panels import Panel
from aligners.injection.routes import Route
from aligners.injection.scoring.scores import mean_columns, per_text_sums
from aligners.injection.scoring.tasks import batch_answers
from aligners.models.model import FrozenModel
from aligners.progress import hidden, track
from datamodules.asking import UNASKED, masked_targets
from datamodules.tokens.tokenised import TokenisedTexts

BATCH, SHOWN = 16, 3  # prompts that are continued together, and those whose texts a report shows
Row = dict[str, Any]
Way = tuple[Row, FrozenModel, Added | Replaced | None]


@dataclass(frozen=True)
class Continuing:
    """Text that is generated.

    Args:
        generate: number of held-out texts whose beginnings are continued by language models; 0: none. A report then
            compares the continuations.
        prompt_tokens: tokens of a beginning. Shorter texts are passed over.
        new_tokens: most tokens of a continuation.
        temperature: 0: the most probable token each time; else tokens are drawn from softmax(logits / temperature).
    """

    generate: int = 0
    prompt_tokens: int = 8
    new_tokens: int = 32
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_range(least=0, generate=self.generate, temperature=self.temperature)
        check_range(least=1, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)

    def prompts(self, texts: TokenisedTexts) -> Tensor:
        """The first tokens of the first texts that are longer: (B, T) int64.

        Raises:
            ValueError: no text is.
        """
        tokens, _, lengths = texts.first_tokens()
        starts = (lengths.cumsum(0) - lengths)[lengths > self.prompt_tokens][: self.generate]
        if not len(starts):
            raise UserError(
                f"Expected held-out texts of more than `prompt_tokens` {self.prompt_tokens} tokens to continue, but "
                f"the longest has {int(lengths.max())}. Use fewer, or longer texts."
            )
        return tokens[starts[:, None] + torch.arange(self.prompt_tokens)].long()


class Continuations:
    """Continuations of the same prompts, beside the model's own.

    Args:
        model: whose own continuations they are compared with, and whose tokens they are.
        prompts: (B, T) int64, without padding.
        options: how they are generated.
        seed: of draws, and of the resampling of prompts.

    Attributes:
        own: what the model writes by itself.
    """

    def __init__(self, model: FrozenModel, prompts: Tensor, options: Continuing, seed: int) -> None:
        self.model, self.options, self.seed = model, options, seed
        self.prompts = prompts.to(model.device)
        self.own = self.by(model)

    def by(self, model: FrozenModel, changing: Added | Replaced | None = None) -> Generated:
        """What a model of the same tokens writes."""
        new, warmth, parts = self.options.new_tokens, self.options.temperature, list[tuple[Tensor, Tensor]]()
        for ids in self.prompts.split(BATCH):
            part = generate(model, {"input_ids": ids}, changing, new_tokens=new, temperature=warmth, seed=self.seed)
            padded = torch.nn.functional.pad(part.tokens, (0, new - part.tokens.shape[1]))  # all have ended before
            parts.append((padded, part.lengths))
        tokens, lengths = zip(*parts, strict=True)
        return Generated(torch.cat(tokens), torch.cat(lengths))

    def tables(self, todo: Iterable[Way]) -> dict[str, list[Row]]:
        """Tables of a report: `generation`, a row for each way to write, and `samples`, the first texts of each.

        Args:
            todo: what a row says of a way, the model that writes, and what is changed in it.
        """
        rows, samples = list[Row](), list[Row]()
        for about, model, changing in todo:
            own = model is self.model and changing is None
            found = self.own if own else self.by(model, changing)
            rows.append(about | self.figures(found))
            samples += [about | sample for sample in self.samples(found)]
        return {"generation": rows, "samples": samples}

    def figures(self, found: Generated) -> Row:
        """How alike the model's own they are, how likely the model finds them, and how much they repeat themselves."""
        mine, theirs = self._marked(self.own), self._marked(found)
        either, equal = (mine >= 0) | (theirs >= 0), mine == theirs
        losses = mean_columns("perplexity", self._losses(found), found.lengths, self.seed)
        pairs = [[*pairwise(text)] for text in self._texts(found) if len(text) > 1]
        return {
            **mean_columns("agreement", (equal & either).sum(1), either.sum(1), self.seed),
            **{name: None if value is None else math.exp(value) for name, value in losses.items()},
            "same_tokens": float((equal.long().cumprod(1).bool() & either).sum(1).double().mean()),
            "distinct_pairs": sum(len({*text}) / len(text) for text in pairs) / len(pairs) if pairs else None,
            "n_prompts": len(self.prompts),
            "n_tokens": int(found.lengths.sum()),
        }

    def _marked(self, found: Generated) -> Tensor:
        """The tokens, -1 after the end of a text."""
        place = torch.arange(found.tokens.shape[1], device=found.tokens.device)
        return found.tokens.where(place < found.lengths[:, None], -1)

    def samples(self, found: Generated) -> list[Row]:
        """The first prompts, and how they go on, as text."""
        pairs = zip(self.prompts[:SHOWN].tolist(), self._texts(found), strict=False)
        named = [map(cast(Any, self.model.tokenizer).decode, pair) for pair in pairs]
        return [dict(zip(("prompt", "continuation"), pair, strict=True)) for pair in named]

    def _texts(self, found: Generated) -> list[list[int]]:
        return [row[:n] for row, n in zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)]

    @torch.no_grad()
    def _losses(self, found: Generated) -> Tensor:
        """The loss in nats of each continuation under the model by itself, summed over its tokens, (B,)."""
        parts = []
        for ids, tokens, lengths in zip(*(part.split(BATCH) for part in (self.prompts, *found[:2])), strict=True):
            whole, asked = torch.cat([ids, tokens], 1), self._marked(Generated(tokens, lengths))
            answers = torch.full_like(whole, UNASKED)
            answers[:, ids.shape[1] - 1 : -1] = asked.where(asked >= 0, UNASKED)
            targets, mask = masked_targets(answers), torch.cat([torch.ones_like(ids), (asked >= 0).long()], 1)
            logits = self.model.logits({"input_ids": whole, "attention_mask": mask})
            parts.append(per_text_sums(batch_answers(logits, targets).loss, targets))
        return torch.cat(parts)


def check_continued(options: Continuing, texts: TokenisedTexts, why_not: Mapping[Route, str | None]) -> None:
    """Raise unless the held-out texts can be continued through all routes.

    Args:
        options: how.
        texts: held out.
        why_not: route -> why its states cannot be injected, or None.

    Raises:
        ValueError: as `check_generates`, `check_cache` and `check_room`; the texts are too short, or nothing can be
            injected on a route.
    """
    options.prompts(texts)
    for route, why in why_not.items():
        check_generates(route.target)
        check_cache(route.source)
        for model in (route.source, route.target):
            check_room(model, options.prompt_tokens, options.new_tokens)
        if why is not None:
            raise UserError(f"Expected no `generate` where nothing can be injected: {why}. Leave it out.")


class ContinueTexts(pl.Callback):
    """Generates text with every map of an `InjectionEvaluation` in place at every site, once it has measured.

    Tables for the report: `generation`, a row for each method and site; `samples`, the first prompts and what follows.

    Args:
        options: how; nothing is done where no text is to be continued.
    """

    def __init__(self, options: Continuing) -> None:
        self.options = options

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Generate, on the first rank, as the report is its alone."""
        if not self.options.generate or not trainer.is_global_zero:
            return
        prompts = self.options.prompts(pl_module.stream.split("test"))
        tables: dict[str, list[Row]] = {"generation": [], "samples": []}
        for panel in (panel for panel in pl_module.panels if panel.behaviour is not None):
            texts = Continuations(panel.route.target, prompts, self.options, pl_module.seed)
            todo = list(_ways(panel))
            for name, rows in texts.tables(track(todo, "Generating", disable=hidden(trainer))).items():
                tables[name] += rows
        pl_module.report_tables = tables
        pl_module.meta |= {"generation": vars(self.options)}


def _ways(panel: Panel) -> Iterator[Way]:
    """The models by themselves, then every map at every site, and `identity`."""
    source, target, pairs = panel.route.source, panel.route.target, panel.route.pairs
    about = {"model_x": source.name, "model_y": target.name, "direction": DIRECTIONS[panel.route.key]}
    alone = about | {"role": "ceiling", "site_x": None, "site_y": None}
    yield alone | {"method": "native_y"}, target, None
    if source.task == "causal":
        yield alone | {"method": "native_x"}, source, None
    for method in panel.methods:
        for place, (i, j) in enumerate(pairs if method.aligner is not None and method.name != "mean" else ()):
            here = about | {"method": method.name, "role": method.role, "site_x": i, "site_y": j}
            yield here, target, Replaced(j, source, i, partial(_mapped, method, place, len(pairs)))


def _mapped(method: Method, place: int, sites: int, rows: Tensor) -> Tensor:
    """Rows (N, d_x) mapped by a method at one of its sites, (N, d_y)."""
    return method.map(rows.expand(sites, *rows.shape), None)[place]
