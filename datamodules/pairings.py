"""Functions that make `PairedActivations` from the options by which users name the states to pair."""

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any, Literal

from aligners.datamodules.frozen_models import with_revisions
from aligners.datamodules.paired_activations import PairedActivations, Pairing
from aligners.datamodules.rows.read_rows import Link
from aligners.datamodules.rows.sites import check_written, parse_sites, sites_of_each
from aligners.datamodules.rows.token_pairs import TokenPairs
from aligners.datamodules.text.labels import LabelsOption
from aligners.errors import UserError, check_known, check_range
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel
from aligners.models.model_identity import same_model
from aligners.models.recorded.source_names import all_recorded

Sites = str | list[str | int]
FEWEST = (
    3  # fewest models of a universe; for two, the shared space could be that of either
)


def _chosen_sites(sites: Sites, models: Sequence[str]) -> Sites:
    """Return the sites that a user wrote; `blocks` are all sites of recorded states."""
    if sites == "blocks" and all_recorded(models):
        return "all"
    return sites


class TwoModels(Pairing):
    """Two models at site pairs."""

    def links(self, depths: Sequence[int], component: Component) -> list[Link]:
        """The site pairs, in the user's order."""
        pairs = parse_sites(self.options["sites"], depths[0], depths[1], component)
        return [Link(0, 1, i, j) for i, j in pairs]


def pair_states(
    model_x: str = "embedded:0",
    model_y: str = "embedded:1",
    sites: Sites = "all",
    revision_x: str | None = None,
    revision_y: str | None = None,
    labels: LabelsOption = None,
    **options: Any,
) -> PairedActivations:
    """Pair the states of two models at site pairs.

    Args:
        model_x: X: a Hub id, a local folder, or `embedded:SEED` for a small BERT that is trained on the fitting
            texts when it is first needed and kept in `cache`; `embedded:SEED:layers=6,width=96` for one of
            another size. `embedded-gpt:SEED` and `embedded-mlm:SEED` are small causal and masked language
            models, which need no labels; `embedded-gpt:SEED:activation=solu` is one with SoLU. Or states that were
            recorded elsewhere: `states:vectors.parquet:column=embedding,key=id,group=document`.
        model_y: Y, likewise.
        sites: `all` (0..L), `blocks` (1..L), or layers and pairs: `1,3:5` is site 1 of both models, and X's site 3 with
            Y's site 5. Site 0 is the embedding output, site l the output of block l before any final norm; `norm`,
            which is L + 1, the output of the final norm.
        revision_x: revision of X on the Hub.
        revision_y: revision of Y on the Hub.
        labels: which classes of a head stand for each class of the texts, where their names differ, by number or name:
            {"entailment": 0, "not_entailment": [1, 2]}. Where several are given, their probabilities are added. Give
            one map, or a list with one for each model.
        options: options of `PairedActivations`, by their names.

    Raises:
        ValueError: an option is out of its range.
    """
    check_written(sites, 2)
    sites = _chosen_sites(sites, [model_x, model_y])
    chosen = {
        "model_x": model_x,
        "model_y": model_y,
        "sites": sites,
        "revision_x": revision_x,
        "revision_y": revision_y,
        "labels": labels,
    }
    named = [(model_x, revision_x), (model_y, revision_y)]
    return PairedActivations(TwoModels(named, chosen), **options)


class ManyPairs(Pairing):
    """Many pairs of models, at the same site pairs."""

    def links(self, depths: Sequence[int], component: Component) -> list[Link]:
        """Return the links pair by pair, each pair's sites in the user's order."""
        sites = self.options["sites"]
        links = []
        for a, b in self.pairs:
            pairs = parse_sites(sites, depths[a], depths[b], component)
            links += [Link(a, b, i, j, f"{a}-{b}/") for i, j in pairs]
        return links

    def describe(self, data: PairedActivations) -> dict[str, Any]:
        """All models, and which of them are paired."""
        return {"models": data.identities(), "pairs": list(map(list, self.pairs))}


