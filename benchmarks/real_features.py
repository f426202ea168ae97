"""What fine-tuning, another activation function and another model change, latent by latent of a crosscoder.

    python -m benchmarks.real_features X Y --spaces one --rows tokens --site 3 --json FILE

A crosscoder is trained on paired states of X and Y at one site, and examined on held-out texts. What its decoder norms
alone call one model's own (Y's share above .9 or below .1) stands beside what survives latent scaling, permuted rows
and, with --same, a crosscoder of X with itself: X's states with noise of a hundredth of their deviation in each
dimension, other noise for each side, so that nothing is own. "Agree" is the share of the latents that one seed of the
dictionary calls own which have their like in the other seed: a cosine of at least .7 of the owner's decoders.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.similarity.latents.unit_sums import Parts
from aligners.similarity.latents.verdicts import SHARED, verdicts
from benchmarks.crosscoders import (
    PairedRows,
    both_halves,
    crosscoder,
    found_on,
    paired_texts,
    shares,
)
from benchmarks.harness import Figures, parser

NOISE = 0.01
LIKE = 0.7  # cosine


def with_itself(rows: PairedRows, seed: int) -> PairedRows:
    """X's states beside themselves, each side with noise of its own."""
    draw = torch.Generator().manual_seed(seed)
    size = NOISE * rows.x.std(1, keepdim=True)
    sides = []
    for _ in range(2):
        noise = torch.randn(rows.x.shape, generator=draw)
        sides.append(rows.x + size * noise)
    return PairedRows(sides[0], sides[1], rows.text, rows.token)


def agreeing(
    decoders: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], own: Tensor
) -> float:
    """The share of own latents with their like among those of another dictionary.

    Args:
        decoders: (m, d_x) and (m, d_y).
        others: of the other dictionary, likewise.
        own: (m,) verdicts of the first; those below `SHARED` are the number of the owner.
    """
    like = []
    for side in range(2):
        rows = normalize(decoders[side][own == side], dim=1)
        cosines = rows @ normalize(others[side], dim=1).mT
        like.append(cosines.amax(1) >= LIKE)
    return float(torch.cat(like).double().mean())


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("model_x")
    arguments.add_argument("model_y")
    arguments.add_argument("--spaces", choices=["one", "apart"], default="one")
    arguments.add_argument("--rows", default="tokens")
    arguments.add_argument("--site", default="3", help="or a pair, as 3:6")
    arguments.add_argument("--texts", type=int, default=1000)
    arguments.add_argument("--expansion", type=int, default=4)
    arguments.add_argument("--active", type=int, default=16)
    arguments.add_argument("--steps", type=int, default=600)
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    arguments.add_argument("--same", action="store_true", help="X with itself")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    kept = Path(tempfile.mkdtemp())
    data = paired_texts(
        options.model_x,
        options.model_y,
        kept,
        site=options.site,
        texts=options.texts,
        held_out=options.texts // 2,
        rows=options.rows,
    )
    fitting, held_out = both_halves(data)
    figures.add("rows to train on", fitting.x.shape[1])
    figures.add("rows held out", held_out.x.shape[1])
    latents = options.expansion * max(fitting.x.shape[2], fitting.y.shape[2])
    figures.add("latents", latents)

    def learn(rows: PairedRows, seed: int) -> SparseAligner:
        return crosscoder(rows, latents, options.active, options.steps, seed)

    same: list[Parts] = []
    if options.same:
        control = learn(with_itself(fitting, 0), 2)
        alone = found_on(control, with_itself(held_out, 1), options.spaces)
        same.append(alone.examined.parts)
        for key, share in shares(alone, verdicts(alone.examined.parts)).items():
            figures.add(f"X with itself: {key}", share)
    own, decoders = [], []
    for seed in options.seeds:
        aligner = learn(fitting, seed)
        found = found_on(aligner, held_out, options.spaces)
        examined = found.examined
        said = verdicts(examined.parts, same, [examined.permuted])
        for key, share in shares(found, said).items():
            figures.add(f"seed {seed}: {key}", share)
        dictionary = aligner.paired()
        own.append(said.verdict[0])
        decoders.append((dictionary.decoder_x[0], dictionary.decoder_y[0]))
    if len(own) > 1 and bool((own[0] < SHARED).any()):
        figures.add("agree", agreeing(decoders[0], decoders[1], own[0]))
    figures.write(options.json)


if __name__ == "__main__":
    main()
