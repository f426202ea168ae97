"""What the measures add to a pass that reads all layers of the two embedded models anyway.

The pass is that of `evaluate.py similarity` over the held-out texts, through the Trainer: once with a module that does
nothing with what is read, once with the default measures, their computation at the end included, and once with those of
them that live on moments. The embedded models are trained first if they are not in the cache.
"""

import logging
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.layers import LayerActivations
from aligners.similarity.catalogue import DEFAULT, catalogue
from aligners.similarity.similarity_evaluation import SimilarityEvaluation
from benchmarks.harness import Figures, interleaved, parser, ratio
from benchmarks.parts import bare_trainer


class Reading(pl.LightningModule):
    """Does nothing with what is read."""

    def test_step(self, batch: object, batch_idx: int) -> None:
        """Nothing."""


def run(data: LayerActivations, module: pl.LightningModule, device: str) -> None:
    """One pass over the held-out texts."""
    bare_trainer(device).test(module, datamodule=data, verbose=False)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--batch", type=int, default=32)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    on_moments = [name for name in DEFAULT if catalogue()[name].family == "moments"]
    data = LayerActivations(batch_size=options.batch)
    measured = SimilarityEvaluation()
    run(data, measured, options.device)
    seconds = interleaved(
        {
            "reading": lambda: run(data, Reading(), options.device),
            "measuring": lambda: run(data, SimilarityEvaluation(), options.device),
            "moments alone": lambda: run(
                data, SimilarityEvaluation(on_moments), options.device
            ),
        },
        rounds=options.rounds,
        device=options.device,
    )
    figures = Figures(options.device)
    figures.add_times(seconds)
    figures.add("rows of a pass", measured.rows[0]["n_rows"])
    figures.add("measuring / reading", ratio(seconds, "measuring", "reading"), bar=1.25)
    figures.add("moments alone / reading", ratio(seconds, "moments alone", "reading"))
    figures.write(options.json)


if __name__ == "__main__":
    main()
