"""Maps between two spaces of vectors, fitted on pairs and chosen on others."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import normalize

from aligners.errors import UserError, check_known
from aligners.fitting.fits import fit_map, seeded
from aligners.maps import INN, MLP, Aligner, Linear, Procrustes, Ridge
from aligners.maps.linear import Affine
from aligners.similarity.algebra.moments import moments_of

MAPS: dict[str, Any] = {
    "procrustes": Procrustes,
    "scaled_procrustes": partial(Procrustes, scale=True),
    "linear": Linear,
    "ridge": Ridge,
    "mlp": MLP,
    "inn": INN,
}
NETWORKS = ("mlp", "inn")
DEFAULT = ("procrustes", "linear", "ridge")
AT_ONCE = 2**14  # rows that are mapped at a time
STEPS = 1500  # of networks
ROWS_A_STEP = 256
RATE = 1e-2  # for up to 64 inputs; less for more: see `learning_rates`


class VectorMap(nn.Module):
    """A fitted map of vectors, as a module that serves: (N, d_x) -> (N, d_y).

    Args:
        name: out of `MAPS`.
        bank: the fitted aligner, of one site.
        normalised: divide each mapped vector by its length, because all vectors of the target have length 1.

    Attributes:
        weight: (d_x, d_y) of y = x W + b; None for networks.
        offset: (d_y,) b.
    """

    weight: torch.Tensor
    offset: torch.Tensor

    def __init__(self, name: str, bank: Aligner, *, normalised: bool) -> None:
        super().__init__()
        self.name = name
        self.normalised = normalised
        self.d_x, self.d_y = bank.d_x, bank.d_y
        self.register_buffer("weight", None)
        self.register_buffer("offset", None)
        self.bank: Aligner | None = None
        if isinstance(bank, Affine):
            weight = bank.weight[0].double()
            shift = bank.mean_x[0, 0].double() @ weight
            self.weight = weight.float()
            self.offset = (bank.mean_y[0, 0].double() - shift).float()
        else:
            self.bank = bank.requires_grad_(False)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, d_x) -> (N, d_y)."""
        if self.bank is not None:
            y = self.bank(x[None])[0]
        else:
            y = x @ self.weight + self.offset
        if self.normalised:
            y = normalize(y, dim=1)
        return y

    def placed(
        self, mean_x: np.ndarray, mean_y: np.ndarray, scale: float = 1.0
    ) -> "VectorMap":
        """Return y = s (x − x̄) W + ȳ with other means, (d_x,) and (d_y,), and a scale s; networks stay as they are."""
        if self.bank is not None:
            return self
        made = copy.copy(self)
        made._buffers = dict(self._buffers)
        made.weight = scale * self.weight
        shift = torch.from_numpy(mean_x).double() @ made.weight.double()
        made.offset = (torch.from_numpy(mean_y).double() - shift).float()
        return made

    @torch.no_grad()
    def mapped(self, vectors: np.ndarray) -> np.ndarray:
        """Map an array (N, d_x) of any floating-point type, a part at a time: (N, d_y) float32."""
        if vectors.ndim != 2 or vectors.shape[1] != self.d_x:
            raise UserError(
                f"Expected vectors of width {self.d_x}, which the map was fitted on, but got {vectors.shape}."
            )
        parts = []
        for start in range(0, len(vectors), AT_ONCE):
            rows = np.array(vectors[start : start + AT_ONCE], np.float32)
            parts.append(self(torch.from_numpy(rows)).numpy())
        return np.concatenate(parts)


@dataclass(frozen=True)
class Pairs:
    """Vectors of the same texts, row by row: (N, d_x) and (N, d_y)."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def at(self, rows: np.ndarray | slice) -> "Pairs":
        """Return some of the pairs."""
        return Pairs(self.x[rows], self.y[rows])

    def turned(self) -> "Pairs":
        """Return y and x."""
        return Pairs(self.y, self.x)

    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean of either side, in float64."""
        return self.x.mean(0, dtype=np.float64), self.y.mean(0, dtype=np.float64)


def together(groups: Sequence[Pairs], *, centred: bool) -> Pairs:
    """Put groups of pairs together, each about its own means if `centred`."""
    x, y = [], []
    for group in groups:
        mean_x, mean_y = group.means() if centred else (0.0, 0.0)
        x.append(group.x - mean_x)
        y.append(group.y - mean_y)
    return Pairs(np.concatenate(x), np.concatenate(y))


def not_possible(name: str, d_x: int, d_y: int, pairs: int) -> str | None:
    """Say why a kind of map cannot be fitted to so many pairs of these widths; None if it can."""
    check_known(MAPS, maps=name)
    bank = MAPS[name](1, d_x, d_y) if name != "inn" or d_x == d_y else None
    if bank is None:
        return f"{name} needs equal widths, and they are {d_x} and {d_y}"
    if pairs < bank.rows_needed:
        return f"{name} needs {bank.rows_needed} pairs at these widths, and there are {pairs}: ridge does with fewer"
    return None


def fit_vectors(
    name: str, pairs: Pairs, validation: Pairs, *, normalised: bool, seed: int = 0
) -> VectorMap:
    """Fit a map from x to y.

    Args:
        name: out of `MAPS`.
        pairs: to fit on.
        validation: for the strength of ridge regression.
        normalised: see `VectorMap`.
        seed: of networks.

    Raises:
        ValueError: there are too few pairs, or the map cannot be fitted to them.
    """
    x, y = _rows(pairs.x), _rows(pairs.y)
    bank = seeded(MAPS[name], seed, 1, x.shape[2], y.shape[2])
    bank = bank.double() if bank.closed_form else bank
    others = moments_of(_rows(validation.x), _rows(validation.y))
    fit_map(name, bank, moments_of(x, y), others, advice="Give more texts.")
    if not bank.closed_form:
        _train(name, bank, x, y, seed)
    return VectorMap(name, bank, normalised=normalised)


def _rows(vectors: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(vectors, np.float32))[None]


def _train(
    name: str, bank: Aligner, x: torch.Tensor, y: torch.Tensor, seed: int
) -> None:
    from aligners.fitting.alignment import Alignment

    optimizer = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0)
    like = Alignment(optimizer=optimizer)
    rows = min(ROWS_A_STEP, x.shape[1])
    diverged = like.train_on_rows(bank, x, y, STEPS, rows, seed)
    if diverged.any():
        raise UserError(
            f"Expected training to converge, but {name} diverged. Leave it out of `maps`."
        )


def names_of(maps: Sequence[str]) -> list[str]:
    """Return the names of maps, each once.

    Raises:
        ValueError: one of them is not known, or there is none.
    """
    check_known(MAPS, maps=list(maps))
    if not maps:
        raise UserError(f"Expected `maps` out of {', '.join(MAPS)}, but got none.")
    return list(dict.fromkeys(maps))
