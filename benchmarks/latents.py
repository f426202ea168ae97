"""Which latents of known features are called own or shared, by their norms alone and after controls.

States of two models made of known features (`aligners.similarity.latents.planted`), with a dictionary of the true
features into which the artefacts of an L1 penalty are planted: 15 shared features whose decoder of X is 0, and 15 that
are two latents, one for each model. The controls are the permuted rows of the pair, and a dictionary of one model with
itself that has the same artefacts. Sums over seeds. Not a timing.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.similarity.latents.examination import SPACES, Examination, Spaces, examine
from aligners.similarity.latents.planted import Damaged, Plan, Planted, plant
from aligners.similarity.latents.verdicts import SHARED, verdicts
from benchmarks.harness import Figures, parser

ARTEFACTS = 15
PLANS = {
    "64 to 64": Plan(),
    "64 to 64, a rotation": Plan(shared=80, rotated=20),
    "64 to 64, in 6 topics": Plan(topics=6),
    "64 to 96": Plan(d_y=96),
    "256 to 256": Plan(d_x=256, d_y=256, shared=300, active=12),
    "768 to 768": Plan(d_x=768, d_y=768, shared=600, active=24),
}
FAR_NORM = (
    0.9  # relative norm from which a latent counts as Y's alone; as far from 0, X's
)


def examined(
    plan: Plan, spaces: Spaces, seed: int
) -> tuple[Planted, Damaged, Examination]:
    """Plant states, damage their dictionary, and examine it."""
    planted = plant(plan, seed)
    damaged = Damaged.by_l1(planted, ARTEFACTS, ARTEFACTS, seed=seed)
    found = examine(
        damaged.dictionary, damaged.codes, planted.x, planted.y, planted.text, spaces
    )
    return planted, damaged, found


def alike(plan: Plan) -> Plan:
    """The same number of features, all of both models."""
    own = plan.own_x + plan.own_y
    features = plan.shared + plan.rotated + plan.scaled + own
    return plan._replace(
        d_y=plan.d_x, shared=features, rotated=0, scaled=0, own_x=0, own_y=0
    )


def counted(plan: Plan, spaces: Spaces, seed: int) -> dict[str, float]:
    """Numbers of latents of one seed."""
    planted, damaged, found = examined(plan, spaces, seed)
    *_, control = examined(alike(plan), "one", seed + 1000)
    judged = verdicts(found.parts, [control.parts], [found.permuted])
    truth = planted.owner[damaged.feature]
    own = truth >= 0
    verdict = judged.verdict[0]
    by_norm = (found.norm[0] - 0.5).abs() > FAR_NORM - 0.5
    equal = verdicts(control.parts).counts()
    return {
        "own": int(own.sum()),
        "shared": int((~own).sum()),
        "norm_false": int((by_norm & ~own).sum()),
        "norm_own": int(by_norm.sum()),
        "own_found": int((verdict[own] == truth[own]).sum()),
        "false_own": int((verdict[~own] < SHARED).sum()),
        "shared_found": int((verdict[~own] == SHARED).sum()),
        "false_shared": int((verdict[own] == SHARED).sum()),
        "equal": len(control.norm[0]),
        "equal_own": equal["x"] + equal["y"],
    }


def main() -> None:
    """Run the simulation."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--texts", type=int, default=1000)
    arguments.add_argument("--plans", nargs="+", default=[*PLANS], choices=[*PLANS])
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    for name in options.plans:
        plan = PLANS[name]._replace(texts=options.texts)
        for spaces in SPACES:
            if spaces == "one" and plan.d_x != plan.d_y:
                continue
            sums: dict[str, float] = {}
            for seed in range(options.seeds):
                for key, value in counted(plan, spaces, seed).items():
                    sums[key] = sums.get(key, 0) + value
            row = f"{name}, spaces {spaces}"
            called_own = sums["own_found"] + sums["false_own"]
            shares = {
                "false among own by norms": sums["norm_false"] / sums["norm_own"],
                "false among own": sums["false_own"] / max(called_own, 1),
                "own found": sums["own_found"] / sums["own"],
                "shared found": sums["shared_found"] / sums["shared"],
                "own called shared": sums["false_shared"] / sums["own"],
                "own of two equal models": sums["equal_own"] / sums["equal"],
            }
            for key, share in shares.items():
                figures.add(f"{row}: {key}", share)
    figures.write(options.json)


if __name__ == "__main__":
    main()
