"""Whether a new model can search an index of old vectors through a map, with nothing embedded anew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aligners.errors import UserError, check_known, check_range
from aligners.fitting.migration.forecast import forecast, leave_out_own, searched
from aligners.fitting.migration.known_pairs import (
    Known,
    fit_route,
    pieces_found,
    pool_of,
)
from aligners.fitting.migration.pieces import forecast_by_pieces, pieces_of
from aligners.fitting.migration.search import (
    METRICS,
    TOP,
    Resampling,
    Similarity,
    nearest,
    scores,
)
from aligners.fitting.migration.text_rows import Judged, TextRows
from aligners.fitting.migration.vector_files import are_unit
from aligners.fitting.migration.vector_maps import (
    Pairs,
    VectorMap,
    names_of,
    not_possible,
)
from aligners.fitting.migration.vector_sources import VectorSource, cautions_of

ROUTES = ("queries", "documents")
RE_EMBEDDED, OLD, AS_IT_IS = "re-embedded", "old model", "as it is"
ALL = "all"
SAME_FAMILY, OTHER_FAMILY = 0.97, 0.90  # least recall@10, relative to re-embedding
VALIDATION = 0.1  # share of the pairs that choose
TEST = 0.2  # share of the texts that are searched where there are no judged queries
MOST_VALIDATION = 1000
MOST_QUERIES = 1000  # of a domain, where there are no judged queries
FEWEST = 100  # pairs to fit on, and to choose by
UNRELATED = 0.05  # of mapped texts find themselves: fewer mean that rows are not of the same texts

Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """Queries and documents by both models, and what is relevant.

    Attributes:
        queries: pairs (old, new), (Q, d).
        corpus: pairs (old, new), (N, d).
        relevant: for each query, place of a document -> gain; None: the ten that the new model finds nearest.
        domains: of the queries; None: there are none.
        own: place of each query among the documents, which it does not find; None: queries are no documents.
    """

    queries: Pairs
    corpus: Pairs
    relevant: Sequence[Mapping[int, float]] | None
    domains: Sequence[str] | None
    own: np.ndarray | None = None


class Migration:
    """The study: fits maps on pairs, searches through them, and says beforehand what it will find.

    Args:
        old: the vectors of the index.
        new: those of the model that is to take its place.
        texts: the texts of the pairs.
        judged: queries and judgements; None: held-out texts are queries, and what the new model finds is relevant.
        maps: kinds of maps, out of `MAPS`.
        pairs: numbers of pairs to fit on, besides all.
        held_out: domains of which no text is fitted on.
        similarity: cosine or dot.
        least: recall@10 relative to re-embedding below which a map is advised against; None: .97 between models of one
            architecture, width and vocabulary, else .90.
        index_size: documents of the whole index; None: as many as are searched here.
        price: of an hour of re-embedding; None: not said.
        seed: of the division, of networks and of the resampling.

    Attributes:
        meta: what holds for all rows.
        rows: recall and nDCG of every map, route, number of pairs and domain, and of what maps are compared with.
        report_tables: `forecasts`, of the chosen map.
        chosen: route -> the chosen map, fitted on all pairs.
    """

    def __init__(
        self,
        old: VectorSource,
        new: VectorSource,
        texts: TextRows,
        judged: Judged | None,
        *,
        maps: Sequence[str],
        pairs: Sequence[int] = (),
        held_out: Sequence[str] = (),
        similarity: Similarity = "cosine",
        least: float | None = None,
        index_size: int | None = None,
        price: float | None = None,
        seed: int = 0,
    ) -> None:
        check_range(least=1, pairs=list(pairs) or [1], index_size=index_size)
        check_range(above=0, least_recall=least, price_per_hour=price)
        self.old, self.new, self.texts, self.judged = old, new, texts, judged
        self.maps = names_of(maps)
        self.pairs, self.held_out = sorted(set(pairs)), list(held_out)
        self.similarity, self.least = similarity, least
        self.index_size, self.price, self.seed = index_size, price, seed
        self.cautions: list[str] = []
        self.meta: Row = {}
        self.rows: list[Row] = []
        self.report_tables: dict[str, list[Row]] = {"forecasts": []}
        self.chosen: dict[str, VectorMap] = {}

    def run(self, keep: Path | None = None) -> None:
        """Embed what is not embedded, fit, search and predict.

        Args:
            keep: folder for new vectors, to be read in place of the models another time.

        Raises:
            ValueError: there are too few texts, or the vectors do not fit them.
        """
        known = list(self.texts.domains or [])
        if self.judged is not None:
            known += self.judged.queries.domains or []
        if self.held_out:
            check_known(dict.fromkeys(known), held_out_domains=self.held_out)
        every = self._known(keep)
        self.cautions += cautions_of(every.texts.x, every.texts.y)
        fit, validation, asked = self._divided(every, keep)
        self._check_many(fit, validation)
        self._resampling = Resampling(len(asked.queries), self.seed)
        references = self._references(asked)
        for number in self._numbers(len(fit)):
            for route in ROUTES:
                part = fit.at(slice(number))
                self._measure(route, part, validation, asked, references)
        self._describe(fit, validation, asked)

    # ---- what is read

    def _known(self, keep: Path | None) -> Known:
        """Embed the texts, and where queries are judged a piece of each."""
        texts = self._pairs_of("texts", self.texts, "document", keep)
        both = self.old.has("pieces") and self.new.has("pieces")
        if self.judged is None or not both:
            return Known(texts)
        pieces = TextRows(pieces_of(self.texts.texts), self.texts.ids)
        return Known(texts, self._pairs_of("pieces", pieces, "query", keep))

    def _pairs_of(
        self, part: str, rows: TextRows, role: str, keep: Path | None
    ) -> Pairs:
        both = []
        for side, source in (("old", self.old), ("new", self.new)):
            place = keep / side if keep is not None else None
            both.append(source.vectors(part, rows, role, place))
        return Pairs(*both)

    def _divided(self, every: Known, keep: Path | None) -> tuple[Known, Known, Asked]:
        """Divide the texts, whose domains are not held out, into those to fit on, to choose by, and to search."""
        of_one_domain = [""] * len(every)
        domains = np.array(self.texts.domains or of_one_domain)
        held = np.isin(domains, self.held_out)
        whole = every.whole()
        draw = np.random.default_rng(self.seed)
        order = draw.permutation(len(every))
        order = order[whole[order]]
        of_held = held[order]
        free = order[~of_held]
        if self.judged is not None:
            asked = self._judged_pairs(self.judged, keep)
        else:
            number = int(TEST * len(free))
            places = np.concatenate([free[:number], order[of_held]])
            free = free[number:]
            asked = self._own_neighbours(every.texts, places, domains[places])
        number = _validation_texts(len(free))
        validation = every.at(free[:number])
        fit = every.at(free[number:])
        return fit, validation, asked

    def _judged_pairs(self, judged: Judged, keep: Path | None) -> Asked:
        queries = self._pairs_of("queries", judged.queries, "query", keep)
        corpus = self._pairs_of("corpus", judged.corpus, "document", keep)
        both = set(judged.corpus.texts) & set(self.texts.texts)
        if both:
            self.cautions.append(
                f"{len(both)} of the texts that maps are fitted on are documents that are searched: figures of "
                "`documents` are then too good."
            )
        return Asked(queries, corpus, judged.relevant, judged.queries.domains)

    def _own_neighbours(
        self, every: Pairs, places: np.ndarray, domains: np.ndarray
    ) -> Asked:
        """Make queries of held-out texts, at most `MOST_QUERIES` of a domain."""
        corpus = every.at(places)
        kept = []
        for domain in dict.fromkeys(domains.tolist()):
            kept.append(np.flatnonzero(domains == domain)[:MOST_QUERIES])
        own = np.concatenate(kept) if kept else np.zeros(0, int)
        if len(corpus) <= TOP:
            raise UserError(
                f"Expected more than {TOP} held-out texts to search in, but got {len(corpus)}. Give more texts."
            )
        named = domains[own].tolist() if self.texts.domains else None
        return Asked(corpus.at(own), corpus, None, named, own)

    def _check_many(self, fit: Known, validation: Known) -> None:
        if len(fit) < FEWEST or len(validation) < FEWEST // 2:
            raise UserError(
                f"Expected at least {2 * FEWEST} texts to fit maps on and choose one by, but got "
                f"{len(fit) + len(validation)}. Give more texts."
            )

    def _numbers(self, most: int) -> list[int]:
        fewer = [number for number in self.pairs if number < most]
        return [*fewer, most]

    # ---- what is measured

    def _found(
        self, asked: Asked, queries: np.ndarray, index: np.ndarray
    ) -> np.ndarray:
        """Return the ten nearest documents of each query, itself left out."""
        if asked.own is None:
            return nearest(queries, index, similarity=self.similarity)
        found = nearest(queries, index, TOP + 1, similarity=self.similarity)
        itself = found == asked.own[:, None]
        missed = ~itself.any(1)  # the last one found is then one too many
        itself[:, -1] |= missed
        return found[~itself].reshape(len(found), TOP)

    def _references(self, asked: Asked) -> dict[str, dict[str, np.ndarray]]:
        """Search by the new model alone, by the old one alone, and by the new one in the old index."""
        queries = asked.queries
        corpus = asked.corpus
        by_new = self._found(asked, queries.y, corpus.y)
        by_old = self._found(asked, queries.x, corpus.x)
        relevant = asked.relevant
        if relevant is None:
            relevant = [{int(place): 1.0 for place in row} for row in by_new]
        self._relevant = relevant
        found = {RE_EMBEDDED: scores(by_new, relevant), OLD: scores(by_old, relevant)}
        if queries.y.shape[1] == corpus.x.shape[1]:
            mixed = self._found(asked, queries.y, corpus.x)
            found[AS_IT_IS] = scores(mixed, relevant)
        else:
            found[AS_IT_IS] = _chance(relevant, len(corpus))
        for name, columns in found.items():
            self._add(name, None, None, columns, found[RE_EMBEDDED], asked)
        return found

    def _measure(
        self,
        route: str,
        fit: Known,
        validation: Known,
        asked: Asked,
        references: Mapping[str, Mapping[str, np.ndarray]],
    ) -> None:
        """Fit every map of a route on some pairs, search through each, choose one and predict what it finds."""
        fitted = self._fitted(route, fit, validation)
        if not fitted:
            raise UserError(
                f"Expected a map that can be fitted on {len(fit)} pairs, but got {', '.join(self.maps)}. Add ridge."
            )
        kept, found = {}, {}
        for name, map_ in fitted.items():
            kept[name] = self._neighbours_kept(route, map_, validation.texts)
            found[name] = self._pieces_found(route, map_, fit, validation)
        best = max(fitted, key=lambda name: (found[name] or 0.0, kept[name]))
        ceiling = references[RE_EMBEDDED]
        for name, map_ in fitted.items():
            if route == "queries":
                queries = map_.mapped(asked.queries.y)
                index = asked.corpus.x
            else:
                queries = asked.queries.y
                index = map_.mapped(asked.corpus.x)
            nearest_ = self._found(asked, queries, index)
            columns = scores(nearest_, self._relevant)
            about = {
                "neighbours_kept": kept[name],
                "pieces_found": found[name],
                "chosen": name == best,
            }
            self._add(name, route, len(fit), columns, ceiling, asked, **about)
        self.chosen[route] = fitted[best]
        self._predict(route, best, fit, validation, asked, references[OLD])

    def _fitted(
        self, route: str, fit: Known, validation: Known
    ) -> dict[str, VectorMap]:
        """Fit the maps that can be fitted; say which cannot."""
        pairs = fit.texts.turned() if route == "queries" else fit.texts
        normalised = are_unit(pairs.y)
        fitted = {}
        for name in self.maps:
            why = not_possible(name, pairs.x.shape[1], pairs.y.shape[1], len(pairs))
            if why is None:
                fitted[name] = fit_route(
                    name,
                    route,
                    fit,
                    validation,
                    similarity=self.similarity,
                    normalised=normalised,
                    seed=self.seed,
                )
            elif why not in self.cautions:
                self.cautions.append(why)
        return fitted

    def _neighbours_kept(self, route: str, map_: VectorMap, validation: Pairs) -> float:
        """Return the share of the ten nearest validation texts of each that are still so through a map."""
        made = searched(route, map_, validation, validation, self.similarity)
        made = leave_out_own(made)
        kept = 0.0
        for mapped, new in zip(made.mapped, made.new, strict=True):
            of_map = np.argsort(-mapped)[:TOP]
            of_new = np.argsort(-new)[:TOP]
            both = set(of_map) & set(of_new)
            kept += len(both) / TOP
        return kept / len(validation)

    def _pieces_found(
        self, route: str, map_: VectorMap, fit: Known, validation: Known
    ) -> float | None:
        """Return nDCG@10 of validation pieces through a map; None without pieces."""
        if validation.pieces is None:
            return None
        pool = pool_of(route, fit, validation)
        return pieces_found(map_, route, validation, pool, self.similarity)

    def _predict(
        self,
        route: str,
        name: str,
        fit: Known,
        validation: Known,
        asked: Asked,
        by_old: Mapping[str, np.ndarray],
    ) -> None:
        """Add what was said beforehand of the chosen map, beside what was found."""
        pool = pool_of(route, fit, validation)
        size = len(asked.corpus)
        chosen = self.chosen[route]
        if validation.pieces is not None:
            made = searched(route, chosen, validation.pieces, pool, self.similarity)
            said = forecast_by_pieces(made, size, by_old, self.seed)
        else:
            said = forecast(
                route,
                chosen,
                validation.texts,
                pool,
                size,
                judged=asked.relevant is not None,
                similarity=self.similarity,
                seed=self.seed,
            )
        row: Row = {"route": route, "map": name, "pairs": len(fit)}
        row |= {"pool": len(pool), "index": size}
        for metric, estimate in said.items():
            row |= _named(f"predicted_{metric}", estimate)
        found = next(
            row
            for row in reversed(self.rows)
            if row["route"] == route and row["map"] == name and row["domain"] == ALL
        )
        for metric in METRICS:
            for end in ("", "_low", "_high"):
                row[f"relative_{metric}{end}"] = found[f"relative_{metric}{end}"]
        self.report_tables["forecasts"].append(row)

    def _add(
        self,
        name: str,
        route: str | None,
        pairs: int | None,
        columns: Mapping[str, np.ndarray],
        ceiling: Mapping[str, np.ndarray],
        asked: Asked,
        **more: Any,
    ) -> None:
        """Add a row for all queries, and one for each domain."""
        every = np.arange(len(asked.queries))
        for domain, places in _by_domain(asked.domains, every).items():
            drawn = self._resampling
            if places is not every:
                drawn = Resampling(len(places), self.seed)
            row: Row = {"route": route, "map": name, "pairs": pairs, "domain": domain}
            row["held_out"] = domain in self.held_out
            row["queries"] = len(places)
            for metric in METRICS:
                own = columns[metric][places]
                best = ceiling[metric][places]
                row |= _named(metric, drawn.mean(own))
                row |= _named(f"relative_{metric}", drawn.ratio(own, best))
            row |= {"neighbours_kept": None, "pieces_found": None, "chosen": None}
            row |= more
            self.rows.append(row)

    # ---- what is said

    def _describe(self, fit: Known, validation: Known, asked: Asked) -> None:
        old = self.old.kind()
        new = self.new.kind()
        family = None not in (old, new) and old == new
        least = self.least
        if least is None:
            least = SAME_FAMILY if family else OTHER_FAMILY
        self._check_related(validation.texts)
        size = self.index_size or len(asked.corpus)
        hours = self.new.rate and size / self.new.rate / 3600
        self.meta = {
            "old": self.old.about() | {"width": fit.texts.x.shape[1]},
            "new": self.new.about() | {"width": fit.texts.y.shape[1]},
            "same_family": family,
            "least_recall": least,
            "judged": asked.relevant is not None,
            "pieces": fit.pieces is not None,
            "similarity": self.similarity,
            "pairs": len(fit),
            "validation": len(validation),
            "queries": len(asked.queries),
            "documents": len(asked.corpus),
            "held_out_domains": self.held_out,
            "domains": list(dict.fromkeys(asked.domains or [])),
            "index_size": size,
            "hours": hours,
            "price_per_hour": self.price,
            "price": hours and self.price and hours * self.price,
            "seed": self.seed,
            "cautions": self.cautions,
        }

    def _check_related(self, validation: Pairs) -> None:
        """Say so if hardly any mapped text is nearest to itself."""
        mapped = self.chosen["documents"].mapped(validation.x)
        found = nearest(mapped, validation.y, 1, similarity=self.similarity)
        itself = found[:, 0] == np.arange(len(validation))
        share = float(itself.mean())
        if share < UNRELATED:
            self.cautions.append(
                f"Only {share:.1%} of mapped validation texts are nearest to themselves among {len(validation)}: are "
                "the rows of both sides of the same texts, in the same order?"
            )


def _validation_texts(free: int) -> int:
    """Return how many of the texts that are not searched choose a map."""
    wanted = int(VALIDATION * free)
    most = min(wanted, MOST_VALIDATION)
    least = min(FEWEST, free // 2)
    return max(most, least)


def _by_domain(
    domains: Sequence[str] | None, every: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the places of all queries, and of those of each domain where there are several."""
    places = {ALL: every}
    if domains is None or len(set(domains)) < 2:
        return places
    of_queries = np.array(domains)
    for domain in dict.fromkeys(domains):
        places[domain] = np.flatnonzero(of_queries == domain)
    return places


def _named(name: str, estimate: Sequence[float]) -> Row:
    """Return the columns of a value and its interval; None where it is not finite."""
    ends = ("", "_low", "_high")
    row: Row = {}
    for end, value in zip(ends, estimate, strict=True):
        row[f"{name}{end}"] = float(value) if np.isfinite(value) else None
    return row


def _chance(
    relevant: Sequence[Mapping[int, float]], documents: int
) -> dict[str, np.ndarray]:
    """Return what documents in an order by chance score on average: each of `METRICS`, (Q,)."""
    discounts = 1 / np.log2(np.arange(2, TOP + 2))
    columns: dict[str, list[float]] = {name: [] for name in METRICS}
    for wanted in relevant:
        ascending = np.sort(list(wanted.values()))
        gains = ascending[::-1]
        best = gains[:TOP]
        share = len(gains) / documents
        recalled = TOP * share / len(best)
        usual_gain = gains.sum() / documents
        ideal = best @ discounts[: len(best)]
        columns["recall1"].append(share)
        columns["recall10"].append(min(1.0, recalled))
        columns["ndcg10"].append(usual_gain * discounts.sum() / ideal)
    return {name: np.array(values) for name, values in columns.items()}
