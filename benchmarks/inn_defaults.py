"""Which options of training suit the INN at every width, in short and long runs, for tokens and sentence vectors?

    python -m benchmarks.inn_defaults read FOLDER --pair minilm --models X Y --sites 3 3 --kind tokens
    python -m benchmarks.inn_defaults train FOLDER --pair minilm --kind tokens --steps 60 450 --variants default linear
    python -m benchmarks.inn_defaults table FOLDER

`read` keeps the paired rows of two models in FOLDER, once, under a name of the pair. `train` trains variants of the
default INN on them, each with the same rows in the same order, and adds a line for each run to FOLDER/runs.jsonl; what
is there is not run again. `table` prints a Markdown table of these lines, and writes them to `--json`.

FVU is measured on held-out texts. "start" is the untrained map. The penalty is that of injecting every token of
held-out texts into Y, in nats a token of a language model, and a text of a classifier.

Variants: `default`, as `train.py fit` trains it; `earlier`, the default before this table; `linear` and `mlp`; `plain`,
couplings on alternating halves from the identity, under AdamW at 1e-3 throughout; and those of `VARIANTS`, which were
tried beside.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.api.model_injection import inject
from aligners.api.model_states import load
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.splits import Split
from aligners.fitting.alignment import Alignment
from aligners.fitting.map_errors import MapErrors
from aligners.fitting.steps import (
    LEAST_RISE,
    REFERENCE_WIDTH,
    Schedule,
    clip_per_site,
    schedule_factor,
)
from aligners.fitting.training_status import Divergence
from aligners.maps.base import Aligner
from aligners.maps.couplings import TriangularPair
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP
from aligners.maps.starting_maps import JUDGED, scaled_moments, start_error, thinned
from aligners.similarity.algebra.moments import Moments, moments_of
from benchmarks.harness import machine, write_whole

ROWS_A_STEP = {"tokens": 256, "mean": 32}
FULL_RATE_ROWS = 256
TEXTS = 200  # into which states are injected


@dataclass(frozen=True)
class Variant:
    """How an INN is made and trained.

    Attributes:
        couplings: number of couplings.
        hidden: width of their hidden layers, in units of the states' width.
        rate: AdamW's learning rate of a matrix of up to 64 inputs.
        pairs: factor of the rate of triangular matrices.
        last: factor of the rate of the last layers of couplings.
        residual: whether the two last are times the root of the start's error, as far as that is below `full`.
        full: the start's error, there and back together, from which the rate is full.
        rise: fewest steps over which the rate rises.
        rows: whether the rate is in proportion to the rows of a step, if they are fewer than 256; "root": to the root.
        schedule: the course of the rate.
        average: of the weights: over the second half of the steps, or of all, those of step t times t².
        muon: whether triangular matrices take orthogonal steps.
        beta: of Adam's second moments.
    """

    couplings: int = 8
    hidden: float = 1.5
    rate: float = 1e-2
    pairs: float = 1.0
    last: float = 1.0
    residual: bool = False
    full: float = 1.0
    rise: int = LEAST_RISE
    rows: str = "share"
    schedule: Schedule = "one_cycle"
    average: Literal["none", "half", "quadratic"] = "none"
    muon: bool = False
    beta: float = 0.999


EARLIER = Variant()
VARIANTS = {
    "earlier": EARLIER,
    "rate_third": replace(EARLIER, rate=3e-3),
    "pairs_third": replace(EARLIER, pairs=0.3),
    "pairs_tenth": replace(EARLIER, pairs=0.1),
    "last_third": replace(EARLIER, last=0.3),
    "residual": replace(EARLIER, residual=True),
    "residual_half": replace(EARLIER, residual=True, full=0.5),
    "residual_rise_20": replace(EARLIER, residual=True, rise=20),
    "residual_half_rise_300": replace(EARLIER, residual=True, full=0.5, rise=300),
    "rise_300": replace(EARLIER, rise=300),
    "residual_double": replace(EARLIER, residual=True, rate=2e-2),
    "rise_20": replace(EARLIER, rise=20),
    "rows_root": replace(EARLIER, rows="root"),
    "cosine": replace(EARLIER, schedule="cosine"),
    "linear_fall": replace(EARLIER, schedule="linear"),
    "averaged": replace(EARLIER, schedule="constant", average="half"),
    "residual_averaged": replace(
        EARLIER, residual=True, schedule="constant", average="half"
    ),
    "residual_half_averaged": replace(
        EARLIER, residual=True, full=0.5, schedule="constant", average="half"
    ),
    "residual_half_rise_200": replace(EARLIER, residual=True, full=0.5, rise=200),
    "residual_half_muon": replace(EARLIER, residual=True, full=0.5, muon=True),
    "constant_quadratic": replace(
        EARLIER, residual=True, full=0.5, schedule="constant", average="quadratic"
    ),
    "linear_quadratic": replace(
        EARLIER, residual=True, full=0.5, schedule="linear", average="quadratic"
    ),
    "trapezoid": replace(EARLIER, residual=True, full=0.5, schedule="trapezoid"),
    "cosine_quadratic": replace(
        EARLIER, residual=True, full=0.5, schedule="cosine", average="quadratic"
    ),
    "one_cycle_quadratic": replace(
        EARLIER, residual=True, full=0.5, average="quadratic"
    ),
    "four_wide": replace(EARLIER, couplings=4, hidden=3.5),
    "muon": replace(EARLIER, muon=True),
    "beta_99": replace(EARLIER, beta=0.99),
}


@dataclass
class Rows:
    """Paired rows (1, n, d), to fit on and held out, and the texts into which states are injected."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor
    unseen: Tensor
    models: list[str]
    sites: tuple[int, int]
    texts: list[str]
    labels: list[int] | None


