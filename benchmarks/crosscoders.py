"""Crosscoders of two models on rows in memory, for benchmarks: reading, training, examining."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from aligners.api import load
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.models.loading.model_files import save_model
from aligners.models.recipes import EMBEDDED
from aligners.similarity.algebra.moments import moments_of
from aligners.similarity.latents.examination import Examination, Spaces, examine
from aligners.similarity.latents.verdicts import DEAD, SHARED, Verdicts

RATE = 1e-2  # the default of `train.py fit`
ROWS = 512  # a step
FAR_NORM = 0.9  # above which norms alone call a latent Y's own; X's below 1 less that


def as_folder(name: str, folder: Path) -> Path:
    """The folder of a model: an embedded one is written there, as it was trained on the texts that it usually is."""
    if not name.startswith(EMBEDDED):
        return Path(name)
    model = load(name)
    tokenizer: Any = model.tokenizer
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model.model, tokenizer)
    return folder


class PairedRows(NamedTuple):
    """Rows of two models at one site pair.

    Attributes:
        x: (1, N, d_x); y: (1, N, d_y).
        text: (N,) number of each row's text; token: (N,) its token in X's vocabulary.
    """

    x: Tensor
    y: Tensor
    text: Tensor
    token: Tensor

    @classmethod
    def read(cls, data: PairedActivations, split: Any) -> Self:
        """Read a split of a data module that is set up, its texts one after another."""
        parts = []
        for batch in data.batches(split, shuffle=False):
            tokens = batch.texts.inputs[0]["input_ids"].flatten()
            parts.append((batch.x, batch.y, batch.text, tokens[batch.rows.index]))
        x, y, text, token = zip(*parts, strict=True)
        texts = torch.cat(text)
        order = texts.argsort(stable=True)
        every_x = torch.cat(x, 1)[:, order]
        every_y = torch.cat(y, 1)[:, order]
        return cls(every_x, every_y, texts[order], torch.cat(token)[order])


def paired_texts(
    model_x: str,
    model_y: str,
    folder: Path,
    *,
    site: str,
    texts: int,
    held_out: int,
    rows: str = "tokens",
) -> PairedActivations:
    """The states of two models on the texts of the benchmarks, three tenths of which are for testing.

    Args:
        model_x: name or folder.
        model_y: likewise.
        folder: where embedded models are written.
        site: or a pair, as 3:6.
        texts: to train on, at most.
        held_out: texts, at most.
        rows: what is paired.
    """
    return pair_states(
        str(as_folder(model_x, folder / "x")),
        str(as_folder(model_y, folder / "y")),
        sites=site,
        rows=rows,
        text=TextSource(
            max_texts=texts,
            max_held_out=held_out,
            test_share=0.3,
            validation_share=0.05,
        ),
        held_out_types=0.0,
        max_length=64,
    )


def both_halves(data: PairedActivations) -> tuple[PairedRows, PairedRows]:
    """The rows of the fitting texts, and of the held-out ones."""
    data.prepare_data()
    data.setup("fit")
    fitting = PairedRows.read(data, "fit")
    data.setup("test")
    return fitting, PairedRows.read(data, "test")


def crosscoder(
    rows: PairedRows, latents: int, active: int, steps: int, seed: int
) -> SparseAligner:
    """Train a crosscoder, with the steps of `train.py fit`."""
    torch.manual_seed(seed)
    aligner = SparseAligner(
        1, rows.x.shape[2], rows.y.shape[2], latents=latents, active=active
    )
    aligner.fit(moments_of(rows.x, rows.y))

    def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)

    module = Alignment(optimizer=adam)
    module.train_on_rows(aligner, rows.x, rows.y, steps, ROWS, seed)
    return aligner.eval().requires_grad_(False)


class Found(NamedTuple):
    """A crosscoder on held-out rows.

    Attributes:
        codes: (N, m).
        examined: what both models have of each latent.
        unexplained: FVU, the mean of the models.
    """

    codes: Tensor
    examined: Examination
    unexplained: float


def found_on(aligner: SparseAligner, rows: PairedRows, spaces: Spaces) -> Found:
    """Examine a crosscoder on held-out rows."""
    codes = aligner.codes(rows.x, rows.y)
    examined = examine(aligner.paired(), codes, rows.x, rows.y, rows.text, spaces)
    errors = aligner.reconstruction_errors(rows.x, rows.y)
    return Found(codes[0], examined, float(errors.mean()))


def shares(found: Found, said: Verdicts) -> dict[str, float]:
    """Shares of the live latents by norms alone and by verdicts, and of dead ones among all."""
    verdict = said.verdict[0]
    live = verdict != DEAD
    norm = found.examined.norm[0][live]
    own = (verdict < SHARED)[live]
    far = (norm > FAR_NORM) | (norm < 1 - FAR_NORM)
    counts = said.counts()
    number = int(live.sum())
    return {
        "FVU": found.unexplained,
        "dead, of all": counts["dead"] / len(verdict),
        "live latents": number,
        "X's own by norms": float((norm < 1 - FAR_NORM).sum()) / number,
        "Y's own by norms": float((norm > FAR_NORM).sum()) / number,
        "X's own": counts["x"] / number,
        "Y's own": counts["y"] / number,
        "shared": counts["shared"] / number,
        "undecided": counts["undecided"] / number,
        "own by norms that verdicts keep": float((own & far).sum()),
        "false own, from controls": said.false_own / number,
    }
