"""How much the floor `random_classifier` of `evaluate.py inject` depends on its seed, by the number of its heads.

    python -m benchmarks.random_classifier FOLDER FOLDER --json FILE

Two classifiers of two classes and one tokenizer, of any width; each is Y in one direction. The evaluation runs with the
package's number of heads for two seeds, then once with many heads. Groups of n of these are what n heads would give
with one seed after another. Accuracies are in %; "near" is within five points; the map is Procrustes at the last block.
"""

import logging
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import StoredBank
from aligners.injection.behaviour import DRAWS
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.panels import Panel
from aligners.maps.linear import Procrustes
from benchmarks.harness import Figures, parser
from benchmarks.parts import bare_trainer

FLOOR = "random_classifier"
NUMBERS = (1, 5, 10, 20, 50)  # of heads in a group
NEAR = 5.0  # points


def evaluated(
    options: Namespace,
    data: PairedActivations,
    stored: StoredBank,
    seed: int,
    heads: int,
) -> InjectionEvaluation:
    """What the evaluation finds in both directions with so many heads."""
    DRAWS[FLOOR] = heads
    evaluation = InjectionEvaluation(
        [stored], closed_form=(), both_directions=True, seed=seed
    )
    bare_trainer(options.device).test(evaluation, datamodule=data, verbose=False)
    return evaluation


def accuracies(evaluation: InjectionEvaluation) -> dict[str, Tensor]:
    """The accuracy in % of every head, (heads,), by Y's name."""
    found: dict[str, Tensor] = {}
    for panel in cast(Sequence[Panel], evaluation.panels):
        heads = [place for place, name in enumerate(panel.answers) if name == FLOOR]
        table = panel.whole.compute()
        found[panel.route.target.name] = 100 * (table["correct"] / table["units"])[
            heads, 0
        ].mean(-1)
    return found


def add(figures: Figures, name: str, heads: Tensor, ceiling: float) -> None:
    """Add what single heads find, and groups of them; accuracies in %."""
    figures.add(f"{name}: ceiling", ceiling)
    for what, at in {"the ceiling": ceiling, "its mirror": 100 - ceiling}.items():
        near = ((heads - at).abs() <= NEAR).double().mean().item()
        figures.add(f"{name}: % of heads near {what}", 100 * near)
    for number in NUMBERS:
        groups = heads[: len(heads) // number * number].reshape(-1, number)
        of = f"{name}: mean of {number}"
        figures.add(f"{of}, over seeds", groups.mean().item())
        figures.add(f"{of}, sd over seeds", groups.mean(1).std().item())
        figures.add(
            f"{name}: least of {number}, over seeds", groups.amin(1).mean().item()
        )
        figures.add(
            f"{name}: largest of {number}, over seeds", groups.amax(1).mean().item()
        )


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "models",
        nargs="*",
        default=["embedded:0", "embedded:1"],
        help="names or folders",
    )
    arguments.add_argument("--texts", type=int, default=256, help="held-out texts")
    arguments.add_argument("--heads", type=int, default=1000, help="heads in all")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    text, usual, figures = (
        TextSource(max_held_out=options.texts),
        DRAWS[FLOOR],
        Figures(options.device),
    )
    x, y = options.models
    last = ":".join(str(model.depth) for model in pair_states(x, y).frozen)
    data = pair_states(x, y, text=text, sites=last, batch_size=128)
    fit = Alignment({"procrustes": Procrustes})
    quick = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0}
    bare_trainer(options.device, **quick).fit(fit, datamodule=data)
    names = {
        model.name: f"width {model.width}, {side}"
        for side, model in zip("XY", data.frozen, strict=True)
    }
    figures.add("texts", len(data.split("test")))
    seconds = []
    for seed, heads in ((0, usual), (1, usual), (0, options.heads)):
        started = time.process_time()
        evaluation = evaluated(options, data, fit.stored(), seed, heads)
        seconds.append(time.process_time() - started)
        for row in evaluation.rows if heads == usual else ():
            if row["method"] == FLOOR:
                for end in ("", "_low", "_high"):
                    name = f"{names[row['model_y']]}: reported with seed {seed}, accuracy{end}"
                    figures.add(name, 100 * row[f"accuracy{end}"])
    figures.add(f"CPU seconds, all with {usual} heads", min(seconds[:2]))
    figures.add(
        f"CPU seconds, {usual} heads",
        usual * (seconds[2] - min(seconds[:2])) / (options.heads - usual),
    )
    ceilings = {
        row["model_y"]: 100 * row["accuracy"]
        for row in evaluation.rows
        if row["method"] == "native_y"
    }
    for model, found in accuracies(evaluation).items():
        add(figures, names[model], found, ceilings[model])
    figures.write(options.json)


if __name__ == "__main__":
    main()
