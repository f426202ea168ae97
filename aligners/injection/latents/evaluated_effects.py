"""What the latents of a trained dictionary do in the models of a data module, as columns and tables of a report."""

from collections.abc import Sequence

from aligners.datamodules.paired_activations import PairedActivations
from aligners.errors import finite
from aligners.injection.comparing.read_answers import Asked
from aligners.injection.latents.effects import LatentEffects, draw_texts, latent_effects
from aligners.injection.latents.read_models import ModelPair, why_unasked
from aligners.injection.scoring.scores import Row
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.models.recorded.source_names import all_recorded
from aligners.similarity.latents.dictionary import PairedDictionary, decoder_cosines

ONE_SPACE = 0.5  # median cosine of decoders above which both models share a space
COLUMNS = (
    "attributed",
    "attributed_low",
    "attributed_high",
    "attributed_by_row",
    "attributed_by_row_low",
    "attributed_by_row_high",
    "turned",
    "recovered",
    "recovered_low",
    "recovered_high",
    "correlation",
    "correlation_low",
    "correlation_high",
    "correlation_null",
    "shift_x",
    "shift_y",
)


def evaluated_effects(
    data: PairedActivations,
    aligner: SparseAligner,
    numbers: Sequence[int],
    *,
    count: int,
    texts: int,
    seed: int,
) -> LatentEffects | str:
    """Measure what latents do in the models of a data module, on some of its held-out texts; or say why nothing is.

    Args:
        data: of the run; its models are on the device of the run.
        aligner: dictionary of both models, at the data module's sites.
        numbers: of the held-out texts that may be read.
        count: latents that are measured at each site, and as many random ones.
        texts: most texts that are read.
        seed: seed of texts, random latents and resampling.

    Returns:
        What was measured, or a clause that says why nothing can be.
    """
    pair = asked_pair(data, aligner)
    if isinstance(pair, str):
        return pair
    return latent_effects(
        pair,
        data.without_far("test", pair.kind),
        draw_texts(numbers, texts, seed),
        count=count,
        one_space=in_one_space(pair.dictionary),
        batch_size=data.batch_size,
        seed=seed,
    )


def asked_pair(data: PairedActivations, aligner: SparseAligner) -> ModelPair | str:
    """Return the models of a data module with a dictionary, to be asked about held-out texts; or why they cannot be.

    Args:
        data: of the run; its models are on the device of the run.
        aligner: dictionary of both models, at the data module's sites.
    """
    reader = data.reader
    x, y = reader.model_x, reader.model_y
    if all_recorded(data.models):
        return "states were recorded, so that there is no model to run"
    alike = data.without_far("test", reader.kind).alike
    asked = Asked(x, y, labelled=False, seed=data.seed, alike=alike)
    why = why_unasked(asked, reader.kind)
    if why is not None:
        return why
    if asked.what != "classes" and x.vocabulary != y.vocabulary:
        return f"{x.name} answers with {x.vocabulary} tokens and {y.name} with {y.vocabulary}"
    return ModelPair(
        (x, y),
        reader.sites,
        aligner.paired(),
        aligner.codes,
        asked,
        reader.kind,
        data.component,
        leave_out_far=data.far_rows == "leave_out",
    )


def in_one_space(dictionary: PairedDictionary) -> bool:
    """Tell whether both models' states are in one space, by half of the latents: their two decoders point alike.

    Those of a model and its fine-tuning do; those of two seeds are about orthogonal.
    """
    if dictionary.decoder_x.shape[2] != dictionary.decoder_y.shape[2]:
        return False
    cosines = decoder_cosines(dictionary)
    return float(cosines.nanmedian()) > ONE_SPACE


def add_effects(
    rows: Sequence[Row], sites: Sequence[tuple[int, int]], effects: LatentEffects | None
) -> None:
    """Add `COLUMNS` to the rows of latents; None where nothing was measured.

    Args:
        rows: with `site_x`, `site_y` and `latent`.
        sites: the dictionary's site pairs.
        effects: what was measured, if anything was.
    """
    if effects is None:
        for row in rows:
            row |= dict.fromkeys(COLUMNS)
        return
    measured = {(row["place"], row["latent"]): row for row in effects.rows}
    attributed = effects.attributed.tolist()
    by_row = effects.by_row.tolist()
    turned = effects.turned.tolist()
    places = {pair: place for place, pair in enumerate(sites)}
    for row in rows:
        place = places[row["site_x"], row["site_y"]]
        latent = row["latent"]
        found = measured.get((place, latent), {})
        for name in COLUMNS:
            row[name] = found.get(name)
        row["attributed"] = finite(attributed[place][latent])
        row["attributed_by_row"] = finite(by_row[place][latent])
        row["turned"] = finite(turned[place][latent])


def cumulative_rows(effects: LatentEffects, heads: Sequence[Row]) -> list[Row]:
    """Make the table of latents that are moved together, with the columns that say where in place of numbers."""
    table = []
    for row in effects.cumulative:
        shown = {name: value for name, value in row.items() if name != "place"}
        table.append({**heads[row["place"]], **shown})
    return table
