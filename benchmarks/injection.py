"""What `evaluate.py inject` takes beside its tails and logits, and beside a loop with plain hooks.

Two models of the same tokenizer, causal language models or classifiers; the maps of the demo from one to the other at
every block, after a step of training each, and the floors beside them. What is timed is everything between two batches
of the command: the states of both models are read, every map is applied and its errors are measured, and every method
is injected at every site.

bare: the tail's blocks from every site and the head, once for every method, and nothing else.

plain hooks: what one would write first. For every method and site the whole of Y runs with its states replaced by a
hook; `cross_entropy` and `argmax` then give its loss and how often it is right. No errors of maps are measured.

The models are the embedded GPTs, of width 64; or those of `--models`, which may be one model twice; or, with `--width`,
two GPTs of random weights, three blocks and GPT-2's 50,257 tokens: `--width 768 --texts 4 --rounds 3`.

On a CPU all times are those of its processors.

memory: the peak of a process that does nothing but one way; of the embedded GPTs alone, because fitting maps of larger
models takes more.
"""

import logging
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.rows.read_rows import PairedBatch, Prepared
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.methods import Method
from aligners.injection.panels import Panel
from aligners.maps.canonical import CCA
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Permutation, Procrustes
from aligners.maps.mlp import MLP
from aligners.models import FrozenModel
from benchmarks.harness import Figures, interleaved, parser, ratio
from benchmarks.parts import bare_trainer

EMBEDDED = ["embedded-gpt:0", "embedded-gpt:1"]
AFTER = ("ln_f", "norm", "pooler")  # what stands between the last block and the head
WEIGHTS = "Random and trained weights of one size mean the same operations, and so about the same time."
WAYS = ("evaluate.py inject", "bare", "plain hooks")
BAR = 2.0
MAPS: dict[str, Any] = {
    **{
        "permutation": Permutation,
        "procrustes": Procrustes,
        "cca": CCA,
        "linear": Linear,
    },
    **{
        "mlp_paper": partial(MLP, skip=False),
        "mlp": MLP,
        "inn_paper": partial(INN, mixing="none", both_ways=False),
    },
    "inn": INN,
}


class Ready(Exception):
    """Everything is set up, and the first batch is there."""


class Stop(pl.Callback):
    """Stops an evaluation before its first batch."""

    def on_test_batch_start(self, *_: Any, **__: Any) -> None:
        """Stop here."""
        raise Ready


class Own(NamedTuple):
    """What Y itself has of a batch: its states at each site, (S, B, T, d), and what each block is given beside them."""

    states: Tensor
    beside: list[tuple[tuple[Any, ...], dict[str, Any]]]


class Material(NamedTuple):
    """An evaluation that is ready to run, its batches on the CPU, and what the bare tails start from.

    Attributes:
        evaluation: its panel holds the maps.
        data: the texts and both models.
        batches: of held-out texts, before their states are read.
        own: of each batch.
    """

    evaluation: InjectionEvaluation
    data: PairedActivations
    batches: list[Prepared]
    own: list[Own]

    @property
    def target(self) -> FrozenModel:
        """Y."""
        return self.data.frozen[1]

    @property
    def panel(self) -> Panel:
        """The one panel of the evaluation."""
        panel: Any = self.evaluation.panels[0]
        return panel


