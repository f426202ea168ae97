"""The experiment of `train.py carry`: maps without labels, carried artefacts, their fate and scores."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from aligners.datamodules.module import stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.policies import RowKind, policy_of
from aligners.datamodules.rows.read_rows import Link, PairedBatch, Plan
from aligners.datamodules.tokens.splits import Split
from aligners.datamodules.tokens.tokenised import same_tokenizer
from aligners.errors import UserError, check_known, check_range
from aligners.models.loading.load_models import check_precision
from aligners.models.model_identity import deciding, differing, listed_change
from aligners.probing.artefacts.carrying_maps import (
    EQUAL_WIDTHS,
    MAPS,
    STALE,
    FittedMap,
    PairedRows,
    fit_maps,
    forward_map,
)
from aligners.probing.artefacts.fate import (
    MOST_ROWS,
    Row,
    fate,
    measured_score,
    own_score,
    text_weights,
    verdict,
    with_labels,
)
from aligners.probing.artefacts.kinds import Artefact, Dictionary, Direction, Head
from aligners.probing.artefacts.owning import Truth, caution, truth_of

TOKENS, WORDS = RowKind("tokens"), RowKind("words")
Answers = dict[str, Tensor]  # condition -> answers (N, C)
PENALTIES = (1e-4, 1e-3, 1e-2, 0.1)  # of heads that are trained anew
OWNER, HELD_OUT = (
    "its owner",
    "labelled held-out texts",
)  # whose score on the old model a forecast begins with
DRAWS, SHUFFLES = (
    20,
    5,
)  # of random directions, and of shuffled maps: one alone is above or below chance


class Carrying(pl.LightningModule):
    """Carries artefacts from X, the old model, to Y, the new one.

    Attributes:
        carried: the new artefacts, in the order of `rows`.
        rows: of the report: one for each artefact.
        report_tables: `scores`, where there are labels; `maps`, every map that was tried.

    Args:
        owned: artefacts that are to be carried.
        maps: Tried for each artefact, at each site; the one through which its answers on validation texts change least
            carries it: identity (the artefact as it is), shift (of the means), procrustes, linear, ridge,
            ridge_identity (ridge towards the identity).
        least_kept: Say "do not use" where a smaller share of the artefact's score above chance is predicted to be kept,
            or its interval reaches chance.
        labelled: Score artefacts whose own labels the texts have: by the names of their `classes`, or by a
            `label_column` that they name. False: none.
        seed: of shuffled maps, random directions and the resampling of texts.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        owned: Sequence[Artefact],
        maps: list[str] = list(MAPS),  # noqa: B006  (copied)
        least_kept: float = 0.8,
        labelled: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_known(MAPS, maps=maps)
        check_range(least=1, maps=len(maps))
        check_range(least=0, most=1, least_kept=least_kept)
        self.artefacts, self.maps, self.least_kept = (
            list(owned),
            list(dict.fromkeys(maps)),
            least_kept,
        )
        self.labelled, self.seed = labelled, seed
        self.report_tables: dict[str, list[Row]] = {"scores": [], "maps": []}

    def setup(self, stage: str) -> None:
        """Check the models, and choose the rows."""
        check_precision(self.trainer)
        self.stream: PairedActivations = stream_of(self.trainer, PairedActivations)
        self.old, self.new = self.stream.frozen[:2]
        self.truths = {artefact.name: self._truth(artefact) for artefact in self.artefacts}
        doubt = caution([*self.truths.values()], self.stream.text.source)
        if doubt:
            self.stream.caution(doubt)
        self.meta = {
            **self.stream.describe(),
            "maps": self.maps,
            "least_kept": self.least_kept,
            "seed": self.seed,
        }
        self.meta["cautions"] = []
        for artefact in self.artefacts:
            self.meta["cautions"] += [*artefact.doubts, *check_model(artefact, self.old)]
        self.one_tokenizer = same_tokenizer(*self.stream.frozen_models.tokenizers[:2])
        kinds = [
            self.stream.reader.kind,
            *map(self.kind, self.artefacts),
            *([TOKENS] if self.one_tokenizer else []),
        ]
        self.kinds = list(dict.fromkeys(kinds))
        self.stream.plan(Plan(kinds=self.kinds[1:]))
        self.batches: dict[Split, list[PairedBatch]] = {"test": []}

    def _truth(self, artefact: Artefact) -> Truth:
        """The labels that an artefact is scored against, where it reads one row of each text."""
        whole = policy_of(artefact.rows).types is None
        return truth_of(artefact, self.stream) if self.labelled and whole else Truth()

    def kind(self, artefact: Artefact) -> RowKind:
        """The rows that an artefact reads; of tokens, where the models have different ones, words."""
        kind = RowKind(artefact.rows, bool(artefact.about.get("special_tokens", True)))
        return WORDS if kind.policy == "tokens" and not self.one_tokenizer else kind

    def test_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the held-out rows."""
        self.batches["test"].append(batch)

    def carry(self) -> None:
        """Fit, carry, and measure."""
        self.batches |= {split: list(self.stream.paired(split)) for split in ("fit", "validation")}
        self.paired = cache(self._paired)
        done = [self._carried(artefact) for artefact in self.artefacts]
        self.carried, self.rows = [new for new, _ in done], [row for _, row in done]

    def _paired(self, split: Split, kind: RowKind, place: int) -> PairedRows:
        """The rows of a split at a site pair; of the held-out ones at most `MOST_ROWS`, evenly spaced."""
        batches = [(batch, *batch.others)[self.kinds.index(kind)] for batch in self.batches[split]]
        parts = [
            [b.x[place] for b in batches],
            [b.y[place] for b in batches],
            [b.text for b in batches],
        ]
        rows = PairedRows(*(torch.cat(part).cpu() for part in parts))
        n = len(rows.text)
        return (
            rows
            if split != "test" or n <= MOST_ROWS
            else rows.at(torch.linspace(0, n - 1, MOST_ROWS).long())
        )

    def _carried(self, artefact: Artefact) -> tuple[Artefact, Row]:
        """Carry one artefact by the best of all maps and sites; its row of the report."""
        kind, sites = self.kind(artefact), self.stream.reader.sites
        places = [place for place, (site, _) in enumerate(sites) if site == artefact.site]
        if not places:
            raise UserError(
                f"Expected `data.sites` with site {artefact.about['site']} of {self.old.name}, which {artefact.name} "
                f"reads, but got {', '.join(f'{i}:{j}' for i, j in sites)}."
            )
        tried = [entry for place in places for entry in self._tried(artefact, kind, place)]
        best, on, place = min(tried, key=lambda entry: entry[0].error)
        about = {"artefact": artefact.name, "kind": artefact.kind}
        for fitted, rows, p in tried:
            named = {
                **about,
                "site_x": sites[p][0],
                "site_y": sites[p][1],
                "map": fitted.name,
                "fitted_on": str(rows),
            }
            row = {
                **named,
                "strength": fitted.strength,
                "error": fitted.error,
                "chosen": fitted is best,
            }
            self.report_tables["maps"].append(row)
        best = best.refitted(*(self.paired(split, on, place) for split in ("fit", "validation")))
        new, held = self._moved(artefact, best, on, place), self.paired("test", kind, place)
        weights, answers = (
            text_weights(held.text, self.seed),
            {"native": artefact.answers(held.old)},
        )
        if artefact.width == self.new.width:
            own_place = next((p for p in places if sites[p][1] == sites[p][0]), place)
            answers["stale"] = artefact.answers(self.paired("test", kind, own_place).new)
        answers["carried"] = new.answers(held.new)
        own, measured_by = self._own_score(artefact, answers["native"], held, weights)
        told = partial(fate, artefact, answers["native"], own=own, weights=weights)
        after, before = (
            told(answers["carried"]),
            told(answers["stale"]) if "stale" in answers else None,
        )
        about |= {"model_x": self.old.name, "model_y": self.new.name}
        row = {
            **{**about, "site_x": sites[place][0], "site_y": sites[place][1], "rows": str(kind)},
            **{"n_texts": len(held.text.unique()), "n_fitted": len(self.stream.texts.fit)},
            **{"map": best.name, "fitted_on": str(on), "error": best.error},
            "verdict": verdict(own, after, before, self.least_kept),
            "own_score": None if own is None else float(own[0]),
            "own_score_of": measured_by,
            **{**after, **{f"stale_{name}": before and before[name] for name in after}},
        }
        if self.truths[artefact.name].labels is not None:
            scores = self._scored(artefact, answers, weights, kind, place)
            self.report_tables["scores"] += [{**about, **score} for score in scores]
        return new, row

    def _own_score(
        self, artefact: Artefact, answers: Tensor, held: PairedRows, weights: Tensor
    ) -> tuple[Tensor | None, str | None]:
        """The AUROC on the old model, with resamples, and whose it is: its owner's, or of labelled held-out texts."""
        own = own_score(artefact, len(weights), self.seed)
        if own is not None:
            return own, OWNER
        labels = self.truths[artefact.name].labels
        if labels is None:
            return None, None
        own = measured_score(artefact, answers, labels["test"][held.text], weights)
        return (own, HELD_OUT) if own[0].isfinite() else (None, None)  # of one class there is none

    def _tried(
        self, artefact: Artefact, kind: RowKind, place: int
    ) -> Iterator[tuple[FittedMap, RowKind, int]]:
        """Maps that are fitted on the rows that it reads, and on tokens where that is one row of a text."""
        whole = policy_of(kind.policy).types is None and self.one_tokenizer
        for on in (kind, *([TOKENS] if whole else ())):
            maps = [name for name in self.maps if on == kind or name != STALE]
            fitting, validation = (
                self.paired("fit", on, place),
                self.paired("validation", kind, place),
            )
            for fitted in fit_maps(artefact, fitting, validation, maps) if maps else ():
                yield fitted, on, place

    def _moved(self, artefact: Artefact, best: FittedMap, on: RowKind, place: int) -> Artefact:
        """The artefact for the new model; pushed forward, too, where something is put into states."""
        forward = None
        if isinstance(artefact, (Direction, Dictionary)):
            fitting, validation = (
                self.paired("fit", on, place),
                self.paired("validation", on, place),
            )
            forward = forward_map(best.name, fitting, validation)
        model, came = (
            self.new.identity(),
            {"model": self.old.name, "site": artefact.site, "map": best.name},
        )
        about = {"model": model["name"], **deciding(model), "carried_from": came}
        return artefact.carried(
            best.back, forward, site=self.stream.reader.sites[place][1], **about
        )

    def _shuffled(self, artefact: Artefact, kind: RowKind, place: int) -> Iterator[Artefact]:
        """Carried by the best maps between rows of different texts."""
        maps = [name for name in self.maps if name not in EQUAL_WIDTHS] or ["ridge"]
        parts = [self.paired(split, kind, place) for split in ("fit", "validation")]
        for seed in range(self.seed, self.seed + SHUFFLES):
            draw = torch.Generator().manual_seed(seed)
            mixed = [
                replace(rows, old=rows.old[torch.randperm(len(rows.old), generator=draw)])
                for rows in parts
            ]
            yield artefact.carried(fit_maps(artefact, mixed[0], mixed[1], maps)[0].back)

    def _scored(
        self, artefact: Artefact, answers: Answers, weights: Tensor, *at: Any
    ) -> Iterator[Row]:
        """Scores against labels: of all answers, of a head that is trained anew, and of floors.

        Args:
            artefact: that was carried.
            answers: on the held-out rows.
            weights: of these; see `text_weights`.
            at: the kind of rows, and the number of the site pair.
        """
        held, native, fitting = self.paired("test", *at), answers["native"], self.paired("fit", *at)
        own = cast(dict[Split, Tensor], self.truths[artefact.name].labels)
        labels, columns = (
            own["test"][held.text],
            native.shape[1] if isinstance(artefact, Head) else 1,
        )
        known, anew = (
            labels >= 0,
            trained_anew(fitting.new, own["fit"][fitting.text], max(columns, 2)),
        )
        drawn = torch.randn(
            self.new.width, DRAWS, generator=torch.Generator().manual_seed(self.seed)
        )
        floor, at_random = Direction({"vector": drawn[:, 0]}), (held.new @ drawn).split(1, dim=1)
        judged = {name: (artefact, native, [given], labels) for name, given in answers.items()}
        shuffled = [floor.answers(held.new) for floor in self._shuffled(artefact, *at)]
        judged["shuffled map"] = artefact, native, shuffled, labels
        judged["trained anew"] = anew, anew.answers(held.new), [anew.answers(held.new)], labels
        judged["random direction"] = (
            floor,
            at_random[0],
            list(at_random),
            (labels == int(columns < 3)).long(),
        )
        for name, (judge, old, each, truth) in judged.items():
            row = with_labels(
                judge, [given[known] for given in each], old[known], truth[known], weights[:, known]
            )
            yield {"condition": name, "n_texts": len(held.text[known].unique()), **row}


