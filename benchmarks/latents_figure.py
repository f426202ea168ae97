"""Draws what norms say of latents, and what the states say: the picture of docs/shared_latents.md.

    python -m benchmarks.latents_figure docs/figures/concepts/latents.svg

The dictionary is that of known features which `Damaged.by_l1` damages as an L1 penalty does, 15 latents shrunk and 15
split, examined on held-out texts. Each point is a latent: to the right, Y's share in its decoder norms; upwards, the
larger of ν^ε and ν^r, each over its limit, at most 6. Below 1 a latent looks like one model's own. Points are spread
out sideways a little.
"""

import argparse
import sys
from html import escape
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.similarity.latents.examination import examine
from aligners.similarity.latents.planted import Damaged, Plan, plant
from aligners.similarity.latents.verdicts import own_score

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 40, 540, 36, 236
HIGHEST = 6.0
INSET = 22  # of the points from both ends of the axis
SPREAD = 12  # sideways, of latents of equal norms
X_OWN, Y_OWN, BOTH = "#2f80c8", "#d55e00", "#00916a"
STYLE = (
    "<style>svg { color: #24292f } @media (prefers-color-scheme: dark) "
    "{ svg { color: #e6edf3 } }</style>"
)
PLAN = Plan(d_x=64, d_y=64, shared=100, scaled=20, own_x=20, own_y=20, texts=600)


def place(norm: float, score: float) -> tuple[float, float]:
    """Where a latent is drawn; scores are cut at both ends."""
    cut = min(max(score, 0.0), HIGHEST)
    right = LEFT + INSET + norm * (RIGHT - LEFT - 2 * INSET)
    return right, BOTTOM - cut / HIGHEST * (BOTTOM - TOP)


def circle(norm: float, score: float, colour: str) -> str:
    """A latent as it should be."""
    x, y = place(norm, score)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'


def square(norm: float, score: float) -> str:
    """A latent that L1 damaged."""
    x, y = place(norm, score)
    return (
        f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="none" '
        f'stroke="{BOTH}" stroke-width="2"/>'
    )


def words(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """A line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="13" text-anchor="{anchor}" '
        f'fill="currentColor">{escape(text)}</text>'
    )


def line(x: float, y: float, other_x: float, other_y: float, dashes: str = "") -> str:
    """A thin line."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{other_x:g}" y2="{other_y:g}" '
        f'stroke="currentColor" stroke-width="1.5"{dashed}/>'
    )


def frame() -> list[str]:
    """Axes with their names, and the key."""
    _, limit = place(0, 1)
    parts = [
        line(LEFT, TOP, LEFT, BOTTOM),
        line(LEFT, BOTTOM, RIGHT, BOTTOM),
        line(LEFT, limit, RIGHT, limit, "5 4"),
        words(300, limit - 6, "above: the other model has it as well"),
        words(300, limit + 20, "below: one model's own"),
        words(300, BOTTOM + 36, "Y's share in the decoder norms"),
        words(4, 20, "the larger of ν^ε and ν^r, over its limit", "start"),
    ]
    for number in range(0, 7, 2):
        _, y = place(0, number)
        parts.append(words(LEFT - 8, y + 4, str(number), "end"))
    for share, name in (
        (0.0, "0: X alone"),
        (0.5, "½: both alike"),
        (1.0, "1: Y alone"),
    ):
        x, _ = place(share, 0)
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        aside = (share - 0.5) * 2 * INSET
        parts.append(words(x + aside, BOTTOM + 18, name, anchor))
    return parts


def key(y: float) -> list[str]:
    """What the colours and shapes are."""
    parts = []
    entries = (("X's own", X_OWN), ("Y's own", Y_OWN), ("shared", BOTH))
    x = LEFT + 5.0
    for name, colour in entries:
        parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{colour}"/>')
        parts.append(words(x + 10, y + 4, name, "start"))
        x += 85
    parts.append(
        f'<rect x="{x - 4:g}" y="{y - 4:g}" width="8" height="8" fill="none" '
        f'stroke="{BOTH}" stroke-width="2"/>'
    )
    parts.append(words(x + 10, y + 4, "shared, shrunk or split by L1", "start"))
    return parts


def points(seed: int) -> list[str]:
    """All latents, examined on held-out texts."""
    states = plant(PLAN, seed)
    damaged = Damaged.by_l1(states, shrunk=15, split=15, seed=seed)
    given = damaged.codes, states.x, states.y, states.text
    found = examine(damaged.dictionary, *given, "one")
    scores = own_score(found.parts)[0].nan_to_num(0.0).tolist()
    hurt = (damaged.shrunk | damaged.split).tolist()
    owners = states.owner[damaged.feature].tolist()
    colours = {0: X_OWN, 1: Y_OWN, -1: BOTH}
    parts, above = [], []
    aside = torch.rand(len(scores), generator=torch.Generator().manual_seed(seed))
    norms = found.norm[0] + (aside - 0.5) * 2 * SPREAD / (RIGHT - LEFT)
    for norm, score, is_hurt, owner in zip(
        norms.tolist(), scores, hurt, owners, strict=True
    ):
        if is_hurt:
            above.append(square(norm, score))
        else:
            parts.append(circle(norm, score, colours[owner]))
    return parts + above


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = [*points(options.seed), *frame(), *key(HEIGHT - 22)]
    opening = (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    )
    lines = [opening, STYLE, *parts, "</svg>"]
    options.file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