def pairs_states(
    models: list[str] = ["embedded:0", "embedded:1"],  # noqa: B006  (copied)
    pairs: list[list[int]] | None = None,
    sites: Sites = "blocks",
    revisions: list[str | None] | None = None,
    **options: Any,
) -> PairedActivations:
    """Pair the states of many pairs of models, for one bank of pairs x sites, ordered by pair and then by site.

    Every model is read once a batch, however many pairs it is in.

    Args:
        models: Hub ids, local folders or embedded models, as in `pair_states`.
        pairs: numbers of X and Y in `models`, such as [[0, 1], [0, 2]]; default: every model with each later one.
        sites: as in `pair_states`, the same for every pair.
        revisions: revisions of each model on the Hub.
        options: options of `PairedActivations`, by their names. Words are those that all models have in full.

    Raises:
        ValueError: an option is out of its range.
    """
    named = with_revisions(models, revisions)
    numbers = range(len(models))
    known: list[Any] = list(combinations(numbers, 2))
    if pairs is not None:
        known = list(map(tuple, pairs))
    different = set(known)
    possible = set(permutations(numbers, 2))
    if not known or len(different) < len(known) or not different <= possible:
        raise UserError(
            "Expected each of `pairs` to hold the numbers, counted from 0, of two different `models` out of "
            f"{len(models)}, and no pair twice, but got {list(map(list, known))}."
        )
    check_written(sites, 2)
    sites = _chosen_sites(sites, models)
    chosen = {"models": models, "pairs": pairs, "sites": sites, "revisions": revisions}
    return PairedActivations(ManyPairs(named, chosen, known), **options)


class Universe(Pairing):
    """Pairs each of k models with itself, at sites that belong together."""

    padded = True

    def links(self, depths: Sequence[int], component: Component) -> list[Link]:
        """Return the links model by model, each model's sites in the user's order."""
        together = sites_of_each(self.options["sites"], depths, component)
        links = []
        for number, own in enumerate(zip(*together, strict=True)):
            if len(set(own)) < len(own):
                raise UserError(
                    f"A universe expects no site of a model twice, but `sites` has {own} of {self.named[number][0]}."
                )
            begins = f"{number}-{number}/"
            links += [Link(number, number, site, site, begins) for site in own]
        return links

    def check(self, models: Sequence[FrozenModel]) -> None:
        """Raise unless the models have different weights."""
        for first, model in combinations(models, 2):
            if same_model(first.identity(), model.identity()):
                raise UserError(
                    f"Expected different `models`: {first.name} and {model.name} have equal weights."
                )

    def describe(self, data: PairedActivations) -> dict[str, Any]:
        """All models, their widths, and the sites that belong together."""
        return {
            "models": data.identities(),
            "sites": data.sites_together(range(len(data.frozen))),
            "widths": [model.width for model in data.frozen],
        }


def universe_states(
    models: list[str] = ["embedded:0", "embedded:1", "embedded:2"],  # noqa: B006  (copied)
    sites: Sites = "blocks",
    revisions: list[str | None] | None = None,
    **options: Any,
) -> PairedActivations:
    """Pair the states of k models with themselves, ordered by model and then by site.

    Args:
        models: Hub ids, local folders or embedded models, as in `pair_states`: 3 or more, of any widths.
        sites: `all` (0..L), `blocks` (1..L), or a list: `2` is a layer at which all models are read, `2:4:6` is one
            site for each model, in the order of `models`.
        revisions: revisions of each model on the Hub.
        options: options of `PairedActivations`, by their names. Words are those that all models have in full.

    Raises:
        ValueError: there are too few models, one is named twice, or an option is out of its range.
    """
    if len(models) < FEWEST:
        raise UserError(
            f"A universe expects `models` to name at least {FEWEST} models, but got {len(models)}. Between two, "
            "`train.py fit` finds one map."
        )
    twice = sorted({name for name in models if models.count(name) > 1})
    if twice and revisions is None:
        raise UserError(
            f"A universe expects different `models`, but got {', '.join(twice)} more than once."
        )
    check_written(sites, len(models))
    sites = _chosen_sites(sites, models)
    chosen = {"models": models, "sites": sites, "revisions": revisions}
    pairs = [(number, number) for number in range(len(models))]
    named = with_revisions(models, revisions)
    return PairedActivations(Universe(named, chosen, pairs), **options)


