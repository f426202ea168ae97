"""Which latents of trained dictionaries are called own, by their norms alone and after controls, on known features.

States of two models made of known features (`aligners.similarity.latents.planted`), 50 shared, 10 scaled, 20 of each
model alone, of width 32. Crosscoders of 192 latents are trained on 20,000 rows of 1,000 texts and examined on 500 other
texts, as models of one space. A latent stands for the feature whose strengths correlate most with its codes, at .7 or
more; others do not count. The control is a crosscoder trained on one model twice, with other noise. Sums over seeds.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.fitting.alignment import Alignment
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.similarity.algebra.moments import moments_of
from aligners.similarity.latents.examination import Examination, examine
from aligners.similarity.latents.planted import Plan, plant
from aligners.similarity.latents.verdicts import SHARED, verdicts
from benchmarks.harness import Figures, parser

WIDTH, LATENTS, FITTING = 32, 192, 20_000
PAIR = Plan(d_x=WIDTH, d_y=WIDTH, shared=50, scaled=10, texts=1500, active=4.0)
ONE = PAIR._replace(shared=100, scaled=0, own_x=0, own_y=0)
KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "BatchTopK": (1e-2, {"selection": "batch_topk", "active": 4}),
    "L1": (3e-3, {"selection": "l1", "penalty": 0.1}),
}
FAR_NORM = 0.9
SURE = 0.7


class Learned(NamedTuple):
    """A trained dictionary, examined.

    Attributes:
        found: on held-out texts.
        owner: (m,) the only model that has the latent's feature, −1 for both.
        feature: (m,) which it is; sure: (m,) whether the codes say so.
    """

    found: Examination
    owner: Tensor
    feature: Tensor
    sure: Tensor


def learned(plan: Plan, kind: str, steps: int, seed: int) -> Learned:
    """Train a crosscoder on planted states, and examine it on other texts."""
    planted = plant(plan, seed)
    x = planted.x.float()
    y = planted.y.float()
    aligner = trained(kind, x[:, :FITTING], y[:, :FITTING], steps, seed)

    held_out = slice(FITTING, None)
    x = x[:, held_out]
    y = y[:, held_out]
    codes = aligner.codes(x, y)
    text = planted.text[held_out]
    found = examine(aligner.paired(), codes, x, y, text, "one")
    strengths = planted.codes[0, held_out]
    correlations = _correlations(codes[0].double(), strengths)
    best = correlations.max(1)
    owner = planted.owner[best.indices]
    return Learned(found, owner, best.indices, best.values >= SURE)


def trained(kind: str, x: Tensor, y: Tensor, steps: int, seed: int) -> SparseAligner:
    """Train a crosscoder of one of `KINDS` on states (1, N, WIDTH)."""
    rate, options = KINDS[kind]
    torch.manual_seed(seed)
    aligner = SparseAligner(1, WIDTH, WIDTH, latents=LATENTS, **options)
    aligner.fit(moments_of(x, y))

    def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)

    module = Alignment(optimizer=adam)
    module.train_on_rows(aligner, x, y, steps, 512, seed)
    aligner.eval().requires_grad_(False)
    return aligner


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Correlations of columns; 0 where one is constant."""
    a = a - a.mean(0)
    b = b - b.mean(0)
    lengths = a.norm(dim=0)[:, None] * b.norm(dim=0)
    return a.mT @ b / lengths.where(lengths > 0, torch.inf)


def counted(kind: str, steps: int, seed: int) -> dict[str, float]:
    """Numbers of latents and features of one seed."""
    pair = learned(PAIR, kind, steps, seed)
    control = learned(ONE, kind, steps, seed + 1000).found
    verdict = verdicts(pair.found.parts, [control.parts], [pair.found.permuted]).verdict
    sure = pair.sure
    both = pair.owner == -1
    by_norm = (pair.found.norm[0] - 0.5).abs() > FAR_NORM - 0.5
    by_norm = by_norm & sure
    own = (verdict[0] < SHARED) & sure
    right = own & (verdict[0] == pair.owner)
    shared = (verdict[0] == SHARED) & sure & both
    equal = verdicts(control.parts).counts()
    return {
        "norm_own": int(by_norm.sum()),
        "norm_false": int((by_norm & both).sum()),
        "own": int(own.sum()),
        "own_right": int(right.sum()),
        "own_features": len(pair.feature[right].unique()),
        "shared_features": len(pair.feature[shared].unique()),
        "equal_own": equal["x"] + equal["y"],
        "equal": LATENTS - equal["dead"],
    }


def main() -> None:
    """Run the simulation."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=1500)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    for kind in KINDS:
        sums: dict[str, float] = {}
        for seed in range(options.seeds):
            for key, value in counted(kind, options.steps, seed).items():
                sums[key] = sums.get(key, 0) + value
        own_features = options.seeds * (PAIR.own_x + PAIR.own_y)
        shared_features = options.seeds * (PAIR.shared + PAIR.scaled)
        shares = {
            "false among own by norms": sums["norm_false"] / max(sums["norm_own"], 1),
            "false among own": 1 - sums["own_right"] / max(sums["own"], 1),
            "own features found": sums["own_features"] / own_features,
            "shared features found": sums["shared_features"] / shared_features,
            "own of two equal models": sums["equal_own"] / max(sums["equal"], 1),
        }
        for key, share in shares.items():
            figures.add(f"{kind}: {key}", share)
    figures.write(options.json)


if __name__ == "__main__":
    main()
