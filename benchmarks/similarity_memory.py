"""Memory of a comparison of models: what it announces against what it takes.

Each setting is a process of its own, which compares untrained BERTs through the Trainer on the first batches of the
held-out sentences. "used" is the largest resident size less that at the moment of the announcement, when the models are
loaded.
"""

import json
import logging
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import BertModel

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.layers import LayerActivations
from aligners.models.tokenizers import word_pieces
from aligners.similarity.catalogue import DEFAULT
from aligners.similarity.similarity_evaluation import SimilarityEvaluation
from benchmarks.harness import Figures, parser
from benchmarks.parts import bare_trainer, bert_config

SETTINGS: dict[
    str, tuple[int, int, int, bool, bool]
] = {  # models, width, blocks, all measures, controls
    "2 models of 64 x 4": (2, 64, 4, False, False),
    "2 models of 64 x 4, controls": (2, 64, 4, False, True),
    "4 models of 64 x 4, all measures, controls": (4, 64, 4, True, True),
    "2 models of 384 x 12": (2, 384, 12, False, False),
    "2 models of 384 x 12, all measures": (2, 384, 12, True, False),
    "2 models of 384 x 12, controls": (2, 384, 12, False, True),
    "4 models of 384 x 12": (4, 384, 12, False, False),
}
QUICK = [
    "2 models of 64 x 4",
    "2 models of 64 x 4, controls",
    "2 models of 384 x 12",
]  # others take ten minutes
BATCHES = 40  # enough rows to fill every sample


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Watched(SimilarityEvaluation):
    """Notes how large the process is when the memory is announced."""

    def _plan(self) -> None:
        super()._plan()
        self.before = resident()


def compare(
    folder: Path, count: int, width: int, blocks: int, every: bool, controls: bool
) -> None:
    """Compare models, and print what was announced and what was used, in bytes."""
    texts = LayerActivations().texts.fit["text"]
    tokenizer = word_pieces(list(texts), 1500, 128)
    config = bert_config(len(tokenizer), blocks, width, head=32, factor=2)
    for number in range(count):
        torch.manual_seed(number)
        BertModel(config).save_pretrained(folder / str(number))
        tokenizer.save_pretrained(folder / str(number))
    data = LayerActivations(
        [str(folder / str(number)) for number in range(count)],
        attention=every,
        batch_size=32,
    )
    module = Watched("all" if every else list(DEFAULT), controls=controls)
    bare_trainer(limit_test_batches=BATCHES).test(
        module, datamodule=data, verbose=False
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"announced": module.announced, "used": peak - module.before}))


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--settings",
        nargs="+",
        choices=list(SETTINGS),
        default=QUICK,
        metavar="SETTING",
    )
    arguments.add_argument(
        "--inside", type=Path, metavar="FOLDER", help="run one setting in this process"
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if options.inside:
        compare(options.inside, *SETTINGS[options.settings[0]])
        return
    figures = Figures("cpu")
    for name in options.settings:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--inside",
                folder,
                "--threads",
                str(options.threads),
            ]
            done = subprocess.run(
                [*command, "--settings", name],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
        found = json.loads(done.stdout.splitlines()[-1])
        figures.add(f"{name}: announced, MB", found["announced"] / 1e6)
        figures.add(f"{name}: used, MB", found["used"] / 1e6)
        figures.add(
            f"{name}: used / announced", found["used"] / found["announced"], bar=1.2
        )
        figures.write(options.json)


if __name__ == "__main__":
    main()
