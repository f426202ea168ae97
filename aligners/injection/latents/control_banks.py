"""Checks of the dictionaries that are set beside the one that is measured, before anything is read."""

import torch

from aligners.errors import UserError
from aligners.fitting.saved_bank import FORWARD, StoredBank
from aligners.injection.injecting import check_stored
from aligners.injection.latents.stored_dictionary import dictionary_of
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.models.model_identity import same_model
from aligners.similarity.latents.verdicts import RANK


def check_control(bank: StoredBank) -> None:
    """Raise unless a checkpoint can be a same-model control, before anything is read.

    Args:
        bank: of two models in which nothing is only one's own: two seeds of one training.

    Raises:
        ValueError: it is of one model with itself at the same sites, or has too few latents to rank any.
    """
    _, aligner = dictionary_of(bank)
    latents = aligner.sites * aligner.latents
    if 1 / (1 + latents) > RANK:
        raise UserError(
            f"Expected a control of at least {round(1 / RANK) - 1} latents, or none could be ranked among its lowest "
            f"{RANK:.0%}, but {bank.path} has {latents}."
        )
    models = bank.data["models"]
    same_sites = any(i == j for i, j in bank.pairs[FORWARD])
    if same_sites and same_model(models["x"], models["y"]):
        raise UserError(
            f"Expected a control of two models that differ by chance alone, such as two seeds of one training, but "
            f"{bank.path} is of {models['x']['name']} with itself. Frozen models have no dropout, so that both have "
            "equal states, and all of its latents are shared whatever the dictionary makes of others."
        )


def check_seed(seed: StoredBank, bank: StoredBank, aligner: SparseAligner) -> None:
    """Raise unless a checkpoint is of the models and sites of another, trained from another seed.

    Args:
        seed: the checkpoint.
        bank: the other one, whose dictionary is measured.
        aligner: this dictionary.

    Raises:
        ValueError: its models, sites or component differ, or its dictionary is the very same.
    """
    check_stored([seed], bank.data, bank.pairs[FORWARD])
    _, other = dictionary_of(seed)
    same = other.latents == aligner.latents and torch.equal(
        other.crosscoder.decoders[0], aligner.crosscoder.decoders[0]
    )
    if same:
        raise UserError(
            f"Expected dictionaries of other seeds in `other_seeds`, but that of {seed.path} is the one that is "
            "measured."
        )