class AttentionPairs(Pairing):
    """The attention weights of two models at pairs of blocks."""

    hidden = ("rows", "component", "held_out_types")
    of_attention = True

    def links(self, depths: Sequence[int], component: Component) -> list[Link]:
        """The pairs of blocks, in the user's order."""
        pairs = parse_sites(self.options["sites"], depths[0], depths[1], component)
        links = []
        for i, j in pairs:
            if 0 in (i, j):
                raise UserError(
                    "Expected `sites` of blocks, from 1 on: the embeddings, site 0, have no attention."
                )
            links.append(Link(0, 1, i, j))
        return links

    def token_pairs(self, data: PairedActivations) -> TokenPairs:
        """The pairs of tokens that are rows."""
        causal = all(model.causal for model in data.frozen)
        share = self.options["share"]
        mean = self.options["queries"] == "mean"
        return TokenPairs(data.special_tokens, causal, share, data.seed, mean)

    def describe(self, data: PairedActivations) -> dict[str, Any]:
        """What the rows are."""
        of = "pairs of tokens"
        if self.options["queries"] == "mean":
            of = "tokens, averaged over the tokens that attend to them"
        return {"rows": f"attention weights of {of}", "share": self.options["share"]}


def attention_states(
    model_x: str = "embedded:0",
    model_y: str = "embedded:1",
    sites: Sites = "blocks",
    share: float = 0.1,
    queries: Literal["each", "mean"] = "each",
    revision_x: str | None = None,
    revision_y: str | None = None,
    **options: Any,
) -> PairedActivations:
    """Pair the attention weights of two models that read the same tokens (Ren et al. 2023, Fig. 4).

    A row is a pair of tokens in a text, one attending to the other; its vector holds the attention weight in each head
    of a block. A batch has x (S, N, H_x) and y (S, N, H_y). Padding and, in causal models, later tokens give no rows.
    With `queries` mean, a row is a token that is attended to, and its vector the mean weight that it gets, as in the
    released code.

    Args:
        model_x: X: a Hub id, a local folder, or `embedded:SEED` for a small BERT that is trained on the fitting
            texts when it is first needed and kept in `cache`; `embedded:SEED:layers=6,width=96` for one of
            another size. `embedded-gpt:SEED` and `embedded-mlm:SEED` are small causal and masked language
            models, which need no labels; `embedded-gpt:SEED:activation=solu` is one with SoLU.
        model_y: Y, likewise.
        sites: pairs of blocks, as in `pair_states`.
        share: share of the rows to read; the choice does not depend on the batches.
        queries: `each`: a row for each attending token; `mean`: the mean over attending tokens.
        revision_x: revision of X on the Hub.
        revision_y: revision of Y on the Hub.
        options: options of `PairedActivations`, by their names. `special_tokens` says whether [CLS] and the like attend
            and are attended to.

    Raises:
        ValueError: an option is out of its range.
    """
    check_range(above=0, most=1, share=share)
    check_known(("each", "mean"), queries=queries)
    check_written(sites, 2)
    chosen = {
        "model_x": model_x,
        "model_y": model_y,
        "sites": sites,
        "share": share,
        "queries": queries,
        "revision_x": revision_x,
        "revision_y": revision_y,
    }
    named = [(model_x, revision_x), (model_y, revision_y)]
    options["attn_implementation"] = "eager"  # the others never form the weights
    # by name, so that the command line does not offer what is set here
    return PairedActivations(
        AttentionPairs(named, chosen),
        rows="tokens",
        component="residual",
        held_out_types=0.0,
        **options,
    )
