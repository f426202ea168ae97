"""Memory of a comparison against the number of models, under a fixed limit: up to 25 models x 13 layers x 768.

Each number of models is a process of its own, which runs the evaluation through the Trainer on states that a data
module draws at random: what is measured is what the evaluation keeps and computes, not the reading. Rows are few,
because memory does not depend on them (`benchmarks/similarity.py`). "used" is the largest resident size less that at
the moment of the announcement. A case is a name, the measures, the number of rows and the numbers of models.
"""

import json
import logging
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.batches import BatchOfRows, LengthBatches
from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.tokens.splits import Split
from benchmarks.harness import Figures, parser
from benchmarks.parts import bare_trainer
from benchmarks.similarity_memory import Watched

LAYERS, WIDTH = 13, 768
PER_TEXT, PER_BATCH = 32, 4  # rows of a text, texts of a batch
CASES: dict[str, tuple[list[str], int, list[int]]] = {
    # Moments of every pair with the cheapest measure: the passes, the sums and their memory.
    "cka": (["cka"], 256, [2, 4, 8, 16, 25]),
    # A decomposition of every layer and products with it for every layer pair, and a sample of rows of every model.
    "cka, r2, rsa": (["cka", "r2", "rsa"], 1024, [2, 4]),
}


class RandomBatch(NamedTuple):
    """A batch as `LayerBatch`, without texts."""

    texts: SimpleNamespace
    states: list[Tensor]
    text: Tensor
    token: Tensor
    attention: None = None


class Numbers(Dataset):
    """Gives each batch as its number."""

    def __getitem__(self, rows: BatchOfRows) -> int:
        """Its number."""
        return rows.number


class RandomLayers(LayerActivations):
    """States of any number of models, related to each other, drawn anew whenever they are read."""

    def __init__(self, models: int, rows: int) -> None:
        pl.LightningDataModule.__init__(self)
        self.attention, self._planned, self.texts_read = False, [None], rows // PER_TEXT
        shape = {"width": WIDTH, "depth": LAYERS - 1, "heads": 1, "nbytes": 0}
        self._known = SimpleNamespace(
            models=[
                SimpleNamespace(name=f"random-{m}", **shape) for m in range(models)
            ],
            layers=[list(range(LAYERS)) for _ in range(models)],
            check=SimpleNamespace(flush=lambda: None),
        )

    @property
    def reader(self) -> Any:
        """The models, by their sizes alone."""
        return self._known

    def setup(self, stage: str) -> None:
        """Nothing: there are no texts."""

    def prepare_data(self) -> None:
        """Nothing: no model is made."""

    def loader(self, split: Split, **options: Any) -> DataLoader:
        """Batches of equal size, by their numbers."""
        lengths = [PER_TEXT] * self.texts_read
        return DataLoader(
            Numbers(),
            sampler=LengthBatches(lengths, PER_BATCH, shuffle=False, whole=True),
            batch_size=None,
        )

    def test_dataloader(self) -> list[DataLoader]:
        """A loader for every pass."""
        return [self.loader(split) for split in self.splits]

    def describe(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The number of the batch."""
        return int(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Draw the states that the plan asks for."""
        wanted = self._planned[dataloader_idx] or self.reader.layers
        common = _drawn(1_000_000 + batch)
        states = [
            common[layers] + _drawn(1000 * m + batch)[layers]
            if layers
            else torch.empty(0, common.shape[1], WIDTH)
            for m, layers in enumerate(map(list, wanted))
        ]
        rows = torch.arange(common.shape[1])
        return RandomBatch(
            SimpleNamespace(number=batch),
            states,
            PER_BATCH * batch + rows // PER_TEXT,
            rows % PER_TEXT,
        )


def _drawn(seed: int) -> Tensor:
    shape = (LAYERS, PER_BATCH * PER_TEXT, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compare(models: int, measures: list[str], rows: int, memory: float) -> None:
    """Compare models, and print what was announced and what it took."""
    data, module = (
        RandomLayers(models, rows),
        Watched(measures, products="float32", memory=memory),
    )
    start = time.perf_counter()
    bare_trainer(use_distributed_sampler=False).test(
        module, datamodule=data, verbose=False
    )
    found = {
        "announced": module.announced,
        "used": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        - module.before,
        "passes": len(module.passes),
        "models read": sum(len(each.models) for each in module.passes),
        "seconds": time.perf_counter() - start,
        "values": sum(row["value"] is not None for row in module.rows),
    }
    print(json.dumps(found))


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--memory", type=float, default=4, help="the limit, GB")
    arguments.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES)
    )
    arguments.add_argument(
        "--models",
        type=int,
        nargs="+",
        help="numbers of models; default: those of the case",
    )
    arguments.add_argument(
        "--rows", type=int, help="number of rows; default: those of the case"
    )
    arguments.add_argument(
        "--inside", action="store_true", help="run one case in this process"
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if options.inside:
        measures, rows, _ = CASES[options.cases[0]]
        compare(options.models[0], measures, options.rows or rows, options.memory)
        return
    figures = Figures("cpu")
    for case in options.cases:
        used: list[float] = []
        for models in options.models or CASES[case][2]:
            command = [
                sys.executable,
                __file__,
                "--inside",
                "--cases",
                case,
                "--models",
                str(models),
            ]
            sizes = ["--memory", str(options.memory), "--threads", str(options.threads)]
            sizes += [] if options.rows is None else ["--rows", str(options.rows)]
            done = subprocess.run(
                [*command, *sizes], check=True, stdout=subprocess.PIPE, text=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            used.append(found["used"])
            name = f"{case}, {models} models"
            figures.add(
                f"{name}: announced, GB", found["announced"] / 1e9, bar=options.memory
            )
            figures.add(f"{name}: used, GB", found["used"] / 1e9)
            figures.add(
                f"{name}: used / announced", found["used"] / found["announced"], bar=1.2
            )
            for what in ("passes", "models read", "seconds", "values"):
                figures.add(f"{name}: {what}", found[what])
            figures.write(options.json)
        if len(used) > 2:
            figures.add(
                f"{case}: used, most models / 4 models", used[-1] / used[1], bar=1.1
            )
    figures.write(options.json)


if __name__ == "__main__":
    main()
