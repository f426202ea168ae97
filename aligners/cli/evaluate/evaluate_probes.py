"""`evaluate.py probe`: whether probes of one model read the mapped states of another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligners.cli.command import Run, command
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.rows.policies import policy_of
from aligners.errors import UserError
from aligners.fitting.saved_bank import StoredBank, load_bank
from aligners.injection.methods import between_two_models
from aligners.probing.across.across_evaluation import ProbesAcrossMaps
from aligners.probing.word_states import check_annotated

SKIPPED = (
    "packed",
    "far_rows",
)  # options of a fit: probes answer for every word of a sentence


@command(
    "probe_across",
    ProbesAcrossMaps,
    data=pair_states,
    skip={"stored", *SKIPPED},
    from_files=[ProbesAcrossMaps],
    defaults={"data.batch_size": 128, "data.text.source": "grammar"},
)
def probe(run: Run, checkpoints: Sequence[Path] = ()) -> None:
    """Train probes on the states of Y, and let them read g(X), for every map g of a checkpoint and at every site.

    What they get right is what the map has kept. It is compared with Y's own states, probes trained on X, and floors.
    Needs annotated sentences and any two models. If maps are of tokens and Y has a head, the few dimensions that a
    narrow probe reads are also swapped through the map, and Y's answers are measured.

    Example: `--checkpoints runs/mine/aligners.safetensors --tasks pos --run runs/across`

    Args:
        run: of the command.
        checkpoints: Files aligners.safetensors of `train.py fit`, of one pair of models. The data options of the first
            are this command's defaults, but for `rows`: maps of tokens are read at the last piece of each word.
    """
    if not checkpoints:
        raise UserError(
            "Expected at least one aligners.safetensors of `train.py fit` in `checkpoints`, but got none."
        )
    stored = [between_two_models(load_bank(path)) for path in checkpoints]
    run.use_data_of(_of_words(stored[0]))
    check_annotated(
        run.made.data, run.options.tasks
    )  # before any model is made or loaded
    run.start()
    evaluation = run.build(ProbesAcrossMaps, stored)
    run.read(evaluation, evaluation.train_probes, "probes_across")


def _of_words(bank: StoredBank) -> dict[str, Any]:
    """Return a checkpoint's data options, changed to read all words, at the positions of tokens if it read tokens."""
    rows = bank.data_config["rows"]
    options = {
        name: value for name, value in bank.data_config.items() if name not in SKIPPED
    }
    return {
        **options,
        "rows": rows if policy_of(rows).types == "words" else "words",
        "held_out_types": 0.0,
    }
