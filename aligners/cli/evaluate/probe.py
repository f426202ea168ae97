"""`evaluate.py probe`: whether probes of one model read the mapped states of another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from aligners.cli.options import add_data_and_trainer, command_parser, options_of, parse_with_data
from aligners.cli.run import instantiate, start
from aligners.errors import UserError
from aligners.fitting.bank import StoredBank, load_bank
from aligners.injection.methods import between_two_models
from aligners.probing.across.evaluation import ProbesAcrossMaps
from aligners.probing.reading import check_annotated
from aligners.reports.publishing import write_report
from datamodules.pairings import pair_states
from datamodules.rows.policies import policy_of


def parser() -> ArgumentParser:
    """The options."""
    made = command_parser(
        "probe_across",
        "Train probes on the states of Y, and let them read g(X), for every map g of a checkpoint and at every site: "
        "what they get right is what the map has kept. Beside it stand Y's own states, probes that are trained on X, "
        "and floors. It needs annotated sentences and any two models. Where maps are of tokens and Y has a head, the "
        "few dimensions that a narrow probe reads are also swapped through the map, and Y's answers measured.",
    )
    made.add_argument(
        "--checkpoints", type=list[Path], required=True,
        help="Files aligners.ckpt of `train.py fit`, of one pair of models. The data options of the first are this "
        "command's defaults, but for `rows`: maps of tokens are read at the last piece of each word.",
    )  # fmt: skip
    made.add_class_arguments(ProbesAcrossMaps, None, skip={"stored"}, sub_configs=True)
    add_data_and_trainer(made, pair_states, batch_size=128, skip={"packed"})
    made.set_defaults({"data.text.source": "grammar"})
    return made


def run(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Train probes, measure maps, and report."""
    options = parser.parse_args(words)
    if not options.checkpoints:
        raise UserError("Expected `checkpoints` to name at least one aligners.ckpt of `train.py fit`, but got none.")
    stored = [between_two_models(load_bank(path)) for path in options.checkpoints]
    options = parse_with_data(parser, words, _of_words(stored[0]))
    made = instantiate(parser, options)
    check_annotated(made.data, options.tasks)  # before any model is made or loaded
    begun = start("probe_across", parser, options, made)
    evaluation = ProbesAcrossMaps(stored, **options_of(ProbesAcrossMaps, begun.made))
    trainer = begun.trainer()
    trainer.test(evaluation, datamodule=begun.made.data, verbose=False)  # reads
    evaluation.train_probes()
    write_report(evaluation, "probes_across", begun.folder, trainer)


def _of_words(bank: StoredBank) -> dict[str, Any]:
    """The data options of a checkpoint, but that all words are read, where they stand as tokens if tokens were."""
    rows = bank.data_config["rows"]
    kept = {name: value for name, value in bank.data_config.items() if name != "packed"}
    return {**kept, "rows": rows if policy_of(rows).types == "words" else "words", "held_out_types": 0.0}