def read(options: argparse.Namespace) -> None:
    """Keep the paired rows of two models."""
    # embedded models are trained on all fitting texts: `most` says how many rows are read
    text = TextSource(options.source, max_held_out=options.texts)
    model_x, model_y = options.models
    pair = f"{options.sites[0]}:{options.sites[1]}"
    data = pair_states(
        model_x, model_y, text=text, sites=[pair], rows=options.kind, batch_size=64
    )
    parts: dict[str, list[Tensor]] = {}
    limits: dict[Split, int] = {"fit": options.most, "test": options.most // 5}
    for split, most in limits.items():
        count = 0
        for batch in data.paired(split):
            count += batch.x.shape[1]
            unseen = batch.rows.unseen
            if unseen is None:
                unseen = torch.zeros(batch.x.shape[1], dtype=torch.bool)
            for name, part in {
                "x": batch.x[0],
                "y": batch.y[0],
                "unseen": unseen,
            }.items():
                parts.setdefault(f"{split}_{name}", []).append(part.cpu())
            if count >= most:
                break
    whole = {name: torch.cat(part) for name, part in parts.items()}
    held_out = data.texts.test
    labelled = data.frozen[1].task == "classification"
    kept = Rows(
        whole["fit_x"][None],
        whole["fit_y"][None],
        whole["test_x"][None],
        whole["test_y"][None],
        whole["test_unseen"],
        options.models,
        tuple(options.sites),
        list(held_out["text"])[:TEXTS],
        list(held_out["label"])[:TEXTS] if labelled else None,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.save(asdict(kept), place_of(options))
    print(
        place_of(options),
        tuple(kept.x.shape),
        tuple(kept.held_x.shape),
        int(kept.unseen.sum()),
    )


def place_of(options: argparse.Namespace) -> Path:
    """The file of a cell's rows."""
    return Path(options.folder) / f"{options.pair}-{options.kind}.pt"


def rates_of(
    aligner: Aligner, variant: Variant, moments: Moments
) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter and its full learning rate."""
    factor = 1.0
    if variant.residual and isinstance(aligner, INN):
        factor = min(1.0, start_residual(aligner, moments) / variant.full) ** 0.5
    for name, parameter in aligner.named_parameters():
        rate = variant.rate * min(
            1.0, REFERENCE_WIDTH / aligner.fan_in(name, parameter)
        )
        if name.startswith("pairs"):
            rate *= variant.pairs * factor
        elif "conditioner.last" in name:
            rate *= variant.last * factor
        yield parameter, rate


def start_residual(aligner: Aligner, moments: Moments) -> float:
    """The expected error of the start, there and back together, on rows that it was not solved on."""
    fresh = INN(1, aligner.d_x, aligner.d_y, couplings=1)
    solved, judged = thinned(scaled_moments(moments), JUDGED)
    fresh.fit(solved)
    same = torch.eye(aligner.d_x)[None]
    with torch.no_grad():
        start = fresh._map(same) - fresh._map(torch.zeros_like(same))
    return float(start_error(start.double(), judged, True))


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal, for stacks of matrices (Jordan et al. 2024)."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step whose entries have about the size of Adam's."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.95).add_(parameter.grad)
                direction = orthogonal(parameter.grad + 0.95 * momentum)
                parameter.sub_(
                    group["lr"] * parameter.shape[-1] ** 0.5 * 0.2 * direction
                )


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly U Vᵀ of a matrix's SVD, by five steps of Newton and Schulz."""
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-12)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def optimizers_of(
    aligner: Aligner, variant: Variant, moments: Moments
) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for triangular matrices if asked for."""
    adam: list[dict[str, Any]] = []
    muon: list[dict[str, Any]] = []
    triangular = {
        id(pair.entries)
        for pair in aligner.modules()
        if isinstance(pair, TriangularPair)
    }
    for parameter, rate in rates_of(aligner, variant, moments):
        group = {"params": [parameter], "lr": rate}
        by_muon = variant.muon and id(parameter) in triangular
        (muon if by_muon else adam).append(group)
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(adam, weight_decay=0.0, betas=(0.9, variant.beta))
    ]
    if muon:
        found.append(Muon(muon))
    return found


def train(
    aligner: Aligner,
    rows: Rows,
    variant: Variant,
    moments: Moments,
    steps: int,
    a_step: int,
    seed: int,
) -> int:
    """Train a map as `Alignment` does, under the options of a variant; returns the step at which it diverged, or 0."""
    optimizers = optimizers_of(aligner, variant, moments)
    share = min(1.0, a_step / FULL_RATE_ROWS) if aligner.bijective else 1.0
    if variant.rows == "root":
        share = share**0.5
    course = schedule_factor(variant.schedule, steps, 0.15, variant.rise)
    divergence, draw = Divergence(), torch.Generator().manual_seed(seed)
    means: list[Tensor] = []
    full = [
        [group["lr"] for group in optimizer.param_groups] for optimizer in optimizers
    ]
    for step in range(1, steps + 1):
        for optimizer, rates in zip(optimizers, full, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share * course(step - 1)
        chosen = torch.randint(rows.x.shape[1], (a_step,), generator=draw)
        aligner.zero_grad(set_to_none=True)
        loss = aligner.loss(rows.x[:, chosen], rows.y[:, chosen])
        loss.sum().backward()
        clip_per_site(aligner, 1.0, partial(divergence.watch, "map", loss, step=step))
        for optimizer in optimizers:
            optimizer.step()
        if variant.average != "none":
            add_to(means, aligner, share_of(variant.average, step, steps))
    if means:
        with torch.no_grad():
            for parameter, mean in zip(aligner.parameters(), means, strict=True):
                parameter.copy_(mean)
    return int(divergence.step["map"])


def share_of(average: str, step: int, steps: int) -> float:
    """The share of a step's weights in the average of all up to it."""
    if average == "half":
        return 1 / max(1, step - steps // 2)
    return 3 / (step + 2)


@torch.no_grad()
def add_to(means: list[Tensor], aligner: Aligner, share: float) -> None:
    """Move averages of weights towards those of a step."""
    weights = [parameter.detach() for parameter in aligner.parameters()]
    if not means:
        means += [weight.clone() for weight in weights]
    for mean, weight in zip(means, weights, strict=True):
        mean.lerp_(weight, share)


def measured(
    aligner: Aligner, rows: Rows, moments: Moments, *, injected: bool
) -> dict[str, float]:
    """FVU forward, back and on unseen types, and the penalty."""
    errors = MapErrors(moments.mean_x, moments.mean_y)
    with torch.no_grad():
        errors.update(aligner, rows.held_x, rows.held_y, rows.unseen)
    found = {name: float(value) for name, value in errors.compute().items()}
    figures = {
        "fvu": found["fvu"],
        "back": found["fvu_inverse"],
        "unseen": found["fvu_unseen"],
    }
    if injected:

        def mapped(x: Tensor) -> Tensor:
            with torch.no_grad():
                return aligner(x[None])[0]

        model_x, model_y = (load(model) for model in rows.models)
        answers = inject(
            model_x, model_y, mapped, rows.texts, site=rows.sites, labels=rows.labels
        )
        figures["penalty"] = float(answers.penalty or 0.0)
    return figures


def made(name: str, width: int) -> tuple[Aligner, Variant]:
    """A map of a variant, and how it is trained."""
    if name == "linear":
        return Linear(1, width, width), EARLIER
    if name in ("mlp", "mlp_earlier"):
        return MLP(1, width, width), EARLIER
    if name == "default":
        return INN(1, width, width), EARLIER
    if name == "plain":
        # the rate is that of every parameter, whatever its width
        return INN(1, width, width, mixing="none"), replace(EARLIER, rate=1e-3)
    variant = VARIANTS[name]
    return INN(
        1,
        width,
        width,
        couplings=variant.couplings,
        hidden=round(variant.hidden * width),
    ), variant


def train_plainly(
    aligner: Aligner, rows: Rows, steps: int, a_step: int, seed: int
) -> None:
    """AdamW at 1e-3 throughout."""
    optimizer, draw = (
        torch.optim.AdamW(aligner.parameters(), lr=1e-3),
        torch.Generator().manual_seed(seed),
    )
    for _ in range(steps):
        chosen = torch.randint(rows.x.shape[1], (a_step,), generator=draw)
        optimizer.zero_grad()
        aligner.loss(rows.x[:, chosen], rows.y[:, chosen]).sum().backward()
        optimizer.step()


def run(options: argparse.Namespace) -> None:
    """Train what is missing."""
    rows = Rows(**torch.load(place_of(options), weights_only=False))
    moments = moments_of(rows.x, rows.y)
    path = options.folder / "runs.jsonl"
    known = {json.dumps(line["run"]) for line in lines_of(path)}
    for steps in options.steps:
        for seed in options.seeds:
            for name in options.variants:
                about = {
                    "pair": options.pair,
                    "kind": options.kind,
                    "steps": steps,
                    "seed": seed,
                    "variant": name,
                }
                if json.dumps(about) in known or (
                    name == "linear" and seed != options.seeds[0]
                ):
                    continue
                figures = one_run(name, rows, moments, steps, seed, options)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"run": about, **figures}) + "\n")
                print(
                    about,
                    {key: round(value, 4) for key, value in figures.items()},
                    flush=True,
                )


