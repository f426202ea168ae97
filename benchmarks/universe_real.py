"""One space for real models of unequal widths and tokenizers, against the direct map of every pair; and newcomers.

    python -m benchmarks.universe_real REAL --rows mean --json mean.json

REAL is a folder of `benchmarks.real.models`. States of SST-2 sentences after block 6 are read once, in memory. Direct
maps are ridge regressions of every ordered pair, their strength chosen on validation rows: plain, and what a user would
fit. FVU and top 1 (cosine, among all held-out rows drawn) are means over all ordered pairs, and the smallest ratio of a
direction's top 1 to the direct map's. A chain goes from i by way of l to j; its distance from the way straight to j is
taken in the space, relative to its size there. A newcomer is fitted to the space of the others with more and more
texts, and has R² (1 - FVU, mean over both ways and all members) relative to that on all texts.
"""

import time
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aligners.api import retrieval
from aligners.cli.table import quiet
from aligners.datamodules.pairings import universe_states
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.universe.joint import paired_rows
from aligners.fitting.universe.through import TwoLinear
from aligners.fitting.universe.universe import LINEAR, NETWORK, Universe
from aligners.fitting.universe.universe_alignment import Joining, UniverseAlignment
from aligners.maps.linear import Ridge
from aligners.similarity.algebra.moments import moments_of
from benchmarks.harness import Figures, parser

SITE, ROWS, QUERIES = 6, 256, 2000  # block; rows a step; held-out rows of retrieval
TEXTS = (50, 200, 500, 1000, 2000, 5000)  # of newcomers
Splits = dict[
    str, Tensor
]  # split -> states (k, N, d), or the numbers of the rows' texts (N,)


def main() -> None:
    """Read the states once, fit every space and every pair, and print."""
    arguments = parser(__doc__)
    arguments.add_argument("real", type=Path)
    arguments.add_argument("--models", nargs="*", default=["e5", "smollm2", "mpnet"])
    arguments.add_argument("--rows", choices=("mean", "words"), default="mean")
    arguments.add_argument("--texts", type=int, default=None, help="of SST-2's 6,920")
    arguments.add_argument("--shared", type=int, nargs="*", default=[64, 192, 384])
    arguments.add_argument("--steps", type=int, nargs="*", default=[100])
    arguments.add_argument(
        "--newcomers",
        nargs="*",
        default=[],
        help="these models join the others, and nothing else",
    )
    arguments.add_argument(
        "--join",
        action="store_true",
        help="by networks, as `train.py join` does, not by ridges",
    )
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0])
    options = arguments.parse_args()
    quiet()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    splits, texts, widths = states_of(options)
    for newcomer in options.newcomers:
        how = f", {options.steps[0]} steps" if options.join else ""
        number = (
            options.models.index(newcomer),
            options.steps[0] if options.join else None,
        )
        joins(
            figures,
            f"{options.rows}: newcomer {newcomer}{how}",
            splits,
            texts,
            widths,
            *number,
        )
        figures.write(options.json)
    if options.newcomers:
        return
    direct = {
        (i, j): _ridge(splits, i, j, widths)
        for i, j in permutations(range(len(widths)), 2)
    }
    found = {ends: scores(splits, ends, bank, widths) for ends, bank in direct.items()}
    report(figures, f"{options.rows}: direct", found, found)
    figures.write(options.json)
    moments = moments_of(*paired_rows(splits["fit"], len(widths)))
    add_space(
        figures,
        f"{options.rows}: {LINEAR}",
        linear(moments, widths),
        splits,
        widths,
        found,
    )
    figures.write(options.json)
    for shared, seed, steps in product(options.shared, options.seeds, options.steps):
        module = UniverseAlignment(shared=shared, seed=seed)
        space = trained(module, splits["fit"], moments, widths, steps)
        name = f"{options.rows}: {NETWORK}, {shared} shared, {steps} steps, seed {seed}"
        add_space(figures, name, space, splits, widths, found)
        figures.write(options.json)