def random_gpts(folder: Path, width: int) -> list[str]:
    """Two GPTs of random weights and GPT-2's vocabulary, with the tokenizer of the embedded ones."""
    x, y = EMBEDDED
    tokenizer: Any = pair_states(x, y).frozen[0].tokenizer
    config = GPT2Config(n_embd=width, n_layer=3, n_head=width // 64, n_positions=128)
    config.pad_token_id = tokenizer.pad_token_id
    for seed in (0, 1):
        torch.manual_seed(seed)
        GPT2LMHeadModel(config).save_pretrained(folder / str(seed))
        tokenizer.save_pretrained(folder / str(seed))
    return [str(folder / "0"), str(folder / "1")]


def material(options: Namespace, folder: Path) -> Material:
    """Fit the maps, and set everything up."""
    models = random_gpts(folder, options.width) if options.width else options.models
    x, y = models
    # the embedded GPTs are trained on all fitting texts
    text = TextSource(
        max_texts=None if models == EMBEDDED else 200, max_held_out=options.texts
    )
    data = pair_states(x, y, text=text, sites=options.sites, batch_size=options.batch)
    fit = Alignment(MAPS)
    quick = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}
    bare_trainer(options.device, **quick).fit(fit, datamodule=data)
    evaluation = InjectionEvaluation([fit.stored()], closed_form=())
    try:
        bare_trainer(options.device, callbacks=[Stop()]).test(
            evaluation, datamodule=data, verbose=False
        )
    except Ready:
        evaluation.to(options.device)
    batches = [
        data.on_before_batch_transfer(batch, 0).to(options.device)
        for batch in data.loader("test")
    ]
    sites = [site for _, site in cast(Panel, evaluation.panels[0]).route.pairs]
    return Material(
        evaluation,
        data,
        batches,
        [own_states(data.frozen[1], batch, sites) for batch in batches],
    )


def own_states(target: FrozenModel, batch: Prepared, sites: Sequence[int]) -> Own:
    """What Y itself has of a batch."""
    beside: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        beside.append((given[1:], named))

    handles = [
        block.register_forward_pre_hook(keep, with_kwargs=True)
        for block in target.blocks
    ]
    with torch.no_grad():
        states = target.front(batch.texts.inputs[1], [*sites, target.depth])[
            : len(sites)
        ]
    for handle in handles:
        handle.remove()
    return Own(torch.stack(states), beside)


def inject(given: Material) -> None:
    """What the command does with every batch."""
    for number, batch in enumerate(given.batches):
        given.evaluation.test_step(given.data.on_after_batch_transfer(batch, 0), number)


def bare_tail(target: FrozenModel, states: Tensor, own: Own, site: int) -> Tensor:
    """Y's logits from its states (B, T, d) at a site on."""
    for block, (given, named) in zip(
        target.blocks[site:], own.beside[site:], strict=True
    ):
        output = block(states, *given, **named)
        states = output if isinstance(output, Tensor) else output[0]
    model: Any = target.model
    for name in AFTER:
        part = getattr(model.base_model, name, None)
        states = states if part is None else part(states)
    return (model.get_output_embeddings() or model.classifier)(states)


def bare(given: Material) -> None:
    """As many tails and logits, and nothing else."""
    for own in given.own:
        for _ in given.panel.methods:
            for place, (_, site) in enumerate(given.panel.route.pairs):
                bare_tail(given.target, own.states[place], own, site)


def plain_hooks(given: Material) -> Tensor:
    """Loss and right answers of every method at every site, (methods, S, 2), summed over the tokens."""
    sums = torch.zeros(
        len(given.panel.methods), len(given.panel.route.pairs), 2, dtype=torch.float64
    )
    for batch in given.batches:
        read = given.data.on_after_batch_transfer(batch, 0)
        for place, method in enumerate(given.panel.methods):
            sums[place] += torch.stack(injected_by_hooks(given, read, method)).cpu()
    return sums


def injected_by_hooks(
    given: Material, read: PairedBatch, method: Method
) -> list[Tensor]:
    """The sums of one method on one batch: for each site loss and right answers, (2,)."""
    inputs, model, sums = read.texts.inputs[1], given.target.model, []
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    part: Any
    if given.target.task == "classification":
        part, asked = slice(None), read.task.targets.answer
    else:
        part, asked = (
            (slice(None), slice(-1)),
            ids[:, 1:].where(real[:, :-1] & real[:, 1:], -100),
        )
    for rows, (_, site) in zip(
        method.map(read.x, read), given.panel.route.pairs, strict=True
    ):
        states = rows.new_zeros(*ids.shape, rows.shape[-1])
        states[real] = rows

        def replace(*passed: Any, states: Tensor = states) -> Any:
            return (
                states if isinstance(passed[-1], Tensor) else (states, *passed[-1][1:])
            )

        handle = given.target.blocks[site - 1].register_forward_hook(replace)
        try:
            logits = model(**inputs).logits[part]
        finally:
            handle.remove()
        loss = nn.functional.cross_entropy(
            logits.flatten(0, -2), asked.flatten(), reduction="sum"
        )
        sums.append(torch.stack([loss, (logits.argmax(-1) == asked).sum()]))
    return sums