def one_run(
    name: str,
    rows: Rows,
    moments: Moments,
    steps: int,
    seed: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    """The figures of one run."""
    torch.manual_seed(seed)
    aligner, variant = made(name, rows.x.shape[-1])
    aligner.fit(moments)
    start = measured(aligner, rows, moments, injected=False)
    began = time.process_time()
    diverged = 0
    if name == "plain":
        train_plainly(aligner, rows, steps, ROWS_A_STEP[options.kind], seed)
    elif name in ("default", "mlp"):
        taken = Alignment().train_on_rows(
            aligner, rows.x, rows.y, steps, ROWS_A_STEP[options.kind], seed
        )
        diverged = int(taken)
    elif name != "linear":
        diverged = train(
            aligner, rows, variant, moments, steps, ROWS_A_STEP[options.kind], seed
        )
    seconds = (time.process_time() - began) / steps
    end = measured(
        aligner, rows, moments, injected=options.kind == "tokens" and options.inject
    )
    starts = {f"start_{key}": value for key, value in start.items()}
    return {**end, **starts, "diverged": diverged, "seconds": seconds}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of runs."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(options: argparse.Namespace) -> None:
    """Print a table: both ways' FVU of each variant over that of the start, and the other figures."""
    lines = lines_of(options.folder / "runs.jsonl")
    if options.json:
        write_whole(
            options.json,
            {"machine": machine("cpu"), "runs": [compact(line) for line in lines]},
        )
    print("| pair | rows | steps | map | start | FVU | back | unseen | penalty |")
    print("|---|---|---|---|---|---|---|---|---|")
    for key, group in grouped(lines).items():
        cells = [spread([line["start_fvu"] for line in group])]
        cells += [
            spread([line.get(name, math.nan) for line in group])
            for name in ("fvu", "back", "unseen", "penalty")
        ]
        print("| " + " | ".join([*map(str, key), *cells]) + " |")


def compact(line: dict[str, Any]) -> dict[str, Any]:
    """A line with four digits of each figure."""
    figures = {
        key: float(f"{value:.4g}") for key, value in line.items() if key != "run"
    }
    return {
        **line["run"],
        **{key: None if math.isnan(value) else value for key, value in figures.items()},
    }


def grouped(lines: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The lines of all seeds of one cell and variant."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        about = line["run"]
        groups.setdefault(
            tuple(about[name] for name in ("pair", "kind", "steps", "variant")), []
        ).append(line)
    return dict(sorted(groups.items(), key=lambda item: item[0][:3]))


def spread(values: list[float]) -> str:
    """The figures of all seeds that have one, without the zero before the point."""
    known = [value for value in values if not math.isnan(value)]
    return ", ".join(f"{value:.4f}".replace("0.", ".", 1) for value in known)


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("what", choices=["read", "train", "table"])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--pair", default="gpts", help="name of the pair of models")
    arguments.add_argument("--kind", default="tokens", choices=list(ROWS_A_STEP))
    arguments.add_argument(
        "--models", nargs=2, default=["embedded-gpt:0", "embedded-gpt:1"]
    )
    arguments.add_argument(
        "--sites", type=int, nargs=2, default=[2, 2], help="of X and of Y"
    )
    arguments.add_argument("--source", default="rotten_tomatoes")
    arguments.add_argument(
        "--texts", type=int, default=300, help="held-out texts at most"
    )
    arguments.add_argument(
        "--most",
        type=int,
        default=40_000,
        help="rows to fit on; a fifth of it to judge by",
    )
    arguments.add_argument("--steps", type=int, nargs="*", default=[60, 450])
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    arguments.add_argument(
        "--variants", nargs="*", default=["linear", "mlp", "plain", "default"]
    )
    arguments.add_argument(
        "--inject", action="store_true", help="measure the penalty, too"
    )
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    {"read": read, "train": run, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