def states_of(options: Any) -> tuple[Splits, Splits, list[int]]:
    """The states (k, N, d) of the splits, which end in zeros where a model is narrower; texts; the models' widths."""
    data = universe_states(
        [str(options.real / "models" / name) for name in options.models],
        [SITE],
        rows=options.rows,
        held_out_types=0.0,
        batch_size=32,
        text=TextSource(
            str(options.real / "data" / "sst2" / "train.tsv"),
            held_out=str(options.real / "data" / "sst2" / "test.tsv"),
            max_texts=options.texts,
        ),
    )
    data.prepare_data()
    splits: Splits = {}
    texts: Splits = {}
    for name in ("fit", "validation", "test"):
        with torch.no_grad():
            parts = [(batch.x, batch.text) for batch in data.batches(name)]
        states, numbers = (
            torch.cat([x for x, _ in parts], 1),
            torch.cat([text for _, text in parts]),
        )
        order = torch.randperm(
            len(numbers), generator=torch.Generator().manual_seed(0)
        )  # batches are by length
        splits[name], texts[name] = states[:, order], numbers[order]
    return splits, texts, [model.width for model in data.frozen]


def _ridge(splits: Splits, i: int, j: int, widths: list[int]) -> Ridge:
    """The direct map of a pair."""
    fit, validation = (
        moments_of(splits[name][[i], :, : widths[i]], splits[name][[j], :, : widths[j]])
        for name in ("fit", "validation")
    )
    bank = Ridge(1, widths[i], widths[j])
    bank.fit(fit, validation)
    return bank


@torch.no_grad()
def scores(
    splits: Splits, ends: tuple[int, int], bank: Any, widths: list[int]
) -> tuple[float, float]:
    """FVU and top 1 of a map between two models on held-out rows."""
    j = ends[1]
    x, y = (splits["test"][m, :, : widths[m]] for m in ends)
    mapped = bank(x[None])[0]
    mean = splits["fit"][j, :, : widths[j]].mean(0)
    fvu = (mapped - y).square().sum() / (y - mean).square().sum()
    return float(fvu), retrieval(mapped[:QUERIES], y[:QUERIES]).top1


def report(
    figures: Figures,
    name: str,
    found: dict[Any, tuple[float, float]],
    direct: dict[Any, Any],
) -> None:
    """Means over all ordered pairs, and the worst of them beside its direct map."""
    fvu, top1 = (
        sum(values) / len(values) for values in zip(*found.values(), strict=True)
    )
    figures.add(f"{name}, FVU", fvu)
    figures.add(f"{name}, top 1", top1)
    worst = min(found[ends][1] / direct[ends][1] for ends in found)
    figures.add(
        f"{name}, least top 1 of a direction, of the direct map's",
        worst,
        bar=0.98,
        sense=">=",
    )


@torch.no_grad()
def add_space(
    figures: Figures,
    name: str,
    space: Universe,
    splits: Splits,
    widths: list[int],
    direct: dict[Any, Any],
) -> None:
    """All figures of a space."""
    report(
        figures,
        name,
        {ends: scores(splits, ends, space.map(*ends), widths) for ends in direct},
        direct,
    )
    embedded = space.embed(splits["test"])
    off = []
    for i, over, j in permutations(range(len(widths)), 3):
        x = splits["test"][[i], :QUERIES, : widths[i]]
        chain, straight = (space.map(over, j).out_of(part) for part in
                           (space.map(over, j)(space.map(i, over)(x)), space.map(i, j)(x)))  # fmt: skip
        off.append(float((chain - straight).abs().max() / embedded.abs().max()))
    figures.add(f"{name}, chains of three, largest distance", max(off), bar=1e-4)
    held = space.predicted(embedded, 0) - splits["test"]
    total = splits["test"] - splits["fit"].mean(1, keepdim=True)
    for i, share in enumerate(
        (1 - held.square().sum((1, 2)) / total.square().sum((1, 2))).tolist()
    ):
        figures.add(f"{name}, share of the variance held, width {widths[i]}", share)
    figures.add(
        f"{name}, numbers in its file",
        sum(value.numel() for value in space.maps.state_dict().values()),
    )


