"""Compares two models on the same texts: their answers, their states site by site, their weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.policies import PAIRS_TOKENS, RowKind, Rows
from aligners.datamodules.rows.row_types import types_of
from aligners.datamodules.rows.shown_rows import shown_rows
from aligners.datamodules.task_targets import Targets, TaskBatch
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.errors import UserError, check_known, check_range
from aligners.fitting.map_errors import FarErrors, squared_distances, squared_errors
from aligners.injection.behaviour import stitched_logits
from aligners.injection.comparing import precision
from aligners.injection.comparing.changed_latents import ChangedLatents
from aligners.injection.comparing.compared_rows import function_of, site_rows
from aligners.injection.comparing.read_answers import (
    Asked,
    Reader,
    answer_sums,
    divergences,
    in_two,
    padded,
)
from aligners.injection.comparing.residuals import Residuals
from aligners.injection.comparing.verdict import (
    AS_IS,
    LINEAR,
    TIMES,
    TURNED,
    Verdict,
    decide,
)
from aligners.injection.scoring.scores import Row, Sums, per_text_sums
from aligners.injection.scoring.task_scores import chosen, unit_losses
from aligners.maps.linear import Affine, Permutation, Procrustes, Ridge
from aligners.maps.solvers import ridge_regression
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.models.model import FrozenModel
from aligners.similarity.algebra.moments import Moments, MomentsMetric

RIDGES = (
    1e-13,
    1e-11,
    1e-9,
    1e-7,
    1e-5,
    1e-3,
    1e-1,
)  # ridges of the linear map, out of which the rows choose; exact maps need none
ROWS = 2  # fitting rows that a map needs for each dimension
KINDS: dict[str, type[Affine]] = {
    "permutation": Permutation,
    TURNED: Procrustes,
    LINEAR: Ridge,
}
MAPS = tuple(KINDS)
COSTLY = 8  # sites at which OLD's states are put into NEW
ENDS = (
    "first",
    "most",
)  # of a verdict: numbers of site pairs, which its report turns into sites of NEW

OFF = "weights off by {} rounding"  # a variant of OLD

Map = Callable[[Tensor], Tensor]
Read = tuple[Tensor, Tensor]  # rows (S, N, d), and answers
Track = Callable[[Sequence[Sequence[int]], str], Iterator[Sequence[int]]]


class Compared(NamedTuple):
    """What a comparison found.

    Attributes:
        verdict: what has changed, judged by the figures.
        meta: what holds for all rows, as plain values: the verdict, precision, floors, answers, what was left out.
        rows: one row for each site pair and map: the unexplained variance, floor and tolerance, and the cost of OLD's
            states in NEW.
        report_tables: `function`, `weights`, `floors`, `texts`, `tokens`, `types`, `directions` and, with a
            `dictionary`, `latents`.
        vectors: site of NEW -> (k, d) directions of the residual there, of unit length, in order of their share.
    """

    verdict: Verdict
    meta: Row
    rows: list[Row]
    report_tables: dict[str, list[Row]]
    vectors: dict[int, Tensor]


class Left(NamedTuple):
    """What a map leaves unexplained of the held-out rows.

    Attributes:
        rows: (N, k, d) NEW's rows minus the mapped ones, at k sites.
        text: (N,) number of each row's text.
        token: (N,) place of each row in its text.
    """

    rows: Tensor
    text: Tensor
    token: Tensor


@dataclass(eq=False)
class Comparison:
    """Compares NEW with OLD in three passes over texts: to fit maps, to measure, and to look at what is left.

    A figure counts as changed where it exceeds `verdict.TIMES` times its floor. The floor is how much OLD differs from
    itself in another batch, with other padding, with float32 rounding errors in its weights and, if NEW is stored in a
    coarser precision, with weights rounded to it. Rotated or linearly mapped coordinates round differently. For such
    maps, OLD is also measured with random errors of that precision in its weights.

    Args:
        old: the model as it was.
        new: the model as it is.
        fit: texts that maps are fitted on, tokenised for both models.
        held: other texts, on which everything is measured.
        texts: the held-out texts as text: a `datasets.Dataset`.
        pairs: site pairs (of OLD, of NEW).
        kind: kind of the rows.
        labelled: whether the texts have labels that both classifiers should predict.
        maps: closed forms out of `MAPS`; if empty, nothing is fitted.
        further: name -> a fitted map from rows of OLD (S, N, d) to those of NEW, which is also measured.
        costs: number of held-out texts on which OLD's states are put into NEW, at `COSTLY` sites; 0: none.
        most: most texts of each kind to read, from the first on; default: all.
        batch_size: texts that are read together.
        seed: seed of masks, of the batches' order, and of the resampling of texts.
        track: shows the progress of a pass.
        dictionary: a sparse dictionary of both models, of which the latents are named that the change lies in.
        dictionary_pairs: its site pairs, each one of `pairs`.

    Raises:
        ValueError: too few texts for the maps, no rows in common, or an option is out of its range.
    """

    old: FrozenModel
    new: FrozenModel
    fit: TokenisedTexts
    held: TokenisedTexts
    texts: Any
    pairs: Sequence[tuple[int, int]]
    kind: RowKind
    labelled: bool = False
    maps: Sequence[str] = MAPS
    further: Mapping[str, Map] = field(default_factory=dict)
    costs: int = 0
    most: int | None = None
    batch_size: int = 32
    seed: int = 0
    track: Track = lambda batches, what: iter(batches)
    dictionary: SparseAligner | None = None
    dictionary_pairs: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        check_known(MAPS, maps=self.maps)
        check_range(least=0, costs=self.costs)
        check_range(least=1, most=self.most, batch_size=self.batch_size)
        old, new = self.old, self.new
        self.asked = Asked(
            old, new, labelled=self.labelled, seed=self.seed, alike=self.held.alike
        )
        self.precision = precision.stored_precision(new)
        sites = [list(side) for side in zip(*self.pairs, strict=True)]
        self.readers = [
            Reader(old, 0, sites[0], self.kind),
            Reader(new, 1, sites[1], self.kind),
        ]
        self._check_rows()
        self.variants = self._variants(sites[0])
        # Variants that count only for other coordinates.
        coarsest = OFF.format(self.precision)
        coarse = self.precision != "float32"
        self.loose = {name: coarse and name == coarsest for name in self.variants}

    def _variants(self, sites: Sequence[int]) -> dict[str, Reader]:
        """Return readers of OLD that should find the same, but round differently."""
        old, changed = self.old, self._changed_weights()
        further = partial(padded, most=old.max_length)
        variants = {
            "another batch": Reader(old, 0, sites, self.kind, layout=in_two),
            "further padding": Reader(old, 0, sites, self.kind, layout=further),
        }
        for name, model in changed.items():
            variants[name] = Reader(model, 0, sites, self.kind)
        return variants

    def _changed_weights(self) -> dict[str, FrozenModel]:
        """Return OLD with its weights rounded in other ways, as a change of format may round them."""
        old, stored = self.old, self.precision
        changed = {
            OFF.format("float32"): precision.saved_elsewhere(old, "float32", self.seed)
        }
        if stored == "float32":
            return changed
        if precision.stored_precision(old) != stored:
            like = dict(self.new.model.named_parameters())

            def as_stored(name: str, weight: Tensor) -> Tensor:
                return precision.rounded(weight, stored, like.get(name))

            changed[f"weights rounded to {stored}"] = precision.with_weights(
                old, as_stored
            )
        changed[OFF.format(stored)] = precision.saved_elsewhere(old, stored, self.seed)
        return changed

    def _check_rows(self) -> None:
        read = {
            texts: texts[range(len(texts))[: self.most]]
            for texts in (self.fit, self.held)
        }
        counts = [sum(self.readers[0].rows_of(batch).counts) for batch in read.values()]
        if self.kind.policy == "tokens" and any(
            batch.inputs[0] is not batch.inputs[1] for batch in read.values()
        ):
            raise UserError(
                f"{PAIRS_TOKENS[0]}, but these models have different tokenizers. {PAIRS_TOKENS[1]}."
            )
        if not all(counts):
            raise UserError(
                f"Expected texts with rows that {self.old.name} and {self.new.name} have in common, but got none. "
                "Give texts with words that both models can read."
            )
        needed, given = (
            ROWS * max(self.old.width, self.new.width),
            len(read[self.fit].text),
        )
        if self.maps and counts[0] < needed:
            raise UserError(
                f"Expected fitting texts with at least {needed:,} rows, {ROWS} for each dimension, to fit `maps`, but "
                f"{given} texts have {counts[0]:,}. It takes about {-(-given * needed // counts[0]):,} such texts; "
                "without `maps` it takes none."
            )

    def _batches(self, texts: TokenisedTexts) -> list[list[int]]:
        """Batch texts of similar length, the batches in random order."""
        order = (
            texts.lengths[: self.most]
            .argsort(descending=True, stable=True)
            .split(self.batch_size)
        )
        draw = torch.Generator().manual_seed(self.seed)
        return [order[n].tolist() for n in torch.randperm(len(order), generator=draw)]

    # ------------------------------------------------------------------ the passes

    @torch.no_grad()
    def run(self) -> Compared:
        """Compare the models, and return the findings."""
        moments = self._moments()
        self.means = moments.mean_x[:, None], moments.mean_y[:, None]
        self.fitted, self.refused = self._fit(moments)
        self.far_errors: dict[str, FarErrors] = {}
        parts = list[Sums]()
        for number, places in enumerate(
            self.track(self._batches(self.held), "Comparing")
        ):
            costs = number * self.batch_size < self.costs
            parts.append(self.measure(self.held[places], costs=costs))
        return self._found(_joined(parts))

    def _moments(self) -> Moments:
        """Sum the moments of all site pairs over the fitting texts."""
        metric = MomentsMetric(len(self.pairs), self.old.width, self.new.width)
        for places in self.track(self._batches(self.fit), "Reading moments"):
            metric.update(*self._both(self.fit[places]))
        return metric.compute()

    def _both(self, batch: TextBatch) -> list[Tensor]:
        """Read the rows of OLD and of NEW at all site pairs."""
        return [reader(batch)[0].to(self.old.device) for reader in self.readers]

    def _fit(self, moments: Moments) -> tuple[dict[str, Map], dict[str, str]]:
        """Solve the closed forms in float64; leave out those that have no solution, with the reason."""
        fitted: dict[str, Map] = (
            {AS_IS: lambda x: x} if self.old.width == self.new.width else {}
        )
        refused = {}
        for name in self.maps:
            try:
                solved = KINDS[name](*moments.xy.shape).to(moments.xy)
                if isinstance(solved, Ridge):
                    solved.set_map(moments, ridge_regression(moments, RIDGES)[0])
                else:
                    solved.fit(moments)
                fitted[name] = solved
            except ValueError as error:
                refused[name] = str(error)
        return fitted, refused

    def _mapped(self, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Map OLD's rows (S, N, d_x) by each map, to (S, N, d_y) in float64."""
        for name, map_ in self.fitted.items():
            yield name, map_(rows.double())
        for name, map_ in self.further.items():
            yield name, map_(rows).double()

    def measure(self, batch: TextBatch, *, costs: bool) -> Sums:
        """Return the sums over a batch of held-out texts, (..., B) by name, in float64 on the CPU.

        Args:
            batch: a batch on the CPU.
            costs: whether OLD's states are also put into NEW.
        """
        task = self.asked.of(batch)
        rows = self.readers[0].rows_of(batch).to(self.old.device)
        x, own = cast(Read, self.readers[0](batch, self.asked, task))
        y, theirs = cast(Read, self.readers[1](batch, self.asked, task))
        errors = self._errors(x, y.to(x.device).double())
        kept = self._far(batch)
        answers = self._answers(task, own, theirs)
        of_rows, of_answers = self._varied(batch, task, x, own)

        sums = _summed(errors | of_rows, rows)
        answers |= of_answers
        if task is None:
            sums |= answers
        else:
            sums |= _summed(answers, task.targets.to(own.device))
            if costs and self.kind == RowKind("tokens") and self.new.task != "masked":
                # masks would change the states
                sums["costs"] = self._costs(task.to(self.new.device), x, theirs, kept)
        return {name: values.double().cpu() for name, values in sums.items()}

    def _errors(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the squared errors of each map on rows (S, N, d), and what they are compared with, each (S, N)."""
        errors = {
            "total": squared_distances(y, self.means[1]),
            "total of old": squared_distances(x, self.means[0]),
        }
        for name, mapped in self._mapped(x):
            errors[name] = squared_errors(mapped, y)
        return errors

    def _answers(
        self, task: TaskBatch | None, own: Tensor | None, theirs: Tensor
    ) -> dict[str, Tensor]:
        """Compare the answers of OLD and NEW unit by unit, each (U,); without a head, return the last states (d, B)."""
        if own is None:
            return {}
        if task is not None:
            return dict(answer_sums(self.asked, task, own, theirs))
        # compared at the end, together with those of all texts
        return {"old": own.T, "new": theirs.T}

    def _varied(
        self, batch: TextBatch, task: TaskBatch | None, x: Tensor, own: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return how much each variant of OLD differs from its rows, each (S, N), and from its answers; see `_answers`.

        Args:
            batch: a batch on the CPU.
            task: the question, if there is a head to ask.
            x: (S, N, d_x) rows of OLD.
            own: answers of OLD.
        """
        errors, answers = dict[str, Tensor](), dict[str, Tensor]()
        for name, reader in self.variants.items():
            again, varied = reader(batch, self.asked, task)
            errors[name] = squared_errors(again.double(), x.double())
            if varied is None:
                continue
            key = f"answers of {name}"
            if task is None:
                answers[key] = varied.T
            else:
                answers[key] = divergences(cast(Tensor, own), varied)
        return errors, answers

    def _far(self, batch: TextBatch) -> tuple[Tensor, Tensor] | None:
        """Measure errors with far rows too, where some were left out; return NEW's own states there for `_costs`."""
        far = batch.far.get(self.kind)
        if far is None:
            return None
        x, y = self._both(replace(batch, far={}))
        self._add_far_errors(x, y)
        return y.to(self.new.device), (~far).nonzero()[:, 0]

    def _add_far_errors(self, x: Tensor, y: Tensor) -> None:
        """Add the errors on all rows, where far ones were left out."""
        for name, mapped in self._mapped(x):
            if name not in self.far_errors:
                self.far_errors[name] = FarErrors(self.means[1][:, 0]).to(y.device)
            self.far_errors[name].update(mapped, y.double())

    def _costs(
        self,
        task: TaskBatch,
        rows: Tensor,
        own: Tensor,
        kept: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Measure what OLD's states cost NEW, by each map: KL from NEW's own answers, and loss, (2, M, S, B).

        Only `COSTLY` evenly spaced sites are measured, as each takes half a forward pass for every map; the others are
        NaN.

        Args:
            task: the question to NEW, with its inputs.
            rows: (S, N, d) rows of OLD.
            own: (U, C) NEW's own logits.
            kept: NEW's own states of all tokens, (S, N', d), and the numbers of those to replace; None: all are
                replaced.
        """
        native = unit_losses(own, task.targets)
        at = self._costly_places()
        found = []
        for _, mapped in self._mapped(rows):
            for place in at:
                answers = self._answers_with(task, place, mapped[place], kept)
                loss = (unit_losses(answers, task.targets) - native).double()
                if (
                    not self.asked.scored
                ):  # without right answers, a loss has no meaning
                    loss = loss * torch.nan
                found.append(torch.stack([divergences(own, answers), loss]))
        costs = per_text_sums(
            torch.stack(found, 1).unflatten(1, (-1, len(at))), task.targets
        )
        return self._at_every_site(costs, at)

    def _at_every_site(self, costs: Tensor, at: Sequence[int]) -> Tensor:
        """Place costs (2, M, k, B) at k of the site pairs, and NaN at the others: (2, M, S, B)."""
        shape = list(costs.shape)
        shape[2] = len(self.pairs)
        every = costs.new_full(shape, torch.nan)
        return every.index_copy_(2, torch.tensor(at, device=costs.device), costs)

    def _costly_places(self) -> list[int]:
        """Return the numbers of the site pairs at which costs are measured."""
        count = len(self.pairs)
        spaced = torch.linspace(0, count - 1, min(COSTLY, count))
        return spaced.round().long().tolist()

    def _answers_with(
        self,
        task: TaskBatch,
        place: int,
        states: Tensor,
        kept: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Return NEW's answers (U, C) with OLD's mapped states (N, d) at the site pair of this number; see `_costs`."""
        states = states.float().to(self.new.device)
        if kept is not None:
            own_states, places = kept
            numbers = places.to(states.device)
            states = own_states[place].index_copy(0, numbers, states)
        site = self.pairs[place][1]
        logits = stitched_logits(self.new, task.inputs, site, task.rows, states)
        return chosen(logits, task.targets, self.new.class_map)

    # ------------------------------------------------------------------ what was found

    def _found(self, sums: Sums) -> Compared:
        floors_of_variants = self._variant_floors(sums)
        floors = self._map_floors(floors_of_variants)
        rows = self._rows(sums, floors)
        function = function_of(sums, self.asked, self.loose, self.seed)
        weights = precision.weight_changes(self.old, self.new, self.precision)
        verdict = self._verdict(rows, list(floors), function, weights)
        left = self._residuals(verdict)

        tables = {"function": function, "weights": weights}
        tables["floors"] = self._floor_rows(floors_of_variants)
        tables |= _joined_tables(left)
        if self.dictionary is not None:
            tables["latents"] = self._changed_latents(self.dictionary)
        vectors = {one.site: one.vectors for one in left}
        return Compared(verdict, self._meta(verdict, weights), rows, tables, vectors)

    def _floor_rows(self, of_variants: Mapping[str, Sequence[float]]) -> list[Row]:
        """Return a row for each site of OLD, with what each variant misses there."""
        rows = []
        for number, site in enumerate(self.readers[0].sites):
            at_site = {name: values[number] for name, values in of_variants.items()}
            rows.append({"site": site, **at_site})
        return rows

    def _variant_floors(self, sums: Sums) -> dict[str, list[float]]:
        """Return the share of OLD's variance that each of its variants misses, at each site pair."""
        total = sums["total of old"].sum(-1)
        return {name: (sums[name].sum(-1) / total).tolist() for name in self.variants}

    def _map_floors(
        self, of_variants: Mapping[str, Sequence[float]]
    ) -> dict[str, list[float]]:
        """Return the floor of each map at each site pair: the largest over the variants that count for the map."""
        every = list(of_variants.values())
        strictly = [
            values for name, values in of_variants.items() if not self.loose[name]
        ]
        loose = [max(at) for at in zip(*every, strict=True)]
        strict = [max(at) for at in zip(*strictly, strict=True)]
        floors = {}
        for name in (*self.fitted, *self.further):
            floors[name] = strict if name in (AS_IS, "permutation") else loose
        return floors

    def _rows(self, sums: Sums, floors: Mapping[str, Sequence[float]]) -> list[Row]:
        """Return the rows of the report, with the errors on all rows where some were left out."""
        places = []
        for i, j in self.pairs:
            names = {"model_x": self.old.name, "model_y": self.new.name}
            places.append({**names, "site_x": i, "site_y": j})
        rows = site_rows(sums, floors, places, self.seed)
        with_far = {
            name: errors.compute().tolist() for name, errors in self.far_errors.items()
        }
        for number, row in enumerate(rows):
            if row["method"] in with_far:
                row["fvu_with_far"] = with_far[row["method"]][number % len(self.pairs)]
        return rows

    def _verdict(
        self,
        rows: Sequence[Row],
        maps: Sequence[str],
        function: Sequence[Row],
        weights: Sequence[Row],
    ) -> Verdict:
        fvu: dict[str, list[float]] = {name: [] for name in maps}
        within: dict[str, list[bool]] = {name: [] for name in maps}
        for row in rows:
            fvu[row["method"]].append(torch.inf if row["fvu"] is None else row["fvu"])
            within[row["method"]].append(row["within"])
        changed = [row["weight"] for row in weights if row["changed"]]
        same = elsewhere = None
        if function:
            same = function[0]["same"]
            elsewhere = function[0]["same_elsewhere"]
        alike = partial(precision.equal_spectra, self.old, self.new, changed)
        return decide(
            fvu, within, same, same_elsewhere=elsewhere, changed=changed, alike=alike
        )

    def _meta(self, verdict: Verdict, weights: Sequence[Row]) -> dict[str, Any]:
        """Return what holds for all rows of the report."""
        fields = verdict._asdict()
        for name in ENDS:
            if fields[name] is not None:
                fields[name] = self.pairs[fields[name]][1]
        return {
            "models": {"x": self.old.identity(), "y": self.new.identity()},
            "rows": self.kind.policy,
            "seed": self.seed,
            "verdict": fields,
            "n_fit": len(self.fit.lengths[: self.most]),
            "n_texts": len(self.held.lengths[: self.most]),
            "precision": self.precision,
            "times": TIMES,
            "variants": list(self.variants),
            "not_compared": self.asked.why,
            "refusals": self.refused,
            "weights": self._changed_blocks(weights),
        }

    def _changed_blocks(self, weights: Sequence[Row]) -> Row | None:
        """Return the blocks whose weights have changed, and the number of blocks; None if no weights are compared."""
        if not weights:
            return None
        blocks = {row["block"] for row in weights if row["changed"]}
        return {"changed": sorted(blocks), "blocks": self.new.depth}

    def _residuals(self, verdict: Verdict) -> list[Residuals]:
        """Return what the best map leaves unexplained of each row, at the first changed site and the most changed."""
        map_ = self._map_to_examine(verdict)
        places = sorted({n for n in (verdict.first, verdict.most) if n is not None})
        if map_ is None or not places:
            return []
        left = self._left(map_, places)
        tokenizer = cast(Any, self.old.tokenizer)
        joined: Any = " ".join
        if self.kind.types == "tokens":
            joined = tokenizer.convert_tokens_to_string
        about: dict[str, Any] = {
            "types": types_of(self.kind, self.held, self.texts, tokenizer),
            "joined": joined,
            "text": left.text,
            "token": left.token,
            "texts": self.texts["text"][:],
        }
        return [
            Residuals(self.pairs[n][1], left.rows[:, k], **about)
            for k, n in enumerate(places)
        ]

    def _map_to_examine(self, verdict: Verdict) -> Map | None:
        """Return the map of a verdict, else the linear one, else the last that was fitted; None: there is none."""
        map_ = self.fitted.get(verdict.map or LINEAR)
        if map_ is None and self.fitted:
            map_ = list(self.fitted.values())[-1]
        return map_

    def _left(self, map_: Map, places: Sequence[int]) -> Left:
        """Read the held-out texts again, and return what a map leaves unexplained at the given site pairs."""
        states, texts, tokens = [], [], []
        for numbers in self.track(self._batches(self.held), "Examining the residual"):
            batch = self.held[numbers]
            rows = self.readers[0].rows_of(batch)
            x, y = self._both(batch)
            left = (y.double() - map_(x.double()))[places].cpu()
            states.append(left.transpose(0, 1))
            texts.append(torch.tensor(numbers)[rows.owner])
            tokens.append(rows.place)
        return Left(torch.cat(states), torch.cat(texts), torch.cat(tokens))

    def _changed_latents(self, dictionary: SparseAligner) -> list[Row]:
        """Return the latents of a dictionary that the change lies in, at its sites."""
        tokenizer = cast(Any, self.old.tokenizer)
        shown = shown_rows(self.kind, self.held, self.texts, tokenizer)
        places = [list(self.pairs).index(pair) for pair in self.dictionary_pairs]
        changed = ChangedLatents(dictionary.to(self.old.device), shown)
        for numbers in self.track(self._batches(self.held), "Reading latents"):
            batch = self.held[numbers]
            rows = self.readers[0].rows_of(batch)
            x, y = self._both(batch)
            text = torch.tensor(numbers)[rows.owner].to(x.device)
            place = rows.place.to(x.device)
            changed.update(x[places], y[places], text, place)
        return changed.table([site for _, site in self.dictionary_pairs])


def _summed(values: Mapping[str, Tensor], where: Rows | Targets) -> Sums:
    """Sum values over the rows or units of each text: (..., N) -> (..., B) by name."""
    return {name: per_text_sums(each, where) for name, each in values.items()}


def _joined_tables(left: Sequence[Residuals]) -> dict[str, list[Row]]:
    """Join the tables of what is left at several sites."""
    tables: dict[str, list[Row]] = {}
    for one in left:
        for name, part in one.tables().items():
            tables[name] = tables.get(name, []) + part
    return tables


def _joined(parts: Sequence[Sums]) -> Sums:
    """Join the sums over batches; those of costs are only in the first ones."""
    sums = {}
    for name in parts[0]:
        sums[name] = torch.cat([part[name] for part in parts if name in part], -1)
    return sums
