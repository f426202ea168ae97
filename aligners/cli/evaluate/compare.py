"""`evaluate.py compare`: what changed between two models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aligners.cli.command import Run, command
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.rows.policies import RowKind
from aligners.errors import UserError, check_known
from aligners.files.atomic import whole_file
from aligners.files.sealed import save_sealed
from aligners.fitting.saved_bank import (
    FORWARD,
    StoredBank,
    load_bank,
    refuse_other_bank,
    refuse_other_models,
)
from aligners.injection.comparing.comparison import MAPS, Comparison
from aligners.injection.latents.stored_dictionary import check_same_rows, dictionary_of
from aligners.injection.methods import between_two_models
from aligners.injection.scoring.task_scores import check_labels, match_heads
from aligners.models.loading.load_models import check_precision
from aligners.progress import hidden, track
from aligners.reports.publishing import write_report


@command(
    "comparison",
    data=pair_states,
    skip={
        "packed",
        "component",
        "special_tokens",
        "held_out_types",
        "store",
        "store_dtype",
        "store_rows",
    },
)
def compare(
    run: Run,
    maps: Sequence[str] = MAPS,
    checkpoints: Sequence[Path] = (),
    latents: Path | None = None,
    most: int = 500,
    costs: int = 100,
    seed: int = 0,
) -> None:
    """Report what changed from one model (model_x, old) to another (model_y, new) after an update.

    The verdict is nothing beyond rounding, only coordinates, or a change from some block on, with the texts that show
    it. It rests on answers, on states at every site, and on weights, each compared with the effect of rounding on the
    old model.

    Example: `--data.model_x embedded-gpt:0 --data.model_y embedded-gpt:1 --run runs/compared`

    Args:
        run: of the command.
        maps: Maps under which states of the old model may agree with those of the new: permutation, rotation, linear.
            With none (`[]`), states are compared unmapped, and few texts suffice.
        checkpoints: Files aligners.safetensors of `train.py fit` between the two, whose maps are measured, too.
        latents: Such a file with a sparse dictionary of both models (`train.py fit --config sparse`): the latents of it
            are named that the change lies in.
        most: Most texts to fit the maps on, and most held-out texts to compare on.
        costs: Number of them on which the old model's states are put into the new one, at 8 sites if there are more.
        seed: Of masks, batches, and the resampling of texts.
    """
    check_known(MAPS, maps=maps)
    stored = [between_two_models(load_bank(path)) for path in checkpoints]
    bank = None if latents is None else load_bank(latents)
    dictionary = None if bank is None else dictionary_of(bank)[1]
    run.start()
    trainer, data = run.trainer(), run.made.data
    check_precision(trainer)
    if trainer.world_size > 1:
        raise UserError(
            f"One process compares models, but `trainer.devices` starts {trainer.world_size}. Set it to 1."
        )
    fitted = _read(data, stored, bank, trainer.strategy.root_device)
    labelled, cautions = _labelled(data)
    old, new = data.frozen
    kind = RowKind(data.rows)
    fit, test = data.without_far("fit", kind), data.without_far("test", kind)
    found = Comparison(
        old,
        new,
        fit,
        test,
        data.texts.test,
        data.reader.sites,
        kind,
        labelled,
        maps,
        fitted,
        costs,
        most,
        data.batch_size,
        seed,
        lambda batches, what: track(batches, what, disable=hidden(trainer)),
        dictionary=dictionary,
        dictionary_pairs=() if bank is None else bank.pairs[FORWARD],
    ).run()
    found.meta.update({**data.describe(), "seed": seed, "cautions": cautions})
    if latents is not None:
        found.meta["latents_of"] = str(latents)
    if found.vectors:
        vectors = {
            f"site_{site}": part.contiguous() for site, part in found.vectors.items()
        }
        with whole_file(run.folder / "directions.safetensors") as unfinished:
            save_sealed(save_file, vectors, unfinished, {})
    write_report(found, "comparison", run.folder, trainer)


def _read(
    data: PairedActivations,
    stored: Sequence[StoredBank],
    latents: StoredBank | None,
    device: torch.device,
) -> dict[str, Any]:
    """Make the data ready on a device, without texts that maps were fitted on; return these maps by name."""
    banks = list(stored) if latents is None else [*stored, latents]
    data.prepare_data()
    data.setup("test")
    data.place_models(device)
    data.leave_out(
        {str(bank.path): bank.fitted for bank in banks if bank.fitted is not None}
    )
    maps: dict[str, Any] = {}
    for bank in stored:
        sites = {FORWARD: data.reader.sites}
        refuse_other_bank(bank, data.describe()["models"], data.component, sites)
        bank.of_each(lambda aligner: aligner.to(device))
        maps |= bank.maps[FORWARD]
    if latents is not None:
        _check_latents(latents, data)
    return maps


def _check_latents(bank: StoredBank, data: PairedActivations) -> None:
    """Raise unless a dictionary is of these models, of rows of this kind, and of sites that are compared."""
    described = data.describe()
    refuse_other_models(bank.data["models"], described["models"], str(bank.path))
    check_same_rows(bank, described)
    pairs = bank.pairs[FORWARD]
    if not set(pairs) <= set(data.reader.sites):
        raise UserError(
            f"Expected `data.sites` to hold those of {bank.path}, {pairs}, but got {list(data.reader.sites)}. Leave "
            "`data.sites` out, or set it to those of the dictionary."
        )
    if bank.data.get("component", "residual") != data.component:
        raise UserError(
            f"Expected `latents` of the residual stream, which is compared, but {bank.path} is of component "
            f"{bank.data['component']!r}."
        )


def _labelled(data: PairedActivations) -> tuple[bool, list[str]]:
    """Tell whether both models are classifiers of the texts' labels, and match their classes; if not, say why."""
    labels = data.split("test").labels
    if labels is None or any(
        model.task != "classification" or model.regression for model in data.frozen
    ):
        return False, []
    try:
        for model in data.frozen:
            check_labels(model, labels, data.text.source)
        match_heads(data, data.frozen)
    except UserError as error:
        return False, [f"The labels of the texts are not used: {error}"]
    return True, []