def linear(moments: Any, widths: list[int]) -> Universe:
    """The best linear universe."""
    space = Universe(
        TwoLinear(len(widths), max(widths), max(widths)), len(widths), widths
    )
    space.fit(moments)
    return space


def trained(
    module: UniverseAlignment,
    states: Tensor,
    moments: Any,
    widths: list[int],
    steps: int,
) -> Universe:
    """A universe trained on rows in memory."""
    space = module.universe(len(widths), widths)
    space.fit(moments)
    before = time.process_time()
    module.train_on_rows(space, states, states, steps, ROWS, module.seed)
    print(f"{steps} steps: {time.process_time() - before:.0f} CPU s", flush=True)
    return space.requires_grad_(False).eval()


def joins(
    figures: Figures,
    name: str,
    splits: Splits,
    texts: Splits,
    widths: list[int],
    newcomer: int,
    steps: int | None,
) -> None:
    """R² of a newcomer to the space of the others at each number of texts: of ridges to MAXVAR, or of networks."""
    others = [m for m in range(len(widths)) if m != newcomer]
    own = [widths[m] for m in others]
    parts: Splits = {split: x[others, :, : max(own)] for split, x in splits.items()}
    moments = moments_of(*paired_rows(parts["fit"], len(own)))
    if steps:
        space = trained(
            UniverseAlignment(shared=min(widths)), parts["fit"], moments, own, steps
        )
    else:
        space = linear(moments, own)
    x = {
        split: states[newcomer, :, : widths[newcomer]]
        for split, states in splits.items()
    }
    with torch.no_grad():
        targets = {
            split: space.embed(states) for split, states in parts.items()
        }  # what each member says of a text
    found = {}
    there_are = len(texts["fit"].unique())
    for number in (*(n for n in TEXTS if n < there_are), there_are):
        first = {}
        for split in ("fit", "validation"):
            rows = torch.isin(texts[split], _drawn(texts[split], number))
            first[split] = (
                x[split][rows].repeat(len(own), 1),
                targets[split][:, rows].flatten(0, 1),
            )
        wide, space_width = x["fit"].shape[-1], targets["fit"].shape[-1]
        if steps:
            there, back = _network(space, wide, *first["fit"], steps)
        else:
            there, back = Ridge(1, wide, space_width), Ridge(1, space_width, wide)
            there.fit(*(moments_of(a[None], b[None]) for a, b in first.values()))
            back.fit(*(moments_of(b[None], a[None]) for a, b in first.values()))
        into, out_of = there(x["test"][None]), targets["test"]
        errors = [_r2(space.maps.inverse(into.expand(len(own), -1, -1))[m, :, : own[m]], parts["test"][m, :, : own[m]])
                  for m in range(len(own))]  # fmt: skip
        errors += [_r2(back(out_of[[m]])[0], x["test"]) for m in range(len(own))]
        found[number] = sum(errors) / len(errors)
    for number, value in found.items():
        figures.add(f"{name}, {number} texts, R²", value)
        bar = 0.95 if number == 500 else None
        figures.add(
            f"{name}, {number} texts, of that on all",
            value / found[there_are],
            bar=bar,
            sense=">=",
        )


def _network(
    space: Universe, width: int, x: Tensor, y: Tensor, steps: int
) -> tuple[Any, Any]:
    """The map of a newcomer into the space, and back, fitted as `train.py join` does."""
    module: Any = Joining()
    module.members, module.stream = (
        space,
        SimpleNamespace(frozen=[SimpleNamespace(width=width)]),
    )
    (newcomer,) = module.made(space.models + 1, width, space.d_y)
    newcomer.aligner.fit(moments_of(x[None], y[None]))
    module.train_on_rows(newcomer.aligner, x[None], y[None], steps, ROWS, module.seed)
    aligner = newcomer.aligner.requires_grad_(False).eval()
    return aligner, aligner.inverse


def _drawn(texts: Tensor, number: int) -> Tensor:
    known = texts.unique()
    return known[
        torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:number]
    ]


def _r2(mapped: Tensor, y: Tensor) -> float:
    return 1 - float((mapped - y).square().sum() / (y - y.mean(0)).square().sum())


if __name__ == "__main__":
    main()