def own_sites(
    artefacts: Sequence[Artefact], depths: Sequence[int], component: Any = None
) -> list[Link]:
    """Each artefact's own site of the old model, with the same of the new one, or with all where depths differ."""
    sites = sorted({artefact.site for artefact in artefacts})
    return [
        Link(0, 1, i, j)
        for i in sites
        for j in ([i] if depths[0] == depths[1] else range(1, depths[1] + 1))
    ]


def check_model(artefact: Artefact, model: Any) -> list[str]:
    """Raise unless an artefact is the model's, as far as is known; returns what is to be said.

    Raises:
        ValueError: it was made on other weights.
    """
    told = artefact.about.get("fingerprint")
    then = {**artefact.about, "name": artefact.about["model"]}
    if told is not None and differing(then, model.identity()):
        raise UserError(
            f"Expected `data.model_x` to be the model that {artefact.name} reads, but it was "
            f"{listed_change(then, model.identity())}."
        )
    if told is None and str(artefact.about["model"]).rstrip("/") != str(model.name).rstrip("/"):
        return [
            f"{artefact.name} says that it reads {artefact.about['model']}, and was read as one of {model.name}."
        ]
    return []


def trained_anew(rows: Tensor, labels: Tensor, classes: int) -> Head:
    """A linear head on new states, by penalised maximum likelihood; the penalty does best on a fifth of the rows.

    Args:
        rows: (N, d) of the new model.
        labels: (N,) class of each, -1 for none.
        classes: C.
    """
    known = labels >= 0
    x, y = rows[known].double(), labels[known]
    mean, scale = x.mean(0), x.std(0).clamp(min=1e-6)
    x, last = (x - mean) / scale, len(y) * 4 // 5

    def loss(weight: Tensor, rows: slice) -> Tensor:
        return nn.functional.cross_entropy(x[rows] @ weight[:-1] + weight[-1], y[rows])

    def fitted(rows: slice, penalty: float) -> Tensor:
        weight = torch.zeros(x.shape[1] + 1, classes, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

        def closure() -> Any:
            optimizer.zero_grad()
            penalised = loss(weight, rows) + penalty * weight[:-1].square().sum()
            penalised.backward()
            return penalised

        optimizer.step(closure)
        return weight.detach()

    best = min(
        PENALTIES, key=lambda penalty: float(loss(fitted(slice(last), penalty), slice(last, None)))
    )
    weight = fitted(slice(None), best)
    slope = weight[:-1] / scale[:, None]
    return Head.of(slope.T.float(), (weight[-1] - mean @ slope).float())