def check(given: Material) -> None:
    """Raise unless the command finds what plain hooks find, and the bare tails are Y's."""
    inject(given)
    names, table = given.panel.scores.quantities, given.panel.scores.table
    found = torch.stack(
        [table[names.index(name)].sum(-1) for name in ("loss", "correct")], -1
    ).cpu()
    torch.testing.assert_close(found, plain_hooks(given), rtol=1e-5, atol=1e-5)
    inputs, own = given.batches[0].texts.inputs[1], given.own[0]
    expected = given.target.logits(inputs)
    kept = ... if expected.ndim == 2 else inputs["attention_mask"].bool()
    for place, (_, site) in enumerate(given.panel.route.pairs):
        logits = bare_tail(given.target, own.states[place], own, site)
        torch.testing.assert_close(logits[kept], expected[kept], rtol=1e-4, atol=1e-4)


def ways(given: Material) -> dict[str, Callable[[], object]]:
    """What is compared, by its name."""
    return dict(
        zip(
            WAYS,
            (partial(way, given) for way in (inject, bare, plain_hooks)),
            strict=True,
        )
    )


def peak(run: Callable[[], object], device: str) -> float:
    """Peak memory in MB of a run: of the process on a CPU, of what is allocated on a GPU."""
    run()
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(figures: Figures, sizes: Sequence[str]) -> None:
    """Peak memory of a process for each way. First of all: on Linux a process starts at its parent's peak."""
    for name in WAYS:
        command = [sys.executable, __file__, "--memory-of", name, *sizes]
        printed = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout
        figures.add(f"peak memory, {name}, MB", float(printed.split()[-1]))


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5)
    models = arguments.add_mutually_exclusive_group()
    models.add_argument(
        "--models",
        nargs=2,
        default=EMBEDDED,
        metavar=("X", "Y"),
        help="names or folders",
    )
    models.add_argument(
        "--width", type=int, help="GPTs of random weights of this width"
    )
    arguments.add_argument("--sites", default="blocks", help="as in evaluate.py inject")
    arguments.add_argument("--texts", type=int, default=256, help="held-out texts")
    arguments.add_argument(
        "--batch", type=int, default=128, help="texts in a batch, as the command has it"
    )
    arguments.add_argument(
        "--memory-of",
        choices=WAYS,
        help="print the peak memory of this way, and nothing else",
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    figures = Figures(options.device)
    print(WEIGHTS, flush=True)
    if options.models == EMBEDDED and not options.width and not options.memory_of:
        sizes = ("texts", "batch", "threads", "device")
        memory(
            figures,
            [
                part
                for name in sizes
                for part in (f"--{name}", str(getattr(options, name)))
            ],
        )
    with tempfile.TemporaryDirectory() as folder:
        given = material(options, Path(folder))
    with torch.inference_mode():
        if options.memory_of:
            print(peak(ways(given)[options.memory_of], options.device))
            return
        check(given)
        clock = (
            time.process_time if options.device == "cpu" else time.perf_counter
        )  # whatever else the machine does
        seconds = interleaved(
            ways(given),
            rounds=options.rounds,
            device=options.device,
            warmup=1,
            clock=clock,
        )
    figures.add("width", given.target.width)
    figures.add("blocks", given.target.depth)
    figures.add("texts", sum(len(batch.texts.text) for batch in given.batches))
    figures.add("tokens", sum(len(batch.rows[1]) for batch in given.batches))
    figures.add("methods", len(given.panel.methods))
    figures.add("sites", len(given.panel.route.pairs))
    figures.add_times(seconds)
    figures.add("evaluate.py inject / bare", ratio(seconds, *WAYS[:2]), bar=BAR)
    figures.add(
        "evaluate.py inject / bare, best rounds",
        min(seconds[WAYS[0]]) / min(seconds[WAYS[1]]),
    )
    figures.add("evaluate.py inject / plain hooks", ratio(seconds, WAYS[0], WAYS[2]))
    figures.write(options.json)


if __name__ == "__main__":
    main()
